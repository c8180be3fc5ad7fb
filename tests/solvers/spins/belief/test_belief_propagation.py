"""Belief propagation: exact on trees, near on rings; forms, methods, clamped and masked sites."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases.pair_models import RING, TREE, TWO_TREES, dense, enumerated, pair_list
from cases.spin_models import fields, generator
from solvers import (
    Anderson,
    IsingSite,
    Solution,
    Status,
    Tolerance,
    adaptive_tap,
    belief_propagation,
)

F64 = torch.float64
TIGHT = Tolerance(1e-13)
ALL: dict[str, Any] = {"pairs": True, "log_partition": True, "tolerance": TIGHT}


def close(found: torch.Tensor, expected: torch.Tensor, error: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, atol=error, rtol=0)


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("edges", [TREE, TWO_TREES], ids=["tree", "two trees"])
@pytest.mark.parametrize(
    "options", [{}, {"damping": 1.0}, {"solver": Anderson()}], ids=["damped", "plain", "Anderson"]
)
def test_exact_on_trees(
    edges: tuple[tuple[int, int], ...], dim: int, options: dict[str, Any]
) -> None:
    random = generator(dim)
    listed, blocks = pair_list(edges, dim, 1.5, random)
    field, whole = fields(3, 5, dim, random), dense(listed, blocks, 5)
    exact = enumerated(whole, field)
    sparse = belief_propagation(blocks, field, edges=listed, **options, **ALL)
    matrix = belief_propagation(whole, field, **options, **ALL)
    for solution in (sparse, matrix):
        assert bool(solution.converged.all())
        close(solution.value.mean, exact.mean)
        close(solution.value.log_partition, exact.log_partition)
    close(matrix.value.pairs, _of_model(exact.pairs, exact.mean, whole))
    close(sparse.value.pairs, exact.pairs[:, listed[:, 0], listed[:, 1]])
    if "damping" in options:  # as many steps as the longest path, and one that finds nothing new
        assert int(sparse.evaluations.max()) <= 4


def _of_model(pairs: torch.Tensor, mean: torch.Tensor, couplings: torch.Tensor) -> torch.Tensor:
    """Pair marginals as belief propagation has them: independent where there are no couplings."""
    apart = mean[:, :, None, :, None] * mean[:, None, :, None, :]
    coupled = (couplings != 0).any(3).any(2) | torch.eye(len(couplings), dtype=torch.bool)
    return torch.where(coupled[:, :, None, None], pairs, apart)


def test_pairs_without_couplings_change_nothing() -> None:
    """With a gradient all pairs are edges; messages are the same, and fit as a start of the other."""
    random = generator(1)
    listed, blocks = pair_list(TREE, 3, 1.0, random)
    field, whole = fields(2, 5, 3, random), dense(listed, blocks, 5)
    plain = belief_propagation(whole, field, **ALL)
    tracked = belief_propagation(whole.clone().requires_grad_(), field, **ALL)
    for first, second in zip(plain.value, tracked.value, strict=True):
        close(second.detach(), first)
    again = belief_propagation(whole, field, start=tracked.value, tolerance=Tolerance(1e-12))
    assert int(again.evaluations.max()) == 1


def test_one_loop_is_near_and_weak_loops_nearer() -> None:
    """The error of the marginals on a ring of five falls with the strength, as its fifth power."""
    errors = []
    for scale in (0.4, 0.2):
        random = generator(5)
        listed, blocks = pair_list(RING, 2, scale, random)
        field = fields(4, 5, 2, random)
        exact = enumerated(dense(listed, blocks, 5), field)
        found = belief_propagation(blocks, field, edges=listed, **ALL).value
        errors.append((found.mean - exact.mean).abs().max().item())
        assert (found.log_partition - exact.log_partition).abs().max() < 0.01
    assert 1e-9 < errors[1] < errors[0] / 8 < 1e-3
    # The mean field of the same model is further off.
    spins = 0.5 * torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=F64)
    ring = dense(listed, 0.8 * spins.expand(5, 2, 2), 5)
    up = torch.stack([0.3 * torch.ones(1, 5, dtype=F64), torch.zeros(1, 5, dtype=F64)], 2)
    exact_up = enumerated(ring, up).mean[..., 0]
    means = adaptive_tap(
        0.4 * (ring[..., :1, :1] != 0).to(F64), 0.15 * torch.ones(1, 5, 1, dtype=F64),
        site=IsingSite(), order="naive", on_failure="ignore",
    ).value.mean[..., 0]  # fmt: skip
    found_up = belief_propagation(ring, up, **ALL).value.mean[..., 0]
    assert (found_up - exact_up).abs().max() < 0.1 * ((1 + means) / 2 - exact_up).abs().max()


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
    solution = belief_propagation(whole, field, given=(values, clamped), mask=mask, **ALL)
    states = torch.cartesian_prod(*[torch.arange(3)] * 5)
    first = enumerated(whole, field, states[:, 2] == 1)
    close(solution.value.mean[0], first.mean[0])
    close(solution.value.log_partition[0], first.log_partition[0])
    close(solution.value.pairs[0, 2, 0], first.pairs[0, 2, 0])
    second = enumerated(whole[:4, :4], field[:, :4])
    close(solution.value.mean[1, :4], second.mean[1])
    close(solution.value.log_partition[1], second.log_partition[1])
    assert not solution.value.mean[1, 4].any() and not solution.value.pairs[1, 4].any()
    everything = (torch.eye(3, dtype=F64)[states[[7, 70]]], torch.ones(2, 5, dtype=torch.bool))
    energy = belief_propagation(whole, field, given=everything, **ALL).value.log_partition
    alone = [enumerated(whole, field, (states == states[k]).all(1)) for k in (7, 70)]
    close(energy, torch.stack([each.log_partition[b] for b, each in enumerate(alone)]))


def test_a_given_mean_acts_as_a_field() -> None:
    random = generator(4)
    listed, blocks = pair_list(((0, 1),), 3, 1.0, random)
    field = fields(1, 2, 3, random)
    share = torch.tensor([[[0.2, 0.3, 0.5], [0.0, 0.0, 0.0]]], dtype=F64)
    given = (share, torch.tensor([[True, False]]))
    found = belief_propagation(blocks, field, edges=listed, given=given).value.mean[0, 1]
    close(found, torch.softmax(field[0, 1] + share[0, 0] @ blocks[0], 0))


def test_samples_do_not_depend_on_their_batch() -> None:
    random = generator(6)
    listed, blocks = pair_list(RING, 3, 1.0, random)
    field = fields(40, 5, 3, random, scale=2.0)
    whole = belief_propagation(blocks, field, edges=listed)
    assert len(whole.evaluations.unique()) > 1  # some leave the batch before others
    alone = belief_propagation(blocks, field[:1], edges=listed)
    close(whole.value.mean[:1], alone.value.mean, 1e-12)
    assert bool(whole.evaluations[0] == alone.evaluations[0])


def test_inverse_temperature_scales_and_anneals() -> None:
    random = generator(7)
    listed, blocks = pair_list(RING, 2, 1.0, random)
    field = fields(2, 5, 2, random)
    scaled = belief_propagation(2 * blocks, 2 * field, edges=listed, **ALL)
    several = belief_propagation(
        blocks, field, edges=listed, inverse_temperature=[0.5, 1.0, 2.0], **ALL
    )
    close(several.value.mean, scaled.value.mean, 1e-11)
    close(several.value.log_partition, scaled.value.log_partition, 1e-11)
    assert bool((several.evaluations > scaled.evaluations).all())


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


def test_sites_without_edges() -> None:
    field = fields(2, 3, 4, generator(9)).requires_grad_()
    none = torch.zeros(0, 2, dtype=torch.int64)
    for couplings, edges in (
        (torch.zeros(3, 3, 4, 4, dtype=F64), None),
        (field.new_zeros(0, 4, 4), none),
    ):
        solution: Solution = belief_propagation(couplings, field, edges=edges, **ALL)
        assert bool((solution.status == Status.CONVERGED).all())
        close(solution.value.mean, field.softmax(2))
        close(solution.value.log_partition, field.logsumexp(2).sum(1))
        (gradient,) = torch.autograd.grad(solution.value.log_partition.sum(), field)
        close(gradient, field.softmax(2))
