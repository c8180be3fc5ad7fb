"""Learning of Potts models by the gradient of the likelihood: summed exactly, or by Gibbs samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import solvers
from implicit_attn.models import PottsModel


def exact_likelihood(model: PottsModel, states: Tensor) -> Tensor:
    """Mean log-likelihood of one-hot states (M, N, d): ``-<E>_data - log sum_S exp(-E(S))``, S all d^N."""
    sites, dim = model.field.shape
    every = F.one_hot(torch.cartesian_prod(*[torch.arange(dim)] * sites), dim).to(model.field)
    return -model.energy(states.to(model.field)).mean() - torch.logsumexp(-model.energy(every), 0)


def fit_exact_likelihood(
    model: PottsModel, states: Tensor, l2: float = 0.0, steps: int = 100, tolerance: float = 1e-5
) -> str:
    """Maximise :func:`exact_likelihood`, less ``l2 / 2 sum J^2``, by at most ``steps`` evaluations of L-BFGS.

    The problem is convex. Without ``l2`` it has no maximum where a configuration of two sites never
    occurs in the data: couplings grow until the gradient is within the tolerance. Returns "converged"
    (no entry of the gradient is beyond the tolerance), "max_steps" or "stalled".
    """
    evaluations = 0
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=steps, max_eval=steps, tolerance_grad=tolerance,
        tolerance_change=0.0, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def evaluate() -> float:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = 0.5 * l2 * model.couplings.weight.square().sum() - exact_likelihood(model, states)
        loss.backward()
        return loss.item()

    optimizer.step(evaluate)
    made, _ = evaluations, evaluate()
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    if not math.isfinite(largest):
        raise FloatingPointError(f"the gradient of the likelihood is {largest}")
    return "converged" if largest <= tolerance else "max_steps" if made >= steps else "stalled"


def contrastive_divergence(
    model: PottsModel,
    states: Tensor,
    *,
    sweeps: int = 1,
    chains: int | None = None,
    steps: int = 500,
    batch: int = 2000,
    rate: float = 0.1,
    seed: int = 0,
    watch: Callable[[int, float], None] = lambda step, gradient: None,
) -> None:
    r"""Raise the likelihood of one-hot states (M, N, d) by Gibbs samples of the model (CD-k, or PCD-k).

    The gradient of the log-likelihood is a difference of two means::

        d log P / dJ_ij = <S_i S_j^T>_data - <S_i S_j^T>_model,    d log P / dx_i = <S_i>_data - <S_i>_model

    The mean over the model is estimated from ``sweeps`` Gibbs sweeps, started at the data of the batch
    (contrastive divergence: biased for few sweeps, even with infinite data), or at the end of the
    step before, in ``chains`` kept chains (PCD: they follow the model, without that bias once they mix
    faster than the model changes). The steps are those of Adam with a rate that falls to 0 along a
    cosine. ``watch(step, norm of the estimated gradient)`` is called after each.

    Source: G. E. Hinton (2002), "Training products of experts by minimizing contrastive divergence",
    https://doi.org/10.1162/089976602760128018; T. Tieleman (2008), "Training restricted Boltzmann machines
    using approximations to the likelihood gradient", https://doi.org/10.1145/1390156.1390290.
    """
    generator = torch.Generator().manual_seed(seed)
    states = states.to(model.field.dtype)

    def draw(number: int) -> Tensor:
        return states[torch.randint(len(states), (number,), generator=generator)]

    kept = None if chains is None else draw(chains)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(1, steps + 1):
        positive = states if batch >= len(states) else draw(batch)
        negative = solvers.gibbs(
            model.couplings.weight.detach(), model.field.detach(), site=solvers.PottsSite(),
            sweeps=sweeps, generator=generator, start=positive if kept is None else kept,
        )  # fmt: skip
        kept = None if kept is None else negative
        optimizer.zero_grad()
        (model.energy(positive).mean() - model.energy(negative).mean()).backward()
        gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        norm = torch.stack(gradients).norm().item()
        if not math.isfinite(norm):
            raise FloatingPointError(f"the estimated gradient is {norm} at step {step}")
        optimizer.step()
        schedule.step()
        watch(step, norm)
