"""Energies of attention and of hidden units against their formulas in float64, with autograd's gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cases.energies import NORMS, relative_error
from cases.kernels import Allocations
from implicit_attn.energies import (
    AttentionInput,
    BiSoftmaxAttention,
    ConditionalAttention,
    GatedFeedForward,
    GELUFeedForward,
    LinearAttention,
    ReLUFeedForward,
    RowSoftmaxAttention,
    ScoreAttention,
    SoftmaxAttention,
    SoftmaxFeedForward,
    check_energy,
)

B, H, N, M, DIM, WIDTH = 3, 2, 4, 5, 8, 3
FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda y: y,
    "relu": lambda y: y.clamp_min(0),
    "elu": lambda y: torch.where(y > 0, y + 1, y.exp()),
    "plain-elu": lambda y: torch.where(y > 0, y, y.exp() - 1),
    "sigmoid": lambda y: 1 / (1 + (-y).exp()),
    "tanh": lambda y: 1 - 2 / ((2 * y).exp() + 1),
    "softplus": lambda y: (1 + y.exp()).log(),
    "silu": lambda y: y / (1 + (-y).exp()),
    "gelu": lambda y: y * (1 + torch.erf(y / 2**0.5)) / 2,
}
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda s: s.clamp_min(0) ** 2 / 4,
    "sigmoid": lambda s: FEATURE_MAPS["sigmoid"](s) / 2,
    "sigmoid-squared": lambda s: FEATURE_MAPS["sigmoid"](s) ** 2 / 4,
}


def normed(y: Tensor, energy: Any) -> Tensor:
    if energy.norm is None:
        return y
    return y / (y.square().mean(-1, keepdim=True) + energy.norm.epsilon).sqrt()


def features(energy: Any, side: str, tokens: Tensor, x: Tensor | None) -> Tensor:
    """``norm(W t + P x + b)``, (B, H, N, p), of the queries, of the keys or of both."""
    names = {"both": ("projection", "context", "bias")}.get(
        side, (side, f"{side}_context", f"{side}_bias")
    )
    projection, context, bias = (getattr(energy, name) for name in names)
    y = tokens @ projection.weight.T
    y = y if context is None or x is None else y + x @ context.weight.T
    y = y if bias is None else y + bias
    return normed(y.unflatten(-1, (energy.heads, -1)).transpose(1, 2), energy)


def attention(energy: Any, z: Tensor, given: AttentionInput, mask: Tensor | None) -> Tensor:
    """The energy (B,) by its definition."""
    softmax, cross = isinstance(energy, SoftmaxAttention), getattr(energy, "cross", False)
    query = features(energy, "query" if softmax else "both", z, given.tokens)
    key = query
    if softmax:
        source = given.memory if given.memory is not None else z
        key = features(energy, "key", source, given.tokens)
    beta = torch.as_tensor(energy.beta, dtype=z.dtype).view(-1, 1, 1)
    scores = query @ key.mT
    if getattr(energy, "energy", "") == "elastic":
        scores = -torch.cdist(query, key).square() / 2
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if mask is not None:
        allowed = allowed & mask[:, None, :, None]
        allowed = allowed if cross else allowed & mask[:, None, None]
    if isinstance(energy, LinearAttention):
        phi = FEATURE_MAPS[energy.feature_map](query)
        return ((beta * (phi @ phi.mT)) ** 2 / (4 * beta) * allowed).sum((1, 2, 3))
    if isinstance(energy, ScoreAttention):
        return (SCORES[energy.score](beta * scores) / beta * allowed).sum((1, 2, 3))
    square = torch.ones(scores.shape[2:], dtype=torch.bool)
    allowed = allowed & square.tril() if energy.causal else allowed
    allowed = allowed & ~torch.eye(N, dtype=torch.bool) if energy.exclude_self else allowed
    if given.pairs is not None and given.pair_bias is not None:
        scores = scores + given.pair_bias / beta
        allowed = allowed & given.pairs
    if given.memory_mask is not None:
        allowed = allowed & given.memory_mask[:, None, None]
    some = allowed.any(-1)
    scores = (beta * scores).masked_fill(~allowed & some.unsqueeze(-1), -torch.inf)
    free = scores.logsumexp(-1).masked_fill(~some, 0.0) / beta.squeeze(-1)
    return free.sum((1, 2)) * (-1 if softmax else 1)


Row = tuple[Callable[..., Any], dict[str, Any]]
SOFTMAX: list[Row] = [
    (SoftmaxAttention, {"energy": kind, **options})
    for kind in ("inner", "elastic")
    for options in ({}, {"context_dim": WIDTH, "causal": True}, {"cross": True}, {"exclude_self": True})
]  # fmt: skip
BISOFTMAX: list[Row] = [
    (BiSoftmaxAttention, options)
    for options in ({}, {"causal": True, "exclude_self": True}, {"context_dim": WIDTH})
]
PLAIN: list[Row] = [
    *((ScoreAttention, {"score": score, "context_dim": WIDTH}) for score in SCORES),
    *((LinearAttention, {"feature_map": name}) for name in FEATURE_MAPS),
    (LinearAttention, {"context_dim": WIDTH}),
]
PAIRED = [*BISOFTMAX, *SOFTMAX]


def named(row: Row) -> str:
    return "-".join([row[0].__name__, *map(str, row[1].values())])  # type: ignore[attr-defined]


def made(row: Row, norm: str = "soft", **more: Any) -> Any:
    torch.manual_seed(3)
    options = {"norm": NORMS[norm], "head_dim": 3, "beta": (0.4, 1.3), "bias": True, **more}
    energy = row[0](DIM, H, **row[1], **options).double()
    with torch.no_grad():
        for parameter in energy.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return energy


def given(row: Row, paired: bool, seed: int = 0) -> tuple[Tensor, AttentionInput, Tensor | None]:
    """A state, an input, and a mask with ``paired``: some queries then have no key."""
    cross, generator = "cross" in row[1], torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    z, tokens, memory = draw(B, N, DIM), draw(B, N, WIDTH), draw(B, M, DIM)
    x = AttentionInput(tokens=tokens, memory=memory if cross else None)
    if not paired:
        return z, x, None
    pairs = torch.rand(B, H, N, M if cross else N, generator=generator) < 0.6
    pairs[:, :, 1] = False
    seen = torch.tensor([[True] * M, [False, True] * 2 + [True], [False] * M]) if cross else None
    x = x._replace(pairs=pairs, pair_bias=draw(pairs.shape), memory_mask=seen)
    return z, x, torch.tensor([[True] * N, [True, True, False, True], [False] * N])


CASES = [
    *((row, False, norm) for row in [*PAIRED, *PLAIN] for norm in ("soft", "none")),
    *((row, True, "soft") for row in PAIRED),
]


@pytest.mark.parametrize(
    ("row", "paired", "norm"),
    CASES, ids=[f"{named(row)}-{'pairs' * paired}-{norm}" for row, paired, norm in CASES],
)  # fmt: skip
def test_attention_is_its_formula(row: Row, paired: bool, norm: str) -> None:
    energy, (z, x, mask) = made(row, norm), given(row, paired)
    leaf = z.clone().requires_grad_()
    value = attention(energy, leaf, x, mask)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    for form in (x, energy.prepare(x, mask=mask)):
        torch.testing.assert_close(energy(z, form, mask=mask), value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(energy.grad(z, form, mask=mask), slope, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("row", [BISOFTMAX[0], *SOFTMAX[::2]], ids=named)
def test_pairs_of_the_input(row: Row) -> None:
    """Derivatives, pairs shared by samples or heads, and biases of excluded pairs, which are never read."""
    energy, (z, x, mask) = made(row), given(row, True)
    check_energy(energy, z, x, mask=mask, tolerance=1e-9, strict=True)
    assert x.pairs is not None and x.pair_bias is not None
    for index in ((0, 0), (slice(None), 0)):
        part = x._replace(pairs=x.pairs[index], pair_bias=x.pair_bias[index])
        wide = [t[index].view(-1, 1, *t.shape[2:]).expand(t.shape) for t in (x.pairs, x.pair_bias)]
        same = x._replace(pairs=wide[0], pair_bias=wide[1])
        assert relative_error(energy(z, part, mask=mask), energy(z, same, mask=mask)) <= 1e-12
    bias, found = x.pair_bias.clone().requires_grad_(), []
    for filler in (0.0, float("nan"), float("inf")):
        form = x._replace(pair_bias=bias.masked_fill(~x.pairs, filler))
        value, gradient = energy.value_and_grad(z, form)
        loss = value.sum() + gradient.square().sum()
        derivatives = torch.autograd.grad(loss, [bias, *energy.parameters()], allow_unused=True)
        products = [energy.hvp(z, z, form), *(d for d in derivatives if d is not None)]
        found.append([value, gradient, *products])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert all(t.isfinite().all() for t in found[0])


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"memory_dim": DIM}], ids=str)
def test_conditional_attention_is_its_formula(options: dict[str, Any], paired: bool) -> None:
    row: Row = (ConditionalAttention, {"cross": True} if "memory_dim" in options else {})
    torch.manual_seed(3)
    energy = ConditionalAttention(DIM, H, context_dim=WIDTH, beta=(0.4, 1.3), **options).double()
    with torch.no_grad():
        for parameter in energy.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    z, x, mask = given(row, paired)
    source, seen = (x.tokens, mask) if x.memory is None else (x.memory, x.memory_mask)

    def heads(tokens: Any, side: str) -> Tensor:
        y = tokens @ getattr(energy, side).weight.T + getattr(energy, f"{side}_bias")
        return normed(y.unflatten(-1, (H, -1)).transpose(1, 2), energy)

    beta = torch.tensor([0.4, 1.3], dtype=torch.float64).view(-1, 1, 1)
    scores = beta * (heads(x.tokens, "query") @ heads(source, "key").mT)
    allowed = torch.ones_like(scores, dtype=torch.bool)
    allowed = allowed.tril() if energy.causal else allowed
    allowed = allowed if seen is None else allowed & seen[:, None, None]
    if x.pairs is not None and x.pair_bias is not None:
        allowed, scores = allowed & x.pairs, scores + x.pair_bias
    some = allowed.any(-1)
    weights = scores.masked_fill(~allowed & some.unsqueeze(-1), -torch.inf).softmax(-1)
    leaf = z.clone().requires_grad_()
    y = (leaf @ energy.state.weight.T).unflatten(-1, (H, -1)).transpose(1, 2)
    tilted = (energy.tau * (y @ heads(source, "value").mT)).exp()
    free = ((weights * tilted).sum(-1).log() * some).sum(1) / -energy.tau
    value = (free if mask is None else free * mask).sum(1)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    for form in (x, energy.prepare(x, mask=mask)):
        torch.testing.assert_close(energy(z, form, mask=mask), value, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(energy.grad(z, form, mask=mask), slope, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "flash"])
@pytest.mark.parametrize("energy", ["inner", "elastic"])
def test_an_empty_memory_has_energy_zero(energy: str, backend: str) -> None:
    layer = made((SoftmaxAttention, {"energy": energy, "cross": True}), backend=backend)
    z, mask = torch.randn(B, N, DIM).double(), torch.tensor([[True, False] * 2] * B)
    empty = torch.zeros(B, 0, DIM).double()
    for form in (empty, AttentionInput(memory=empty), layer.prepare(empty, mask=mask)):
        value, gradient = layer.value_and_grad(z, form, mask=mask)
        assert (value == 0).all() and (gradient == 0).all()
        assert (layer.hvp(z, z, form, mask=mask) == 0).all()
    with pytest.raises(ValueError, match="pairs"):
        layer.grad(z, AttentionInput(memory=empty, pairs=torch.ones(N, M) > 0))


@pytest.mark.parametrize(("score", "dtype"), [
    ("relu", torch.float64), ("sigmoid", torch.bfloat16), ("sigmoid-squared", torch.float32),
])  # fmt: skip
def test_scores_by_strips(score: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens: value, gradient and its derivative as from all scores at once, without N x N numbers."""
    torch.manual_seed(0)
    energy = ScoreAttention(8, 2, score=score, beta=(0.3, 1.2)).to(dtype)
    z, v = torch.randn(2, 1, 1024, 8).to(dtype)
    mask = torch.rand(1, 1024) < 0.8
    with Allocations() as seen:
        found = [*energy.value_and_grad(z, mask=mask), energy.hvp(z, v, mask=mask)]
    assert seen.largest <= 2 * 128 * 1024
    monkeypatch.setattr("implicit_attn.energies.attention.DENSE_TOKENS", 1024)
    wide, z, v = energy.double(), z.double(), v.double()
    expected = [*wide.value_and_grad(z, mask=mask), wide.hvp(z, v, mask=mask)]
    room = 100 * torch.finfo(dtype).eps if dtype != torch.bfloat16 else 0.05
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a.detach(), b.detach()) <= room


