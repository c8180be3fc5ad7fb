"""Where do repeated steps of bare self-attention end, and do they restore a noisy image on the way?

    python examples/attractors.py        # half a minute

The step is ``z_i <- R n((1 - gamma) F_i(z) + gamma z_i)``: each token moves to its normalised field. Left:
with couplings learned from digits, the overlap of a noisy digit with the original rises in the first step and
then falls, below what folding the noise without a model gives. Right: with random couplings, nearly all
states come to rest; where J_ij = J_ji^T all do.
"""

import math
from typing import Any

import matplotlib.pyplot as plt
import torch
from bare_attention import EXACT, Images, decode, noisy, open_images, points, show
from runner import Result, Table, columns, draw_band, quantiles, run
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils import parametrize

import solvers
from implicit_attn.energies import BareAttention
from implicit_attn.models.images import join_patches
from implicit_attn.updates import BareAttentionStep

NOISE, GAMMA = 0.8, 0.5  # of the angles; share of the old state in a step of the digits
IMAGES = 300  # of each part that are followed
SHOWN = (0, 1, 2, 5, 10, 20, 50, 100)  # steps of the pictures
RETURNED = 1e-9  # a state this near to an earlier one (relative, float64) has come back
LONGEST_CYCLE = 60
POLISHED = 16  # fixed points of one model whose residual is measured


@torch.no_grad()
def denoise(setup: Images, model: Any, steps: int) -> tuple[Table, Table, Tensor]:
    """Return overlaps along the steps, overlaps without couplings, and the states of one test image."""
    circles, table, bases = setup.train.shape[2] // 2, Table(), Table()
    step = BareAttentionStep(model, gamma=GAMMA, radius=circles**0.5, circles=circles)
    shown = torch.empty(0)
    for part, images in (("train", setup.train[:IMAGES]), ("test", setup.test[:IMAGES])):

        def overlap(z: Tensor, images: Tensor = images) -> float:
            return (z * images).sum(-1).mean().item() / circles

        generator = torch.Generator().manual_seed(setup.seed + 2)
        states = [noisy(images, NOISE, generator)]
        with parametrize.cached():
            for _ in range(steps):
                states.append(step(states[-1]))
        for number, z in enumerate(states):
            row = {"part": part, "step": number, "overlap": overlap(z)}
            table.append(row | {"energy": model(z).mean().item()})
        if part == "test":
            shown = torch.stack([states[n][0] for n in SHOWN if n <= steps] + [images[0]])
            # Without couplings: the angles folded into the half circle of the values, and the mean image.
            folded = points(math.pi * decode(states[0]).clamp(0.0, 1.0))
            mean = normalize(setup.train.mean(0).unflatten(-1, (-1, 2)), dim=-1).flatten(-2)
            bases.append({"predictor": "noise folded, no model", "overlap": overlap(folded)})
            bases.append({"predictor": "mean direction of each pixel", "overlap": overlap(mean)})
    return table, bases, shown


@torch.no_grad()
def random_run(symmetric: bool, gamma: float, steps: int, seed: int) -> dict[str, Tensor]:
    """Follow 16 random states of 5 unit vectors in 3 dimensions, couplings N(0, 1), float64.

    "periods" (16,) are the least p with ``z(T) = z(T - p)``: 1 is a fixed point, 0 no return. "changes" are
    ``|z(t) - z(t-1)| / |z(t)|`` (steps, 16), and "residual" those of some fixed points after a solve.
    """
    torch.manual_seed(seed)
    energy = BareAttention(5, 3, symmetric_sites=symmetric).double()
    torch.nn.init.normal_(energy.couplings.free)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(16, 5, 3, generator=generator, dtype=torch.float64)
    step = BareAttentionStep(energy, gamma=gamma)
    tail, changes = [normalize(start, dim=-1)], []
    with parametrize.cached():
        for _ in range(steps):
            state = step(tail[-1])
            change = (state - tail[-1]).flatten(1).norm(dim=1)
            changes.append(change / state.flatten(1).norm(dim=1))
            tail = [*tail[-LONGEST_CYCLE:], state]
    last, periods = tail[-1].flatten(1), torch.zeros(len(start), dtype=torch.long)
    for period in range(len(tail) - 1, 0, -1):
        gap = (last - tail[-1 - period].flatten(1)).norm(dim=1)
        periods[gap <= RETURNED * last.norm(dim=1)] = period
    fixed, residual = tail[-1][periods == 1][:POLISHED], torch.empty(0)
    if len(fixed):
        residual = solvers.fixed_point(
            step, fixed, solver=solvers.Forward(), tolerance=solvers.Tolerance(1e-14),
            max_steps=200, adjoint=None, on_failure="ignore",
        ).residual  # fmt: skip
    return {"periods": periods, "changes": torch.stack(changes, 1), "residual": residual}


