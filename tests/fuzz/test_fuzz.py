"""A fixed number of random cases of every family, and that the families see what is broken."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuzz import Call, Draw, run_case
from fuzz.run import FAMILIES
from solvers.adjoint import Linearization
from solvers.core.loop import Loop
from solvers.core.solution import Solution, Status
from solvers.linear import LinearLoop

# So many that together they take a few seconds.
CASES = {"fixed_points": 200, "truths": 150, "errors": 100, "linear": 150, "adjoints": 60}


def broken(name: str, cases: int) -> set[str]:
    """The invariants that some of the first cases break."""
    return {f.invariant for n in range(cases) for f in run_case(name, FAMILIES[name], n)}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_no_invariant_is_broken(name: str) -> None:
    failures = [str(f) for n in range(CASES[name]) for f in run_case(name, FAMILIES[name], n)]
    assert not failures, "\n".join(failures[:5])


# The invariant that finds it, the field of a solution that is changed, and how.
LIES: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("CONVERGED", "status", lambda status: status.new_full(status.shape, int(Status.CONVERGED))),
    ("residual_norm", "residual_norm", lambda norm: norm / 2),
    ("max_steps", "evaluations", lambda count: count + 1),
    ("finite value", "value", lambda value: value * torch.nan),
    ("NONFINITE", "status", lambda status: status.new_full(status.shape, int(Status.NONFINITE))),
]


@pytest.mark.parametrize(("invariant", "name", "change"), LIES)
@pytest.mark.parametrize(
    ("loop", "method", "family"),
    [(Loop, "solution", "fixed_points"), (LinearLoop, "_solution", "linear")],
)
def test_a_lying_solver_is_found(
    loop: Any, method: str, family: str, invariant: str, name: str, change: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    honest = getattr(loop, method)

    def lying(self: Any) -> Solution:
        solution = honest(self)
        setattr(solution, name, change(getattr(solution, name)))
        return solution

    monkeypatch.setattr(loop, method, lying)
    assert invariant in broken(family, 30)


def test_a_wrong_adjoint_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Linearization.solve

    def wrong(self: Any, *arguments: Any) -> Any:
        return 1.0001 * right(self, *arguments)

    monkeypatch.setattr(Linearization, "solve", wrong)
    assert "gradient" in broken("adjoints", 20)


def test_a_call_that_changes_the_world_is_found() -> None:
    draw, tensor = Draw("test", 0), torch.zeros(2)

    def rude() -> None:
        tensor.add_(1)
        torch.rand(1)
        warnings.warn("look", RuntimeWarning, stacklevel=1)

    state = torch.get_rng_state()
    Call(draw, rude, (tensor,))
    torch.set_rng_state(state)
    assert {invariant for invariant, _ in draw.broken} == {"inputs", "global state", "warnings"}
