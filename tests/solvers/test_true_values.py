"""What a solve reports is true of the value that it returns; unknown gradients are not finite."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import solvers
from cases.solves import normal
from implicit_attn import DEQ, EquilibriumBlock, GradientStep, check_energy
from implicit_attn.energies import Quadratic
from solvers import Tolerance, fixed_point


def true_residuals(f: Any, z: Tensor, *args: Tensor) -> Tensor:
    value = f(z, *args)
    return (value - z).flatten(1).norm(dim=1) / value.flatten(1).norm(dim=1)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_rows_that_influence_each_other_are_one_sample(scale: float) -> None:
    """The nodes of a graph have exact gradients as ``z[None]``; as samples they are INCONSISTENT or fail."""
    nodes = 30
    adjacency = (normal(nodes, nodes) > 1.3).double()
    adjacency = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
    weight = (normal(4, 4) / 4).requires_grad_()
    x = normal(nodes, 4, seed=1)

    def f(z: Tensor, x: Tensor) -> Tensor:
        return 0.8 * torch.tanh(adjacency @ z @ weight) + x

    z = x
    for _ in range(300):
        z = f(z, x)
    losses = scale * torch.logspace(-3, 3, nodes)
    (exact,) = torch.autograd.grad((losses[:, None] * z.square()).sum(), weight)
    found = fixed_point(f, x[None], (x[None],), solver="forward", tolerance=1e-7, max_steps=200)
    assert found.converged.all()
    loss = (losses[:, None] * found.value.square()).sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert found.adjoint.solution is not None and found.adjoint.solution.converged.all()
    torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


@pytest.mark.parametrize("gradients", [False, True])
def test_rows_that_influence_each_other_are_inconsistent(gradients: bool) -> None:
    """At every solve, and the advice names ``z[None]``."""
    x = normal(40, 3) * torch.logspace(-3, 0.5, 40)[:, None]
    x.requires_grad_(gradients)
    for _ in range(12):
        with pytest.warns(solvers.SolveWarning, match=r"z\[None\]"):
            found = fixed_point(
                lambda z, x: 0.5 * z + 0.3 * z.mean(0) + x, torch.zeros_like(x), (x,),
                solver="forward", max_steps=200,
            )  # fmt: skip
        assert "INCONSISTENT" in found.statuses
        value = found.value.detach()
        residuals = true_residuals(lambda z, x: 0.5 * z + 0.3 * z.mean(0) + x, value, x.detach())
        torch.testing.assert_close(found.residual, residuals.double(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("solver", ["anderson", "newton", "gradientdescent", "lbfgs"])
def test_residuals_are_not_rounded_to_the_size_of_the_state(
    solver: str, masked: bool, gradients: bool
) -> None:
    """In float32 a state of a million changes by at least 0.06, so ``f(z) - z`` is zero long before F."""
    x = torch.tensor([[1000003.0, 7.0], [-1e6, 1000.25]]).requires_grad_(gradients)

    def slope(z: Tensor, x: Tensor) -> Tensor:
        return 0.01 * (z - x) / torch.tensor([1.0, 3.0])

    def energy(z: Tensor, x: Tensor) -> Tensor:
        return (0.5 * slope(z, x) * (z - x)).sum(1)

    mask = torch.tensor([[True, False], [True, True]]) if masked else None
    options: dict[str, Any] = {"max_steps": 4, "on_failure": "ignore", "mask": mask}
    start = torch.tensor([[1e6, 0.0], [-1e6, 0.0]])
    for find in (
        solvers.root,
        lambda f, *args, **rest: fixed_point(solvers.Descent(energy), *args, **rest),
    ):
        if find is solvers.root and solver in ("gradientdescent", "lbfgs"):
            continue
        found = find(slope, start, (x,), solver=solver, **options)
        exact = slope(found.value.detach(), x.detach())
        exact = exact if mask is None else exact.where(mask, 0.0)
        norms = exact.norm(dim=1)
        torch.testing.assert_close(found.residual_norm, norms, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("unit", [1e-3, 1.0, 64.0, 1e3, 1e4, 1e6])
def test_rounding_of_an_energy_in_other_units_is_not_inconsistent(unit: float) -> None:
    """Rows that have converged leave the batch, and matrix products of fewer rows are rounded otherwise."""
    for seed in range(10):
        weight, x = normal(3 + seed, 3 + seed, seed=seed).float(), normal(6, 3 + seed).float()

        def energy(z: Tensor, x: Tensor, weight: Tensor = weight) -> Tensor:
            return unit * (0.5 * z**2 + 0.025 * z**4 - (x @ weight.T) * z).sum(1)

        found = fixed_point(
            solvers.Descent(energy), torch.zeros_like(x), (x,), max_steps=100, tolerance=1e-5
        )
        assert found.converged.all()


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("solver", [None, "anderson", "broyden", "forward", "newton"])
def test_one_step_does_not_show_the_error(solver: str | None, watched: bool) -> None:
    """After the first step the residual is 5e-4, and the error 0.05: the slow direction has not been seen."""
    rates, b = torch.tensor([0.0, 0.99], dtype=torch.float64), normal(3, 2).double()
    b[:, 0], b[:, 1] = 1.0, torch.tensor([1e-4, 5e-4, 9e-4])
    exact = b / (1 - rates)
    for dtype in (torch.float64, torch.float32):
        found = fixed_point(
            lambda z, b: rates.to(z) * z + b, torch.zeros(3, 2, dtype=dtype), (b.to(dtype),),
            solver=solver, tolerance=1e-3, record=watched, max_steps=5000,
        )  # fmt: skip
        assert found.converged.all()
        error = (found.value - exact).norm(dim=1) / exact.norm(dim=1)
        assert (error <= 2e-3).all()


@pytest.mark.parametrize("gain", [0.5, 30.0, 1000.0])
@pytest.mark.parametrize("solver", [None, "newton"])
def test_affine_maps_with_large_derivatives(solver: str | None, gain: float) -> None:
    """One step of Newton's method is exact, and the next one is less than rounding."""
    a = -gain * torch.eye(5, dtype=torch.float64) + 0.1 * normal(5, 5).double()
    b = normal(20, 5, seed=1).double()
    found = fixed_point(
        lambda z, b: z @ a + b, torch.zeros_like(b), (b,), solver=solver, max_steps=500
    )
    assert found.converged.all()
    exact = torch.linalg.solve(torch.eye(5, dtype=torch.float64) - a.T, b.T).T
    torch.testing.assert_close(found.value, exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["root", "energy"])
