"""The baselines against dense transcriptions of their papers' equations, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.models import CRATE, EnergyTransformer, SharedTransformer

DIM, HEADS, WIDTH, TOKENS = 12, 3, 4, 6
MODELS: dict[str, Callable[..., Any]] = {
    "transformer": SharedTransformer,
    "energy-transformer": EnergyTransformer,
    "crate": CRATE,
}
each_model = pytest.mark.parametrize("name", MODELS)


def tokens(seed: int = 0, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, TOKENS, DIM, generator=generator, dtype=torch.float64)


def build(name: str, **options: Any) -> Any:
    torch.manual_seed(2)
    if name == "energy-transformer":
        options = {"step_size": 0.1} | options
    model = MODELS[name](DIM, HEADS, **{"iterations": 3} | options).double()
    for parameter in model.parameters():
        if parameter.dim() < 2:  # gains and offsets away from one and zero
            nn.init.uniform_(parameter, 0.2, 0.9)
    return model


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
    )


def softmax_rows(scores: Tensor) -> Tensor:
    return scores.exp() / scores.exp().sum(-1, keepdim=True)


def transformer_step(layer: Any, x: Tensor) -> Tensor:
    """One sample (N, d), head by head."""
    y = layer_norm(x, layer.attention_norm)
    query, key, value = layer.queries_keys_values.weight.chunk(3)
    heads = []
    for head in range(HEADS):
        rows = slice(head * WIDTH, (head + 1) * WIDTH)
        q, k, v = y @ query[rows].T, y @ key[rows].T, y @ value[rows].T
        heads.append(softmax_rows(q @ k.T / math.sqrt(WIDTH)) @ v)
    x = x + torch.cat(heads, -1) @ layer.output.weight.T
    hidden = (layer_norm(x, layer.feedforward_norm) @ layer.widen.weight.T).clamp_min(0.0)
    return x + hidden @ layer.narrow.weight.T


def crate_step(layer: Any, x: Tensor) -> Tensor:
    y = layer_norm(x, layer.attention_norm)
    moved = x + layer.output.bias
    for head in range(HEADS):
        rows = slice(head * WIDTH, (head + 1) * WIDTH)
        v = y @ layer.subspaces.weight[rows].T
        compressed = softmax_rows(v @ v.T / math.sqrt(WIDTH)) @ v
        moved = moved + compressed @ layer.output.weight[:, rows].T
    z = layer_norm(moved, layer.feedforward_norm)
    d = layer.dictionary
    step = torch.stack([token + 0.1 * d.T @ (token - d @ token) - 0.1 * 0.1 for token in z])
    return step.clamp_min(0.0)


def energy_of_activation(layer: Any, g: Tensor) -> Tensor:
    """The Energy Transformer's two energies of one sample (N, d), head by head."""
    attention = layer.attention
    betas = [attention.beta] * HEADS if isinstance(attention.beta, float) else attention.beta
    others = torch.ones(len(g), len(g), dtype=g.dtype)
    if attention.exclude_self:
        others = others - torch.eye(len(g), dtype=g.dtype)
    value = torch.zeros((), dtype=g.dtype)
    for head, beta in enumerate(betas):
        rows = slice(head * WIDTH, (head + 1) * WIDTH)
        q = g @ attention.query.weight[rows].T
        k = g @ attention.key.weight[rows].T
        if attention.query_bias is not None:
            q, k = q + attention.query_bias[rows], k + attention.key_bias[rows]
        value = value - (others * (beta * q @ k.T).exp()).sum(-1).log().sum() / beta
    hidden = g @ layer.feedforward.projection.weight.T
    if layer.feedforward.bias is not None:
        hidden = hidden + layer.feedforward.bias
    hidden = hidden.clamp_min(0.0)
    return value - 0.5 * hidden.square().sum()


def activation(layer: Any, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    unit = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return layer.gain * unit + layer.shift


def energy_transformer_step(layer: Any, x: Tensor) -> Tensor:
    g = activation(layer, x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(energy_of_activation(layer, g), g)
    return x - 0.1 * gradient


STEPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "transformer": transformer_step,
    "energy-transformer": energy_transformer_step,
    "crate": crate_step,
}


@each_model
def test_the_step_is_its_papers(name: str) -> None:
    model = build(name)
    x = tokens()
    expected = torch.stack([STEPS[name](model.layers[0], sample) for sample in x])
    result = model(x, iterations=1)
    assert (result - expected).abs().max() <= 1e-10
    assert not torch.allclose(result, x, atol=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"beta": [0.2, 0.5, 1.3]},
        {"learned_beta": True, "bias": True},
        {"exclude_self": True},
        {"memory_bias": True},
    ],
    ids=str,
)
def test_the_energy_transformer_with_its_published_options(options: dict[str, Any]) -> None:
    """On copied weights: biases of queries and keys, temperatures of heads, no self term."""
    model, plain = build("energy-transformer", **options), build("energy-transformer")
    model.load_state_dict(plain.state_dict() | _new(model, plain))
    x = tokens()
    expected = torch.stack([energy_transformer_step(model.layers[0], sample) for sample in x])
    result = model(x, iterations=1)
    assert (result - expected).abs().max() <= 1e-10
    assert not torch.allclose(result, plain(x, iterations=1), atol=1e-3)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    result.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def _new(model: nn.Module, plain: nn.Module) -> dict[str, Tensor]:
    """What only the first of two models has in its state."""
    known = plain.state_dict()
    return {name: value for name, value in model.state_dict().items() if name not in known}


def test_the_energy_transformer_descends() -> None:
    """The step leaves the norm's derivative out and descends, for it is positive semidefinite."""
    model = build("energy-transformer", step_size=0.02)
    layer = model.layers[0]
    with torch.no_grad():
        states = model.states(tokens(), iterations=30)
        energies = torch.stack([layer.energy(z) for z in states])
        for index, sample in enumerate(states[4]):
            value = energy_of_activation(layer, activation(layer, sample))
            assert torch.allclose(energies[4, index], value)
    assert (energies.diff(dim=0) < 0).all()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="sparsity must be finite and > 0"):
        CRATE(DIM, HEADS, sparsity=0.0)
    with pytest.raises(ValueError, match="order must be one of"):
        CRATE(DIM, HEADS, order="none")
    with pytest.raises(ValueError, match="heads must divide dim=12"):
        CRATE(DIM, 5)
