"""Each method against its definition; second attempts; the solvers on the problems of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import solvers
from cases.solves import SOLVERS, solve, true_residuals
from problems import residual_norms
from problems.collected import (
    BUDGET,
    MAPS,
    MINIMISERS,
    SYSTEMS,
    Collected,
    residual,
    run,
    solved,
)
from problems.zoo import PROBLEMS, SOLVABLE, ZooProblem, make
from solvers import (
    Anderson,
    Broyden,
    Descent,
    Forward,
    GradientDescent,
    Newton,
    Solution,
    Status,
    Tolerance,
    fixed_point,
)

DIM = 12


def linear() -> tuple[Tensor, Tensor, Tensor]:
    """One non-symmetric contraction: matrix, offset, start."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(DIM, DIM, generator=generator, dtype=torch.float64) / DIM**0.5
    matrix = 0.8 * matrix / torch.linalg.eigvals(matrix).abs().max()
    return matrix, torch.randn(DIM, generator=generator).double(), torch.zeros(DIM).double()


def visited(solver: solvers.Solver, steps: int) -> list[Tensor]:
    """The points at which the solver evaluates the affine map."""
    matrix, offset, start = linear()
    points: list[Tensor] = []

    def f(z: Tensor) -> Tensor:
        points.append(z[0].clone())
        return z @ matrix.mT + offset

    fixed_point(f, start[None], solver=solver, max_steps=steps, tolerance=0.0,
                adjoint=None, on_failure="ignore", verify=False)  # fmt: skip
    return points


def remainder(z: Tensor) -> Tensor:
    matrix, offset, _ = linear()
    return matrix @ z + offset - z


def test_forward_is_picard() -> None:
    z = linear()[2]
    for point in visited(Forward(damping=0.7), 6):
        torch.testing.assert_close(point, z, rtol=1e-12, atol=1e-13)
        z = z + 0.7 * remainder(z)


@pytest.mark.parametrize("damping", [1.0, 0.6])
@pytest.mark.parametrize("memory", [1, 2, 4])
def test_anderson_is_the_least_squares_step(memory: int, damping: float) -> None:
    points = visited(Anderson(memory, damping, regularization=0.0), 9)
    z = [linear()[2]]
    for k in range(1, len(points)):
        now = remainder(z[-1])
        used = min(memory, k - 1)
        step = z[-1] + damping * now
        if used:
            moves = torch.stack([z[-i] - z[-i - 1] for i in range(1, used + 1)], 1)
            changes = torch.stack(
                [remainder(z[-i]) - remainder(z[-i - 1]) for i in range(1, used + 1)], 1
            )
            weights = torch.linalg.lstsq(changes, now[:, None]).solution[:, 0]
            step = step - (moves + damping * changes) @ weights
        z.append(step)
        torch.testing.assert_close(points[k], step, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("damping", [1.0, 0.5])
def test_broyden_is_the_good_method(damping: float) -> None:
    points = visited(Broyden(damping=damping), 10)
    z, inverse = linear()[2], -damping * torch.eye(DIM).double()
    for k, point in enumerate(points):
        torch.testing.assert_close(point, z, rtol=1e-6, atol=1e-8)
        if k == len(points) - 1:
            break
        now = remainder(z)
        after = z - inverse @ now
        s, y = after - z, remainder(after) - now
        inverse = inverse + torch.outer(s - inverse @ y, s @ inverse) / (s @ inverse @ y)
        torch.testing.assert_close(inverse @ y, s)  # the secant condition
        z = after


@pytest.mark.defect("A17")
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.4), (1.0, 0.9), (0.1, 0.5)])
def test_momentum_is_that_of_torch(rate: float, momentum: float, nesterov: bool) -> None:
    """Every point at which torch.optim.SGD takes a gradient, given ``-r`` as the gradient."""
    parameter = torch.nn.Parameter(linear()[2].clone())
    optimizer = torch.optim.SGD([parameter], rate, momentum, nesterov=nesterov)
    for point in visited(GradientDescent(rate, momentum=momentum, nesterov=nesterov), 10):
        torch.testing.assert_close(point, parameter.detach(), rtol=1e-13, atol=1e-14)
        parameter.grad = -remainder(parameter.detach())
        optimizer.step()


