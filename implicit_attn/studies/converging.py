"""The convergence study: every solver on one layer, and the eigenvalues of its Jacobian."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.optional import progress
from implicit_attn.studies.study import (
    BLUE,
    GREY,
    NOTE_BOX,
    ORANGE,
    Study,
    Subject,
    Table,
    draw_band,
    has_energy,
    histogram,
    leave_empty,
    legend_below,
    median_and_band,
    median_and_largest,
    subject_of,
)
from implicit_attn.updates import GradientStep, Update

DENSE = 1200  # unknowns up to which all eigenvalues are computed
EXTREMES = 12  # eigenvalues at each end above that
FLOOR = 1e-8  # relative residual down to which curves are drawn
SMALLEST = 1e-12  # smaller energies are drawn here: a logarithmic axis has no zero


@dataclass(frozen=True)
class Convergence(Study):
    """What :func:`convergence` finds.

    Attributes:
        curves: rows with solver, evaluation, residual (median of the best so far), residual_10,
            residual_90, converged (share of samples at 1e-8), and where there is an energy
            energy_above: the median over the samples of the energy above the lowest that any solver
            found for the sample (None for a solver that does not see the energy).
        costs: rows with solver, converged (share of samples at ``rtol``), evaluations (median),
            evaluations_90, evaluations_largest, and seconds for the whole batch.
        steps: rows with solver, evaluations, samples: how many samples took so many evaluations.
        eigenvalues: of :func:`jacobian_eigenvalues` at the fixed points.
        rtol: tolerance of the costs.
        residual: largest residual at which the eigenvalues were taken.
    """

    curves: Table
    costs: Table
    steps: Table
    eigenvalues: Table
    rtol: float
    residual: float
    printed = ("costs",)

    def draw(self, figure: Any) -> None:
        """Six panels: residual, energy, histograms, evaluations, time, eigenvalues."""
        colors = {row["solver"]: f"C{number}" for number, row in enumerate(self.costs)}
        goal = f"to {self.rtol:g}, or to the limit"
        axes = figure.subplots(2, 3)
        draw_residuals(axes[0, 0], self.curves, colors, self.rtol)
        draw_energies(axes[0, 1], self.curves, colors)
        _draw_histograms(axes[0, 2], self.steps, colors)
        axes[0, 2].set_xlabel(f"evaluations {goal}")
        _draw_bars(axes[1, 0], self.costs, colors, "evaluations")
        most = [row["evaluations_largest"] for row in self.costs]
        axes[1, 0].plot(most, range(len(most)), "|", color="black", markersize=14)
        label = "evaluations per sample (bar: median, stroke: most)"
        axes[1, 0].set(xlabel=label, title=f"Evaluations {goal}")
        _draw_bars(axes[1, 1], self.costs, colors, "seconds")
        axes[1, 1].set(xlabel="seconds for all samples", title=f"Time {goal}")
        _draw_eigenvalues(axes[1, 2], self.eigenvalues, self.residual)
        legend_below(figure, axes[0, 0])


def convergence(
    layer: Any,
    x: Any = None,
    *,
    rtol: float | None = None,
    max_steps: int = 100,
    spectra: int = 2,
    repeats: int = 3,
) -> Convergence:
    """Every solver on the same layer and inputs, and the Jacobian's eigenvalues at the end.

    Curves and eigenvalues are in float64, costs in the precision of the layer.

    Args:
        layer: a ``DEQ``, a model that calls one (the first is studied), a name of shipped weights, or
            a :class:`Subject`; what all studies take.
        x: the input of the layer or model, (B, ...); None for a name or a subject.
        rtol: tolerance of the costs; None: that of the layer.
        max_steps: evaluations per sample.
        spectra: samples whose Jacobian is studied.
        repeats: timed solves, of which the median counts.

    Raises:
        TypeError: no layer is found, or ``x`` is missing.
    """
    subject = subject_of(layer, x)
    rtol = subject.rtol if rtol is None else rtol
    exact = subject.exact()
    # Newton's method and Jacobians differentiate twice, which torch's fused attention cannot.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        inner, (given, mask) = exact.layer, exact.given(exact.inputs)
        curves = solve_curves(solver_choices(inner), given, mask, max_steps)
        costs, steps = _costs(subject, solvers.Tolerance(rtol=rtol), max_steps, repeats)
        few = pytree.tree_map_only(Tensor, lambda part: part[:spectra], given)
        mask = None if mask is None else mask[:spectra]
        options: Any = {"tolerance": solvers.Tolerance(rtol=FLOOR), "max_steps": 500}
        end = inner.solve(few, mask, on_failure="ignore", **options)
        eigenvalues = jacobian_eigenvalues(inner, end.value, few, mask)
    return Convergence(curves, costs, steps, eigenvalues, rtol, end.residual.max().item())


class WithoutEnergy(Update):
    """An update whose energy the solver does not see, so that no step is rejected."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.update, self.symmetric = update, update.symmetric

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        return self.update(z, x, mask=mask)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return self.update.prepare(x, mask=mask)

    def initial(self, x: Any) -> Any:
        return self.update.initial(x)

    def start(self, x: Any, prepared: Any) -> Any:
        return self.update.start(x, prepared)


