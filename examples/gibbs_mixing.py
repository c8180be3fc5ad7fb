"""How many sweeps of Gibbs sampling does a Potts model on a graph need?

    python examples/gibbs_mixing.py        # half a minute

All chains start from independent uniform colours. The energy per site, ``-1/2 sum_ij S_i^T J_ij S_j / N``,
decreases until they have mixed, that is, until it stays within 3 standard errors of that of the longest run:
one sweep on a ring, about 16 on a tree, and 16 to 64 on random graphs.
"""

import matplotlib.pyplot as plt
import torch
from couplings import graph_potts
from runner import Result, Table, run

import solvers

GRAPHS = {"er-kron": "C3", "er-general": "C1", "tree": "C2", "ring4": "C0"}
ALLOWED, FLOOR = 3.0, 0.1  # standard errors: between mixed chains, and drawn in place of less


def energies(kind: str, sites: int, colours: int, chains: int, sweeps: int, seed: int) -> Table:
    """A row for 1, 2, 4, ... sweeps: the mean energy per site with its standard error."""
    generator = torch.Generator().manual_seed(seed)
    model = graph_potts(kind, generator, sites=sites, colours=colours)
    couplings, field = model.couplings.float(), model.field[0].float()
    matrix = model.couplings.transpose(1, 2).reshape(sites * colours, sites * colours)
    state, done, rows = None, 0, []
    for total in [2**k for k in range(sweeps.bit_length())]:
        state = solvers.gibbs(
            couplings, field, site=model.site, sweeps=total - done, chains=chains,
            generator=generator, start=state,
        )  # fmt: skip
        done, flat = total, state.double().flatten(1)
        energy = -((flat @ matrix / 2 + model.field[0].flatten()) * flat).sum(1) / sites
        error = energy.std().item() / chains**0.5
        row = {"graph": kind, "sweeps": total, "energy": energy.mean().item()}
        rows.append(row | {"standard_error": error})
    last = rows[-1]
    for row in rows:
        spread = (row["standard_error"] ** 2 + last["standard_error"] ** 2) ** 0.5
        row["apart"] = abs(row["energy"] - last["energy"]) / max(spread, 1e-300)
    for number, row in enumerate(rows):
        row["mixed"] = all(after["apart"] < ALLOWED for after in rows[number:])
    return rows


def gibbs_mixing(
    sites: int = 20,  # number of sites of the models
    colours: int = 10,  # number of colours of a site
    chains: int = 4000,  # number of independent chains
    sweeps: int = 512,  # largest number of sweeps
    seed: int = 0,  # random seed of models and chains
) -> Result:
    figure, axes = plt.subplots(figsize=(7.5, 4.8))
    figure.suptitle("Gibbs sampling of Potts models on graphs: energy against sweeps")
    table = []
    for kind, color in GRAPHS.items():
        rows = energies(kind, sites, colours, chains, sweeps, seed)
        table += rows
        first = next((row["sweeps"] for row in rows[:-1] if row["mixed"]), None)
        when = "not mixed" if first is None else f"mixed after {first}"
        apart = [max(row["apart"], FLOOR) for row in rows[:-1]]
        steps = [row["sweeps"] for row in rows[:-1]]
        axes.plot(steps, apart, "o-", color=color, label=f"{kind}: {when}", markersize=4)
    axes.axhspan(FLOOR / 2, ALLOWED, color="C4", alpha=0.15, linewidth=0)
    axes.text(0.02, 0.03, "noise: chains have mixed", color="C4", transform=axes.transAxes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(bottom=FLOOR / 2)
    axes.set_xlabel("sweeps from independent colours")
    axes.set_ylabel("mean energy: distance from the last,\nin standard errors")
    axes.legend(frameon=False)
    return {"energy": table}, figure


if __name__ == "__main__":
    run(gibbs_mixing)
