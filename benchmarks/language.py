"""Language models: attention as steps of descent, and one block at its fixed point.

    python benchmarks/language.py forms [--size tiny small] [--rows plain momentum] [--figure FILE]
    python benchmarks/language.py equilibrium [--rows drawn] [--seeds 3] [--steps 1200]

Every run is ``implicit-attn train language-model`` with the words of a row, in a folder of its own; a command
that was interrupted goes on where it stopped, ``--no-train`` only shows what is done. Runs with the same seed
see the same windows of the text in the same order and begin with the same weights, but for
"newton-taylor-no-value", which has fewer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measure import table
from benchmarks.trainings import WEIGHTS, Run, history, perform
from implicit_attn.checkpoint import read_progress
from implicit_attn.data import load_text
from implicit_attn.models import EquilibriumLanguageModel, load_model
from implicit_attn.training import NextToken

PLAIN = "plain"
# A pilot, and the model of the table; both see every window of the text at random.
SIZES: dict[str, tuple[str, ...]] = {
    "tiny": ("dim=64", "heads=4", "layers=4", "length=64", "--batch", "16", "--steps", "600",
             "dropout=0", "windows=1024"),
    "small": ("dim=96", "heads=4", "layers=6", "length=128", "--batch", "32", "--steps", "1200",
              "dropout=0.1", "windows=256"),
}  # fmt: skip
MOMENTUM, NESTEROV = ("--descent", "momentum"), ("--descent", "nesterov")
# What differs from plain attention, the seeds of the two sizes, and the look of the curve.
ROWS: dict[str, tuple[tuple[str, ...], tuple[int, int], str, str]] = {
    PLAIN: ((), (3, 2), "black", "-"),
    "momentum": (MOMENTUM, (3, 2), "#b5323c", "-"),
    "nesterov": (NESTEROV, (3, 2), "#3a8f5c", "-"),
    "light-newton-taylor": (("--attention", "light-newton-taylor"), (3, 1), "#2f6db3", "-"),
    "newton-taylor": (("--attention", "newton-taylor"), (3, 1), "#d9772b", "-"),
    "newton-taylor-no-value": (("--attention", "newton-taylor-no-value"), (3, 0), "#8c6bb1", "-"),
    "plain, rate 6e-3": (("--rate", "6e-3"), (1, 1), "black", "--"),
    "plain, rate 1e-2": (("--rate", "1e-2"), (1, 1), "black", ":"),
    "momentum, rate 6e-3": ((*MOMENTUM, "--rate", "6e-3"), (1, 1), "#b5323c", "--"),
    "momentum, rate 1e-2": ((*MOMENTUM, "--rate", "1e-2"), (1, 0), "#b5323c", ":"),
    "plain, gain": (("--descent", "gain"), (1, 1), "#777777", "--"),
    "nesterov, scaled": ((*NESTEROV, "lookahead=scaled"), (1, 1), "#3a8f5c", "--"),
    "nesterov, queries": ((*NESTEROV, "lookahead=queries"), (1, 1), "#3a8f5c", ":"),
    "newton-taylor, order 0": (("--attention", "newton-taylor", "order=0"), (1, 1), "#d9772b", "--"),
}  # fmt: skip
# Ren, Ouyang, Tang, Liu, arXiv 2511.00907, figure 1: what is claimed, the lower row, the higher one.
CLAIMS = (
    ("(a) momentum below plain, all along", "momentum", PLAIN),
    ("(a) Nesterov below plain, all along", "nesterov", PLAIN),
    ("(b) Nesterov below momentum (lowest of all)", "nesterov", "momentum"),
    ("(c) plain below first-order Newton", PLAIN, "newton-taylor"),
    ("(d) first-order Newton below that without values", "newton-taylor", "newton-taylor-no-value"),
    ("(e) light form about equal to plain (within 0.01)", "light-newton-taylor", PLAIN),
)
Curve = dict[int, float]  # validation loss by the number of steps done
Losses = dict[Run, Curve]


def plan(
    text: str, sizes: tuple[str, ...], rows: tuple[str, ...], seeds: int | None, steps: int | None
) -> list[Run]:
    """The runs, in the order of their importance: first seeds before second ones."""
    found: list[Run] = []
    for place, size in enumerate(SIZES):
        for row in (rows or ROWS) if size in sizes else ():
            own, numbers, *_ = ROWS[row]
            words = ["language-model", "--text", text, *SIZES[size], *own]
            if steps is not None:
                words += ["--steps", str(steps), f"evaluate_every={max(1, steps // 12)}"]
            number = seeds or (max(1, numbers[place]) if rows else numbers[place])
            found += [Run(row, seed, tuple(words), size) for seed in range(number)]
    return sorted(found, key=lambda run: (run.size != sizes[0], run.seed))


def forms(
    text: str = "austen",
    size: tuple[str, ...] = ("tiny", "small"),
    rows: tuple[str, ...] = (),
    seeds: int | None = None,
    steps: int | None = None,
    figure: Path | None = None,
    workers: int = 2,
    out: Path = Path("runs/language-forms"),
    train: bool = True,
) -> None:
    """Attention as steps of descent: the forms and their controls, 137 minutes of one core.

    Args:
        text: name or path.
        rows: of the table; default: all.
        seeds: in place of each row's own number.
        steps: in place of the size's own.
        figure: draw the curves to this file (PNG).
        workers: processes at a time.
        out: folder of the runs.
        train: what is missing.
    """
    done = perform(plan(text, size, rows, seeds, steps), out, workers, train)
    losses = {run: read_losses(run.folder(out)) for run in done}
    for each in dict.fromkeys(run.size for run in done):
        print(table(lines(losses, each, out)), *verdicts(losses, each), sep="\n", end="\n\n")
    if figure:
        draw(figure, losses)


def read_losses(folder: Path) -> Curve:
    settings = read_progress(folder / "checkpoint.safetensors")["settings"]
    every = settings["steps"] // settings["epochs"]
    return {every * int(row["epoch"]): row["validation_loss"] for row in history(folder)}


def parameters(folder: Path) -> int:
    return sum(each.numel() for each in load_model(folder / WEIGHTS)[0].parameters())


def of_row(losses: Losses, size: str, row: str) -> dict[int, Curve]:
    """The curves of a row by seed."""
    return {run.seed: each for run, each in losses.items() if (run.size, run.row) == (size, row)}


def differences(losses: Losses, size: str, row: str, other: str) -> dict[int, Curve]:
    """By seed and step, how far ``row`` is above ``other`` with the same seed and the same data."""
    these, those = of_row(losses, size, row), of_row(losses, size, other)
    return {
        seed: {step: value - those[seed][step] for step, value in these[seed].items()}
        for seed in sorted(these.keys() & those.keys())
    }


def last(curve: Curve) -> float:
    return curve[max(curve)]


def lines(losses: Losses, size: str, out: Path) -> list[dict[str, str]]:
    """The table of a size."""
    found: list[dict[str, str]] = []
    for name in ROWS:
        curves = of_row(losses, size, name)
        if not curves:
            continue
        ends = [last(curves[seed]) for seed in sorted(curves)]
        apart = [last(each) for each in differences(losses, size, name, PLAIN).values()]
        run = next(run for run in losses if (run.size, run.row) == (size, name))
        row = {"size": size, "form": name, "parameters": f"{parameters(run.folder(out)):,}"}
        row |= {"loss": f"{mean(ends):.4f}", "seeds": " ".join(f"{end:.4f}" for end in ends)}
        told = "" if name == PLAIN else " ".join(f"{each:+.4f}" for each in apart)
        found.append(row | {"above plain": told})
    return found


def verdicts(losses: Losses, size: str) -> list[str]:
    """A sentence a claim: seen, not seen or not measured, with the differences at the end."""
    found = []
    for words, low, high in CLAIMS:
        apart = differences(losses, size, low, high)
        ends = [last(curve) for curve in apart.values()]
        points = [value for curve in apart.values() for value in curve.values()]
        below = sum(value < 0 for value in points)
        limit = 0.01 if "equal" in words else 0.0
        seen = "seen" if all((abs(e) if limit else e) <= limit for e in ends) else "not seen"
        if "all along" in words and seen == "seen" and below < len(points):
            seen = "seen at the end"
        told = " ".join(f"{end:+.4f}" for end in ends)
        told = f"{seen} ({told}; below at {below} of {len(points)} evaluations)"
        found.append(f"{words}: {told if ends else 'not measured'}")
    return found


def draw(path: Path, losses: Losses) -> None:
    """A column a size: the losses, and below them the differences from plain attention."""
    mpl.use("Agg")
    sizes = [size for size in SIZES if of_row(losses, size, PLAIN)]
    shape = (max(8.0, 6.6 * len(sizes)), 8.4)
    figure, panels = plt.subplots(2, len(sizes), figsize=shape, squeeze=False, layout="constrained")
    figure.suptitle("Attention as steps of descent: losses of language models")
    handles: dict[str, Any] = {}
    for place, size in enumerate(sizes):
        tops = []
        for name, (_, _, color, dashes) in ROWS.items():
            curves = list(of_row(losses, size, name).values())
            apart = list(differences(losses, size, name, PLAIN).values())
            for axes, drawn in ((panels[0][place], curves), (panels[1][place], apart)):
                if not drawn or (drawn is apart and name == PLAIN):
                    continue
                steps = list(drawn[0])
                middle = [mean(curve[step] for curve in drawn) for step in steps]
                (handles[name],) = axes.plot(steps, middle, dashes, color=color, linewidth=1.4)
                if drawn is curves:
                    tops.append(middle[min(1, len(middle) - 1)])
                for each in drawn if drawn is apart and len(apart) > 1 else ():
                    axes.plot(steps, list(each.values()), color=color, linewidth=0.6, alpha=0.6)
        numbers = dict(word.split("=") for word in SIZES[size] if "=" in word)
        title = "{}: d {dim}, {layers} blocks, {length} characters".format(size, **numbers)
        panels[0][place].set(title=title, xlabel="training step", ylim=(None, max(tops) + 0.05))
        panels[0][place].set_ylabel("validation loss (nats a character)")
        below = panels[1][place]
        below.axhline(0.0, color="black", linewidth=0.8)
        below.set_yscale("symlog", linthresh=0.05)
        below.set(xlabel="training step", ylabel="loss above plain attention, same seed (nats)")
        below.set_title("differences (thin: single seeds; linear within 0.05)", fontsize=11)
    names = [name for name in ROWS if name in handles]
    figure.legend(
        [handles[name] for name in names], names, loc="outside lower center", ncols=len(sizes) + 2
    )
    figure.savefig(path, dpi=90)
    plt.close(figure)


NUMBERS = (12, 24, 48)  # evaluations of the block after which it is judged
DRAWN = ("--model", "equilibrium")
RATES = ("3e-3", "6e-3", "1e-2", "2e-2")
BLOCKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # words, learning rates
    "one block": (("layers=1",), ("1e-2", "2e-2")),
    "one pass": ((*DRAWN, "iterations=1"), RATES),
    "three blocks": (("layers=3", "initial=torch"), RATES),
    "six blocks": (("layers=6", "initial=torch"), RATES),
    "drawn": (DRAWN, RATES),
    "fixed": ((*DRAWN, "iterations=12"), ("1e-2",)),
    "drawn, last 4": ((*DRAWN, "gradient=4"), ("1e-2",)),
    "drawn, implicit": ((*DRAWN, "gradient=implicit"), ("1e-2",)),
}


def equilibrium(
    text: str = "austen",
    rows: tuple[str, ...] = tuple(BLOCKS),
    seeds: int = 3,
    steps: int = 1200,
    workers: int = 2,
    out: Path = Path("runs/language-equilibrium"),
    train: bool = True,
) -> None:
    """One block at its fixed point, beside stacks of blocks and its own forms.

    Width 64, 4 heads, windows of 64 characters, each row at several learning rates. "drawn" is the default
    of ``implicit-attn train language-model --model equilibrium``: iterations drawn from 4 to 20, gradients
    through all; judged after 12, 24 and 48 by the loss on held-out text. One block has as many parameters.

    Args:
        text: name or path.
        rows: of the table.
        workers: processes at a time.
        out: folder of the runs.
        train: what is missing.
    """
    words = ("language-model", "--text", text, "dim=64", "length=64", "dropout=0")
    words = (*words, "betas=[0.9,0.95]", "--batch", "16", "--steps", str(steps))
    runs = [
        Run(f"{row}, {rate}", seed, (*words, *BLOCKS[row][0], "--rate", rate), "tiny")
        for seed in range(seeds)
        for row in rows
        for rate in BLOCKS[row][1]
    ]
    done = perform(runs, out, workers, train)
    lines = []
    for name in dict.fromkeys(run.row for run in done):
        found = [measured(run.folder(out), text) for run in done if run.row == name]
        row: dict[str, Any] = {"model": name, "parameters": f"{found[0]['parameters']:,.0f}"}
        row["mean"] = f"{mean(each['12'] for each in found):.4f}"
        for key, form in (("12", ".4f"), ("24", ".4f"), ("48", ".4f"), ("residual", ".0e")):
            row[key] = " ".join(f"{each[key]:{form}}" for each in found if key in each)
        lines.append(row | {"seconds": f"{mean(each['seconds'] for each in found):.0f}"})
    print(table(lines))


@torch.no_grad()
def measured(folder: Path, text: str) -> dict[str, float]:
    """What a trained model gives after 12, 24 and 48 evaluations; a stack has one number."""
    model, progress = load_model(folder / WEIGHTS)
    settings = progress["settings"]
    task = NextToken(load_text(text), settings["model"]["length"], settings["windows"])
    found: dict[str, float] = {"parameters": parameters(folder)}
    trained = settings["model"].get("iterations")
    solved = isinstance(model, EquilibriumLanguageModel) and trained != 1
    for number in NUMBERS if solved else NUMBERS[:1]:
        sums = task.evaluate(model, iterations=number if solved else None)
        total, terms = sums["validation_loss"]
        found[str(number)] = total / terms
    if isinstance(model, EquilibriumLanguageModel) and solved:
        tokens = model.tokens(next(task.tests(0, 1))[0])
        z, after = (model.mix(tokens, number) for number in (NUMBERS[-1], NUMBERS[-1] + 1))
        found["residual"] = ((after - z).norm() / after.norm()).item()
    return found | {"seconds": sum(row["seconds"] for row in history(folder))}


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"forms": forms, "equilibrium": equilibrium})
