"""The convergence study: every solver on one layer, and the eigenvalues of its Jacobian."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.models.heads import HeadsLayer
from implicit_attn.studies.evaluations import returned_within
from implicit_attn.studies.tables import Table, histogram, median_and_band, median_and_largest
from implicit_attn.updates import GradientStep, Update

DENSE = 1200  # unknowns up to which all eigenvalues are computed
EXTREMES = 12  # eigenvalues at each end above that
Advance = Callable[[str], object]
Choices = Mapping[str, tuple[DEQ, solvers.Solver]]


class WithoutEnergy(Update):
    """An update whose energy the solver does not see, so that no step is rejected."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.update, self.symmetric = update, update.symmetric

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        return self.update(z, x, mask=mask)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return self.update.prepare(x, mask=mask)


def solver_choices(layer: DEQ) -> dict[str, tuple[DEQ, solvers.Solver]]:
    """Name of each solver that can solve the layer -> the layer to give it, and the solver.

    For a layer with an energy all are safeguarded by it, except "plain forward".
    """
    choices: dict[str, tuple[DEQ, solvers.Solver]] = {"plain forward": (layer, solvers.Forward())}
    if layer.update.monitored:
        unguarded = DEQ(WithoutEnergy(layer.update), init=layer.init)
        choices["plain forward"] = unguarded, solvers.Forward()
        choices["forward"] = layer, solvers.Forward()
        choices["gradient, auto step"] = layer, solvers.GradientDescent("auto")
        choices["L-BFGS"] = layer, solvers.LBFGS()
    for kind in (solvers.Anderson, solvers.Broyden, solvers.Newton):
        choices[kind.__name__] = layer, kind()
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
        floor: relative residual at which a sample ends.
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
    energies = [energy.amin(1) for _, _, energy in traces.values() if energy is not None]
    lowest = torch.stack(energies).amin(0) if energies else None
    table: Table = []
    for name, (evaluations, best, energy) in traces.items():
        for k, evaluation in enumerate(evaluations):
            row: dict[str, Any] = {"solver": name, "evaluation": evaluation}
            # How far below the floor the last step lands says nothing about the solver.
            row |= median_and_band("residual", best[:, k].clamp_min(floor))
            row["converged"] = (best[:, k] <= floor).double().mean().item()
            if lowest is not None:
                above = None if energy is None else (energy[:, k] - lowest).median().item()
                row["energy_above"] = above
            table.append(row)
    return table


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
    """Evaluations and time that every solver spends to reach a tolerance.

    Args:
        layer, x, max_steps, choices, advance: as for :func:`solver_curves`.
        tolerance: at which a sample has converged.
        repeats: timed solves, of which the median counts.

    Returns:
        Rows with solver, converged (share of samples), evaluations (median), evaluations_90 (90 %
        quantile), evaluations_largest, and seconds for the whole batch; and rows with solver,
        evaluations, samples: how many samples took so many evaluations.
    """
    ends: Table = []
    steps: Table = []
    for name, (owner, solver) in (solver_choices(layer) if choices is None else choices).items():
        if advance is not None:
            advance(f"{name}, cost")
        options: Any = {"solver": solver, "tolerance": tolerance, "max_steps": max_steps}
        times: list[float] = []
        solutions: list[solvers.Solution] = []
        for _ in range(max(repeats, 1)):
            start = time.perf_counter()
            with torch.no_grad():
                solutions.append(owner.solve(x, on_failure="ignore", **options))
            times.append(time.perf_counter() - start)
        solution = solutions[0]
        row = {"solver": name, "converged": solution.converged.double().mean().item()}
        row |= median_and_largest("evaluations", solution.evaluations)
        ends.append(row | {"seconds": statistics.median(times)})
        steps += histogram(solution.evaluations, solver=name)
    return ends, steps


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Newton's method and Jacobians differentiate twice, which torch's fused attention cannot.

    Models without that attention are left as they are.
    """
    if not any(isinstance(module, HeadsLayer) for module in model.modules()):
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


def jacobian_eigenvalues(layer: DEQ, z: Tensor, x: Tensor) -> Table:
    """Eigenvalues of the Jacobian ``df/dz`` of a layer's update at states ``z``.

    All of them for states of up to ``DENSE`` numbers. Above that, the ``EXTREMES`` largest and
    smallest of a symmetric Jacobian, and the largest in magnitude of another.

    Args:
        layer: the layer.
        z, x: state and input, (B, N, d) each.

    Returns:
        Rows with sample, real, imaginary, and for a ``GradientStep`` with one step size ``eta``
        curvature: the eigenvalue ``(1 - real) / eta`` of the energy's Hessian.
    """
    update = layer.update
    with torch.no_grad():
        prepared = update.prepare(x)
    if z[0].numel() <= DENSE:
        matrix = solvers.jacobian(update, z, (prepared,)).double().cpu()
        if update.symmetric:
            values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2).to(torch.complex128)
        else:
            values = torch.linalg.eigvals(matrix)
    else:
        what = "extremes" if update.symmetric else "largest_magnitude"
        found = solvers.spectrum(update, z, (prepared,), what=what, count=EXTREMES)
        values = found.eigenvalues.to(torch.complex128).cpu()
    table: Table = [
        {"sample": sample, "real": value.real, "imaginary": value.imag}
        for sample, row in enumerate(values.tolist())
        for value in sorted(row, key=lambda number: number.real)
    ]
    # Channels with step sizes of their own make the Jacobian of a gradient step nonsymmetric.
    if isinstance(update, GradientStep) and update.symmetric:
        step = float(update.step_size())
        for entry in table:
            entry["curvature"] = (1 - entry["real"]) / step
    return table
