"""Statuses that are honest and in time, the safeguard by an energy, and books that balance."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from cases.solves import (
    FEW,
    PLAIN,
    SOLVERS,
    Counter,
    EnergyCounter,
    Given,
    Plain,
    plain_batch,
    solve,
)
from problems import rows, scaled
from problems.zoo import ZooProblem, affine, affine_energy, make, symmetric_matrix
from solvers import (
    CG,
    GMRES,
    LBFGS,
    MINRES,
    Anderson,
    Broyden,
    Descent,
    Forward,
    GradientDescent,
    Implicit,
    LinearSolver,
    Newton,
    Progress,
    Solution,
    SolveError,
    Solver,
    SolveWarning,
    Status,
    Tolerance,
    fixed_point,
)

FAILURES = {Status.MAX_STEPS, Status.STALLED, Status.DIVERGED, Status.NONFINITE}


@pytest.mark.parametrize("solver", PLAIN)
def test_a_map_without_fixed_point_is_never_called_solved(solver: str) -> None:
    solution = solve(make("runaway"), solver, max_steps=200)
    assert set(solution.status.tolist()) <= FAILURES
    assert (solution.residual >= 1 / 3 - 1e-9).all()


@pytest.mark.parametrize("solver", [Forward(), Broyden(), GradientDescent()])
def test_a_solution_that_is_the_start_has_memory_of_its_own(solver: Solver) -> None:
    start = torch.zeros(2, 3)
    fixed_point(lambda z: z / 2, start, solver=solver).value.add_(1.0)
    assert not start.any()


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
    assert solution.statuses == ["CONVERGED"] * 2 + ["NONFINITE"] + ["CONVERGED"] * 2


@pytest.mark.parametrize("leaves", [1, 2, 50])
def test_a_printed_solution_is_short(leaves: int) -> None:
    """It shows the summary and the shapes of the value, however many tensors it holds."""
    z0 = {f"part {number}": torch.zeros(3, 20, 30) for number in range(leaves)}
    solution = fixed_point(lambda z: {key: 0.5 * t + 1 for key, t in z.items()}, z0)
    assert len(str(solution)) <= 300 and solution.summary() in repr(solution)
    assert ("(3, 20, 30)" in repr(solution)) == (leaves < 50)


def test_a_solution_can_be_printed_within_a_transform() -> None:
    printed: list[str] = []

    def solved(x: Tensor) -> Tensor:
        solution = fixed_point(lambda z, x: 0.5 * z + x, torch.zeros_like(x), (x,))
        printed.append(repr(solution))
        return solution.value

    torch.func.grad(lambda x: solved(x).sum())(torch.ones(2, 3))
    torch.func.vmap(solved)(torch.ones(2, 2, 3))
    assert all("(2, 3)" in text for text in printed) and len(printed) == 2


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


MIXTURE = [
    "linear_one_hard_sample", "tanh_gain_1.75", "energy_rosenbrock_10", "nan_from_start",
    "transient_nan", "start_at_solution",
]  # fmt: skip


def counted(name: str, solver: str, max_steps: int, **options: Any) -> tuple[Solution, Tensor]:
    """A solve without and a count of the times that each sample was seen by f."""
    problem = make(name)
    counter: Counter | EnergyCounter
    if SOLVERS[solver].needs_energy:
        counter = EnergyCounter(Given(problem), problem.batch)
    else:
        counter = Counter(Plain(problem), problem.batch)
    solution = fixed_point(
        counter, problem.z0, (*problem.args, counter.index), solver=SOLVERS[solver], tolerance=1e-6,
        max_steps=max_steps, adjoint=None, on_failure="ignore", **options,
    )  # fmt: skip
    return solution, counter.seen


@pytest.mark.parametrize("name", MIXTURE)
@pytest.mark.parametrize("solver", [name for name in SOLVERS if name != "newton"])
def test_evaluations_are_the_times_that_f_saw_the_sample(solver: str, name: str) -> None:
    if SOLVERS[solver].needs_energy and make(name).energy is None:
        pytest.skip("a minimiser needs an energy")
    solution, seen = counted(name, solver, 60)
    assert solution.evaluations.tolist() == seen.tolist()
    assert (solution.evaluations <= 60).all()


def steep(z: Tensor, rate: Tensor, *_: Tensor) -> Tensor:
    """``z - F(z)``, F(z) = rate z + z^3 - 1: large rates lead most methods astray, some samples at once."""
    return z - (rate * z.roll(1, 1) + z**3 - 1)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("max_steps", [13, 400])
@pytest.mark.parametrize("solver", [None, *FEW])
def test_no_sample_is_in_more_calls_than_allowed(
    solver: str | None, max_steps: int, compact: bool
) -> None:
    """In a batch that ends in pieces, second attempts included; what is uncompacted is all in each call."""
    rate = torch.logspace(-0.5, 2.5, 40, dtype=torch.float64)[:, None].repeat(1, 6)
    rate[1::2] *= -1
    start = torch.linspace(-3, 3, 6, dtype=torch.float64).expand(40, 6) + 0.1
    counter = Counter(steep, 40)
    solution = fixed_point(
        counter, start, (rate, counter.index), solver=None if solver is None else SOLVERS[solver],
        tolerance=1e-9, max_steps=max_steps, adjoint=None, on_failure="ignore",
        compact=compact, callback=lambda progress: None, verify=False,
    )  # fmt: skip
    assert not solution.converged.all()
    assert (counter.seen <= max_steps).all() and (solution.evaluations <= max_steps).all()
    if not compact:
        assert len(counter.sizes) <= max_steps


@pytest.mark.defect("A20")
@pytest.mark.parametrize("scale", [2.0**-93, 2.0**90])
def test_second_attempts_solve_and_count_where_squares_leave_the_range(scale: float) -> None:
    matrix = torch.tensor([[-8e3, 1.0, 0.5], [2.0, 7e3, -3.0], [0.3, -1.0, 9e3]])
    offset, calls = torch.tensor([[1.0, -2.0, 0.5]]) * scale, 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return z @ matrix.mT + offset

    solution = fixed_point(f, offset, tolerance=Tolerance(1e-2), max_steps=50, adjoint=None)
    assert solution.converged.all() and solution.evaluations.tolist() == [calls]


@pytest.mark.parametrize("max_steps", [1, 3, 20, 60])
def test_newton_counts_its_products_and_keeps_the_cap(max_steps: int) -> None:
    """One sample alone: evaluations of f and pullbacks, each counted inside f."""
    problem = make("linear_symmetric_0.9")
    matrix, offset = problem.args[0][:1], problem.args[1][:1]
    calls, products = 0, 0

    def note(cotangent: Tensor) -> None:
        nonlocal products
        products += 1

    class Affine:
        symmetric = True

        def __call__(self, z: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            image = torch.einsum("bmd,bd->bm", matrix, z) + offset
            if image.requires_grad:
                image.register_hook(note)
            return image

    solution = fixed_point(
        Affine(), problem.z0[:1], (matrix, offset), solver=Newton(), max_steps=max_steps,
        adjoint=None, on_failure="ignore", tolerance=1e-8,
    )  # fmt: skip
    assert int(solution.evaluations) <= max_steps
    # f is called once more per direction to record its graph, never beyond the budget
    assert calls <= max_steps
    assert int(solution.evaluations) >= products + int(solution.steps)
    assert products <= max_steps and (products > 0 or max_steps < 20)


@pytest.mark.parametrize("name", MIXTURE)
@pytest.mark.parametrize("solver", FEW)
def test_the_trace_is_the_history(solver: str, name: str) -> None:
    problem = make(name)
    watched: list[Progress] = []
    solution = solve(problem, solver, max_steps=40, record=True, callback=watched.append)
    trace = solution.trace
    assert trace is not None and trace.accepted is not None
    columns = trace.residual.shape[1]
    assert [each.evaluation for each in watched] == list(range(1, columns + 1))
    for column, progress in enumerate(watched):
        torch.testing.assert_close(progress.residual, trace.residual[:, column], equal_nan=True)
        assert progress.running >= int((~trace.residual[:, column].isnan()).sum())
    for sample in range(problem.batch):
        own = trace.residual[sample]
        accepted = trace.accepted[sample]
        length = int(solution.evaluations[sample])
        if solver == "newton":  # whose evaluations include products, which have no column
            length = min(length, int((~own.isnan()).nonzero().max()) + 1 if accepted.any() else 1)
        assert own[length:].isnan().all()
        assert not accepted[length:].any()
        taken = own[accepted]
        best = float(taken[taken.isfinite()].min()) if bool(taken.isfinite().any()) else math.inf
        assert float(solution.residual[sample]) == pytest.approx(best, rel=1e-12)
    assert (solution.steps == trace.accepted.sum(1)).all()


@pytest.mark.parametrize("name", ["runaway", "linear_expanding"])
@pytest.mark.parametrize("solver", FEW)
def test_watching_changes_nothing(solver: str, name: str) -> None:
    problem = make(name)
    quiet = solve(problem, solver, max_steps=120)
    recorded = solve(problem, solver, max_steps=120, record=True)
    watched = solve(problem, solver, max_steps=120, callback=lambda progress: None)
    for other in (recorded, watched):
        assert other.status.tolist() == quiet.status.tolist()
        assert other.evaluations.tolist() == quiet.evaluations.tolist()
        # The engine and the loop round differently, which a runaway amplifies without bound.
        found, wanted = (each.value[quiet.converged] for each in (other, quiet))
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


# Short solves: over a hundred steps and more a rounding error may cost or save a step.
NAMES = [
    "kepler", "mgh_broyden_banded", "energy_bisoftmax_0.2_0.2", "transient_nan", "nan_from_start",
    "start_at_solution", "runaway",
]  # fmt: skip
REJECTING = ["linear_expanding", "energy_double_wells"]


def same(together: Solution, alone: list[Solution], *, runaway: bool = False) -> None:
    """Statuses and costs equal, values equal within rounding that the solve has amplified.

    A runaway amplifies it without bound, and rounding may decide whether an extrapolation is taken.
    """
    evaluations = [int(each.evaluations) for each in alone]
    assert together.evaluations.tolist() == evaluations
    assert together.status.tolist() == [int(each.status) for each in alone]
    steps = torch.cat([each.steps for each in alone])
    assert (together.steps - steps).abs().max() <= int(runaway)
    if not runaway:
        values = torch.cat([each.value for each in alone])
        torch.testing.assert_close(together.value, values, rtol=1e-5, atol=1e-7)


def one_by_one(problem: ZooProblem, solver: str, **options: object) -> list[Solution]:
    return [
        solve(rows(problem, torch.tensor([i])), solver, **options)  # type: ignore[arg-type]
        for i in range(problem.batch)
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_a_sample_alone_and_in_a_batch(solver: str, name: str) -> None:
    problem = make(name)
    if SOLVERS[solver].needs_energy and problem.energy is None:
        pytest.skip("a minimiser needs an energy")
    together, alone = (
        solve(problem, solver, max_steps=60),
        one_by_one(problem, solver, max_steps=60),
    )
    same(together, alone, runaway=name == "runaway")


@pytest.mark.parametrize("name", REJECTING)
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_a_safeguarded_sample_alone_and_in_a_batch(solver: str, name: str) -> None:
    """Trials are rejected here, at other times in other samples."""
    problem = make(name)
    together = solve(problem, solver, max_steps=40, safeguarded=True)
    same(together, one_by_one(problem, solver, max_steps=40, safeguarded=True))


@pytest.mark.parametrize("solver", PLAIN)
def test_compaction_changes_no_answer(solver: str) -> None:
    problem = make("kepler")
    small = solve(problem, solver, compact=True, max_steps=60)
    whole = solve(problem, solver, compact=False, max_steps=60)
    assert len(set(small.evaluations.tolist())) > 1
    if solver == "newton":  # uncompacted, the products for one sample count for all
        assert (small.evaluations <= whole.evaluations).all()
    else:
        assert small.evaluations.tolist() == whole.evaluations.tolist()
    assert small.status.tolist() == whole.status.tolist()
    torch.testing.assert_close(small.value, whole.value, rtol=1e-6, atol=1e-9)


def easy_and_hard(easy: int) -> ZooProblem:
    """``easy`` contractions with eigenvalues up to 0.2 and a last sample with 0.97."""
    generator = torch.Generator().manual_seed(5)
    eigenvalues = 0.3 * torch.rand(easy + 1, 24, generator=generator, dtype=torch.float64) - 0.1
    eigenvalues[-1] *= 0.97 / 0.2
    eigenvalues[-1, 0] = 0.97
    matrix = symmetric_matrix(generator, eigenvalues)
    offset = torch.randn(easy + 1, 24, generator=generator, dtype=torch.float64)
    return ZooProblem(
        name="easy_and_hard", f=affine, z0=torch.zeros_like(offset), args=(matrix, offset),
        symmetric=True, converges_plain=True, expect="converges", source="", energy=affine_energy,
    )  # fmt: skip


def rows_seen(
    problem: ZooProblem, solver: str, safeguarded: bool = False
) -> tuple[Tensor, list[int]]:
    """How often f saw each sample, finished ones included, and the sizes of its batches."""
    energetic = safeguarded or SOLVERS[solver].needs_energy
    counter: Counter | EnergyCounter
    counter = (EnergyCounter(Given(problem), problem.batch) if energetic
               else Counter(Plain(problem), problem.batch))  # fmt: skip
    fixed_point(
        counter, problem.z0, (*problem.args, counter.index), solver=SOLVERS[solver],
        tolerance=1e-6, max_steps=1000, adjoint=None,
    )  # fmt: skip
    return counter.seen, counter.sizes


@pytest.mark.parametrize("solver", ["anderson", "lbfgs"])
def test_a_hard_sample_does_not_bill_the_easy_ones(solver: str) -> None:
    problem = easy_and_hard(63)
    seen, sizes = rows_seen(problem, solver)
    alone = sum(
        int(rows_seen(rows(problem, torch.tensor([i])), solver)[0].sum())
        for i in range(problem.batch)
    )
    assert int(seen.sum()) == sum(sizes)
    assert int(seen.sum()) <= 1.05 * alone
    assert sizes[0] == 64
    assert sizes[-1] < 8  # the easy ones have left
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_finished_samples_leave_a_small_batch_at_once(solver: str) -> None:
    problem = make("start_at_solution")
    seen, sizes = rows_seen(problem, solver)
    assert sizes[0] == 5
    assert sizes[1] == 3
    assert seen[:2].tolist() == [1, 1]


# Powers of two move no rounding error, so that even a chaotic solve repeats itself exactly.
EXACT = [2.0**-10, 2.0**10]


@pytest.mark.parametrize("factor", EXACT)
@pytest.mark.parametrize("safeguarded", [False, True])
@pytest.mark.parametrize("name", ["energy_rosenbrock_10", "linear_expanding"])
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_powers_of_two_change_nothing_at_all(
    solver: str, name: str, safeguarded: bool, factor: float
) -> None:
    problem = make(name)
    original = solve(problem, solver, safeguarded=safeguarded, max_steps=80)
    other = solve(scaled(problem, factor), solver, safeguarded=safeguarded, max_steps=80)
    assert other.evaluations.tolist() == original.evaluations.tolist()
    assert other.status.tolist() == original.status.tolist()
    assert torch.equal(other.value / factor, original.value)
    assert torch.equal(other.residual, original.residual)


@pytest.mark.parametrize("linear", [None, CG(), MINRES(), GMRES()])
@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_scaled_loss_costs_the_same(factor: float, linear: LinearSolver | None) -> None:
    """torchdeq's absolute backward tolerance is never met for a large loss in float32."""
    problem = make("linear_symmetric_0.9", dtype=torch.float32)
    matrix, offset = problem.args
    offset.requires_grad_()
    gradients, products = [], []
    for scale in (1.0, factor):
        solution = fixed_point(
            problem.f, problem.z0, (matrix, offset), tolerance=1e-4,
            max_steps=100, adjoint=Implicit(solver=linear),
        )  # fmt: skip
        loss = scale * solution.value.pow(3).sum()
        gradients.append(torch.autograd.grad(loss, offset)[0] / scale)
        report = solution.adjoint.solution
        assert report is not None
        assert bool(report.converged.all())
        products.append(report.evaluations.tolist())
    assert products[0] == products[1]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-3)


