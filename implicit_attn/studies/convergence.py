"""Every solver on one layer: residual and energy per evaluation, cost to a tolerance, spectrum."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.studies.budgets import returned_within
from implicit_attn.studies.tables import Table
from implicit_attn.updates import GradientStep, Update

DENSE = 1200  # unknowns up to which all eigenvalues are computed
EXTREMES = 12  # eigenvalues at each end above that
Advance = Callable[[str], object]


class Unwatched(Update):
    """An update whose energy the solver does not see: no step is refused."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.update, self.symmetric = update, update.symmetric

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        return self.update(z, x, mask=mask)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return self.update.prepare(x, mask=mask)


Choices = Mapping[str, tuple[DEQ, solvers.Solver]]


def solver_choices(layer: DEQ) -> dict[str, tuple[DEQ, solvers.Solver]]:
    """Every solver that the layer can be solved with, by name, and the layer to give it.

    For a layer with an energy all are safeguarded by it, except "plain forward".
    """
    choices: dict[str, tuple[DEQ, solvers.Solver]] = {}
    forward = solvers.Forward()
    if layer.update.monitored:
        plain = DEQ(Unwatched(layer.update), init=layer.init)
        choices["plain forward"] = (plain, forward)
        choices["forward"] = (layer, forward)
        choices["gradient, auto step"] = (layer, solvers.GradientDescent("auto"))
        choices["L-BFGS"] = (layer, solvers.LBFGS())
    else:
        choices["plain forward"] = (layer, forward)
    choices["Anderson"] = (layer, solvers.Anderson())
    choices["Broyden"] = (layer, solvers.Broyden())
    choices["Newton"] = (layer, solvers.Newton())
    return choices


def solver_curves(
    layer: DEQ,
    x: Tensor,
    *,
    max_steps: int = 100,
    floor: float = 1e-8,
    choices: Choices | None = None,
    advance: Advance | None = None,
) -> Table:
    """Residual and energy against evaluations, every solver on the same problems.

    Args:
        layer: the layer.
        x: its input, (B, N, d); float64 shows the curves down to ``floor``.
        max_steps: evaluations per sample.
        floor: relative residual at which a sample is left alone.
        choices: by default ``solver_choices(layer)``.
        advance: called with a solver's name before it is tried.

    Returns:
        Rows with solver, evaluation, residual (median of the best so far), residual_10,
        residual_90, converged (share of samples at ``floor``), and for a monitored layer
        energy_above: the median over the samples of the energy above the lowest that any solver
        found for the sample (None for a solver that does not see the energy).
    """
    traces: dict[str, tuple[list[int], Tensor, Tensor | None]] = {}
    for name, (owner, solver) in (solver_choices(layer) if choices is None else choices).items():
        if advance is not None:
            advance(f"{name}, curve")
        traces[name] = _trace(owner, x, solver, max_steps, floor)
    return _curves(traces, floor)


def solver_costs(
    layer: DEQ,
    x: Tensor,
    tolerance: solvers.Tolerance,
    *,
    max_steps: int = 100,
    repeats: int = 3,
    choices: Choices | None = None,
    advance: Advance | None = None,
) -> tuple[Table, Table]:
    """What every solver spends to reach a tolerance.

    Args:
        layer, x, max_steps, choices, advance: as for :func:`solver_curves`.
        tolerance: what is to be met.
        repeats: timed solves, of which the median counts.

    Returns:
        Rows with solver, converged (share), evaluations (median), evaluations_90,
        evaluations_largest, and seconds for the whole batch; and rows with solver, evaluations,
        samples: how many samples took so many evaluations.
    """
    ends: Table = []
    steps: Table = []
    for name, (owner, solver) in (solver_choices(layer) if choices is None else choices).items():
        if advance is not None:
            advance(f"{name}, cost")
        options: Any = {"solver": solver, "tolerance": tolerance, "max_steps": max_steps}
        solution, seconds = _timed(owner, x, options, repeats)
        ends.append({"solver": name, **_end(solution), "seconds": seconds})
        steps += _histogram(name, solution.evaluations)
    return ends, steps