def test_a_measure_sees_small_units(kind: str) -> None:
    """A step of 1e-10 does not change the state, nor what is measured of it."""

    def energy(z: Tensor) -> Tensor:
        return 0.5e-8 * (z - 3).square().sum(1)

    start, options = torch.ones(2, 3), {"measure": lambda z: 2 * z[:, :2], "max_steps": 200}
    if kind == "root":
        found = solvers.root(lambda z: 1e-10 * (z - 3), start, **options)
    else:
        found = fixed_point(solvers.Descent(energy), start, **options)
    assert found.converged.all()
    torch.testing.assert_close(found.value, torch.full((2, 3), 3.0), rtol=1e-3, atol=0)


class Detached(solvers.EnergyUpdate):
    """A gradient step whose third result has no graph."""

    step_size, symmetric = 1.0, True

    def joint(self, z: Tensor, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope = 2 * (z - args[0])
        return z - slope, (z - args[0]).square().sum(1).detach(), slope.detach()


def test_a_gradient_without_a_graph_keeps_the_implicit_gradient() -> None:
    x = normal(2, 3).double().requires_grad_()
    found = fixed_point(Detached(), torch.zeros_like(x), (x,))
    found.value.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x), rtol=1e-3, atol=1e-3)


def test_a_learned_step_size_has_second_derivatives() -> None:
    step = GradientStep(Quadratic(), nn.Parameter(torch.tensor(0.5)))
    layer, x = DEQ(step).double(), normal(2, 3, 4).double().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, torch.full_like(x, 2.0), rtol=1e-3, atol=1e-3)


