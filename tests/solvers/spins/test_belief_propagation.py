"""Belief propagation: exact on trees, near on rings; hard constraints; decimation by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases.spin_models import RING, TREE, TWO_TREES, dense, enumerated, fields, generator, pair_list
from solvers import (
    Beliefs,
    Implicit,
    Solution,
    SolveError,
    SolveWarning,
    Status,
    Tolerance,
    Unrolled,
    belief_propagation,
    decimate,
)

F64 = torch.float64
TIGHT = Tolerance(1e-13)
ALL: dict[str, Any] = {"log_partition": True, "tolerance": TIGHT}


def close(found: torch.Tensor, expected: torch.Tensor, error: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, atol=error, rtol=0)


@pytest.mark.parametrize("edges", [TREE, TWO_TREES], ids=["tree", "two trees"])
def test_exact_on_trees(edges: tuple[tuple[int, int], ...]) -> None:
    random = generator(3)
    listed, blocks = pair_list(edges, 3, 1.5, random)
    field = fields(3, 5, 3, random)
    exact = enumerated(dense(listed, blocks, 5), field)
    for damping in (0.5, 1.0):
        found = belief_propagation(blocks, field, edges=listed, damping=damping, **ALL)
        assert bool(found.converged.all())
        close(found.value.mean, exact.mean)
        close(found.value.log_partition, exact.log_partition)
    # Without damping as many steps as the longest path, and one that finds nothing new.
    assert int(found.evaluations.max()) <= 4
    again = belief_propagation(blocks, field, edges=listed, start=found.value, damping=1.0, **ALL)
    assert bool((again.evaluations < found.evaluations).all())
    close(again.value.mean, exact.mean)


def test_clamped_and_masked_sites() -> None:
    """A clamped site splits the ring, so that the rest is exact; a masked one is not there."""
    random = generator(2)
    listed, blocks = pair_list(RING, 3, 1.0, random)
    field, whole = fields(2, 5, 3, random), dense(listed, blocks, 5)
    values = torch.full((2, 5, 3), torch.nan, dtype=F64)
    clamped = torch.zeros(2, 5, dtype=torch.bool)
    clamped[0, 2], values[0, 2] = True, torch.tensor([0.0, 1.0, 0.0])
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 4] = False
    model: dict[str, Any] = {"couplings": blocks, "field": field, "edges": listed} | ALL
    solution = belief_propagation(given=(values, clamped), mask=mask, **model)
    states = torch.cartesian_prod(*[torch.arange(3)] * 5)
    first = enumerated(whole, field, states[:, 2] == 1)
    close(solution.value.mean[0], first.mean[0])
    close(solution.value.log_partition[0], first.log_partition[0])
    second = enumerated(whole[:4, :4], field[:, :4])
    close(solution.value.mean[1, :4], second.mean[1])
    close(solution.value.log_partition[1], second.log_partition[1])
    assert not solution.value.mean[1, 4].any()
    everything = (torch.eye(3, dtype=F64)[states[[7, 70]]], torch.ones(2, 5, dtype=torch.bool))
    energy = belief_propagation(given=everything, **model).value.log_partition
    alone = [enumerated(whole, field, (states == states[k]).all(1)) for k in (7, 70)]
    close(energy, torch.stack([each.log_partition[b] for b, each in enumerate(alone)]))


def test_samples_do_not_depend_on_their_batch() -> None:
    random = generator(6)
    listed, blocks = pair_list(RING, 3, 1.0, random)
    field = fields(40, 5, 3, random, scale=2.0)
    whole = belief_propagation(blocks, field, edges=listed, record=True)
    assert whole.trace is not None and whole.trace.residual.shape[0] == len(field)
    assert len(whole.evaluations.unique()) > 1  # some leave the batch before others
    alone = belief_propagation(blocks, field[:1], edges=listed)
    close(whole.value.mean[:1], alone.value.mean, 1e-12)
    assert bool(whole.evaluations[0] == alone.evaluations[0])


INF = torch.inf


def colouring(edges: tuple[tuple[int, int], ...], colours: int) -> tuple[Tensor, Tensor]:
    """Pairs and couplings of different colours at both ends."""
    different = torch.zeros(colours, colours, dtype=F64).fill_diagonal_(-INF)
    return torch.tensor(edges), different.expand(len(edges), colours, colours).clone()


def finite(*tensors: Tensor) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def test_forbidden_states_and_pairs_on_a_tree() -> None:
    random = generator(0)
    listed, blocks = pair_list(TREE, 3, 1.0, random)
    field = fields(4, 5, 3, random)
    blocks[0, 1, 1] = blocks[1, 0] = blocks[1, 1, 2] = blocks[3, :2, 0] = -INF
    field[1, 3, 2] = field[2, 0, 0] = field[2, 0, 1] = -INF
    exact = enumerated(dense(listed, blocks, 5), field)
    for damping in (0.5, 1.0):
        found = belief_propagation(blocks, field, edges=listed, damping=damping, **ALL)
        assert bool(found.converged.all())
        close(found.value.mean, exact.mean)
        close(found.value.log_partition, exact.log_partition)
        assert finite(*found.value)
        # What is impossible has probability 0 exactly.
        assert not found.value.mean[exact.mean == 0].any()


def test_contradictions_are_a_status_and_leave_the_others_alone() -> None:
    """Three colours at four mutual neighbours: found once two of them are given, as no colour is left."""
    listed, blocks = colouring(((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)), 3)
    field = torch.zeros(3, 4, 3, dtype=F64)
    field[2, 1] = -INF  # no state at all
    values = torch.eye(3, dtype=F64)[torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])]
    clamped = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    values = values.requires_grad_()
    found = belief_propagation(
        blocks, field, edges=listed, given=(values, clamped), on_failure="ignore", **ALL
    )
    # 0, 1 leave one colour to the sites 2 and 3, which must differ; in the second the two given do not.
    assert (found.status == Status.CONTRADICTORY).all()
    assert not found.value.mean.any() and finite(found.value.messages, found.value.mean)
    assert (found.value.log_partition == -INF).all() and found.residual.isinf().all()
    found.value.mean.sum().backward()
    assert values.grad is not None and not values.grad.any()
    with pytest.raises(SolveError, match="CONTRADICTORY"):
        belief_propagation(blocks, field, edges=listed, given=(values, clamped), on_failure="raise")
    with pytest.warns(SolveWarning):
        belief_propagation(blocks, field, edges=listed, given=(values, clamped))


IMPLICIT = Implicit(tolerance=1e-12)
SHARP: dict[str, Any] = ALL | {"damping": 0.9}


def outputs(solution: Any) -> tuple[Tensor, ...]:
    assert bool(solution.converged.all())
    value = solution.value
    return value.mean, value.log_partition


@pytest.mark.parametrize(
    ("adjoint", "hard"), [(IMPLICIT, True), (Unrolled(), False)], ids=["implicit, hard", "unrolled"]
)
def test_first_and_second_derivatives(adjoint: Any, hard: bool) -> None:
    """Of marginals and log Z, by all couplings (zero blocks too) and fields."""
    random = generator(0)
    listed, blocks = pair_list(((0, 1), (1, 2), (2, 0)), 2, 0.7, random)
    blocks[2] = 0.0
    field = fields(1, 3, 2, random).requires_grad_()
    forbidden = torch.zeros(3, 2, 2, dtype=torch.bool)
    forbidden[0, 0, 1] = hard

    def run(blocks: Tensor, field: Tensor) -> tuple[Tensor, ...]:
        allowed = torch.where(forbidden, -torch.inf, blocks)
        found = belief_propagation(allowed, field, edges=listed, adjoint=adjoint, **SHARP)
        return outputs(found)

    assert gradcheck(run, (blocks.requires_grad_(), field), fast_mode=True)
    assert not hard or gradgradcheck(run, (blocks, field), fast_mode=True)


def test_derivatives_by_listed_pairs_and_given_values() -> None:
    random = generator(1)
    listed, blocks = pair_list(((0, 1), (2, 1), (0, 2), (2, 3)), 2, 0.8, random)
    field = fields(2, 4, 2, random)
    logits = torch.randn(2, 4, 2, generator=random, dtype=F64)
    clamped = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 1]]).bool()
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    inputs = tuple(t.requires_grad_() for t in (blocks, field, logits))

    def run(blocks: Tensor, field: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        given = (logits.softmax(2), clamped)
        return outputs(
            belief_propagation(
                blocks, field, edges=listed, given=given, mask=mask, adjoint=IMPLICIT, **SHARP,
            )
        )  # fmt: skip

    assert gradcheck(run, inputs, fast_mode=True)


def test_log_partition_has_the_marginals_as_derivatives() -> None:
    """Of sites on a ring, of pairs on a tree, where they are exact; without any adjoint solve."""
    random = generator(3)
    for edges in (RING, TREE):
        listed, blocks = pair_list(edges, 3, 0.8, random)
        field = fields(3, 5, 3, random).requires_grad_()
        found = belief_propagation(blocks.requires_grad_(), field, edges=listed, **SHARP)
        log_z = found.value.log_partition
        by_blocks, by_field = torch.autograd.grad(log_z.sum(), (blocks, field))
        assert found.adjoint.solves == 0
        close(by_field, found.value.mean, 1e-8)
        exact = enumerated(dense(listed, blocks, 5).detach(), field.detach())
        assert (log_z.detach() - exact.log_partition).abs().max() < 0.05
    first, second = listed.unbind(1)
    close(by_blocks, exact.pairs.sum(0)[first, second], 1e-8)


PAIRS, BLOCKS = pair_list(TREE, 2, 1.0, generator(0))
FIELD = fields(2, 5, 2, generator(1))
NONE = torch.zeros(2, 5, dtype=torch.bool)


@pytest.mark.parametrize(("options", "kind", "message"), [
    ({"couplings": BLOCKS[:3]}, ValueError, "couplings"),
    ({"couplings": BLOCKS + torch.inf}, ValueError, "couplings"),
    ({"field": FIELD * torch.nan}, ValueError, "field"),
    ({"edges": PAIRS.float()}, TypeError, "edges"),
    ({"edges": None}, TypeError, "pairs"),
    ({"edges": PAIRS + 1}, ValueError, "edges"),
    ({"edges": PAIRS[[0, 1, 2, 2]].flip(1)}, ValueError, "duplicate"),
    ({"edges": PAIRS[:, [0, 0]]}, ValueError, "self-loops"),
    ({"given": (2 * FIELD, ~NONE)}, ValueError, "given"),
    ({"damping": 0.0}, ValueError, "damping"),
    ({"start": 3}, TypeError, "start"),
    ({"start": Beliefs(FIELD, torch.zeros(2, 5, 5, 2))}, ValueError,
        "messages"),
])  # fmt: skip
def test_wrong_arguments(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    usual: dict[str, Any] = {"couplings": BLOCKS, "field": FIELD, "edges": PAIRS}
    belief_propagation(**usual)
    with pytest.raises(kind, match=message):
        belief_propagation(**(usual | options))


CYCLES = ((0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 5), (5, 3), (0, 5), (1, 4))


def colours_differ(rows: Tensor, states: Tensor) -> Tensor:
    """Both ends of each pair in CYCLES."""
    first, second = torch.tensor(CYCLES).unbind(1)
    return (states[:, first] != states[:, second]).all(1)


def no_one_given(batch: int, sites: int, dim: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, sites, dim, dtype=F64), torch.zeros(batch, sites, dtype=torch.bool)


def colouring_decimation(field: Tensor) -> Any:
    """Solves a hard colouring of CYCLES by belief propagation."""
    different = torch.zeros(3, 3, dtype=F64).fill_diagonal_(-torch.inf).expand(9, 3, 3)

    def solve(rows: Tensor, given: tuple[Tensor, Tensor], start: Any) -> Solution:
        return belief_propagation(
            different, field[rows], edges=torch.tensor(CYCLES), given=given, start=start,
            bound=30.0, max_steps=60, on_failure="ignore", adjoint=None,
        )  # fmt: skip

    return solve


def test_every_step_of_decimation_on_a_tree_conditions_exactly() -> None:
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


def test_a_colouring_is_found_unless_the_given_sites_contradict_each_other() -> None:
    """Without a field all colours are alike; accepted as soon as the colouring is one."""
    field = torch.zeros(2, 6, 3, dtype=F64)
    values, clamped = no_one_given(2, 6, 3)
    values[0, :2, 0], clamped[0, :2] = 1.0, True  # neighbours of one colour
    found = decimate(colouring_decimation(field), (values, clamped), accept=colours_differ)
    assert found.accepted.tolist() == [False, True]
    assert found.fixed[1] < 6 and bool((found.evaluations > 0).all())
    assert bool(colours_differ(torch.arange(2), found.states)[1])
    assert found.status[0] == Status.CONTRADICTORY and found.fixed[0] == 0
    assert found.states[0, :2].tolist() == [0, 0]


@pytest.mark.parametrize("wrong", [torch.tensor([True]), True, torch.ones(2, dtype=torch.long)])
def test_accept_must_return_a_bool_for_each_sample(wrong: Any) -> None:
    solve = colouring_decimation(torch.zeros(2, 6, 3, dtype=F64))
    with pytest.raises(TypeError, match="accept"):
        decimate(solve, no_one_given(2, 6, 3), accept=lambda rows, states: wrong)


def solve_nothing(rows: Tensor, given: tuple[Tensor, Tensor], start: Any) -> Solution:
    raise AssertionError("not called")


@pytest.mark.parametrize(("options", "kind", "message"), [
    ({"solve": 3}, TypeError, "solve"),
    ({"certain": 1.5}, ValueError, "certain"),
    ({"given": None}, TypeError, "given"),
    ({"given": (3, 4)}, TypeError, "given"),
])  # fmt: skip
def test_wrong_arguments_decimation(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    usual: dict[str, Any] = {"solve": solve_nothing, "given": no_one_given(1, 2, 2)}
    with pytest.raises(kind, match=message):
        decimate(**(usual | options))


def test_strong_couplings_and_low_precision() -> None:
    """Weights beyond the range of the dtype are added in logarithms."""
    random = generator(8)
    listed, blocks = pair_list(TREE, 3, 400.0, random)
    field = fields(2, 5, 3, random, scale=100.0)
    exact = enumerated(dense(listed, blocks, 5), field)
    found = belief_propagation(blocks, field, edges=listed, damping=1.0, **ALL)
    close(found.value.log_partition, exact.log_partition, 1e-9)
    close(found.value.mean, exact.mean)
    half = belief_propagation(
        blocks.half(), field.half(), edges=listed, damping=1.0, log_partition=True
    )
    assert half.value.mean.dtype == torch.float16
    assert half.value.log_partition.dtype == torch.float32
    close(half.value.log_partition.double(), exact.log_partition, 2.0)
