"""The energy safeguard: Armijo's rule, no accepted rise, a stationary end, one pass per evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import solvers
from cases.solves import PLAIN, SOLVERS, Given, Plain, solve
from problems.zoo import make
from solvers import Anderson, Descent, Forward, GradientDescent, Solution, Status, fixed_point

EPS = torch.finfo(torch.float64).eps
ENERGIES = [
    "linear_expanding", "energy_bisoftmax_1.0_0.3", "energy_quadratic_1e4", "energy_double_wells",
    "energy_helical_valley", "transient_nan",
]  # fmt: skip


def accepted_energies(solution: Solution, sample: int) -> Tensor:
    trace = solution.trace
    assert trace is not None and trace.energy is not None and trace.accepted is not None
    return trace.energy[sample][trace.accepted[sample]]


def assert_never_rises(solution: Solution) -> None:
    for sample in range(solution.status.numel()):
        energies = accepted_energies(solution, sample)
        assert energies.isfinite().all()
        rounding = 8 * EPS * energies[:-1].abs()
        assert (energies[1:] <= energies[:-1] + rounding).all()


@pytest.mark.parametrize("name", ENERGIES)
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_the_energy_never_rises(solver: str, name: str) -> None:
    solution = solve(make(name), solver, safeguarded=True, record=True, max_steps=80)
    assert_never_rises(solution)
    assert not (solution.status == Status.DIVERGED).any()
    assert not (solution.status == Status.NONFINITE).any()


@pytest.mark.parametrize("name", ["linear_expanding", "transient_nan"])
@pytest.mark.parametrize("solver", PLAIN)
def test_the_energy_never_rises_with_its_value_alone(solver: str, name: str) -> None:
    problem = make(name)
    solution = fixed_point(
        Plain(problem), problem.z0, problem.args, solver=SOLVERS[solver], energy=problem.energy,
        record=True, max_steps=80, adjoint=None, on_failure="ignore",
    )  # fmt: skip
    assert_never_rises(solution)
    trace = solution.trace
    assert trace is not None and trace.accepted is not None
    if solver in ("forward", "momentum", "nesterov"):  # whose first steps go too far here
        assert not trace.accepted[:, 1:].all()


def test_rejected_trials_are_those_that_miss_armijo() -> None:
    """Recomputed from the points that the energy saw."""
    problem = make("linear_expanding")
    points: list[Tensor] = []

    class Watched(Given):
        def joint(self, z: Tensor, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            points.append(z.clone())
            return super().joint(z, *args)

    one = slice(0, 1)
    args = tuple(tensor[one] for tensor in problem.args)
    for solver in (Forward(), Anderson(), solvers.LBFGS(), GradientDescent(momentum=0.5)):
        points.clear()
        solution = fixed_point(
            Watched(problem), problem.z0[one], args, solver=solver, record=True, adjoint=None,
            max_steps=60, on_failure="ignore",
        )  # fmt: skip
        trace = solution.trace
        assert trace is not None and trace.energy is not None and trace.accepted is not None
        accepted, energies = trace.accepted[0], trace.energy[0]
        assert accepted[0]
        assert not accepted.all()
        last = 0
        for k in range(1, len(points)):
            gradient = points[last] - problem.f(points[last], *args)
            slope = ((points[k] - points[last]) * gradient).sum().clamp_max(0)
            allowed = energies[last] + 1e-4 * slope
            rounding = 8 * EPS * energies[last].abs()
            if accepted[k]:
                assert energies[k] <= torch.maximum(allowed, energies[last] + rounding)
                last = k
            else:
                assert energies[k] > allowed - rounding


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_energy_and_gradient_are_computed_in_one_go(solver: str) -> None:
    problem = make("energy_bisoftmax_0.4_0.2")
    assert problem.energy is not None
    energy = problem.energy
    calls = 0

    def counted(z: Tensor, *args: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return energy(z, *args)

    one = slice(0, 1)
    solution = fixed_point(
        Descent(counted), problem.z0[one], tuple(t[one] for t in problem.args),
        solver=SOLVERS[solver], adjoint=None, max_steps=60, on_failure="ignore",
    )  # fmt: skip
    if solver == "newton":  # products with the Hessian need a graph of their own
        assert calls <= int(solution.evaluations)
    else:
        assert calls == int(solution.evaluations)


@pytest.mark.parametrize("fails", [torch.nan, torch.inf])
def test_an_energy_that_is_not_finite_at_the_start_is_nonfinite(fails: float) -> None:
    def energy(z: Tensor) -> Tensor:
        return torch.where(z.sum(1) > 0, z.square().sum(1), fails)

    z0 = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    solution = fixed_point(
        lambda z: 0.5 * z + 0.1, z0, energy=energy, adjoint=None, on_failure="ignore"
    )
    assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE]


def test_a_descent_direction_that_lies_ends_as_stalled() -> None:
    """An update whose energy rises along every step: nothing is accepted, and that is said."""

    class Liar(solvers.EnergyUpdate):
        def joint(self, z: Tensor, *args: Tensor) -> tuple[Tensor, Tensor, None]:
            return z + 1, z.sum(1), None

    z0 = torch.zeros(2, 3, dtype=torch.float64)
    for solver in (Forward(), Anderson(), GradientDescent("auto")):
        solution = fixed_point(
            Liar(), z0, solver=solver, adjoint=None, on_failure="ignore", max_steps=200
        )
        assert (solution.status == Status.STALLED).all()
        assert torch.equal(solution.value, z0)
        assert (solution.steps == 1).all()
