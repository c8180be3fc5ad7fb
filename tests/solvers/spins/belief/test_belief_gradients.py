"""Derivatives of belief propagation: implicit and unrolled, and those of the Bethe free energy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases.pair_models import RING, dense, enumerated, pair_list
from cases.spin_models import couplings, fields, generator, symmetric
from solvers import Anderson, Implicit, Tolerance, Unrolled, belief_propagation

F64 = torch.float64
IMPLICIT = Implicit(tolerance=Tolerance(1e-12))
TIGHT: dict[str, Any] = {
    "tolerance": Tolerance(1e-13), "solver": Anderson(), "pairs": True, "log_partition": True,
}  # fmt: skip


def outputs(solution: Any) -> tuple[Tensor, ...]:
    assert bool(solution.converged.all())
    value = solution.value
    return value.mean, value.pairs, value.log_partition


@pytest.mark.parametrize(
    ("adjoint", "hard"),
    [(IMPLICIT, False), (IMPLICIT, True), (Unrolled(), True)],
    ids=["implicit", "implicit, hard", "unrolled, hard"],
)
def test_first_derivatives(adjoint: Any, hard: bool) -> None:
    """Of marginals, pair marginals and log Z, by all couplings (zero blocks too) and fields."""
    random = generator(0)
    raw = couplings(3, 2, 0.7, random).requires_grad_()
    field = fields(1, 3, 2, random).requires_grad_()
    forbidden = torch.zeros(3, 3, 2, 2, dtype=torch.bool)
    forbidden[0, 1, 0, 1] = forbidden[1, 0, 1, 0] = hard

    def run(raw: Tensor, field: Tensor) -> tuple[Tensor, ...]:
        whole = torch.where(forbidden, -torch.inf, symmetric(raw))
        return outputs(belief_propagation(whole, field, adjoint=adjoint, **TIGHT))

    assert gradcheck(run, (raw, field))


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
                blocks, field, edges=listed, given=given, mask=mask, adjoint=IMPLICIT,
                inverse_temperature=0.7, **TIGHT,
            )
        )  # fmt: skip

    assert gradcheck(run, inputs)


def test_second_derivatives() -> None:
    random = generator(2)
    listed, blocks = pair_list(((0, 1), (1, 2), (2, 0)), 2, 0.6, random)
    field = fields(1, 3, 2, random)
    inputs = (blocks.requires_grad_(), field.requires_grad_())

    def run(blocks: Tensor, field: Tensor) -> tuple[Tensor, ...]:
        found = belief_propagation(blocks, field, edges=listed, adjoint=IMPLICIT, **TIGHT)
        return found.value.mean, found.value.log_partition

    assert gradgradcheck(run, inputs)


def test_log_partition_has_the_marginals_as_derivatives() -> None:
    """On a ring, where neither is exact, and without any adjoint solve."""
    random = generator(3)
    listed, blocks = pair_list(RING, 3, 0.8, random)
    whole = dense(listed, blocks, 5).requires_grad_()
    field = fields(3, 5, 3, random).requires_grad_()
    found = belief_propagation(whole, field, inverse_temperature=1.3, **TIGHT)
    log_z = found.value.log_partition
    by_couplings, by_field = torch.autograd.grad(log_z.sum(), (whole, field))
    assert found.adjoint.solves == 0
    torch.testing.assert_close(by_field, 1.3 * found.value.mean, atol=1e-8, rtol=0)
    pairs = found.value.pairs.sum(0)
    pairs = pairs * (1 - torch.eye(5, dtype=F64))[:, :, None, None]
    torch.testing.assert_close(by_couplings, 1.3 / 2 * pairs, atol=1e-8, rtol=0)
    exact = enumerated(1.3 * whole.detach(), 1.3 * field.detach())
    assert (log_z.detach() - exact.log_partition).abs().max() < 0.05


def test_no_gradient_where_none_is_asked_for() -> None:
    listed, blocks = pair_list(RING, 2, 0.5, generator(4))
    field = fields(1, 5, 2, generator(5)).requires_grad_()
    found = belief_propagation(blocks, field, edges=listed, adjoint=None, log_partition=True)
    assert not found.value.mean.requires_grad and not found.value.log_partition.requires_grad