def test_a_rejected_step_forgets_the_momentum() -> None:
    """The next velocity knows the residuals since the point of the rejection, none before it."""
    seen: list[Tensor] = []

    def energy(z: Tensor) -> Tensor:
        seen.append(z.detach().clone())
        return (z**4).sum(1) + z.square().sum(1)

    solution = fixed_point(
        Descent(energy, 0.2), torch.ones(1, 1, dtype=torch.float64), max_steps=20, record=True,
        solver=GradientDescent(momentum=0.9), adjoint=None, on_failure="ignore",
    )  # fmt: skip
    trace = solution.trace
    assert trace is not None and trace.accepted is not None
    accepted = trace.accepted[0]
    rejected = int((~accepted).nonzero()[0])
    again = rejected + int(accepted[rejected:].nonzero()[0])

    def remainder(z: Tensor) -> Tensor:
        return -0.2 * (4 * z**3 + 2 * z)

    before, after = seen[rejected - 1], seen[again]
    velocity = remainder(after) + 0.9 * remainder(before)
    torch.testing.assert_close(seen[again + 1], after + velocity)


def test_the_automatic_step_is_that_of_barzilai_and_borwein() -> None:
    points = visited(GradientDescent("auto"), 8)
    torch.testing.assert_close(points[1], points[0] + remainder(points[0]))
    for k in range(1, 7):
        s, y = points[k] - points[k - 1], remainder(points[k - 1]) - remainder(points[k])
        long, short = s @ s / (s @ y), s @ y / (y @ y)
        if float(s @ y) > 0:
            expected = long if float(short / long) > 0.5 else short
            step = points[k + 1] - points[k]
            torch.testing.assert_close(step, expected * remainder(points[k]), rtol=1e-8, atol=1e-10)


def test_newton_does_not_converge_where_the_line_search_leaves_a_long_step() -> None:
    """The residual ``u = z - 10`` is nearly flat below -2e-4: full steps go 4 to 5 too far, and the trials
    that shorten them lie where it is steep, so the pairs of them show no large error."""

    def f(z: Tensor) -> Tensor:
        u = z - 10
        return z - torch.where(u > -2e-4, u, 5e-5 * (u + 2e-4) - 2e-4)

    start = torch.tensor([[9.0]], dtype=torch.float64)
    solution = fixed_point(f, start, solver=Newton(), max_steps=1000, adjoint=None)
    assert solution.converged.all()
    torch.testing.assert_close(solution.value, torch.full_like(start, 10.0), rtol=1e-4, atol=0.0)


def test_newton_is_quadratic() -> None:
    """Exact inner solves: the error is squared in each step."""
    problem = make("kepler")
    solution = solve(problem, Newton(forcing=1e-3), record=True, rtol=1e-14, max_steps=30)
    trace = solution.trace
    assert trace is not None
    easy = trace.residual[:4]
    for row in easy:
        falling = row[~row.isnan() & (row > 1e-12)].tolist()
        assert all(b <= 20 * a**1.8 for a, b in pairwise(falling) if a < 0.1)


def minimise(
    energy: Callable[[Tensor], Tensor], *start: float, factor: float = 1.0, **options: object
) -> Solution:
    """From ``start``, to a gradient of ``1e-6 factor``; the energy is multiplied by ``factor``."""
    return fixed_point(
        Descent(lambda z: factor * energy(z)), torch.tensor([start], dtype=torch.float64),
        tolerance=Tolerance(rtol=0.0, atol=1e-6 * factor), max_steps=500, adjoint=None,
        on_failure="ignore", **options,  # type: ignore[arg-type]
    )  # fmt: skip


def cosh(z: Tensor) -> Tensor:
    return 2 * z.cosh().sum(1)


LEAST = {problem.name: problem.function for problem in MINIMISERS}
# The evaluations that scipy's L-BFGS-B needs from the same starts: 12, 38 and 112.
STEEP = [(cosh, (5.3,), 12), (LEAST["box_3d"], (0.0, 10.0, 20.0), 48),
         (LEAST["wood"], (-3.0, -1.0, -3.0, -1.0), 112)]  # fmt: skip


@pytest.mark.defect("A13")
@pytest.mark.parametrize(("energy", "start", "most"), STEEP)
def test_lbfgs_recovers_from_a_first_trial_far_away(
    energy: Callable[[Tensor], Tensor], start: tuple[float, ...], most: int
) -> None:
    solution = minimise(energy, *start)
    assert solution.counts() == {"CONVERGED": 1}
    assert int(solution.evaluations) <= most


@pytest.mark.defect("D12")
@pytest.mark.parametrize(("energy", "start", "most"), STEEP)
def test_a_steep_energy_times_a_factor_takes_the_same_steps(
    energy: Callable[[Tensor], Tensor], start: tuple[float, ...], most: int
) -> None:
    """To the same point, that is with a tolerance that grows with the energy."""
    once, scaled = minimise(energy, *start), minimise(energy, *start, factor=2.0**20)
    assert torch.equal(scaled.value, once.value)
    assert scaled.evaluations.tolist() == once.evaluations.tolist()