def test_the_step_of_rows_is_softmax_attention_over_the_pairs() -> None:
    row: Row = (RowSoftmaxAttention, {})
    energy, (z, x, mask) = made(row, "none", bias=False), given(row, True)
    assert mask is not None and x.pairs is not None and x.pair_bias is not None
    y = energy.features(z, mask=mask)
    scores = torch.tensor([0.4, 1.3], dtype=y.dtype).view(2, 1, 1) * (y @ y.mT) + x.pair_bias
    allowed = x.pairs & mask[:, None, None] & mask[:, None, :, None]
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    expected = (weights @ y).transpose(1, 2).flatten(2) @ energy.weight
    found = energy.straight_gradient(z, x._replace(tokens=None), mask=mask)
    assert relative_error(found, expected.masked_fill(~mask.unsqueeze(-1), 0.0)) <= 1e-12


def gelu_integral(y: Tensor) -> Tensor:
    density = torch.exp(-0.5 * y**2) / (2 * torch.pi) ** 0.5
    return 0.5 * ((y**2 - 1) * torch.special.ndtr(y) + y * density)


POTENTIALS: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "relu": (ReLUFeedForward, lambda y, g: -0.5 * (g * y.clamp_min(0) ** 2).sum(-1)),
    "gelu": (GELUFeedForward, lambda y, g: -(g * gelu_integral(y)).sum(-1)),
    "softmax": (SoftmaxFeedForward, lambda y, g: -(g * y.exp()).sum(-1).log()),
    "gated-gelu": (GatedFeedForward, lambda y, g: -0.5 * (g * F.gelu(y)).sum(-1) ** 2),
    "gated-relu": (
        partial(GatedFeedForward, activation="relu"),
        lambda y, g: -0.5 * (g * F.relu(y)).sum(-1) ** 2,
    ),
}


