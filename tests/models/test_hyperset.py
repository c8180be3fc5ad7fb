"""Hyper-SET as a backbone: iterations, trajectories, masks, parameter counts, equilibrium."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.models import HyperSET, HyperSETEquilibrium, build_backbone
from implicit_attn.updates import HyperSETLayer
from solvers import Status, Tolerance

DIM, HEADS, MEMORIES, TOKENS = 12, 3, 16, 6


def tokens(seed: int = 0, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, TOKENS, DIM, generator=generator, dtype=torch.float64)


def build(**options: Any) -> HyperSET:
    """A model whose step sizes depend on time and tokens, as after training."""
    torch.manual_seed(1)
    settings: dict[str, Any] = {"iterations": 4, "time_dim": 16} | options
    model = HyperSET(DIM, HEADS, MEMORIES, **settings).double()
    for layer in model.layers:
        if hasattr(layer.step_sizes, "last"):
            nn.init.normal_(layer.step_sizes.last.weight, std=0.05)
            nn.init.constant_(layer.step_sizes.last.bias, 0.1)
    return model


MODELS: dict[str, dict[str, Any]] = {
    "state": {},
    "input": {"step_size": "conditioned-input"},
    "learned": {"step_size": "learned"},
    "fixed-sigmoid-gelu": {"step_size": "fixed", "attention": "sigmoid", "feedforward": "gelu"},
    "linear-softmax": {"attention": "linear", "feedforward": "softmax"},
    "softmax-gated": {"attention": "softmax", "feedforward": "gated"},
    "lora": {"lora_rank": 2},
    "layers": {"layers": 2},
    "cyclic": {"layers": 2, "order": "cyclic"},
}
each_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())


@each_model
@pytest.mark.parametrize("iterations", [None, 1, 7])
def test_the_model_repeats_its_layers(options: dict[str, Any], iterations: int | None) -> None:
    model = build(**options)
    count = iterations or 4
    x = tokens()
    z, states = x, [x]
    plan = [(layer, t) for layer in range(len(model.layers)) for t in range(1, count + 1)]
    if options.get("order") == "cyclic":
        plan.sort(key=lambda step: (step[1], step[0]))
    for layer, t in plan:
        module = model.layers[layer]
        assert isinstance(module, HyperSETLayer)
        z = module(z, x, t)
        states.append(z)
    assert torch.allclose(model(x, iterations=iterations), z, atol=1e-12)
    assert torch.allclose(model.states(x, iterations=iterations), torch.stack(states), atol=1e-12)


def test_time_after_training() -> None:
    """The state after T iterations does not depend on how many follow; "hold" repeats time T."""
    x = tokens()
    extrapolating, holding = build(), build(beyond="hold")
    long = extrapolating.states(x, iterations=9)
    assert torch.equal(long[:5], extrapolating.states(x))
    held = holding.states(x, iterations=9)
    assert torch.equal(held[:5], long[:5])
    z = held[4]
    for index in range(5, 10):
        z = holding.layers[0](z, x, 4)
        assert torch.allclose(held[index], z, atol=1e-12)
    assert not torch.allclose(held[-1], long[-1], atol=1e-4)


@each_model
def test_trajectory(options: dict[str, Any]) -> None:
    model = build(**options)
    x = tokens()
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[1, 3:] = False
    with torch.no_grad():
        path = model.trajectory(x, iterations=5, mask=mask)
        assert torch.equal(path.states, model.states(x, iterations=5, mask=mask))
    number = 1 + 5 * len(model.layers)
    assert path.attention_energy.shape == path.feedforward_energy.shape == (number, 3)
    assert path.features.shape == (number, 3, HEADS, TOKENS, DIM // HEADS)
    lengths = path.features.square().mean(-1)
    counts = mask[:, None].expand(3, HEADS, TOKENS)
    assert torch.allclose(lengths[:, counts], torch.ones(1, dtype=torch.float64), atol=2e-3)
    assert (lengths[:, ~counts] == 0).all()
    if "lora_rank" in options:
        return
    steps = [*model.schedule(5), model.schedule(5)[-1]]
    for t, (layer, _) in enumerate(steps):
        module, z = model.layers[layer], path.states[t]
        for energy, seen in (
            (module.attention, path.attention_energy[t]),
            (module.feedforward, path.feedforward_energy[t]),
        ):
            assert torch.allclose(energy(z, mask=mask), seen, atol=1e-10)


def test_small_steps_lower_both_energies() -> None:
    """Descent in spite of the dropped derivative, where the projections are orthogonal."""
    model = build(step_size="fixed", initial_step=0.01, iterations=20)
    for energy in (model.layers[0].attention, model.layers[0].feedforward):
        nn.init.orthogonal_(energy.projection.weight)
    with torch.no_grad():
        path = model.trajectory(tokens())
    assert (path.attention_energy.diff(dim=0) < 0).all()
    assert (path.feedforward_energy.diff(dim=0) < 0).all()


@each_model
def test_masks(options: dict[str, Any]) -> None:
    model = build(**options)
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[0, 4:], mask[2] = False, False
    x = tokens()
    z = model(x, mask=mask)
    assert torch.equal(z[~mask], x[~mask])
    assert torch.allclose(z[:1, :4], model(x[:1, :4]), atol=1e-12)
    other = torch.where(mask.unsqueeze(-1), x, float("nan")).requires_grad_()
    result = model(other, mask=mask)
    assert torch.equal(result[mask], z[mask])
    assert torch.equal(model.states(other, mask=mask)[:, mask], model.states(x, mask=mask)[:, mask])
    gradients = torch.autograd.grad(result[mask].square().sum(), [other, *model.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][~mask] == 0).all()


@pytest.mark.parametrize(
    "options", [{}, {"attention": "sigmoid", "feedforward": "gelu"}, {"attention": "linear"}]
)
def test_equilibrium(options: dict[str, Any]) -> None:
    """The output is where the exact energy, differentiated here by autograd, is stationary."""
    torch.manual_seed(0)
    layer = {"tolerance": Tolerance(rtol=1e-10), "max_steps": 300}
    model = HyperSETEquilibrium(DIM, HEADS, MEMORIES, layer=layer, **options).double()
    x = tokens()
    z = model(x).detach().requires_grad_()
    assert model.layer.last is not None
    assert (model.layer.last.status == Status.CONVERGED).all(), model.layer.last.summary()
    energy: Any = model.layer.update.energy
    (gradient,) = torch.autograd.grad(energy(z, x).sum(), z)
    assert gradient.norm() <= 1e-8 * z.norm()
    assert not torch.allclose(z, x, atol=1e-2)
    value = energy.attention(z) + energy.feedforward(z) + 0.5 * (z - x).square().sum((1, 2))
    assert torch.allclose(energy(z, x), value)
    assert (energy(z, x) < energy(x, x)).all()


def test_bad_calls() -> None:
    model = build()
    with pytest.raises(ValueError, match=r"HyperSET: z must have the shape \(B, N, d\)"):
        model(tokens()[0])
    with pytest.raises(ValueError, match="HyperSET: mask must have the shape"):
        model(tokens(), mask=torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="width must be None for 'crate'"):
        build_backbone("crate", DIM, HEADS, 20)
    with pytest.raises(TypeError, match="momentum"):
        build_backbone("transformer", DIM, HEADS, momentum=0.9)
    with pytest.raises(ValueError, match="attention must descend an energy of all tokens"):
        HyperSETEquilibrium(DIM, HEADS, MEMORIES, attention="softmax")
    with pytest.raises(TypeError, match="dropout"):
        HyperSET(DIM, HEADS, MEMORIES, dropout=0.1)
