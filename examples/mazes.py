"""Does a model trained on small mazes solve large ones if it iterates until its answer no longer changes?

    python examples/mazes.py        # three seeds, 40 minutes

A local update marks the path between two places. It is trained on mazes of 9 x 9 sites with random
numbers of iterations, of which the last twelve have gradients, so that it learns to keep its answer.
Left: the share of mazes whose path is right at every site, against the size, next to convolutional
networks with equal parameters and with equal evaluations. Right: against the iterations. Below: a path
that fills in. The second kind of maze has passages in circles, so that filling dead ends does not leave
the path alone.

Source: Bansal et al., "End-to-end Algorithm Synthesis with Recurrent Networks" (2022),
https://arxiv.org/abs/2202.05826; Knutson et al., "On Logical Extrapolation for Mazes with Recurrent and
Implicit Networks" (2024), https://arxiv.org/abs/2410.03020.
"""

import itertools
import random
import time
from collections import deque
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from runner import Result, Table, columns, run
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn import DEQ

Place = tuple[int, int]
SIZES = (9, 15, 25, 39, 59, 99)
TREES, CIRCLES = "trees", "circles"
CONVERGED = "equilibrium, until it converges"
SAME_PARAMETERS, SAME_DEPTH = "network, equal parameters", "network, equal evaluations"
STYLES = {CONVERGED: "C0", SAME_DEPTH: "C3", SAME_PARAMETERS: "C1"}
RATE = 3e-3  # largest learning rate
HOLES = 0.1  # share of further walls that are opened in mazes with circles


class Mazes(NamedTuple):
    """Inputs (M, 3, N, N): walls, the start, the end; targets (M, N, N), 1 on the path."""

    inputs: Tensor
    targets: Tensor


def neighbours(place: Place, size: int, step: int) -> list[Place]:
    i, j = place
    near = [(i - step, j), (i + step, j), (i, j - step), (i, j + step)]
    return [(a, b) for a, b in near if 0 <= a < size and 0 <= b < size]


