"""What energies see besides the state: contexts, pairs, biases, temperatures, gates of hidden units."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cases.energies import NORMS, relative_error
from implicit_attn import DEQ
from implicit_attn.energies import (
    AttentionInput,
    BiSoftmaxAttention,
    GatedFeedForward,
    GELUFeedForward,
    LinearAttention,
    Quadratic,
    ReLUFeedForward,
    RowSoftmaxAttention,
    ScoreAttention,
    SoftmaxAttention,
    SoftmaxFeedForward,
    check_energy,
)
from implicit_attn.energies.feedforward import MemoryEnergy

DIM, WIDTH, HEADS, B, N, M = 4, 3, 2, 2, 3, 5
CLASSES: dict[str, Any] = {
    "bisoftmax": BiSoftmaxAttention,
    "inner": SoftmaxAttention,
    "elastic": partial(SoftmaxAttention, energy="elastic"),
    "cross": partial(SoftmaxAttention, cross=True),
    "cross-elastic": partial(SoftmaxAttention, cross=True, energy="elastic"),
    "sigmoid": ScoreAttention,
    "linear": LinearAttention,
}
WITHIN = ("bisoftmax", "inner", "elastic")
SELF = (*WITHIN, "sigmoid", "linear")
PAIRED = (*WITHIN, "cross", "cross-elastic")
each_self = pytest.mark.parametrize("kind", SELF)


def make(kind: str, **options: Any) -> Any:
    """An energy whose biases are not zero."""
    torch.manual_seed(1)
    energy = CLASSES[kind](DIM, HEADS, **{"context_dim": WIDTH, **options}).double()
    with torch.no_grad():
        for parameter in energy.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return energy


def state(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A state, an input of another width, and a memory."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((B, N, DIM), (B, N, WIDTH), (B, M, DIM))
    z, x, memory = (torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)
    return z, x, memory


def joined(energy: Any) -> Any:
    """The energy without input of the states ``(z, x)``, with the weights side by side."""
    torch.manual_seed(1)
    cls, options = type(energy), {"bias": True, "head_dim": DIM // HEADS}
    if isinstance(energy, SoftmaxAttention):
        other: Any = cls(DIM + WIDTH, HEADS, energy=energy.energy, **options).double()
        parts = (("query", "query_context"), ("key", "key_context"))
        other.query_bias, other.key_bias = energy.query_bias, energy.key_bias
    else:
        other = cls(DIM + WIDTH, HEADS, **options).double()
        parts, other.bias = (("projection", "context"),), energy.bias
    for name, context in parts:
        both = [getattr(energy, part).weight for part in (name, context)]
        with torch.no_grad():
            getattr(other, name).weight.copy_(torch.cat(both, 1))
    return other


@pytest.mark.parametrize("masked", [True])
@each_self
def test_the_input_acts_as_a_fixed_part_of_the_state(kind: str, masked: bool) -> None:
    """``norm(W z + P x + b)`` are the features of ``(z, x)`` under ``(W, P)``: so are the gradients."""
    energy, (z, x, _) = make(kind), state()
    mask = torch.tensor([[True, False, True], [False] * N]) if masked else None
    both = torch.cat((z, x), -1)
    v = torch.cat((torch.flip(z, (0, 1)), torch.zeros_like(x)), -1)
    value, gradient = joined(energy).value_and_grad(both, mask=mask)
    for form in (x, energy.prepare(x, mask=mask), AttentionInput(tokens=x)):
        assert relative_error(energy(z, form, mask=mask), value) <= 1e-12
        assert relative_error(energy.grad(z, form, mask=mask), gradient[..., :DIM]) <= 1e-12
        product = joined(energy).hvp(both, v, mask=mask)[..., :DIM]
        assert relative_error(energy.hvp(z, v[..., :DIM], form, mask=mask), product) <= 1e-12


ERRORS: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, r"\bx\b"),
    ({"a": torch.zeros(B, N, WIDTH)}, TypeError, "select"),
    (torch.zeros(B, N, DIM), ValueError, r"\bx\b"),
    (torch.zeros(B, N + 1, WIDTH).double(), ValueError, r"\bx\b"),
    (torch.zeros(B, N, WIDTH, device="meta"), ValueError, r"\bx\b"),
    (AttentionInput(), TypeError, r"\bx\b"),
    (torch.zeros(B, N, WIDTH), TypeError, r"\bx\b"),
    (AttentionInput(memory=torch.zeros(B, M, DIM)), ValueError, "memory"),
]


@pytest.mark.parametrize(("x", "error", "message"), ERRORS)
@pytest.mark.parametrize("kind", ["bisoftmax", "elastic"])
def test_bad_input(kind: str, x: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make(kind).grad(state()[0], x)


CROSS: dict[str, Any] = {
    f"{energy}-{backend}": lambda e=energy, b=backend, **o: SoftmaxAttention(
        DIM, HEADS, energy=e, cross=True, backend=b, bias=True, **o
    ).double()
    for energy in ("inner", "elastic")
    for backend in ("reference", "flash")
}


@pytest.mark.parametrize("masked", [True])
@pytest.mark.parametrize("name", CROSS)
def test_an_empty_memory_has_energy_zero(name: str, masked: bool) -> None:
    energy, (z, _, memory) = CROSS[name](), state()
    mask = torch.tensor([[True, False, True], [False] * N]) if masked else None
    empty = memory[:, :0]
    forms: list[Any] = [empty, AttentionInput(memory=empty), energy.prepare(empty, mask=mask)]
    if not name.endswith("flash"):
        forms.append(AttentionInput(memory=empty, pairs=torch.ones(N, 0) > 0))
    for form in forms:
        value, gradient = energy.value_and_grad(z, form, mask=mask)
        assert (value == 0).all() and (gradient == 0).all()
        assert (energy.hvp(z, z, form, mask=mask) == 0).all()
        total = value.sum() + gradient.square().sum()
        given = torch.autograd.grad(total, list(energy.parameters()), allow_unused=True)
        assert all(g is None or (g == 0).all() for g in given)
    with pytest.raises(ValueError, match="pairs"):
        energy.grad(z, AttentionInput(memory=empty, pairs=torch.ones(N, M) > 0))


BATCH, TOKENS, KEYS, WIDE, PAIR_HEADS = 3, 4, 5, 8, 2
each_kind = pytest.mark.parametrize("kind", PAIRED)
each_within = pytest.mark.parametrize("kind", WITHIN)
SHAPES = {"one": (), "sample": (BATCH,), "head": (BATCH, PAIR_HEADS)}


def build(kind: str, heads: int = PAIR_HEADS, **options: Any) -> Any:
    torch.manual_seed(3)
    return CLASSES[kind](WIDE, heads, **options).double()


def keys_of(kind: str) -> int:
    return KEYS if "cross" in kind else TOKENS


def paired_state(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """A state, a vector like it, and a memory."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((BATCH, tokens, WIDE), (BATCH, tokens, WIDE), (BATCH, KEYS, WIDE))
    z, v, memory = (torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)
    return z, v, memory


