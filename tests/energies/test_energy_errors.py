"""Bad input: an error that names the argument, what came and what was expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cases.energies import FAMILIES, EnergyCase, build, few_energies, tokens
from implicit_attn.energies import (
    BiSoftmaxAttention,
    ClassicalHopfield,
    DenseAssociative,
    Energy,
    Field,
    FunctionEnergy,
    GatedFeedForward,
    Hopfield,
    IdentityLagrangian,
    LinearAttention,
    Quadratic,
    ReLUFeedForward,
    Scaled,
    ScoreAttention,
    SoftmaxAttention,
    SoftmaxFeedForward,
    Sum,
)

Z = torch.zeros(3, 4, 8)
MASK = torch.ones(3, 4, dtype=torch.bool)


def scalar(z: Tensor) -> Tensor:
    return z.square().sum()


def per_token(z: Tensor) -> Tensor:
    return z.square().sum(-1)


def needs_two_more(z: Tensor, x: Tensor, other: Tensor) -> Tensor:
    return z.flatten(1).sum(1)


def self_attention() -> SoftmaxAttention:
    return SoftmaxAttention(8, 2)


def cross_attention() -> SoftmaxAttention:
    return SoftmaxAttention(8, 2, cross=True, context_dim=5)


CONSTRUCTION: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: ScoreAttention(8, 2, norm=1e-6), TypeError, r"norm must be RMSNorm.* got 1e-06"),  # type: ignore[arg-type]
    (lambda: LinearAttention(8, 2, feature_map="exp"), ValueError, r"feature_map .* got 'exp'"),
    (lambda: SoftmaxAttention(8, 2, cross=True, causal=True), ValueError, r"causal needs self"),
    (lambda: GatedFeedForward(8, 4, activation="cosine"), ValueError, r"activation .* got 'cosine"),
    (lambda: SoftmaxFeedForward(8, 4, temperature=2), TypeError, r"temperature"),  # type: ignore[call-arg]
    (lambda: Hopfield(torch.ones(3)), ValueError, r"patterns must have the shape \(M, d\)"),
    (lambda: Hopfield(torch.ones(3, 2).int()), TypeError, r"patterns must be a floating tensor"),
    (lambda: DenseAssociative(torch.ones(3, 2), power=1), ValueError, r"power .* got 1"),
    (lambda: DenseAssociative(torch.ones(3, 2), shift=1.0), ValueError, r"shift needs power='exp'"),
    (
        lambda: ClassicalHopfield(torch.ones(3, 2), bias=torch.ones(3)),
        ValueError,
        r"bias must have the shape \(d,\), d = 2, got \(3,\)",
    ),
    (lambda: Sum([]), ValueError, r"terms must hold at least one energy"),
    (lambda: Sum([scalar]), TypeError, r"an Energy is expected"),  # type: ignore[list-item]
    (lambda: Scaled(Quadratic(), nn.Parameter(torch.ones(2))), ValueError, r"no dimensions"),
    (lambda: Quadratic().weighted(2.0, maximum=1.0), ValueError, r"initial must be below max"),
    (lambda: FunctionEnergy(3), TypeError, r"function must be callable, got 3"),  # type: ignore[arg-type]
    (lambda: FunctionEnergy(needs_two_more), TypeError, r"callable as f\(z\) or"),
    (lambda: FunctionEnergy(lambda: Z), TypeError, r"callable as f\(z\) or"),
]


@pytest.mark.parametrize(("build_it", "error", "message"), CONSTRUCTION)
def test_construction(build_it: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_it()


CALLS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: FunctionEnergy(scalar).grad(Z),
        ValueError,
        r"scalar must return one number .* got a scalar",
    ),
    (lambda: (Quadratic() + FunctionEnergy(scalar))(Z), ValueError, r"got a scalar"),
    (lambda: FunctionEnergy(per_token).grad(Z), ValueError, r"\(3,\), got shape \(3, 4\)"),
    (
        lambda: FunctionEnergy(lambda z: 0.0).grad(Z),  # type: ignore[arg-type, return-value]
        TypeError,
        r"must return a tensor of shape \(B,\), got float",
    ),
    (
        lambda: FunctionEnergy(lambda z: z.flatten(1).sum(1)).grad(Z, mask=MASK),
        ValueError,
        r"takes no mask",
    ),
    (lambda: FunctionEnergy(lambda z: z.sum(1)).grad(3.0), TypeError, r"z must be a floating"),
    (lambda: FunctionEnergy(lambda z: z.sum(1)).grad({}), ValueError, r"at least one tensor"),
    (
        lambda: FunctionEnergy(lambda z: z.flatten(1).sum(1)).hvp(Z, Z[:2]),
        ValueError,
        r"v must be like z, shapes \[\(3, 4, 8\)\], got \[\(2, 4, 8\)\]",
    ),
    (lambda: Energy().grad(Z), NotImplementedError, r"Energy must define forward"),
    (lambda: Quadratic().grad(Z, Z[:2]), ValueError, r"x must have the shape of z"),
    (lambda: Quadratic().grad(Z, {"x": Z}), TypeError, r"got dict; .* \.select\(key\)"),  # type: ignore[arg-type]
    (lambda: Quadratic().grad(Z.int()), TypeError, r"z must be of a floating dtype"),
    (lambda: Quadratic().hvp(Z, Z[0]), ValueError, r"v must be like z"),
    (lambda: Field().grad(Z), TypeError, r"Field: x must be a tensor like z.* got NoneType"),
    (lambda: ReLUFeedForward(7, 3).grad(Z), ValueError, r"7 features \(d\), got shape"),
    (lambda: ReLUFeedForward(8, 3).grad(Z[0], mask=MASK[0]), ValueError, r"mask needs a state"),
    (lambda: BiSoftmaxAttention(8, 2).grad(Z[0]), ValueError, r"shape \(B, N, d\), got \(4, 8\)"),
    (lambda: cross_attention().grad(Z), TypeError, r"x must be a tensor \(B, M, 5\).* NoneType"),
    (lambda: cross_attention().grad(Z, Z), ValueError, r"\(B, M, 5\), got \(3, 4, 8\)"),
    (
        lambda: cross_attention().grad(Z, (torch.zeros(3, 6, 5), MASK)),
        ValueError,
        r"context: mask must have the shape \(B, N\) = \(3, 6\), got \(3, 4\)",
    ),
    (lambda: Quadratic().select("a").grad(Z, {"b": Z}), ValueError, r"x must hold 'a', .*'b'"),
    (lambda: Quadratic().select(2).grad(Z, (Z, Z)), ValueError, r"x must hold 2, it holds 2 parts"),
    (lambda: IdentityLagrangian()(Z.int()), TypeError, r"z must be of a floating dtype"),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_calls(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# A function checks its own mask.
@few_energies(*[name for name in FAMILIES if name != "function"])
def test_bad_masks(case: EnergyCase) -> None:
    energy = build(case)
    z, x = tokens(case)
    good = torch.ones(z.shape[:2], dtype=torch.bool)
    with pytest.raises(TypeError, match=r"mask must be a bool tensor \(B, N\), got torch.float"):
        energy.value_and_grad(z, x, mask=good.float())
    with pytest.raises(ValueError, match=r"mask must have the shape \(B, N\) = \(3, 5\)"):
        energy.value_and_grad(z, x, mask=good[:, :4])
    with pytest.raises(ValueError, match=r"mask must be on cpu like z, got meta"):
        energy.value_and_grad(z, x, mask=good.to("meta"))


def test_input_on_another_device() -> None:
    with pytest.raises(ValueError, match=r"x must be on cpu like z, got meta"):
        Quadratic().grad(Z, Z.to("meta"))
    with pytest.raises(ValueError, match=r"x must be on cpu like the weights, got meta"):
        cross_attention().grad(Z, torch.zeros(3, 6, 5, device="meta"))
