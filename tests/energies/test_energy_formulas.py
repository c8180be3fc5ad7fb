"""Each energy against its definition, written out token by token and head by head."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from cases.energies import relative_error
from cases.kernels import Allocations
from implicit_attn.energies import (
    BiSoftmaxAttention,
    DenseAssociative,
    EffectiveRBM,
    Energy,
    Field,
    GatedFeedForward,
    Hopfield,
    LinearAttention,
    Quadratic,
    ReLUFeedForward,
    RMSNorm,
    ScoreAttention,
    SoftmaxAttention,
    SoftmaxFeedForward,
)

DIM, HEADS, WIDTH, MEMORIES, BETA = 6, 2, 3, 5, 0.7


def normalised(y: Tensor, norm: RMSNorm | None) -> Tensor:
    if norm is None:
        return y
    return y / math.sqrt(sum(float(c) ** 2 for c in y) / len(y) + norm.epsilon)


def heads_of(weight: Tensor, tokens: Tensor, norm: RMSNorm | None) -> list[list[Tensor]]:
    """Projected tokens of each head: ``norm(W_h z_i)``."""
    return [
        [normalised(weight[h * WIDTH : (h + 1) * WIDTH] @ token, norm) for token in tokens]
        for h in range(HEADS)
    ]


def log_sum_exp(scores: list[float]) -> float:
    return math.log(sum(math.exp(s) for s in scores))


def by_pairs(
    energy: BiSoftmaxAttention | ScoreAttention | LinearAttention | ScoreAttention,
    z: Tensor,
    value: Callable[[list[Tensor]], float],
) -> float:
    return sum(value(y) for y in heads_of(energy.projection.weight.detach(), z, energy.norm))


def bisoftmax_value(y: list[Tensor]) -> float:
    return sum(log_sum_exp([BETA * float(a @ b) for b in y]) for a in y) / BETA


def causal_value(y: list[Tensor]) -> float:
    rows = range(len(y))
    return sum(log_sum_exp([BETA * float(y[i] @ y[j]) for j in range(i + 1)]) for i in rows) / BETA


def linear_value(y: list[Tensor], phi: Callable[[Tensor], Tensor]) -> float:
    return sum((BETA * float(phi(a) @ phi(b))) ** 2 for a in y for b in y) / (4 * BETA)


BETAS = (0.3, 1.2)
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


@pytest.fixture
def z() -> Tensor:
    return torch.randn(2, 4, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 4, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def assert_energy(energy: Energy, z: Tensor, x: Tensor | None, expected: list[float]) -> None:
    reference = torch.tensor(expected, dtype=torch.float64)
    point = z.clone().requires_grad_()
    value = energy(point, x)
    torch.testing.assert_close(value.detach(), reference, rtol=1e-12, atol=0)
    (slope,) = torch.autograd.grad(value.sum(), point)
    torch.testing.assert_close(energy.grad(z, x).detach(), slope, rtol=1e-10, atol=1e-12)


def attention_options(norm: RMSNorm | None) -> dict[str, object]:
    return {"heads": HEADS, "head_dim": WIDTH, "beta": BETA, "norm": norm}


each_norm = pytest.mark.parametrize("norm", [None, RMSNorm(1.0), RMSNorm(1e-6)], ids=str)


@each_norm
@pytest.mark.parametrize("causal", [False, True])
def test_bisoftmax(z: Tensor, norm: RMSNorm | None, causal: bool) -> None:
    torch.manual_seed(0)
    energy = BiSoftmaxAttention(DIM, causal=causal, **attention_options(norm)).double()  # type: ignore[arg-type]
    definition = causal_value if causal else bisoftmax_value
    assert_energy(energy, z, None, [by_pairs(energy, sample, definition) for sample in z])


def score_value(score: Callable[[float], float], y: list[Tensor]) -> float:
    return sum(score(BETA * float(a @ b)) for a in y for b in y) / BETA


def sigmoid(s: float) -> float:
    return 1 / (1 + math.exp(-s))


SCORES: dict[str, Callable[[float], float]] = {
    "relu": lambda s: max(s, 0.0) ** 2 / 4,
    "sigmoid": lambda s: sigmoid(s) / 2,
    "sigmoid-squared": lambda s: sigmoid(s) ** 2 / 4,
}


@each_norm
@pytest.mark.parametrize("score", SCORES)
def test_score(z: Tensor, norm: RMSNorm | None, score: str) -> None:
    torch.manual_seed(0)
    energy = ScoreAttention(DIM, score=score, **attention_options(norm)).double()  # type: ignore[arg-type]
    definition = partial(score_value, SCORES[score])
    assert_energy(energy, z, None, [by_pairs(energy, sample, definition) for sample in z])


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_by_strips(score: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens: value, gradient and its derivative as from all scores at once, without N x N numbers."""
    torch.manual_seed(0)
    energy = ScoreAttention(8, 2, score=score, beta=BETAS).to(dtype)
    z, v = torch.randn(2, 1, 1024, 8).to(dtype)
    mask = torch.rand(1, 1024) < 0.8
    with Allocations() as seen:
        value, gradient = energy.value_and_grad(z, mask=mask)
        product = energy.hvp(z, v, mask=mask)
    assert seen.largest <= 2 * 128 * 1024
    monkeypatch.setattr("implicit_attn.energies.attention.DENSE_TOKENS", 1024)
    wide = energy.double()
    exact, exact_gradient = wide.value_and_grad(z.double(), mask=mask)
    exact_product = wide.hvp(z.double(), v.double(), mask=mask)
    room = 100 * torch.finfo(dtype).eps if dtype != torch.bfloat16 else 0.05
    for found, expected in (
        (value, exact), (gradient, exact_gradient), (product, exact_product)
    ):  # fmt: skip
        assert relative_error(found.detach(), expected.detach()) <= room