def carve(size: int, kind: str, draw: random.Random) -> set[Place]:
    """The open sites of a maze with rooms at even places, by a random depth-first search."""
    start = (2 * draw.randrange((size + 1) // 2), 2 * draw.randrange((size + 1) // 2))
    opened, stack = {start}, [start]
    while stack:
        here = stack[-1]
        free = [there for there in neighbours(here, size, 2) if there not in opened]
        if not free:
            stack.pop()
            continue
        there = draw.choice(free)
        opened |= {there, ((here[0] + there[0]) // 2, (here[1] + there[1]) // 2)}
        stack.append(there)
    if kind == CIRCLES:
        walls = [(i, j) for i in range(size) for j in range(size) if (i + j) % 2]
        opened |= {wall for wall in walls if draw.random() < HOLES}
    return opened


def distances(opened: set[Place], source: Place, size: int) -> dict[Place, int]:
    """Steps from the source to each open site."""
    found, queue = {source: 0}, deque([source])
    while queue:
        here = queue.popleft()
        for there in neighbours(here, size, 1):
            if there in opened and there not in found:
                found[there] = found[here] + 1
                queue.append(there)
    return found


def draw_maze(size: int, kind: str, draw: random.Random) -> tuple[Tensor, Tensor]:
    """A maze with a single shortest path between two rooms."""
    while True:
        opened = carve(size, kind, draw)
        rooms = [place for place in sorted(opened) if place[0] % 2 == place[1] % 2 == 0]
        first, last = draw.sample(rooms, 2)
        ahead, back = (distances(opened, end, size) for end in (first, last))
        path = [place for place in opened if ahead[place] + back[place] == ahead[last]]
        if len(path) == ahead[last] + 1:  # else several paths are the shortest
            break
    inputs, target = torch.zeros(3, size, size), torch.zeros(size, size, dtype=torch.int64)
    inputs[0] = 1.0
    for i, j in opened:
        inputs[0, i, j] = 0.0
    inputs[1][first], inputs[2][last] = 1.0, 1.0
    for place in path:
        target[place] = 1
    return inputs, target


def draw_mazes(number: int, size: int, kind: str, seed: int) -> Mazes:
    draw = random.Random(f"{seed} {size} {kind}")
    pairs = [draw_maze(size, kind, draw) for _ in range(number)]
    return Mazes(*(torch.stack(parts) for parts in zip(*pairs, strict=True)))


class Cell(nn.Module):
    """``z <- z + g (c - z)``: a gate g and a candidate c of each site from its neighbours and the maze."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.look = nn.Conv2d(channels + 3, 2 * channels, 3, padding=1)
        self.decide = nn.Conv2d(2 * channels, 2 * channels, 1)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        heard = F.relu(self.look(torch.cat([z, x], 1)))
        gate, candidate = self.decide(heard).chunk(2, 1)
        return torch.lerp(z, torch.tanh(candidate), torch.sigmoid(gate))


class EquilibriumMaze(nn.Module):
    """Logits of each site from the fixed point of a cell, which starts at zero."""

    def __init__(self, channels: int, iterations: tuple[int, int], window: int) -> None:
        super().__init__()
        self.iterations, self.window = iterations, window
        init = lambda x: x.new_zeros(len(x), channels, *x.shape[2:])  # noqa: E731
        self.layer = DEQ.from_update(Cell(channels), init=init, on_failure="ignore")
        self.readout = nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (M, 2, N, N) after a random number of iterations, as in training."""
        count = random.randint(*self.iterations)
        return self.readout(self.layer.unrolled(count, window=self.window)(x))

    def solve(self, x: Tensor, most: int) -> solvers.Solution:
        """Iterate until each maze is at a residual of 1e-3; a slow one is not given up."""
        return self.layer.solve(
            x, solver=solvers.Forward(), tolerance=1e-3, max_steps=most, adjoint=None,
            stop=lambda z: torch.zeros(len(z), dtype=torch.bool),
        )  # fmt: skip


class Network(nn.Module):
    """Residual convolutions with weights of their own."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(1, channels), nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(),
                nn.Conv2d(channels, channels, 1),
            )
            for _ in range(layers)
        )  # fmt: skip
        self.readout = nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        for layer in self.layers:
            z = z + layer(z)
        return self.readout(z)


def train(model: Any, mazes: Mazes, minutes: float, batches: int | None) -> float:
    """Run Adam for some minutes, or for batches; return the mean loss of the last tenth."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    begun, losses = time.monotonic(), []
    for number in itertools.count():
        share = (time.monotonic() - begun) / (60 * minutes) if batches is None else number / batches
        if share >= 1:
            break
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, 20 * share + 0.05, 3 * (1 - share) + 0.02)
        chosen = torch.randint(len(mazes.targets), (32,))
        loss = F.cross_entropy(model(mazes.inputs[chosen]), mazes.targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    last = losses[-max(1, len(losses) // 10) :]
    print(f"  {len(losses)} batches, last loss {sum(last) / len(last):.4f}", flush=True)
    return sum(last) / len(last)


def right(logits: Tensor, mazes: Mazes) -> Tensor:
    """(M,) bool: which mazes have the right path at every site."""
    return (logits.argmax(1) == mazes.targets).flatten(1).all(1)


def by_iterations(model: EquilibriumMaze, mazes: Mazes, most: int, seed: int) -> Table:
    """The share of mazes that are right after 1, 2, 4, ... iterations."""
    z, rows, wanted = model.layer.init(mazes.inputs), Table(), 1  # type: ignore[operator]
    for count in range(1, most + 1):
        z = model.layer.update(z, mazes.inputs)
        if count in (wanted, most):
            share = right(model.readout(z), mazes).double().mean().item()
            size = mazes.targets.shape[1]
            rows.append({"size": size, "seed": seed, "iterations": count, "solved": share})
            wanted *= 2
    return rows


def mazes(
    minutes: float = 10.0,  # time of training of each seed, of all models together
    steps: int = 0,  # training steps of each model instead; 0: by time
    tests: int = 50,  # number of test mazes of each size up to 25, fewer of larger ones
    seeds: int = 3,  # number of trainings of each model
    largest: int = 99,  # largest test size
    channels: int = 24,  # channels of the state
) -> Result:
    limit = steps or None
    pool = draw_mazes(5000 if limit is None else 100, 9, TREES, 0)
    sizes = [size for size in SIZES if size <= largest]
    held = {
        (size, kind): draw_mazes(max(4, min(tests, tests * 300 // size**2)), size, kind, 1)
        for size in sizes
        for kind in ((TREES, CIRCLES) if size < 40 else (TREES,))
    }
    measured, course = Table(), Table()
    path: list[Tensor] = []
    for seed in range(seeds):
        for label, share in ((CONVERGED, 0.8), (SAME_DEPTH, 0.13), (SAME_PARAMETERS, 0.07)):
            print(f"seed {seed}: {label}", flush=True)
            torch.manual_seed(seed)
            random.seed(seed)
            model: Any
            if label == CONVERGED:
                model = EquilibriumMaze(channels, (12, 60), 12)
            else:
                deep = label == SAME_DEPTH
                model = Network(channels, 30) if deep else Network(channels + 2, 2)
            loss = train(model, pool, share * minutes, limit)
            parameters = sum(each.numel() for each in model.parameters())
            with torch.no_grad():
                for (size, kind), test in held.items():
                    row = {"model": label, "parameters": parameters, "kind": kind, "size": size}
                    row |= {"seed": seed, "loss": loss}
                    if label == CONVERGED:
                        end = model.solve(test.inputs, 16 * size)
                        logits = model.readout(end.value)
                        known = end.converged
                        row |= {"evaluations": end.evaluations.double().mean().item()}
                        row |= {"converged": known.double().mean().item()}
                    else:
                        logits = model(test.inputs)
                        row |= {"evaluations": float(len(model.layers)), "converged": 1.0}
                    measured.append(row | {"solved": right(logits, test).double().mean().item()})
                    shown = [f"{measured[-1][key]:.2f}" for key in ("solved", "converged")]
                    print(f"  {kind} {size}: solved, converged", *shown, flush=True)
                if label == CONVERGED:
                    for size in sizes[1:4:2]:
                        course += by_iterations(model, held[size, TREES], 16 * size, seed)
                    if not path:
                        path = filling(model, held[sizes[min(3, len(sizes) - 1)], TREES])
    return {"seeds": measured, "course": course}, draw(measured, course, path)


def filling(model: EquilibriumMaze, test: Mazes) -> list[Tensor]:
    """Probabilities of the path in the first maze after some iterations, with walls at -1."""
    x, pictures = test.inputs[:1], []
    for count in (2, 8, 32, 128, 512):
        probability = model.readout(model.layer.unrolled(count)(x)).softmax(1)[0, 1]
        pictures.append(torch.where(x[0, 0] > 0, -1.0, probability))
    return pictures


def draw(measured: Table, course: Table, path: list[Tensor]) -> Figure:
    figure = plt.figure(figsize=(12, 7), dpi=80)
    figure.suptitle("Mazes, trained on 9 x 9")
    parts: Any = figure.subfigures(2, 1)
    above, below = parts
    by_size, by_time = above.subplots(1, 2)
    for label, color in STYLES.items():
        for kind, style in ((TREES, "-"), (CIRCLES, ":")):
            rows = [row for row in measured if row["model"] == label and row["kind"] == kind]
            sizes = sorted({row["size"] for row in rows})
            shares = [columns(rows, "solved", size=size)[0] for size in sizes]
            means = [sum(each) / len(each) for each in shares]
            by_size.plot(
                sizes, means, color=color, linestyle=style, marker="o", label=f"{label} ({kind})"
            )
            if kind == TREES:
                low, high = [min(each) for each in shares], [max(each) for each in shares]
                by_size.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
    by_size.set(xlabel="sites of a side", ylabel="share of mazes solved", ylim=(-0.03, 1.03))
    by_size.legend(fontsize=7)
    for k, size in enumerate(sorted({row["size"] for row in course})):
        for seed in sorted({row["seed"] for row in course}):
            places, shares = columns(course, "iterations", "solved", size=size, seed=seed)
            label = f"{size} x {size}" if seed == 0 else None
            by_time.plot(places, shares, color=f"C{k}", marker=".", label=label)
    by_time.set(xlabel="iterations", xscale="log", ylim=(-0.03, 1.03))
    by_time.legend()
    for axes, picture, count in zip(
        below.subplots(1, len(path)), path, (2, 8, 32, 128, 512), strict=True
    ):
        walls = picture < 0
        axes.imshow(torch.where(walls, torch.nan, picture).numpy(), cmap="viridis", vmin=0, vmax=1)
        axes.set(title=f"{count} iterations", xticks=[], yticks=[])
    return figure


if __name__ == "__main__":
    run(mazes)
