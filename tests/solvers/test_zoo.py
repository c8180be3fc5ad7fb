"""Every solver on every solvable problem of the zoo; what a method cannot do is data, rechecked.

A sample passes when it is CONVERGED, its recomputed residual is within the tolerance and, where
there is no other fixed point in reach, its value is the known answer. An entry of the tables below
that starts to pass fails the test: take it out. An entry EITHER may pass or not; there only the
converged samples are checked. Entries SLOW are told and not run.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from cases.solves import PLAIN, SOLVERS, solve, true_residuals
from problems.zoo import ENERGY, SOLVABLE, ZooProblem, make
from solvers import Solution, Solver

RTOL = 1e-6
ROUNDING = 1e-6  # the recomputed residual may differ in the last digits

SLOW = "needs more than 500 evaluations"
REPELS = "the plain map does not converge from here"
SHORT = "too few differences kept for this spectrum: it stagnates"
WANDERS = "no safeguard: it leaves the basin or runs in a cycle"
KINKS = "the Jacobian jumps, Newton without safeguard cycles"
FLAT = "the residual rises on the way down for longer than the patience of the loop"
EITHER = "chaotic on the way: rounding, and so the processor, decides whether it gets there"
MINIMUM = "|f(z) - z| has a local minimum here that is no root"

_REPELLING = dict.fromkeys(
    ["linear_expanding", "linear_saddle", "logistic_cycle", "tanh_gain_1.75", "transient_nan",
     "energy_bisoftmax_0.4_0.2", "energy_bisoftmax_1.0_0.3", "energy_rosenbrock_100",
     "energy_helical_valley"], REPELS)  # fmt: skip
_PLAIN_SLOW = dict.fromkeys(
    ["linear_normal_0.98", "linear_nonnormal_0.98", "energy_quadratic_100",
     "energy_quadratic_1e4", "energy_log_sum_exp",
     "energy_powell_singular"], SLOW)  # fmt: skip
_VALLEYS = {"energy_rosenbrock_100": WANDERS}

# Without the energy.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "forward": _REPELLING | _PLAIN_SLOW | {"energy_rosenbrock_10": FLAT},
    "anderson": _VALLEYS | {"tanh_gain_1.75": WANDERS, "energy_quadratic_1e4": SLOW,
        "energy_double_wells": FLAT, "energy_helical_valley": EITHER, "energy_log_sum_exp": EITHER,
        "energy_rosenbrock_10": EITHER},
    "broyden": {"energy_quadratic_1e4": SHORT, "energy_double_wells": FLAT,
        "energy_powell_singular": EITHER, "energy_rosenbrock_100": EITHER,
        "energy_log_sum_exp": EITHER},
    "gradient_auto": {"linear_saddle": REPELS, "tanh_gain_1.75": WANDERS,
        "energy_quadratic_1e4": SLOW, "energy_rosenbrock_100": WANDERS,
        "energy_double_wells": FLAT},
    "newton": {"linear_saddle": MINIMUM, "two_fixed_points": MINIMUM, "soft_threshold": KINKS,
        "tanh_gain_1.75": MINIMUM, "mgh_trigonometric": MINIMUM, "energy_rosenbrock_100": FLAT,
        "energy_double_wells": MINIMUM},
    "lbfgs": {},
}  # fmt: skip

# With the energy safeguard, on problems that have an energy. A method of first order is slow on
# ill-conditioned ones, and nothing else is an excuse.
SAFEGUARDED: dict[str, dict[str, str]] = {
    "forward": dict.fromkeys(
        ["energy_quadratic_100", "energy_quadratic_1e4", "energy_rosenbrock_10", "energy_rosenbrock_100",
         "energy_log_sum_exp", "energy_powell_singular", "energy_helical_valley"], SLOW),
    "anderson": dict.fromkeys(["energy_quadratic_1e4", "energy_rosenbrock_100"], SLOW),
    "broyden": dict.fromkeys(["energy_quadratic_1e4", "energy_rosenbrock_100", "energy_powell_singular",
                              "energy_helical_valley"], SLOW),
    "gradient_auto": dict.fromkeys(
        ["energy_quadratic_1e4", "energy_rosenbrock_100", "energy_helical_valley"], SLOW),
    # Where the Hessian is indefinite, its steps are those of the plain map.
    "newton": dict.fromkeys(["energy_rosenbrock_100", "energy_double_wells"], SLOW),
}  # fmt: skip


@cache
def sensitivity(name: str) -> Tensor:
    """``2 |(I - J)^-1|`` at the known answer, (B,): how far off a small residual may be."""
    problem = make(name)
    z = answer(problem).requires_grad_()
    fz = problem.f(z, *problem.args)
    columns = [
        torch.autograd.grad(fz[:, i].sum(), z, retain_graph=True)[0] for i in range(z.shape[1])
    ]
    matrix = torch.eye(z.shape[1], dtype=z.dtype) - torch.stack(columns, dim=1)
    return 2 / torch.linalg.svdvals(matrix)[:, -1]


def answer(problem: ZooProblem) -> Tensor:
    solution = problem.solution
    assert solution is not None
    return solution.detach().clone()


def faults(problem: ZooProblem, solution: Solution) -> list[str]:
    """What is wrong with a solution, sample by sample."""
    found = []
    if not bool(solution.converged.all()):
        found.append(f"statuses {solution.counts()} after {solution.evaluations.tolist()}")
        return found
    relative, absolute = true_residuals(problem, solution.value)
    if bool((relative > RTOL * (1 + ROUNDING)).any()):
        found.append(f"CONVERGED at residuals {relative.tolist()}")
    if problem.unique:
        size = answer(problem).norm(dim=1)
        error = (solution.value - answer(problem)).norm(dim=1) / size
        bound = sensitivity(problem.name) * absolute / size + 1e-10
        # where the Jacobian is singular, nothing follows from the residual but nearness
        bound = torch.where(bound < 0.5, bound, 0.1)
        if bool((error > bound).any()):
            found.append(
                f"wrong by {error.tolist()}, at most {bound.tolist()} follows from residual"
            )
    return found


def check(problem: ZooProblem, solution: Solution, reason: str | None) -> None:
    if reason == EITHER:  # but what it says of itself holds on any processor
        relative = true_residuals(problem, solution.value)[0]
        assert bool((relative[solution.converged] <= RTOL * (1 + ROUNDING)).all())
        assert bool(solution.converged.any())
        return
    found = faults(problem, solution)
    if reason is None:
        assert not found
    else:
        assert found, f"{problem.name} is solved now: remove it from the exceptions ({reason})"


def pairs(table: dict[str, dict[str, str]], names: list[str]) -> list[tuple[str, str]]:
    """Units are the matter of ``test_accounting``: one scale is enough here."""
    names = [name for name in names if "_scale_" not in name]
    return [(s, name) for s in table for name in names if table[s].get(name) != SLOW]


@pytest.mark.parametrize(("solver", "name"), pairs(EXCEPTIONS, list(SOLVABLE)))
def test_solvable_problems_are_solved(solver: str, name: str) -> None:
    problem = make(name)
    if SOLVERS[solver].needs_energy and problem.energy is None:
        pytest.skip("a minimiser needs an energy")
    check(problem, solve(problem, solver, rtol=RTOL), EXCEPTIONS[solver].get(name))


WITH_ENERGY = [name for name in SOLVABLE if make(name).energy is not None]


@pytest.mark.parametrize(("solver", "name"), pairs(SAFEGUARDED, WITH_ENERGY))
def test_safeguarded_methods_solve_energies(solver: str, name: str) -> None:
    problem = make(name)
    solution = solve(problem, solver, rtol=RTOL, safeguarded=True)
    check(problem, solution, SAFEGUARDED[solver].get(name))


# A stretch of the zoo for the variants; each is well within reach of the slowest of them.
VARIANTS = [name for name in PLAIN if name not in EXCEPTIONS]
EASY = ["linear_nonnormal_0.5", "two_fixed_points", "relu_0.9", "mgh_broyden_banded",
        "hopfield_retrieval", "energy_quadratic_10", "start_at_solution", "constant"]  # fmt: skip


@pytest.mark.parametrize("name", EASY)
@pytest.mark.parametrize("solver", VARIANTS)
def test_variants_solve_easy_problems(solver: str, name: str) -> None:
    problem = make(name)
    check(problem, solve(problem, solver, rtol=RTOL), None)


@pytest.mark.parametrize("solver", [SOLVERS["anderson"], SOLVERS["broyden"], SOLVERS["lbfgs"]])
def test_the_defaults_meet_a_tight_tolerance(solver: Solver) -> None:
    for name in ("linear_symmetric_0.9", "hopfield_retrieval", "energy_quadratic_100"):
        problem = make(name)
        solution = solve(problem, solver, rtol=1e-11)
        assert bool(solution.converged.all()), (name, solution.summary())
        relative, _ = true_residuals(problem, solution.value)
        assert (relative <= 1.1e-11).all()


def test_the_tables_name_problems_and_solvers() -> None:
    for table in (EXCEPTIONS, SAFEGUARDED):
        assert set(table) <= set(SOLVERS)
        assert {name for entries in table.values() for name in entries} <= set(SOLVABLE)
    assert set(ENERGY) - {"energy_quadratic_1e4"} <= set(WITH_ENERGY)
