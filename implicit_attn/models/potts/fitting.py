"""Fits of conditional models by pseudo-likelihood, with a record of the loss and of how they ended."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from implicit_attn.models.potts.conditional import ConditionalModel
from solvers.core.checks import (
    require_callable,
    require_choice,
    require_count,
    require_instance,
    require_nonnegative,
    require_positive,
)

SOLVERS = ("lbfgs", "adam")
SCHEDULES = ("one-cycle", "constant")
LBFGS_MEMORY = 20

Watch = Callable[[int, float], None]
Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class PseudoLikelihoodFit:
    """How a fit went.

    Attributes:
        status: "converged" (L-BFGS: the gradient met the tolerance), "max_steps" (all steps were
            made), "stalled" (L-BFGS: no step along the search direction lowered the loss) or
            "nonfinite" (a loss was not finite; the parameters are those of the last finite one).
        losses: the objective at each evaluation: with "lbfgs" of all data, trial steps of the line
            search among them; with "adam" of each batch.
        steps: made.
        gradient: largest entry of the objective's gradient at the end, relative to that at the start;
            NaN with "adam", which does not measure it.
    """

    status: str
    losses: tuple[float, ...]
    steps: int
    gradient: float

    @property
    def converged(self) -> bool:
        """Whether the tolerance was met."""
        return self.status == "converged"


def fit_pseudolikelihood(
    model: ConditionalModel,
    data: Tensor,
    l2: float = 0.0,
    solver: str = "lbfgs",
    *,
    steps: int | None = None,
    rate: float = 0.05,
    schedule: str = "one-cycle",
    batch: int = 2000,
    tolerance: float = 1e-5,
    augment: Augment | None = None,
    seed: int = 0,
    watch: Watch | None = None,
) -> PseudoLikelihoodFit:
    """Minimise ``model.pseudo_likelihood(data) + l2 model.penalty()`` over the model's parameters.

    L-BFGS uses all data at every evaluation and finds the minimum of a :class:`PottsModel`, whose loss
    is convex. Adam uses batches and suits models with a product of parameters.

    Args:
        model: changed in place.
        data: (M, N) colours, integers, or one-hot states (M, N, d).
        l2: weight of the penalty, >= 0; the loss is per site.
        solver: "lbfgs" or "adam".
        steps: at most; None: 40 of L-BFGS or 500 of Adam.
        rate: Adam's, the largest of the schedule.
        schedule: of Adam's rate, "one-cycle" or "constant".
        batch: samples a step of Adam, drawn without repetition within an epoch.
        tolerance: L-BFGS ends where the largest entry of the gradient is so small, relative to the
            start.
        augment: ``augment(batch, generator) -> batch``, applied to each batch of Adam.
        seed: of Adam's batches and of ``augment``.
        watch: called as ``watch(step, loss)`` after each step of Adam, or evaluation of L-BFGS.

    Returns:
        :class:`PseudoLikelihoodFit`, which says how it ended.

    Raises:
        TypeError, ValueError: an argument is wrong; ``augment`` comes with L-BFGS.

    Source: Besag (1975), https://doi.org/10.2307/2987782.
    """
    require_instance("model", model, ConditionalModel, "a ConditionalModel")
    require_nonnegative("l2", l2)
    require_choice("solver", solver, SOLVERS)
    require_callable("watch", watch, optional=True)
    told = watch or _tell_nobody
    if solver == "lbfgs":
        if augment is not None:
            raise ValueError("augment needs solver='adam': L-BFGS takes all data at once")
        limit = require_count("steps", 40 if steps is None else steps)
        return _lbfgs(model, data, l2, limit, require_positive("tolerance", tolerance), told)
    require_choice("schedule", schedule, SCHEDULES)
    require_callable("augment", augment, optional=True)
    limit = require_count("steps", 500 if steps is None else steps)
    require_positive("rate", rate)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    scheduler = None
    if schedule == "one-cycle":
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=limit)
    batches = _Batches(model, data, require_count("batch", batch), augment, seed)
    return _adam(model, batches, l2, limit, optimizer, scheduler, told)


def _tell_nobody(step: int, loss: float) -> None:
    pass


def _objective(model: ConditionalModel, states: Tensor, l2: float) -> Tensor:
    loss = model.pseudo_likelihood(states)
    return loss + l2 * model.penalty() if l2 else loss


def _largest_gradient(model: ConditionalModel) -> float:
    found = [p.grad.abs().max() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(found).max())


def _lbfgs(
    model: ConditionalModel, data: Tensor, l2: float, limit: int, tolerance: float, watch: Watch
) -> PseudoLikelihoodFit:
    states = model.one_hot(data)
    losses: list[float] = []

    def measure() -> Tensor:
        model.zero_grad()
        loss = _objective(model, states, l2)
        loss.backward()
        return loss

    def evaluate() -> Tensor:
        loss = measure()
        losses.append(float(loss.detach()))
        watch(len(losses), losses[-1])
        return loss

    start_loss, start = float(measure().detach()), _largest_gradient(model)
    if not math.isfinite(start_loss):
        return PseudoLikelihoodFit("nonfinite", (start_loss,), 0, math.nan)
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=limit,
        max_eval=25 * limit,
        tolerance_grad=tolerance * start,
        tolerance_change=0.0,
        history_size=LBFGS_MEMORY,
        line_search_fn="strong_wolfe",
    )
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step(evaluate)  # type: ignore[arg-type]
    steps = int(optimizer.state[next(iter(model.parameters()))]["n_iter"])
    end_loss, end = float(measure().detach()), _largest_gradient(model)
    model.zero_grad()
    if not math.isfinite(end_loss):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)
        return PseudoLikelihoodFit("nonfinite", tuple(losses), steps, math.nan)
    relative = end / start if start > 0 else 0.0
    status = "converged" if relative <= tolerance else "max_steps" if steps >= limit else "stalled"
    return PseudoLikelihoodFit(status, tuple(losses), steps, relative)


class _Batches:
    """One-hot batches of the data, each sample once an epoch, in an order of their own generator."""

    def __init__(
        self,
        model: ConditionalModel,
        data: Tensor,
        size: int,
        augment: Augment | None,
        seed: int,
    ) -> None:
        model.one_hot(data[:1])
        self.model, self.data, self.augment = model, data, augment
        self.size = min(size, len(data))
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.empty(0, dtype=torch.long)

    def next(self) -> Tensor:
        while len(self.order) < self.size:
            more = torch.randperm(len(self.data), generator=self.generator)
            self.order = torch.cat([self.order, more])
        chosen, self.order = self.order[: self.size], self.order[self.size :]
        batch = self.data[chosen.to(self.data.device)]
        if self.augment is not None:
            batch = self.augment(batch, self.generator)
        return self.model.one_hot(batch)


def _adam(
    model: ConditionalModel,
    batches: _Batches,
    l2: float,
    limit: int,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    watch: Watch,
) -> PseudoLikelihoodFit:
    losses: list[float] = []
    for step in range(limit):
        optimizer.zero_grad()
        loss = _objective(model, batches.next(), l2)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            return PseudoLikelihoodFit("nonfinite", tuple(losses), step, math.nan)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        watch(step + 1, losses[-1])
    optimizer.zero_grad()
    return PseudoLikelihoodFit("max_steps", tuple(losses), limit, math.nan)
