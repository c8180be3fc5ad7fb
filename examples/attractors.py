"""Bare self-attention as a network of attractors: its steps on corrupted images and its limit sets.

The normalised step ``z_i <- R n((1 - gamma) F_i(z) + gamma z_i)``, with pixels as points on circles, starts
from noisy digits, from digits with masked patches, and, with random couplings, from random states.
"""

import copy
import math
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from bare_attention import EXACT, SOURCE, Images, decode, noisy, open_images, points, show
from matplotlib.patches import Rectangle
from runner import Result, Table, columns, quantiles, run
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils import parametrize

import solvers
from implicit_attn.energies import BareAttention
from implicit_attn.models.images import join_patches
from implicit_attn.updates import BareAttentionStep

NOISE, MASKED, GAMMA = 0.8, 4, 0.5  # of the angles; patches; share of the old state in a step
RUNS = 300  # images of each part whose states are kept
RETURNED = 1e-9  # a state this near to an earlier one (relative, float64) has come back
LONGEST_CYCLE, LARGEST_SAMPLE = 60, 16  # of fixed points of one model whose derivative is measured
MEAN_STEPS = 10  # of the iterated conditional mean, which stands still after about five
COLOURS = ("C0", "C1", "C2", "C3")


class Run(NamedTuple):
    """The states of a set of images along the steps."""

    originals: Tensor  # (M, N, 2p)
    states: list[Tensor]
    free: Tensor  # (M, N) bool, the patches that move


def step_of(model: BareAttention, tokens: Tensor) -> BareAttentionStep:
    circles = tokens.shape[2] // 2
    return BareAttentionStep(model, gamma=GAMMA, radius=circles**0.5, circles=circles)