def projected_gradient(z: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    """A step of ``1/2 z.A z - b.z`` with ``A <= 1``, back into the box [-0.3, 0.3]."""
    return (z - (torch.einsum("bij,bj->bi", matrix, z) - target)).clamp(-0.3, 0.3)


def box(dtype: torch.dtype = torch.float64, size: int = 8) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """64 quadratic energies of condition 1000: the start and the arguments."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(64, size, size, dtype=dtype)).Q
    curvature = torch.logspace(0, -3, size, dtype=torch.float32).to(dtype)
    target = torch.randn(64, size, dtype=dtype)
    return torch.zeros_like(target), ((basis * curvature) @ basis.mT, target)


def attempt(f: Any, z0: Tensor, args: tuple[Tensor, ...], **options: Any) -> Solution:
    given: dict[str, Any] = {"tolerance": 1e-5, "max_steps": 500, "adjoint": None}
    return fixed_point(f, z0, args, on_failure="ignore", **(given | options))


@pytest.mark.defect("D7")
@pytest.mark.parametrize(("size", "dtype"), [(8, torch.float64), (20, torch.float32)])
def test_the_default_solves_what_plain_steps_solve(size: int, dtype: torch.dtype) -> None:
    z0, args = box(dtype, size)
    assert bool(attempt(projected_gradient, z0, args, solver=Forward()).converged.all())
    # Rounding decides when the first attempt is given up, which is seen every hundred evaluations.
    solution = attempt(projected_gradient, z0, args, max_steps=2000)
    assert solution.counts() == {"CONVERGED": 64}
    image = projected_gradient(solution.value, *args)
    relative = (image - solution.value).norm(dim=1) / image.norm(dim=1)
    rounding = 4 * torch.finfo(dtype).eps
    assert (relative <= 1e-5 * 1.001 + rounding).all()
    torch.testing.assert_close(solution.residual, relative, rtol=1e-2, atol=1e-9 + rounding)


def steep(z: Tensor, rate: Tensor) -> Tensor:
    """``z - F(z)`` where F(z) = rate z + z^3 - 1; plain and secant steps run away for large rates."""
    return z - (rate * z.roll(1, 1) + z**3 - 1)


def hard_batch() -> tuple[Tensor, tuple[Tensor]]:
    rate = torch.tensor([[0.4], [40.0], [0.5], [-60.0], [300.0]], dtype=torch.float64)
    start = torch.linspace(-3, 3, 6, dtype=torch.float64).expand(5, 6)
    return start + 0.1, (rate,)


@pytest.mark.parametrize("compact", [True, False])
def test_a_second_attempt_does_not_depend_on_the_batch(compact: bool) -> None:
    """Statuses and solutions; a run away from a start amplifies the last digit, so not the counts."""
    z0, args = hard_batch()
    together = attempt(steep, z0, args, compact=compact)
    named = attempt(steep, z0, args, solver=Anderson())  # makes no second attempt
    again = (named.status != 0) & (together.status == 0)
    assert bool(again.any()) and (together.evaluations > named.evaluations)[again].all()
    for i in range(len(z0)):
        alone = attempt(steep, z0[i : i + 1], tuple(t[i : i + 1] for t in args))
        assert int(alone.status) == int(together.status[i])
        if bool(alone.converged):
            torch.testing.assert_close(alone.value[0], together.value[i], rtol=1e-3, atol=0)


def test_a_failed_second_attempt_keeps_the_first_status() -> None:
    problem = make("runaway")
    solution = attempt(problem.f, problem.z0, problem.args, max_steps=200)
    assert not bool((solution.status == Status.CONVERGED).any())
    named = attempt(problem.f, problem.z0, problem.args, max_steps=200, solver=Anderson())
    assert solution.status.tolist() == named.status.tolist()
    assert (solution.residual <= named.residual).all()


# Units are tested in ``test_statuses``: one scale is enough here.
NAMES = [name for name in PROBLEMS if "_scale_" not in name]
SOLVED = [name for name in NAMES if name in SOLVABLE]


def answer(problem: ZooProblem) -> Tensor:
    solution = problem.solution
    assert solution is not None
    return solution.detach().clone()


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_energy_and_symmetry_of_a_problem_are_right(name: str) -> None:
    """Its answer is a fixed point, its energy and symmetry are those of its map."""
    problem = make(name)
    if problem.reference is not None:
        solution = answer(problem)
        solvable = solution.flatten(1).isfinite().all(1)
        assert bool(solvable.all()) == (problem.expect != "mixed") and solvable.any()
        residual, _ = residual_norms(solution, problem.f(solution, *problem.args))
        # A small problem must not pass because it is small.
        assert (residual <= 1e-10 * solution.flatten(1).norm(dim=1))[solvable].all()
    generator = torch.Generator().manual_seed(1)
    factor = torch.rand(problem.z0.shape, generator=generator, dtype=torch.float64)
    z = (problem.z0 * (0.5 + factor)).requires_grad_()  # inside the domain: the signs are kept
    value = problem.f(z, *problem.args)
    finite = value.detach().flatten(1).isfinite().all(1)
    if problem.energy is not None:
        energy = problem.energy(z, *problem.args)
        (gradient,) = torch.autograd.grad(energy.sum(), z, retain_graph=True)
        expected = (z - value).detach()[finite]
        scale = float(expected.norm())
        torch.testing.assert_close(gradient[finite], expected, rtol=1e-9, atol=1e-11 * scale)
    u, v = torch.randn(2, *z.shape, generator=generator, dtype=torch.float64)
    uj, vj = (torch.autograd.grad(value, z, w, retain_graph=True)[0] for w in (u, v))
    difference = (uj * v - vj * u)[finite].flatten(1).sum(1)
    size = (uj.flatten(1).norm(dim=1) * v.flatten(1).norm(dim=1))[finite].clamp_min(1e-300)
    assert bool((difference.abs() <= 1e-7 * size).all()) == problem.symmetric


# Not solved within the budget. The path to fsolve_example's root is chaotic, and the two energies are flat
# to their last digits where the searches end.
UNSOLVED = {"fsolve_example", "penalty_2_4", "powell_badly_scaled", "trigonometric_10"}


def polished(energy: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """The minimum that scipy's BFGS finds from ``start`` (D,)."""

    def value_and_slope(x: Any) -> tuple[float, Any]:
        z = torch.tensor(x)[None].requires_grad_()
        value = energy(z).sum()
        return value.item(), torch.autograd.grad(value, z)[0][0].numpy()

    found = minimize(
        value_and_slope, start.numpy(), jac=True, method="BFGS", options={"gtol": 1e-12}
    )
    return torch.from_numpy(found.x)


@pytest.mark.parametrize(
    "problems", [MAPS, SYSTEMS, MINIMISERS], ids=["map", "system", "minimiser"]
)
def test_the_default_solver_solves_textbook_problems(problems: list[Collected]) -> None:
    missed = set()
    for problem in problems:
        if problem.solution is not None:
            known = torch.tensor([list(problem.solution)], dtype=torch.float64)
            assert residual(problem, known) <= 1e-6  # some answers are printed to eight digits
        solution = run(problem)
        true = solved(problem, solution.value)
        near = False
        if problem.kind == "minimiser":
            # The gradient of an energy has units of its own; the error is what was asked for.
            exact = polished(problem.function, solution.value[0])
            near = bool((solution.value[0] - exact).norm() <= 1e-5 * (1 + exact.norm()))
        # CONVERGED is what a user acts on. Two energies are flat to their last digits along a valley in which
        # no step is taken, so that the estimated error is far too small.
        blind = problem.name in ("penalty_2_4", "powell_badly_scaled")
        assert true or near or blind or not bool(solution.converged.all()), problem.name
        assert int(solution.evaluations) <= BUDGET
        if not (true or near):
            missed.add(problem.name)
    assert missed <= UNSOLVED


# Of every other problem of the zoo, how many a solver may leave unsolved after 500 evaluations without the
# safeguard. Plain steps are repelled or slow; the others are slow, wander, or stall where an energy is flat.
MISSES = {
    "forward": 8, "forward_damped": 11, "anderson": 5, "anderson_1": 6, "anderson_damped": 5,
    "broyden": 4, "broyden_short": 6, "gradient": 11, "gradient_auto": 5, "momentum": 11,
    "nesterov": 14, "newton": 2, "lbfgs": 1,
}  # fmt: skip


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solver_solves_what_is_in_its_reach(solver: str) -> None:
    """A converged sample has the true residual and, where it is the only one in reach, the known answer."""
    missed = []
    for name in SOLVED[list(SOLVERS).index(solver) % 2 :: 2]:
        problem = make(name)
        if SOLVERS[solver].needs_energy and problem.energy is None:
            continue
        solution = solve(problem, solver, rtol=1e-6)
        relative, _ = true_residuals(problem, solution.value)
        assert (relative <= 1.000001e-6)[solution.converged].all(), name
        if not solution.converged.all():
            missed.append(name)
        elif problem.reference is not None:
            size = answer(problem).norm(dim=1)
            assert ((solution.value - answer(problem)).norm(dim=1) <= 0.1 * size).all(), name
    assert len(missed) <= MISSES[solver], missed
