"""Attention to frozen keys by one fused call, pairs and biases, tensors as temperatures, and covariances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from cases.energies import relative_error
from cases.kernels import Allocations, difference
from implicit_attn.energies import AttentionInput, ConditionalAttention, SoftmaxAttention
from implicit_attn.kernels import (
    bisoftmax,
    bisoftmax_hvp,
    covariance_product,
    explain,
    explain_frozen_keys,
    frozen_key_attention,
    fused,
)
from solvers.core.cuda import forced

BETA = 0.4
HOLES = torch.tensor([[True, False, True], [False, False, False]])


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# --- attention to frozen keys -----------------------------------------------------------------------


def problem(
    queries: int, keys: int, given: str = "", dtype: torch.dtype = torch.float64, batch: int = 2
) -> tuple[list[Tensor], dict[str, Any]]:
    """Queries, keys and the cotangents of both results; masks with a row that has no key."""
    generator = torch.Generator().manual_seed(queries + 10 * keys)
    shapes = [(batch, 3, n, 8) for n in (queries, keys, queries)] + [(batch, 3, queries)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    options: dict[str, Any] = {}
    if "mask" in given:
        options["mask"] = torch.rand(batch, keys, generator=generator) < 0.6
        options["mask"][0] = False
    if "pairs" in given:
        options["pairs"] = torch.rand(batch, 3, queries, keys, generator=generator) < 0.6
        options["pairs"][-1, :, 0] = False
    if "bias" in given:
        bias = torch.randn(queries, keys, generator=generator, dtype=torch.float64)
        options["bias"] = bias.to(dtype)
    if "causal" in given:
        options["causal"] = True
    return tensors, options


def values_and_derivatives(
    tensors: list[Tensor], options: dict[str, Any], backend: str
) -> list[Tensor]:
    query, key, by_mean, by_lse = tensors
    inputs: Any = [t.detach().requires_grad_() for t in (query, key)]
    if "bias" in options:
        inputs.append(options["bias"].detach().requires_grad_())
        options = options | {"bias": inputs[-1]}
    query, key = inputs[:2]
    mean, lse = frozen_key_attention(query, key, BETA, backend=backend, **options)
    with torch.no_grad():
        again = frozen_key_attention(query, key, BETA, backend=backend, **options)
    loss = (mean * by_mean).sum()
    alone = torch.autograd.grad(mean, inputs[0], by_mean, retain_graph=True)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    both = torch.autograd.grad(loss + (lse * by_lse).sum(), inputs, create_graph=True)
    second = torch.autograd.grad(both[0], inputs, by_mean)
    return [mean, lse, *again, *alone, *first, *both, *second]


def assert_dense(tensors: list[Tensor], options: dict[str, Any], backend: str = "flash") -> None:
    exact = values_and_derivatives(tensors, options, "reference")
    for ours, theirs in zip(values_and_derivatives(tensors, options, backend), exact, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


GIVEN = ["nothing", "mask", "pairs", "bias", "causal", "mask pairs bias", "mask causal bias"]


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "as on cuda"])
@pytest.mark.parametrize(
    ("given", "queries", "keys"),
    [*((given, 7, 5) for given in GIVEN), ("nothing", 1, 1), ("mask", 17, 130),
     ("mask pairs", 300, 257), (GIVEN[-1], 133, 133)],
)  # fmt: skip
def test_fused_is_dense(cuda: bool, given: str, queries: int, keys: int) -> None:
    keys = queries if "causal" in given else keys
    tensors, options = problem(queries, keys, given)
    if cuda:
        with forced():
            assert explain_frozen_keys(tensors[0], tensors[1], BETA, **options).backend == "flash"
            assert_dense(tensors, options, "auto")
    else:
        assert_dense(tensors, options)


@pytest.mark.parametrize("given", GIVEN)
def test_strips_of_the_log_sum_exp(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SCORES", 2 * 3 * 20 * 4)  # strips of 4 rows
    assert_dense(*problem(20, 20, given))


@pytest.mark.parametrize("given", ["nothing", "mask bias"])
def test_gradcheck(given: str) -> None:
    (query, key, *_), options = problem(3, 4, given)
    inputs = [t[:, :1, :, :2].clone().requires_grad_() for t in (query, key)]

    def both(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return frozen_key_attention(query, key, BETA, backend="flash", **options)

    assert gradcheck(both, inputs) and gradgradcheck(both, inputs)


def along_tokens(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def shared(tensor: Tensor) -> Tensor:
    return tensor[..., :1].expand(tensor.shape)


@pytest.mark.parametrize(
    ("layout", "strided"), [(along_tokens, "query"), (shared, "key"), (shared, "both")]
)
def test_strides_do_not_matter(layout: Callable[[Tensor], Tensor], strided: str) -> None:
    (query, key, *cotangents), options = problem(130, 130)
    query = query if strided == "key" else layout(query)
    key = key if strided == "query" else layout(key)
    assert_dense([query, key, *cotangents], options)


@pytest.mark.parametrize(("batch", "queries", "keys", "given"), [
    (0, 200, 200, ""), (2, 0, 9, "mask"), (2, 9, 0, ""),
])  # fmt: skip
def test_nothing_to_attend(batch: int, queries: int, keys: int, given: str) -> None:
    (query, key, g, _), _ = problem(queries, keys, "", batch=batch)
    options: dict[str, Any] = {"mask": torch.ones(batch, keys) > 0} if given else {}
    query, key = query.requires_grad_(), key.requires_grad_()
    results = []
    for backend in ("flash", "auto"):
        found = frozen_key_attention(query, key, 0.3, backend=backend, **options)
        first = torch.autograd.grad(found[0], (query, key), g, create_graph=True)
        second = torch.autograd.grad(first[0].sum(), (query, key), allow_unused=True)
        assert [t.shape for t in first] == [query.shape, key.shape]
        assert not any(t is not None and t.any() for t in (found[0], *first, *second))
        results.append(found)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reduced_precision(dtype: torch.dtype) -> None:
    (query, key, g, _), options = problem(140, 140, "bias", dtype)
    try:
        torch.nn.functional.scaled_dot_product_attention(query, key, key)
    except RuntimeError as error:  # AMX, which ATEN_CPU_CAPABILITY hides from a part of torch
        pytest.skip(f"torch's own attention: {error}")
    wide = query.double().requires_grad_()
    exact = frozen_key_attention(wide, key.double(), BETA, bias=options["bias"].double())
    (pullback,) = torch.autograd.grad(exact[0], wide, g.double())
    query.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        mean, lse = frozen_key_attention(query, key, BETA, backend="flash", **options)
    assert mean.dtype == dtype and lse.dtype == torch.float32
    assert difference(mean.detach(), exact[0].detach()) <= 4 * torch.finfo(dtype).eps
    assert difference(lse.detach(), exact[1].detach()) <= 1e-5
    (found,) = torch.autograd.grad(mean, query, g)
    assert found.dtype == dtype and difference(found, pullback) <= 8 * torch.finfo(dtype).eps


def test_no_matrix_of_all_pairs_without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SCORES", 2 * 3 * 16 * 512)
    (query, key, g, _), _ = problem(512, 512, "", torch.float32)
    query.requires_grad_()
    key.requires_grad_()
    for need_lse, most in ((False, 2 * 3 * 512 * 8), (True, 2 * 3 * 16 * 512)):
        with Allocations() as seen:
            options: dict[str, Any] = {"need_lse": need_lse, "backend": "flash"}
            mean, lse = frozen_key_attention(query, key, BETA, **options)
            torch.autograd.grad(mean, (query, key), g)
        assert (lse is not None) == need_lse
        assert seen.largest <= most


@pytest.mark.parametrize(("options", "given"), [
    ({}, "mask"), ({"causal": True}, "mask pairs bias"), ({}, "nothing"),
    ({"memory_dim": 5}, "mask pairs bias"),
])  # fmt: skip
def test_conditional_attention(options: dict[str, Any], given: str) -> None:
    torch.manual_seed(0)
    energy = ConditionalAttention(6, 2, **options).double()
    (query, *_), masks = problem(4, 4, given)
    z, x, v = (query[:, i, :, :6].clone() for i in range(3))
    mask, pairs = masks.get("mask"), masks.get("pairs")
    pairs = None if pairs is None else pairs[:, 0]
    memory = query[:, 0, :, :5] if "memory_dim" in options else None
    memory_mask = None if memory is None else mask
    context = AttentionInput(x, pairs, masks.get("bias"), memory, memory_mask)

    def run() -> list[Tensor]:
        state = z.clone().requires_grad_()
        prepared = energy.prepare(context, mask=mask)
        value, gradient = energy.value_and_grad(state, prepared, mask=mask)
        alone = energy.grad(state, prepared, mask=mask)
        product = torch.autograd.grad(alone, state, v, retain_graph=True)[0]
        weights = torch.autograd.grad((gradient * v).sum() + value.sum(), [*energy.parameters()])
        return [value, gradient, alone, product, *weights]

    exact = run()
    with forced():
        found = run()
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11)


def test_choice_and_errors() -> None:
    query, key = problem(127, 129)[0][:2]
    assert explain_frozen_keys(query, key, 0.3).backend == "reference"
    longer = problem(128, 128)[0]
    assert explain_frozen_keys(longer[0], longer[1], 0.3).backend == "flash"
    mistakes: list[tuple[Any, type[Exception], str]] = [
        (lambda: frozen_key_attention(query, key, 0.3, backend="triton"), ValueError, "backend"),
        (lambda: frozen_key_attention(query, key[:1], 0.3), ValueError, "query and key"),
        (lambda: frozen_key_attention(query, key.float(), 0.3), TypeError, "query and key"),
        (lambda: frozen_key_attention(query, key, 0.3, causal=True), ValueError, "causal"),
        (lambda: frozen_key_attention(query, key, 0.0), ValueError, "beta"),
        (lambda: frozen_key_attention(query, key, 1.0, mask=HOLES), ValueError, "mask"),
        (lambda: SoftmaxAttention(8, 2, backend="flash"), ValueError, "cross"),
        (lambda: SoftmaxAttention(8, 2, cross=True, backend="stock"), ValueError, "backend"),
    ]
    for call, error, name in mistakes:
        with pytest.raises(error, match=name):
            call()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, query)
        assert forward_ad.unpack_dual(frozen_key_attention(dual, key, 0.3)[0]).tangent is not None
        with pytest.raises(NotImplementedError, match="backend"):
            frozen_key_attention(dual, key, 0.3, backend="flash")


# --- a tensor as inverse temperature ----------------------------------------------------------------

V, KEY = randn(2, 2, 9, 4, seed=1), randn(2, 2, 7, 4, seed=2)
ENTRIES: dict[str, Callable[..., Any]] = {
    "bisoftmax reference": lambda z, beta: bisoftmax(z, beta, backend="reference"),
    "bisoftmax blocks": lambda z, beta: bisoftmax(z, beta, causal=True, backend="blocks"),
    "hvp reference": lambda z, beta: bisoftmax_hvp(z, V, beta, backend="reference"),
    "hvp blocks": lambda z, beta: bisoftmax_hvp(z, V, beta, backend="blocks"),
    "frozen reference": lambda z, beta: frozen_key_attention(z, KEY, beta, backend="reference"),
    "frozen flash": lambda z, beta: frozen_key_attention(z, KEY, beta, backend="flash"),
}


def flat(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


@pytest.mark.defect("A15")
@pytest.mark.parametrize("name", ENTRIES)
def test_a_tensor_beta_gets_its_gradient(name: str) -> None:
    """One for all heads, and one for each head."""
    z = randn(2, 2, 9, 4).requires_grad_()
    for numbers in ([0.4, 0.4], [0.4, 0.9]):
        beta = torch.tensor(numbers, dtype=torch.float64).view(2, 1, 1)
        beta = (beta[0, 0, 0] if numbers[0] == numbers[1] else beta).clone().requires_grad_()
        assert gradcheck(ENTRIES[name], (z, beta))
        with torch.no_grad():
            outputs = flat(ENTRIES[name](z, beta))
            for head, number in enumerate(numbers):
                for ours, plain in zip(outputs, flat(ENTRIES[name](z, number)), strict=True):
                    torch.testing.assert_close(ours[:, head], plain[:, head])


@pytest.mark.defect("A15")
def test_a_tensor_beta_keeps_the_dtype() -> None:
    z = randn(1, 2, 9, 4).bfloat16()
    gradient, lse = bisoftmax(z, torch.tensor([BETA], requires_grad=True))
    assert gradient.dtype == z.dtype and lse.requires_grad
    assert torch.equal(bisoftmax(z, torch.tensor(0.5))[0], bisoftmax(z, 0.5)[0])


# --- pairs and biases -------------------------------------------------------------------------------

MASK = torch.tensor([[True, True, False, True], [True] * 4])


def tokens_and_pairs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, a vector like them, pairs with an empty row, and biases."""
    generator = torch.Generator().manual_seed(0)
    z, v = torch.randn(2, 2, 2, 4, 3, generator=generator, dtype=torch.float64)
    pairs = torch.rand(2, 2, 4, 4, generator=generator) < 0.6
    pairs[:, :, 3] = False
    bias = torch.randn(2, 2, 4, 4, generator=generator, dtype=torch.float64)
    return z, v, pairs, bias


