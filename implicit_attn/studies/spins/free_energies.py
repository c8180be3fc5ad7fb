"""Errors of the free energies of mean-field theories against exact enumeration."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

import solvers
from implicit_attn.studies.spins.errors import Draw, quantiles_of
from implicit_attn.studies.spins.models import SpinModel, exact_moments
from implicit_attn.studies.tables import Table
from solvers.core.checks import require_count

ORDERS = ("naive", "second", "adaptive")
_DEFAULT_TOLERANCE = solvers.Tolerance(rtol=1e-8)


def log_partition_errors(
    draw: Draw,
    strengths: Iterable[float],
    models: int = 50,
    *,
    seed: int = 0,
    tolerance: solvers.Tolerance = _DEFAULT_TOLERANCE,
    max_steps: int = 1000,
) -> Table:
    """Errors of ``log Z`` and of the means by three theories over random models, a row a strength.

    The theories are naive mean field (solved by damped plain iteration, which ends in a minimum of its
    free energy), the second-order TAP equations and adaptive TAP. A theory that does not converge on a
    model counts as infinitely wrong there, so all quantiles are over the same models.

    Args:
        draw: ``draw(strength, generator)`` -> a model with one sample, small enough to enumerate.
        strengths: each > 0; any iterable.
        models: at every strength; the generator starts at ``seed`` each time.
        tolerance, max_steps: of the solves.

    Returns:
        Rows with ``strength`` and, for each ``order`` ("naive", "second", "adaptive"), medians with
        ``_10`` and ``_90`` for the quantiles: ``{order}_log_partition``, ``|log Z - exact|`` of the
        whole model, and ``{order}_mean``, ``|m - exact| / |exact|``; and ``{order}_converged``, a share.

    Raises:
        ValueError: for a strength or a number of models that is not positive, or a ``draw`` that
            returns several samples.
        TypeError: ``models`` is not an integer.

    Source: M. Opper, O. Winther (https://doi.org/10.1103/PhysRevE.64.056131) for adaptive TAP.
    """
    require_count("models", models)
    options: Any = {"tolerance": tolerance, "max_steps": max_steps, "on_failure": "ignore"}
    table: Table = []
    for strength in strengths:
        if not 0 < strength < math.inf:
            raise ValueError(f"strengths must be > 0 and finite, got {strength}")
        generator = torch.Generator().manual_seed(seed)
        measured = [_errors(draw(strength, generator), options) for _ in range(models)]
        table.append({"strength": strength} | quantiles_of(measured))
    return table


def _errors(model: SpinModel, options: Any) -> dict[str, float | bool]:
    if len(model.field) != 1:
        raise ValueError(f"draw must return models with one sample, got {len(model.field)}")
    exact = exact_moments(model)
    row: dict[str, float | bool] = {}
    for order in ORDERS:
        solution = solvers.adaptive_tap(
            model.couplings,
            model.field,
            site=model.site,
            order=order,
            damping=0.5 if order == "naive" else None,
            adjoint=None,
            log_partition=True,
            **options,
        )
        found, converged = solution.value, bool(solution.converged[0])
        of_log = (found.log_partition - exact.log_partition).abs().item()
        of_mean = ((found.mean - exact.mean).norm() / exact.mean.norm()).item()
        row[f"{order}_log_partition"] = of_log if converged else math.inf
        row[f"{order}_mean"] = of_mean if converged else math.inf
        row[f"{order}_converged"] = converged
    return row
