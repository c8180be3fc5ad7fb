"""Free energies and means by naive mean field, second-order TAP and adaptive TAP, against enumeration.

Random Ising and Potts models, small enough to visit every configuration. A theory that does not converge
on a model counts as infinitely wrong there, so that all quantiles are over the same models.
Source: Opper and Winther, https://doi.org/10.1103/PhysRevE.64.056131.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import solvers
from implicit_attn.studies import SpinModel, exact_moments, random_ising, random_potts

ORDERS = {"naive": "naive mean field", "second": "second order (TAP)", "adaptive": "adaptive TAP"}
COLOURS = dict(zip(ORDERS, ("C1", "C2", "C0"), strict=True))
QUANTILES = {"": 0.5, "_10": 0.1, "_90": 0.9}


def errors(model: SpinModel) -> dict[str, float]:
    """``|log Z - exact|`` and ``|m - exact| / |exact|`` of each theory, and whether it converged."""
    exact, row = exact_moments(model), {}
    for order in ORDERS:
        solution = solvers.adaptive_tap(
            model.couplings,
            model.field,
            site=model.site,
            order=order,
            damping=0.5 if order == "naive" else None,  # ends in a minimum of its free energy
            adjoint=None,
            log_partition=True,
            tolerance=solvers.Tolerance(rtol=1e-8),
            max_steps=1000,
            on_failure="ignore",
        )
        found, converged = solution.value, bool(solution.converged[0])
        of_log = (found.log_partition - exact.log_partition).abs().item()
        of_mean = ((found.mean - exact.mean).norm() / exact.mean.norm()).item()
        row[f"{order}_log_partition"] = of_log if converged else math.inf
        row[f"{order}_mean"] = of_mean if converged else math.inf
        row[f"{order}_converged"] = converged
    return row


def quantiles(rows: list[dict[str, float]]) -> dict[str, float]:
    """Medians with ``_10`` and ``_90``, not interpolated since some are infinite; shares of booleans."""
    found = {}
    for name in rows[0]:
        column = torch.tensor([row[name] for row in rows], dtype=torch.float64)
        if name.endswith("converged"):
            found[name] = column.mean().item()
        else:
            for end, share in QUANTILES.items():
                found[name + end] = column.quantile(share, interpolation="nearest").item()
    return found


def free_energy(
    models: int = 16,
    ising: int = 8,
    potts: int = 5,
    states: int = 3,
    strengths: tuple[float, ...] = (0.25, 0.5, 1.0, 1.5, 2.0),
    seed: int = 0,
):
    """Errors of log Z and of the means by three mean-field theories, against enumeration.

    Args:
        models: random models at every strength.
        ising: sites of the Ising models.
        potts: sites of the Potts models.
        states: colours of a Potts site.
        strengths: of the couplings.
        seed: of the models.
    """
    families = {
        f"Ising, N = {ising}": partial(random_ising, ising),
        f"Potts, {states} colours, N = {potts}": partial(random_potts, potts, states),
    }
    tables = {}
    for name, draw in families.items():
        tables[name] = []
        for strength in sorted(strengths):
            generator = torch.Generator().manual_seed(seed)
            rows = [errors(draw(strength, generator)) for _ in range(models)]
            tables[name].append({"strength": strength} | quantiles(rows))

    figure, panels = plt.subplots(2, 2, figsize=(10.5, 8.2), sharex="col")
    figure.suptitle(
        "Mean-field free energies against enumeration: medians and 10 to 90 % of "
        f"{models} random models"
    )
    for row, (name, table) in zip(panels, tables.items(), strict=True):
        for axes, kind in zip(row, ("log_partition", "mean"), strict=True):
            draw_errors(axes, table, kind)
        row[0].set(ylabel=f"{name}\n\n$|\\log Z - $ exact$|$", title="Free energy of the model")
        row[1].set(ylabel="relative error", title="Means $\\langle S_i\\rangle$")
    for axes in panels[-1]:
        axes.set_xlabel("strength s of the couplings")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    one, other = tables.values()
    return {"ising": one, "potts": other}, figure


def draw_errors(axes, table: list[dict[str, float]], kind: str) -> None:
    """Median and band where the median is finite; an infinite quantile leaves the panel."""
    finite = [0.2, 1.0]
    for order, label in ORDERS.items():
        name = f"{order}_{kind}"
        rows = [row for row in table if math.isfinite(row[name])]
        steps = [row["strength"] for row in rows]
        low, high = [row[f"{name}_10"] for row in rows], [row[f"{name}_90"] for row in rows]
        axes.fill_between(
            steps, low, [min(v, 1e9) for v in high], color=COLOURS[order], alpha=0.15, linewidth=0
        )
        middle = [row[name] for row in rows]
        axes.plot(steps, middle, "o-", color=COLOURS[order], markersize=3, label=label)
        finite += [value for value in (*low, *middle, *high) if 0 < value < math.inf]
    axes.set_yscale("log")
    axes.set_ylim(0.5 * min(finite), 2 * max(finite))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    from runner import run

    run(free_energy)