def energy_of(z: Tensor, pairs: Tensor, bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
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
    value = energy_of(point, pairs, bias, mask, causal)
    (expected,) = torch.autograd.grad(value, point, create_graph=True)
    (product,) = torch.autograd.grad(expected, point, v)
    beta = BETA if kind is float else torch.tensor(BETA, dtype=torch.float64, requires_grad=True)
    options: Any = {"mask": mask, "causal": causal, "pairs": pairs, "bias": bias}
    gradient, lse = bisoftmax(z, beta, **options)
    assert difference(lse.sum().detach() / BETA, value.detach()) <= 1e-12
    assert difference(gradient.detach(), expected.detach()) <= 1e-12
    found = bisoftmax_hvp(z, v, beta, lse=lse.detach(), **options).detach()
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


def test_bad_pairs() -> None:
    z, key, pairs, bias = tokens_and_pairs()
    few = pairs[0, 0, :3, :3]
    mistakes: list[tuple[Any, type[Exception], str]] = [
        (lambda: bisoftmax(z, BETA, pairs=bias), TypeError, "pairs"),
        (lambda: bisoftmax_hvp(z, z, BETA, bias=pairs), TypeError, "bias"),
        (lambda: frozen_key_attention(z, key, BETA, pairs=few), ValueError, "pairs"),
        (lambda: explain(z, BETA, bias=bias[0, 0, 0]), ValueError, "bias"),
        (lambda: bisoftmax(z, BETA, pairs=pairs, backend="blocks"), ValueError, "pairs"),
    ]
    for call, error, name in mistakes:
        with pytest.raises(error, match=name):
            call()


# --- covariances --------------------------------------------------------------------------------------


def draw(queries: int = 5, keys: int = 6, width: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    query, key, vector = (randn(2, 2, n, width, seed=n) for n in (queries, keys, queries))
    return query, key, vector.flip(0)


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
        return (query @ key.mT / 1.7).softmax(-1) @ key

    tangent: Tensor = torch.autograd.functional.jvp(mean, query, vector)[1]  # type: ignore[assignment]
    assert relative_error(covariance(query / 1.7, key, vector), 1.7 * tangent) <= 1e-12
    assert (covariance(query, key[:, :, :1], vector) == 0).all()  # one key has none


def test_derivatives_of_the_covariance() -> None:
    inputs = tuple(t[:1, :1].detach().requires_grad_() for t in draw(3, 3, 2))
    assert gradcheck(covariance, inputs) and gradgradcheck(covariance, inputs)


def test_a_common_offset_of_the_values_costs_no_digits() -> None:
    query, key, vector = (t.float() for t in draw())
    values, weights = key + 1e4, (query @ key.mT).softmax(-1)
    expected = by_definition(weights.double(), values.double(), vector.double())
    found = covariance_product(weights, values, vector)
    assert relative_error(found.double(), expected) <= 1e-5
    known = covariance_product(weights, values, vector, mean=weights @ values)
    assert relative_error(known.double(), expected) <= 1e-2  # digits of the mean


def test_mistakes() -> None:
    query, key, vector = draw()
    weights = (query @ key.mT).softmax(-1)
    wrong: list[tuple[str, Any, type[Exception]]] = [
        ("mean", key, ValueError), ("vector", vector[:, :, :2], ValueError),
        ("values", key[:, :, :2], ValueError), ("values", None, TypeError),
        ("weights", weights[0], ValueError), ("weights", (query, key), TypeError),
    ]  # fmt: skip
    for name, tensor, error in wrong:
        given = {"weights": weights, "values": key, "vector": vector, name: tensor}
        with pytest.raises(error, match=name):
            covariance_product(**given)
