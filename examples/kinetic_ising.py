"""How well do mean-field closures follow Ising spins in time, around the critical temperature?

    python examples/kinetic_ising.py        # half a minute

Couplings J_ij ~ N(1/N, 0.01/N) are random and asymmetric, fields x_i ~ U(-1/2, 1/2), and all spins start up.
Left: at the critical temperature, TAP and the Gaussian closure are nearer to the simulation than naive mean
field. Right: the mean at the end rises where a formula predicts it.
"""

import math
from typing import Any

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, draw_band, quantiles, run
from scipy.optimize import root_scalar
from torch import Tensor

from solvers import IsingSite, glauber, kinetic_trajectory

SITE, SPREAD = IsingSite(), 0.1  # standard deviation of the couplings, times sqrt N
CLOSURES = {"naive": "naive mean field", "tap": "TAP", "gaussian": "Gaussian closure"}
STYLES: dict[str, Any] = {
    "naive": {"color": "C1"},
    "tap": {"color": "C2"},
    "gaussian": {"color": "C0", "linestyle": "--"},  # it nearly agrees with TAP
}


def draw_model(spins: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Fields (1, N, 1) and couplings (N, N) at beta = 1."""
    field = torch.rand(1, spins, 1, generator=generator) - 0.5
    noise = torch.randn(spins, spins, generator=generator)
    return field, 1 / spins + SPREAD / math.sqrt(spins) * noise


def critical_beta() -> float:
    """beta at which means of zero become unstable: ``beta <1 - tanh^2(beta (u + SPREAD g))> = 1``.

    The average is over u, uniform between -1/2 and 1/2, and g, standard normal.
    """
    uniform = (torch.arange(1001, dtype=torch.float64) + 0.5) / 1001 - 0.5
    normal = torch.linspace(-8, 8, 97, dtype=torch.float64)
    weight, field = torch.softmax(-normal.square() / 2, 0), uniform[:, None] + SPREAD * normal

    def excess(beta: float) -> float:
        return beta * float(((1 - torch.tanh(beta * field) ** 2) @ weight).mean()) - 1

    return root_scalar(excess, bracket=(0.5, 2), xtol=1e-14).root


def kinetic_ising(
    spins: int = 512,  # number of spins N
    steps: int = 128,  # number of time steps
    chains: int = 1500,  # number of simulated chains at each of three temperatures
    betas: int = 20,  # number of inverse temperatures between 0.25 and 2 beta_c in the sweep
    draws: int = 12,  # number of random models at each temperature of the sweep
    sweep_spins: int = 256,  # number of spins of the models in the sweep
    seed: int = 1,  # random seed of models and simulations
) -> Result:
    generator, critical = torch.Generator().manual_seed(seed), critical_beta()
    field, couplings = draw_model(spins, generator)
    up, shown, errors = torch.ones_like(field), {}, Table()
    for factor in (0.5, 1, 2):  # beta, in units of the critical one
        x, J = factor * critical * field, factor * critical * couplings
        means = {
            name: kinetic_trajectory(up, x, J, steps=steps, site=SITE, closure=name)[:, 0, :, 0]
            for name in CLOSURES
        }
        copies = up.expand(chains, -1, -1).contiguous()
        simulated = glauber(copies, x[0], J, steps=steps, site=SITE, generator=generator).means
        end = simulated[-1, :, 0]
        noise = ((1 - end.square()) / chains).mean().sqrt().item()
        for name, each in means.items():
            error = (each[-1] - end).square().mean().sqrt().item()
            row = {"factor": factor, "closure": name, "mean": each[-1].mean().item()}
            errors.append(row | {"simulated": end.mean().item(), "error": error, "noise": noise})
        shown = means | {"simulated": simulated[..., 0]} if factor == 1 else shown

    # The transition: other models, many temperatures, no simulation.
    generator.manual_seed(seed)  # the same models whatever was simulated
    beta = critical * torch.linspace(0.25, 2, betas)
    scale, sweep, turns = beta.view(-1, 1, 1), Table(), Table()
    models = [draw_model(sweep_spins, generator) for _ in range(draws)]
    for name in ("naive", "gaussian"):
        ends = []
        for x, J in models:
            x, J = scale * x, scale * J
            options: Any = {"site": SITE, "steps": steps - 1, "closure": name}
            last = kinetic_trajectory(torch.ones_like(x), x, J, **options)[-1]
            ends.append(last.mean((1, 2)).abs())
        rows = [
            {"closure": name, "beta": b} | quantiles("mean", each)
            for b, each in zip(beta.tolist(), torch.stack(ends, 1), strict=True)
        ]
        sweep += rows
        steepest = max(  # where the mean rises fastest
            zip(rows, rows[1:], rows[2:], strict=False),
            key=lambda r: (r[2]["mean"] - r[0]["mean"]) / (r[2]["beta"] - r[0]["beta"]),
        )[1]
        row = {"closure": name, "turns_at": steepest["beta"] / critical}
        turns.append(row | {"critical_beta": critical})

    figure, (mean, transition) = plt.subplots(1, 2, figsize=(11, 4.3))
    figure.suptitle("Ising spins in time with random asymmetric couplings")
    for name, label in (CLOSURES | {"simulated": "simulation"}).items():
        mean.plot(shown[name].mean(1), label=label, **STYLES.get(name, {"color": "black"}))
    mean.set(title="mean over all spins at the critical β", xlabel="time step", ylabel="mean")
    rows = [row for row in errors if row["factor"] == 1]
    notes = [f"{CLOSURES[row['closure']]}: {row['error']:.3f}" for row in rows]
    notes = ["r.m.s. error of the sites at the end", *notes, f"noise: {rows[0]['noise']:.3f}"]
    look: dict[str, Any] = {"transform": mean.transAxes, "fontsize": 9, "ha": "right", "va": "top"}
    mean.text(0.97, 0.62, "\n".join(notes), **look)
    mean.legend(fontsize=9, loc="upper right")
    for name in ("naive", "gaussian"):
        rows = [row | {"t": row["beta"] / critical} for row in sweep if row["closure"] == name]
        draw_band(transition, rows, "t", "mean", label=CLOSURES[name], **STYLES[name])
    transition.axvline(1, color="C3", linewidth=1, label=f"formula: $β_c$ = {critical:.4f}")
    title = f"the transition: closures only,\n{draws} other models of {sweep_spins} spins"
    transition.set(xlabel="β / $β_c$", title=title)
    transition.set_ylabel("|mean| at the end, median and middle 80 %")
    transition.legend(fontsize=9, loc="lower right")
    return {"errors": errors, "turns": turns, "sweep": sweep}, figure


if __name__ == "__main__":
    run(kinetic_ising)
