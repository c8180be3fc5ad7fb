"""What is told of the solves of an epoch, and that nothing is where nothing was solved."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import solvers
from implicit_attn import DEQ
from implicit_attn.energies import Quadratic, ReLUFeedForward
from implicit_attn.training import progress
from implicit_attn.training.solves import SolveCounts, status_of, summary_of


def counted(adjoint: solvers.Adjoint | None, solve: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = DEQ(0.2 * ReLUFeedForward(4, 8) + Quadratic(), adjoint=adjoint)
    counts = SolveCounts(nn.Sequential(layer))
    if solve:
        out = layer(torch.randn(2, 3, 4))
        if adjoint is not None:
            out.square().sum().backward()
    counts.add(lambda tensor, _: tensor)
    return counts.means()


def test_solves_and_adjoint_solves_are_told() -> None:
    means = counted(solvers.Implicit())
    assert (means["converged"], means["adjoint_converged"]) == (1.0, 1.0)
    assert means["evaluations"] > 1 and 0 < means["adjoint_residual"] < 1e-2
    assert "adjoint" in status_of({"loss": 1.0, **means})


@pytest.mark.parametrize("adjoint", [None, solvers.OneStep(), solvers.Phantom(2)])
def test_gradients_without_an_adjoint_solve_have_no_share_of_converged_ones(adjoint: Any) -> None:
    means = counted(adjoint)
    assert means["converged"] == 1.0 and means["evaluations"] > 1
    for name in ("adjoint_converged", "adjoint_products", "adjoint_residual"):
        assert math.isnan(means[name])
    text = status_of({"loss": 1.0, **means})
    assert "converged 100.0 %" in text and "adjoint" not in text


def test_where_nothing_was_solved_nothing_is_told() -> None:
    means = counted(solvers.Implicit(), solve=False)
    assert math.isnan(means["converged"]) and math.isnan(means["evaluations"])
    unsolved = {"epoch": 1, "loss": 1.0, "seconds": 1.0, **means}
    assert status_of(unsolved) == "loss 1.0000"
    assert "converged" not in summary_of([unsolved])
    solved = unsolved | {"epoch": 2, "converged": 0.5, "evaluations": 7}
    for history in ([unsolved, solved], [solved, unsolved]):
        assert "50.00 %" in summary_of(history) and "solve 7" in summary_of(history)
    progress._check_rows([unsolved, solved], 2, ["solves"])  # a run of these can be resumed