def pattern(kind: str, shape: str) -> tuple[Tensor, Tensor]:
    """Pairs, with a query that has no key, and their biases."""
    generator = torch.Generator().manual_seed(5)
    size = (*SHAPES[shape], TOKENS, keys_of(kind))
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
        y = (tokens @ weight.T).unflatten(-1, (PAIR_HEADS, -1)).transpose(0, 1)
        return y / (y.square().mean(-1, keepdim=True) + 1.0).sqrt()

    if kind == "bisoftmax":
        query = key = features(z, energy.projection.weight)
    else:
        query = features(z, energy.query.weight)
        key = features(memory if "cross" in kind else z, energy.key.weight)
    beta, total = (WIDE / PAIR_HEADS) ** -0.5, 0.0
    for head, (rows, columns) in enumerate(zip(query, key, strict=True)):
        for i, q in enumerate(rows):
            row = []
            for j, k in enumerate(columns):
                bias = terms(head, i, j)
                score = -(q - k).square().sum() / 2 if "elastic" in kind else q @ k
                row += [] if bias is None else [math.exp(beta * score.item() + bias)]
            total += math.log(sum(row)) / beta if row else 0.0
    return total if kind == "bisoftmax" else -total


@pytest.mark.parametrize(("shape", "masked"), [("one", True), ("sample", False), ("head", True)])
@each_kind
def test_the_energy_is_the_sum_over_the_allowed_pairs(kind: str, shape: str, masked: bool) -> None:
    energy, (z, _, memory) = build(kind), paired_state()
    pairs, bias = pattern(kind, shape)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    mask[1, 2] = not masked
    x = given(kind, memory, pairs=pairs, pair_bias=bias)
    value = energy(z, x, mask=mask if masked else None)
    wide = (BATCH, PAIR_HEADS, TOKENS, keys_of(kind))
    own = {"one": (1, 1), "sample": (BATCH, 1), "head": (BATCH, PAIR_HEADS)}[shape]
    pairs, bias = (t.view(*own, *wide[2:]).expand(wide) for t in (pairs, bias))
    for sample in range(BATCH):

        def terms(head: int, i: int, j: int, sample: int = sample) -> float | None:
            place = sample, head, i, j
            counts = mask[sample, i] and ("cross" in kind or mask[sample, j])
            return bias[place].item() if pairs[place] and counts else None

        expected = by_pairs(energy, kind, z[sample], memory[sample], terms)
        assert value[sample].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("masked", [True])
