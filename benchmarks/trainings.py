"""Tables of trained models: images, hidden patches, attention as steps of descent, one block of language.

    python benchmarks/trainings.py cifar10 [--rows hyperset transformer] [--epochs 3] [--logistic]
    python benchmarks/trainings.py masked [--data digits] [--rows hyperset transformer] [--seeds 3]
    python benchmarks/trainings.py forms [--size tiny small] [--rows plain momentum] [--figure FILE]
    python benchmarks/trainings.py equilibrium [--size small] [--rows drawn] [--rates 1e-2] [--seeds 3]

Every run is a script ``examples/train_*.py`` with the words of a row, a process in a folder of its own,
several at a time; a command that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from train_language import NextCharacter

from benchmarks.measure import table
from implicit_attn import studies
from implicit_attn.data import ImageData, load, load_text
from implicit_attn.models import EquilibriumLanguageModel, load_model, read_settings

WEIGHTS, IMAGES, LANGUAGE = "weights.safetensors", "train_images.py", "train_language.py"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of all runs; kept with their words

# --- runs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A training: a row of a table, with a seed and the words behind ``python``, the script first."""

    row: str
    seed: int
    words: tuple[str, ...]
    size: str = ""

    def folder(self, out: Path) -> Path:
        name = f"{self.size}-{self.row}".strip("-").replace(", ", "-").replace(" ", "-")
        return out / f"{name}-{self.seed}"

    @property
    def command(self) -> list[str]:
        return [*self.words, "--seed", str(self.seed), "--accelerator", DEVICE]


def perform(runs: Sequence[Run], out: Path, workers: int) -> list[Run]:
    """Train what is missing, ``workers`` processes of one thread at a time; the runs that are done."""
    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        kept = run.folder(out) / "words.json"
        if kept.exists() and json.loads(kept.read_text()) != run.command:
            raise SystemExit(f"{kept} is of a run with other options: choose another --out")
    start = time.perf_counter()
    pool = ThreadPoolExecutor(workers)
    try:
        missing = [run for run in runs if not (run.folder(out) / WEIGHTS).exists()]
        for told in pool.map(lambda run: _train(run, out), missing):
            print(f"{time.perf_counter() - start:6.0f} s  {told}", file=sys.stderr, flush=True)
    finally:  # after Ctrl-C, which the processes have received too, they save where they are
        pool.shutdown(cancel_futures=True)
    done = [run for run in runs if (run.folder(out) / WEIGHTS).exists()]
    if not done:
        raise SystemExit("no run of this table is done")
    return done


def _train(run: Run, out: Path) -> str:
    """Start a training, or go on with it; how it has ended, with its last words if it failed."""
    place = run.folder(out)
    place.mkdir(parents=True, exist_ok=True)
    (place / "words.json").write_text(json.dumps(run.command))
    words = [sys.executable, str(ROOT / "examples" / run.command[0]), *run.command[1:]]
    words += ["--out", str(place), *(["--resume"] if (place / "checkpoint.pt").exists() else [])]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    with (place / "log.txt").open("ab") as log:
        code = subprocess.run(
            words, stdout=log, stderr=log, env=environment, check=False
        ).returncode
    last = (place / "log.txt").read_text(errors="replace").strip().split("\n")[-1]
    return f"{place.name}: " + (f"ended with {code}: {last}" if code else "done")


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows of a training's table, numbers as numbers."""
    with (folder / "history.csv").open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def parameters(folder: Path) -> int:
    return sum(each.numel() for each in load_model(folder / WEIGHTS)[0].parameters())


# --- images: Hyper-SET, its equilibrium and rivals of the same size and effort ---------------------------

# The words that make the parameters of all about as many.
BACKBONES: dict[str, tuple[str, ...]] = {
    "hyperset": (),
    "hyperset-equilibrium": (),
    "transformer": (),
    "energy-transformer": ("--width", "660"),
}
MASKED = ("deq-transformer", "transformer", "hyperset", "energy-transformer")


