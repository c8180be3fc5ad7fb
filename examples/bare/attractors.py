"""Bare self-attention as a network of attractors: what its step does to corrupted images, and how runs end.

The normalised step ``z_i <- R n((1 - gamma) F_i(z) + gamma z_i)``, pixels on their circles, starts from noisy
images or from images with masked patches; and from random states, with random couplings.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from images import EXACT, SIZES, SOURCE, Data, Images, Kind, open_images, show
from matplotlib.patches import Rectangle
from torch import Tensor
from torch.nn.utils import parametrize

import solvers
from implicit_attn.energies import BareAttention
from implicit_attn.updates import BareAttentionStep

RETURNED = 1e-9  # a state this near to an earlier one (relative, float64) has come back
LONGEST_CYCLE, LARGEST_SAMPLE = 60, 16  # of fixed points of one model whose derivative is measured
MEAN_STEPS = 10  # of the iterated conditional mean, which stands still after about five
COLOURS = ("C0", "C1", "C2", "C3")
Table = list[dict[str, Any]]


class Run(NamedTuple):
    """The states of a set of images along the steps."""

    originals: Tensor  # (M, N, 2p)
    states: list[Tensor]
    free: Tensor  # (M, N) bool, the patches that move


@torch.no_grad()
def move(setup: Images, model: Any, originals: Tensor, noise: float, masked: int, how: Any) -> Run:
    """From ``masked`` patches at random angles, the others right and held; or, of 0, from noisy ones."""
    generator, codec = torch.Generator().manual_seed(setup.seed + 2), setup.codec
    gamma, steps = how
    step = BareAttentionStep(model, gamma=gamma, radius=codec.values**0.5, circles=codec.values)
    free = torch.ones(originals.shape[:2], dtype=torch.bool)
    if masked:
        free = torch.rand(free.shape, generator=generator).argsort(1) < masked
        start = torch.where(free.unsqueeze(-1), codec.random(len(originals), generator), originals)
    else:
        start = codec.noisy(originals, noise, generator)
    states = [start]
    with parametrize.cached():
        for _ in range(steps):
            states.append(torch.where(free.unsqueeze(-1), step(states[-1]), start))
    return Run(originals, states, free)


@torch.no_grad()
def measure(setup: Images, model: Any, found: Run, steps: Any) -> Table:
    """Overlap ``z_i.z_i* / p`` with the originals, pixel error, energy, and relative change."""
    codec, free, table = setup.codec, found.free, []
    wanted = codec.decode_patches(found.originals)[free]
    for step in steps:
        state, before = found.states[step], found.states[max(step - 1, 0)]
        overlap = (state * found.originals).sum(-1)[free].mean().item() / codec.values
        error = (codec.decode_patches(state)[free] - wanted).square().mean().sqrt().item()
        row = {"step": step, "overlap": overlap, "error": error}
        row["energy"] = model(state).mean().item()
        change = (state - before).flatten(1).norm(dim=1) / state.flatten(1).norm(dim=1)
        table.append(row | {"residual": change.median().item() if step else float("nan")})
    return table


def transients(setup: Images, models: dict[str, Any], noise: float, masked: int, how: Any):
    """A row for each model, training and test images and step; and the runs on test images."""
    last, shown, step = how[1], list(range(min(how[1], 10) + 1)), 10
    while step < last:  # every step at first, then fewer
        step = min(last, step + max(2, step // 4))
        shown.append(step)
    table: Table = []
    runs: dict[str, Run] = {}
    for name, model in models.items():
        for part, images in (("train", setup.train), ("test", setup.test)):
            runs[name] = move(setup, model, images[: SIZES[setup.data].runs], noise, masked, how)
            rows = measure(setup, model, runs[name], shown)
            table += [{"model": name, "part": part} | row for row in rows]
    return table, runs


def baselines(setup: Images, noisy: Run) -> Table:
    """Overlaps that need no couplings: angles folded into the half circle of the values, and means."""
    codec = setup.codec
    mean = setup.train.mean(0).unflatten(-1, (-1, 2))
    mean = (mean / mean.norm(dim=-1, keepdim=True).clamp_min(1e-12)).flatten(-2)
    folded = codec.encode(codec.decode(noisy.states[0]).clamp(0.0, 1.0))
    guesses = {"noise folded, no model": folded, "mean direction of each pixel": mean}
    return [
        {"predictor": name, "overlap": (z * noisy.originals).sum(-1).mean().item() / codec.values}
        for name, z in guesses.items()
    ]


class Followed(NamedTuple):
    """A run of the step, without the states that nobody asks for."""

    step: BareAttentionStep
    tail: list[Tensor]  # the last states, at most one more than LONGEST_CYCLE
    changes: Tensor  # |z(t) - z(t-1)| / |z(t)|, (steps, B)
    rises: Tensor  # whether E rose in a step, (steps, B) bool


@torch.no_grad()
def follow(step: BareAttentionStep, start: Tensor, steps: int) -> Followed:
    """``steps`` steps from ``start`` (B, N, D)."""
    tail, changes, rises = [start], [], []
    with parametrize.cached():
        energy = step.energy(start)
        for _ in range(steps):
            state = step(tail[-1])
            change = (state - tail[-1]).flatten(1).norm(dim=1)
            changes.append(change / state.flatten(1).norm(dim=1))
            before, energy = energy, step.energy(state)
            rises.append(energy > before + 1e-12 * before.abs())
            tail = [*tail[-LONGEST_CYCLE:], state]
    return Followed(step, tail, torch.stack(changes), torch.stack(rises))


def periods(states: list[Tensor]) -> Tensor:
    """The least p with ``z(T) = z(T - p)``, (B,); 1 is a fixed point, 0 no return."""
    last = states[-1].flatten(1)
    found = torch.zeros(len(last), dtype=torch.long)
    for period in range(min(LONGEST_CYCLE, len(states) - 1), 0, -1):
        gap = (last - states[-1 - period].flatten(1)).norm(dim=1)
        found[gap <= RETURNED * last.norm(dim=1)] = period
    return found


@torch.no_grad()
def endings(runs: list[Followed]) -> dict[str, float]:
    """Shares of the ends; residual and spectral radius at some fixed ends, polished; share of rises."""
    periodic = torch.cat([periods(each.tail) for each in runs])
    ends = {"fixed point": periodic == 1, "cycle": periodic > 1, "not settled": periodic == 0}
    row = {name: some.double().mean().item() for name, some in ends.items()}
    found: dict[str, list[Tensor]] = {"residual": [], "radius": []}
    for each in runs:
        fixed = each.tail[-1][periods(each.tail) == 1][:LARGEST_SAMPLE]
        if len(fixed):
            solution = solvers.fixed_point(
                each.step, fixed, solver=solvers.Forward(), tolerance=solvers.Tolerance(1e-14),
                max_steps=200, adjoint=None, on_failure="ignore",
            )  # fmt: skip
            found["residual"].append(solution.residual)
            found["radius"].append(solvers.spectral_radius(each.step, solution.value))
    for name, measured in found.items():
        values = torch.cat(measured) if measured else torch.tensor([float("nan")])
        row[name], row[f"largest_{name}"] = values.median().item(), values.max().item()
    return row | {"rises": torch.cat([each.rises for each in runs], 1).double().mean().item()}


def random_run(symmetric: bool, gamma: float, steps: int, seed: int) -> Followed:
    """16 random states of 5 unit vectors in 3 dimensions, couplings N(0, 1), float64."""
    torch.manual_seed(seed)
    energy = BareAttention(5, 3, symmetric_sites=symmetric).double()
    torch.nn.init.normal_(energy.couplings.free)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(16, 5, 3, generator=generator, dtype=torch.float64)
    start = start / start.norm(dim=-1, keepdim=True)
    return follow(BareAttentionStep(energy, gamma=gamma), start, steps)


def residuals(runs: list[Followed]) -> Table:
    """The relative change at some steps: median of the runs, 10 and 90 % quantiles."""
    changes = torch.cat([each.changes for each in runs], 1)
    shares, last = torch.tensor([0.1, 0.5, 0.9], dtype=changes.dtype), len(changes)
    table: Table = []
    for step in sorted({*range(1, min(last, 20) + 1), *range(20, last + 1, 20), last}):
        low, middle, high = changes[step - 1].quantile(shares).tolist()
        known = {"step": step, "residual": middle}
        table.append(known | {"residual_10": low, "residual_90": high})
    return table


def attractors(
    data: Data = "digits",
    images: int = 0,
    steps: int = 0,
    features: int = 0,
    kind: Kind = "principal",
    noise: float = 0.8,
    masked: int = 4,
    gamma: float = 0.5,
    moves: int = 100,
    random_moves: int = 500,
    models: int = 8,
    ends: int = 40,
    seed: int = 0,
):
    """Where the step of bare self-attention takes corrupted images, and random states.

    Args:
        data: digits (2 x 2 patches) or cifar10 (8 x 8).
        images: training and test images each; 0: by the data.
        steps: of training; 0: by the data.
        features: rows of F; 0: by the data.
        kind: of F, directions of the tokens or random; none: no F.
        noise: standard deviation of the noise on the angles.
        masked: patches masked at once.
        gamma: share of the old state in a step.
        moves: steps from corrupted images.
        random_moves: steps of the runs whose end is classified.
        models: random couplings of each kind.
        ends: images whose end is classified.
        seed: of images, couplings and batches.
    """
    if gamma > 1:
        raise ValueError(f"gamma must be at most 1, got {gamma}")
    setup = open_images(data, images, steps, features, kind, seed)
    codec, how = setup.codec, (gamma, moves)
    if masked > codec.sites:
        raise ValueError(f"masked must be at most the {codec.sites} patches, got {masked}")
    trained = {name: setup.fit(name) for name in (EXACT, SOURCE.format(8))}
    denoising, noisy = transients(setup, trained, noise, 0, how)
    filling, filled = transients(setup, trained, noise, masked, how)
    states, free = filled[EXACT].states[:1], filled[EXACT].free.unsqueeze(-1)
    with torch.no_grad():
        for _ in range(min(MEAN_STEPS, moves)):
            mean = trained[EXACT].conditionals(states[-1]).mean()
            states.append(torch.where(free, mean, states[-1]))
    rows = measure(setup, trained[EXACT], filled[EXACT]._replace(states=states), range(len(states)))
    filling += [{"model": "conditional mean, exact", "part": "test"} | row for row in rows]

    table, changes = [], []
    for symmetric in (True, False):
        for share in (0.0, 0.5):
            name = {"couplings": "symmetric" if symmetric else "free", "gamma": share}
            runs = [random_run(symmetric, share, random_moves, seed + k) for k in range(models)]
            table.append(name | endings(runs))
            changes += [name | row for row in residuals(runs)]
    for name, model in trained.items():
        double, generator = copy.deepcopy(model).double(), torch.Generator().manual_seed(seed + 2)
        start, radius = codec.noisy(setup.test[:ends].double(), noise, generator), codec.values**0.5
        step = BareAttentionStep(double, gamma=gamma, radius=radius, circles=codec.values)
        row = endings([follow(step, start, random_moves)])
        table.append({"couplings": name, "gamma": gamma} | row)
    tables = {"denoising": denoising, "baselines": baselines(setup, noisy[EXACT])}
    tables |= {"masked": filling, "residuals": changes, "ends": table}
    runs = {"denoising": noisy[EXACT], "masked\npatches": filled[EXACT]}
    return tables, draw(setup, tables, runs)


def draw(setup: Images, tables: dict[str, Table], runs: dict[str, Run]):
    """Overlap and error along the steps, residuals and ends, and states on the way."""
    figure = plt.figure(figsize=(13, 10), dpi=90)
    figure.suptitle("Bare self-attention as a network of attractors")
    above, below = figure.subfigures(2, 1, height_ratios=(2.1, 1), squeeze=False).flat
    panels = above.subplots(2, 3)
    (overlap, energy, filling), (change, share, radius) = panels
    draw_lines(overlap, tables["denoising"], "overlap")
    for row, style in zip(tables["baselines"], (":", "-."), strict=True):
        name = f"{row['predictor']} (test)"
        overlap.axhline(row["overlap"], color="C4", linestyle=style, linewidth=1.3, label=name)
    low, high = overlap.get_ylim()
    overlap.set_ylim(low - 0.75 * (high - low), high)
    overlap.set(title="Denoising: overlap with the original", ylabel="overlap (1: equal)")
    overlap.legend(fontsize=7, loc="lower right")
    draw_lines(energy, tables["denoising"], "energy")
    energy.set(title="Denoising: energy E of an image", ylabel="mean of the images")
    draw_lines(filling, tables["masked"], "error")
    middle = setup.codec.decode_patches(setup.train.mean(0))
    error = (middle - setup.test_values).square().mean().sqrt().item()
    filling.axhline(error, color="C4", linestyle=":", label="mean of the site")
    filling.set(title="Masked patches, the others held", ylabel="error of their pixels")
    filling.legend(fontsize=7, loc="center right", bbox_to_anchor=(1.0, 0.41))
    draw_residuals(change, tables["residuals"])
    draw_ends(share, radius, tables["ends"])
    draw_states(below, setup, runs)
    return figure


def draw_lines(axes: Any, table: Table, key: str) -> None:
    """Column ``key`` against the step, solid for test images, dashed for training images."""
    for name, colour in zip(dict.fromkeys(row["model"] for row in table), COLOURS, strict=False):
        for part, style in (("train", "--"), ("test", "-")):
            rows = [row for row in table if (row["model"], row["part"]) == (name, part)]
            if rows:
                steps, values = [row["step"] for row in rows], [row[key] for row in rows]
                label = f"{name} ({part})"
                axes.plot(steps, values, style, color=colour, label=label, linewidth=1.3)
    axes.set_xscale("symlog", linthresh=5)
    axes.set_xlabel("step")


def draw_residuals(axes: Any, table: Table) -> None:
    """The relative change of the state against the step."""
    kinds = dict.fromkeys((row["couplings"], row["gamma"]) for row in table)
    for (couplings, gamma), colour in zip(kinds, COLOURS, strict=True):
        rows = [row for row in table if (row["couplings"], row["gamma"]) == (couplings, gamma)]
        steps, label = [row["step"] for row in rows], f"{couplings} J, γ = {gamma:g}"
        axes.plot(steps, [max(row["residual"], 1e-17) for row in rows], color=colour, label=label)
        high = [max(row["residual_90"], 1e-17) for row in rows]
        axes.plot(steps, high, ":", color=colour, linewidth=1)
    axes.axhline(1e-13, color="C4", linewidth=0.8)
    place: dict[str, Any] = {"ha": "right", "transform": axes.get_yaxis_transform()}
    axes.text(0.98, 1.6e-13, "1e-13: at rest", color="C4", fontsize=7, **place)
    axes.set(yscale="log", xlabel="step", ylabel="|z(t) - z(t-1)| / |z|")
    axes.set_title("Random couplings, N = 5, d = 3: residual")
    axes.legend(fontsize=7, title="median; dotted: 90 %", title_fontsize=7)


def draw_ends(axes: Any, radii: Any, table: Table) -> None:
    """How the runs end, and the spectral radius at the fixed points; a row for each kind."""
    names = [f"{row['couplings']},\nγ = {row['gamma']:g}" for row in table]
    left, places = len(table) * [0.0], range(len(table))
    for key, colour in (("fixed point", "C0"), ("cycle", "C1"), ("not settled", "C3")):
        values = [row[key] for row in table]
        axes.barh(names, values, left=left, color=colour, label=key)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.tick_params(axis="y", labelsize=7)
    text = f"share of the runs (not settled: no return within {LONGEST_CYCLE} steps)"
    axes.set(title="How the runs end", xlabel=text, xlim=(0, 1))
    radii.barh(places, [row["radius"] for row in table], color="C0", label="median")
    largest = [row["largest_radius"] for row in table]
    radii.plot(largest, places, "k|", markersize=12, label="largest")
    radii.axvline(1, color="C3", linestyle="--", linewidth=1)
    radii.set(title="Spectral radius at the fixed points", xlabel="below 1: stable")
    radii.set(yticks=[], xlim=(0, 1.05))
    for each, columns in ((axes, 3), (radii, 2)):
        each.set_ylim(len(table) + 0.2, -0.6)  # from top to bottom, the legend below
        each.legend(fontsize=7, loc="lower center", ncols=columns)


def draw_states(figure: Any, setup: Images, runs: dict[str, Run]) -> None:
    """For one test image a task: the states along the way, the original last."""
    last = min(len(run.states) for run in runs.values()) - 1
    steps = [step for step in (0, 1, 2, 5, 10, 20, 50, 100) if step < last] + [last]
    text = f"States on the way, test images, {EXACT} (red: the masked patches)"
    figure.suptitle(text, fontsize=10)
    panels = figure.subplots(len(runs), len(steps) + 2, squeeze=False)
    for image, (line, (name, run)) in enumerate(zip(panels, runs.items(), strict=True)):
        line[0].axis("off")
        line[0].text(1, 0.5, name, ha="right", va="center", fontsize=9)
        states = [run.states[step][image] for step in steps]
        titles = [*(f"step {step}" for step in steps), "original"]
        for axes, z, title in zip(line[1:], [*states, run.originals[image]], titles, strict=True):
            show(axes, setup.codec.decode(z[None])[0])
            if title != "original" and not run.free[image].all():
                frame(axes, setup, run.free[image])
            if image == 0:
                axes.set_title(title, fontsize=8)


def frame(axes: Any, setup: Images, free: Tensor) -> None:
    """Red lines around the patches in ``free`` (N,)."""
    size, columns = setup.codec.patch, setup.codec.width // setup.codec.patch
    for place in free.nonzero().flatten().tolist():
        top, left = size * (place // columns) - 0.5, size * (place % columns) - 0.5
        axes.add_patch(Rectangle((left, top), size, size, fill=False, color="C3"))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    from runner import run

    run(attractors)
