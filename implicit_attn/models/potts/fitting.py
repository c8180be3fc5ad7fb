"""Fits of conditional models by pseudo-likelihood."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_attn.models.potts.conditional import ConditionalModel
from implicit_attn.models.potts.fit_runs import (
    Augment,
    Batches,
    PseudoLikelihoodFit,
    Watch,
    free_parameters,
    run_adam,
    run_lbfgs,
)
from solvers.core.checks import (
    require_callable,
    require_choice,
    require_count,
    require_instance,
    require_nonnegative,
    require_number,
    require_positive,
)

SOLVERS = ("lbfgs", "adam")
SCHEDULES = ("one-cycle", "constant")


@torch.enable_grad()
def fit_pseudolikelihood(
    model: ConditionalModel,
    data: Tensor,
    l2: float = 0.0,
    solver: str = "lbfgs",
    *,
    steps: int | None = None,
    rate: float | None = None,
    schedule: str | None = None,
    batch: int | None = None,
    tolerance: float | None = None,
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
        rate: Adam's, the largest of the schedule; None: 0.05.
        schedule: of Adam's rate, "one-cycle" or "constant"; None: "one-cycle".
        batch: samples a step of Adam, drawn without repetition within an epoch; None: 2000.
        tolerance: L-BFGS ends where the largest entry of the gradient is so small, relative to the
            start; None: 1e-5.
        augment: ``augment(batch, generator) -> batch``, applied to each batch of Adam.
        seed: of Adam's batches and of ``augment``; L-BFGS draws nothing.
        watch: called as ``watch(step, loss)`` after each step of Adam, or evaluation of L-BFGS.

    Returns:
        :class:`PseudoLikelihoodFit`, which says how it ended.

    Raises:
        TypeError, ValueError: an argument is wrong, or belongs to the other solver; no parameter of the
            model requires a gradient; a sample of the data has another shape or colour.

    Source: Besag (1975), https://doi.org/10.2307/2987782.
    """
    require_instance("model", model, ConditionalModel, "a ConditionalModel")
    if not free_parameters(model):
        raise ValueError("model must have a parameter that requires a gradient, got none")
    model.check_states(data)
    require_nonnegative("l2", l2)
    require_choice("solver", solver, SOLVERS)
    require_callable("watch", watch, optional=True)
    require_count("seed", seed, low=0)
    told = watch or _tell_nobody
    if solver == "lbfgs":
        _refuse("adam", rate=rate, schedule=schedule, batch=batch, augment=augment)
        limit = require_count("steps", 40 if steps is None else steps)
        limit_of_gradient = require_positive("tolerance", 1e-5 if tolerance is None else tolerance)
        return run_lbfgs(model, data, l2, limit, limit_of_gradient, told)
    _refuse("lbfgs", tolerance=tolerance)
    require_callable("augment", augment, optional=True)
    limit = require_count("steps", 500 if steps is None else steps)
    size = require_count("batch", 2000 if batch is None else batch)
    optimizer, scheduler = _rates(model, rate, schedule, limit)
    return run_adam(
        model, Batches(model, data, size, augment, seed), l2, limit, optimizer, scheduler, told
    )


def _tell_nobody(step: int, loss: float) -> None:
    pass


def _refuse(solver: str, **options: Any) -> None:
    """Options that only the other solver has."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} needs solver={solver!r}, got {value!r} with the other solver")


def _rates(
    model: ConditionalModel, rate: float | None, schedule: str | None, limit: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]:
    require_choice("schedule", "one-cycle" if schedule is None else schedule, SCHEDULES)
    # Adam divides the rate by 1 - beta_1 = 0.1 at first: a larger one leaves the range of the dtype.
    most = torch.finfo(model.field.dtype).max / 100
    require_number("rate", 0.05 if rate is None else rate, low=0.0, high=most, closed=False)
    largest = 0.05 if rate is None else float(rate)
    optimizer = torch.optim.Adam(free_parameters(model), lr=largest)
    if schedule == "constant":
        return optimizer, None
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, largest, total_steps=limit)
