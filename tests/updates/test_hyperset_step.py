"""The paper's step against a dense transcription of its equations, and every variant against autograd."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn.energies.hyperset import ATTENTIONS, FEEDFORWARDS
from implicit_attn.updates import HyperSETLayer

DIM, HEADS, WIDTH, MEMORIES, TOKENS = 12, 3, 4, 20, 7
EPSILON = 1e-6


def tokens(seed: int = 0, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, TOKENS, DIM, generator=generator, dtype=torch.float64)


def build(**options: Any) -> Any:
    torch.manual_seed(3)
    return HyperSETLayer(DIM, HEADS, MEMORIES, **options).double()


def rms(y: Tensor) -> Tensor:
    return y / (y.pow(2).mean() + EPSILON).sqrt()


def transcription(
    x: Tensor, w: Tensor, d: Tensor, alpha: Tensor | float, gamma: Tensor | float
) -> Tensor:
    """Equations 8 to 11 for one sample ``x`` (N, d): ``w`` (d, H, p), ``d`` (d, M); token by token."""
    count = len(x)
    total = torch.zeros_like(x)
    for head in range(HEADS):
        subspace = w[:, head]
        y = [rms(subspace.T @ x[i]) for i in range(count)]
        scores = torch.stack(
            [torch.stack([y[i] @ y[j] for j in range(count)]) for i in range(count)]
        )
        weights = torch.exp(scores / math.sqrt(WIDTH))
        rows = weights / weights.sum(dim=1, keepdim=True)
        columns = weights / weights.sum(dim=0, keepdim=True)
        for i in range(count):
            pulled = sum((rows[i, j] + columns[i, j]) * y[j] for j in range(count))
            total[i] += subspace @ pulled
    x = x - alpha * total
    recalled = torch.stack([d @ torch.clamp(rms(d.T @ token), min=0.0) for token in x])
    return x + gamma * recalled


def paper_weights(layer: Any) -> tuple[Tensor, Tensor]:
    """W (d, H, p) and D (d, M) of a layer."""
    w = layer.attention.projection.weight.detach()
    return w.view(HEADS, WIDTH, DIM).permute(
        2, 0, 1
    ), layer.feedforward.projection.weight.detach().T


@pytest.mark.parametrize(("alpha", "gamma"), [(0.1, 0.1), (0.7, 0.2), (1.0, 1.5)])
def test_the_step_is_the_papers(alpha: float, gamma: float) -> None:
    step, z = build(step_size="fixed"), tokens()
    step.step_sizes.attention.initial, step.step_sizes.feedforward.initial = alpha, gamma
    expected = torch.stack([transcription(x, *paper_weights(step), alpha, gamma) for x in z])
    assert (step(z, z, 1) - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("source", ["state", "input"])
@pytest.mark.parametrize("t", [1, 2, 9])
def test_the_conditioned_step_is_the_papers(source: str, t: int) -> None:
    """The network of time and tokens is transcribed here too, token by token."""
    layer = build(step_size=f"conditioned-{source}", time_dim=16)
    network = layer.step_sizes
    torch.manual_seed(5)
    for parameter in network.last.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    z, x0 = tokens(1), tokens(2)
    frequencies = [10_000.0 ** (-k / 7) for k in range(8)]
    waves = [math.sin(t * f) for f in frequencies] + [math.cos(t * f) for f in frequencies]
    first, _, second = network.embedding
    embedded = second(normal_gelu(first(torch.tensor(waves, dtype=torch.float64))))
    steps = torch.empty(*z.shape[:2], 2 * DIM, dtype=torch.float64)
    for b in range(len(z)):
        for i in range(TOKENS):
            condition = rms((z if source == "state" else x0)[b, i])
            steps[b, i] = network.last(normal_gelu(embedded + condition)).detach()
    alpha, gamma = steps[..., :DIM], steps[..., DIM:]
    expected = [
        transcription(z[b], *paper_weights(layer), alpha[b], gamma[b]) for b in range(len(z))
    ]
    assert steps.std() > 0.1
    assert (layer(z, x0, t) - torch.stack(expected)).abs().max() <= 1e-10


def normal_gelu(y: Tensor) -> Tensor:
    return y * 0.5 * (1.0 + torch.erf(y / math.sqrt(2.0)))


@pytest.mark.parametrize("name", ["relu", "softmax", "gated", "gelu"])
def test_without_norm_the_step_is_the_whole_gradient(name: str) -> None:
    """Nothing is dropped where there is no norm to differentiate."""
    torch.manual_seed(0)
    energy = FEEDFORWARDS[name](DIM, MEMORIES, norm=None).double()
    assert torch.allclose(energy.straight_gradient(tokens()), energy.grad(tokens()), atol=1e-13)
    normed = FEEDFORWARDS[name](DIM, MEMORIES).double()
    assert not torch.allclose(normed.straight_gradient(tokens()), normed.grad(tokens()), atol=1e-3)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("conditioned", [False, True])
def test_masks(attention: str, conditioned: bool) -> None:
    """Masked tokens keep their state and change nothing for the others, whatever they hold."""
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[0, 2:4], mask[1, 5:], mask[2] = False, False, False
    kind = "conditioned-state" if conditioned else "fixed"
    step = build(attention=attention, step_size=kind, initial_step=0.2, time_dim=8)
    run = lambda z, mask=None: step(z, z, 3, mask=mask)  # noqa: E731
    z = tokens(batch=3)
    full = run(z, mask=mask)
    assert torch.equal(full[~mask], z[~mask])
    assert torch.allclose(full[:1, mask[0]], run(z[:1, mask[0]]), atol=1e-12)
    assert torch.allclose(full[1:2, mask[1]], run(z[1:2, mask[1]]), atol=1e-12)
    other = torch.where(mask.unsqueeze(-1), z, float("nan"))
    result = run(other, mask=mask)
    assert torch.equal(result[mask], full[mask])
    gradients = torch.autograd.grad(result[mask].square().sum(), list(step.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_dim": 7}, "time_dim must be even and >= 4, got 7"),
        ({"lora_rank": 2, "iterations": 0}, "iterations must be >= 1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        HyperSETLayer(DIM, HEADS, MEMORIES, **options)