@pytest.mark.parametrize("norm", ["soft", "none"])
@pytest.mark.parametrize(("name", "gates"), [
    (name, gates) for name in POTENTIALS for gates in (False, True) if name != "softmax" or not gates
])  # fmt: skip
def test_hidden_units_are_their_formula(name: str, gates: bool, norm: str) -> None:
    torch.manual_seed(0)
    cls, potential = POTENTIALS[name]
    energy = cls(DIM, 6, context_dim=WIDTH, gates=gates, norm=NORMS[norm]).double()
    with torch.no_grad():
        for parameter in energy.parameters():
            parameter.copy_(0.7 * torch.randn(parameter.shape))
    z, x = torch.randn(B, N, DIM).double(), torch.randn(B, N, WIDTH).double()
    weights = dict(energy.named_parameters())
    raw = z @ weights["projection.weight"].T + x @ weights["context.weight"].T + weights["bias"]
    y, g = normed(raw, energy), torch.ones_like(raw)
    if gates:
        g = 2 / (1 + torch.exp(-(x @ weights["gate.weight"].T + weights["gate.bias"])))
    for form in (x, energy.prepare(x)):
        torch.testing.assert_close(energy(z, form), potential(y, g).sum(1))
        torch.testing.assert_close(energy.features(z, form), y)


