"""The covariance product against its definition, and as the derivative of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from cases.energies import relative_error
from implicit_attn.kernels import covariance_product

TEMPERATURE = 1.7


def draw(queries: int = 5, keys: int = 6, width: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    options = {"generator": generator, "dtype": torch.float64}
    query, vector = torch.randn(2, 2, 2, queries, width, **options)
    return query, torch.randn(2, 2, keys, width, **options), vector


def by_definition(weights: Tensor, values: Tensor, vector: Tensor) -> Tensor:
    """The sum over the deviations ``d_j = v_j - mean``, one after the other."""
    mean = weights @ values
    total = torch.zeros_like(vector)
    for j in range(values.shape[2]):
        deviation = values[:, :, j : j + 1] - mean
        along = (deviation * vector).sum(-1, keepdim=True)
        total = total + weights[..., j : j + 1] * deviation * along
    return total


def test_it_is_the_sum_over_the_deviations() -> None:
    query, key, vector = draw()
    weights = (query @ key.mT).softmax(-1)
    expected = by_definition(weights, key, vector)
    assert relative_error(covariance_product(weights, key, vector), expected) <= 1e-12
    assert relative_error(covariance_product((query, key), key, vector), expected) <= 1e-12
    known = covariance_product(weights, key, vector, mean=weights @ key)
    assert relative_error(known, expected) <= 1e-12


@pytest.mark.parametrize("backend", ["reference", "strips"])
def test_it_is_the_tangent_of_attention_times_the_temperature(backend: str) -> None:
    query, key, vector = draw()

    def mean(query: Tensor) -> Tensor:
        return (query @ key.mT / TEMPERATURE).softmax(-1) @ key

    tangent: Tensor = torch.autograd.functional.jvp(mean, query, vector)[1]  # type: ignore[assignment]
    found = covariance_product((query / TEMPERATURE, key), key, vector, backend=backend, rows=2)
    assert relative_error(found, TEMPERATURE * tangent) <= 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_strips_are_the_dense_formula(causal: bool) -> None:
    query, key, vector = draw(7, 7)
    values = torch.randn(2, 2, 7, 3, generator=torch.Generator().manual_seed(5)).double()
    dense = covariance_product((query, key), values, vector, causal=causal)
    scores = query @ key.mT
    if causal:
        scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    assert relative_error(dense, by_definition(scores.softmax(-1), values, vector)) <= 1e-12
    for rows in (1, 3, 7):
        options = {"causal": causal, "backend": "strips", "rows": rows}
        strips = covariance_product((query, key), values, vector, **options)
        assert relative_error(strips, dense) <= 1e-14


@pytest.mark.parametrize("backend", ["reference", "strips"])
def test_derivatives(backend: str) -> None:
    query, key, vector = (t[:1, :1].detach().requires_grad_() for t in draw(3, 3, 2))

    def product(query: Tensor, key: Tensor, vector: Tensor) -> Tensor:
        options = {"causal": True, "backend": backend, "rows": 2}
        return covariance_product((query, key), key, vector, **options)

    assert gradcheck(product, (query, key, vector))
    assert gradgradcheck(product, (query, key, vector))


def test_third_derivatives_of_strips() -> None:
    query, key, vector = (t[:1, :1].detach() for t in draw(4, 3, 2))
    found = []
    for backend in ("reference", "strips"):
        at = query.clone().requires_grad_()
        value = covariance_product((at, key), key, vector, backend=backend, rows=2).pow(3).sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, at, create_graph=True)
            value = gradient.pow(2).sum()
        found.append(value.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=0.0)


@pytest.mark.parametrize("offset", [10.0, 1e3, 1e4])
def test_a_common_offset_of_the_values_costs_no_digits(offset: float) -> None:
    query, key, vector = (t.float() for t in draw())
    values, weights = key + offset, (query @ key.mT).softmax(-1)
    expected = by_definition(weights.double(), values.double(), vector.double())
    for given in (weights, (query, key)):
        found = covariance_product(given, values, vector)
        assert relative_error(found.double(), expected) <= 1e-5
    known = covariance_product(weights, values, vector, mean=weights @ values)
    assert relative_error(known.double(), expected) <= 1e-6 * max(1.0, offset)  # digits of the mean


def test_it_is_computed_in_the_widest_dtype() -> None:
    query, key, vector = draw()
    weights, vector = (query @ key.mT).softmax(-1), vector.float()
    found = covariance_product(weights, 1e5 + key, vector)
    assert found.dtype == torch.float32
    assert relative_error(found.double(), by_definition(weights, key, vector.double())) <= 1e-6


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("backend", ["reference", "strips"])
def test_transforms_of_functions(backend: str) -> None:
    query, key, vector = (t[:1, :1] for t in draw(4, 3, 2))

    def value(query: Tensor) -> Tensor:
        product = covariance_product((query, key), key, vector, backend=backend, rows=2)
        return product.pow(3).sum()

    at = query.clone().requires_grad_()
    (expected,) = torch.autograd.grad(value(at), at, create_graph=True)
    (second,) = torch.autograd.grad((expected * vector).sum(), at)
    torch.testing.assert_close(torch.func.grad(value)(query), expected.detach())
    hessian = torch.func.hessian(value)(query).reshape(query.numel(), -1)
    torch.testing.assert_close(hessian @ vector.flatten(), second.flatten())
    tangent = torch.func.jvp(value, (query,), (vector,))[1]
    torch.testing.assert_close(tangent, (expected * vector).sum().detach())
    with forward_ad.dual_level():
        moved = value(forward_ad.make_dual(query, vector))
        torch.testing.assert_close(forward_ad.unpack_dual(moved).tangent, tangent)


def test_one_key_has_no_covariance() -> None:
    query, key, vector = draw(keys=1)
    assert (covariance_product((query, key), key, vector) == 0).all()


def test_half_precision_is_accumulated_in_float32() -> None:
    query, key, vector = (t.half() for t in draw())
    found = covariance_product((query, key), key, vector)
    expected = covariance_product((query.double(), key.double()), key.double(), vector.double())
    assert found.dtype == torch.float16
    assert relative_error(found, expected) <= 1e-3


def test_mistakes() -> None:
    query, key, vector = draw()
    weights, pair = (query @ key.mT).softmax(-1), (query, key)
    wrong: list[tuple[Any, Any, Tensor, dict[str, Any], type[Exception], str]] = [
        (weights, key, vector, {"causal": True}, ValueError, "need a pair"),
        (weights, key, vector, {"backend": "strips"}, ValueError, "need a pair"),
        (weights, key, vector, {"backend": "blocks"}, ValueError, "backend must be one of"),
        (weights, key, vector, {"mean": key}, ValueError, "mean must be like vector"),
        (pair, key, vector, {"mean": vector}, ValueError, "mean needs the weights"),
        (pair, key, vector, {"causal": True}, ValueError, "as many keys as queries"),
        (weights, key, vector[:, :, :2], {}, ValueError, "vector must have the shape"),
        (weights, key[:, :, :2], vector, {}, ValueError, "values must have the shape"),
        (weights, None, vector, {}, TypeError, "values must be .* dtype, got NoneType"),
        (weights[0], key, vector, {}, ValueError, "weights must have the shape"),
        ("weights", key, vector, {}, TypeError, "weights must be a tensor or a pair"),
        (("a", "b"), key, vector, {}, TypeError, r"\(query, key\), got \['str', 'str'\]"),
    ]
    for given, values, along, options, error, message in wrong:
        with pytest.raises(error, match=message):
            covariance_product(given, values, along, **options)