def solver_choices(layer: DEQ) -> dict[str, tuple[DEQ, solvers.Solver]]:
    """Name of each solver that can solve the layer -> the layer to give it, and the solver.

    For a layer with an energy all are safeguarded by it, except "plain forward".
    """
    choices: dict[str, tuple[DEQ, solvers.Solver]] = {"plain forward": (layer, solvers.Forward())}
    if has_energy(layer.update):
        unguarded = DEQ(WithoutEnergy(layer.update), init=layer.init)
        choices["plain forward"] = unguarded, solvers.Forward()
        choices["forward"] = layer, solvers.Forward()
        choices["gradient, auto step"] = layer, solvers.GradientDescent("auto")
        choices["L-BFGS"] = layer, solvers.LBFGS()
    for kind in (solvers.Anderson, solvers.Broyden, solvers.Newton):
        choices[kind.__name__] = layer, kind()
    return choices


@contextmanager
def with_energies(layer: DEQ) -> Iterator[None]:
    """Within, the solves of a layer with an energy look at it also where they could do without."""
    before = layer.update.monitored
    try:
        layer.update.monitored = has_energy(layer.update)
        yield
    finally:
        layer.update.monitored = before


def solve_curves(
    choices: Mapping[str, tuple[DEQ, solvers.Solver | None]],
    x: Any,
    mask: Tensor | None,
    max_steps: int,
) -> Table:
    """The table ``curves`` of :class:`Convergence`, of layers with their solvers by name."""
    traces: dict[str, tuple[list[int], Tensor, Tensor | None]] = {}
    for name, (layer, solver) in progress(choices.items(), "curves"):
        with with_energies(layer):
            traces[name] = _trace(layer, x, mask, solver, max_steps)
    energies = [energy.amin(1) for _, _, energy in traces.values() if energy is not None]
    lowest = torch.stack(energies).amin(0) if energies else None
    table: Table = []
    for name, (evaluations, best, energy) in traces.items():
        for k, evaluation in enumerate(evaluations):
            row: dict[str, Any] = {"solver": name, "evaluation": evaluation}
            # How far below the floor the last step lands says nothing about the solver.
            row |= median_and_band("residual", best[:, k].clamp_min(FLOOR))
            row["converged"] = (best[:, k] <= FLOOR).double().mean().item()
            if lowest is not None:
                above = None if energy is None else (energy[:, k] - lowest).median().item()
                row["energy_above"] = above
            table.append(row)
    return table


