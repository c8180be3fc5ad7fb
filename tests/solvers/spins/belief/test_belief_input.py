"""Wrong arguments of belief propagation are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases.pair_models import TREE, dense, pair_list
from cases.spin_models import fields, generator
from solvers import Anderson, Beliefs, belief_propagation

F64 = torch.float64
PAIRS, BLOCKS = pair_list(TREE, 2, 1.0, generator(0))
FIELD = fields(2, 5, 2, generator(1))
WHOLE = dense(PAIRS, BLOCKS, 5)
NONE = torch.zeros(2, 5, dtype=torch.bool)


def changed(tensor: torch.Tensor, value: float) -> torch.Tensor:
    found = tensor.clone()
    found.view(-1)[0] = value
    return found


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"couplings": BLOCKS.float()}, TypeError, "couplings must be like field"),
        ({"couplings": BLOCKS[:3]}, ValueError, r"couplings must have the shape \(E, d, d\)"),
        ({"couplings": changed(BLOCKS, torch.inf)}, ValueError, "couplings must be finite or -inf"),
        ({"field": changed(FIELD, torch.nan)}, ValueError, "field must be finite or -inf"),
        ({"field": FIELD[0]}, ValueError, r"field must have the shape \(B, N, d\)"),
        ({"edges": PAIRS.float()}, TypeError, "edges must be an int64 tensor"),
        ({"edges": PAIRS.flatten()}, ValueError, r"edges must have the shape \(E, 2\)"),
        ({"edges": PAIRS + 1}, ValueError, r"edges must hold sites 0 .. 4, got 1 .. 5"),
        ({"edges": PAIRS * 0}, ValueError, "edges must join two different sites"),
        ({"edges": PAIRS[[0, 1, 2, 2]].flip(1)}, ValueError, "edges must hold every pair once"),
        ({"couplings": WHOLE, "edges": None, "field": FIELD[:, :4]}, ValueError, "N, N, d, d"),
        ({"couplings": WHOLE + 1, "edges": None}, ValueError, "zero diagonal blocks"),
        ({"couplings": WHOLE.triu(), "edges": None}, ValueError, "couplings must be symmetric"),
        ({"mask": NONE.long()}, TypeError, "mask must be a bool tensor"),
        ({"given": (2 * FIELD, ~NONE)}, ValueError, "given must hold probabilities"),
        ({"damping": 0.0}, ValueError, "damping must be in"),
        ({"damping": 0.5, "solver": Anderson()}, ValueError, "damping is of the steps"),
        ({"solver": "anderson"}, TypeError, "solver must be a solvers.Solver"),
        ({"bound": -1.0}, ValueError, "bound must be finite and > 0"),
        ({"inverse_temperature": 0.0}, ValueError, "inverse_temperature must be > 0"),
        ({"start": 3}, TypeError, "start must be a solvers.Beliefs"),
        (
            {"start": Beliefs(FIELD, torch.zeros(2, 5, 5, 2))},
            ValueError,
            r"start.messages must have the shape \(2, 4, 2, 2\)",
        ),
        ({"pairs": 1}, TypeError, "pairs must be True or False"),
        ({"on_failure": "stop"}, ValueError, "on_failure must be one of"),
        ({"max_steps": 0}, ValueError, "max_steps must be >= 1"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    usual: dict[str, Any] = {"couplings": BLOCKS, "field": FIELD, "edges": PAIRS}
    belief_propagation(**usual)
    with pytest.raises(kind, match=message):
        belief_propagation(**(usual | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "max_steps"),
        ({"tolerance": 1e-3}, "tolerance"),
        ({"adjoint": 3}, "adjoint"),
    ],
)
def test_wrong_options_without_any_edge(options: dict[str, Any], message: str) -> None:
    """Nothing is solved then, and all the same."""
    with pytest.raises((TypeError, ValueError), match=f"{message} must be"):
        belief_propagation(BLOCKS[:0], FIELD, edges=PAIRS[:0], **options)