def cifar10(
    rows: tuple[str, ...] = tuple(BACKBONES),
    seeds: int = 1,
    epochs: int = 3,
    limit: int = 50_000,  # training images
    logistic: bool = False,  # only logistic regression on the pixels
    workers: int = 2,  # processes at a time
    out: Path = Path("runs/cifar10"),  # folder of the runs
) -> None:
    """CIFAR-10 on a CPU: accuracies of 10,000 test images with 1 and 4 times training's iterations.

    All train with the same batches, rate and schedule; an equilibrium is solved by plain iteration.
    """
    if logistic:
        right = logistic_accuracy(load("cifar10").first(limit))
        print(f"logistic regression on the pixels: {100 * right:.2f} %")
        return
    shared = ("--data", "cifar10", "--epochs", str(epochs), "--limit", str(limit))
    runs = [
        Run(row, seed, (IMAGES, "--model", row, *shared, *BACKBONES[row]), "cifar10")
        for seed in range(seeds)
        for row in rows
    ]
    found: dict[str, dict[str, Any]] = {}
    for run in perform(runs, out, workers):
        row = found.setdefault(run.row, {"model": run.row})
        for key, value in accuracies(run.folder(out)).items():
            row[key] = f"{row[key]} {value}" if key in row and key != "parameters" else value
    print(table(list(found.values())))


def accuracies(folder: Path) -> dict[str, str]:
    """Accuracies of a trained model after training's iterations and after 4 times as many."""
    subject = studies.open_subject(folder / WEIGHTS)
    numbers = [times * subject.trained for times in (1, 4)]
    plain: Any = () if subject.recurrence else studies.solver_choices(subject.layer)["forward"]
    rows = studies.accuracy_by_iterations(subject, numbers, *plain)
    once, more = (f"{100 * row['accuracy']:.2f}" for row in rows)
    return {"parameters": f"{parameters(folder):,}", "1x, %": once, "4x, %": more}