def jacobian_eigenvalues(layer: DEQ, z: Tensor, x: Tensor) -> Table:
    """Eigenvalues of the Jacobian ``df/dz`` of a layer's update at states ``z``.

    All of them for states of up to ``DENSE`` numbers, else the extreme ones (of a symmetric
    Jacobian) or the largest in magnitude.

    Args:
        layer: the layer.
        z, x: state and input, (B, N, d) each.

    Returns:
        Rows with sample, real, imaginary, and for a ``GradientStep`` with one step size curvature:
        the eigenvalue ``(1 - real) / eta`` of the energy's Hessian.
    """
    update = layer.update
    with torch.no_grad():
        prepared = update.prepare(x)
    size = z[0].numel()
    if size <= DENSE:
        matrix = solvers.jacobian(update, z, (prepared,)).double().cpu()
        if update.symmetric:
            values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2).to(torch.complex128)
        else:
            values = torch.linalg.eigvals(matrix)
    else:
        what = "extremes" if update.symmetric else "largest_magnitude"
        found = solvers.spectrum(update, z, (prepared,), what=what, count=EXTREMES)
        values = found.eigenvalues.to(torch.complex128).cpu()
    step = _scalar_step(update)
    table: Table = []
    for sample, row in enumerate(values.tolist()):
        for value in sorted(row, key=lambda number: number.real):
            entry = {"sample": sample, "real": value.real, "imaginary": value.imag}
            if step is not None:
                entry["curvature"] = (1 - value.real) / step
            table.append(entry)
    return table


def _scalar_step(update: Update) -> float | None:
    if not isinstance(update, GradientStep) or not update.symmetric:
        return None
    return float(update.step_size())


def _trace(
    layer: DEQ, x: Tensor, solver: solvers.Solver, max_steps: int, floor: float
) -> tuple[list[int], Tensor, Tensor | None]:
    """Evaluations, best residual (B, T) and energy (B, T) after so many of them."""
    budgets = list(range(1, max_steps + 1))
    if isinstance(solver, solvers.Newton):  # solves anew for each of them
        budgets = sorted({round(1.3**k) for k in range(40)} & set(budgets))
    found = returned_within(layer, x, budgets, solver=solver, rtol=floor)
    best = torch.stack([each.residual for each in found], dim=1).cummin(dim=1).values
    energies = [each.energy for each in found if each.energy is not None]
    return budgets, best, torch.stack(energies, dim=1) if energies else None


def _curves(traces: dict[str, tuple[list[int], Tensor, Tensor | None]], floor: float) -> Table:
    energies = [energy.amin(1) for _, _, energy in traces.values() if energy is not None]
    lowest = torch.stack(energies).amin(0) if energies else None
    table: Table = []
    for name, (evaluations, best, energy) in traces.items():
        parts = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        seen = best.double().cpu().clamp_min(floor)  # what is below depends on the last step's luck
        low, middle, high = torch.nanquantile(seen, parts, dim=0).tolist()
        for k, evaluation in enumerate(evaluations):
            row: dict[str, Any] = {
                "solver": name,
                "evaluation": evaluation,
                "residual": middle[k],
                "residual_10": low[k],
                "residual_90": high[k],
                "converged": (best[:, k] <= floor).double().mean().item(),
            }
            if lowest is not None:
                above = None if energy is None else (energy[:, k] - lowest).median().item()
                row["energy_above"] = above
            table.append(row)
    return table


def _timed(
    layer: DEQ, x: Tensor, options: dict[str, Any], repeats: int
) -> tuple[solvers.Solution, float]:
    def once() -> tuple[solvers.Solution, float]:
        start = time.perf_counter()
        solution = layer.solve(x, on_failure="ignore", **options)
        return solution, time.perf_counter() - start

    with torch.no_grad():
        runs = [once() for _ in range(max(repeats, 1))]
    return runs[0][0], statistics.median(seconds for _, seconds in runs)


def _end(solution: solvers.Solution) -> dict[str, Any]:
    evaluations = solution.evaluations.double()
    return {
        "converged": solution.converged.double().mean().item(),
        "evaluations": evaluations.median().item(),
        "evaluations_90": evaluations.quantile(0.9).item(),
        "evaluations_largest": evaluations.max().item(),
    }


def _histogram(name: str, evaluations: Tensor) -> Table:
    values, counts = evaluations.unique(return_counts=True)
    return [
        {"solver": name, "evaluations": value, "samples": count}
        for value, count in zip(values.tolist(), counts.tolist(), strict=True)
    ]
