"""The layer of Hyper-SET: its step, its step sizes, low-rank differences, what the official code adds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.energies.feedforward import ATTENTIONS, FEEDFORWARDS
from implicit_attn.models import HyperSET
from implicit_attn.updates import ConditionedStepSizes, HyperSETLayer
from implicit_attn.updates.hyperset import DESCENTS, build_step_sizes, descend

DIM, HEADS, WIDTH, MEMORIES, TOKENS = 12, 3, 4, 20, 7
EPSILON = 1e-6


def tokens(seed: int = 0, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, TOKENS, DIM, generator=generator, dtype=torch.float64)


def build(**options: Any) -> Any:
    torch.manual_seed(3)
    return HyperSETLayer(DIM, HEADS, MEMORIES, **options).double()


def rms(y: Tensor) -> Tensor:
    return y / (y.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()


def paper(layer: Any, x: Tensor, alpha: Tensor | float, gamma: Tensor | float) -> Tensor:
    """Equations 8 to 11 for ``x`` (B, N, d), with the weights W (H p, d) and D^T (M, d) of a layer."""
    w, d = (e.projection.weight.detach() for e in (layer.attention, layer.feedforward))
    y = rms((x @ w.T).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2))
    weights = (y @ y.mT / math.sqrt(WIDTH)).exp()
    both = weights / weights.sum(-1, keepdim=True) + weights / weights.sum(-2, keepdim=True)
    x = x - alpha * ((both @ y).transpose(1, 2).flatten(2) @ w)
    return x + gamma * (rms(x @ d.T).clamp_min(0.0) @ d)


def test_the_step_is_the_papers() -> None:
    step, z = build(step_size="fixed"), tokens()
    step.step_sizes.attention.initial, step.step_sizes.feedforward.initial = 0.7, 0.2
    assert (step(z, z, 1) - paper(step, z, 0.7, 0.2)).abs().max() <= 1e-10


@pytest.mark.parametrize(("source", "t"), [("state", 1), ("input", 9)])
def test_the_conditioned_step_is_the_papers(source: str, t: int) -> None:
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
    steps = network.last(normal_gelu(embedded + rms(z if source == "state" else x0))).detach()
    assert steps.std() > 0.1
    expected = paper(layer, z, steps[..., :DIM], steps[..., DIM:])
    assert (layer(z, x0, t) - expected).abs().max() <= 1e-10


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
def test_masks(attention: str) -> None:
    """Masked tokens keep their state and change nothing for the others, whatever they hold."""
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[0, 2:4], mask[1, 5:], mask[2] = False, False, False
    step, z = build(attention=attention, initial_step=0.2, time_dim=8), tokens(batch=3)
    full = step(z, z, 3, mask=mask)
    assert torch.equal(full[~mask], z[~mask])
    for i in range(2):
        short = z[i, mask[i]][None]
        assert torch.allclose(full[i, mask[i]][None], step(short, short, 3), atol=1e-12)
    other = torch.where(mask.unsqueeze(-1), z, float("nan"))
    result = step(other, other, 3, mask=mask)
    assert torch.equal(result[mask], full[mask])
    gradients = torch.autograd.grad(result[mask].square().sum(), list(step.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("kind", ["conditioned-state", "conditioned-input"])
def test_the_network_starts_at_its_initial_step(kind: str) -> None:
    """With 0 the layer starts as the identity; its step sizes learn first, then its projections."""
    torch.manual_seed(0)
    for initial in (None, 0.25):
        sizes = build_step_sizes(kind, DIM, initial=initial).double()
        for step in sizes(tokens(), sizes.prepare(tokens(1), torch.arange(1, 4)), 2):
            assert torch.equal(step, torch.full_like(tokens(), initial or 0.0))
    layer, z = build(step_size=kind, time_dim=16), tokens()
    assert torch.equal(layer(z, z, 1), z)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for moves in (False, True):
        before = layer.attention.projection.weight.detach().clone()
        optimizer.zero_grad()
        layer(z, z, 1).square().sum().backward()
        optimizer.step()
        assert torch.equal(layer.attention.projection.weight, before) != moves


def official(**options: Any) -> HyperSET:
    """A model whose step sizes depend on time and tokens."""
    torch.manual_seed(1)
    settings = {"iterations": 3, "time_dim": 8, "initial_step": 0.2} | options
    model = HyperSET(DIM, HEADS, MEMORIES, **settings).double()
    nn.init.normal_(model.layers[0].step_sizes.last.weight, std=0.05)
    return model


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gains_of_one_change_nothing(attention: str) -> None:
    plain = official(attention=attention, epsilon=1e-6)
    gained = official(attention=attention, epsilon=1e-6, gains="separate")
    gained.load_state_dict(plain.state_dict(), strict=False)
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[1, 3:] = False
    for seen in (None, mask):
        assert torch.allclose(gained(tokens(), mask=seen), plain(tokens(), mask=seen), atol=1e-12)
    nn.init.constant_(gained.layers[0].gains.query.weight, 0.7)
    assert not torch.allclose(gained(tokens()), plain(tokens()), atol=1e-3)


@pytest.mark.parametrize("kind", DESCENTS)
def test_descents_are_those_of_torch(kind: str) -> None:
    position = nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
    rules: dict[str, Any] = {
        "plain": torch.optim.SGD([position], 1.0),
        "momentum": torch.optim.SGD([position], 1.0, momentum=0.9),
        "rmsprop": torch.optim.RMSprop([position], 1.0, alpha=0.8, eps=1e-6),
        "rmsprop-momentum": torch.optim.RMSprop([position], 1.0, alpha=0.8, eps=1e-6, momentum=0.9),
        "adam": torch.optim.Adam([position], 1.0, betas=(0.9, 0.96), eps=1e-6),
    }
    kept: dict[str, Any] = {}
    for _ in range(4):
        before = position.detach().clone()
        position.grad = torch.randn_like(position)
        rules[kind].step()
        step = descend(kind, kept, position.grad)
        torch.testing.assert_close(before - step, position.detach(), rtol=1e-12, atol=1e-12)


MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: build(time_dim=7), ValueError, "time_dim"),
    (lambda: build(lora_rank=2, iterations=0), ValueError, "iterations"),
    (lambda: ConditionedStepSizes(DIM, "token"), ValueError, "source"),
    (lambda: build(descent="sgd"), ValueError, "descent"),
    (lambda: build(step_network="raw", step_size="fixed"), ValueError, "step_size"),
    (lambda: build(step_network="sinusoids"), ValueError, "time_dim"),
    (lambda: build(epsilon=None), TypeError, "epsilon"),
]


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES)
def test_mistakes(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