def _trace(
    layer: DEQ, x: Any, mask: Tensor | None, solver: solvers.Solver | None, max_steps: int
) -> tuple[list[int], Tensor, Tensor | None]:
    """Numbers of evaluations (T), and residual and energy (B, T) of the best state until then."""
    options: Any = {"solver": solver, "tolerance": solvers.Tolerance(rtol=FLOOR)}
    options["on_failure"] = "ignore"
    if isinstance(solver, solvers.Newton):  # its products are evaluations without a residual
        budgets = sorted({round(1.3**k) for k in range(40) if 1.3**k <= max_steps})
        found = [layer.solve(x, mask, max_steps=budget, **options) for budget in budgets]
        best = torch.stack([each.residual for each in found], dim=1).cummin(dim=1).values
        energies = [each.energy for each in found if each.energy is not None]
        return budgets, best, torch.stack(energies, dim=1) if energies else None
    trace: Any = layer.solve(x, mask, max_steps=max_steps, record=True, **options).trace
    usable = torch.isfinite(trace.residual) & trace.accepted
    best, place = torch.where(usable, trace.residual, torch.inf).cummin(dim=1)
    energy = None if trace.energy is None else trace.energy.gather(1, place)
    return list(range(1, best.shape[1] + 1)), best, energy


def _costs(
    subject: Subject, tolerance: solvers.Tolerance, max_steps: int, repeats: int
) -> tuple[Table, Table]:
    layer, (x, mask) = subject.layer, subject.given(subject.inputs)
    ends: Table = []
    steps: Table = []
    options: Any = {"tolerance": tolerance, "max_steps": max_steps, "on_failure": "ignore"}
    for name, (owner, solver) in progress(solver_choices(layer).items(), "costs"):
        times: list[float] = []
        with with_energies(layer):
            solution = owner.solve(x, mask, solver=solver, **options)
            for _ in range(repeats):
                start = time.perf_counter()
                owner.solve(x, mask, solver=solver, **options)
                times.append(time.perf_counter() - start)
        row = {"solver": name, "converged": solution.converged.double().mean().item()}
        row |= median_and_largest("evaluations", solution.evaluations)
        ends.append({**row, "seconds": statistics.median(times)})
        steps += histogram(solution.evaluations, solver=name)
    return ends, steps


def jacobian_eigenvalues(layer: DEQ, z: Tensor, x: Any, mask: Tensor | None = None) -> Table:
    """Eigenvalues of the Jacobian ``df/dz`` of a layer's update at states ``z``.

    All of them for states of up to ``DENSE`` numbers. Above that, the ``EXTREMES`` largest and
    smallest of a symmetric Jacobian, and the largest in magnitude of another.

    Args:
        layer: the layer.
        z, x, mask: state (B, N, d), input and mask.

    Returns:
        Rows with sample, real, imaginary, and for a ``GradientStep`` with one step size ``eta``
        curvature: the eigenvalue ``(1 - real) / eta`` of the energy's Hessian.
    """
    update = layer.update
    with torch.no_grad():
        prepared = update.prepare(x, mask=mask)

    def step(z: Any, given: Any) -> Any:
        return update(z, given, mask=mask)

    if z[0].numel() <= DENSE:
        matrix = solvers.jacobian(step, z, (prepared,)).double().cpu()
        if update.symmetric:
            values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2).to(torch.complex128)
        else:
            values = torch.linalg.eigvals(matrix)
    else:
        what = "extremes" if update.symmetric else "largest_magnitude"
        found = solvers.spectrum(step, z, (prepared,), what=what, count=EXTREMES)
        values = found.eigenvalues.to(torch.complex128).cpu()
    table: Table = [
        {"sample": sample, "real": value.real, "imaginary": value.imag}
        for sample, row in enumerate(values.tolist())
        for value in sorted(row, key=lambda number: number.real)
    ]
    if isinstance(update, GradientStep):
        for entry in table:
            entry["curvature"] = (1 - entry["real"]) / update.step_size
    return table


