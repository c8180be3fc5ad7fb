"""Softmax attention among keys, dense and by stock attention; pairs and biases in all kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from cases.energies import relative_error
from cases.kernels import difference
from implicit_attn.energies import SoftmaxAttention
from implicit_attn.kernels import (
    bisoftmax,
    bisoftmax_hvp,
    covariance_product,
    explain,
    explain_frozen_keys,
    frozen_key_attention,
)

HOLES = torch.tensor([[True, False, True], [False, False, False]])


def state(queries: int, keys: int, width: int = 8, batch: int = 2) -> list[Tensor]:
    """Queries, keys, and cotangents of both results."""
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = [(batch, 2, n, width) for n in (queries, keys, queries)] + [(batch, 2, queries)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (17, 130), (300, 257)])
@pytest.mark.parametrize(
    ("masked", "dtype", "bound"),
    [(False, torch.float64, 1e-12), (True, torch.float64, 1e-12), (True, torch.float32, 1e-5)],
)
def test_flash_is_the_dense_formula(
    queries: int, keys: int, masked: bool, dtype: torch.dtype, bound: float
) -> None:
    query, key, by_mean, by_lse = state(queries, keys)
    mask = torch.rand(2, keys, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[0] = False
    results = []
    for backend, kind in (("flash", dtype), ("reference", torch.float64)):
        q, k, g, a = (t.to(kind).requires_grad_() for t in (query, key, by_mean, by_lse))
        found = frozen_key_attention(q, k, 0.3, mask=mask if masked else None, backend=backend)
        loss = (found[0] * g).sum() + (found[1] * a).sum()
        results.append([*found, *torch.autograd.grad(loss, (q, k), retain_graph=True)])
        results[-1] += torch.autograd.grad(found[0], q, g)
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == dtype and difference(ours, theirs.detach()) <= bound


def along_tokens(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def shared(tensor: Tensor) -> Tensor:
    return tensor[..., :1].expand(tensor.shape)


@pytest.mark.parametrize(
    ("layout", "strided"), [(along_tokens, "query"), (shared, "key"), (shared, "both")]
)
def test_strides_do_not_matter(layout: Callable[[Tensor], Tensor], strided: str) -> None:
    query, key, g, _ = state(130, 130)
    query = query if strided == "key" else layout(query)
    key = key if strided == "query" else layout(key)
    results = []
    for backend in ("flash", "reference"):
        q, k = (t.detach().requires_grad_() for t in (query, key))
        assert (q.stride(), k.stride()) == (query.stride(), key.stride())
        mean, lse = frozen_key_attention(q, k, 0.3, backend=backend)
        once = torch.autograd.grad(mean, (q, k), g, retain_graph=True)
        first = torch.autograd.grad(mean, (q, k), g, create_graph=True)
        second = torch.autograd.grad(first[0], (q, k), g)
        results.append([mean, lse, *once, *first, *second])
    for ours, exact in zip(*results, strict=True):
        assert difference(ours.detach(), exact.detach()) <= 1e-12


@pytest.mark.parametrize(("batch", "queries", "keys", "masked"), [
    (0, 200, 200, False), (2, 0, 9, True), (2, 9, 0, False),
])  # fmt: skip
def test_nothing_to_attend(batch: int, queries: int, keys: int, masked: bool) -> None:
    tensors = state(queries, keys, batch=batch)
    query, key = (t.requires_grad_() for t in tensors[:2])
    mask = torch.ones(batch, keys, dtype=torch.bool) if masked else None
    results = []
    for backend in ("flash", "auto"):
        found = frozen_key_attention(query, key, 0.3, mask=mask, backend=backend)
        first = torch.autograd.grad(found[0], (query, key), tensors[2], create_graph=True)
        second = torch.autograd.grad(first[0].sum(), (query, key), allow_unused=True)
        assert [t.shape for t in first] == [query.shape, key.shape]
        assert not any(t is not None and t.any() for t in (found[0], *first, *second))
        results.append(found)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("mask", [None, HOLES], ids=["full", "holes"])
def test_derivatives(mask: Tensor | None) -> None:
    query, key = (t.requires_grad_() for t in state(3, 3, width=2)[:2])

    def flash(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return frozen_key_attention(query, key, 0.6, mask=mask, backend="flash")

    assert gradcheck(flash, (query, key)) and gradgradcheck(flash, (query, key))
    frozen = key.detach()
    assert gradcheck(lambda q: flash(q, frozen), query)


def test_half_precision_is_accumulated_in_float32() -> None:
    query, key, g, _ = state(80, 90)
    exact = frozen_key_attention(query.requires_grad_(), key, 0.3, backend="reference")
    (pullback,) = torch.autograd.grad(exact[0], query, g)
    rough, narrow = query.detach().bfloat16().requires_grad_(), key.bfloat16()
    try:
        torch.nn.functional.scaled_dot_product_attention(rough, narrow, narrow)
    except RuntimeError as error:  # AMX, which ATEN_CPU_CAPABILITY hides from a part of torch
        pytest.skip(f"torch's own attention: {error}")
    mean, lse = frozen_key_attention(rough, narrow, 0.3, backend="flash")
    assert mean.dtype == torch.bfloat16 and lse.dtype == torch.float32
    (ours,) = torch.autograd.grad(mean, rough, g.bfloat16())
    for found, expected in ((mean, exact[0]), (lse, exact[1]), (ours, pullback)):
        assert difference(found.detach(), expected.detach()) <= 1e-2


# Forward mode itself still scripts its decompositions.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_choice_and_errors() -> None:
    query, key = state(127, 129)[:2]
    assert explain_frozen_keys(query, key, 0.3).backend == "reference"
    longer = state(128, 128)
    assert explain_frozen_keys(longer[0], longer[1], 0.3).backend == "flash"
    calls = [
        (lambda: frozen_key_attention(query, key, 0.3, backend="triton"), "backend"),
        (lambda: frozen_key_attention(query, key[:1], 0.3), "query and key"),
        (lambda: frozen_key_attention(query, key, 0.3, causal=True), "causal"),
        (lambda: frozen_key_attention(query, key, 0.0), "beta"),
        (lambda: frozen_key_attention(query, key, 1.0, mask=HOLES), "mask"),
        (lambda: SoftmaxAttention(8, 2, backend="flash"), "cross"),
        (lambda: SoftmaxAttention(8, 2, cross=True, backend="stock"), "backend"),
    ]
    for call, name in calls:
        with pytest.raises(ValueError, match=name):
            call()
    with pytest.raises(TypeError, match="query"):
        frozen_key_attention(query, key.float(), 0.3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, query)
        assert forward_ad.unpack_dual(frozen_key_attention(dual, key, 0.3)[0]).tangent is not None
        with pytest.raises(NotImplementedError):
            frozen_key_attention(dual, key, 0.3, backend="flash")


B, H, N, P, BETA = 2, 2, 4, 3, 0.7
MASK = torch.tensor([[True, True, False, True], [True] * 4])


def tokens_and_pairs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, a vector like them, pairs with an empty row, and biases."""
    generator = torch.Generator().manual_seed(0)
    z, v = torch.randn(2, B, H, N, P, generator=generator, dtype=torch.float64)
    pairs = torch.rand(B, H, N, N, generator=generator) < 0.6
    pairs[:, :, 3] = False
    bias = torch.randn(B, H, N, N, generator=generator, dtype=torch.float64)
    return z, v, pairs, bias


