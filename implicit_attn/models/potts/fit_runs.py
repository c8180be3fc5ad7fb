"""The two solvers of fits by pseudo-likelihood, L-BFGS and Adam, and the record of how a fit went."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from implicit_attn.models.potts.conditional import ConditionalModel

LBFGS_MEMORY = 20

Watch = Callable[[int, float], None]
Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class PseudoLikelihoodFit:
    """How a fit went.

    Attributes:
        status: "converged" (L-BFGS: the gradient met the tolerance), "max_steps" (all steps were
            made), "stalled" (L-BFGS: no step along the search direction lowered the loss) or
            "nonfinite" (the fit came to a loss or a gradient that is not finite, and ended there). The
            parameters are then those of the last evaluation with finite ones (L-BFGS: of the lowest
            such loss), or as they were if there is none.
        losses: the objective at each evaluation: with "lbfgs" of all data, trial steps of the line
            search among them (one that is not finite is stepped back from); with "adam" of each batch
            before its step.
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


def free_parameters(model: ConditionalModel) -> list[nn.Parameter]:
    """Those that require a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _objective(model: ConditionalModel, states: Tensor, l2: float) -> Tensor:
    loss = model.pseudo_likelihood(states)
    return loss + l2 * model.penalty() if l2 else loss


def _largest_gradient(model: ConditionalModel) -> float:
    """NaN or infinity if any entry is."""
    found = [p.grad.abs().max() for p in free_parameters(model) if p.grad is not None]
    return float(torch.stack(found).max())


class _Kept:
    """A copy of the parameters, to come back to."""

    def __init__(self, model: ConditionalModel) -> None:
        self.parameters = free_parameters(model)
        self.values = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def keep(self) -> None:
        for value, parameter in zip(self.values, self.parameters, strict=True):
            value.copy_(parameter)

    @torch.no_grad()
    def restore(self) -> None:
        for value, parameter in zip(self.values, self.parameters, strict=True):
            parameter.copy_(value)


class _Whole:
    """Objective and gradient of all data, as L-BFGS asks for them."""

    def __init__(self, model: ConditionalModel, data: Tensor, l2: float, watch: Watch) -> None:
        self.model, self.l2, self.watch = model, l2, watch
        self.states = model.one_hot(data)
        self.losses: list[float] = []
        self.kept, self.best = _Kept(model), math.inf
        self.broken = False  # an evaluation was not finite

    def measure(self) -> tuple[Tensor, float]:
        """The objective and the largest entry of its gradient, which the parameters get."""
        self.model.zero_grad()
        loss = _objective(self.model, self.states, self.l2)
        loss.backward()
        return loss.detach(), _largest_gradient(self.model)

    def __call__(self) -> Tensor:
        loss, largest = self.measure()
        value = float(loss)
        self.losses.append(value)
        self.watch(len(self.losses), value)
        if not (math.isfinite(value) and math.isfinite(largest)):
            # An infinite loss makes the line search step back; NaN would spread through it.
            self.broken = True
            self.model.zero_grad()
            return torch.full_like(loss, math.inf)
        if value < self.best:
            self.best = value
            self.kept.keep()
        return loss


def run_lbfgs(
    model: ConditionalModel, data: Tensor, l2: float, limit: int, tolerance: float, watch: Watch
) -> PseudoLikelihoodFit:
    """At most ``limit`` steps with all data; every other argument as of ``fit_pseudolikelihood``."""
    whole = _Whole(model, data, l2, watch)
    first, start = whole.measure()
    if not (math.isfinite(float(first)) and math.isfinite(start)):
        model.zero_grad()
        return PseudoLikelihoodFit("nonfinite", (float(first),), 0, math.nan)
    parameters = free_parameters(model)
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=limit,
        max_eval=25 * limit,
        tolerance_grad=tolerance * start,
        tolerance_change=0.0,
        history_size=LBFGS_MEMORY,
        line_search_fn="strong_wolfe",
    )
    failed = False
    try:
        optimizer.step(whole)  # type: ignore[arg-type]
    except (RuntimeError, ArithmeticError, IndexError):
        # The line search compares and divides what it finds; numbers out of range break it.
        if not whole.broken:
            raise
        failed = True
    steps = int(optimizer.state[parameters[0]].get("n_iter", 0))
    last, end = whole.measure()
    model.zero_grad()
    if failed or not (math.isfinite(float(last)) and math.isfinite(end)):
        whole.kept.restore()
        return PseudoLikelihoodFit("nonfinite", tuple(whole.losses), steps, math.nan)
    relative = end / start if start > 0 else 0.0
    status = "converged" if relative <= tolerance else "max_steps" if steps >= limit else "stalled"
    return PseudoLikelihoodFit(status, tuple(whole.losses), steps, relative)


class Batches:
    """One-hot batches of the data, each sample once an epoch, in an order of their own generator."""

    def __init__(
        self,
        model: ConditionalModel,
        data: Tensor,
        size: int,
        augment: Augment | None,
        seed: int,
    ) -> None:
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


def run_adam(
    model: ConditionalModel,
    batches: Batches,
    l2: float,
    limit: int,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    watch: Watch,
) -> PseudoLikelihoodFit:
    """``limit`` steps, a batch each."""
    losses: list[float] = []
    kept = _Kept(model)
    states = batches.next()
    for step in range(limit):
        optimizer.zero_grad()
        loss = _objective(model, states, l2)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            kept.restore()
            return PseudoLikelihoodFit("nonfinite", tuple(losses), step, math.nan)
        kept.keep()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        watch(step + 1, losses[-1])
        if step + 1 < limit:
            states = batches.next()
    optimizer.zero_grad()
    with torch.no_grad():  # the last step, too, may have led out of range
        last = float(_objective(model, states, l2))
    if not math.isfinite(last):
        kept.restore()
        return PseudoLikelihoodFit("nonfinite", (*losses, last), limit, math.nan)
    return PseudoLikelihoodFit("max_steps", tuple(losses), limit, math.nan)
