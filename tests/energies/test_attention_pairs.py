"""Pairs that may attend, biases of their scores, no self term: against sums over pairs, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.energies import relative_error
from implicit_attn.energies import (
    AttentionInput,
    BiSoftmaxAttention,
    LinearAttention,
    RowSoftmaxAttention,
    ScoreAttention,
    SoftmaxAttention,
    check_energy,
)

B, N, M, DIM, HEADS = 3, 4, 5, 8, 2
KINDS = {
    "bisoftmax": lambda **o: BiSoftmaxAttention(DIM, HEADS, **o),
    "inner": lambda **o: SoftmaxAttention(DIM, HEADS, **o),
    "elastic": lambda **o: SoftmaxAttention(DIM, HEADS, energy="elastic", **o),
    "cross": lambda **o: SoftmaxAttention(DIM, HEADS, cross=True, **o),
    "cross-elastic": lambda **o: SoftmaxAttention(DIM, HEADS, cross=True, energy="elastic", **o),
}
SELF = ("bisoftmax", "inner", "elastic")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_self = pytest.mark.parametrize("kind", SELF)
SHAPES = {"one": (), "sample": (B,), "head": (B, HEADS)}


def build(kind: str, **options: Any) -> Any:
    torch.manual_seed(3)
    return KINDS[kind](**options).double()


def keys_of(kind: str) -> int:
    return M if "cross" in kind else N


def state(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A state, a vector like it, and a memory."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((B, N, DIM), (B, N, DIM), (B, M, DIM))
    z, v, memory = (torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)
    return z, v, memory


def pattern(kind: str, shape: str) -> tuple[Tensor, Tensor]:
    """Pairs, with a query that has no key, and their biases."""
    generator = torch.Generator().manual_seed(5)
    size = (*SHAPES[shape], N, keys_of(kind))
    pairs = torch.rand(size, generator=generator) < 0.6
    pairs[..., 1, :] = False
    return pairs, torch.randn(size, generator=generator, dtype=torch.float64)


def given(kind: str, memory: Tensor, **parts: Any) -> AttentionInput:
    return AttentionInput(**parts, **({"memory": memory} if "cross" in kind else {}))


def by_pairs(energy: Any, kind: str, z: Tensor, memory: Tensor, terms: Any) -> float:
    """The energy of one sample (N, d) as sums over heads, queries and keys.

    ``terms(head, i, j)`` is the bias of a pair, or None where it may not attend.
    """

    def features(tokens: Tensor, weight: Tensor) -> Tensor:
        y = (tokens @ weight.T).unflatten(-1, (HEADS, -1)).transpose(0, 1)
        return y / (y.square().mean(-1, keepdim=True) + 1.0).sqrt()

    if kind == "bisoftmax":
        query = key = features(z, energy.projection.weight)
    else:
        query = features(z, energy.query.weight)
        key = features(memory if "cross" in kind else z, energy.key.weight)
    beta, total = (DIM / HEADS) ** -0.5, 0.0
    for head, (rows, columns) in enumerate(zip(query, key, strict=True)):
        for i, q in enumerate(rows):
            row = []
            for j, k in enumerate(columns):
                bias = terms(head, i, j)
                score = -(q - k).square().sum() / 2 if "elastic" in kind else q @ k
                row += [] if bias is None else [math.exp(beta * score.item() + bias)]
            total += math.log(sum(row)) / beta if row else 0.0
    return total if kind == "bisoftmax" else -total


@pytest.mark.parametrize("shape", SHAPES)
@each_kind
def test_the_energy_is_the_sum_over_the_allowed_pairs(kind: str, shape: str) -> None:
    energy, (z, _, memory) = build(kind), state()
    pairs, bias = pattern(kind, shape)
    value = energy(z, given(kind, memory, pairs=pairs, pair_bias=bias))
    wide = (B, HEADS, N, keys_of(kind))
    own = {"one": (1, 1), "sample": (B, 1), "head": (B, HEADS)}[shape]
    pairs, bias = (t.view(*own, *wide[2:]).expand(wide) for t in (pairs, bias))
    for sample in range(B):

        def terms(head: int, i: int, j: int, sample: int = sample) -> float | None:
            place = sample, head, i, j
            return bias[place].item() if pairs[place] else None

        expected = by_pairs(energy, kind, z[sample], memory[sample], terms)
        assert value[sample].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@each_kind
def test_derivatives_with_pairs_of_the_input(kind: str, masked: bool) -> None:
    energy, (z, _, memory) = build(kind, bias=True), state()
    pairs, bias = pattern(kind, "head")
    mask = torch.tensor([[True] * N, [True, True, False, True], [False] * N]) if masked else None
    x = given(kind, memory, pairs=pairs, pair_bias=bias)
    if masked and "cross" in kind:
        seen = torch.tensor([[True] * M, [False, True] * 2 + [True], [True] * M])
        x = x._replace(memory_mask=seen)
    check_energy(energy, z, x, mask=mask, tolerance=1e-9, strict=True)
    assert energy.prepare(x, mask=mask) is not x


@each_kind
def test_what_stands_at_excluded_pairs_is_never_used(kind: str) -> None:
    energy, (z, v, memory) = build(kind), state()
    pairs, bias = pattern(kind, "sample")
    bias = bias.requires_grad_()
    found = []
    for filler in (0.0, float("nan"), float("inf")):
        x = given(kind, memory, pairs=pairs, pair_bias=bias.masked_fill(~pairs, filler))
        value, gradient = energy.value_and_grad(z, x)
        of = [bias, *energy.parameters()]
        by = torch.autograd.grad(value.sum() + gradient.square().sum(), of)
        found.append([value, gradient, energy.hvp(z, v, x), *by])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert all(t.isfinite().all() for t in found[0])


@each_self
def test_causal_and_no_self_term_are_patterns(kind: str) -> None:
    z, v, _ = state()
    order = torch.ones(N, N, dtype=torch.bool)
    eye = torch.eye(N, dtype=torch.bool)
    for options, pairs in (
        ({"causal": True}, order.tril()),
        ({"exclude_self": True}, ~eye),
        ({"causal": True, "exclude_self": True}, order.tril(-1)),
    ):
        named, by_input = build(kind, **options), build(kind)
        x = AttentionInput(pairs=pairs)
        for other in ((by_input, x), (named, AttentionInput(pairs=order))):
            energy, form = other
            assert relative_error(energy(z, form), named(z)) <= 1e-12
            assert relative_error(energy.grad(z, form), named.grad(z)) <= 1e-12
            assert relative_error(energy.hvp(z, v, form), named.hvp(z, v)) <= 1e-12


def test_the_step_of_rows_takes_pairs_too() -> None:
    torch.manual_seed(3)
    energy = RowSoftmaxAttention(DIM, HEADS, norm=None, beta=(0.4, 0.9)).double()
    z = state()[0]
    pairs, bias = pattern("bisoftmax", "sample")
    mask = torch.tensor([[True] * N, [True, True, False, True], [True] * N])
    y = energy.features(z, mask=mask)
    scores = (
        torch.tensor([0.4, 0.9], dtype=torch.float64).view(2, 1, 1) * (y @ y.mT) + bias[:, None]
    )
    allowed = pairs[:, None] & mask[:, None, None] & mask[:, None, :, None]
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    expected = (weights @ y).transpose(1, 2).flatten(2) @ energy.weight
    x = AttentionInput(pairs=pairs, pair_bias=bias)
    found = energy.straight_gradient(z, mask=mask, x=x)
    assert relative_error(found, expected.masked_fill(~mask.unsqueeze(-1), 0.0)) <= 1e-12


BAD: list[tuple[Any, type[Exception], str]] = [
    ({"pairs": torch.ones(N, N)}, TypeError, r"pairs must be a bool tensor .* got torch.float32"),
    ({"pairs": torch.ones(N, N + 1) > 0}, ValueError, r"pairs must have the shape \(4, 4\), .*4,"),
    (
        {"pairs": torch.ones(2, N, N) > 0},
        ValueError,
        r"pairs must have .*\(3, 4, 4\).* got \(2, 4, 4\)",
    ),
    ({"pair_bias": torch.ones(N, N) > 0}, TypeError, r"pair_bias must be a floating tensor"),
    ({"pair_bias": torch.ones(N)}, TypeError, r"pair_bias must be a floating tensor .* \(4,\)"),
    ({"memory": torch.ones(B, M, DIM)}, ValueError, r"memory"),
]


@pytest.mark.parametrize(("parts", "error", "message"), BAD)
@pytest.mark.parametrize("kind", ["bisoftmax", "inner"])
def test_bad_pairs_of_the_input(kind: str, parts: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        build(kind).grad(state()[0], AttentionInput(**parts))


@pytest.mark.parametrize("cls", [ScoreAttention, LinearAttention])
def test_energies_without_rows_take_no_pairs(cls: Any) -> None:
    x = AttentionInput(pairs=torch.ones(N, N) > 0)
    with pytest.raises(ValueError, match=f"{cls.__name__} takes no pairs"):
        cls(DIM, HEADS).double().grad(state()[0], x)


def test_backends_without_pairs_say_so() -> None:
    x = AttentionInput(pairs=torch.ones(N, N) > 0)
    with pytest.raises(ValueError, match='pairs and bias need backend="auto" or "reference"'):
        build("bisoftmax", backend="blocks").grad(state()[0], x)
    with pytest.raises(ValueError, match=r"exclude_self needs backend=.* got 'blocks'"):
        build("bisoftmax", backend="blocks", exclude_self=True)
    with pytest.raises(ValueError, match="exclude_self needs self-attention"):
        build("cross", exclude_self=True)
    memory = AttentionInput(memory=state()[2], pairs=torch.ones(N, M) > 0)
    with pytest.raises(ValueError, match='pairs and bias need backend="auto" or "reference"'):
        build("cross", backend="flash").grad(state()[0], memory)
