"""The counter of evaluations: it sees every call, trusts no solver, and hides no failure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import torchdeq_oracle as oracle
from problems.zoo import make, residual_norms, rows


def plain_count(name: str, tolerance: float, limit: int) -> list[float]:
    """First evaluation of plain iteration within the tolerance, by hand, sample by sample."""
    found = []
    for i in range(make(name).batch):
        problem = rows(make(name), torch.tensor([i]))
        z, number = problem.z0, math.inf
        for k in range(1, limit + 1):
            fz = problem.f(z, *problem.args)
            residual, reference = residual_norms(z, fz)
            if float(residual) <= tolerance * float(reference):
                number = float(k)
                break
            z = fz
        found.append(number)
    return found


@pytest.mark.parametrize("name", ["cos", "linear_one_hard_sample", "start_at_solution"])
@pytest.mark.parametrize("limit", [9, 500])
def test_forward_counts_are_those_by_hand(name: str, limit: int) -> None:
    counted = oracle.evaluations_to(1e-6, make(name), "fixed_point_iter", limit)
    assert counted.tolist() == plain_count(name, 1e-6, limit)


@pytest.mark.parametrize("solver", list(oracle.SOLVERS))
def test_a_count_is_that_of_the_sample_alone(solver: str) -> None:
    problem = make("relu_0.9")
    together = oracle.evaluations_to(1e-5, problem, solver)
    alone = [
        oracle.evaluations_to(1e-5, rows(problem, torch.tensor([i])), solver)
        for i in range(problem.batch)
    ]
    assert together.tolist() == torch.cat(alone).tolist()


@dataclass
class Answer:
    value: Tensor
    evaluations: Tensor


def shrinking_forward(f: Any, z0: Tensor, args: tuple[Any, ...]) -> Answer:
    """Plain iteration whose finished samples leave the batch."""
    value, evaluations = z0.clone(), torch.zeros(z0.shape[0], dtype=torch.int64)
    active = torch.arange(z0.shape[0])
    while active.numel():
        z = value[active]
        fz = f(z, *(tensor[active] for tensor in args))
        evaluations[active] += 1
        residual, reference = residual_norms(z, fz)
        running = residual > 1e-6 * reference
        value[active[running]] = fz[running]
        active = active[running]
    return Answer(value, evaluations)


def test_best_is_the_smallest_median_among_the_complete() -> None:
    problem = make("cos")
    winner, evaluations = oracle.best(problem, 1e-6)
    medians = {name: oracle.outcome(problem, 1e-6, name).order for name in oracle.SOLVERS}
    assert medians[winner] == min(medians.values())
    assert torch.equal(evaluations, oracle.evaluations_to(1e-6, problem, winner))