BAD: list[tuple[Row, Any, type[Exception], str]] = [
    *(
        (row, x, error, r"\bx\b")
        for row in (BISOFTMAX[2], SOFTMAX[1])
        for x, error in (
            ({"a": torch.zeros(B, N, WIDTH)}, TypeError),
            (torch.zeros(B, N, DIM), ValueError),
            (torch.zeros(B, N + 1, WIDTH).double(), ValueError),
            (torch.zeros(B, N, WIDTH, device="meta"), ValueError),
            (AttentionInput(), TypeError),
            (torch.zeros(B, N, WIDTH), TypeError),
        )
    ),
    *(
        (BISOFTMAX[0], AttentionInput(**{name: part}), error, name)
        for name, part, error in (
            ("pairs", torch.ones(N, N), TypeError),
            ("pairs", torch.ones(N, M) > 0, ValueError),
            ("pairs", torch.ones(2, N, N) > 0, ValueError),
            ("pair_bias", torch.ones(N, N) > 0, TypeError),
            ("pair_bias", torch.ones(N), ValueError),
            ("memory", torch.ones(B, M, DIM), ValueError),
        )
    ),
    (PLAIN[0], AttentionInput(torch.zeros(B, N, WIDTH), torch.ones(N, N) > 0), ValueError, "pairs"),
]