@torch.no_grad()
def move(model: Any, originals: Tensor, masked: int, steps: int, seed: int) -> Run:
    """From ``masked`` patches at random angles, the others right and held; or, of 0, from noisy ones."""
    generator, step = torch.Generator().manual_seed(seed), step_of(model, originals)
    free = torch.ones(originals.shape[:2], dtype=torch.bool)
    if masked:
        free = torch.rand(free.shape, generator=generator).argsort(1) < masked
        angles = torch.rand(*free.shape, originals.shape[2] // 2, generator=generator)
        start = torch.where(free.unsqueeze(-1), points(2 * math.pi * angles), originals)
    else:
        start = noisy(originals, NOISE, generator)
    states = [start]
    with parametrize.cached():
        for _ in range(steps):
            states.append(torch.where(free.unsqueeze(-1), step(states[-1]), start))
    return Run(originals, states, free)


@torch.no_grad()
def measure(by: Any, found: Run, steps: Any, **known: str) -> Table:
    """Overlap ``z_i.z_i* / p`` with the originals, pixel error, and energy."""
    free, table = found.free, Table()
    wanted = decode(found.originals)[free]
    for step in steps:
        state = found.states[step]
        overlap = (state * found.originals).sum(-1)[free].mean().item() / (state.shape[2] // 2)
        error = (decode(state)[free] - wanted).square().mean().sqrt().item()
        row = {**known, "step": step, "overlap": overlap, "error": error}
        table.append(row | {"energy": by(state).mean().item()})
    return table


def transients(setup: Images, models: dict[str, Any], masked: int, steps: int):
    """A row for each model, training and test images and step; and the runs on test images."""
    shown, step = list(range(min(steps, 10) + 1)), 10
    while step < steps:  # every step at first, then fewer
        step = min(steps, step + max(2, step // 4))
        shown.append(step)
    table: Table = []
    runs: dict[str, Run] = {}
    for name, model in models.items():
        for part, images in (("train", setup.train), ("test", setup.test)):
            runs[name] = move(model, images[:RUNS], masked, steps, setup.seed + 2)
            table += measure(model, runs[name], shown, model=name, part=part)
    return table, runs


class Followed(NamedTuple):
    """A run of the step, without the states that nobody asks for."""

    step: BareAttentionStep
    end: Tensor  # (B, N, D)
    periods: Tensor  # (B,): the least p with z(T) = z(T - p); 1 is a fixed point, 0 no return
    changes: Tensor  # |z(t) - z(t-1)| / |z(t)|, (steps, B)


@torch.no_grad()
def follow(step: BareAttentionStep, start: Tensor, steps: int) -> Followed:
    """``steps`` steps from ``start`` (B, N, D)."""
    tail, changes = [start], []
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
    return Followed(step, tail[-1], periods, torch.stack(changes))


@torch.no_grad()
def endings(runs: list[Followed]) -> dict[str, float]:
    """Shares of the ends; residual and spectral radius at some fixed ends, polished."""
    periods = torch.cat([each.periods for each in runs])
    ends = {"fixed point": periods == 1, "cycle": periods > 1, "not settled": periods == 0}
    row = {name: some.double().mean().item() for name, some in ends.items()}
    found: dict[str, list[Tensor]] = {"residual": [], "radius": []}
    for each in runs:
        fixed = each.end[each.periods == 1][:LARGEST_SAMPLE]
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
    return row


def random_run(symmetric: bool, gamma: float, steps: int, seed: int) -> Followed:
    """16 random states of 5 unit vectors in 3 dimensions, couplings N(0, 1), float64."""
    torch.manual_seed(seed)
    energy = BareAttention(5, 3, symmetric_sites=symmetric).double()
    torch.nn.init.normal_(energy.couplings.free)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(16, 5, 3, generator=generator, dtype=torch.float64)
    return follow(BareAttentionStep(energy, gamma=gamma), normalize(start, dim=-1), steps)


def attractors(
    images: int = 0,  # number of training and of test images (0: all)
    steps: int = 0,  # training steps (0: default for the digits)
    moves: int = 100,  # steps starting from corrupted images
    random_moves: int = 500,  # steps of the runs whose limit set is classified
    models: int = 8,  # number of random couplings of each kind
    ends: int = 40,  # number of images whose limit set is classified
    seed: int = 0,  # random seed of images, couplings and batches
) -> Result:
    setup = open_images("digits", images, steps, "principal", seed)
    trained = {name: setup.fit(name) for name in (EXACT, SOURCE.format(8))}
    denoising, denoised = transients(setup, trained, 0, moves)
    filling, filled = transients(setup, trained, MASKED, moves)
    states, free = filled[EXACT].states[:1], filled[EXACT].free.unsqueeze(-1)
    with torch.no_grad():
        for _ in range(min(MEAN_STEPS, moves)):
            mean = trained[EXACT].conditionals(states[-1]).mean()
            states.append(torch.where(free, mean, states[-1]))
    means = filled[EXACT]._replace(states=states)
    known = {"model": "conditional mean, exact", "part": "test"}
    filling += measure(trained[EXACT], means, range(len(states)), **known)

    # Overlaps that need no couplings: angles folded into the half circle of the values, and means.
    start, circles = denoised[EXACT].states[0], setup.train.shape[2] // 2
    mean = normalize(setup.train.mean(0).unflatten(-1, (-1, 2)), dim=-1).flatten(-2)
    folded = points(math.pi * decode(start).clamp(0.0, 1.0))
    guesses = {"noise folded, no model": folded, "mean direction of each pixel": mean}
    bases: Table = []
    for name, guess in guesses.items():
        overlap = (guess * denoised[EXACT].originals).sum(-1).mean().item() / circles
        bases.append({"predictor": name, "overlap": overlap})

    table, changes = Table(), Table()
    last = random_moves
    shown = sorted({*range(1, min(last, 20) + 1), *range(20, last + 1, 20), last})
    for symmetric in (True, False):
        for gamma in (0.0, 0.5):
            name = {"couplings": "symmetric" if symmetric else "free", "gamma": gamma}
            runs = [random_run(symmetric, gamma, random_moves, seed + k) for k in range(models)]
            table.append(name | endings(runs))
            moved = torch.cat([each.changes for each in runs], 1)
            for step in shown:
                changes.append(name | {"step": step} | quantiles("residual", moved[step - 1]))
    for name, model in trained.items():
        generator = torch.Generator().manual_seed(seed + 2)
        start = noisy(setup.test[:ends].double(), NOISE, generator)
        step = step_of(copy.deepcopy(model).double(), start)
        row = endings([follow(step, start, random_moves)])
        table.append({"couplings": name, "gamma": GAMMA} | row)
    tables = {"denoising": denoising, "baselines": bases, "masked": filling}
    tables |= {"residuals": changes, "ends": table}

    figure = plt.figure(figsize=(13, 10), dpi=90)
    figure.suptitle("Bare self-attention as a network of attractors")
    above, below = figure.subfigures(2, 1, height_ratios=(2.1, 1), squeeze=False).flat
    (left, middle, right), (change, share, radius) = above.subplots(2, 3)
    draw_lines(left, denoising, "overlap")
    for row, style in zip(bases, (":", "-."), strict=True):
        name = f"{row['predictor']} (test)"
        left.axhline(row["overlap"], color="C4", linestyle=style, linewidth=1.3, label=name)
    low, high = left.get_ylim()
    left.set_ylim(low - 0.75 * (high - low), high)
    left.set(title="Denoising: overlap with the original", ylabel="overlap (1: equal)")
    left.legend(fontsize=7, loc="lower right")
    draw_lines(middle, denoising, "energy")
    middle.set(title="Denoising: energy E of an image", ylabel="mean of the images")
    draw_lines(right, filling, "error")
    error = (decode(setup.train.mean(0)) - decode(setup.test)).square().mean().sqrt().item()
    right.axhline(error, color="C4", linestyle=":", label="mean of the site")
    right.set(title="Masked patches, the others held", ylabel="error of their pixels")
    right.legend(fontsize=7, loc="center right", bbox_to_anchor=(1.0, 0.41))
    kinds = dict.fromkeys((row["couplings"], row["gamma"]) for row in changes)
    for (couplings, gamma), colour in zip(kinds, COLOURS, strict=True):
        known = {"couplings": couplings, "gamma": gamma}
        numbers, *lines = columns(changes, "step", "residual", "residual_90", **known)
        middles, high = ([max(value, 1e-17) for value in line] for line in lines)
        change.plot(numbers, middles, color=colour, label=f"{couplings} J, γ = {gamma:g}")
        change.plot(numbers, high, ":", color=colour, linewidth=1)
    change.axhline(1e-13, color="C4", linewidth=0.8)
    place: dict[str, Any] = {"ha": "right", "transform": change.get_yaxis_transform()}
    change.text(0.98, 1.6e-13, "1e-13: at rest", color="C4", fontsize=7, **place)
    change.set(yscale="log", xlabel="step", ylabel="|z(t) - z(t-1)| / |z|")
    change.set_title("Random couplings, N = 5, d = 3: residual")
    change.legend(fontsize=7, title="median; dotted: 90 %", title_fontsize=7)
    names = [f"{row['couplings']},\nγ = {row['gamma']:g}" for row in table]
    lefts, places = len(table) * [0.0], range(len(table))
    for key, colour in (("fixed point", "C0"), ("cycle", "C1"), ("not settled", "C3")):
        (values,) = columns(table, key)
        share.barh(names, values, left=lefts, color=colour, label=key)
        lefts = [start + value for start, value in zip(lefts, values, strict=True)]
    share.tick_params(axis="y", labelsize=7)
    text = f"share of the runs (not settled: no return within {LONGEST_CYCLE} steps)"
    share.set(title="How the runs end", xlabel=text, xlim=(0, 1))
    medians, largest = columns(table, "radius", "largest_radius")
    radius.barh(places, medians, color="C0", label="median")
    radius.plot(largest, places, "k|", markersize=12, label="largest")
    radius.axvline(1, color="C3", linestyle="--", linewidth=1)
    radius.set(title="Spectral radius at the fixed points", xlabel="below 1: stable")
    radius.set(yticks=[], xlim=(0, 1.05))
    for each, number in ((share, 3), (radius, 2)):
        each.set_ylim(len(table) + 0.2, -0.6)  # from top to bottom, the legend below
        each.legend(fontsize=7, loc="lower center", ncols=number)
    runs = {"denoising": denoised[EXACT], "masked\npatches": filled[EXACT]}
    draw_states(below, setup.sizes.patch, runs)
    return tables, figure


def draw_lines(axes: Any, table: Table, key: str) -> None:
    """Column ``key`` against the step, solid for test images, dashed for training images."""
    for name, colour in zip(dict.fromkeys(row["model"] for row in table), COLOURS, strict=False):
        for part, style in (("train", "--"), ("test", "-")):
            line = columns(table, "step", key, model=name, part=part)
            if line[0]:
                axes.plot(*line, style, color=colour, label=f"{name} ({part})", linewidth=1.3)
    axes.set_xscale("symlog", linthresh=5)
    axes.set_xlabel("step")


def draw_states(figure: Any, size: int, runs: dict[str, Run]) -> None:
    """For one test image a task: the states along the way, the original last; red: what is masked."""
    last = min(len(each.states) for each in runs.values()) - 1
    steps = [step for step in (0, 1, 2, 5, 10, 20, 50, 100) if step < last] + [last]
    text = f"States on the way, test images, {EXACT} (red: the masked patches)"
    figure.suptitle(text, fontsize=10)
    panels = figure.subplots(len(runs), len(steps) + 2, squeeze=False)
    for image, (line, (name, each)) in enumerate(zip(panels, runs.items(), strict=True)):
        line[0].axis("off")
        line[0].text(1, 0.5, name, ha="right", va="center", fontsize=9)
        states = [each.states[step][image] for step in steps]
        titles = [*(f"step {step}" for step in steps), "original"]
        masked = [] if each.free[image].all() else each.free[image].nonzero().flatten().tolist()
        for axes, z, title in zip(line[1:], [*states, each.originals[image]], titles, strict=True):
            show(axes, join_patches(decode(z[None]), size)[0])
            for place in masked if title != "original" else ():
                row, column = divmod(place, math.isqrt(len(z)))
                corner = size * column - 0.5, size * row - 0.5
                axes.add_patch(Rectangle(corner, size, size, fill=False, color="C3"))
            if image == 0:
                axes.set_title(title, fontsize=8)


if __name__ == "__main__":
    run(attractors)
