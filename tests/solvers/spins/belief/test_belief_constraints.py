"""Hard constraints: couplings and fields of -inf, what they rule out, and contradictions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.pair_models import RING, TREE, dense, enumerated, pair_list
from cases.spin_models import fields, generator
from solvers import SolveError, SolveWarning, Status, Tolerance, belief_propagation

F64 = torch.float64
INF = torch.inf
ALL: dict[str, Any] = {"pairs": True, "log_partition": True, "tolerance": Tolerance(1e-13)}


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
    whole = dense(listed, blocks, 5)
    exact = enumerated(whole, field)
    for damping in (0.5, 1.0):
        for model in ({"couplings": blocks, "edges": listed}, {"couplings": whole}):
            found = belief_propagation(**model, field=field, damping=damping, **ALL)
            assert bool(found.converged.all())
            torch.testing.assert_close(found.value.mean, exact.mean, atol=1e-10, rtol=0)
            torch.testing.assert_close(
                found.value.log_partition, exact.log_partition, atol=1e-10, rtol=0
            )
            assert finite(*found.value)
            # What is impossible has probability 0 exactly.
            assert not found.value.mean[exact.mean == 0].any()


def test_both_ways_of_adding_weights_agree() -> None:
    """Of log weights in a narrow range by products of matrices, else one by one."""
    random = generator(1)
    listed, blocks = pair_list(RING, 3, 1.0, random)
    blocks[2, 1, 0] = blocks[0, :, 1] = -INF
    field = fields(2, 5, 3, random)
    narrow = belief_propagation(blocks, field, edges=listed, bound=500.0, **ALL)
    wide = belief_propagation(blocks, field, edges=listed, bound=700.0, **ALL)
    for first, second in zip(narrow.value, wide.value, strict=True):
        torch.testing.assert_close(first, second, atol=1e-11, rtol=0)


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
    assert found.value.pairs is not None and not found.value.pairs.any()
    found.value.mean.sum().backward()
    assert values.grad is not None and not values.grad.any()
    with pytest.raises(SolveError, match="CONTRADICTORY 3"):
        belief_propagation(blocks, field, edges=listed, given=(values, clamped), on_failure="raise")
    with pytest.warns(SolveWarning, match="exclude each other"):
        belief_propagation(blocks, field, edges=listed, given=(values, clamped))


def test_one_contradiction_in_a_batch() -> None:
    listed, blocks = colouring(TREE, 2)
    field = fields(2, 5, 2, generator(3))
    values = torch.eye(2, dtype=F64)[torch.zeros(2, 5, dtype=torch.long)]
    clamped = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]).bool()
    found = belief_propagation(
        blocks, field, edges=listed, given=(values, clamped), on_failure="ignore", **ALL
    )
    assert found.status.tolist() == [Status.CONVERGED, Status.CONTRADICTORY]
    states = torch.tensor([0, 1, 0, 0, 1])  # the only colouring with the first at 0
    assert torch.equal(found.value.mean[0], torch.eye(2, dtype=F64)[states])
    weight = field[0, torch.arange(5), states].sum()
    torch.testing.assert_close(found.value.log_partition[0], weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_messages_that_run_away_are_bounded(dtype: torch.dtype) -> None:
    """Two colours on a ring of four with one preferred: certainty is approached, never reached."""
    listed, blocks = colouring(((0, 1), (1, 2), (2, 3), (3, 0)), 2)
    field = torch.zeros(1, 4, 2, dtype=dtype)
    field[0, 0, 0] = 2.0
    found = belief_propagation(
        blocks.to(dtype), field, edges=listed, bound=30.0, max_steps=2000,
        log_partition=True,
    )  # fmt: skip
    assert bool(found.converged.all()) and finite(found.value.mean, found.value.messages)
    assert torch.equal(found.value.mean[0].argmax(1), torch.tensor([0, 1, 0, 1]))
    assert bool(((found.value.messages.abs() - 15.0) < 1e-3).all())


def test_counting_colourings_of_a_tree() -> None:
    """k (k - 1)^(N - 1) of them."""
    listed, blocks = colouring(TREE, 4)
    field = torch.zeros(1, 5, 4, dtype=F64)
    found = belief_propagation(blocks, field, edges=listed, **ALL).value
    assert found.log_partition is not None and found.pairs is not None
    assert float(found.log_partition.exp()) == pytest.approx(4 * 3**4, rel=1e-12)
    assert not found.pairs.diagonal(dim1=2, dim2=3).any()
