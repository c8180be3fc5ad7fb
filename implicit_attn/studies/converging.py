"""The convergence study: every solver on one layer, and the eigenvalues of its Jacobian."""

from __future__ import annotations

import copy
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.optional import progress
from implicit_attn.studies import study
from implicit_attn.studies.study import BLUE, GREY, LOOKS, ORANGE, Table

DENSE = 1200  # unknowns up to which all eigenvalues are computed
EXTREMES = 12  # eigenvalues at each end above that
CEILING = 1e3  # largest residual that a figure shows
FLOOR = 1e-8  # relative residual down to which curves are drawn
SMALLEST = 1e-12  # smaller energies are drawn here: a logarithmic axis has no zero


class Curve(NamedTuple):
    """Residual and energy of the best state until then, (B, T), after each number of evaluations."""

    evaluations: list[int]
    residual: Tensor
    energy: Tensor | None  # None if the solver does not see an energy


class Convergence(NamedTuple):
    """Result of :func:`convergence`.

    Attributes:
        curves: :class:`Curve` by solver, in float64, to a relative residual of 1e-8.
        costs: rows with solver, converged (share of samples at ``rtol``), evaluations (median),
            evaluations_90, evaluations_largest, and seconds for the whole batch.
        eigenvalues: of :func:`jacobian_eigenvalues` at the fixed points.
        rtol: tolerance of the costs.
    """

    curves: dict[str, Curve]
    costs: Table
    eigenvalues: Tensor
    rtol: float

    def plot(self, title: str = "") -> Any:
        """Draw four panels: residual, energy, evaluations, eigenvalues."""
        figure = study.new_figure((13, 8), title)
        (residual, energy), (costs, spectrum) = figure.subplots(2, 2)
        seen = [curve.energy for curve in self.curves.values() if curve.energy is not None]
        for name, curve in self.curves.items():
            color = LOOKS[name][0]
            # How far below the floor the last step lands says nothing about the solver.
            best = curve.residual.clamp(FLOOR, CEILING)  # infinite relative to a start at zero
            study.draw_band(residual, curve.evaluations, best, color, name)
            if curve.energy is not None:
                lowest = torch.stack([each.amin(1) for each in seen]).amin(0).unsqueeze(1)
                above = (curve.energy - lowest).median(0).values.clamp_min(SMALLEST)
                energy.plot(curve.evaluations, above.cpu(), color=color)
        residual.axhline(self.rtol, color=GREY, linestyle="--", label=f"tolerance {self.rtol:g}")
        residual.set(xlabel="evaluations per sample", yscale="log")
        residual.set_ylabel("best relative residual |f(z) - z| / |f(z)|")
        residual.set_title("Residual (median; band: 10 % to 90 %)")
        known = residual.get_legend_handles_labels()
        figure.legend(*known, loc="outside lower center", ncols=len(self.curves) + 1, frameon=False)
        energy.set(xlabel="evaluations per sample", title="Energy")
        if seen:
            energy.set(ylabel="energy above the lowest reached (median)", yscale="log")
        else:
            study.leave_empty(energy, "this layer has no energy")
        names, spent = ([row[key] for row in self.costs] for key in ("solver", "evaluations"))
        drawn = costs.barh(names, spent, color=[LOOKS[name][0] for name in names])
        shares = [f"{100 * row['converged']:.0f} %, {row['seconds']:.2g} s" for row in self.costs]
        costs.bar_label(drawn, shares, padding=4, fontsize=8)
        title = f"Evaluations to {self.rtol:g}, or to the limit"
        costs.set(xlim=(0, 1.35 * max(spent)), title=title)
        costs.set_xlabel("median evaluations per sample (share converged, time of all)")
        costs.invert_yaxis()
        _draw_eigenvalues(spectrum, self.eigenvalues)
        return figure


def convergence(
    layer: Any,
    x: Any = None,
    *,
    rtol: float | None = None,
    max_steps: int = 100,
    spectra: int = 2,
) -> Convergence:
    """Run every solver on the same layer and inputs, and compute the Jacobian's eigenvalues at the end.

    Curves and eigenvalues are in float64, costs in the precision of the layer.

    Args:
        layer: a ``DEQ``, a model that calls one (the first is studied), a name of shipped weights, or
            a :class:`Subject`; what all studies take.
        x: the input of the layer or model, (B, ...); None for a name or a subject.
        rtol: tolerance of the costs; None: that of the layer.
        max_steps: evaluations per sample.
        spectra: samples whose Jacobian is studied.

    Raises:
        TypeError: no layer is found, or ``x`` is missing.

    Example:
        >>> from implicit_attn import DEQ, studies
        >>> from implicit_attn.updates import MeanFieldAttention
        >>> found = studies.convergence(
        ...     DEQ(MeanFieldAttention(4, 2, bound=0.5)), torch.randn(8, 4, 2)
        ... )
        >>> [row["solver"] for row in found.costs]
        ['plain forward', 'Anderson', 'Broyden', 'Newton']
        >>> figure = found.plot()
    """
    subject = study.subject_of(layer, x)
    rtol = subject.rtol if rtol is None else rtol
    exact, tolerance = subject.exact(), solvers.Tolerance(rtol=rtol)
    # Newton's method and Jacobians differentiate twice, which torch's fused attention cannot.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        inner, (given, mask) = exact.layer, exact.given(exact.inputs)
        curves = {
            name: _curve(owner, given, mask, solver, max_steps)
            for name, (owner, solver) in progress(solver_choices(inner).items(), "curves")
        }
        seen, costs = subject.given(subject.inputs), Table()
        options: Any = {"max_steps": max_steps, "on_failure": "ignore", "tolerance": tolerance}
        for name, (owner, solver) in progress(solver_choices(subject.layer).items(), "costs"):
            owner.solve(*seen, solver=solver, **options)  # the first call also prepares
            start = time.perf_counter()
            solution = owner.solve(*seen, solver=solver, **options)
            seconds = time.perf_counter() - start
            row = {"solver": name, "converged": solution.converged.double().mean().item()}
            row |= study.median_and_largest("evaluations", solution.evaluations)
            costs.append({**row, "seconds": seconds})
        few = pytree.tree_map_only(Tensor, lambda part: part[:spectra], given)
        mask = None if mask is None else mask[:spectra]
        options = {"tolerance": solvers.Tolerance(rtol=FLOOR), "max_steps": 500}
        end = inner.solve(few, mask, on_failure="ignore", **options)
        return Convergence(curves, costs, jacobian_eigenvalues(inner, end.value, few, mask), rtol)


