"""Statuses: honest on hopeless problems, in time, one sample at a time; the safeguard by an energy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from cases.solves import PLAIN, SOLVERS, Given, Plain, plain_batch, solve
from problems.zoo import make
from solvers import (
    LBFGS,
    Anderson,
    Descent,
    Forward,
    GradientDescent,
    Solution,
    SolveError,
    Solver,
    SolveWarning,
    Status,
    fixed_point,
)

FAILURES = {Status.MAX_STEPS, Status.STALLED, Status.DIVERGED, Status.NONFINITE}


@pytest.mark.parametrize("solver", PLAIN)
def test_a_map_without_fixed_point_is_never_called_solved(solver: str) -> None:
    solution = solve(make("runaway"), solver, max_steps=200)
    assert set(solution.status.tolist()) <= FAILURES
    assert (solution.residual >= 1 / 3 - 1e-9).all()


@pytest.mark.parametrize("solver", ["forward", "gradient"])
def test_plain_iterates_that_run_away_are_called_diverged_in_time(solver: str) -> None:
    solution = solve(make("runaway"), solver, max_steps=200)
    assert (solution.status == Status.DIVERGED).all()
    # they grow by 3/2 a step, and 1e6 = 1.5 ** 34
    assert (solution.evaluations <= 45).all()


@pytest.mark.parametrize("safeguarded", [False, True])
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_a_start_where_f_is_nan_spoils_only_its_own_sample(solver: str, safeguarded: bool) -> None:
    problem = make("nan_from_start")
    solution = solve(problem, solver, safeguarded=safeguarded)
    assert solution.status.tolist() == [0, 0, Status.NONFINITE, 0, 0]
    assert solution.evaluations[2] == 1
    assert solution.residual[2] == math.inf
    assert torch.equal(solution.value[2], problem.z0[2])
    good = torch.tensor([0, 1, 3, 4])
    torch.testing.assert_close(
        solution.value[good], torch.ones(4, 4, dtype=torch.float64), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("solver", ["anderson", "broyden", "gradient_auto", "newton"])
def test_a_transient_nan_is_stepped_back_from(solver: str) -> None:
    problem = make("transient_nan")
    solution = solve(problem, solver, record=True)
    assert solution.converged.tolist() == [True] * 5
    trace = solution.trace
    assert trace is not None and trace.accepted is not None
    assert not trace.accepted[0].all()  # the first sample did meet NaN
    assert solution.value.isfinite().all()


def test_a_tolerance_below_rounding_is_called_stalled() -> None:
    solution = solve(make("linear_symmetric_0.5"), "forward", rtol=0.0, max_steps=2000)
    assert set(solution.status.tolist()) <= {Status.STALLED, Status.CONVERGED}
    assert (solution.evaluations < 1000).all()
    assert (solution.residual < 1e-15).all()


@pytest.mark.parametrize("solver", ["anderson", "anderson_damped", "broyden"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wild_step_is_no_divergence(solver: str, dtype: torch.dtype) -> None:
    """``tanh(k z / 2 + x)`` with k 0 or 2 is bounded and contracts: nothing can run away.

    Where |x| is small it contracts so little that rounding decides after how many evaluations it ends.
    """
    converged = 0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(16, 32, generator=generator).to(dtype)
        keep = 2 * torch.randint(0, 2, (16, 32), generator=generator).to(dtype)
        solution = fixed_point(
            lambda z, x, keep: torch.tanh(0.5 * keep * z + x), torch.zeros_like(x), (x, keep),
            solver=SOLVERS[solver], adjoint=None, max_steps=300, on_failure="ignore",
        )  # fmt: skip
        assert set(solution.counts()) <= {"CONVERGED", "STALLED", "MAX_STEPS"}
        converged += int(solution.converged.sum())
    assert converged >= 0.95 * 8 * 16


def test_a_cycle_is_called_stalled() -> None:
    z0 = torch.tensor([[0.1], [0.7]], dtype=torch.float64)
    solution = fixed_point(
        lambda z: 1 - z, z0, solver=Forward(), max_steps=1000, adjoint=None, on_failure="ignore"
    )
    assert (solution.status == Status.STALLED).all()


def test_a_sample_whose_energy_keeps_falling_has_not_stalled() -> None:
    problem = make("energy_double_wells")
    assert problem.converges_plain
    solution = solve(problem, "forward", max_steps=4000, safeguarded=True)
    assert solution.counts() == {"CONVERGED": problem.batch}


def test_the_policies() -> None:
    f, z0, args = plain_batch(3)
    with pytest.warns(SolveWarning, match=r"fixed-point solve .*MAX_STEPS 3 of 3.*max_steps"):
        fixed_point(f, z0, args, max_steps=2)
    with pytest.raises(SolveError, match="MAX_STEPS 3 of 3") as caught:
        fixed_point(f, z0, args, max_steps=2, on_failure="raise")
    assert isinstance(caught.value.solution, Solution)
    assert caught.value.solution.value.shape == z0.shape
    assert fixed_point(f, z0, args, max_steps=2, on_failure="ignore").counts() == {"MAX_STEPS": 3}


def test_the_summary_and_the_counts() -> None:
    solution = solve(make("nan_from_start"), "anderson")
    assert solution.counts() == {"CONVERGED": 4, "NONFINITE": 1}
    assert solution.summary().startswith("CONVERGED 4, NONFINITE 1 of 5; worst relative residual")
    assert solution.converged.tolist() == [True, True, False, True, True]


def test_a_point_whose_image_is_zero_has_a_finite_residual() -> None:
    # 4 over the smallest number is infinite in float32.
    solution = fixed_point(
        lambda z: 0 * z, torch.full((1, 1), 4.0), max_steps=1, on_failure="ignore"
    )
    assert solution.status.tolist() == [Status.MAX_STEPS]
    assert solution.residual_norm.tolist() == [4.0]
    assert solution.residual.isfinite().all()


def test_a_start_where_f_is_nan_is_told_with_a_single_step_too() -> None:
    start = torch.tensor([[-1.0], [1.0]])
    solution = fixed_point(torch.log, start, max_steps=1, on_failure="ignore")
    assert solution.status.tolist() == [Status.NONFINITE, Status.MAX_STEPS]


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


DESCENDING: list[Solver] = [LBFGS(), Anderson(), GradientDescent()]


def linear(z: Tensor) -> Tensor:
    return -z.flatten(1).sum(1)


@pytest.mark.defect("A12")
@pytest.mark.parametrize("solver", DESCENDING, ids=lambda s: type(s).__name__)
def test_no_budget_makes_a_constant_force_converge(solver: Solver) -> None:
    z0 = torch.linspace(-1, 1, 6).reshape(2, 3)
    for steps in (20, 1000):
        options: Any = {"max_steps": steps, "on_failure": "ignore", "solver": solver}
        assert not fixed_point(Descent(linear, 30.0), z0, **options).converged.any()


@pytest.mark.defect("A12")
def test_a_sample_that_runs_away_leaves_the_others_alone() -> None:
    curvature = torch.tensor([[-0.1], [1.0], [0.5]])
    f = Descent(lambda z, c: (0.5 * c * z**2 - z).sum(1))
    solution = fixed_point(f, torch.zeros(3, 2), (curvature,), on_failure="ignore")
    assert solution.status.tolist() == [3, 0, 0]


UNBOUNDED: dict[str, tuple[Any, float]] = {  # energy, start: the force falls early, or slowly
    "bump_then_linear": (lambda z: -(1 + z * z).sqrt().sum(1) + 3 * torch.exp(-z * z).sum(1), 0.5),
    "bump_then_flatter": (lambda z: -0.4 * z.sum(1) + 3 * torch.exp(-z * z).sum(1), 0.5),
    "power": (lambda z: -((1 + z * z) ** 0.45).sum(1), 1.0),
    "root": (lambda z: -((1 + z * z) ** 0.25).sum(1), 1.0),
}


@pytest.mark.defect("A12")
@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_force_that_fell_less_than_the_state_grew_is_no_minimum(name: str) -> None:
    energy, start = UNBOUNDED[name]
    z0 = torch.full((2, 3), start)
    solution = fixed_point(Descent(energy), z0, max_steps=200, on_failure="ignore")
    assert solution.counts() == {"DIVERGED": 2}


def double_well(z: Tensor) -> Tensor:
    return 0.25 * ((z * z - 1) ** 2).sum(1)


@pytest.mark.defect("A12")
def test_a_slow_start_at_a_saddle_point_is_no_divergence() -> None:
    f, z0 = Descent(double_well, 0.1), torch.full((1, 2), 1e-8)
    options: Any = {"solver": GradientDescent(), "on_failure": "ignore"}
    for steps in (60, 140, 240):
        counts = fixed_point(f, z0, max_steps=steps, **options).counts()
        assert "DIVERGED" not in counts, steps


@pytest.mark.defect("A12")
def test_a_weak_force_that_falls_is_no_divergence() -> None:
    """On the way to a minimum a million times farther than the start, almost there."""
    f = Descent(lambda z: (5e-7 * z * z - z).sum(1))
    z0 = torch.zeros(1, 2, dtype=torch.float64)
    options: Any = {"solver": GradientDescent(4e5), "on_failure": "ignore"}
    assert fixed_point(f, z0, max_steps=8, **options).counts() == {"MAX_STEPS": 1}
    assert fixed_point(f, z0, max_steps=100, **options).converged.all()


FAR: dict[str, Any] = {
    "far_quadratic": lambda z: (0.5 * (z - 1e6) ** 2).sum(1),
    "weak_quadratic": lambda z: (5e-4 * (z - 1e3) ** 2).sum(1),
    "well_from_its_top": lambda z: (0.25 * z**4 - 0.5 * 1e4 * z**2).sum(1) * 1e-4,
    "log_cosh": lambda z: (torch.nn.functional.softplus(z - 50) - 0.4 * z).sum(1),
    "large_energy": lambda z: 1e12 + (0.5 * (z - 3) ** 2).sum(1),
}


@pytest.mark.parametrize("name", FAR)
def test_far_minima_are_no_divergence(name: str) -> None:
    z0 = torch.full((2, 3), 1e-3, dtype=torch.float64)
    energy = FAR[name]
    solution = fixed_point(Descent(energy), z0, max_steps=400, on_failure="ignore")
    assert solution.converged.all(), solution.summary()
    z = solution.value.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(z).sum(), z)
    assert (gradient.norm(dim=1) <= 1.001e-4 * z.norm(dim=1)).all()
