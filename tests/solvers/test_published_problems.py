"""Problems of the literature, from published and perturbed starts: what is CONVERGED is solved."""

from __future__ import annotations

import pytest
import torch

from problems import published
from problems.collected import Collected
from problems.published import MINIMISERS, SYSTEMS

SMALL = [problem for problem in SYSTEMS + MINIMISERS if len(problem.start) <= 12]


@pytest.mark.parametrize("problem", SYSTEMS + MINIMISERS, ids=lambda each: each.name)
def test_published_solutions_solve(problem: Collected) -> None:
    if problem.solution is not None:
        known = torch.tensor([list(problem.solution)], dtype=torch.float64)
        assert bool(published.solved(problem, known, slack=100.0).all())  # printed to some digits


@pytest.mark.parametrize(
    ("kind", "default", "least"),
    # The shares of starts that are solved within 500 evaluations, less a margin.
    [("system", False, 0.86), ("system", True, 0.86), ("minimiser", False, 0.93)],
    ids=["root", "fixed_point", "L-BFGS"],
)
def test_what_is_converged_is_solved(kind: str, default: bool, least: float) -> None:
    solved, false = [], []
    for problem in SMALL:
        if problem.kind == kind:
            found = published.solve(problem, default=default, budget=500)
            value = found.value.detach()
            solved.append(published.solved(problem, value))
            if bool((found.converged & ~published.solved(problem, value, slack=2.0)).any()):
                false.append(problem.name)
    assert not false
    assert torch.cat(solved).double().mean().item() >= least
