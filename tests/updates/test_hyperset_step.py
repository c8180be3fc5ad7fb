"""The paper's step against a dense transcription of its equations, and every variant against autograd."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.official import PHI
from implicit_attn import DEQ
from implicit_attn.energies.hyperset import ATTENTIONS, FEEDFORWARDS
from implicit_attn.updates import HyperSETLayer, HyperSETStep
from solvers import Status, Tolerance

DIM, HEADS, WIDTH, MEMORIES, TOKENS = 12, 3, 4, 20, 7
EPSILON = 1e-6


def tokens(seed: int = 0, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, TOKENS, DIM, generator=generator, dtype=torch.float64)


def build(cls: Callable[..., Any] = HyperSETStep, **options: Any) -> Any:
    torch.manual_seed(3)
    return cls(DIM, HEADS, MEMORIES, **options).double()


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
    step = build(step_size=(alpha, gamma))
    z = tokens()
    expected = torch.stack([transcription(x, *paper_weights(step), alpha, gamma) for x in z])
    assert (step(z) - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("source", ["state", "input"])
@pytest.mark.parametrize("t", [1, 2, 9])
def test_the_conditioned_step_is_the_papers(source: str, t: int) -> None:
    """The network of time and tokens is transcribed here too, token by token."""
    layer = build(HyperSETLayer, step_size=f"conditioned-{source}", time_dim=16)
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


# The energies of the variants, per head (N, p) or per token (M,), as their sources write them.
def bisoftmax_energy(y: Tensor, keys: Tensor, beta: float) -> Tensor:
    return (beta * y @ keys.T).logsumexp(-1).sum() / beta


def sigmoid_energy(y: Tensor, keys: Tensor, beta: float) -> Tensor:
    return torch.sigmoid(beta * y @ keys.T).sum() / (2.0 * beta)


def linear_energy(y: Tensor, keys: Tensor, beta: float) -> Tensor:
    return (beta * y @ keys.T).square().sum() / (4.0 * beta)


def gelu_energy(y: Tensor) -> Tensor:
    """Minus the integral of GELU from far below, by Simpson's rule."""
    nodes = torch.linspace(0.0, 1.0, 2001, dtype=torch.float64)
    weights = torch.full_like(nodes, 2.0)
    weights[1::2] = 4.0
    weights[0] = weights[-1] = 1.0
    low = -12.0
    points = low + (y.unsqueeze(-1) - low) * nodes
    return -(normal_gelu(points) * weights).sum(-1).mul((y - low) / 6000.0).sum()


def relu_score_energy(y: Tensor, keys: Tensor, beta: float) -> Tensor:
    return (beta * y @ keys.T).clamp_min(0.0).square().sum() / (4.0 * beta)


def squared_score_energy(y: Tensor, keys: Tensor, beta: float) -> Tensor:
    return torch.sigmoid(beta * y @ keys.T).square().sum() / (4.0 * beta)


def mapped_energy(phi: Callable[[Tensor], Tensor], y: Tensor, keys: Tensor, beta: float) -> Tensor:
    return linear_energy(phi(y), phi(keys), beta)


def gated_energy(phi: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    return -0.5 * phi(y).sum().square()


OUR_NAMES = {"elup1": "elu", "elu": "plain-elu"}
MAPS = {OUR_NAMES.get(name, name): phi for name, phi in PHI.items()}
ATTENTION_ENERGIES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "bisoftmax": bisoftmax_energy,
    "sigmoid": sigmoid_energy,
    "linear": linear_energy,
    "softmax": bisoftmax_energy,  # each token its own term: the keys are held
    "relu": relu_score_energy,
    "sigmoid-squared": squared_score_energy,
    **{f"linear-{name}": partial(mapped_energy, phi) for name, phi in MAPS.items()},
}
FEEDFORWARD_ENERGIES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda y: -0.5 * y.clamp_min(0.0).square().sum(),
    "softmax": lambda y: -y.exp().sum().log(),
    "gated": lambda y: -0.5 * normal_gelu(y).sum().square(),
    "gelu": gelu_energy,
    **{f"gated-{name}": partial(gated_energy, phi) for name, phi in MAPS.items() if name != "gelu"},
}