def solver_choices(layer: DEQ) -> dict[str, tuple[DEQ, solvers.Solver]]:
    """Return the name of each solver that can solve the layer, with the layer to use and the solver.

    The energy of a layer safeguards all of them, except "plain forward".
    """
    choices: dict[str, tuple[DEQ, solvers.Solver]] = {"plain forward": (layer, solvers.Forward())}
    if layer.update.monitored:
        hidden = copy.copy(layer.update)
        hidden.monitored = False
        choices["plain forward"] = DEQ(hidden, init=layer.init), solvers.Forward()
        choices["forward"] = layer, solvers.Forward()
        choices["gradient, auto step"] = layer, solvers.GradientDescent("auto")
        choices["L-BFGS"] = layer, solvers.LBFGS()
    for kind in (solvers.Anderson, solvers.Broyden, solvers.Newton):
        choices[kind.__name__] = layer, kind()
    return choices


def _curve(
    layer: DEQ, x: Any, mask: Tensor | None, solver: solvers.Solver, max_steps: int
) -> Curve:
    options: Any = {"solver": solver, "tolerance": solvers.Tolerance(rtol=FLOOR)}
    options["on_failure"] = "ignore"
    if isinstance(solver, solvers.Newton):  # its products are evaluations without a residual
        budgets = sorted({round(1.3**k) for k in range(40) if 1.3**k <= max_steps})
        found = [layer.solve(x, mask, max_steps=budget, **options) for budget in budgets]
        best = torch.stack([each.residual for each in found], dim=1).cummin(dim=1).values
        energies = [each.energy for each in found if each.energy is not None]
        return Curve(budgets, best, torch.stack(energies, dim=1) if energies else None)
    trace: Any = layer.solve(x, mask, max_steps=max_steps, record=True, **options).trace
    usable = torch.isfinite(trace.residual) & trace.accepted
    best, place = torch.where(usable, trace.residual, torch.inf).cummin(dim=1)
    energy = None if trace.energy is None else trace.energy.gather(1, place)
    return Curve(list(range(1, best.shape[1] + 1)), best, energy)


def jacobian_eigenvalues(layer: DEQ, z: Tensor, x: Any, mask: Tensor | None = None) -> Tensor:
    """Return eigenvalues of the Jacobian ``df/dz`` of a layer's update at states ``z`` (B, N, d).

    These are all of them for states of up to ``DENSE`` numbers. Above that, they are the ``EXTREMES``
    largest and smallest of a symmetric Jacobian, or the largest in magnitude of another.

    Returns:
        (B, number), complex, with increasing real parts.
    """
    update = layer.update
    with torch.no_grad():
        prepared = update.prepare(x, mask=mask)

    def step(z: Any, given: Any) -> Any:
        return update(z, given, mask=mask)

    if z[0].numel() > DENSE:
        what = "extremes" if update.symmetric else "largest_magnitude"
        values = solvers.spectrum(step, z, (prepared,), what=what, count=EXTREMES).eigenvalues
    else:
        matrix = solvers.jacobian(step, z, (prepared,)).double()
        symmetric = (matrix + matrix.mT) / 2
        eigenvalues = torch.linalg.eigvalsh if update.symmetric else torch.linalg.eigvals
        values = eigenvalues(symmetric if update.symmetric else matrix)
    values = values.to(torch.complex128)
    return values.gather(1, values.real.argsort(1))


def _draw_eigenvalues(axes: Any, eigenvalues: Tensor) -> None:
    radius, values = eigenvalues.abs().max(), eigenvalues.flatten().cpu()
    axes.set_title(f"Jacobian ({len(eigenvalues)} samples): spectral radius {radius:.2f}")
    if bool(values.imag.any()):
        axes.scatter(values.real, values.imag, s=6, color=BLUE, alpha=0.6, label="eigenvalues")
        angles = torch.linspace(0.0, 2 * torch.pi, 200)
        look: Any = {"color": GREY, "linestyle": "--", "label": "plain iteration converges inside"}
        axes.plot(angles.cos(), angles.sin(), **look)
        axes.set(xlabel="real part", ylabel="imaginary part")
        axes.set_aspect("equal", adjustable="datalim")
    else:
        axes.hist(values.real, bins=60, color=BLUE, label="eigenvalues (all real)")
        axes.axvspan(-1, 1, color=ORANGE, alpha=0.15, label="plain iteration converges within")
        axes.set(xlabel="eigenvalue", ylabel="number", yscale="log")
        axes.set_ylim(top=8 * axes.get_ylim()[1])  # room for the legend
    axes.legend(edgecolor="none", fontsize=9, loc="upper left")
