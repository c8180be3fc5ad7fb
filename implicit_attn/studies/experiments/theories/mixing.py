"""How many sweeps Gibbs sampling takes on Potts models on graphs."""

from __future__ import annotations

import torch
from torch import Tensor

import solvers
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.spins.graphs import GRAPHS, graph_potts
from implicit_attn.studies.spins.models import SpinModel
from implicit_attn.studies.tables import Table
from solvers.core.checks import require_count

ALLOWED = 3.0  # standard errors by which the energy of mixed chains may differ from the last


def gibbs_mixing(
    *,
    sites: int = 20,
    colours: int = 10,
    chains: int = 4000,
    sweeps: int = 512,
    seed: int = 0,
    advance: Advance = lambda what: None,
) -> Table:
    """Mean energy of Gibbs chains after 1, 2, 4, ... sweeps, on each kind of graph.

    All chains start from independent uniform colours. The energy ``-1/2 sum_ij S_i^T J_ij S_j`` per site
    falls until the chains have mixed.

    Args:
        sites, colours: of :func:`implicit_attn.studies.graph_potts`.
        chains: independent ones.
        sweeps: the last number of sweeps.
        seed: of the models and the chains.
        advance: called with the name of each graph.

    Returns:
        A row for each graph and number of sweeps: ``graph``, ``sweeps``, ``energy`` (mean of the chains,
        per site), ``standard_error``, ``apart`` (from the last energy, in standard errors of the
        difference of two independent means) and ``mixed`` (``apart`` stays below 3 from here on).

    Raises:
        TypeError, ValueError: for a number out of range.
    """
    require_count("sweeps", sweeps)
    table: Table = []
    for graph in GRAPHS:
        advance(graph)
        generator = torch.Generator().manual_seed(seed)
        model = graph_potts(graph, generator, sites=sites, colours=colours)
        couplings, field = model.couplings.float(), model.field[0].float()
        state, done, rows = None, 0, []
        for total in [2**k for k in range(sweeps.bit_length())]:
            state = solvers.gibbs(
                couplings,
                field,
                site=model.site,
                sweeps=total - done,
                chains=chains,
                generator=generator,
                start=state,
            )
            done = total
            energies = energy_per_site(model, state)
            error = energies.std().item() / chains**0.5
            row = {"graph": graph, "sweeps": total, "energy": energies.mean().item()}
            rows.append(row | {"standard_error": error})
        table.extend(_with_distances(rows))
    return table


def energy_per_site(model: SpinModel, spins: Tensor) -> Tensor:
    """``-(1/2 sum_ij S_i^T J_ij S_j + sum_i x_i.S_i) / N`` of spins (chains, N, d), (chains,) float64."""
    flat, (_, sites, dim) = spins.double().flatten(1), spins.shape
    matrix = model.couplings.transpose(1, 2).reshape(sites * dim, sites * dim)
    return -((flat @ matrix / 2 + model.field[0].flatten()) * flat).sum(1) / sites


def _with_distances(rows: Table) -> Table:
    """The rows with how far each energy is from the last, and whether the chains have mixed."""
    last = rows[-1]
    for row in rows:
        spread = (row["standard_error"] ** 2 + last["standard_error"] ** 2) ** 0.5
        row["apart"] = abs(row["energy"] - last["energy"]) / max(spread, 1e-300)
    mixed = True
    for row in reversed(rows):
        mixed = mixed and row["apart"] < ALLOWED
        row["mixed"] = mixed
    return rows
