"""How large are the errors of three mean-field theories of spins, compared with enumeration?

    python examples/free_energy.py        # half a minute

The random Ising and Potts models are small enough to enumerate every configuration. Adaptive TAP has the
smallest errors of log Z; at weak couplings those of naive mean field are 17 to 150 times as large as those of
the second order (TAP), which breaks down at strong couplings. The error of a theory that does not converge on
a model counts as infinite, so all quantiles are over the same models.

Source: Opper and Winther, https://doi.org/10.1103/PhysRevE.64.056131.
"""

import math
from collections.abc import Callable
from functools import partial

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, draw_band, legend_below, run

import solvers
from implicit_attn.studies import SpinModel, exact_moments, random_ising, random_potts

# Name of the theory, colour and label of its lines.
ORDERS = (
    ("naive", "C1", "naive mean field"),
    ("second", "C2", "second order (TAP)"),
    ("adaptive", "C0", "adaptive TAP"),
)
Row = dict[str, float | bool]


def errors(model: SpinModel) -> Row:
    """``|log Z - exact|`` and ``|m - exact| / |exact|`` of each theory, and whether it converged."""
    exact, row = exact_moments(model), {}
    for order, _, _ in ORDERS:
        damping = 0.5 if order == "naive" else None  # ends in a minimum of its free energy
        solution = solvers.adaptive_tap(
            model.couplings, model.field, site=model.site, order=order, damping=damping,
            adjoint=None, log_partition=True, tolerance=1e-8, max_steps=1000, on_failure="ignore",
        )  # fmt: skip
        found, converged = solution.value, bool(solution.converged[0])
        of_log = (found.log_partition - exact.log_partition).abs().item()
        of_mean = ((found.mean - exact.mean).norm() / exact.mean.norm()).item()
        row[f"{order}_log_partition"] = of_log if converged else math.inf
        row[f"{order}_mean"] = of_mean if converged else math.inf
        row[f"{order}_converged"] = converged
    return row


def over_strengths(
    errors: Callable[[SpinModel], Row], draw: Callable[..., SpinModel], strengths, models, seed
) -> Table:
    """At each strength the shares of booleans, and medians with ``_10`` and ``_90`` of numbers.

    Quantiles are not interpolated, since some are infinite."""
    table: Table = []
    for strength in sorted(strengths):
        generator = torch.Generator().manual_seed(seed)
        rows = [errors(draw(strength, generator)) for _ in range(models)]
        found: dict[str, float] = {"strength": strength}
        for name, first in rows[0].items():
            column = torch.tensor([row[name] for row in rows], dtype=torch.float64)
            if isinstance(first, bool):
                found[name] = column.mean().item()
                continue
            for end, share in (("", 0.5), ("_10", 0.1), ("_90", 0.9)):
                found[name + end] = column.quantile(share, interpolation="nearest").item()
        table.append(found)
    return table


def free_energy(
    models: int = 16,  # number of random models for each strength
    ising: int = 8,  # number of sites of the Ising models
    potts: int = 5,  # number of sites of the Potts models
    states: int = 3,  # number of states of a Potts site
    strengths: tuple[float, ...] = (0.25, 0.5, 1.0, 1.5, 2.0),  # strengths of the couplings
    seed: int = 0,  # random seed of the models
) -> Result:
    families = {
        f"Ising, N = {ising}": partial(random_ising, ising),
        f"Potts, {states} colours, N = {potts}": partial(random_potts, potts, states),
    }
    tables = [over_strengths(errors, draw, strengths, models, seed) for draw in families.values()]

    figure, panels = plt.subplots(2, 2, figsize=(10.5, 8.2), sharex="col")
    figure.suptitle(
        "Mean-field free energies against enumeration: medians and 10 to 90 % of "
        f"{models} random models"
    )
    for row, name, table in zip(panels, families, tables, strict=True):
        for axes, kind in zip(row, ("log_partition", "mean"), strict=True):
            draw_errors(axes, table, [(f"{order}_{kind}", *style) for order, *style in ORDERS])
        row[0].set(ylabel=f"{name}\n\n$|\\log Z - $ exact$|$", title="Free energy of the model")
        row[1].set(ylabel="relative error", title="Means $\\langle S_i\\rangle$")
    for axes in panels[-1]:
        axes.set_xlabel("strength s of the couplings")
    legend_below(figure, panels[0, 0], 3)
    return {"ising": tables[0], "potts": tables[1]}, figure


def draw_bands(axes, table: Table, bands) -> list[float]:
    """Median and band where the median is finite; an infinite quantile leaves the panel."""
    for name, color, label in bands:
        rows = [row for row in table if math.isfinite(row[name])]
        rows = [row | {f"{name}_90": min(row[f"{name}_90"], 1e9)} for row in rows]
        line = {"color": color, "label": label, "marker": "o", "ms": 3}
        draw_band(axes, rows, "strength", name, alpha=0.15, **line)
    return [row[name + end] for row in table for name, _, _ in bands for end in ("", "_10", "_90")]


def draw_errors(axes, table: Table, bands) -> None:
    """Bands on a logarithmic scale that holds all that is finite."""
    finite = [value for value in draw_bands(axes, table, bands) if 0 < value < math.inf]
    axes.set_yscale("log")
    axes.set_ylim(0.5 * min([0.2, *finite]), 2 * max([1.0, *finite]))


if __name__ == "__main__":
    run(free_energy)