def draw_residuals(axes: Any, curves: Table, colors: dict[str, str], rtol: float) -> None:
    for name, color in colors.items():
        rows = [row for row in curves if row["solver"] == name]
        draw_band(axes, rows, "evaluation", "residual", color, name, alpha=0.12)
    axes.axhline(rtol, color=GREY, linestyle="--", label=f"tolerance {rtol:g}")
    label = "best relative residual |f(z) - z| / |f(z)|"
    axes.set(xlabel="evaluations per sample", ylabel=label, yscale="log")
    axes.set_title("Residual (median; band: 10 % to 90 %)")


def draw_energies(axes: Any, curves: Table, colors: dict[str, str]) -> None:
    axes.set(xlabel="evaluations per sample", title="Energy")
    seen = [row for row in curves if row.get("energy_above") is not None]
    if not seen:
        leave_empty(axes, "this layer has no energy")
        return
    for name, color in colors.items():
        rows = [row for row in seen if row["solver"] == name]
        above = [max(row["energy_above"], SMALLEST) for row in rows]
        axes.plot([row["evaluation"] for row in rows], above, color=color)
    axes.set(ylabel="energy above the lowest found (median)", yscale="log")


def _draw_histograms(axes: Any, steps: Table, colors: dict[str, str]) -> None:
    """One histogram a solver, each on its own line and scaled to its own height."""
    most = max(row["evaluations"] for row in steps)
    edges = np.arange(0, most + 2 + most // 50, max(1, most // 50))
    for place, (name, color) in enumerate(colors.items()):
        rows = [row for row in steps if row["solver"] == name]
        spent, samples = ([row[key] for row in rows] for key in ("evaluations", "samples"))
        heights, _ = np.histogram(spent, edges, weights=samples)
        axes.stairs(
            0.8 * heights / heights.max() - place, edges, baseline=-place, color=color, fill=True
        )
        axes.axhline(-place, color=color, linewidth=0.8)
    axes.set_yticks([-k for k in range(len(colors))], list(colors))
    axes.set(title="Evaluations per sample: histograms", ylim=(-len(colors) + 0.85, 1.0))


def _draw_bars(axes: Any, costs: Table, colors: dict[str, str], key: str) -> None:
    axes.barh(range(len(costs)), [row[key] for row in costs], color=list(colors.values()))
    side: Any = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
    for place, row in enumerate(costs):
        if row["converged"] < 1:
            text = f"{100 * row['converged']:.0f} % converged"
            axes.text(0.97, place, text, bbox=NOTE_BOX, **side)
    axes.set_yticks(range(len(costs)), list(colors))
    axes.invert_yaxis()


def _draw_eigenvalues(axes: Any, eigenvalues: Sequence[dict[str, Any]], residual: float) -> None:
    real = [row["real"] for row in eigenvalues]
    imaginary = [row["imaginary"] for row in eigenvalues]
    radius = max((a * a + b * b) ** 0.5 for a, b in zip(real, imaginary, strict=True))
    samples = len({row["sample"] for row in eigenvalues})
    title = f"Jacobian ({samples} samples, residual {residual:.0e}):\nspectral radius {radius:.2f}"
    if any(imaginary):
        axes.scatter(real, imaginary, s=6, color=BLUE, alpha=0.6, label="eigenvalues")
        around = np.linspace(0.0, 2 * np.pi, 200)
        circle = (np.cos(around), np.sin(around))
        axes.plot(*circle, color=GREY, linestyle="--", label="plain iteration converges inside")
        axes.set(xlabel="real part", ylabel="imaginary part", title=title)
        axes.set_aspect("equal", adjustable="datalim")
    else:
        axes.hist(real, bins=60, color=BLUE, label="eigenvalues (all real)")
        for place in (-1.0, 1.0):
            name = "plain iteration converges between these" if place < 0 else None
            axes.axvline(place, color=ORANGE, linestyle="--", label=name)
        axes.set(xlabel="eigenvalue", ylabel="number", yscale="log", title=title)
        axes.set_ylim(top=8 * axes.get_ylim()[1])  # free for the legend
    axes.legend(edgecolor="none", fontsize=9, loc="upper left")
