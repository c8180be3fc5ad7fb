"""Batches against a queue whose slots are refilled, where samples need different numbers of evaluations.

    python benchmarks/queues.py [--parts tanh boards restoration]

The four ways are a fixed number of evaluations for all samples, batches whose finished samples stand frozen,
batches that shrink, and a queue. Times are processor times of one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from board_tasks import hard_sets
from train_boards import load_solver

from benchmarks.measure import interleaved, table
from implicit_attn import DEQ, Energy, load_pretrained
from implicit_attn.data import load, load_sudoku
from implicit_attn.demo.restoration import tasks_of
from solvers import Solution

Clock = Callable[[], float]
CLOCK: Clock = time.process_time
PARTS = ("tanh", "boards", "restoration")


@dataclass
class Case:
    """Samples of a layer; ``solved`` tells of indices (n,) and values which samples are solved."""

    name: str
    layer: DEQ
    x: Any
    options: dict[str, Any]
    solved: Callable[[Tensor, Any], Tensor]
    rounds: int
    batch: int  # samples of a batch, and slots of the queue

    @property
    def number(self) -> int:
        return len(pytree.tree_leaves(self.x)[0])


class Run:
    """What a way gave: values and counts of the samples, and how long each was on its way."""

    rows = 0  # of f, in all calls

    def __init__(self, case: Case) -> None:
        self.values: list[tuple[Tensor, Any]] = []
        self.evaluations = torch.zeros(case.number, dtype=torch.int64)
        self.latency = self.evaluations.double()

    def add(self, index: Tensor, solution: Solution, times: Tensor | float) -> None:
        self.latency[index] = torch.as_tensor(times, dtype=torch.float64)
        self.values.append((index, solution.value))
        self.evaluations[index] = solution.evaluations

    def solved(self, case: Case) -> Tensor:
        """(N,) bool, by the judgement of the case, which takes no part in the times."""
        index = torch.cat([index for index, _ in self.values])
        found = torch.cat([case.solved(*pair) for pair in self.values])
        return found[index.argsort()]


def parts_of(case: Case) -> Iterator[tuple[Tensor, Any]]:
    for index in torch.arange(case.number).split(case.batch):
        yield index, pytree.tree_map(partial(torch.index_select, dim=0, index=index), case.x)


def by_batches(case: Case, **options: Any) -> Run:
    """A sample is on its way as long as its batch."""
    run, rule = Run(case), options.get("stop", case.options.get("stop"))
    for index, x in parts_of(case):
        start = CLOCK()
        own: Any = {"stop": None if rule is None else partial(rule, x=x)}
        solution = case.layer.solve(x, adjoint=None, **case.options | options | own)
        run.add(index, solution, CLOCK() - start)
    return run


def by_queue(case: Case) -> Run:
    """A sample is on its way from the time at which its batch is read."""
    run, read = Run(case), list[Tensor]()

    def source() -> Iterator[Any]:
        for index, x in parts_of(case):
            read.append(torch.full((len(index),), CLOCK(), dtype=torch.float64))
            yield x

    for index, solution in case.layer.stream(source(), slots=case.batch, **case.options):
        run.add(index, solution, CLOCK() - torch.cat(read)[index])
    return run


def measured(case: Case) -> list[dict[str, Any]]:
    """A row for each way; the fixed number is the most that a solved sample needs."""
    runs: dict[str, Run] = {}
    shrinking = by_batches(case)
    most = int(shrinking.evaluations[shrinking.solved(case)].max())
    fixed: Any = {
        "compact": False,
        "tolerance": 0.0,
        "max_steps": most,
        "stop": None,
        "verify": False,
    }
    ways = {
        "fixed number": partial(by_batches, case, **fixed),
        "frozen": partial(by_batches, case, compact=False),
        "shrinking": partial(by_batches, case),
        "queue": partial(by_queue, case),
    }

    def noted(name: str) -> None:
        rows, update = [0], case.layer.update
        # An energy is evaluated with its gradient.
        called = "joint" if update.monitored else "forward"
        call = getattr(update, called)

        def counted(z: Any, *args: Any, **options: Any) -> Any:
            rows[0] += len(z)
            return call(z, *args, **options)

        setattr(update, called, counted)
        try:
            runs[name] = ways[name]()
        finally:
            delattr(update, called)
        runs[name].rows = rows[0]

    contestants = {name: partial(noted, name) for name in ways}
    times = interleaved(contestants, case.rounds, CLOCK, 0.0, warm_up=case.rounds > 1)
    mean = shrinking.evaluations.double().mean().item()
    return [
        {
            "case": case.name, "way": name, "samples a second": f"{case.number / times[name]:,.0f}",
            "relative": f"{times['shrinking'] / times[name]:.2f}",
            "latency, 95 %": f"{1e3 * run.latency.quantile(0.95).item():,.0f} ms",
            "solved, %": f"{100 * run.solved(case).double().mean().item():.1f}",
            "mean": f"{run.evaluations.double().mean().item():.1f}", "most": int(run.evaluations.max()),
            "rows of f / sum": f"{run.rows / (mean * case.number):.2f}",
        }
        for name, run in ((name, runs[name]) for name in ways)
    ]  # fmt: skip


# --- cases ----------------------------------------------------------------------------------------------


def tanh_cases(samples: int, rounds: int, batch: int) -> Iterator[Case]:
    """``z = g tanh(z A) B + b`` with a gain of 0.5, and a larger one for 5 % of the samples."""
    for size, hidden, gains in ((32, 64, (0.5, 1.3, 2.0)), (128, 512, (0.5, 1.25, 1.6))):
        generator = torch.Generator().manual_seed(0)
        draw = partial(torch.randn, generator=generator)
        first, second = draw(size, hidden) / size**0.5, draw(hidden, size) / hidden**0.5
        hard, bias = torch.rand(samples, 1, generator=generator) < 0.05, draw(samples, size)

        def update(z: Tensor, x: Any, first: Tensor = first, second: Tensor = second) -> Tensor:
            return x["gain"] * (torch.tanh(z @ first) @ second) + x["bias"]

        for gain in gains:
            x = {"gain": torch.where(hard, gain, 0.5), "bias": bias}
            options: Any = {"max_steps": 300, "on_failure": "ignore"}
            layer = DEQ.from_update(update, init=lambda x: torch.zeros_like(x["bias"]))
            # After a fixed number of evaluations the residual tells.
            yield Case(
                f"tanh {size} x {hidden}, gain {gain}", layer, x, options, partial(settled, layer, x),
                rounds, batch,
            )  # fmt: skip


def settled(layer: DEQ, x: Any, index: Tensor, value: Tensor) -> Tensor:
    """(n,) bool: the relative residual is at most twice the tolerance, with which values are verified."""
    own = {name: part[index] for name, part in x.items()}
    image = layer.update(value, own)
    return (image - value).norm(dim=1) <= 2e-4 * image.norm(dim=1)


def board_cases(easy: int, hard: int, most: int, batch: int) -> Iterator[Case]:
    """Sudoku boards with 17 givens, mixed with hard ones, up to consistent answers."""
    model, settings = load_solver("sudoku-solver-easy")
    data = load_sudoku(settings["train"], easy, more=0, seed=settings["seed"])
    sets = [data.test_puzzles[:easy], *(puzzles for puzzles, _ in hard_sets(hard).values())]
    boards = torch.cat(sets)
    boards = boards[torch.randperm(len(boards), generator=torch.Generator().manual_seed(0))]
    options: Any = {
        "solver": "forward",
        "tolerance": 0.0,
        "max_steps": most,
        "on_failure": "ignore",
    }
    options["stop"] = lambda z, x: model._agrees(z, x)

    def solved(index: Tensor, value: Tensor) -> Tensor:
        return model._agrees(value, model.marks(boards[index]))

    yield Case(f"boards, {easy} + {len(boards) - easy} hard", model.layer, model.marks(boards), options,
               solved, 1, batch)  # fmt: skip


class SixTasks(Energy):
    """The energy of a restorer, with the data term of the task that a sample has."""

    def __init__(self, model: Any, operators: list[Any]) -> None:
        super().__init__()
        self.model, self.operators = nn.ModuleList([model]), operators

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        model: Any = self.model[0]
        seen = torch.zeros_like(z)
        for number, operator in enumerate(self.operators):
            own = z if operator is None else operator(z)
            own = F.pad(own, (0, z.shape[3] - own.shape[3], 0, z.shape[2] - own.shape[2]))
            seen = seen + own * (x["task"] == number).to(z)[:, None, None, None]
        return model.data(seen, {"y": x["y"], "weight": x["weight"]}) + model.prior(z)


def restoration_cases(each: int, batch: int) -> Iterator[Case]:
    """Digits with six kinds of damage in one queue; L-BFGS."""
    model: Any = load_pretrained("mnist-restorer").eval()
    images = load("mnist").test_images[: 6 * each]
    generator = torch.Generator().manual_seed(0)
    tasks, parts, starts = tasks_of(28), [], []
    for task, clean in zip(tasks, images.split(each), strict=True):
        y, weight = task.observe(clean, generator)
        starts.append(task.start(y, weight, model.mean).expand(each, 1, 28, 28))
        missing = 28 - y.shape[-1]
        parts.append([F.pad(t, (0, missing, 0, missing)) for t in (y, weight)])
    y, weight = (torch.cat(part) for part in zip(*parts, strict=True))
    kinds = torch.arange(6).repeat_interleave(each)
    order = torch.randperm(len(y), generator=generator)
    x = {"y": y, "weight": weight, "task": kinds, "start": torch.cat(starts)}
    x = {name: part[order] for name, part in x.items()}
    energy = SixTasks(model, [task.operator for task in tasks])
    layer = DEQ(energy, init=lambda x: x["start"])
    options: Any = {"max_steps": 400, "tolerance": 3e-3, "on_failure": "ignore"}

    def solved(index: Tensor, value: Tensor) -> Tensor:
        own = {name: part[index] for name, part in x.items()}
        with torch.no_grad():
            force = energy.grad(value, own).flatten(1).norm(dim=1)
        return force <= 1e-1 * value.flatten(1).norm(dim=1)

    yield Case(f"six restoration tasks, {each} each", layer, x, options, solved, 1, batch)


@torch.no_grad()
def queues(
    parts: tuple[str, ...] = PARTS,
    batch: int = 128,
    few: int = 64,
    rounds: int = 3,
    samples: int = 8192,
    boards: int = 160,
    hard: int = 32,
    most: int = 256,
    images: int = 48,
) -> None:
    """Print a table of all ways for each case.

    Args:
        parts: cases.
        batch: samples of a batch, and slots of the queue.
        few: the same for boards and images.
        rounds: repetitions of the tanh cases.
        samples: of a tanh case.
        boards, hard: boards with 17 givens, and hard boards of each public set.
        most: largest number of evaluations of a board.
        images: of each restoration task.
    """
    torch.set_num_threads(1)
    made = {
        "tanh": lambda: tanh_cases(samples, rounds, batch),
        "boards": lambda: board_cases(boards, hard, most, few),
        "restoration": lambda: restoration_cases(images, few),
    }
    for name in parts:
        for case in made[name]():
            print(table(measured(case)), end="\n\n", flush=True)


if __name__ == "__main__":
    tyro.cli(queues)