@pytest.mark.parametrize(("row", "x", "error", "match"), BAD)
def test_bad_inputs(row: Row, x: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        made(row).grad(torch.zeros(B, N, DIM).double(), x)


def test_bad_inputs_of_hidden_units() -> None:
    energy = ReLUFeedForward(DIM, 6, context_dim=WIDTH).double()
    z, x = torch.zeros(B, N, DIM).double(), torch.zeros(B, N, WIDTH).double()
    mistakes: list[tuple[Any, type[Exception], str]] = [
        (lambda: energy.grad(z, None), TypeError, r"\bx\b"),
        (lambda: energy.grad(z, x.int()), TypeError, r"\bx\b"),
        (lambda: energy.grad(z, energy.prepare(x[:, :2])), ValueError, r"\bx\b"),
        (lambda: energy.grad(z, x[:, :2], mask=torch.ones(B, N) > 0), ValueError, "mask"),
        (lambda: ReLUFeedForward(DIM, 6, gates=True), ValueError, "gates"),
        (lambda: SoftmaxFeedForward(DIM, 6, gates=True, context_dim=WIDTH), ValueError, "gates"),
    ]
    for call, error, match in mistakes:
        with pytest.raises(error, match=match):
            call()


@pytest.mark.parametrize("backend", ["reference", "flash"])
@pytest.mark.parametrize("how", ["half", "autocast"])
def test_conditional_scores_beyond_half_precision(backend: str, how: str) -> None:
    """With beta = 1e6 the scores exceed 65504, the largest number of float16.

    The energy of "flash" is a difference of log-sum-exps, in which such scores cancel.
    """
    torch.manual_seed(0)
    energy = ConditionalAttention(DIM, H, beta=1e6, score_norm=None, backend=backend)
    for projection in (energy.query, energy.key):  # exact in float16, and no scores are equal
        projection.weight.data.copy_(torch.eye(DIM))
    z, x = torch.randn(2, 2, 5, DIM).half().float()
    exact = copy.deepcopy(energy).double().value_and_grad(z.double(), x.double())
    if how == "half":
        found = energy.half().value_and_grad(z.half(), x.half())
    else:
        with torch.autocast("cpu", torch.float16):
            found = energy.value_and_grad(z, x)
    assert relative_error(found[1], exact[1]) <= 1e-2
    assert backend == "flash" or relative_error(found[0], exact[0]) <= 1e-2
