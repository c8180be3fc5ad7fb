"""Maximum likelihood of a memory's patterns: monotone, and the best there is nearby."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from implicit_attn.energies import Hopfield
from implicit_attn.models.memories import fit_patterns

BETA = 2.0
TRIANGLE = 2.0 * torch.tensor([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]]).double()


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


def plain_em(data: Tensor, patterns: Tensor, steps: int) -> float:
    """Expectation maximisation, each maximisation by many gradient steps on its concave bound."""
    for _ in range(steps):
        shares = (BETA * data @ patterns.mT).softmax(1).mT @ data / len(data)

        def bound(flat: object, shares: Tensor = shares) -> tuple[float, object]:
            x = torch.as_tensor(flat).reshape(shares.shape).requires_grad_()
            value = torch.logsumexp(BETA / 2 * x.square().sum(1), 0) - BETA * (shares * x).sum()
            (slope,) = torch.autograd.grad(value, x)
            return value.item(), slope.flatten().numpy()

        start = patterns.flatten().numpy()
        found = minimize(bound, start, jac=True, method="L-BFGS-B", options={"gtol": 1e-10})
        patterns = torch.as_tensor(found.x).reshape(shares.shape)
    return mean_log_prob(patterns, data).item()


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


def test_equals_expectation_maximisation_done_by_hand() -> None:
    """From the same start, far from the end: each step of it is the maximum of the same bound."""
    start = TRIANGLE + torch.tensor([0.4, -0.2])
    data = Hopfield(TRIANGLE, beta=BETA).sample(200, torch.Generator().manual_seed(0))
    one = fit_patterns(data, 3, BETA, start=start, steps=1)
    whole = fit_patterns(data, 3, BETA, start=start)
    for fit, steps in ((one, 1), (whole, 60)):
        found = mean_log_prob(fit.memory.patterns, data).item()
        assert found == pytest.approx(plain_em(data, start, steps), abs=1e-6)


def test_finds_the_patterns_behind_much_data() -> None:
    truth = TRIANGLE
    data = Hopfield(truth, beta=BETA).sample(4000, torch.Generator().manual_seed(0))
    found = fit_patterns(data, 3, BETA, start=truth.roll(1, 0) + 0.3).memory.patterns
    order = torch.cdist(truth, found).argmin(1)
    assert sorted(order.tolist()) == [0, 1, 2]
    assert (found[order] - truth).abs().max() < 0.1


def test_mistakes() -> None:
    data = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    for bad, error, message in (
        (lambda: fit_patterns(data.long(), 2, 1.0), TypeError, "data must be a floating"),
        (lambda: fit_patterns(data[0], 2, 1.0), ValueError, "data must have the shape"),
        (lambda: fit_patterns(data, 6, 1.0), ValueError, "count must be at most the 5 rows"),
        (lambda: fit_patterns(data, 2, 1.0, start=data), ValueError, "start must have the shape"),
        (lambda: fit_patterns(data, 2, 1.0, tolerance=-1.0), ValueError, "tolerance must be"),
    ):
        with pytest.raises(error, match=message):
            bad()
