"""``implicit-attn demo``: three things that equilibrium layers can do, in two minutes, with pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.data import ImageData, load, load_sudoku, solve_by_singles
from implicit_attn.demo.boards import draw_frame, frames_of
from implicit_attn.demo.restoration import (
    best_linear,
    draw,
    restore,
    tasks_of,
    title_of,
    train_digits,
)
from implicit_attn.deq import DEQ
from implicit_attn.optional import progress
from implicit_attn.regularization import apply_norm
from implicit_attn.studies.study import (
    BLUE,
    DPI,
    GREY,
    ORANGE,
    Table,
    format_table,
    new_figure,
    write_table,
)
from implicit_attn.weights import load_pretrained
from solvers.core.checks import require_count

MARKS = (1, 2, 4, 8, 16, 32, 64, 128)  # iterations on Sudoku boards
FRAMES = (1, 8, 16, 32, 64)
DIM = 32
LAYERS = ("no layer", "your own energy", "transformer encoder layer")
HEADINGS = (
    "One energy, many tasks: an energy trained to remove noise also solves five other tasks.",
    "Sudoku: a learned update, without built-in rules, solves more boards the longer it iterates.",
    "Your own energy: the ten-line layer of the README learns to classify digits.",
)


def demo(out: Path, epochs: int = 15, steps: int = 400, boards: int = 100, seed: int = 0) -> None:
    """Run the three parts of the demo, which ``HEADINGS`` names.

    Args:
        out: folder of the pictures and tables, which replace those of an earlier run.
        epochs, steps: training epochs of the first part, training steps of the third.
        boards: number of Sudoku boards to solve.
        seed: random seed of the weights and the noise.
    """
    for name, number in {"epochs": epochs, "steps": steps, "boards": boards}.items():
        require_count(name, number)
    torch.set_num_threads(1)  # these models are so small that a second thread would mostly wait
    out.mkdir(parents=True, exist_ok=True)
    digits = load("digits")
    parts = (
        ("one-energy", lambda: restore_digits(digits, epochs, seed)),
        ("sudoku", lambda: solve_boards(boards)),
        ("own-energy", lambda: classify_digits(digits, steps, seed)),
    )
    for number, (heading, (name, run)) in enumerate(zip(HEADINGS, parts, strict=True), start=1):
        print(f"\n{number}. {heading}\n", flush=True)
        table, about, figure = run()
        print(f"{format_table(table)}\n({about})")
        write_table(out / f"{name}.csv", table)
        figure.savefig(out / f"{name}.png", dpi=DPI)
    names = "\n".join(f"  {out / name}.png" for name, _ in parts)
    print(
        f"\nThe pictures:\n{names}\n"
        'Next: write an energy of your own. The tutorial is docs/notebooks/own_energy.md, or "An energy '
        'of your own" on the site that `make docs-serve` shows.'
    )


Part = tuple[Table, str, Any]  # a table, what its numbers mean, and a figure


def restore_digits(digits: ImageData, epochs: int, seed: int) -> Part:
    """Train an energy to remove noise, and solve six tasks with it."""
    model = train_digits(digits.train_images, epochs, seed)
    test, table, panels, titles = digits.test_images, Table(), {}, {}
    for task in progress(tasks_of(8), "tasks"):
        y, weight = task.observe(test, torch.Generator().manual_seed(1000 + seed))
        solution = restore(model, task, y, weight)
        linear = best_linear(task, y, weight, digits.train_images)
        mine, other = (
            (each.clamp(0, 1) - test).square().mean().item() for each in (solution.value, linear)
        )
        table.append({
            "task": task.name, "one energy": mine, "best linear answer": other,
            "converged (%)": 100 * solution.converged.float().mean().item(),
        })  # fmt: skip
        seen = torch.where(weight > 0, y, torch.nan)[:9]
        panels[task.name] = {"seen": seen, "restored": solution.value[:9], "true": test[:9]}
        titles[task.name] = title_of(task, 8, mine, other)
    about = f"mean squared error of the pixels of {len(test)} test images; lower is better"
    return table, about, draw(panels, titles)


@torch.no_grad()
def solve_boards(number: int) -> Part:
    """Solve generated Sudoku boards with the shipped update."""
    data = load_sudoku(1, number, source="generated", seed=17)
    puzzles, solutions = data.test_puzzles, data.test_solutions
    model: Any = load_pretrained("sudoku-solver")
    singles = 100 * (solve_by_singles(puzzles) == solutions).all(1).float().mean().item()
    hardest, table = int((puzzles > 0).sum(1).argmin()), Table()
    frames = frames_of(model, puzzles[hardest], FRAMES)
    steps = model.trajectory(puzzles, MARKS[-1])
    for count, logits in enumerate(progress(steps, "iterations"), start=1):
        if count in MARKS:  # the logits of a clue allow no other digit
            solved = 100 * (logits.argmax(-1) + 1 == solutions).all(1).double().mean().item()
            table.append({"iterations": count, "boards solved (%)": solved})
    about = f"{number} generated boards; two rules of logic alone solve {singles:.0f} %"
    count = round(number * table[-1]["boards solved (%)"] / 100)
    figure = new_figure((13.0, 6.2), f"A learned update solves {count} of {number} Sudoku boards")
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1.1])
    for axes, frame in zip(above.subplots(1, len(frames)), frames, strict=True):
        draw_frame(axes, puzzles[hardest], solutions[hardest], frame)
    axes, shares = below.subplots(), [row["boards solved (%)"] for row in table]
    axes.plot(MARKS, shares, color=BLUE, marker="o", label="learned update, 42,193 weights")
    axes.axhline(singles, color=GREY, linestyle="--", label="two rules of logic")
    axes.set_xscale("log", base=2)
    axes.set_xticks(MARKS, [str(mark) for mark in MARKS])
    axes.set(xlabel="iterations", ylabel="boards solved (%)", ylim=(-3, 103))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    return table, about, figure


class OwnEnergy(nn.Module):
    """``1/2 |z|^2 - 1/2 |relu(W z + U x)|^2 - sum log sum exp((Q z + q x) k)``, as in the README.

    The hidden units and the attention depend on the input x. The keys k are functions of x with length 1, and
    the spectral norms of W and Q are at most 0.7, so the energy is convex in z.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.W, self.Q = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.U, self.q, self.k = (nn.Linear(dim, dim) for _ in range(3))
        apply_norm(self, "bound", target=0.7, only=("W", "Q"))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:  # (B, N, dim), (B, N, dim) -> (B,)
        hidden = F.relu(self.W(z) + self.U(x))
        scores = (self.Q(z) + self.q(x)) @ F.normalize(self.k(x), dim=-1).mT
        return 0.5 * (z.square() - hidden.square()).sum((1, 2)) - scores.logsumexp(-1).sum(1)


