"""Decimation: with belief propagation and mean field, restarts, what it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.pair_models import TREE, dense, enumerated, pair_list
from cases.spin_models import fields, generator
from solvers import Solution, Status, belief_propagation, decimate

F64 = torch.float64
CYCLES = ((0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 5), (5, 3), (0, 5), (1, 4))


def colours_differ(rows: Tensor, states: Tensor) -> Tensor:
    """Both ends of each pair in CYCLES."""
    first, second = torch.tensor(CYCLES).unbind(1)
    return (states[:, first] != states[:, second]).all(1)


def no_one_given(batch: int, sites: int, dim: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, sites, dim, dtype=F64), torch.zeros(batch, sites, dtype=torch.bool)


def colouring(field: Tensor) -> Any:
    """Solves a hard colouring of CYCLES by belief propagation."""
    different = torch.zeros(3, 3, dtype=F64).fill_diagonal_(-torch.inf).expand(9, 3, 3)

    def solve(rows: Tensor, given: tuple[Tensor, Tensor], start: Any) -> Solution:
        return belief_propagation(
            different, field[rows], edges=torch.tensor(CYCLES), given=given, start=start,
            bound=30.0, max_steps=60, on_failure="ignore", adjoint=None,
        )  # fmt: skip

    return solve


def test_on_a_tree_every_step_conditions_exactly() -> None:
    """The surest site first, the others given it: by hand from enumerated marginals."""
    random = generator(0)
    listed, blocks = pair_list(TREE, 3, 1.0, random)
    field = fields(3, 5, 3, random)
    seen: list[Tensor] = []

    def solve(rows: Tensor, given: tuple[Tensor, Tensor], start: Any) -> Solution:
        seen.append(given[1].sum(1))
        return belief_propagation(blocks, field[rows], edges=listed, given=given, start=start)

    found = decimate(solve, no_one_given(3, 5, 3))
    states = torch.cartesian_prod(*[torch.arange(3)] * 5)
    for row in range(3):
        allowed = torch.ones(len(states), dtype=torch.bool)
        fixed: list[int] = []
        for _ in range(5):
            mean = enumerated(dense(listed, blocks, 5), field[row : row + 1], allowed).mean[0]
            mean[fixed] = -1.0
            site, state = divmod(int(mean.argmax()), 3)
            allowed &= states[:, site] == state
            fixed.append(site)
        assert torch.equal(found.states[row], states[allowed][0])
    assert torch.equal(found.fixed, torch.full((3,), 5)) and bool(found.accepted.all())
    assert [int(count[0]) for count in seen] == [0, 1, 2, 3, 4, 5]
    assert torch.equal(found.mean.argmax(2), found.states)


def test_a_colouring_is_found_where_marginals_say_nothing() -> None:
    """Without a field all colours are alike; accepted as soon as the colouring is one."""
    found = decimate(
        colouring(torch.zeros(2, 6, 3, dtype=F64)), no_one_given(2, 6, 3), accept=colours_differ
    )
    assert bool(found.accepted.all()) and bool((found.fixed < 6).all())
    assert bool(colours_differ(torch.arange(2), found.states).all())
    assert bool((found.evaluations > 0).all())


def test_a_contradiction_ends_an_attempt_and_keeps_what_was_known() -> None:
    field = torch.zeros(2, 6, 3, dtype=F64)
    values, clamped = no_one_given(2, 6, 3)
    values[0, :2, 0], clamped[0, :2] = 1.0, True  # neighbours of one colour
    found = decimate(colouring(field), (values, clamped), accept=colours_differ)
    assert found.accepted.tolist() == [False, True]
    assert found.status[0] == Status.CONTRADICTORY and found.fixed[0] == 0
    assert found.states[0, :2].tolist() == [0, 0]


@pytest.mark.parametrize("answer", [True, torch.ones(3), torch.ones(2, dtype=torch.bool)])
def test_what_accept_returns_is_checked(answer: Any) -> None:
    with pytest.raises(TypeError, match=r"accept must return bools of the shape \(3,\), got"):
        decimate(
            colouring(fields(3, 6, 3, generator(2))),
            no_one_given(3, 6, 3),
            accept=lambda rows, states: answer,
        )


def solve_nothing(rows: Tensor, given: tuple[Tensor, Tensor], start: Any) -> Solution:
    raise AssertionError("not called")


@pytest.mark.parametrize(("options", "kind", "message"), [
    ({"solve": 3}, TypeError, "solve must be callable"),
    ({"certain": 1.5}, ValueError, r"certain must be in \[0.0, 1.0\], got 1.5"),
    ({"given": None}, TypeError, "given must be a pair"),
    ({"given": (3, 4)}, ValueError, r"given must hold values of the shape \(B, N, d\)"),
])  # fmt: skip
def test_wrong_arguments(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    usual: dict[str, Any] = {"solve": solve_nothing, "given": no_one_given(1, 2, 2)}
    with pytest.raises(kind, match=message):
        decimate(**(usual | options))
