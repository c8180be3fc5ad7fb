"""Does a model trained on small mazes solve large ones if it iterates until its answer no longer changes?

    python examples/mazes.py        # three seeds, about twenty minutes of CPU time

A local update marks the path between two places. It is trained on mazes of 9 x 9 sites so that its answers
are fixed points that do not depend on the way to them: in each iteration noise is added to the state and a
random part of the sites changes, half of the mazes start from random states or from answers to other mazes,
and only the last 4 to 8 iterations have gradients. Left: the share of mazes whose path is right at every
site, against the size, for this model, the same without noise, the same update trained and tested with 30
iterations, and a convolutional network with equal parameters. Right: against the iterations. Below: a maze
whose dead ends are filled until the path is left.

Two more kinds of mazes differ from those of training: trees with many short dead ends, and mazes with loops,
where filling the dead ends leaves more than the path. Another column compares the answers with that rule.

Source: Bansal et al., "End-to-end Algorithm Synthesis with Recurrent Networks" (2022),
https://arxiv.org/abs/2202.05826; Anil et al., "Path Independent Equilibrium Models Can Better Exploit
Test-Time Computation" (2022), https://arxiv.org/abs/2211.09961; random times of changes: Mordvintsev et
al., "Growing Neural Cellular Automata" (2020), https://doi.org/10.23915/distill.00023; mazes with loops:
Knutson et al., "On Logical Extrapolation for Mazes with Recurrent and Implicit Networks" (2024),
https://arxiv.org/abs/2410.03020.
"""

import random
import time
from collections import deque
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from joblib import Parallel, delayed
from matplotlib.figure import Figure
from runner import Result, Table, columns, run
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn import DEQ

Place = tuple[int, int]
SIZES = (9, 15, 25, 39, 59, 99)
TREES, BUSHES, LOOPS = "trees", "bushy trees", "loops"
CONVERGED = "equilibrium, until it converges"
WITHOUT = "trained without noise, until it converges"
SAME_DEPTH = "trained and tested with 30 iterations"
SAME_PARAMETERS = "network, equal parameters"
KINDS = (TREES, BUSHES, LOOPS)
LOOKS = {  # colours, and the kinds of mazes that are drawn
    CONVERGED: ("C0", KINDS), WITHOUT: ("C2", KINDS[:1]), SAME_DEPTH: ("C3", KINDS[:1]),
    SAME_PARAMETERS: ("C1", KINDS[:1]),
}  # fmt: skip
DEPTH = 30  # iterations of the rival in training
BEFORE = (0, 45)  # iterations without gradients in training
WINDOW = (4, 8)  # iterations with gradients after them
HOLES = 0.1  # share of the walls that are opened in mazes with loops
RATE = 3e-3  # largest learning rate
TOLERANCE = 1e-4  # of a solve
LONGEST = 30  # limit of a solve, in iterations per site of a side
SHOWN = (10, 30, 100, 250, 1000)  # iterations of the pictures


class Mazes(NamedTuple):
    """Inputs (M, 3, N, N): open sites, the start, the end; targets (M, N, N), 1 on the path."""

    inputs: Tensor
    targets: Tensor


def neighbours(place: Place, size: int, step: int) -> list[Place]:
    i, j = place
    near = [(i - step, j), (i + step, j), (i, j - step), (i, j + step)]
    return [(a, b) for a, b in near if 0 <= a < size and 0 <= b < size]