SCALES = {torch.float32: [1e-36, 1e-25, 1.0, 1e35], torch.float64: [1e-300, 1e-161, 1.0, 1e300]}
CASES = [(dtype, scale) for dtype, scales in SCALES.items() for scale in scales]


@pytest.mark.defect("A4")
@pytest.mark.parametrize(("dtype", "scale"), CASES)
@pytest.mark.parametrize("solver", [Forward(), Anderson(), Broyden()], ids=repr)
def test_converged_means_converged_at_any_magnitude(
    solver: Solver, dtype: torch.dtype, scale: float
) -> None:
    b = torch.linspace(0.5, 1.5, 12, dtype=dtype).reshape(3, 4) * scale
    solution = fixed_point(
        lambda z, b: 0.5 * z + b, torch.zeros_like(b), (b,), solver=solver, on_failure="ignore"
    )
    value, b = solution.value.double() / scale, b.double() / scale
    found = 0.5 * value + b
    relative = (found - value).norm(dim=1) / found.norm(dim=1)
    if isinstance(solver, Forward):
        assert solution.converged.all()
    assert (relative[solution.converged] <= 1.001e-4).all()
    torch.testing.assert_close(solution.residual.double(), relative, rtol=1e-3, atol=1e-7)


@pytest.mark.defect("A4")
def test_an_absolute_tolerance_below_the_range_of_squares_holds() -> None:
    b = torch.full((2, 3), 1e-25)
    solution = fixed_point(
        lambda z, b: 0.5 * z + b, torch.zeros_like(b), (b,), solver=Forward(),
        tolerance=Tolerance(rtol=0.0, atol=1e-28),
    )  # fmt: skip
    assert solution.converged.all()
    assert ((0.5 * solution.value - b).double().norm(dim=1) <= 1e-28).all()


