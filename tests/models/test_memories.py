"""Binary memories, and the fit of a continuous one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from implicit_attn.energies import Hopfield
from implicit_attn.models.memories import (
    BinaryMemory,
    fit_patterns,
    hebb,
    pseudo_inverse,
    pseudo_likelihood,
)

# Binary memories: what the rules store, what retrieval does to the energy, what it refuses.


RULES: list[str | int] = ["hebb", "pseudo-inverse", "pseudo-likelihood", 2, 5, "exp"]
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


@each_rule
def test_no_sweep_raises_the_energy(rule: str | int) -> None:
    """Above capacity, where starts end anywhere; every end is a fixed point."""
    count = 16 if rule == "pseudo-inverse" else 40  # below the 24 at which J vanishes
    memory = BinaryMemory(spins(count, 24), rule)
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


def test_pseudo_likelihood_follows_the_gradient_that_autograd_finds() -> None:
    patterns = spins(30, 8)  # too many to be separable: the likelihood has a maximum
    couplings = pseudo_likelihood(patterns, steps=1000, rate=0.005).requires_grad_()
    fields = patterns @ couplings.mT
    value = torch.nn.functional.logsigmoid(2 * patterns * fields).sum(1).mean()
    (slope,) = torch.autograd.grad(value, couplings)
    slope = slope + slope.mT
    assert (slope - slope.diagonal().diag()).abs().max() < 1e-3  # 0.5 at the start
    torch.testing.assert_close(couplings, couplings.mT, rtol=0, atol=1e-15)


# Maximum likelihood of a memory's patterns: monotone, and the best there is nearby.


BETA = 2.0


def sample(count: int = 400, patterns: int = 4, seed: int = 0) -> tuple[Hopfield, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centers = 1.5 * torch.randn(patterns, 2, generator=generator, dtype=torch.float64)
    memory = Hopfield(centers, beta=BETA)
    return memory, memory.sample(count, generator)


def mean_log_prob(patterns: Tensor, data: Tensor) -> Tensor:
    memory = Hopfield(patterns, beta=BETA)
    memory.patterns = patterns  # with its graph
    return memory.log_prob(data).mean()


def ascend(data: Tensor, patterns: Tensor) -> float:
    """The nearest maximum by a method that knows nothing of mixtures."""

    def loss(flat: object) -> tuple[float, object]:
        x = torch.as_tensor(flat).reshape(patterns.shape).requires_grad_()
        value = -mean_log_prob(x, data)
        (slope,) = torch.autograd.grad(value, x)
        return value.item(), slope.flatten().numpy()

    options = {"gtol": 1e-11, "ftol": 1e-16, "maxiter": 5000}
    found = minimize(loss, patterns.flatten().numpy(), jac=True, method="L-BFGS-B", options=options)
    return -float(found.fun)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_step_lowers_the_likelihood_and_the_end_is_a_maximum(seed: int) -> None:
    _, data = sample(seed=seed)
    fit = fit_patterns(data, 4, BETA, generator=torch.Generator().manual_seed(seed))
    rises = torch.tensor(fit.log_likelihood).double().diff()
    assert fit.converged and (rises >= -1e-13).all()
    end = mean_log_prob(fit.memory.patterns, data).item()
    assert end == pytest.approx(fit.log_likelihood[-1], abs=1e-9)
    assert abs(ascend(data, fit.memory.patterns) - end) <= 1e-6
    x = fit.memory.patterns.clone().requires_grad_()
    (slope,) = torch.autograd.grad(mean_log_prob(x, data), x)
    assert slope.abs().max() < 1e-3


SPINS, DATA = spins(3, 8), torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: BinaryMemory(SPINS, 1), "rule"),
    (lambda: BinaryMemory(SPINS.long()), "patterns"),
    (lambda: BinaryMemory(SPINS[0]), "patterns"),
    (lambda: BinaryMemory(0.5 * SPINS), "patterns"),
    (lambda: BinaryMemory(SPINS).retrieve(SPINS[:, :4]), r"\bs\b"),
    (lambda: fit_patterns(DATA.long(), 2, 1.0), "data"),
    (lambda: fit_patterns(DATA, 6, 1.0), "count"),
    (lambda: fit_patterns(DATA, 2, 1.0, tolerance=-1.0), "tolerance"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
