"""The associative-memory form: its monitored energy, its fixed points, its descent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.energies import EnergyCase, build, few_energies, masks, relative_error, tokens
from implicit_attn import DEQ, ActivationStep
from implicit_attn.energies import (
    Field,
    IdentityLagrangian,
    IsingLagrangian,
    Lagrangian,
    LayerNormLagrangian,
    ReLUFeedForward,
    ReLULagrangian,
    RMSNorm,
    RMSNormLagrangian,
    SoftmaxAttention,
    SoftmaxLagrangian,
    SphericalLagrangian,
)
from solvers import Forward, Tolerance

DIM = 8
LAGRANGIANS: dict[str, Lagrangian] = {
    "identity": IdentityLagrangian(),
    "relu": ReLULagrangian(),
    "softmax": SoftmaxLagrangian(),
    "rms": RMSNormLagrangian(),
    "layer-tiny": LayerNormLagrangian(epsilon=1e-6),
    "ising": IsingLagrangian(),
    "sphere": SphericalLagrangian(),
}
MIXED = ("bisoftmax-soft-4", "relu-none", "hopfield-cold", "softmax-inner-none-1", "composition")
CONCAVE = ("relu-none", "softmax-cross-none-1", "conditional", "dense-2", "classical", "rbm-ising")
BOUNDED = ("softmax", "rms", "layer-tiny", "ising", "sphere")  # |g| <= sqrt(d)

each_lagrangian = pytest.mark.parametrize("name", LAGRANGIANS)


def legendre(lagrangian: Lagrangian, z: Tensor, x: Tensor | None) -> Tensor:
    """``sum_i [z_i.g_i - Lag(z_i) - x_i.g_i]`` with g by automatic differentiation."""
    point = z if z.requires_grad else z.detach().requires_grad_()
    value = lagrangian.token_value(point)
    (g,) = torch.autograd.grad(value.sum(), point, create_graph=True)
    pull = z if x is None else z - x
    return ((pull * g).sum(-1) - value).sum(1)


@each_lagrangian
@few_energies(*MIXED)
@pytest.mark.parametrize("with_input", [True, False])
def test_monitored_energy_and_its_gradient(case: EnergyCase, name: str, with_input: bool) -> None:
    lagrangian = LAGRANGIANS[name]
    update = ActivationStep(build(case), lagrangian, 0.3)
    z, _ = tokens(case)
    x = tokens(case, seed=5)[0] if with_input else None
    moved, value, slope = update.joint(z, x)
    g = lagrangian.activation(z)
    expected = legendre(lagrangian, z, x) + update.energy(g, x)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(moved, update(z, x), rtol=1e-12, atol=1e-12)

    point = z.clone().requires_grad_()
    monitored = legendre(lagrangian, point, x) + update.energy(lagrangian.activation(point), x)
    (reference,) = torch.autograd.grad(monitored.sum(), point)
    assert relative_error(slope, reference) <= 1e-9
    # The step follows the force z - x + dE_int/dg, which holds no derivative of the activation.
    force = (z if x is None else z - x) + update.energy.grad(g, x)
    torch.testing.assert_close(moved, z - 0.3 * force, rtol=1e-12, atol=1e-12)
    assert ((force * slope).sum((1, 2)) >= -1e-9).all()  # downhill in every sample


@each_lagrangian
@pytest.mark.parametrize("kind", ["holes", "empty-sample"])
@few_energies("bisoftmax-soft-4", "relu-none")
def test_masked_tokens_do_not_move_and_do_not_count(case: EnergyCase, name: str, kind: str) -> None:
    update = ActivationStep(build(case), LAGRANGIANS[name], 0.3)
    z, x = tokens(case)[0], tokens(case, seed=5)[0]
    mask = masks()[kind]
    assert mask is not None
    moved, value, slope = update.joint(z, x, mask=mask)
    assert torch.equal(moved[~mask], z[~mask])
    assert torch.equal(update(z, x, mask=mask)[~mask], z[~mask])
    assert (slope[~mask] == 0).all()
    other_z, other_x = z.clone(), x.clone()
    other_z[~mask], other_x[~mask] = 7.0, -3.0
    other, other_value, _ = update.joint(other_z, other_x, mask=mask)
    torch.testing.assert_close(other[mask], moved[mask], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(other_value, value, rtol=1e-12, atol=1e-12)
    point = z.clone().requires_grad_()
    (reference,) = torch.autograd.grad(update.joint(point, x, mask=mask)[1].sum(), point)
    assert relative_error(slope, reference) <= 1e-9


@each_lagrangian
@pytest.mark.parametrize("solver", [None, Forward()], ids=str)
def test_fixed_point_condition(name: str, solver: Any) -> None:
    """``z = x - dE_int/dg(g(z))``, whatever solver and step."""
    torch.manual_seed(1)
    energy = (0.4 * ReLUFeedForward(DIM, 10, norm=None, bound=1.0)).double()
    update = ActivationStep(energy, LAGRANGIANS[name], 0.7)
    x = 2 * torch.randn(3, 4, DIM, dtype=torch.float64)
    layer = DEQ(update, solver=solver, tolerance=Tolerance(rtol=1e-11), max_steps=500)
    with torch.no_grad():
        solution = layer.solve(x)
    assert bool(solution.converged.all()), solution.summary()
    z = solution.value
    assert relative_error(x - energy.grad(update.activation(z), x), z) <= 1e-10


def descend(update: ActivationStep, z: Tensor, x: Tensor | None, steps: int) -> float:
    """Largest rise of the monitored energy along unit steps, relative to its scale."""
    worst, last = -torch.inf, None
    for _ in range(steps):
        following, value, _ = update.joint(z, x)
        if not bool(torch.isfinite(value).all() and torch.isfinite(following).all()):
            break  # unbounded below: it fell to minus infinity
        if last is not None:
            scale = torch.maximum(value.abs(), last.abs()).clamp_min(1.0)
            # Sums of large terms of both signs round at the scale of the terms.
            scale = scale.maximum(z.square().sum((1, 2)))
            worst = max(worst, ((value - last) / scale).max().item())
        z, last = following, value
    return worst


@each_lagrangian
@few_energies(*CONCAVE)
def test_unit_step_never_raises_the_energy_of_concave_interactions(
    case: EnergyCase, name: str
) -> None:
    """Any weights, small or large: the concave part lies below its tangent."""
    for seed, strength in enumerate((1.0, 100.0)):
        torch.manual_seed(seed)
        energy = case.factory(DIM).double()
        with torch.no_grad():
            for tensor in (*energy.parameters(), *energy.buffers()):
                tensor.mul_(strength)
        z, x = 3 * tokens(case, seed=seed)[0], tokens(case, seed=seed + 50)[0]
        rise = descend(ActivationStep(energy, LAGRANGIANS[name]), z, x, steps=4)
        assert rise <= 1e-12, (seed, strength)
        if name in BOUNDED:
            assert rise > -torch.inf  # some step was really compared


@pytest.mark.parametrize("name", ["softmax", "rms", "sphere"])
def test_gradients_through_the_layer(name: str) -> None:
    torch.manual_seed(4)
    energy = (0.5 * SoftmaxAttention(4, 2, cross=True, norm=RMSNorm(1.0), bound=1.0)).double()
    update = ActivationStep(energy, LAGRANGIANS[name])
    layer = DEQ(update, tolerance=Tolerance(rtol=1e-13), max_steps=300, on_failure="raise")
    x = torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x), (x,))


@pytest.mark.parametrize(
    ("energy", "lagrangian", "message"),
    [
        (torch.nn.Linear(2, 2), IdentityLagrangian(), "energy must be an Energy"),
        (Field(), RMSNormLagrangian, "lagrangian must be a Lagrangian, got"),
    ],
)
def test_bad_arguments(energy: Any, lagrangian: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ActivationStep(energy, lagrangian)