def attractors(
    images: int = 0,  # number of training and of test images (0: all)
    steps: int = 0,  # training steps (0: default for the digits)
    moves: int = 100,  # steps starting from noisy digits
    random_moves: int = 500,  # steps with random couplings
    models: int = 8,  # number of random couplings of each kind
    seed: int = 0,  # random seed of images, couplings and batches
) -> Result:
    setup = open_images("digits", images, steps, seed)
    denoising, bases, states = denoise(setup, setup.fit(EXACT), moves)
    ends, changes = Table(), Table()
    for symmetric in (True, False):
        for gamma in (0.0, 0.5):
            runs = [random_run(symmetric, gamma, random_moves, seed + k) for k in range(models)]
            found = {key: torch.cat([each[key] for each in runs]) for key in runs[0]}
            known = {"couplings": "symmetric" if symmetric else "free", "gamma": gamma}
            row = known | {"fixed point": (found["periods"] == 1).double().mean().item()}
            row |= {"cycle": (found["periods"] > 1).double().mean().item()}
            ends.append(row | {"largest_residual": found["residual"].max().item()})
            for step, each in enumerate(found["changes"].T, start=1):
                if step % 20 == 0 or step < 20 or step == random_moves:
                    changes.append(known | {"step": step} | quantiles("residual", each))

    figure = plt.figure(figsize=(13, 6.5), dpi=90)
    figure.suptitle("Bare self-attention as a network of attractors")
    above, below = figure.subfigures(2, 1, height_ratios=(3, 1), squeeze=False).flat
    left, right = above.subplots(1, 2)
    for part, style in (("train", "--"), ("test", "-")):
        line = columns(denoising, "step", "overlap", part=part)
        left.plot(*line, style, color="C0", label=f"{part} images")
    for row, style in zip(bases, (":", "-."), strict=True):
        left.axhline(row["overlap"], color="C4", linestyle=style, label=row["predictor"])
    left.set_xscale("symlog", linthresh=5)
    left.set(
        xlabel="step", ylabel="overlap (1: equal)", title="noisy digits: overlap with the original"
    )
    left.legend(fontsize=8)
    kinds = dict.fromkeys((row["couplings"], row["gamma"]) for row in changes)
    for number, (couplings, gamma) in enumerate(kinds):
        rows = [row for row in changes if (row["couplings"], row["gamma"]) == (couplings, gamma)]
        rows = [
            {k: max(v, 1e-17) if k.startswith("res") else v for k, v in row.items()} for row in rows
        ]
        look: dict[str, Any] = {"color": f"C{number}", "label": f"{couplings} J, γ = {gamma:g}"}
        draw_band(right, rows, "step", "residual", alpha=0.1, **look)
    right.axhline(1e-13, color="C4", linewidth=0.8)
    place: dict[str, Any] = {"ha": "right", "transform": right.get_yaxis_transform()}
    right.text(0.98, 1.6e-13, "1e-13: at rest", color="C4", fontsize=8, **place)
    right.set(yscale="log", xlabel="step", ylabel="|z(t) - z(t-1)| / |z|")
    right.set_title("random couplings: change in a step, median and 10 to 90 %")
    right.legend(fontsize=8)
    titles = [*(f"step {n}" for n in SHOWN if n <= moves), "original"]
    panels = below.subplots(1, len(titles))
    for axes, z, title in zip(panels, states, titles, strict=True):
        show(axes, join_patches(decode(z[None]), setup.sizes.patch)[0])
        axes.set_title(title, fontsize=8)
    tables = {"denoising": denoising, "baselines": bases, "residuals": changes, "ends": ends}
    return tables, figure


if __name__ == "__main__":
    run(attractors)
