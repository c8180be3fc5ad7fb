"""Accuracy and consistency of mean-field theories of spins.

Random Ising and Potts models that are small enough for enumeration give exact means and correlations. The
example compares naive mean field and adaptive TAP with them, and checks whether each theory is consistent:
``Lambda - J``, whose inverse estimates the correlations, must be positive definite. Without a consistent
solution the error counts as infinite. Source: Opper and Winther, https://doi.org/10.1103/PhysRevE.64.056131.
"""

import math
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
from free_energy import ORDERS, Row, draw_bands, draw_errors, over_strengths
from runner import Result, columns, run
from torch import Tensor

import solvers
from implicit_attn.studies import SpinModel, exact_moments, random_ising, random_potts

STRENGTHS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0)
# Column, colour and label of each line of a panel.
MEANS = (("naive_mean", "C1", "naive mean field"), ("tap_mean", "C0", "adaptive TAP"))
PAIRS = (
    ("naive_pairs", "C1", "naive, $(C^{-1} - J)^{-1}$"),
    ("tap_pairs", "C0", "TAP, $\\chi = (\\Lambda - J)^{-1}$"),
    ("derivative_pairs", "C2", "TAP, derivative $\\partial m/\\partial x$"),
)
LOGS = tuple(
    (f"{'tap' if order == 'adaptive' else order}_log_partition", *style) for order, *style in ORDERS
)
EIGENVALUES = (
    ("tap_eigenvalue", "C0", "TAP, at its solution"),
    ("naive_eigenvalue", "C1", "naive, at its solution"),
    ("truth_eigenvalue", "C3", "naive, at the exact means"),
)
SHARES = (
    ("tap_consistent", "C0", "-", "TAP, at its solution"),
    ("tap_stable", "C2", "--", "... and $\\partial m/\\partial x$ positive too"),
    ("naive_consistent", "C1", ":", "naive, at its solution"),
    ("truth_consistent", "C3", "-", "naive, at the exact means"),
)
NOTE = (
    "Lines: medians over random models, bands: 10 % to 90 % of them. Every model counts in every quantile; "
    "one without a consistent solution of a theory counts as infinitely wrong.\n"
    "Red: naive mean field's $C^{-1} - J$ taken at the exact means. Where it has a negative eigenvalue the "
    "exact means cannot be a stable state of naive mean field."
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


def pair_error(covariance: Tensor, exact: Tensor) -> float:
    """Relative Frobenius error over the blocks i != j of (1, N, d, N, d)."""
    sites = covariance.shape[1]
    others = 1 - torch.eye(sites, dtype=covariance.dtype)[:, None, :, None]
    difference = ((covariance - exact) * others).norm()
    return (difference / (exact * others).norm()).item()


def solve_with_derivative(model: SpinModel, options: Any) -> tuple[solvers.Solution, Tensor]:
    """Adaptive TAP, and ``dm/dx`` (Nd, Nd) by implicit differentiation, NaN where that failed.

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
    if backward is None or not bool(backward.converged.all()):
        gradient = torch.full_like(gradient, math.nan)
    solution.value = type(solution.value)(*(part.detach() for part in solution.value))
    return solution, gradient.flatten(1)


def errors(model: SpinModel) -> Row:
    """The columns of the table for one model."""
    exact, x, J = exact_moments(model), model.field, model.couplings
    options: Any = {"site": model.site, "tolerance": 1e-8, "max_steps": 1000}
    options |= {"on_failure": "ignore", "log_partition": True}
    tap, derivative = solve_with_derivative(model, options | {"response": True})
    options["adjoint"] = None
    # Damped plain iteration ends in a minimum of the naive free energy; other solvers end in saddles.
    naive = solvers.adaptive_tap(J, x, order="naive", damping=0.5, response=True, **options)
    second = solvers.adaptive_tap(J, x, order="second", **options)
    row: Row = {}
    for name, solution in (("naive", naive), ("second", second), ("tap", tap)):
        of_log = (solution.value.log_partition[:1] - exact.log_partition).abs().item()
        row[f"{name}_log_partition"] = of_log if bool(solution.converged[0]) else math.inf
    for name, solution in (("naive", naive), ("tap", tap)):
        value, consistent = solution.value, bool(solution.converged[0])
        of_mean = ((value.mean[:1] - exact.mean).norm() / exact.mean.norm()).item()
        of_pairs = pair_error(value.response[:1], exact.covariance)
        row[f"{name}_mean"] = of_mean if consistent else math.inf
        row[f"{name}_pairs"] = of_pairs if consistent else math.inf
        row[f"{name}_eigenvalue"] = consistency(value.covariance, value.cavity_variance, J)
        row[f"{name}_consistent"] = consistent
    own = exact.covariance.diagonal(dim1=1, dim2=3).movedim(-1, 1)
    truth = consistency(own, torch.zeros_like(own), J)
    eigenvalues = torch.linalg.eigvalsh((derivative + derivative.mT) / 2)
    solved = bool(row["tap_consistent"]) and bool(torch.isfinite(derivative).all())
    spread = derivative.view_as(exact.covariance)
    row["derivative_pairs"] = pair_error(spread, exact.covariance) if solved else math.inf
    row["tap_stable"] = solved and bool(eigenvalues[0] > -1e-6 * eigenvalues[-1])
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

    figure, panels = plt.subplots(2, 5, figsize=(20, 9.3), sharex="col", dpi=120)
    figure.suptitle(
        f"Mean-field theories against enumeration: {models} random models at each strength, "
        "couplings N(0, s²/N), fields N(0, 1/4)"
    )
    of_pairs = "$\\langle S_i S_j\\rangle - \\langle S_i\\rangle\\langle S_j\\rangle$"
    for row, name, table in zip(panels, families, tables, strict=True):
        means, pairs, logs, criterion, shares = row
        pairs.axhline(1.0, color="C4", linestyle="--", label='"nothing is correlated"')
        for axes, bands in ((means, MEANS), (pairs, PAIRS), (logs, LOGS)):
            draw_errors(axes, table, bands)
            axes.legend(frameon=False, loc="lower right")
        means.set(title="Means $\\langle S_i\\rangle$", ylabel=f"{name}\n\nrelative error")
        pairs.set(title=f"Correlations {of_pairs}", ylabel="relative error")
        logs.set(title="Free energy of the model", ylabel="$|\\log Z - $ exact$|$")
        draw_bands(criterion, table, EIGENVALUES)
        criterion.axhline(0.0, color="C4", linestyle="--")
        bottom = min(-0.5, *(each["truth_eigenvalue"] for each in table))
        criterion.axhspan(2 * bottom, 0.0, color="C4", alpha=0.12, linewidth=0)
        criterion.text(0.03, 0.03, "inconsistent", transform=criterion.transAxes, color="C4")
        criterion.set(title="Consistency: $\\Lambda - J$ positive definite")
        criterion.set(ylim=(1.3 * bottom, 1.3 - 0.4 * bottom))  # room for the legend
        criterion.set_ylabel("smallest eigenvalue (1: no couplings)")
        for column, color, style, label in SHARES:
            steps, values = columns(table, "strength", column)
            percent, look = [100 * each for each in values], {"color": color, "markersize": 3}
            shares.plot(steps, percent, "o", linestyle=style, label=label, **look)
        shares.set(title="Models with a consistent theory", ylabel="% of the models")
        shares.set(ylim=(-3, 152), yticks=range(0, 101, 20))
        for axes in (criterion, shares):
            axes.legend(frameon=False, loc="upper right")
    for axes in panels[-1]:
        axes.set_xlabel("strength s of the couplings")
    figure.supxlabel(NOTE, fontsize=10)
    return {"ising": tables[0], "potts": tables[1]}, figure


if __name__ == "__main__":
    run(tap_vs_exact)