def logistic_accuracy(data: ImageData) -> float:
    """Test accuracy of a linear map of the pixels, by 20 epochs of Adam in batches of 128."""
    torch.manual_seed(0)
    pixels, tests = (each.flatten(1) - 0.5 for each in (data.train_images, data.test_images))
    model = torch.nn.Linear(pixels.shape[1], data.classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for _ in range(20):
        for chosen in torch.randperm(len(pixels)).split(128):
            optimizer.zero_grad()
            outputs = model(pixels[chosen])
            torch.nn.functional.cross_entropy(outputs, data.train_labels[chosen]).backward()
            optimizer.step()
    with torch.no_grad():
        return (model(tests).argmax(1) == data.test_labels).double().mean().item()


def masked(
    data: Literal["digits", "mnist", "fashion-mnist", "cifar10"] = "digits",
    rows: tuple[str, ...] = MASKED,
    seeds: int = 3,
    epochs: int | None = None,  # in place of the program's own
    limit: int | None = None,  # training images
    workers: int = 2,  # processes at a time
    out: Path = Path("runs/masked"),  # folder of the runs, of their tables and figure
) -> None:
    """Error of hidden patches with 1/4 to 4 times training's iterations, beside simple fillings."""
    shared = ["--data", data]
    for name, value in (("--epochs", epochs), ("--limit", limit)):
        shared += [] if value is None else [name, str(value)]
    runs = [
        Run(row, seed, (IMAGES, "--task", "masked", "--model", row, *shared), data)
        for seed in range(seeds)
        for row in rows
    ]
    folders = [str(run.folder(out)) for run in perform(runs, out, workers)]
    program = ROOT / "examples" / "masked_images.py"
    words = [sys.executable, str(program), "--runs", *folders, "--out", str(out)]
    raise SystemExit(subprocess.run(words, check=False).returncode)


# --- language: attention as steps of descent ---------------------------------------------------------

PLAIN = "plain"
# A pilot, and the model of the table.
TINY = "--dim 64 --heads 4 --layers 4 --length 64 --batch 16 --steps 600 --dropout 0 --windows 1024"
SMALL = (
    "--dim 96 --heads 4 --layers 6 --length 128 --batch 32 --steps 1200 --dropout 0.1 --windows 256"
)
SIZES = {"tiny": tuple(TINY.split()), "small": tuple(SMALL.split())}
MOMENTUM, NESTEROV = ("--descent", "momentum"), ("--descent", "nesterov")
# What differs from plain attention, the seeds of the two sizes, and the look of the curve.
FORMS: dict[str, tuple[tuple[str, ...], tuple[int, int], str, str]] = {
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
    "nesterov, scaled": ((*NESTEROV, "--lookahead", "scaled"), (1, 1), "#3a8f5c", "--"),
    "nesterov, queries": ((*NESTEROV, "--lookahead", "queries"), (1, 1), "#3a8f5c", ":"),
    "newton-taylor, order 0": (
        ("--attention", "newton-taylor", "--arguments", "order=0"), (1, 1), "#d9772b", "--"),
}  # fmt: skip
Curve = dict[int, float]  # validation loss by the number of steps done
Losses = dict[Run, Curve]


def plan(
    text: str, sizes: tuple[str, ...], rows: tuple[str, ...], seeds: int | None, steps: int | None
) -> list[Run]:
    """The runs, in the order of their importance: first seeds before second ones."""
    found: list[Run] = []
    for place, size in enumerate(SIZES):
        for row in (rows or FORMS) if size in sizes else ():
            own, numbers, *_ = FORMS[row]
            words = [LANGUAGE, "--text", text, *SIZES[size], *own]
            if steps is not None:
                words += ["--steps", str(steps), "--evaluate-every", str(max(1, steps // 12))]
            number = seeds or (max(1, numbers[place]) if rows else numbers[place])
            found += [Run(row, seed, tuple(words), size) for seed in range(number)]
    return sorted(found, key=lambda run: (run.size != sizes[0], run.seed))


def forms(
    text: str = "austen",  # name or path
    size: tuple[str, ...] = ("tiny", "small"),
    rows: tuple[str, ...] = (),  # of the table; default: all
    seeds: int | None = None,  # in place of each row's own number
    steps: int | None = None,  # in place of the size's own
    figure: Path | None = None,  # draw the curves to this file (PNG)
    workers: int = 2,  # processes at a time
    out: Path = Path("runs/language-forms"),  # folder of the runs
) -> None:
    """Attention as steps of descent: the forms and their controls, 137 minutes of one core.

    Runs with the same seed see the same text in the same order and begin with the same weights.
    """
    done = perform(plan(text, size, rows, seeds, steps), out, workers)
    losses = {run: read_losses(run.folder(out)) for run in done}
    for each in dict.fromkeys(run.size for run in done):
        print(table(lines(losses, each, out)), end="\n\n")
    if figure:
        draw(figure, losses)


def read_losses(folder: Path) -> Curve:
    every = read_settings(folder / WEIGHTS)["evaluate_every"]
    return {every * int(row["epoch"]): row["validation_loss"] for row in history(folder)}


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
    for name in FORMS:
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


def draw(path: Path, losses: Losses) -> None:
    """A column a size: the losses, and below them the differences from plain attention."""
    mpl.use("Agg")
    sizes = [size for size in SIZES if of_row(losses, size, PLAIN)]
    shape = (max(8.0, 6.6 * len(sizes)), 8.4)
    figure, panels = plt.subplots(2, len(sizes), figsize=shape, squeeze=False, layout="constrained")
    figure.suptitle("Attention as steps of descent: losses of language models")
    handles: dict[str, Any] = {}
    for (top, below), size in zip(panels.T, sizes, strict=True):
        tops = []
        for name, (_, _, color, dashes) in FORMS.items():
            curves = list(of_row(losses, size, name).values())
            apart = list(differences(losses, size, name, PLAIN).values())
            for axes, drawn in ((top, curves), (below, apart if name != PLAIN else [])):
                if drawn:
                    middle = [mean(curve[step] for curve in drawn) for step in drawn[0]]
                    (handles[name],) = axes.plot(list(drawn[0]), middle, dashes, color=color)
                    tops += middle[1:2] if axes is top else []
        words = SIZES[size]
        numbers = dict(zip((word[2:] for word in words[::2]), words[1::2], strict=True))
        title = "{}: d {dim}, {layers} blocks, {length} characters".format(size, **numbers)
        top.set(title=title, xlabel="training step", ylim=(None, max(tops) + 0.05))
        top.set_ylabel("validation loss (nats a character)")
        below.axhline(0.0, color="black", linewidth=0.8)
        below.set_yscale("symlog", linthresh=0.05)
        below.set(xlabel="training step", ylabel="loss above plain attention, same seed (nats)")
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=len(sizes) + 2
    )
    figure.savefig(path, dpi=90)
    plt.close(figure)


# --- language: one block at its fixed point ----------------------------------------------------------

NUMBERS = (12, 24, 48)  # evaluations of the block after which it is judged
DRAWN, TORCH = ("--model", "equilibrium"), ("--arguments", "initial=torch")
RATES = ("3e-3", "6e-3", "1e-2", "2e-2")
# Width, length of a window, windows of a step.
WINDOWS = {"tiny": ("64", "64", "16"), "small": ("96", "128", "32")}
BLOCKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # words, learning rates
    "one pass": ((*DRAWN, "--iterations", "1"), RATES),
    "three blocks": (("--layers", "3", *TORCH), RATES),
    "six blocks": (("--layers", "6", *TORCH), RATES),
    "drawn": (DRAWN, RATES),
    "drawn, last 4": ((*DRAWN, "--gradient", "4"), ("1e-2",)),
}


def equilibrium(
    text: str = "austen",  # name or path
    size: Literal["tiny", "small"] = "tiny",
    rows: tuple[str, ...] = tuple(BLOCKS),
    rates: tuple[str, ...] = (),  # learning rates in place of each row's own
    seeds: int = 3,
    steps: int = 1200,
    workers: int = 2,  # processes at a time
    out: Path = Path("runs/language-equilibrium"),  # folder of the runs
) -> None:
    """One block at its fixed point, beside stacks of blocks.

    4 heads; "tiny" has width 64 and sees 16 windows of 64 characters a step, "small" 96 and 32 of 128.
    "drawn" is the default of ``train_language.py --model equilibrium``: iterations drawn from 4 to 20,
    gradients through all; judged after 12, 24 and 48 by the loss on held-out text.
    """
    dim, length, batch = WINDOWS[size]
    words = (LANGUAGE, "--text", text, "--dim", dim, "--length", length, "--dropout", "0")
    words = (*words, "--betas", "0.9", "0.95", "--batch", batch, "--steps", str(steps))
    runs = [
        Run(f"{row}, {rate}", seed, (*words, *BLOCKS[row][0], "--rate", rate), size)
        for seed in range(seeds)
        for row in rows
        for rate in rates or BLOCKS[row][1]
    ]
    done = perform(runs, out, workers)
    lines = []
    for name in dict.fromkeys(run.row for run in done):
        found = [judged(run.folder(out), text) for run in done if run.row == name]
        row: dict[str, Any] = {"model": name, "parameters": f"{found[0]['parameters']:,.0f}"}
        row["mean"] = f"{mean(each['12'] for each in found):.4f}"
        for key in map(str, NUMBERS):
            row[key] = " ".join(f"{each[key]:.4f}" for each in found if key in each)
        lines.append(row | {"seconds": f"{mean(each['seconds'] for each in found):.0f}"})
    print(table(lines))


@torch.no_grad()
def judged(folder: Path, text: str) -> dict[str, float]:
    """What a trained model gives after 12, 24 and 48 evaluations; a stack has one number."""
    model, settings = load_model(folder / WEIGHTS)
    task = NextCharacter(load_text(text), settings["model"]["length"], settings["windows"])
    model, tests = model.to(DEVICE), [each.to(DEVICE).split(task.size) for each in task.tests]
    found: dict[str, float] = {"parameters": parameters(folder)}
    solved = (
        isinstance(model, EquilibriumLanguageModel) and settings["model"].get("iterations") != 1
    )
    for number in NUMBERS if solved else NUMBERS[:1]:
        options = {"iterations": number} if solved else {}
        sums = [
            task.measures(model(inputs, **options), inputs, targets)["validation_loss"]
            for inputs, targets in zip(*tests, strict=True)
        ]
        found[str(number)] = sum(total for total, _ in sums) / sum(terms for _, terms in sums)
    return found | {"seconds": sum(row["seconds"] for row in history(folder))}


if __name__ == "__main__":
    programs = {"cifar10": cifar10, "masked": masked, "forms": forms, "equilibrium": equilibrium}
    tyro.extras.subcommand_cli_from_dict(programs)
