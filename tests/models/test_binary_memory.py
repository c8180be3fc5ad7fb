"""Binary memories: what the rules store, what retrieval does to the energy, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from implicit_attn.models.memories import BinaryMemory, hebb, pseudo_inverse, pseudo_likelihood

RULES: list[str | int] = ["hebb", "pseudo-inverse", "pseudo-likelihood", 2, 3, 4, 7, "exp"]
each_rule = pytest.mark.parametrize("rule", RULES)


def spins(count: int, sites: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, (count, sites), generator=generator).double() * 2 - 1


def flipped(patterns: Tensor, number: int, seed: int = 1) -> Tensor:
    order = torch.rand(patterns.shape, generator=torch.Generator().manual_seed(seed)).argsort(1)
    return torch.where(order < number, -patterns, patterns)


@each_rule
def test_few_patterns_come_back_from_damaged_copies(rule: str | int) -> None:
    patterns = spins(4, 60)
    memory = BinaryMemory(patterns, rule)
    assert memory.is_fixed_point(patterns).all()
    assert torch.equal(memory.retrieve(flipped(patterns, 6)), patterns)


@pytest.mark.parametrize(
    ("rule", "rectified"),
    [(rule, True) for rule in RULES] + [(rule, False) for rule in RULES if isinstance(rule, int)],
)
def test_no_sweep_raises_the_energy(rule: str | int, rectified: bool) -> None:
    """Above capacity, where starts end anywhere; every end is a fixed point."""
    count = 16 if rule == "pseudo-inverse" else 40  # below the 24 at which J vanishes
    memory = BinaryMemory(spins(count, 24), rule, rectified=rectified)
    s = spins(30, 24, seed=5)
    changed = False
    for _ in range(40):
        after = memory.retrieve(s, 1)
        before, now = memory.energy(s), memory.energy(after)
        assert (now <= before + 1e-12 * before.abs()).all()
        moved = (after != s).any(1)
        # A sign is changed for a lower energy only: no run can go round in a circle.
        assert (now[moved] < before[moved]).all()
        changed |= bool(moved.any())
        s = after
    assert changed and memory.is_fixed_point(s).all()


@each_rule
def test_each_update_takes_the_lower_of_two_energies(rule: str | int) -> None:
    """Spin after spin, by hand; and no flip lowers the energy of a fixed point."""
    memory = BinaryMemory(spins(5, 10), rule)
    start, decided = spins(20, 10, seed=2), 0
    found, rests, s = memory.retrieve(start, 1), memory.is_fixed_point(start), start.clone()
    higher = torch.ones(20, dtype=torch.bool)
    for i in range(10):
        flip = start.clone()
        flip[:, i] *= -1
        higher &= memory.energy(flip) >= memory.energy(start) - 1e-12 * memory.energy(start).abs()
        up, down = s.clone(), s.clone()
        up[:, i], down[:, i] = 1.0, -1.0
        gap = memory.energy(down) - memory.energy(up)
        clear = gap.abs() > 1e-12 * memory.energy(s).abs()
        decided += int(clear.sum())
        s[:, i] = torch.where(clear, gap.sign(), s[:, i])  # a tie leaves the spin
    assert decided > 50 and torch.equal(found, s) and torch.equal(rests, higher)


def test_pair_rules_against_their_formulas() -> None:
    patterns = spins(5, 12)
    sums = sum(torch.outer(x, x) for x in patterns) / 12
    inverse = torch.linalg.pinv(patterns) @ patterns
    for found, whole in ((hebb(patterns), sums), (pseudo_inverse(patterns), inverse)):
        assert isinstance(whole, Tensor)
        torch.testing.assert_close(found, whole - whole.diagonal().diag())
        assert torch.equal(found.diagonal(), torch.zeros(12, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pseudo_inverse_of_as_many_patterns_as_spins_changes_nothing(dtype: torch.dtype) -> None:
    """The projection onto everything is the identity, of which nothing is left but rounding."""
    patterns = spins(40, 30).to(dtype)
    assert torch.linalg.matrix_rank(patterns) == 30
    memory = BinaryMemory(patterns, "pseudo-inverse")
    assert memory.couplings is not None and not memory.couplings.any()
    start = spins(9, 30, seed=1).to(dtype)
    assert torch.equal(memory.retrieve(start), start)


def test_pseudo_likelihood_follows_the_gradient_that_autograd_finds() -> None:
    patterns = spins(30, 8)  # too many to be separable: the likelihood has a maximum
    couplings = pseudo_likelihood(patterns, steps=1000, rate=0.005).requires_grad_()
    fields = patterns @ couplings.mT
    value = torch.nn.functional.logsigmoid(2 * patterns * fields).sum(1).mean()
    (slope,) = torch.autograd.grad(value, couplings)
    slope = slope + slope.mT
    assert (slope - slope.diagonal().diag()).abs().max() < 1e-3  # 0.5 at the start
    torch.testing.assert_close(couplings, couplings.mT, rtol=0, atol=1e-15)


def test_the_first_step_of_pseudo_likelihood_is_hebbian() -> None:
    """Adam's first step is the sign of the gradient, which at J = 0 is Hebb's matrix."""
    patterns = spins(5, 12)
    first = pseudo_likelihood(patterns, steps=1, rate=0.5)
    torch.testing.assert_close(first, 0.5 * hebb(patterns).sign(), rtol=1e-6, atol=1e-6)


def test_dense_memories_hold_more_than_pair_memories() -> None:
    """At 320 patterns of 40 spins the published order of the rules."""
    patterns = spins(320, 40)
    targets = patterns[:20]
    overlaps = {
        rule: (BinaryMemory(patterns, rule).retrieve(flipped(targets, 4)) * targets).mean().item()
        for rule in ("hebb", 3, 4, "exp")
    }
    assert overlaps["exp"] == 1.0
    assert overlaps["exp"] >= overlaps[4] > overlaps[3] > overlaps["hebb"]


def test_mistakes() -> None:
    patterns = spins(3, 8)
    memory = BinaryMemory(patterns)
    for bad, error, message in (
        (lambda: BinaryMemory(patterns, 1), ValueError, "rule .* got 1"),
        (lambda: BinaryMemory(patterns, "exp", rectified=False), ValueError, "integer rule"),
        (lambda: BinaryMemory(patterns.long()), TypeError, "patterns must be a floating"),
        (lambda: BinaryMemory(patterns[0]), ValueError, r"patterns must have the shape \(P, N\)"),
        (lambda: BinaryMemory(0.5 * patterns), ValueError, r"patterns must have .* \+1 and -1"),
        (lambda: memory.retrieve(patterns[:, :4]), ValueError, "s must have 8 spins"),
        (lambda: memory.retrieve(patterns.float()), TypeError, "s must be of dtype"),
        (lambda: memory.retrieve(patterns[0]), ValueError, "s must have the shape"),
        (lambda: BinaryMemory(patterns[:0]), ValueError, "patterns must have the shape"),
    ):
        with pytest.raises(error, match=message):
            bad()