def energy(z: Tensor, pairs: Tensor, bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """``beta^-1 sum_i log sum_j exp(beta z_i.z_j + bias_ij)`` over the allowed pairs of both."""
    allowed = pairs if mask is None else pairs & mask[:, None, None] & mask[:, None, :, None]
    allowed = allowed.tril() if causal else allowed
    sums = ((BETA * z @ z.mT + bias).exp() * allowed).sum(-1)
    return torch.where(sums > 0, sums.clamp_min(1e-300).log(), 0.0).sum() / BETA


@pytest.mark.parametrize(("mask", "causal", "kind"), [
    (None, False, float), (MASK, False, torch.tensor), (MASK, True, float), (None, True, torch.tensor),
])  # fmt: skip
def test_bisoftmax_over_pairs(mask: Tensor | None, causal: bool, kind: Any) -> None:
    z, v, pairs, bias = tokens_and_pairs()
    point = z.clone().requires_grad_()
    value = energy(point, pairs, bias, mask, causal)
    (expected,) = torch.autograd.grad(value, point, create_graph=True)
    (product,) = torch.autograd.grad(expected, point, v)
    beta = BETA if kind is float else torch.tensor(BETA, dtype=torch.float64, requires_grad=True)
    options: Any = {"mask": mask, "causal": causal, "pairs": pairs, "bias": bias}
    gradient, lse = bisoftmax(z, beta, **options)
    assert difference(lse.sum().detach() / BETA, value.detach()) <= 1e-12
    assert difference(gradient.detach(), expected.detach()) <= 1e-12
    for given in (None, lse.detach()):
        found = bisoftmax_hvp(z, v, beta, lse=given, **options).detach()
        assert difference(found, product) <= 1e-12
    assert (lse[:, :, 3] == 0).all()


def test_derivatives_by_tokens_bias_and_temperature() -> None:
    z, v, pairs, bias = tokens_and_pairs()
    beta = torch.tensor(BETA, dtype=torch.float64, requires_grad=True)
    inputs = [t[:1, :1].clone().requires_grad_() for t in (z, bias)]
    few = pairs[:1, :1]

    def both(z: Tensor, bias: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        found = bisoftmax(z, beta, pairs=few, bias=bias)
        return *found, bisoftmax_hvp(z, v[:1, :1], beta, pairs=few, bias=bias)

    assert gradcheck(both, (*inputs, beta)) and gradgradcheck(both, (*inputs, beta))

    def frozen(query: Tensor, key: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return frozen_key_attention(query, key, BETA, pairs=few, bias=bias)

    key = v[:1, :1].clone().requires_grad_()
    assert gradcheck(frozen, (inputs[0], key, inputs[1]))
    assert gradgradcheck(frozen, (inputs[0], key, inputs[1]))


def test_bad_pairs() -> None:
    z, key, pairs, bias = tokens_and_pairs()
    with pytest.raises(TypeError, match="pairs"):
        bisoftmax(z, BETA, pairs=bias)
    with pytest.raises(TypeError, match="bias"):
        bisoftmax_hvp(z, z, BETA, bias=pairs)
    with pytest.raises(ValueError, match="pairs"):
        frozen_key_attention(z, key, BETA, pairs=pairs[0, 0, :3, :3])
    with pytest.raises(ValueError, match="bias"):
        explain(z, BETA, bias=bias[0, 0, 0])


@pytest.mark.parametrize(("given", "causal"), [("none", True), ("both", False), ("pairs", True)])
def test_cotangents_of_masked_tokens_do_not_reach_the_inputs(given: str, causal: bool) -> None:
    """They may be NaN: nothing has to be asked about a token that is not there."""
    z, v, pairs, bias = tokens_and_pairs()
    parts = {"pairs": ("pairs",), "bias": ("bias",), "both": ("pairs", "bias")}.get(given, ())
    bias.requires_grad_()
    options: Any = {"mask": MASK, "causal": causal}
    options |= {name: {"pairs": pairs, "bias": bias}[name] for name in parts}
    inputs = [z.requires_grad_(), *([bias] if "bias" in parts else [])]
    found = []
    for filler in (0.0, float("nan")):
        by_gradient = v.masked_fill(~MASK[:, None, :, None], filler)
        by_lse = v[..., 0].masked_fill(~MASK[:, None], filler)
        results = bisoftmax(z, BETA, **options), bisoftmax_hvp(z, v, BETA, **options)
        outputs = [*results[0], results[1]]
        found.append(torch.autograd.grad(outputs, inputs, [by_gradient, by_lse, by_gradient]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(t.abs().max() > 0 for t in found[0])


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


def covariance(query: Tensor, key: Tensor, vector: Tensor) -> Tensor:
    return covariance_product((query @ key.mT).softmax(-1), key, vector)


def test_it_is_the_sum_over_the_deviations_and_the_tangent_of_attention() -> None:
    query, key, vector = draw()
    weights = (query @ key.mT).softmax(-1)
    expected = by_definition(weights, key, vector)
    assert relative_error(covariance_product(weights, key, vector), expected) <= 1e-12
    known = covariance_product(weights, key, vector, mean=weights @ key)
    assert relative_error(known, expected) <= 1e-12

    def mean(query: Tensor) -> Tensor:
        return (query @ key.mT / TEMPERATURE).softmax(-1) @ key

    tangent: Tensor = torch.autograd.functional.jvp(mean, query, vector)[1]  # type: ignore[assignment]
    found = covariance(query / TEMPERATURE, key, vector)
    assert relative_error(found, TEMPERATURE * tangent) <= 1e-12
    assert (covariance(query, key[:, :, :1], vector) == 0).all()  # one key has none


def test_derivatives_of_the_covariance() -> None:
    inputs = tuple(t[:1, :1].detach().requires_grad_() for t in draw(3, 3, 2))
    assert gradcheck(covariance, inputs) and gradgradcheck(covariance, inputs)


@pytest.mark.parametrize("offset", [1e4])
def test_a_common_offset_of_the_values_costs_no_digits(offset: float) -> None:
    query, key, vector = (t.float() for t in draw())
    values, weights = key + offset, (query @ key.mT).softmax(-1)
    expected = by_definition(weights.double(), values.double(), vector.double())
    found = covariance_product(weights, values, vector)
    assert relative_error(found.double(), expected) <= 1e-5
    known = covariance_product(weights, values, vector, mean=weights @ values)
    assert relative_error(known.double(), expected) <= 1e-6 * max(1.0, offset)  # digits of the mean


def test_mistakes() -> None:
    query, key, vector = draw()
    weights = (query @ key.mT).softmax(-1)
    wrong: list[tuple[Any, Any, Tensor, dict[str, Any], type[Exception], str]] = [
        (weights, key, vector, {"mean": key}, ValueError, "mean"),
        (weights, key, vector[:, :, :2], {}, ValueError, "vector"),
        (weights, key[:, :, :2], vector, {}, ValueError, "values"),
        (weights, None, vector, {}, TypeError, "values"),
        (weights[0], key, vector, {}, ValueError, "weights"),
        ((query, key), key, vector, {}, TypeError, "weights"),
    ]
    for given, values, along, options, error, message in wrong:
        with pytest.raises(error, match=message):
            covariance_product(given, values, along, **options)