def test_rows_that_are_not_finite_leave_the_others_their_norm() -> None:
    def f(z: Tensor) -> Tensor:
        return torch.where(z > 2, torch.nan, 0.5 * z)

    solution = fixed_point(
        f, torch.tensor([[1e-30], [3.0]]), solver=Forward(), on_failure="ignore", max_steps=2
    )
    assert solution.status.tolist() == [Status.MAX_STEPS, Status.NONFINITE]
    torch.testing.assert_close(solution.residual_norm[0] * 1e30, torch.tensor(0.5))


@pytest.mark.defect("C5")
@pytest.mark.parametrize("memory", [2, 10])
def test_a_basis_that_overflows_half_precision_is_not_heard_of(memory: int) -> None:
    """Two finite residuals of opposite sign: their difference is infinite, and 0 times it NaN."""
    z0 = torch.tensor([[2e4, 0.0, 1e4], [1e-3, 0.0, 1.0]]).half()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = fixed_point(
            lambda z: -z, z0, solver=Anderson(memory=memory), on_failure="ignore", max_steps=30
        )
    assert solution.value.isfinite().all()


def test_a_subnormal_state_has_its_own_residual() -> None:
    start = torch.full((1, 4), 1e-310, dtype=torch.float64)
    solution = fixed_point(
        lambda z: 2 * z, start, solver=Forward(), max_steps=1, on_failure="ignore"
    )
    assert float(solution.residual) == pytest.approx(0.5, rel=1e-6)  # |2z - z| / |2z|


def test_a_norm_out_of_range_changes_no_other_sample() -> None:
    """In bfloat16, where z + (f(z) - z) is f(z) but for a rounding of half a percent."""
    z = torch.tensor([[1.0, 1.703125, -0.5], [1e-30, 1e-30, 1e-30]], dtype=torch.bfloat16)

    def f(z: Tensor) -> Tensor:
        return z * 0.0142822265625

    options = {"solver": Forward(), "max_steps": 1, "on_failure": "ignore", "adjoint": None}
    both, alone = fixed_point(f, z, **options), fixed_point(f, z[:1], **options)
    assert float(both.residual[0]) == pytest.approx(float(alone.residual[0]), rel=1e-6)
