"""Pairs and biases in the kernels: the bi-softmax and attention among frozen keys, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases.kernels import difference
from implicit_attn.kernels import (
    bisoftmax,
    bisoftmax_hvp,
    explain,
    explain_frozen_keys,
    frozen_key_attention,
)
from implicit_attn.kernels.pairs import Pairs
from implicit_attn.kernels.softmax import attend, forces

B, H, N, P, BETA = 2, 2, 4, 3, 0.7
MASK = torch.tensor([[True, True, False, True], [True] * 4])


def state() -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


@pytest.mark.parametrize("mask", [None, MASK], ids=["full", "holes"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_bisoftmax_over_pairs(mask: Tensor | None, causal: bool, kind: Any) -> None:
    z, v, pairs, bias = state()
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
    z, v, pairs, bias = state()
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


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("paired", [False, True])
def test_forces_are_derivatives_of_the_free_energy(elastic: bool, paired: bool) -> None:
    query, key, allowed, bias = state()
    beta = torch.tensor([0.4, 1.1], dtype=torch.float64).view(H, 1, 1)
    pairs = Pairs(allowed, bias) if paired else None

    def total(query: Tensor, key: Tensor) -> Tensor:
        found = attend(query, key, beta, elastic=elastic, pairs=pairs)
        own = found.only(query).square().sum() / 2 if elastic else 0.0
        return own - (found.lse / beta.squeeze(-1)).sum()

    points = [t.clone().requires_grad_() for t in (query, key)]
    expected = torch.autograd.grad(total(*points), points)
    attended = attend(query, key, beta, elastic=elastic, pairs=pairs)
    found = forces(query, key, attended, elastic=elastic)
    for ours, theirs in zip(found, expected, strict=True):
        assert difference(ours, theirs) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accumulated_in_float32(dtype: torch.dtype) -> None:
    z, v, pairs, bias = (t if t.dtype == torch.bool else t.to(dtype) for t in state())
    wide = (z.double(), v.double(), bias.double())
    gradient, lse = bisoftmax(z, BETA, pairs=pairs, bias=bias)
    exact = bisoftmax(wide[0], BETA, pairs=pairs, bias=wide[2])
    assert gradient.dtype == dtype and lse.dtype == torch.float32
    assert difference(lse.double(), exact[1]) <= 1e-5
    assert difference(gradient.double(), exact[0]) <= 2 * torch.finfo(dtype).eps
    product = bisoftmax_hvp(z, v, BETA, pairs=pairs, bias=bias)
    expected = bisoftmax_hvp(wide[0], wide[1], BETA, pairs=pairs, bias=wide[2])
    assert product.dtype == dtype
    assert difference(product.double(), expected) <= 2 * torch.finfo(dtype).eps


def test_the_choice_is_explained() -> None:
    z, key, pairs, bias = state()
    choices: list[dict[str, Any]] = [{"pairs": pairs}, {"bias": bias}, {"pairs": pairs[0, 0]}]
    for options in choices:
        assert explain(z, BETA, **options).backend == "reference"
        assert "pairs" in explain(z, BETA, **options).reason
        assert explain_frozen_keys(z, key, BETA, **options).backend == "reference"
        for refuse in (
            lambda o=options: explain(z, BETA, backend="blocks", **o),
            lambda o=options: bisoftmax(z, BETA, backend="triton", **o),
            lambda o=options: bisoftmax_hvp(z, z, BETA, backend="blocks", **o),
            lambda o=options: frozen_key_attention(z, key, BETA, backend="flash", **o),
        ):
            with pytest.raises(ValueError, match='need backend="auto" or "reference"'):
                refuse()


def test_bad_pairs() -> None:
    z, key, pairs, bias = state()
    with pytest.raises(TypeError, match=r"pairs must be a bool tensor .* got torch.float64"):
        bisoftmax(z, BETA, pairs=bias)
    with pytest.raises(TypeError, match=r"bias must be a floating tensor .* got torch.bool"):
        bisoftmax_hvp(z, z, BETA, bias=pairs)
    with pytest.raises(ValueError, match=r"pairs must have the shape \(4, 4\), .* got \(3, 3\)"):
        frozen_key_attention(z, key, BETA, pairs=pairs[0, 0, :3, :3])
    with pytest.raises(ValueError, match=r"bias must have the shape .* got \(4,\)"):
        explain(z, BETA, bias=bias[0, 0, 0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("given", ["none", "pairs", "bias", "both"])
def test_cotangents_at_masked_tokens_go_no_further(given: str, causal: bool) -> None:
    """They may be NaN: nothing has to be asked about a token that is not there."""
    z, v, pairs, bias = state()
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
