"""Errors of mean-field theories against exact enumeration, and the consistency of the theories."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.studies.spins.models import ExactMoments, SpinModel, exact_moments
from implicit_attn.studies.tables import Table
from solvers.core.checks import require_count

Draw = Callable[[float, torch.Generator], SpinModel]

QUANTILES = {"": 0.5, "_10": 0.1, "_90": 0.9}
_DEFAULT_TOLERANCE = solvers.Tolerance(rtol=1e-8)


def error_against_coupling(
    draw: Draw,
    strengths: Iterable[float],
    models: int = 50,
    *,
    seed: int = 0,
    tolerance: solvers.Tolerance = _DEFAULT_TOLERANCE,
    max_steps: int = 1000,
) -> Table:
    """Errors of naive mean field and of adaptive TAP over random models, a row for each strength.

    Errors are relative: of the means ``|m - m_exact| / |m_exact|``, and of the correlations the
    same in the Frobenius norm over ``<S_i S_j> - <S_i><S_j>``, i != j (predicting no correlation at
    all is an error of 1). Where a theory has no consistent solution of a model (not converged, or
    ``chi`` not positive definite) its error is infinite: no model is left out, so all quantiles are
    over the same models.

    Naive mean field is solved by damped plain iteration, which ends in a minimum of its free
    energy; accelerated iteration may end in saddles and would make it look worse.

    Args:
        draw: ``draw(strength, generator)`` -> a model with one sample.
        strengths: each > 0; any iterable, for example one with a progress bar.
        models: at every strength; the generator starts at ``seed`` each time.
        tolerance, max_steps: of the solves.

    Returns:
        Rows with the strength and, each as its median with ``_10`` and ``_90`` for the quantiles:

        - ``naive_mean``, ``tap_mean``: errors of the means;
        - ``naive_log_partition``, ``second_log_partition``, ``tap_log_partition``: ``|log Z - exact|``,
            also of the second-order TAP equations;
        - ``naive_pairs``, ``tap_pairs``: of the correlations, by ``chi = (Lambda - J)^-1``;
            ``derivative_pairs``: by ``dm/dx``, the derivative of the TAP solution;
        - ``naive_eigenvalue``, ``tap_eigenvalue``: of :func:`consistency`;
            ``truth_eigenvalue``: that of naive mean field at the exact means;

        and the shares of models ``naive_consistent``, ``tap_consistent``; ``truth_consistent``
        (``truth_eigenvalue > 0``); ``tap_stable`` (consistent, and ``dm/dx`` has no negative
        eigenvalue); ``tap_better`` (smaller error of the means than naive).

    Raises:
        ValueError: for a strength or a number of models that is not positive, or a ``draw`` that
            returns several samples.
        TypeError: ``models`` is not an integer.

    Source: M. Opper, O. Winther, "Adaptive and self-averaging Thouless-Anderson-Palmer mean-field
    theory for probabilistic modeling" (https://doi.org/10.1103/PhysRevE.64.056131) for the theory
    and its criterion.
    """
    require_count("models", models)
    table: Table = []
    for strength in strengths:
        if not 0 < strength < math.inf:
            raise ValueError(f"strengths must be > 0 and finite, got {strength}")
        generator = torch.Generator().manual_seed(seed)
        measured = [
            _measure(draw(strength, generator), tolerance, max_steps) for _ in range(models)
        ]
        table.append({"strength": strength} | quantiles_of(measured))
    return table


def consistency(covariance: Tensor, cavity_variance: Tensor, couplings: Tensor) -> Tensor:
    """Smallest eigenvalue of ``C^1/2 (Lambda - J) C^1/2 = I + C^1/2 (V - J) C^1/2``, (B,).

    Its sign is that of the smallest eigenvalue of ``Lambda - J``, which must be positive definite
    for a consistent theory; it is 1 without couplings. It exists for singular ``C`` (Potts) and is
    accurate where spins are nearly certain.
    ``C`` and ``V`` are (B, N, d, d), ``V`` zero for naive mean field; ``J`` is (N, N, d, d).
    """
    batch, sites, dim = covariance.shape[:3]
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    unit = torch.eye(sites, dtype=couplings.dtype, device=couplings.device)
    interaction = torch.einsum("ij,biac->biajc", unit, cavity_variance)
    interaction = interaction - couplings.permute(0, 2, 1, 3)
    scaled = torch.einsum("biac,bicjd,bjde->biaje", root, interaction, root)
    matrix = scaled.reshape(batch, sites * dim, sites * dim)
    identity = torch.eye(sites * dim, dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.eigvalsh(identity + (matrix + matrix.mT) / 2)[:, 0]


def _measure(
    model: SpinModel, tolerance: solvers.Tolerance, max_steps: int
) -> dict[str, float | bool]:
    """The columns of the table for one model, before they are summed up over models."""
    if len(model.field) != 1:
        raise ValueError(f"draw must return models with one sample, got {len(model.field)}")
    exact = exact_moments(model)
    options: Any = {"site": model.site, "tolerance": tolerance, "max_steps": max_steps}
    options |= {"response": True, "on_failure": "ignore"}
    tap, derivative = _adaptive_tap(model, options)
    naive = solvers.adaptive_tap(
        model.couplings, model.field, onsager=False, damping=0.5, adjoint=None, **options
    )
    second = solvers.adaptive_tap(
        model.couplings,
        model.field,
        order="second",
        adjoint=None,
        **(options | {"response": False}),
    )
    row: dict[str, float | bool] = {}
    for name, solution in (("naive", naive), ("second", second), ("tap", tap)):
        found = solution.value
        state = solvers.SpinState(found.mean[:1], found.cavity_variance[:1])
        order = "adaptive" if name == "tap" else name
        with torch.no_grad():
            log_z = solvers.tap_log_partition(
                state, model.field, model.couplings, model.site, order=order
            )
        of_log = (log_z - exact.log_partition).abs().item()
        row[f"{name}_log_partition"] = of_log if bool(solution.converged[0]) else math.inf
    for name, solution in (("naive", naive), ("tap", tap)):
        value = solution.value
        consistent = bool(solution.converged[0])
        error = ((value.mean[:1] - exact.mean).norm() / exact.mean.norm()).item()
        row[f"{name}_mean"] = error if consistent else math.inf
        row[f"{name}_pairs"] = _pair_error(value.response[:1], exact) if consistent else math.inf
        eigenvalue = consistency(value.covariance[:1], value.cavity_variance[:1], model.couplings)
        row[f"{name}_eigenvalue"] = eigenvalue.item()
        row[f"{name}_consistent"] = consistent
    own = exact.covariance.diagonal(dim1=1, dim2=3).movedim(-1, 1)
    truth = consistency(own, torch.zeros_like(own), model.couplings).item()
    eigenvalues = torch.linalg.eigvalsh((derivative + derivative.mT) / 2)
    solved = row["tap_consistent"] and bool(torch.isfinite(derivative).all())
    spread = derivative.view_as(exact.covariance)
    row["derivative_pairs"] = _pair_error(spread, exact) if solved else math.inf
    row["tap_stable"] = solved and bool(eigenvalues[0] > -1e-6 * eigenvalues[-1])
    row["truth_eigenvalue"], row["truth_consistent"] = truth, truth > 0
    row["tap_better"] = row["tap_mean"] < row["naive_mean"]
    return row


def _adaptive_tap(model: SpinModel, options: Any) -> tuple[solvers.Solution, Tensor]:
    """The solution, and ``dm/dx`` (Nd, Nd) by implicit differentiation, NaN where that failed.

    A batch of Nd copies of the model, with the gradient of one component of the means in each.
    """
    number = model.field[0].numel()
    field = model.field.expand(number, -1, -1).clone().requires_grad_()
    adjoint = solvers.Implicit(on_failure="ignore")
    with torch.enable_grad():
        solution = solvers.adaptive_tap(model.couplings, field, adjoint=adjoint, **options)
        components = solution.value.mean.reshape(number, number).diagonal()
        (gradient,) = torch.autograd.grad(components.sum(), field)
    backward = solution.adjoint.solution
    failed = backward is None or not bool(backward.converged.all())
    detached = (None if tensor is None else tensor.detach() for tensor in solution.value)
    solution.value = type(solution.value)(*detached)
    return solution, torch.full_like(gradient, math.nan) if failed else gradient.flatten(1)


def _pair_error(covariance: Tensor, exact: ExactMoments) -> float:
    """Relative Frobenius error over the blocks i != j of (1, N, d, N, d)."""
    sites = covariance.shape[1]
    others = 1 - torch.eye(sites, dtype=covariance.dtype)[:, None, :, None]
    difference = ((covariance - exact.covariance) * others).norm()
    return (difference / (exact.covariance * others).norm()).item()


def quantiles_of(measured: list[dict[str, float | bool]]) -> dict[str, float]:
    """Shares of booleans; quantiles of numbers, not interpolated because some are infinite."""
    row: dict[str, float] = {}
    for name, first in measured[0].items():
        column = torch.tensor([each[name] for each in measured], dtype=torch.float64)
        if isinstance(first, bool):
            row[name] = column.mean().item()
            continue
        for suffix, share in QUANTILES.items():
            row[name + suffix] = torch.quantile(column, share, interpolation="nearest").item()
    return row
