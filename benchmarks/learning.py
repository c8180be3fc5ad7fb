"""What layers learn: accuracies of one or more layers between the same embedding and readout.

    python benchmarks/learning.py [--tasks digits recall] [--rows encoder block] [--layers 1 3] [--seeds 3]

Every run is a line of OUT/learning.jsonl as soon as it has ended; the same command goes on where it was
stopped. The rate of a row (of the logistic regression: its C) is the best on the last fifth of the training
samples with seed 0; "!" marks one at the end of the choice. All seeds are then trained at that rate on all
training samples and judged by the test samples. ``--ablations`` changes one thing of the block a row.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import solvers
from benchmarks.cost import encoder_layer
from benchmarks.measure import table
from implicit_attn import DEQ, EquilibriumBlock
from implicit_attn.data import load
from implicit_attn.energies import HyperSETEnergy
from implicit_attn.models import HyperSET
from implicit_attn.regularization import remove_norm
from implicit_attn.updates import SoftmaxCouplingAttention

DIM, HEADS, BATCH = 64, 4, 64
RATES, PENALTIES = (3e-3, 6e-3, 1.2e-2), (0.1, 1.0, 10.0)  # penalties: scikit-learn's C
VALIDATION = 0.2  # of the training samples, the last of them, chooses the rate
Samples = tuple[Tensor, Tensor]  # inputs (samples, N, ...), labels (samples,)


# ---- tasks: labelled sequences of tokens, all of one length ------------------------------------------


@dataclass(frozen=True)
class Task:
    classes: int
    train: Samples
    test: Samples
    embed: Callable[[int], nn.Module]  # width d -> a module that makes tokens (B, N, d)
    readouts: tuple[str, ...]
    epochs: int
    images: bool = True  # patches with values in [-1, 1], in places that mean something


def patches(images: Tensor, side: int) -> Tensor:
    """Images (B, C, H, W) with values in [0, 1] -> (B, N, C side^2) in [-1, 1], row by row."""
    return 2 * F.unfold(images, side, stride=side).mT - 1


def image_task(train: Samples, test: Samples, side: int, classes: int, epochs: int) -> Task:
    cut_train, cut_test = patches(train[0], side), patches(test[0], side)
    embed = partial(nn.Linear, cut_train.shape[-1])
    parts = (cut_train, train[1]), (cut_test, test[1])
    return Task(classes, *parts, embed, ("mean", "class"), epochs)


def split_digits() -> tuple[Samples, Samples]:
    data: Any = load_digits()
    images, labels = torch.from_numpy(data.images).float(), torch.from_numpy(data.target)
    images = images[:, None] / 16
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return (images[train], labels[train]), (images[test], labels[test])


def digits(limit: int | None) -> Task:
    (images, labels), test = split_digits()
    return image_task((images[:limit], labels[:limit]), test, 2, 10, 20)


def loaded(name: str, side: int, epochs: int, limit: int | None) -> Task:
    data = load(name)  # CIFAR-10 comes class by class, so a limit takes images at random
    draw = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(data.train_labels), generator=draw)[:limit]
    train = (data.train_images[chosen], data.train_labels[chosen])
    return image_task(train, (data.test_images, data.test_labels), side, data.classes, epochs)


def same_different(limit: int | None) -> Task:
    """Two digits side by side: are they of one class? The parts share no image."""
    (images, labels), test = split_digits()
    count, kept = limit or 8000, round((1 - VALIDATION) * len(labels))
    later = max(1, round(VALIDATION * count))
    parts = [
        pairs(images[:kept], labels[:kept], count - later, seed=1),
        pairs(images[kept:], labels[kept:], later, seed=2),
    ]
    both = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return image_task(both, pairs(*test, 2000, seed=3), 2, 2, 10)


def pairs(images: Tensor, labels: Tensor, count: int, seed: int) -> Samples:
    draw = torch.Generator().manual_seed(seed)
    same = torch.randint(2, (count,), generator=draw)
    left = torch.randint(len(labels), (count,), generator=draw)
    fits = labels[left, None].eq(labels).eq(same[:, None].bool())  # (count, images)
    fits[torch.arange(count), left] = False  # never an image beside itself
    right = torch.multinomial(fits.float(), 1, generator=draw).squeeze(1)
    return torch.cat([images[left], images[right]], dim=3), same


class PairEmbedding(nn.Module):
    """Tokens (B, N, d) of pairs (B, N, 2) of a key and a value: the sum of two vectors."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(32, dim), nn.Embedding(17, dim)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.key(pairs[..., 0]) + self.value(pairs[..., 1])


