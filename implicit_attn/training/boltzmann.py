"""Learning of spin models by the gradient of the likelihood: exact, or by Gibbs sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import solvers
from solvers.core.checks import (
    require_callable,
    require_count,
    require_flag,
    require_instance,
    require_nonnegative,
    require_positive,
)
from solvers.spins.gibbs import check_values

MOST_CONFIGURATIONS = 2**20

Watch = Callable[[int, float], None]


class PairModel(Protocol):
    """What is learned: ``P(S) ~ prod_i rho(S_i) exp(1/2 sum_ij S_i^T J_ij S_j + sum_i x_i.S_i)``.

    A module with ``couplings.weight`` = J (N, N, d, d), ``field`` = x (N, d) and
    ``energy(states)`` (B, N, d) -> (B,), minus that exponent, such as ``PottsModel`` of
    ``implicit_attn.models``.
    """

    couplings: Any

    @property
    def field(self) -> Tensor: ...

    def energy(self, s: Tensor, /) -> Tensor: ...

    def parameters(self) -> Any: ...


@dataclass(frozen=True)
class BoltzmannFit:
    """How a learning went.

    Attributes:
        status: "converged" (the gradient met the tolerance), "max_steps" (all steps were made),
            "stalled" (no step along the search direction raised the likelihood, as near the limit of
            float32) or "nonfinite" (a gradient was not finite; the parameters are those of sampling
            before it, those of exact likelihood the first ones).
        steps: made; of exact likelihood, evaluations of the likelihood.
        gradients: the norm of the (estimated) gradient of the likelihood per sample, at each step; of
            exact likelihood also at the start and at the end.
    """

    status: str
    steps: int
    gradients: tuple[float, ...]

    @property
    def converged(self) -> bool:
        """Whether the tolerance was met; sampling has none to meet."""
        return self.status == "converged"


def contrastive_divergence(
    model: PairModel,
    data: Tensor,
    *,
    site: solvers.Site | None = None,
    sweeps: int = 1,
    persistent: bool = False,
    chains: int | None = None,
    steps: int = 500,
    batch: int = 2000,
    rate: float = 0.1,
    seed: int = 0,
    watch: Watch | None = None,
) -> BoltzmannFit:
    r"""Raise the likelihood of data by Gibbs samples of the model (CD-k, or PCD-k).

    The gradient of the log-likelihood is a difference of two means::

        d log P / dJ_ij = <S_i S_j^T>_data - <S_i S_j^T>_model,    d log P / dx_i = <S_i>_data - <S_i>_model

    The mean over the model is estimated from ``sweeps`` Gibbs sweeps, started at the data of the batch
    (contrastive divergence: biased for few sweeps, even with infinite data), or at the end of the
    step before (``persistent``: the chains follow the model, without that bias once they mix faster than
    the model changes). The steps are those of Adam with a rate that falls to 0 along a cosine.

    Args:
        model: changed in place; see :class:`PairModel`.
        data: (M, N, d) states, values that the site can take: for Potts sites one-hot.
        site: the law rho of a single site; None: ``solvers.PottsSite()``.
        sweeps: k.
        persistent: keep the chains.
        chains: how many are kept, started at samples of the data; None: as many as a batch has. Only
            with ``persistent``.
        steps: of Adam.
        batch: samples of a step, drawn with repetition; all of them where there are no more.
        rate: the first learning rate.
        seed: of batches and chains.
        watch: ``watch(step, gradient norm)`` after every step, or None.

    Returns:
        A :class:`BoltzmannFit`, whose status is "max_steps" or "nonfinite": an estimated gradient never
        vanishes, so that convergence cannot be told.

    Raises:
        TypeError, ValueError: for arguments out of range, or ``chains`` without ``persistent``.

    Source: G. E. Hinton (2002), "Training products of experts by minimizing contrastive divergence",
    https://doi.org/10.1162/089976602760128018; T. Tieleman (2008), "Training restricted Boltzmann machines
    using approximations to the likelihood gradient", https://doi.org/10.1145/1390156.1390290.
    """
    site = solvers.PottsSite() if site is None else site
    require_instance("site", site, solvers.Site, "a solvers.Site such as PottsSite()")
    require_count("sweeps", sweeps)
    require_count("steps", steps)
    require_positive("rate", rate)
    require_callable("watch", watch, optional=True)
    _check_states(model, data)
    size = min(require_count("batch", batch), len(data))
    require_flag("persistent", persistent)
    require_count("seed", seed, low=0)
    check_values("data", data, site)
    if chains is not None and not persistent:
        raise ValueError(f"chains must be None without persistent chains, got {chains}")
    generator = torch.Generator(data.device).manual_seed(seed)
    data = data.to(model.field.dtype)
    kept = _draw(data, require_count("chains", chains or size), generator) if persistent else None
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    norms: list[float] = []
    for step in range(steps):
        positive = data if size == len(data) else _draw(data, size, generator)
        negative = solvers.gibbs(
            model.couplings.weight.detach(),
            model.field.detach(),
            site=site,
            sweeps=sweeps,
            generator=generator,
            start=positive if kept is None else kept,
        )
        kept = None if kept is None else negative
        optimizer.zero_grad()
        (model.energy(positive).mean() - model.energy(negative).mean()).backward()
        norms.append(_gradient_norm(model))
        if not math.isfinite(norms[-1]):
            return BoltzmannFit("nonfinite", step, tuple(norms))
        optimizer.step()
        schedule.step()
        if watch is not None:
            watch(step + 1, norms[-1])
    return BoltzmannFit("max_steps", steps, tuple(norms))


def exact_likelihood(model: PairModel, data: Tensor, *, values: Tensor | None = None) -> Tensor:
    """Mean log-likelihood of a sample, by the sum over all K^N configurations; a scalar.

    ``-<E(S)>_data - log sum_S exp(-E(S))``, differentiable in the parameters of the model. The prior
    weights of the values of a site are 1: K^N uncoupled configurations have the likelihood ``K^-N``.

    Args:
        model: see :class:`PairModel`.
        data: (M, N, d) states.
        values: (K, d), the values of a site; None: the d one-hot vectors.

    Raises:
        ValueError: more than 2^20 configurations, or states or values of a wrong shape.
    """
    _check_states(model, data)
    energies = model.energy(_configurations(model, values))
    return -model.energy(data.to(model.field.dtype)).mean() - torch.logsumexp(-energies, 0)


def fit_exact_likelihood(
    model: PairModel,
    data: Tensor,
    *,
    values: Tensor | None = None,
    l2: float = 0.0,
    steps: int = 100,
    tolerance: float = 1e-5,
) -> BoltzmannFit:
    """Maximise :func:`exact_likelihood` of a small model, less ``l2 / 2 sum J^2``, by L-BFGS.

    The problem is convex. Without ``l2`` it has no maximum where a configuration of two sites never
    occurs in the data: couplings grow until the gradient is within the tolerance, so that the status
    says "converged" while their size tells the tolerance alone.

    Args:
        model: changed in place.
        data, values: as for :func:`exact_likelihood`.
        l2: weight of the penalty, >= 0.
        steps: evaluations of the likelihood, at most (a line search may end a few beyond).
        tolerance: on the largest entry of the gradient.
    """
    require_nonnegative("l2", l2)
    require_count("steps", steps)
    require_positive("tolerance", tolerance)
    _check_states(model, data)
    states = data.to(model.field.dtype)
    moments = _configurations(model, values)
    norms: list[float] = []
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=steps,
        max_eval=steps,
        tolerance_grad=tolerance,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = model.energy(states).mean() + torch.logsumexp(-model.energy(moments), 0)
        if l2 > 0:
            loss = loss + 0.5 * l2 * model.couplings.weight.square().sum()
        loss.backward()
        norms.append(_gradient_norm(model))
        return loss

    evaluate()
    if math.isfinite(norms[0]):
        optimizer.step(evaluate)  # type: ignore[arg-type]
        evaluate()
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    if not math.isfinite(largest):
        status = "nonfinite"
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)
    elif largest <= tolerance:
        status = "converged"
    else:
        status = "max_steps" if len(norms) > steps + 1 else "stalled"
    return BoltzmannFit(status, max(0, len(norms) - 2), tuple(norms))


def _configurations(model: PairModel, values: Tensor | None) -> Tensor:
    """(K^N, N, d), every choice of a value on every site."""
    sites, dim = model.field.shape
    if values is None:
        values = torch.eye(dim)
    if values.dim() != 2 or values.shape[1] != dim or len(values) == 0:
        raise ValueError(f"values must have the shape (K, {dim}), got {tuple(values.shape)}")
    number = len(values) ** sites
    if number > MOST_CONFIGURATIONS:
        raise ValueError(
            f"model must have at most {MOST_CONFIGURATIONS} configurations to be enumerated, got "
            f"{len(values)}^{sites} = {number}"
        )
    digits = len(values) ** torch.arange(sites)
    choices = torch.arange(number)[:, None] // digits % len(values)
    return values.to(model.field)[choices.to(model.field.device)]


def _check_states(model: PairModel, data: Tensor) -> None:
    shape = tuple(model.field.shape)
    if not isinstance(data, Tensor) or data.dim() != 3 or data.shape[1:] != shape or len(data) == 0:
        found = tuple(data.shape) if isinstance(data, Tensor) else type(data).__name__
        raise ValueError(f"data must be states (M, N, d) with (N, d) = {shape}, got {found}")
    if not bool(data.isfinite().all()):
        raise ValueError("data must be finite, got NaN or infinity")


def _draw(data: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """``number`` samples, with repetition."""
    chosen = torch.randint(len(data), (number,), generator=generator, device=data.device)
    return data[chosen]


def _gradient_norm(model: PairModel) -> float:
    gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return torch.stack(gradients).norm().item()