class Spring(nn.Module):
    """``F(z, x) = unit (z + 0.1 z^3 - W x)``, the gradient of an energy."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit, self.weight = unit, nn.Parameter(normal(3, 3).float())

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.unit * (z + 0.1 * z**3 - x @ self.weight.T)

    def energy(self, z: Tensor, x: Tensor) -> Tensor:
        return self.unit * (0.5 * z**2 + 0.025 * z**4 - (x @ self.weight.T) * z).sum(1)


@pytest.mark.parametrize("unit", [1e-8, 1e-5, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("name", ["root", "symmetric root", "newton", "energy", "masked energy"])
def test_steps_and_gradients_do_not_depend_on_units(name: str, unit: float) -> None:
    """In float32 the Jacobian of ``z - 1e-8 F(z)`` is the identity; derivatives of both orders are exact."""
    spring, x = Spring(unit), normal(4, 3, seed=1).float().requires_grad_()
    mask = None
    if name == "masked energy":
        mask = torch.ones(4, 3, dtype=torch.bool)
        mask[1, 2] = mask[3, 0] = False
    if "root" in name:
        found = solvers.root(spring, torch.zeros(4, 3), (x,), symmetric=name == "symmetric root")
    else:
        solver = "newton" if name == "newton" else None
        f = solvers.Descent(spring.energy)
        found = fixed_point(f, torch.zeros(4, 3), (x,), solver=solver, mask=mask, tolerance=1e-5)
    assert found.converged.all()
    keep = torch.ones(4, 3) if mask is None else mask.float()
    z = found.value.detach().double()
    right = (x @ spring.weight.T).double().detach()
    assert ((z + 0.1 * z**3 - right) * keep).abs().max() <= 1e-3
    # With the slope s = 1 + 0.3 z^2: dz/dx = W / s, and of z^2 / 2 the second derivative is known, too.
    slope = 1 + 0.3 * z**2
    gradients = torch.autograd.grad(
        (found.value * keep).sum(), (x, spring.weight), create_graph=True
    )
    first = keep / slope
    exact = first @ spring.weight.detach().double(), first.T @ x.detach().double()
    for ours, theirs in zip(gradients, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-3, atol=2e-3)
    (second,) = torch.autograd.grad(gradients[0].sum(), x)
    bend = -0.6 * z / slope**3 * keep * spring.weight.detach().double().sum(1)
    torch.testing.assert_close(
        second.double(), bend @ spring.weight.detach().double(), rtol=1e-2, atol=1e-2
    )
    assert found.adjoint.solution is not None and found.adjoint.solution.converged.all()


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.linear(z)) + x


@pytest.mark.parametrize("linear", [None, "gmres"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_cotangent_that_is_not_finite_gives_nan(bad: float, linear: str | None) -> None:
    """Of that sample, and of all weights that it shares; the other inputs keep their gradients."""
    layer, x = (
        DEQ.from_update(Cell(), adjoint=solvers.Implicit(linear)),
        normal(3, 2, 4).float().requires_grad_(),
    )
    cotangent = torch.ones(3, 2, 4)
    (expected,) = torch.autograd.grad(layer(x), x, cotangent)
    cotangent[1, 0, 2] = bad
    by_x, *by_weights = torch.autograd.grad(layer(x), [x, *layer.parameters()], cotangent)
    assert by_x[1].isnan().all()
    torch.testing.assert_close(by_x[[0, 2]], expected[[0, 2]], rtol=1e-3, atol=1e-4)
    assert not any(each.isfinite().all() for each in by_weights)


def test_an_adjoint_that_leaves_float16_gives_nan() -> None:
    weight = (0.3 * normal(8, 8)).half()
    x = (0.01 * normal(4, 8, seed=1)).half().requires_grad_()
    y = DEQ.from_update(lambda z, x: torch.tanh(z @ weight) + x)(x)
    with pytest.warns(solvers.SolveWarning, match="adjoint"):
        y.backward(torch.full_like(y, 60_000.0))
    assert x.grad is not None and x.grad.isnan().all()


def test_nothing_is_kept_of_a_function_that_is_gone() -> None:
    """Neither the module that was solved nor, without the garbage collector, a tensor of its evaluations."""
    block = EquilibriumBlock(8, heads=2)
    block(torch.randn(2, 3, 8)).sum().backward()
    parameter = weakref.ref(next(block.parameters()))
    del block
    gc.collect()
    assert parameter() is None
    seen: list[Any] = []

    def f(z: Tensor, x: Tensor) -> Tensor:
        made = torch.tanh(0.5 * z + x)
        seen.append(weakref.ref(made))
        return made

    x = torch.ones(2, 3)
    gc.disable()
    try:
        for adjoint in (solvers.Implicit(), solvers.OneStep(), solvers.Unrolled()):
            given = x.clone().requires_grad_()
            found = fixed_point(f, torch.zeros(2, 3), (given,), adjoint=adjoint)
            found.value.sum().backward()
            del found
        assert len(seen) > 10 and not [made for made in seen if made() is not None]
    finally:
        gc.enable()


def test_an_update_without_a_graph_is_refused() -> None:
    class Frozen(Cell):
        forward = torch.no_grad()(Cell.forward)

    layer, x = DEQ.from_update(Frozen()), normal(2, 3, 4).float()
    with pytest.raises(RuntimeError, match="no_grad"):
        layer(x)
    with torch.no_grad():
        assert layer(x).isfinite().all()
    assert layer.requires_grad_(False)(x).isfinite().all()


def test_batched_backward_passes_name_what_works() -> None:
    layer = DEQ.from_update(lambda z, x: 0.5 * torch.tanh(z) + x)
    x = normal(1, 3).requires_grad_()
    y = layer(x)
    with pytest.raises(RuntimeError, match="unrolled"):
        torch.autograd.grad(y, x, torch.eye(3).view(3, 1, 3), is_grads_batched=True)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("verify", [True, False])
def test_every_solve_is_verified_with_one_evaluation(verify: bool, gradients: bool) -> None:
    """The evaluation that the adjoint records is that one."""
    calls = 0

    def f(z: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 0.5 * torch.cos(z) + x

    start, counts = torch.tensor([[0.45, 0.45], [5.0, -9.0]]), set()  # one leaves early
    found = fixed_point(torch.cos, start, adjoint=None)
    x = torch.zeros(2, 2, requires_grad=gradients)
    for _ in range(40):
        calls = 0
        with torch.set_grad_enabled(gradients):
            found = fixed_point(f, start, (x,), verify=verify)
        counts.add(calls - int(found.evaluations.max()))
    assert counts == {int(verify or gradients)}
    with pytest.raises(TypeError, match="verify"):
        fixed_point(f, start, (x,), verify=1)  # type: ignore[arg-type]
    assert found.residual.max() <= Tolerance().rtol


def test_a_solve_whose_last_evaluation_was_at_the_value_makes_no_other() -> None:
    calls = 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 0.5 * torch.cos(z)

    found = fixed_point(f, torch.full((3, 2), 0.4), adjoint=None)
    assert found.converged.all() and calls == int(found.evaluations.max())


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (0,)])
@pytest.mark.parametrize("gradients", [False, True])
def test_an_empty_batch_has_an_empty_solution_with_a_graph(
    shape: tuple[int, ...], gradients: bool
) -> None:
    x = torch.randn(shape, requires_grad=gradients)
    found = fixed_point(lambda z, x: 0.5 * torch.tanh(z) + x, torch.zeros(shape), (x,))
    assert found.value.shape == shape and found.status.shape == shape[:1]
    assert found.value.requires_grad == gradients and found.converged.all()
    assert DEQ.from_update(lambda z, x: 0.5 * torch.tanh(z) + x)(x).shape == shape


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (0,)])
def test_other_public_functions_take_an_empty_batch(shape: tuple[int, ...]) -> None:
    x, b, size = torch.randn(shape, requires_grad=True), shape[0], math.prod(shape[1:])
    zero = solvers.root(lambda z, x: z - x, torch.zeros(shape), (x,))
    zero.value.sum().backward()
    assert zero.value.shape == shape and x.grad is not None
    for solver in ("cg", "minres", "gmres"):
        linear = solvers.solve_linear(lambda v: 2 * v, x, solver=solver, record=True)
        assert linear.value.shape == shape and linear.converged.shape == (b,)

    def half(z: Tensor) -> Tensor:
        return 0.5 * z

    assert torch.equal(solvers.spectral_radius(half, x), torch.zeros(b, dtype=torch.float64))
    assert solvers.jacobian(half, x).shape == (b, size, size)
    for samples in (1, None):
        assert torch.equal(solvers.jacobian_penalty(half, x, samples=samples), torch.zeros(b))
    for check in (solvers.check_update, check_energy):
        with pytest.raises(ValueError, match="z must contain at least one"):
            check(half, x)


SITE, NONE = solvers.IsingSite(), torch.zeros(0, 4, 1)
OF_NO_FIELD: dict[str, Callable[[Tensor], Any]] = {
    "adaptive_tap": lambda J: (
        solvers.adaptive_tap(J, NONE, site=SITE, log_partition=True).value.mean
    ),
    "naive": lambda J: solvers.adaptive_tap(J, NONE, site=SITE, order="naive").value.mean,
    "annealing": lambda J: (
        solvers.adaptive_tap(J, NONE, site=SITE, inverse_temperature=[0.5, 1]).value.mean
    ),
    "gibbs": lambda J: solvers.gibbs(J, NONE, site=SITE, sweeps=2),
    "steady_state": lambda J: solvers.steady_state(NONE, J[..., 0, 0], site=SITE).value,
    "kinetic_step": lambda J: solvers.kinetic_step(NONE, NONE, J[..., 0, 0], site=SITE),
    "spherical_saddle": lambda J: solvers.spherical_saddle(J[..., 0, 0], NONE).value.mean,
}


@pytest.mark.parametrize("name", OF_NO_FIELD)
def test_spins_take_an_empty_batch(name: str) -> None:
    assert len(OF_NO_FIELD[name](torch.zeros(4, 4, 1, 1))) == 0


def test_a_fixed_point_at_zero_is_told_to_give_atol() -> None:
    x = normal(4, 8).float()
    x[2] = 0
    with pytest.warns(solvers.SolveWarning, match="atol"):
        fixed_point(lambda z, x: torch.tanh(0.5 * z) + x, torch.ones(4, 8), (x,), solver="forward")


def test_a_sample_without_a_finite_jacobian_keeps_its_failure_to_itself() -> None:
    """sqrt has no slope at 0: that sample gets NaN, and the others the gradients that they have alone."""

    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        found = fixed_point(
            lambda z, x: x + 0.3 * z * z.norm(dim=1, keepdim=True).sqrt() / (1 + z.norm(dim=1, keepdim=True)),
            torch.zeros_like(x), (x,), tolerance=Tolerance(1e-8, 1e-8),
        )  # fmt: skip
        return torch.autograd.grad(found.value.sum(), x)[0]

    x = normal(8, 3)
    x[0] = 0
    with pytest.warns(solvers.SolveWarning, match="adjoint"):
        together = gradient(x)
    assert together[0].isnan().all()
    torch.testing.assert_close(together[1:], gradient(x[1:]), rtol=1e-6, atol=1e-8)