def carve(size: int, kind: str, draw: random.Random) -> set[Place]:
    """Return the open sites of a maze with rooms at even places, by a random search.

    The search continues from the last room (depth first), or from a random one for bushy trees.
    """
    start = (2 * draw.randrange((size + 1) // 2), 2 * draw.randrange((size + 1) // 2))
    opened, rooms = {start}, [start]
    while rooms:
        index = draw.randrange(len(rooms)) if kind == BUSHES else -1
        here = rooms[index]
        free = [there for there in neighbours(here, size, 2) if there not in opened]
        if not free:
            rooms.pop(index)
            continue
        there = draw.choice(free)
        opened |= {there, ((here[0] + there[0]) // 2, (here[1] + there[1]) // 2)}
        rooms.append(there)
    if kind == LOOPS:
        walls = [(i, j) for i in range(size) for j in range(size) if (i + j) % 2]
        opened |= {wall for wall in walls if draw.random() < HOLES}
    return opened


def distances(opened: set[Place], source: Place, size: int) -> dict[Place, int]:
    """Return the steps from the source to each open site."""
    steps, queue = {source: 0}, deque([source])
    while queue:
        here = queue.popleft()
        for there in neighbours(here, size, 1):
            if there in opened and there not in steps:
                steps[there] = steps[here] + 1
                queue.append(there)
    return steps


def draw_maze(size: int, kind: str, draw: random.Random) -> tuple[Tensor, Tensor]:
    """Return inputs and target of a maze with a single shortest path between two rooms."""
    while True:
        opened = carve(size, kind, draw)
        rooms = [place for place in sorted(opened) if place[0] % 2 == place[1] % 2 == 0]
        first, last = draw.sample(rooms, 2)
        ahead, back = (distances(opened, end, size) for end in (first, last))
        path = [place for place in opened if ahead[place] + back[place] == ahead[last]]
        if len(path) == ahead[last] + 1:  # otherwise several paths are the shortest
            break
    inputs, target = torch.zeros(3, size, size), torch.zeros(size, size, dtype=torch.int64)
    for place in opened:
        inputs[0][place] = 1.0
    inputs[1][first], inputs[2][last] = 1.0, 1.0
    for place in path:
        target[place] = 1
    return inputs, target


def draw_mazes(number: int, size: int, kind: str, seed: int) -> Mazes:
    draw = random.Random(f"{seed} {size} {kind}")
    pairs = [draw_maze(size, kind, draw) for _ in range(number)]
    return Mazes(*(torch.stack(parts) for parts in zip(*pairs, strict=True)))


def fill_dead_ends(inputs: Tensor) -> Tensor:
    """Close open sites with at most one open neighbour, except for the ends, until there is none.

    Returns the sites (M, N, N) that remain, int64.
    """
    cross = torch.tensor([[[[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]]])
    left, ends = inputs[:, :1], inputs[:, 1:].sum(1, keepdim=True)
    while True:
        fewer = left * ((F.conv2d(left, cross, padding=1) + 9 * ends) > 1)
        if torch.equal(fewer, left):
            return left[:, 0].long()
        left = fewer


class Cell(nn.Module):
    """Return the next state of each open site from the states around it and the maze; walls stay zero."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.look = nn.Conv2d(channels + 3, channels, 3, padding=1)
        self.decide = nn.Conv2d(channels, channels, 1)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        features = F.relu(self.look(torch.cat([z, x], 1)))
        return torch.tanh(self.decide(features)) * x[:, :1]


class EquilibriumMaze(nn.Module):
    """Logits (M, 2, N, N) of a fixed point of a cell.

    ``noise``: deviation of the noise that each iteration adds to the state in training. ``depth``: train
    with so many iterations from zero and gradients through all of them instead.
    """

    def __init__(self, channels: int, noise: float = 0.35, depth: int | None = None) -> None:
        super().__init__()
        self.noise, self.depth = noise, depth
        init = lambda x: x.new_zeros(len(x), channels, *x.shape[2:])  # noqa: E731
        self.layer = DEQ.from_update(Cell(channels), init=init)
        self.readout = nn.Conv2d(channels, 2, 1)
        self.last: Tensor | None = None  # states of the last training batch

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits for a training batch, and a penalty.

        In an iteration each site changes with a probability that is drawn for each maze, half of them 1. A
        quarter of the mazes starts from random states and a quarter from final ones of the last batch. The
        penalty is the mean squared change in one more iteration of all sites.
        """
        update, z = self.layer.update, self.layer.init(x)  # type: ignore[operator]
        if self.depth is not None:
            for _ in range(self.depth):
                z = update(z, x)
            return self.readout(z), x.new_zeros(())
        part = len(x) // 4
        z[:part] = torch.empty_like(z[:part]).uniform_(-1, 1)
        if self.last is not None:
            z[part : 2 * part] = self.last[torch.randperm(len(x))[:part]]
        z = z * x[:, :1]
        share = (0.5 + torch.rand(len(x), 1, 1, 1)).clamp(max=1)
        window = random.randint(*WINDOW)
        count = window + random.randint(*BEFORE)
        for number in range(count):
            with torch.set_grad_enabled(number >= count - window):
                z = z + self.noise * torch.randn_like(z) * x[:, :1]
                z = torch.where(torch.rand_like(x[:, :1]) < share, update(z, x), z)
        self.last = z.detach()
        return self.readout(z), (update(z, x) - z).square().mean()

    def solve(self, x: Tensor) -> solvers.Solution:
        """Iterate until the state of each maze converges."""
        return self.layer.solve(
            x, solver=solvers.Forward(), tolerance=solvers.Tolerance(TOLERANCE, patience=None),
            max_steps=LONGEST * x.shape[2], adjoint=None, on_failure="ignore",
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

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.first(x) * x[:, :1]
        for layer in self.layers:
            z = z + layer(z) * x[:, :1]
        return self.readout(z), x.new_zeros(())


def train(model: Any, mazes: Mazes, steps: int) -> float:
    """Run steps of Adam with batches of 16 mazes; return the mean loss of the last tenth."""
    optimizer = torch.optim.Adam(model.parameters())
    losses: list[float] = []
    for number in range(steps):
        share = number / steps
        optimizer.param_groups[0]["lr"] = RATE * min(
            1.0, 20 * share + 0.05, 2.5 * (1 - share) + 0.02
        )
        chosen = torch.randint(len(mazes.targets), (16,))
        logits, penalty = model(mazes.inputs[chosen])
        loss = F.cross_entropy(logits, mazes.targets[chosen])
        optimizer.zero_grad()
        (loss + penalty).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def equal(logits: Tensor, targets: Tensor) -> float:
    """Return the share of mazes whose answer is the target at every site."""
    return (logits.argmax(1) == targets).flatten(1).all(1).double().mean().item()


def answer(model: Any, label: str, x: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Return the logits, the mean evaluations, and the share of mazes whose state converged."""
    if label in (CONVERGED, WITHOUT):
        end = model.solve(x)
        still, mean = (v.double().mean().item() for v in (end.converged, end.evaluations))
        return model.readout(end.value), {"evaluations": mean, "still": still}
    depth = DEPTH if label == SAME_DEPTH else len(model.layers)
    return model(x)[0], {"evaluations": float(depth), "still": 0.0}


def by_iterations(model: EquilibriumMaze, mazes: Mazes, seed: int) -> Table:
    """Return the share of mazes that are right after 1, 2, 4, ... iterations."""
    rows, size = Table(), mazes.targets.shape[1]
    z, done = None, 0
    for count in [2**k for k in range((LONGEST * size).bit_length())]:
        z = model.layer.unrolled(count - done)(mazes.inputs, z0=z)
        done = count
        share = equal(model.readout(z), mazes.targets)
        rows.append({"size": size, "seed": seed, "iterations": count, "solved": share})
    return rows


def filling(model: EquilibriumMaze, mazes: Mazes) -> tuple[Tensor, list[Tensor]]:
    """Return the solved maze with the longest path, and the probabilities of its path, NaN at walls."""
    z = [model.layer.unrolled(count)(mazes.inputs) for count in SHOWN]
    right = (model.readout(z[-1]).argmax(1) == mazes.targets).flatten(1).all(1)
    k = int((mazes.targets.sum((1, 2)) * right).argmax())
    x = mazes.inputs[k]
    return x, [model.readout(each).softmax(1)[k, 1].where(x[0] > 0, torch.nan) for each in z]


def mazes(
    steps: int = 2400,  # number of training steps
    tests: int = 30,  # number of test mazes of each size, fewer of large ones
    seeds: int = 3,  # number of trainings of each model
    largest: int = 99,  # largest test size
    channels: int = 16,  # channels of the state
    processes: int = 2,  # number of trainings at the same time
) -> Result:
    work = [(label, seed) for label in LOOKS for seed in range(seeds)]
    trainings = (delayed(one_training)(*each, steps, tests, largest, channels) for each in work)
    ends: list[Any] = list(Parallel(n_jobs=processes)(trainings))
    measured, course = (sum((end[part] for end in ends), Table()) for part in (0, 1))
    return {"trainings": measured, "course": course}, draw(measured, course, ends[0][2])


def one_training(
    label: str, seed: int, steps: int, tests: int, largest: int, channels: int
) -> tuple[Table, Table, tuple[Tensor, list[Tensor]] | None]:
    """Train and test a model; return the rows of the two tables and a path that fills in."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random.seed(seed)
    # A step with gradients through all iterations takes more than twice as long.
    number = (steps + 1) // 2 if label == SAME_DEPTH else steps
    model: Any = {
        CONVERGED: lambda: EquilibriumMaze(channels),
        WITHOUT: lambda: EquilibriumMaze(channels, noise=0.0),
        SAME_DEPTH: lambda: EquilibriumMaze(channels, depth=DEPTH),
        SAME_PARAMETERS: lambda: Network(3 * channels // 4, 2),
    }[label]()
    start = time.process_time()
    loss = train(model, draw_mazes(min(5000, 16 * steps), 9, TREES, 0), number)
    seconds = time.process_time() - start
    print(f"{label}, seed {seed}: last loss {loss:.4f}, {seconds:.0f} s", flush=True)
    known = {"seed": seed, "parameters": sum(each.numel() for each in model.parameters())}
    sizes = [size for size in SIZES if size <= largest]
    measured, course, path = Table(), Table(), None
    with torch.no_grad():
        for kind in LOOKS[label][1]:
            for size in sizes if kind == TREES else sizes[:4]:
                most = min(tests, max(4, tests * 900 // size**2))
                test = draw_mazes(most if kind == TREES else -(-most // 2), size, kind, seed + 1)
                logits, row = answer(model, label, test.inputs)
                row["solved"] = equal(logits, test.targets)
                row["as_filling"] = equal(logits, fill_dead_ends(test.inputs))
                measured.append({"model": label, "kind": kind, "size": size} | known | row)
                print("  ", *measured[-1].values(), flush=True)
                if label == CONVERGED and kind == TREES and size in sizes[1:4]:
                    course += by_iterations(model, test, seed)
                if label == CONVERGED and kind == TREES and size == sizes[-2] and seed == 0:
                    path = filling(model, test)
    return measured, course, path


def draw(measured: Table, course: Table, path: tuple[Tensor, list[Tensor]]) -> Figure:
    figure = plt.figure(figsize=(12, 7.4), dpi=80)
    figure.suptitle("Paths through mazes, trained on 9 x 9 sites")
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.5, 1))
    by_size, by_time = parts[0].subplots(1, 2)
    for label, (color, kinds) in LOOKS.items():
        for kind, style in zip(kinds, ("-", "--", ":"), strict=False):
            rows = [row for row in measured if row["model"] == label and row["kind"] == kind]
            sizes = sorted({row["size"] for row in rows})
            shares = [columns(rows, "solved", size=size)[0] for size in sizes]
            means = [sum(each) / len(each) for each in shares]
            low, high = [min(each) for each in shares], [max(each) for each in shares]
            name = label if kind == TREES else f"the same, {kind}"
            by_size.plot(sizes, means, color=color, linestyle=style, marker="o", label=name)
            if kind == TREES:
                by_size.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)
    by_size.set_xscale("log")
    by_size.set_xticks(SIZES, [str(size) for size in SIZES])
    by_size.minorticks_off()
    by_size.set(
        xlabel="sites of a side (training: 9)", ylabel="share of mazes solved", ylim=(-0.03, 1.03)
    )
    by_size.set(title="mean and range of the seeds")
    by_size.legend(fontsize=8)
    for k, size in enumerate(sorted({row["size"] for row in course})):
        for seed in sorted({row["seed"] for row in course}):
            places, shares = columns(course, "iterations", "solved", size=size, seed=seed)
            label = f"{size} x {size}" if seed == 0 else None
            by_time.plot(places, shares, color=f"C{k}", marker=".", label=label)
    by_time.set(xlabel="iterations", xscale="log", ylim=(-0.03, 1.03))
    by_time.set(title="equilibrium, each seed a line")
    by_time.legend(fontsize=8)
    x, pictures = path
    rows, places = x[1:].sum(0).nonzero(as_tuple=True)
    panels = parts[1].subplots(1, len(pictures))
    for axes, picture, count in zip(panels, pictures, SHOWN, strict=True):
        axes.set_facecolor("black")
        axes.imshow(picture.numpy(), cmap="Blues", vmin=0, vmax=1)
        axes.plot(places, rows, "o", color="C3")
        axes.set(title=f"{count} iterations", xticks=[], yticks=[])
    return figure


if __name__ == "__main__":
    run(mazes)
