"""The default solver tries again where it has given up: plain steps, then Newton's method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.solves import Counter
from problems.collected import SYSTEMS, run, solved
from problems.zoo import make
from solvers import LBFGS, Anderson, Descent, Forward, Progress, Solution, Status, fixed_point

SYSTEM = {problem.name: problem for problem in SYSTEMS}


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


def solve(f: Any, z0: Tensor, args: tuple[Tensor, ...], **options: Any) -> Solution:
    given: dict[str, Any] = {"tolerance": 1e-5, "max_steps": 500, "adjoint": None}
    return fixed_point(f, z0, args, on_failure="ignore", **(given | options))


@pytest.mark.defect("D7")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [8, 20])
def test_the_default_solves_what_plain_steps_solve(size: int, dtype: torch.dtype) -> None:
    z0, args = box(dtype, size)
    assert bool(solve(projected_gradient, z0, args, solver=Forward()).converged.all())
    # Rounding decides when the first attempt is given up, which is seen every hundred evaluations.
    solution = solve(projected_gradient, z0, args, max_steps=2000)
    assert solution.counts() == {"CONVERGED": 64}
    image = projected_gradient(solution.value, *args)
    relative = (image - solution.value).norm(dim=1) / image.norm(dim=1)
    assert (relative <= 1e-5 * 1.001).all()
    torch.testing.assert_close(solution.residual, relative, rtol=1e-2, atol=1e-9)


def test_an_energy_too_noisy_for_a_line_search_is_solved_by_plain_steps() -> None:
    """A Hopfield energy whose offset leaves few digits: the unit step needs none of them."""
    torch.manual_seed(1)
    patterns, x = torch.randn(16, 8), torch.randn(64, 8)

    def energy(z: Tensor) -> Tensor:
        return 10 + 0.5 * z.square().sum(1) - torch.logsumexp(8 * z @ patterns.T, 1) / 8

    named, default = (
        solve(Descent(energy), x, (), solver=s, max_steps=200) for s in (LBFGS(), None)
    )
    assert solve(Descent(energy), x, (), solver=Forward(), max_steps=200).counts() == {
        "CONVERGED": 64
    }
    assert default.counts() == {"CONVERGED": 64}
    assert default.energy is not None and named.energy is not None
    assert (default.energy <= named.energy + 1e-4).all()


def test_a_solver_that_was_named_is_left_alone() -> None:
    z0, args = box()
    named, default = (solve(projected_gradient, z0, args, solver=s) for s in (Anderson(), None))
    gave_up = named.status == Status.STALLED
    assert bool(gave_up.any())
    # The others ended in the same way with either.
    assert torch.equal(named.value[~gave_up], default.value[~gave_up])
    assert torch.equal(named.evaluations[~gave_up], default.evaluations[~gave_up])
    assert (default.evaluations[gave_up] > named.evaluations[gave_up]).all()
    assert (default.steps[gave_up] > named.steps[gave_up]).all()


@pytest.mark.parametrize(
    "name", ["F4_powell", "helical_valley", "variably_dimensioned_10", "chebyquad_7"]
)
def test_systems_on_which_anderson_diverges_are_solved(name: str) -> None:
    problem = SYSTEM[name]
    solution = run(problem)
    assert solution.counts() == {"CONVERGED": 1}
    assert solved(problem, solution.value)
    assert int(solution.evaluations) <= 500


def steep(z: Tensor, rate: Tensor) -> Tensor:
    """``z - F(z)`` where F(z) = rate z + z^3 - 1; plain and secant steps run away for large rates."""
    return z - (rate * z.roll(1, 1) + z**3 - 1)


def hard_batch() -> tuple[Tensor, tuple[Tensor]]:
    rate = torch.tensor([[0.4], [40.0], [0.5], [-60.0], [300.0]], dtype=torch.float64)
    start = torch.linspace(-3, 3, 6, dtype=torch.float64).expand(5, 6)
    return start + 0.1, (rate,)


@pytest.mark.parametrize("sample", range(5))
def test_every_evaluation_is_counted_and_the_budget_kept(sample: int) -> None:
    z0, (rate,) = hard_batch()
    one = slice(sample, sample + 1)
    for budget in (20, 60, 110):
        counter = Counter(steep, 1)
        solution = solve(counter, z0[one], (rate[one], counter.index), max_steps=budget)
        assert counter.seen.tolist() == solution.evaluations.tolist()
        assert (solution.evaluations <= budget).all()
        assert (solution.steps <= solution.evaluations).all()


def distance_to_solution(z: Tensor, rate: Tensor, rtol: float) -> float:
    """A bound for one sample z (D,) with ``|F(z)| <= rtol |f(z)|``, doubled for the curvature of F."""
    slope = torch.func.jacrev(lambda z: z - steep(z[None], rate[None])[0])(z)
    least = float(torch.linalg.svdvals(slope).min())
    return 2 * rtol * float(steep(z[None], rate[None]).norm()) / least


@pytest.mark.parametrize("compact", [True, False])
def test_a_second_attempt_does_not_depend_on_the_batch(compact: bool) -> None:
    """Statuses and solutions; a run away from a start amplifies the last digit, so not the counts."""
    z0, args = hard_batch()
    together = solve(steep, z0, args, compact=compact)
    named = solve(steep, z0, args, solver=Anderson())
    assert bool(((named.status != 0) & (together.status == 0)).any())
    for i in range(len(z0)):
        alone = solve(steep, z0[i : i + 1], tuple(t[i : i + 1] for t in args))
        assert int(alone.status) == int(together.status[i])
        if bool(alone.converged):
            ends = (alone.value[0], together.value[i])
            reach = sum(distance_to_solution(z, args[0][i], 1e-5) for z in ends)
            assert float((ends[0] - ends[1]).norm()) <= reach < 1e-3


def test_the_trace_and_the_callback_go_on() -> None:
    z0, args = hard_batch()
    seen: list[Progress] = []
    solution = solve(steep, z0, args, record=True, callback=seen.append)
    trace = solution.trace
    assert trace is not None and trace.accepted is not None
    assert trace.residual.shape == trace.accepted.shape
    assert trace.residual.shape[1] <= int(solution.evaluations.max())
    assert max(progress.evaluation for progress in seen) <= 500  # the budget
    # A sample's second attempt goes on in the column after its first, in whatever order they ran.
    told = torch.stack([progress.residual for progress in seen], 1)
    for row, heard in zip(trace.residual, told, strict=True):
        torch.testing.assert_close(row[~row.isnan()], heard[~heard.isnan()])
    for row, reached in zip(trace.residual, solution.residual, strict=True):
        assert float(row[~row.isnan()].min()) == pytest.approx(float(reached))


def test_what_cannot_be_solved_keeps_its_first_status() -> None:
    problem = make("runaway")
    solution = solve(problem.f, problem.z0, problem.args, max_steps=200)
    assert not bool((solution.status == Status.CONVERGED).any())
    named = solve(problem.f, problem.z0, problem.args, max_steps=200, solver=Anderson())
    assert solution.status.tolist() == named.status.tolist()
    assert (solution.residual <= named.residual).all()