@each_norm
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_linear(z: Tensor, norm: RMSNorm | None, feature_map: str) -> None:
    torch.manual_seed(0)
    options = attention_options(norm)
    energy = LinearAttention(DIM, feature_map=feature_map, **options).double()  # type: ignore[arg-type]
    phi = FEATURE_MAPS[feature_map]
    expected = [by_pairs(energy, sample, lambda y: linear_value(y, phi)) for sample in z]
    assert_energy(energy, z, None, expected)


@each_norm
@pytest.mark.parametrize("kind", ["inner", "elastic"])
@pytest.mark.parametrize("cross", [False, True])
def test_softmax(z: Tensor, x: Tensor, norm: RMSNorm | None, kind: str, cross: bool) -> None:
    torch.manual_seed(0)
    options = attention_options(norm)
    energy = SoftmaxAttention(DIM, energy=kind, cross=cross, **options).double()  # type: ignore[arg-type]

    def score(query: Tensor, key: Tensor) -> float:
        if kind == "inner":
            return BETA * float(query @ key)
        return -BETA * float((query - key) @ (query - key)) / 2

    expected = []
    for sample, context in zip(z, x if cross else z, strict=True):
        queries = heads_of(energy.query.weight.detach(), sample, norm)
        keys = heads_of(energy.key.weight.detach(), context, norm)
        total = 0.0
        for query_head, key_head in zip(queries, keys, strict=True):
            for query in query_head:
                total -= log_sum_exp([score(query, key) for key in key_head]) / BETA
        expected.append(total)
    assert_energy(energy, z, x if cross else None, expected)


def test_quadratic_and_field(z: Tensor, x: Tensor) -> None:
    pairs = list(zip(z, x, strict=True))
    assert_energy(Quadratic(), z, x, [0.5 * float(((a - b) ** 2).sum()) for a, b in pairs])
    assert_energy(Quadratic(), z, None, [0.5 * float((a**2).sum()) for a in z])
    assert_energy(Field(), z, x, [-float((a * b).sum()) for a, b in pairs])


def test_hopfield_energies(z: Tensor) -> None:
    generator = torch.Generator().manual_seed(2)
    patterns = torch.randn(MEMORIES, DIM, generator=generator, dtype=torch.float64)
    bias = torch.randn(DIM, generator=generator, dtype=torch.float64)

    def expected(value: Callable[[Tensor], float]) -> list[float]:
        return [sum(value(token) for token in sample) for sample in z]

    def overlaps(token: Tensor) -> list[float]:
        return [float(pattern @ token) for pattern in patterns]

    def modern(token: Tensor) -> float:
        lse = log_sum_exp([BETA * y for y in overlaps(token)])
        return 0.5 * float(token @ token) - lse / BETA

    def classical(token: Tensor) -> float:
        couplings = sum(torch.outer(pattern, pattern) for pattern in patterns)
        return float(-0.5 * token @ couplings @ token + bias @ token)

    assert_energy(Hopfield(patterns, beta=BETA), z, None, expected(modern))
    assert_energy(EffectiveRBM(patterns, "normal", bias=-bias), z, None, expected(classical))
    for power in (2, 3, 4):
        cubic = expected(lambda token, power=power: -sum(y**power for y in overlaps(token)))
        assert_energy(DenseAssociative(patterns, power=power), z, None, cubic)
    exponential = expected(lambda token: -sum(math.exp(y) for y in overlaps(token)))
    assert_energy(DenseAssociative(patterns, power="exp"), z, None, exponential)
    plain = DenseAssociative(patterns, power="exp")
    shifted = DenseAssociative(patterns, power="exp", shift=2.0)
    found = (shifted(z), shifted.grad(z), shifted.hvp(z, z))
    for value, same in zip(found, (plain(z), plain.grad(z), plain.hvp(z, z)), strict=True):
        torch.testing.assert_close(math.exp(2.0) * value, same)


def test_token_energies_take_states_without_tokens(z: Tensor) -> None:
    """A state (B, d) is one token a sample."""
    torch.manual_seed(0)
    energies: list[Energy] = [
        ReLUFeedForward(DIM, MEMORIES),
        SoftmaxFeedForward(DIM, MEMORIES),
        GatedFeedForward(DIM, MEMORIES),
        Hopfield(torch.randn(MEMORIES, DIM)),
        Quadratic(),
    ]
    flat = z[:, 0]
    for energy in energies:
        energy = energy.double()
        torch.testing.assert_close(energy(flat), energy(z[:, :1]))
        torch.testing.assert_close(energy.grad(flat), energy.grad(z[:, :1])[:, 0])