class Classifier(nn.Module):
    """Classifier of images (B, 1, 8, 8) with 16 tokens, one layer and the mean of all logits (B, 10)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.position = nn.Parameter(0.5 * torch.randn(16, DIM))
        self.embed = nn.Conv2d(1, DIM, 2, stride=2)
        self.layer: nn.Module | None = None
        if name == "transformer encoder layer":
            self.layer = nn.TransformerEncoderLayer(DIM, 4, DIM, 0.0, batch_first=True)
        elif name == "your own energy":
            self.layer = DEQ.from_energy(OwnEnergy(DIM), init="zeros", tolerance=1e-3)
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 10))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).mT + self.position
        if isinstance(self.layer, DEQ):
            x = x + self.layer(x)
        elif self.layer is not None:
            x = self.layer(x)
        return self.head(x).mean(1)


def classify_digits(digits: ImageData, steps: int, seed: int) -> Part:
    """Train three classifiers for the same number of steps."""
    table: Table = []
    for name in LAYERS:
        torch.manual_seed(seed)
        model = Classifier(name)
        optimiser = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in progress(range(steps), name):
            rows = torch.randint(len(digits.train_labels), (64,))
            optimiser.zero_grad()
            F.cross_entropy(model(digits.train_images[rows]), digits.train_labels[rows]).backward()
            optimiser.step()
        with torch.no_grad():
            right = (model(digits.test_images).argmax(1) == digits.test_labels).float().mean()
        last = model.layer.last if isinstance(model.layer, DEQ) else None
        solves = "" if last is None else f"{100 * last.converged.float().mean().item():.1f}"
        size = sum(each.numel() for each in model.layer.parameters()) if model.layer else 0
        row = {"layer": name, "test accuracy (%)": 100 * right.item(), "weights of the layer": size}
        table.append(row | {"converged (%)": solves})
    figure = new_figure((7, 2.6), f"Handwritten digits after {steps} training steps, one seed")
    axes = figure.subplots()
    shares = [row["test accuracy (%)"] for row in table]
    bars = axes.barh([*LAYERS], shares, color=[GREY, BLUE, ORANGE])
    axes.bar_label(bars, fmt="%.1f", padding=4)
    axes.set(xlim=(0, 108), xlabel="test accuracy (%)")
    axes.invert_yaxis()
    return table, f"after {steps} training steps, one seed", figure