def recall(limit: int | None) -> Task:
    """A token that asks for a key, then 16 pairs of a key and a value: which value is asked for?"""
    return Task(
        16, sequences(limit or 8000, seed=1), sequences(2000, seed=2), PairEmbedding,
        ("query",), 10, images=False,
    )  # fmt: skip


def sequences(count: int, seed: int) -> Samples:
    """Pairs (count, 17, 2), the asking one first with the value 16, and the values asked for."""
    draw = torch.Generator().manual_seed(seed)
    keys = torch.rand(count, 32, generator=draw).argsort(dim=1)[:, :16]
    values = torch.randint(16, (count, 16), generator=draw)
    which = torch.randint(16, (count, 1), generator=draw)
    question = torch.stack([keys.gather(1, which), torch.full_like(which, 16)], dim=-1)
    found = torch.cat([question, torch.stack([keys, values], dim=-1)], dim=1)
    return found, values.gather(1, which).squeeze(1)


TASKS: dict[str, Callable[[int | None], Task]] = {
    "digits": digits,
    "mnist": partial(loaded, "mnist", 7, 5),
    "cifar10": partial(loaded, "cifar10", 4, 10),
    "recall": recall,
    "same-different": same_different,
}


@functools.lru_cache(maxsize=1)  # the next run is mostly of the same task
def task_of(name: str, limit: int | None) -> Task:
    return TASKS[name](limit)


# ---- rows: what stands between embedding and readout, tokens (B, N, d) -> the same shape ---------------


class Residual(nn.Module):
    """``x + branch(norm(x))``; ``across`` mixes the tokens of each channel instead."""

    def __init__(self, dim: int, width: int, hidden: int, across: bool = False) -> None:
        super().__init__()
        self.across, self.norm = across, nn.LayerNorm(dim)
        self.branch = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + (self.branch(y.mT).mT if self.across else self.branch(y))


