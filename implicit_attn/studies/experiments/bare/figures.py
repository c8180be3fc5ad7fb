"""Figures of bare self-attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from implicit_attn.energies import BareAttention
from implicit_attn.studies.experiments.bare.ends import CYCLE, FIXED, LONGEST_CYCLE, OTHER
from implicit_attn.studies.experiments.bare.pipeline import EXACT, Comparison, Setup
from implicit_attn.studies.experiments.bare.transients import Run
from implicit_attn.studies.figures.canvas import BLUE, GREEN, GREY, ORANGE, RED, drawing
from implicit_attn.studies.tables import Table

SHOWN = 6  # images
STRONGEST = 6  # blocks of J
COLOURS = (BLUE, ORANGE, GREEN, RED)


def comparison_figure(path: str | Path, title: str, setup: Setup, found: Comparison) -> None:
    """Errors of all predictors, what they make of a few images, and the learned couplings."""
    with drawing(path, title, (13, 9), dpi=90) as figure:
        above, below = figure.subfigures(2, 1, height_ratios=(1.25, 0.8))
        left, right = above.subfigures(1, 2, width_ratios=(1, 1.15))
        _draw_errors(left.subplots(), found.table)
        _draw_predictions(right, setup, found)
        left, right = below.subfigures(1, 2, width_ratios=(1.2, 1))
        _draw_norms(left, found)
        model = found.models[EXACT]
        assert isinstance(model, BareAttention)
        _draw_blocks(right, setup, model)


def _draw_errors(axes: Any, table: Table) -> None:
    rows = table[::-1]
    names = [row["predictor"] for row in rows]
    colours = [BLUE if "bare" in name else GREY for name in names]
    bars = axes.barh(names, [row["error"] for row in rows], color=colours)
    axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=9)
    reference = next(row["error"] for row in table if "mean" in row["predictor"])
    axes.axvline(reference, color=RED, linestyle="--", linewidth=1)
    axes.set(
        title="A test patch from all others",
        xlabel="root mean square error of the pixels (dashed: the mean)",
        xlim=(0, 1.2 * max(row["error"] for row in rows)),
    )


def _draw_predictions(figure: Any, setup: Setup, found: Comparison) -> None:
    """Each image composed of its patches, every one predicted from the original others."""
    rows = {"original": setup.test_values}
    rows |= {name: found.predictions[name] for name in found.predictions if "≤ 2" not in name}
    figure.suptitle("Test images, each patch predicted from the true others", fontsize=10)
    panels = figure.subplots(len(rows), SHOWN + 1, width_ratios=[2.6] + [1] * SHOWN, squeeze=False)
    for line, (name, values) in zip(panels, rows.items(), strict=True):
        line[0].axis("off")
        line[0].text(1, 0.5, name.replace(", ", ",\n"), ha="right", va="center", fontsize=8)
        for axes in line[1:]:
            axes.axis("off")
        for axes, image in zip(line[1:], setup.codec.images(values[:SHOWN]), strict=False):
            _show(axes, image)


def _draw_norms(figure: Any, found: Comparison) -> None:
    figure.suptitle(
        "Strength of the couplings between patches, |J_ij|, each on a scale of its own", fontsize=10
    )
    chosen = {name: model for name, model in found.models.items() if "≤ 2" not in name}
    panels = figure.subplots(1, len(chosen))
    for axes, (name, model) in zip(panels, chosen.items(), strict=True):
        image = axes.imshow(model.couplings.site_norms().detach().numpy(), cmap="magma")
        axes.set_title(name.replace(", ", ",\n"), fontsize=8)
        axes.set(xlabel="neighbour j", ylabel="patch i")
        figure.colorbar(image, ax=axes, shrink=0.6)


def _draw_blocks(figure: Any, setup: Setup, model: BareAttention) -> None:
    """The strongest blocks of J, and rows of F where there is one."""
    weight, F = model.couplings.weight.detach(), model.features
    count = STRONGEST if F is None else STRONGEST // 2
    figure.suptitle(
        f"Strongest blocks J_ij, {EXACT}" + ("" if F is None else "; below, rows of F"),
        fontsize=10,
    )
    panels = figure.subplots(2, 3).ravel()
    order = weight.flatten(2).norm(dim=2).flatten().argsort(descending=True)[:count]
    for axes, index in zip(panels, order.tolist(), strict=False):
        i, j = divmod(index, len(weight))
        block = weight[i, j]
        top = block.abs().max().item()
        axes.imshow(block.numpy(), cmap="RdBu_r", vmin=-top, vmax=top)
        axes.set_title(f"J of patches {i}, {j}; ±{top:.1f}", fontsize=8)
        axes.set(xticks=[], yticks=[])
    if F is None:
        return
    size = setup.codec.patch
    for number, axes in enumerate(panels[count:]):
        row = F[number].unflatten(0, (-1, 2))[:, 0]  # what multiplies the cosines
        picture = row.view(setup.codec.channels, size, size)
        _show(axes, 0.5 + 0.5 * picture / picture.abs().max())
        axes.set_title(f"F, row {number}, its cosines", fontsize=8)
        axes.set(xticks=[], yticks=[])


def _show(axes: Any, image: Tensor) -> None:
    """An image (C, H, W) in [0, 1]."""
    if len(image) == 1:
        axes.imshow(image[0].numpy(), cmap="gray_r", vmin=0, vmax=1)
    else:
        axes.imshow(image.permute(1, 2, 0).numpy())


def attractors_figure(
    path: str | Path,
    title: str,
    setup: Setup,
    tables: dict[str, Table],
    runs: dict[str, Run],
    mean_error: float,
) -> None:
    """Overlap and error along the steps, residuals and ends, and states on the way."""
    with drawing(path, title, (13, 10), dpi=90) as figure:
        above, below = figure.subfigures(2, 1, height_ratios=(2.1, 1))
        panels = above.subplots(2, 3)
        _draw_lines(panels[0, 0], tables["denoising"], "overlap")
        _draw_baselines(panels[0, 0], tables["baselines"])
        panels[0, 0].set(title="Denoising: overlap with the original", ylabel="overlap (1: equal)")
        panels[0, 0].legend(fontsize=7, loc="lower right")
        _draw_lines(panels[0, 1], tables["denoising"], "energy")
        panels[0, 1].set(title="Denoising: energy E of an image", ylabel="mean of the images")
        _draw_lines(panels[0, 2], tables["masked"], "error")
        panels[0, 2].axhline(mean_error, color=GREY, linestyle=":", label="mean of the site")
        panels[0, 2].set(title="Masked patches, the others held", ylabel="error of their pixels")
        panels[0, 2].legend(fontsize=7, loc="center right", bbox_to_anchor=(1.0, 0.41))
        _draw_residuals(panels[1, 0], tables["residuals"])
        _draw_ends(panels[1, 1], tables["ends"])
        _draw_radii(panels[1, 2], tables["ends"])
        _draw_states(below, setup, runs)


def _draw_baselines(axes: Any, table: Table) -> None:
    """Overlaps that need no couplings, and room for the legend below."""
    for row, style in zip(table, (":", "-."), strict=True):
        name = f"{row['predictor']} (test)"
        axes.axhline(row["overlap"], color=GREY, linestyle=style, linewidth=1.3, label=name)
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.75 * (high - low), high)


def _draw_lines(axes: Any, table: Table, key: str) -> None:
    """Column ``key`` against the step, solid for test images, dashed for training images."""
    names = list(dict.fromkeys(row["model"] for row in table))
    for name, colour in zip(names, COLOURS, strict=False):
        for part, style in (("train", "--"), ("test", "-")):
            rows = [row for row in table if row["model"] == name and row["part"] == part]
            if rows:
                steps = [row["step"] for row in rows]
                values = [row[key] for row in rows]
                label = f"{name} ({part})"
                axes.plot(steps, values, style, color=colour, label=label, linewidth=1.3)
    axes.set_xscale("symlog", linthresh=5)
    axes.set_xlabel("step")


def _kinds(table: Table) -> list[tuple[str, float]]:
    return list(dict.fromkeys((row["couplings"], row["gamma"]) for row in table))


def _draw_residuals(axes: Any, table: Table) -> None:
    for (couplings, gamma), colour in zip(_kinds(table), COLOURS, strict=False):
        rows = [row for row in table if (row["couplings"], row["gamma"]) == (couplings, gamma)]
        steps = [row["step"] for row in rows]
        floor = [max(row["residual"], 1e-17) for row in rows]
        axes.plot(steps, floor, color=colour, label=f"{couplings} J, γ = {gamma:g}")
        high = [max(row["residual_90"], 1e-17) for row in rows]
        axes.plot(steps, high, ":", color=colour, linewidth=1)
    axes.axhline(1e-13, color=GREY, linewidth=0.8)
    axes.text(
        *(0.98, 1.6e-13, "1e-13: at rest"),
        color=GREY,
        fontsize=7,
        ha="right",
        transform=axes.get_yaxis_transform(),
    )
    axes.set_yscale("log")
    axes.set(
        title="Random couplings, N = 5, d = 3: residual",
        xlabel="step",
        ylabel="|z(t) - z(t-1)| / |z|",
    )
    axes.legend(fontsize=7, title="median; dotted: 90 %", title_fontsize=7)


def _names(table: Table) -> list[str]:
    return [f"{row['couplings']},\nγ = {row['gamma']:g}" for row in table]


def _draw_ends(axes: Any, table: Table) -> None:
    names, left = _names(table), len(table) * [0.0]
    for key, colour in ((FIXED, BLUE), (CYCLE, ORANGE), (OTHER, RED)):
        values = [row[key] for row in table]
        axes.barh(names, values, left=left, color=colour, label=key)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.tick_params(axis="y", labelsize=7)
    axes.set(
        title="How the runs end",
        xlabel=f"share of the runs (not settled: no return within {LONGEST_CYCLE} steps)",
        xlim=(0, 1),
    )
    _leave_room(axes, len(table), columns=3)


def _draw_radii(axes: Any, table: Table) -> None:
    places = range(len(table))
    axes.barh(places, [row["radius"] for row in table], color=BLUE, label="median")
    axes.plot(
        [row["largest_radius"] for row in table], places, "k|", markersize=12, label="largest"
    )
    axes.axvline(1, color=RED, linestyle="--", linewidth=1)
    axes.set(
        title="Spectral radius at the fixed points",
        xlabel="below 1: stable",
        yticks=[],
        xlim=(0, 1.05),
    )
    _leave_room(axes, len(table), columns=2)


def _leave_room(axes: Any, rows: int, columns: int) -> None:
    """Horizontal bars from top to bottom, the legend below them."""
    axes.set_ylim(rows + 0.2, -0.6)
    axes.legend(fontsize=7, loc="lower center", ncols=columns)


def _draw_states(figure: Any, setup: Setup, runs: dict[str, Run]) -> None:
    """For one test image a task: the states along the way, the original last."""
    last = min(len(run.states) for run in runs.values()) - 1
    steps = [step for step in (0, 1, 2, 5, 10, 20, 50, 100) if step < last] + [last]
    figure.suptitle(
        f"States on the way, test images, {EXACT} (red: the masked patches)", fontsize=10
    )
    panels = figure.subplots(len(runs), len(steps) + 2, squeeze=False)
    for number, (line, (name, run)) in enumerate(zip(panels, runs.items(), strict=True)):
        line[0].axis("off")
        line[0].text(1, 0.5, name, ha="right", va="center", fontsize=9)
        image = number % len(run.originals)
        shown = [*(run.states[step][image] for step in steps), run.originals[image]]
        for axes, state, step in zip(line[1:], shown, [*steps, None], strict=True):
            _show(axes, setup.codec.decode(state[None])[0])
            axes.set(xticks=[], yticks=[])
            if step is not None and not run.free[image].all():
                _frame(axes, setup, run.free[image])
            if number == 0:
                axes.set_title("original" if step is None else f"step {step}", fontsize=8)


def _frame(axes: Any, setup: Setup, free: Tensor) -> None:
    """Red lines around the patches in ``free`` (N,)."""
    size, columns = setup.codec.patch, setup.codec.width // setup.codec.patch
    for place in free.nonzero().flatten().tolist():
        top, left = size * (place // columns) - 0.5, size * (place % columns) - 0.5
        across = [left, left + size, left + size, left, left]
        axes.plot(across, [top, top, top + size, top + size, top], color=RED, linewidth=1)