def test_every_variant_has_its_energy_here() -> None:
    assert ATTENTION_ENERGIES.keys() == ATTENTIONS.keys()
    assert FEEDFORWARD_ENERGIES.keys() == FEEDFORWARDS.keys()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_steps_follow_the_gradient(name: str) -> None:
    step = build(attention=name, step_size=(0.6, 1e-300))
    z = tokens()
    w, _ = paper_weights(step)
    expected = z.clone()
    for b in range(len(z)):
        for head in range(HEADS):
            y = torch.stack([rms(w[:, head].T @ x) for x in z[b]]).requires_grad_()
            keys = y.detach() if name == "softmax" else y
            energy = ATTENTION_ENERGIES[name](y, keys, WIDTH**-0.5)
            (gradient,) = torch.autograd.grad(energy, y)
            expected[b] -= 0.6 * gradient @ w[:, head].T
    assert (step(z) - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("name", FEEDFORWARDS)
def test_feedforward_steps_follow_the_gradient(name: str) -> None:
    step = build(feedforward=name, step_size=(1e-300, 0.6))
    z = tokens()
    _, d = paper_weights(step)
    expected = z.clone()
    for b in range(len(z)):
        for i in range(TOKENS):
            y = rms(d.T @ z[b, i]).requires_grad_()
            (gradient,) = torch.autograd.grad(FEEDFORWARD_ENERGIES[name](y), y)
            expected[b, i] -= 0.6 * d @ gradient
    assert (step(z) - expected).abs().max() <= (1e-9 if name == "gelu" else 1e-10)


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
    if conditioned:
        step = build(HyperSETLayer, attention=attention, initial_step=0.2, time_dim=8)
        run = lambda z, mask=None: step(z, z, 3, mask=mask)  # noqa: E731
    else:
        step = build(attention=attention, injection=0.3)
        run = lambda z, mask=None: step(z, 0.5 * z, mask=mask)  # noqa: E731
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


def test_an_injection_makes_an_equilibrium() -> None:
    """The autonomous step with an injection can be solved; the norm's derivative is not needed."""
    step = build(step_size=0.02, injection=0.5, epsilon=1.0)
    x = tokens()
    layer = DEQ(step, tolerance=Tolerance(rtol=1e-10), max_steps=300)
    solution = layer.solve(x)
    assert (solution.status == Status.CONVERGED).all(), solution.summary()
    z = x
    for _ in range(400):
        z = step(z, x)
    assert torch.allclose(solution.value, z, atol=1e-7)
    assert not torch.allclose(z, x, atol=1e-2)


def test_gradients_reach_everything() -> None:
    layer = build(HyperSETLayer, initial_step=0.1, lora_rank=2, iterations=3, time_dim=8)
    torch.nn.init.normal_(layer.step_sizes.last.weight, std=0.1)
    z, x0 = tokens(1).requires_grad_(), tokens(2)
    layer(z, x0, 2).square().sum().backward()
    assert z.grad is not None and z.grad.abs().min() > 0
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        if "deltas" in name:  # of the second iteration alone
            used = parameter.grad.abs().flatten(1).amax(1) > 0
            assert used.tolist() == [False, True, False], name


BAD: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    (HyperSETStep, {"attention": "cosine"}, ValueError, "attention must be one of ('bisoftmax', "),
    (HyperSETStep, {"feedforward": "mlp"}, ValueError, "feedforward must be one of ('relu', "),
    (HyperSETStep, {"step_size": 0.0}, ValueError, "step_size must be finite and > 0, got 0.0"),
    (HyperSETStep, {"injection": 1.5}, ValueError, "injection must be a number from 0 to 1, got"),
    (HyperSETStep, {"epsilon": 0.0}, ValueError, "epsilon must be finite and > 0, got 0.0"),
    (HyperSETLayer, {"step_size": "adam"}, ValueError, "step_size must be one of ("),
    (HyperSETLayer, {"time_dim": 7}, ValueError, "time_dim must be even and >= 4, got 7"),
    (HyperSETLayer, {"lora_rank": -1}, ValueError, "lora_rank must be >= 0, got -1"),
    (HyperSETLayer, {"lora_rank": 2, "iterations": 0}, ValueError, "iterations must be >= 1"),
    (HyperSETLayer, {"head_dim": 0}, ValueError, "head_dim must be >= 1, got 0"),
    (HyperSETLayer, {"initial_step": math.inf}, ValueError, "initial must be finite, got inf"),
]


@pytest.mark.parametrize(("cls", "options", "error", "message"), BAD, ids=[str(b[1]) for b in BAD])
def test_bad_arguments(
    cls: Callable[..., Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        cls(DIM, HEADS, MEMORIES, **options)


def test_bad_states() -> None:
    with pytest.raises(ValueError, match=r"t must be >= 1, got 0"):
        build(HyperSETLayer, time_dim=8)(tokens(), tokens(), 0)
    with pytest.raises(ValueError, match=r"z must have 12 features"):
        build()(torch.zeros(2, 3, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x must have the shape of z"):
        build(injection=0.1)(tokens(), tokens()[:, 1:])
    with pytest.raises(ValueError, match="heads must divide dim=12"):
        HyperSETStep(DIM, 5, MEMORIES)
