"""A sample's answer, status and cost are its own, whatever its neighbours are and do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases.solves import PLAIN, SOLVERS, Counter, EnergyCounter, Given, Plain, plain_batch, solve
from problems.linear import affine, affine_energy, symmetric_matrix
from problems.zoo import ZooProblem, make, rows
from solvers import Implicit, Solution, Tolerance, fixed_point

# Short solves: over a hundred steps and more a rounding error may cost or save a step.
NAMES = [
    "kepler", "mgh_broyden_banded", "energy_bisoftmax_0.2_0.2", "transient_nan", "nan_from_start",
    "start_at_solution", "runaway",
]  # fmt: skip
REJECTING = ["linear_expanding", "energy_double_wells"]


def same(together: Solution, alone: list[Solution]) -> None:
    """Statuses and costs equal, values equal within rounding that the solve has amplified."""
    evaluations = [int(each.evaluations) for each in alone]
    assert together.evaluations.tolist() == evaluations
    assert together.status.tolist() == [int(each.status) for each in alone]
    assert together.steps.tolist() == [int(each.steps) for each in alone]
    torch.testing.assert_close(
        together.value, torch.cat([each.value for each in alone]), rtol=1e-5, atol=1e-7
    )


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
    same(solve(problem, solver, max_steps=60), one_by_one(problem, solver, max_steps=60))


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


def test_gradients_do_not_depend_on_the_neighbours() -> None:
    f, z0, (weight, x) = plain_batch(5)
    tolerance = Tolerance(rtol=1e-12)

    def gradient(part: slice) -> Tensor:
        leaf = weight[part].clone().requires_grad_()
        solution = fixed_point(
            f, z0[part], (leaf, x[part]), tolerance=tolerance, max_steps=100, adjoint=Implicit()
        )
        solution.value.square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    together = gradient(slice(None))
    for i in range(5):
        torch.testing.assert_close(
            together[i : i + 1], gradient(slice(i, i + 1)), rtol=1e-9, atol=1e-11
        )