@each_kind
def test_derivatives_with_pairs_of_the_input(kind: str, masked: bool) -> None:
    energy, (z, _, memory) = build(kind, bias=True), paired_state()
    pairs, bias = pattern(kind, "head")
    some = torch.tensor([[True] * TOKENS, [True, True, False, True], [False] * TOKENS])
    mask = some if masked else None
    x = given(kind, memory, pairs=pairs, pair_bias=bias)
    if masked and "cross" in kind:
        seen = torch.tensor([[True] * KEYS, [False, True] * 2 + [True], [True] * KEYS])
        x = x._replace(memory_mask=seen)
    check_energy(energy, z, x, mask=mask, tolerance=1e-9, strict=True)
    assert energy.prepare(x, mask=mask) is not x


@each_kind
def test_biases_of_excluded_pairs_are_never_read(kind: str) -> None:
    energy, (z, v, memory) = build(kind), paired_state()
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


@each_within
def test_causal_and_no_self_term_are_patterns(kind: str) -> None:
    z, v, _ = paired_state()
    order = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    eye = torch.eye(TOKENS, dtype=torch.bool)
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


SQUARE, BIASES = torch.ones(TOKENS, TOKENS), torch.ones(TOKENS)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"pairs": SQUARE}, TypeError, "pairs"),
    ({"pairs": torch.ones(4, 5) > 0}, ValueError, "pairs"),
    ({"pairs": torch.ones(2, 4, 4) > 0}, ValueError, "pairs"),
    ({"pair_bias": SQUARE > 0}, TypeError, "pair_bias"),
    ({"pair_bias": BIASES}, ValueError, "pair_bias"),
    ({"memory": torch.ones(BATCH, KEYS, WIDE)}, ValueError, r"memory"),
]


@pytest.mark.parametrize(("parts", "error", "message"), BAD)
@pytest.mark.parametrize("kind", ["bisoftmax", "inner"])
def test_bad_pairs_of_the_input(kind: str, parts: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        build(kind).grad(paired_state()[0], AttentionInput(**parts))


BETAS = (0.3, 1.4)
each_class = pytest.mark.parametrize("kind", CLASSES)


@each_class
def test_heads_of_different_temperature_add_up(kind: str) -> None:
    """The energy is the sum of those of its heads alone, each at its own temperature."""
    z, x, _ = paired_state()
    energy = build(kind, head_dim=3, beta=BETAS)
    value, gradient, product = energy(z, x), energy.grad(z, x), energy.hvp(z, x, x)
    for head, beta in enumerate(BETAS):
        alone = build(kind, head_dim=3, heads=1, beta=beta)
        with torch.no_grad():
            for (_, own), (_, both) in zip(
                alone.named_parameters(), energy.named_parameters(), strict=True
            ):
                own.copy_(both[3 * head : 3 * head + 3])
        value, gradient = value - alone(z, x), gradient - alone.grad(z, x)
        product = product - alone.hvp(z, x, x)
    for rest, whole in ((value, energy(z, x)), (gradient, energy.grad(z, x))):
        assert rest.norm() <= 1e-12 * whole.norm()
    assert product.norm() <= 1e-12 * energy.hvp(z, x, x).norm()


UNITS = 6  # hidden units


def gelu_integral(y: Tensor) -> Tensor:
    density = torch.exp(-0.5 * y**2) / (2 * torch.pi) ** 0.5
    return 0.5 * ((y**2 - 1) * torch.special.ndtr(y) + y * density)


POTENTIALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda y, g: -0.5 * (g * y.clamp_min(0) ** 2).sum(-1),
    "gelu": lambda y, g: -(g * gelu_integral(y)).sum(-1),
    "softmax": lambda y, g: -(g * y.exp()).sum(-1).log(),
    "gated-gelu": lambda y, g: -0.5 * (g * F.gelu(y)).sum(-1) ** 2,
    "gated-relu": lambda y, g: -0.5 * (g * F.relu(y)).sum(-1) ** 2,
}
MEMORIES: dict[str, tuple[Callable[..., MemoryEnergy], dict[str, Any]]] = {
    "relu": (ReLUFeedForward, {}),
    "gelu": (GELUFeedForward, {}),
    "softmax": (SoftmaxFeedForward, {}),
    "gated-gelu": (GatedFeedForward, {}),
    "gated-relu": (GatedFeedForward, {"activation": "relu"}),
}
GATED = [name for name in MEMORIES if name != "softmax"]
each_memory = pytest.mark.parametrize(
    ("name", "gates"), [(name, False) for name in MEMORIES] + [(name, True) for name in GATED]
)


