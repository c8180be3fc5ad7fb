"""At which strength of the couplings do mean-field theories of spins stop making sense?

    python examples/tap_vs_exact.py        # a minute

Random Ising and Potts models that are small enough for enumeration give the exact means. Left: adaptive TAP
has a lower error than naive mean field at every strength. Right: a theory is consistent where
``Lambda - J``, whose inverse estimates the correlations, is positive definite. Naive mean field taken at the
exact means (red) loses this property, so the exact means cannot be its stable state. Where a theory has no
consistent solution, its error counts as infinite.

Source: Opper and Winther, https://doi.org/10.1103/PhysRevE.64.056131.
"""

import math
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
from free_energy import Row, draw_bands, draw_errors, over_strengths
from runner import Result, run
from torch import Tensor

import solvers
from implicit_attn.studies import SpinModel, exact_moments, random_ising, random_potts

STRENGTHS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0)
# Column, colour and label of each line of a panel.
MEANS = (("naive_mean", "C1", "naive mean field"), ("tap_mean", "C0", "adaptive TAP"))
EIGENVALUES = (
    ("tap_eigenvalue", "C0", "TAP, at its solution"),
    ("naive_eigenvalue", "C1", "naive, at its solution"),
    ("truth_eigenvalue", "C3", "naive, at the exact means"),
)


def consistency(covariance: Tensor, cavity_variance: Tensor, couplings: Tensor) -> float:
    """Smallest eigenvalue of ``C^1/2 (Lambda - J) C^1/2 = I + C^1/2 (V - J) C^1/2``, of one sample.

    Its sign is that of the smallest eigenvalue of ``Lambda - J``. It exists for singular ``C`` (Potts).
    """
    values, vectors = torch.linalg.eigh(covariance[0])  # (N, d), (N, d, d)
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    sites, dim = values.shape
    unit = torch.eye(sites, dtype=root.dtype)
    interaction = torch.einsum("ij,iac->iajc", unit, cavity_variance[0])
    interaction = interaction - couplings.permute(0, 2, 1, 3)
    matrix = torch.einsum("iac,icjd,jde->iaje", root, interaction, root).reshape(sites * dim, -1)
    matrix = torch.eye(sites * dim, dtype=root.dtype) + (matrix + matrix.mT) / 2
    return torch.linalg.eigvalsh(matrix)[0].item()


def errors(model: SpinModel) -> Row:
    """Return the columns of the table for one model."""
    exact, x, J = exact_moments(model), model.field, model.couplings
    options: Any = {"site": model.site, "tolerance": 1e-8, "max_steps": 1000, "response": True}
    options |= {"adjoint": None, "on_failure": "ignore"}
    tap = solvers.adaptive_tap(J, x, **options)
    # Damped plain iteration ends in a minimum of the naive free energy; other solvers end in saddles.
    naive = solvers.adaptive_tap(J, x, order="naive", damping=0.5, **options)
    row: Row = {}
    for name, solution in (("naive", naive), ("tap", tap)):
        value, consistent = solution.value, bool(solution.converged[0])
        error = ((value.mean - exact.mean).norm() / exact.mean.norm()).item()
        row[f"{name}_mean"] = error if consistent else math.inf
        row[f"{name}_eigenvalue"] = consistency(value.covariance, value.cavity_variance, J)
        row[f"{name}_consistent"] = consistent
    own = exact.covariance.diagonal(dim1=1, dim2=3).movedim(-1, 1)
    truth = consistency(own, torch.zeros_like(own), J)
    return row | {"truth_eigenvalue": truth, "truth_consistent": truth > 0}


def tap_vs_exact(
    models: int = 50,  # number of random models for each strength
    ising: int = 10,  # number of sites of the Ising models
    potts: int = 7,  # number of sites of the Potts models
    states: int = 3,  # number of states of a Potts site
    strengths: tuple[float, ...] = STRENGTHS,  # strengths of the couplings
    seed: int = 0,  # random seed of the models
) -> Result:
    families = {
        f"Ising, N = {ising}": partial(random_ising, ising),
        f"Potts, {states} states, N = {potts}": partial(random_potts, potts, states),
    }
    tables = [over_strengths(errors, draw, strengths, models, seed) for draw in families.values()]

    figure, panels = plt.subplots(2, 2, figsize=(11, 8.5), sharex="col")
    figure.suptitle(
        f"Mean-field theories against enumeration: median and 10 to 90 % of {models} random models,\n"
        "couplings N(0, s²/N), fields N(0, 1/4)"
    )
    for (means, criterion), name, table in zip(panels, families, tables, strict=True):
        draw_errors(means, table, MEANS)
        means.legend(frameon=False, loc="lower right")
        means.set(title="Means $\\langle S_i\\rangle$", ylabel=f"{name}\n\nrelative error")
        draw_bands(criterion, table, EIGENVALUES)
        criterion.axhline(0.0, color="C4", linestyle="--")
        bottom = min(-0.5, *(each["truth_eigenvalue"] for each in table))
        criterion.axhspan(2 * bottom, 0.0, color="C4", alpha=0.12, linewidth=0)
        criterion.text(0.03, 0.03, "inconsistent", transform=criterion.transAxes, color="C4")
        criterion.set(title="Consistency: $\\Lambda - J$ positive definite")
        criterion.set(ylim=(1.3 * bottom, 1.3 - 0.4 * bottom))  # room for the legend
        criterion.set_ylabel("smallest eigenvalue (1: no couplings)")
        criterion.legend(frameon=False, loc="upper right")
    for axes in panels[-1]:
        axes.set_xlabel("strength s of the couplings")
    return {"ising": tables[0], "potts": tables[1]}, figure


if __name__ == "__main__":
    run(tap_vs_exact)
