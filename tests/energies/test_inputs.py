"""What energies see besides the state: contexts, pairs, biases, temperatures, gates of hidden units."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional as F

from cases.deq import EXACT
from cases.energies import NORMS, relative_error
from implicit_attn import DEQ, Energy
from implicit_attn.energies import (
    AttentionInput,
    BiSoftmaxAttention,
    GatedFeedForward,
    GELUFeedForward,
    LinearAttention,
    Quadratic,
    QueryEnergy,
    ReLUFeedForward,
    RowSoftmaxAttention,
    ScoreAttention,
    SoftmaxAttention,
    SoftmaxFeedForward,
    check_energy,
)
from implicit_attn.energies.feedforward import MemoryEnergy
from implicit_attn.models import HyperSETEquilibrium
from solvers import Implicit, Tolerance

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


@pytest.mark.parametrize("masked", [False, True])
@each_self
def test_the_input_is_a_part_of_the_state_that_is_held(kind: str, masked: bool) -> None:
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


@each_self
def test_a_layer_without_context_ignores_the_input_and_prepares_nothing(kind: str) -> None:
    energy, (z, x, _) = CLASSES[kind](DIM, HEADS).double(), state()
    assert energy.prepare(x) is None
    assert torch.equal(energy.grad(z, x), energy.grad(z))
    assert torch.equal(energy.grad(z, AttentionInput(tokens=x)), energy.grad(z))
    assert not any("bias" in name or "context" in name for name in energy.state_dict())


def layer_of(attention: Energy) -> DEQ:
    """The state is as wide as the tokens that the quadratic pulls to, the context is narrower."""
    pulled = 0.3 * attention.select("attention") + Quadratic().select("pull")
    return DEQ(pulled, init=lambda x: x["pull"], **EXACT)


def test_a_solve_prepares_once_and_takes_the_rows_along() -> None:
    """Samples that finish early leave with their part; one pattern for all samples stays whole."""
    torch.manual_seed(0)
    attention = BiSoftmaxAttention(DIM, HEADS, context_dim=WIDTH, bound=1.0).double()
    layer = layer_of(attention)
    calls: list[int] = []
    assert attention.context is not None
    attention.context.register_forward_hook(lambda *_: calls.append(1))
    z, x, _ = state()
    pairs = torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.7
    parts = [torch.cat([t] * 3)[:N] for t in (z, x)]  # as many samples as tokens
    one = {"attention": AttentionInput(tokens=parts[1], pairs=pairs), "pull": parts[0]}
    solution = layer.solve(one)
    start = solution.value.detach().clone()
    start[0] += 3.0
    again = layer.solve(one, z0=start)
    assert again.evaluations[1:].max() < again.evaluations[0]
    torch.testing.assert_close(again.value, solution.value)
    many = AttentionInput(tokens=parts[1], pairs=pairs.expand(N, N, N))
    torch.testing.assert_close(layer({"attention": many, "pull": parts[0]}), solution.value)


ERRORS: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, r"x must hold tokens \(B, N, 3\), got NoneType"),
    ({"a": torch.zeros(B, N, WIDTH)}, TypeError, r"\.select\(key\)"),
    (torch.zeros(B, N, DIM), ValueError, r"x must have the shape \(B, N, 3\), got \(2, 3, 4\)"),
    (torch.zeros(B, N + 1, WIDTH).double(), ValueError, r"tokens of z, \(2, 3\), got \(2, 4\)"),
    (torch.zeros(B, N, WIDTH, device="meta"), ValueError, r"x must be on cpu like the weights, go"),
    (AttentionInput(), TypeError, r"x must hold tokens \(B, N, 3\), got NoneType"),
    (torch.zeros(B, N, WIDTH), TypeError, "x must have the dtype of the weights, torch.float64"),
    (AttentionInput(memory=torch.zeros(B, M, DIM)), ValueError, r"x\.memory needs cross-attention"),
]


@pytest.mark.parametrize(("x", "error", "message"), ERRORS)
@each_self
def test_bad_input(kind: str, x: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make(kind).grad(state()[0], x)


def test_parts_of_a_named_tuple_are_selected_by_name() -> None:
    z = state()[0]
    other = torch.flip(z, (0,))
    given = AttentionInput(tokens=other, pairs=torch.ones(N, N) > 0)
    energy = Quadratic().select("tokens")
    assert torch.equal(energy.grad(z, given), Quadratic().grad(z, other))
    with pytest.raises(ValueError, match="x must hold 'token'"):
        Quadratic().select("token").grad(z, given)
    for method in ("count", "_replace"):  # what every named tuple has besides its fields
        with pytest.raises(ValueError, match=f"x must hold {method!r}"):
            Quadratic().select(method).grad(z, given)


CROSS: dict[str, Any] = {
    f"{energy}-{backend}": lambda e=energy, b=backend, **o: SoftmaxAttention(
        DIM, HEADS, energy=e, cross=True, backend=b, bias=True, **o
    ).double()
    for energy in ("inner", "elastic")
    for backend in ("reference", "flash", "auto")
}


@pytest.mark.parametrize("masked", [False, True])
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
    with pytest.raises(ValueError, match=r"pairs must have the shape \(3, 0\)"):
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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
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


@pytest.mark.parametrize("masked", [False, True])
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
def test_what_stands_at_excluded_pairs_is_never_used(kind: str) -> None:
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


def queried(**parts: Any) -> Tensor:
    memory = torch.empty(BATCH, 0, WIDE, dtype=torch.float64)
    return QueryEnergy(WIDE, PAIR_HEADS)(paired_state()[0], AttentionInput(memory=memory, **parts))


SQUARE, BIASES = torch.ones(TOKENS, TOKENS), torch.ones(TOKENS)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"pairs": SQUARE}, TypeError, r"pairs must be a bool tensor .* got torch.float32"),
    ({"pairs": torch.ones(4, 5) > 0}, ValueError, r"pairs must have the shape \(4, 4\), .*4,"),
    ({"pairs": torch.ones(2, 4, 4) > 0}, ValueError, r"\(3, 4, 4\).* got \(2, 4, 4\)"),
    ({"pair_bias": SQUARE > 0}, TypeError, r"pair_bias must be a floating tensor"),
    ({"pair_bias": BIASES}, ValueError, r"pair_bias must have the shape .* got \(4,\)"),
    ({"memory": torch.ones(BATCH, KEYS, WIDE)}, ValueError, r"memory"),
]


@pytest.mark.parametrize(("parts", "error", "message"), BAD)
@pytest.mark.parametrize("kind", ["bisoftmax", "inner"])
def test_bad_pairs_of_the_input(kind: str, parts: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        build(kind).grad(paired_state()[0], AttentionInput(**parts))


def test_pairs_with_an_empty_memory_are_checked() -> None:
    with pytest.raises(TypeError, match="pairs must be a bool tensor"):
        queried(pairs="all")
    with pytest.raises(TypeError, match="pair_bias must be a floating tensor"):
        queried(pair_bias=3)


@pytest.mark.parametrize("cls", [ScoreAttention, LinearAttention])
def test_energies_without_rows_take_no_pairs(cls: Any) -> None:
    x = AttentionInput(pairs=torch.ones(TOKENS, TOKENS) > 0)
    with pytest.raises(ValueError, match=f"{cls.__name__} takes no pairs"):
        cls(WIDE, PAIR_HEADS).double().grad(paired_state()[0], x)


def test_backends_without_pairs_say_so() -> None:
    x = AttentionInput(pairs=torch.ones(TOKENS, TOKENS) > 0)
    with pytest.raises(ValueError, match='pairs and bias need backend="auto" or "reference"'):
        build("bisoftmax", backend="blocks").grad(paired_state()[0], x)
    with pytest.raises(ValueError, match=r"exclude_self needs backend=.* got 'blocks'"):
        build("bisoftmax", backend="blocks", exclude_self=True)
    with pytest.raises(ValueError, match="exclude_self needs self-attention"):
        build("cross", exclude_self=True)
    memory = AttentionInput(memory=paired_state()[2], pairs=torch.ones(TOKENS, KEYS) > 0)
    with pytest.raises(ValueError, match='pairs and bias need backend="auto" or "reference"'):
        build("cross", backend="flash").grad(paired_state()[0], memory)


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


@each_class
def test_learned_temperatures_begin_as_given_and_stay_positive(kind: str) -> None:
    z, x, _ = paired_state()
    for beta in (None, 0.7, BETAS):
        plain = build(kind, head_dim=3, beta=beta)
        learned = build(kind, head_dim=3, beta=beta, learned_beta=True)
        # raw is made in float32
        assert relative_error(learned.grad(z, x), plain.grad(z, x)) <= 1e-6
        assert set(learned.state_dict()) - set(plain.state_dict()) == {"temperatures.raw"}
    raw = learned.temperatures.raw
    assert gradcheck(lambda _: (learned(z, x), learned.grad(z, x), learned.hvp(z, x, x)), raw)
    with torch.no_grad():
        raw.fill_(-20.0)
    assert (learned.beta > 0).all() and learned.grad(z, x).isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "blocks"])
def test_kernels_are_used_through_rescaled_features(backend: str) -> None:
    z, x, _ = paired_state(70)
    choices: list[dict[str, Any]] = [{"beta": BETAS}, {"norm": None, "beta": BETAS}]
    for options in [*choices, {"learned_beta": True}]:
        exact = build("bisoftmax", head_dim=3, backend="reference", **options)
        energy = build("bisoftmax", head_dim=3, backend=backend, **options).float()
        single = (z.float(), x.float())
        for ours, theirs in (
            (energy(single[0]), exact(z)),
            (energy.grad(single[0]), exact.grad(z)),
            (energy.hvp(*single), exact.hvp(z, x)),
        ):
            assert ours.dtype == torch.float32 and relative_error(ours, theirs) <= 2e-5


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


@pytest.mark.parametrize("norm", NORMS)
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


@each_memory
def test_what_a_context_begins_as(name: str, gates: bool) -> None:
    """No biases and open gates: at first the energy at ``x = 0`` is that without a context."""
    plain = memory(name, random=False)
    seen = memory(name, random=False, context_dim=WIDTH, gates=gates)
    z, x = tokens_and_input()
    torch.testing.assert_close(seen(z, torch.zeros_like(x)), plain(z))
    assert not torch.allclose(seen(z, x), plain(z))
    assert seen.context is not None and abs(seen.context.weight.std().item() * WIDTH**0.5 - 1) < 0.5
    with torch.no_grad():
        seen.context.weight.zero_()
    torch.testing.assert_close(seen(z, x), plain(z))


@pytest.mark.parametrize("name", MEMORIES)
def test_without_options_nothing_is_added(name: str) -> None:
    energy = memory(name)
    assert list(energy.state_dict()) == ["projection.weight"]
    z, x = tokens_and_input()
    assert energy.prepare(x) is None
    assert torch.equal(energy(z, x), energy(z))  # x is ignored
    biased = memory(name, bias=True)
    assert sorted(biased.state_dict()) == ["bias", "projection.weight"]
    assert biased.prepare(x) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_memory
def test_sums_over_many_units_are_taken_in_float32(
    name: str, gates: bool, dtype: torch.dtype
) -> None:
    """Half precision would stop counting at a few hundred or thousand."""
    cls, own = MEMORIES[name]
    torch.manual_seed(0)
    energy = cls(DIM, 20000, **own, context_dim=WIDTH, gates=gates, norm=None).to(dtype)
    with torch.no_grad():
        energy.projection.weight.mul_(0.1)
        energy.get_parameter("bias").fill_(1.0 if "gated" not in name else 0.01)
    reference = copy.deepcopy(energy).double()
    z, x = (t.to(dtype) for t in tokens_and_input())
    value, gradient = energy.value_and_grad(z, energy.prepare(x))
    assert value.dtype == torch.float32 and gradient.dtype == dtype
    room = {torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(value.double(), reference(z.double(), x.double()), rtol=room, atol=0)


def test_inputs_that_do_not_fit() -> None:
    energy = memory("relu", context_dim=WIDTH)
    z, x = tokens_and_input()
    mask = torch.ones(2, 3, dtype=torch.bool)
    label = "ReLUFeedForward: x must"
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (None, None, TypeError, rf"{label} hold tokens \(B, ..., 3\), got NoneType"),
        (x.int(), None, TypeError, rf"{label} have the dtype of the weights, torch.float64, got"),
        (z, None, ValueError, rf"{label} have the shape \(B, ..., 3\), got \(2, 3, 4\)"),
        (x[:, :2], None, ValueError, rf"{label} have the tokens of z.*\(2, 3, 3\), got \(2, 2,"),
        (x[:, :2], mask, ValueError, r"x: mask must have the shape \(B, N\) = \(2, 2\), got"),
        (x.to("meta"), None, ValueError, rf"{label} be on cpu like the weights, got meta"),
    ]
    for given, keep, error, message in cases:
        with pytest.raises(error, match=message):
            energy.grad(z, given, mask=keep)
    with pytest.raises(ValueError, match=r"tokens of z, .* got \(2, 2, 3\)"):
        energy.grad(z, energy.prepare(x[:, :2]))
    with pytest.raises(ValueError, match=r"x must have the shape"):
        DEQ(energy + Quadratic())(z)
    with pytest.raises(ValueError, match=r"gates=True needs a context.*context_dim=None"):
        memory("relu", gates=True)
    with pytest.raises(ValueError, match=r"gates must be False for a"):
        memory("softmax", gates=True, context_dim=3)


TIGHT: dict[str, Any] = {
    "tolerance": Tolerance(1e-13),
    "adjoint": Implicit(tolerance=Tolerance(1e-13)),
    "max_steps": 400,
    "on_failure": "raise",
}


@pytest.mark.parametrize("context", [False, True])
def test_only_with_a_context_the_equilibrium_is_no_proximal_operator(context: bool) -> None:
    """``dz*/dx`` is ``(I + H)^-1``, symmetric, as long as x enters by ``1/2 |z - x|^2`` alone."""
    torch.manual_seed(0)
    model = HyperSETEquilibrium(
        4, 2, 6, layer=TIGHT, feedforward="gelu", weight=0.3, context=context
    )
    model = model.double()
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    jacobian: Any = torch.autograd.functional.jacobian(
        lambda flat: model(flat.view(1, 3, 4)).flatten(), x.flatten()
    )
    asymmetry = (jacobian - jacobian.mT).norm() / jacobian.norm()
    assert (asymmetry > 0.03) if context else (asymmetry < 1e-8)
    # The Hessian by z is symmetric in both, which is what solver and adjoint need.
    energy: Any = model.layer.update.energy
    hessian: Any = torch.autograd.functional.jacobian(
        lambda flat: energy.grad(flat.view_as(x), energy.prepare(x)).flatten(), x.flatten()
    )
    torch.testing.assert_close(hessian, hessian.mT)