class FirstStep(nn.Module):
    """The block's first gradient step from zero in place of its equilibrium: an explicit layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.energy = EquilibriumBlock(dim, heads).energy

    def forward(self, x: Tensor) -> Tensor:
        given = self.energy.prepare(F.rms_norm(x, x.shape[-1:]))
        return x - self.energy.grad(torch.zeros_like(x), given)


def solved(layer: Any, dim: int) -> nn.Module:
    """The layer solved for tokens of root mean square 1."""
    options: dict[str, Any] = {"max_steps": 60, "on_failure": "ignore"}
    unit = nn.RMSNorm(dim, elementwise_affine=False)
    return nn.Sequential(unit, DEQ(layer, tolerance=solvers.Tolerance(1e-3), **options))


def block(d: int, h: int, **layer: Any) -> nn.Module:
    return EquilibriumBlock(d, h, layer={"on_failure": "ignore"} | layer)


Build = Callable[[int, int, int], nn.Module]  # tokens N, dim, heads -> one layer


def changed(change: Callable[[Any], object]) -> Build:
    @torch.no_grad()
    def build(tokens: int, dim: int, heads: int) -> nn.Module:
        made = block(dim, heads)
        change(made)
        return made

    return build


ROWS: dict[str, Build | None] = {
    "logistic": None,  # multinomial logistic regression on the pixels
    "identity": lambda n, d, h: nn.Identity(),
    "per-token": lambda n, d, h: Residual(d, d, 4 * d),
    # A layer of MLP-Mixer (Tolstikhin et al., https://arxiv.org/abs/2105.01601) of that size.
    "mixer": lambda n, d, h: nn.Sequential(Residual(d, n, d, True), Residual(d, d, 7 * d // 2)),
    "encoder": lambda n, d, h: encoder_layer(d, h, norm_first=True),
    "hyperset": lambda n, d, h: HyperSET(d, h, 2 * d, iterations=12),
    "couplings": lambda n, d, h: solved(SoftmaxCouplingAttention(d, h), d),
    "equilibrium": lambda n, d, h: solved(HyperSETEnergy(d, h, 2 * d), d),
    "equilibrium-inside": lambda n, d, h: solved(HyperSETEnergy(d, h, 2 * d, context=True), d),
    "block": lambda n, d, h: EquilibriumBlock(d, h),
    "block-no-attention": lambda n, d, h: EquilibriumBlock(d, h, 4 * d, attention=None),
}
ABLATIONS: dict[str, Build | None] = {
    "first step": lambda n, d, h: FirstStep(d, h),
    "no norm of q, k": changed(lambda b: setattr(b.energy.attention, "score_norm", None)),
    "peaked start": changed(lambda b: b.energy.attention.query.weight.mul_(10)),
    "fixed temperature": changed(
        lambda b: b.energy.attention.temperatures.raw.requires_grad_(False)
    ),
    "unbounded": changed(remove_norm),
    "curvature .1 .8": lambda n, d, h: EquilibriumBlock(d, h, curvature=(0.1, 0.8)),
    "curvature .8 .1": lambda n, d, h: EquilibriumBlock(d, h, curvature=(0.8, 0.1)),
    "curvature .1 .1": lambda n, d, h: EquilibriumBlock(d, h, curvature=(0.1, 0.1)),
    "gelu": lambda n, d, h: EquilibriumBlock(d, h, activation="gelu"),
    "output map": lambda n, d, h: EquilibriumBlock(d, h, 3 * d // 2, state_dim=d),
    "tolerance 1e-1": lambda n, d, h: block(d, h, tolerance=solvers.Tolerance(1e-1)),
    "tolerance 1e-4": lambda n, d, h: block(d, h, tolerance=solvers.Tolerance(1e-4)),
    "one-step gradient": lambda n, d, h: block(d, h, adjoint=solvers.OneStep()),
    "phantom gradient": lambda n, d, h: block(d, h, adjoint=solvers.Phantom(3)),
    "L-BFGS": lambda n, d, h: block(d, h, solver=solvers.LBFGS()),
}


class TokenModel(nn.Module):
    """Inputs (B, N, ...) -> logits (B, classes).

    The readout is the mean of all tokens, or the first token: with "class" a learned vector.
    """

    def __init__(self, task: Task, build: Build, layers: int, readout: str) -> None:
        super().__init__()
        count = task.train[0].shape[1]
        made = [build(count + (readout == "class"), DIM, HEADS) for _ in range(layers)]
        self.layers, self.readout, self.embed = nn.Sequential(*made), readout, task.embed(DIM)
        self.place = nn.Parameter(0.5 * torch.randn(count, DIM)) if task.images else None
        self.front = nn.Parameter(0.5 * torch.randn(DIM)) if readout == "class" else None
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, task.classes)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.embed(inputs)
        if self.place is not None:
            tokens = tokens + self.place
        if self.front is not None:
            tokens = torch.cat([self.front.expand(len(tokens), 1, -1), tokens], dim=1)
        states = self.norm(self.layers(tokens))
        return self.head(states.mean(1) if self.readout == "mean" else states[:, 0])


# ---- runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    task: str
    limit: int  # 0: all training samples
    row: str
    readout: str
    layers: int
    epochs: int
    part: str = ""  # "validation", to choose the rate, or "test"
    rate: float = 0.0
    seed: int = 0


Results = dict[Run, dict[str, Any]]


def perform(run: Run) -> dict[str, Any]:
    """Train and judge; in the part "validation" the last fifth of the training samples is the test set."""
    task = task_of(run.task, run.limit or None)
    (inputs, labels), (other, others) = task.train, task.test
    if run.part == "validation":
        kept = len(labels) - max(1, round(VALIDATION * len(labels)))
        inputs, other, labels, others = inputs[:kept], inputs[kept:], labels[:kept], labels[kept:]
    build = (ROWS | ABLATIONS)[run.row]
    if build is None:
        return regress(run.rate, inputs, labels, other, others)
    torch.manual_seed(run.seed)
    model = TokenModel(task, build, run.layers, run.readout)
    steps = max(1, len(labels) // BATCH)
    optimiser = torch.optim.AdamW(model.parameters(), lr=run.rate, weight_decay=0.01)
    total = run.epochs * steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, run.rate, total_steps=total)
    equilibria: list[Any] = [layer for layer in model.modules() if isinstance(layer, DEQ)]
    worst: dict[str, float] = {}  # of the epochs, shares of the samples
    evaluations: list[float] = []
    start = time.process_time()
    for epoch in range(run.epochs):
        model.train()
        draw = torch.Generator().manual_seed(1000 * run.seed + epoch)
        shares: dict[str, list[float]] = {"converged": [], "adjoint converged": []}
        for index in torch.randperm(len(labels), generator=draw)[: steps * BATCH].split(BATCH):
            loss = F.cross_entropy(model(inputs[index]), labels[index])
            optimiser.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not math.isfinite(loss.item() + norm.item()):
                return {"status": "not finite"}
            optimiser.step()
            schedule.step()
            for solve in (layer.last for layer in equilibria):
                evaluations.append(solve.evaluations.double().mean().item())
                shares["converged"].append(solve.converged.double().mean().item())
                if solve.adjoint.solution is not None:
                    done = solve.adjoint.solution.converged
                    shares["adjoint converged"].append(done.double().mean().item())
        for name, share in shares.items():
            if share:
                worst[name] = min(worst.get(name, 1.0), statistics.fmean(share))
    spent = time.process_time() - start
    model.eval()

    @torch.no_grad()
    def judge(inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        logits = torch.cat([model(part) for part in inputs.split(4 * BATCH)])
        right = (logits.argmax(1) == labels).double().mean().item()
        return right, F.cross_entropy(logits, labels).item()

    accuracy, test_loss = judge(other, others)
    return {
        "status": "ok",
        "parameters": sum(each.numel() for each in model.layers.parameters()),
        "train_accuracy": judge(inputs[:10_000], labels[:10_000])[0],
        "accuracy": accuracy,
        "loss": test_loss,
        "seconds": spent,
        "evaluations": statistics.fmean(evaluations) if evaluations else math.nan,
    } | {f"{name} (worst epoch)": share for name, share in worst.items()}


def regress(
    penalty: float, inputs: Tensor, labels: Tensor, other: Tensor, others: Tensor
) -> dict[str, Any]:
    pixels, unseen = (((each + 1) / 2).flatten(1).numpy() for each in (inputs, other))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a thousand iterations compare well
        model = LogisticRegression(C=penalty, max_iter=1000).fit(pixels, labels.numpy())
    chances = torch.from_numpy(model.predict_proba(unseen)).clamp_min(1e-12)
    return {
        "status": "ok",
        "parameters": model.coef_.size + model.intercept_.size,
        "train_accuracy": model.score(pixels[:10_000], labels[:10_000].numpy()),
        "accuracy": model.score(unseen, others.numpy()),
        "loss": F.nll_loss(chances.log(), others).item(),
    }


def merit(found: dict[str, Any]) -> tuple[float, float]:
    good = found["status"] == "ok"
    return (found["accuracy"], -found["loss"]) if good else (-math.inf, -math.inf)


class Kept:
    """The file of results: a line a run, added as soon as the run has ended."""

    def __init__(self, path: Path) -> None:
        self.path, self.done = path, Results()
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text().splitlines() if path.exists() else ():
            run, found = json.loads(line)
            self.done[Run(**run)] = found

    def get(self, run: Run) -> dict[str, Any]:
        if run not in self.done:
            self.done[run] = perform(run)
            with self.path.open("a") as file:
                file.write(json.dumps([dataclasses.asdict(run), self.done[run]]) + "\n")
            print(f"{run}: {self.done[run]}", file=sys.stderr)
        return self.done[run]


MEASURES = (
    "parameters", "train_accuracy", "seconds", "evaluations", "converged (worst epoch)",
    "adjoint converged (worst epoch)",
)  # fmt: skip


def line(setting: Run, rates: tuple[float, ...], seeds: int, kept: Kept) -> dict[str, Any]:
    """A row of the table: the rate chosen, then all seeds at that rate."""
    rate = rates[0]
    if len(rates) > 1:
        setting = dataclasses.replace(setting, part="validation")
        tried = {r: kept.get(dataclasses.replace(setting, rate=r)) for r in rates}
        rate = max(rates, key=lambda r: merit(tried[r]))
    at_end = "!" if len(rates) > 1 and rate in (min(rates), max(rates)) else ""
    runs = [dataclasses.replace(setting, part="test", rate=rate, seed=s) for s in range(seeds)]
    found = [kept.get(run) for run in runs]
    good = [each for each in found if each["status"] == "ok"]
    shown = {f.name: getattr(setting, f.name) for f in dataclasses.fields(Run)[:6]}
    shown |= {"rate": f"{rate:g}{at_end}", "seeds": f"{len(good)} of {len(found)}"}
    if good:
        scores = [100 * each["accuracy"] for each in good]
        shown |= {"test %": f"{statistics.fmean(scores):.1f}"}
        shown |= {"least": f"{min(scores):.1f}", "greatest": f"{max(scores):.1f}"}
        for name in MEASURES:
            values = [each.get(name, math.nan) for each in good]
            if not all(map(math.isnan, values)):
                shown[name] = round(statistics.fmean(values), 4)
    return shown


def plan(
    tasks: dict[str, Task], rows: list[str], readouts: tuple[str, ...], layers: tuple[int, ...],
    epochs: int | None, limit: int | None,
) -> Iterator[Run]:  # fmt: skip
    """The lines of the table, in its order; what is one model stands once."""
    for name, task in tasks.items():
        if "logistic" in rows and task.images:
            yield Run(name, limit or 0, "logistic", "pixels", 0, 0)
        for readout in (each for each in task.readouts if each in readouts):
            for row in (each for each in rows if each != "logistic"):
                for count in layers[:1] if row == "identity" else layers:
                    yield Run(name, limit or 0, row, readout, count, epochs or task.epochs)


def main(
    tasks: tuple[str, ...] = tuple(TASKS),
    rows: tuple[str, ...] = tuple(ROWS),  # layers to compare
    readouts: tuple[str, ...] = ("mean", "class", "query"),
    layers: tuple[int, ...] = (1,),  # numbers of layers
    seeds: int = 3,
    epochs: int | None = None,  # instead of the task's own
    rates: tuple[float, ...] = RATES,
    limit: int | None = None,  # most training samples
    out: Path = Path("runs/learning"),  # folder of learning.jsonl
    ablations: bool = False,  # the block with one thing changed, at the rate 6e-3, in place of rows
) -> list[dict[str, Any]]:
    """What layers learn between the same embedding and readout."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", solvers.SolveWarning)  # counted instead
    here = dict[str, Task]()
    for name in tasks:
        try:
            here[name] = task_of(name, limit)
        except (OSError, ImportError) as error:
            print(f"{name} left out: {error}", file=sys.stderr)
    kept = Kept(out / "learning.jsonl")
    chosen, rates = (list(ABLATIONS), (6e-3,)) if ablations else (list(rows), rates)
    found = [
        line(run, *((PENALTIES, 1) if run.row == "logistic" else (rates, seeds)), kept)
        for run in plan(here, chosen, readouts, layers, epochs, limit)
    ]
    print(table(found))
    return found


if __name__ == "__main__":
    tyro.cli(main)