def memory(name: str, *, random: bool = True, **options: Any) -> MemoryEnergy:
    torch.manual_seed(0)
    cls, own = MEMORIES[name]
    energy = cls(DIM, UNITS, **own | options).double()
    if random:
        with torch.no_grad():
            for parameter in energy.parameters():
                parameter.copy_(0.7 * torch.randn(parameter.shape))
    return energy


def tokens_and_input(batch: int = 2, count: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, count, DIM), (batch, count, WIDTH)
    z, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return z, x


@pytest.mark.parametrize("norm", ["soft", "none"])
@each_memory
def test_value_is_the_formula(name: str, gates: bool, norm: str) -> None:
    energy = memory(name, context_dim=WIDTH, gates=gates, norm=NORMS[norm])
    z, x = tokens_and_input()
    weights = dict(energy.named_parameters())
    assert weights["context.weight"].shape == (UNITS, WIDTH) and weights["bias"].shape == (UNITS,)
    raw = z @ weights["projection.weight"].T + x @ weights["context.weight"].T + weights["bias"]
    epsilon = {"soft": 1.0, "tiny": 1e-6, "none": None}[norm]
    y = raw if epsilon is None else raw / (raw.square().mean(-1, keepdim=True) + epsilon).sqrt()
    g = torch.ones_like(y)
    if gates:
        g = 2 / (1 + torch.exp(-(x @ weights["gate.weight"].T + weights["gate.bias"])))
    for given in (x, energy.prepare(x)):
        torch.testing.assert_close(energy(z, given), POTENTIALS[name](y, g).sum(1))
        torch.testing.assert_close(energy.features(z, given), y)


def test_inputs_that_do_not_fit() -> None:
    energy = memory("relu", context_dim=WIDTH)
    z, x = tokens_and_input()
    mask = torch.ones(2, 3, dtype=torch.bool)
    label = "ReLUFeedForward: x must"
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (None, None, TypeError, label),
        (x.int(), None, TypeError, label),
        (z, None, ValueError, label),
        (x[:, :2], None, ValueError, label),
        (x[:, :2], mask, ValueError, "mask"),
        (x.to("meta"), None, ValueError, label),
    ]
    for given, keep, error, message in cases:
        with pytest.raises(error, match=message):
            energy.grad(z, given, mask=keep)
    with pytest.raises(ValueError, match=r"\bx\b"):
        energy.grad(z, energy.prepare(x[:, :2]))
    with pytest.raises(ValueError, match=r"\bx\b"):
        DEQ(energy + Quadratic())(z)
    with pytest.raises(ValueError, match="gates"):
        memory("relu", gates=True)
    with pytest.raises(ValueError, match="gates"):
        memory("softmax", gates=True, context_dim=3)


def test_the_step_of_rows_takes_pairs_too() -> None:
    torch.manual_seed(3)
    energy = RowSoftmaxAttention(WIDE, PAIR_HEADS, norm=None, beta=(0.4, 0.9)).double()
    z = paired_state()[0]
    pairs, bias = pattern("bisoftmax", "sample")
    mask = torch.tensor([[True] * TOKENS, [True, True, False, True], [True] * TOKENS])
    y = energy.features(z, mask=mask)
    scores = torch.tensor([0.4, 0.9], dtype=y.dtype).view(2, 1, 1) * (y @ y.mT) + bias[:, None]
    allowed = pairs[:, None] & mask[:, None, None] & mask[:, None, :, None]
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    expected = (weights @ y).transpose(1, 2).flatten(2) @ energy.weight
    x = AttentionInput(pairs=pairs, pair_bias=bias)
    found = energy.straight_gradient(z, mask=mask, x=x)
    assert relative_error(found, expected.masked_fill(~mask.unsqueeze(-1), 0.0)) <= 1e-12
