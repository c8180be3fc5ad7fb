"""Does a model trained on small mazes solve large ones if it iterates until its answer no longer changes?

    python examples/mazes.py        # three seeds, about half an hour of one core

A local update marks the path between two places. It is trained on mazes of 9 x 9 sites with random numbers
of iterations, of which the last 6 to 12 have gradients, so that it learns to keep its answer. A second phase
with more iterations penalises changes of a settled state. Left: the share of mazes whose path is right at
every site, against the size, for this model, the same update trained with 30 iterations, and a convolutional
network with equal parameters. Right: against the iterations. Below: a path that fills in.

Two more kinds of mazes differ from those of training: trees with many short dead ends, and mazes with loops,
where filling the dead ends leaves more than the path. Another column compares the answers with that rule.

Source: Bansal et al., "End-to-end Algorithm Synthesis with Recurrent Networks" (2022),
https://arxiv.org/abs/2202.05826; Knutson et al., "On Logical Extrapolation for Mazes with Recurrent and
Implicit Networks" (2024), https://arxiv.org/abs/2410.03020.
"""

import random
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
TREES, BUSHES, LOOPS = "trees", "bushy trees", "loops"
CONVERGED = "equilibrium, until it converges"
SAME_DEPTH, CONTINUED = "trained with 30 iterations", "trained with 30, until it converges"
SAME_PARAMETERS = "network, equal parameters"
KINDS = (TREES, BUSHES, LOOPS)
LOOKS = {  # colours, and the kinds of mazes that are drawn
    CONVERGED: ("C0", KINDS), SAME_DEPTH: ("C3", KINDS[:1]), CONTINUED: ("C4", KINDS[:1]),
    SAME_PARAMETERS: ("C1", KINDS[:1]),
}  # fmt: skip
DEPTH = 30  # iterations of the rival in training
WINDOW = (6, 12)  # iterations with gradients in training
SETTLED = 30  # iterations after which the state should no longer change
HOLES = 0.1  # share of the walls that are opened in mazes with loops
LONGEST = 30  # limit of a solve, in iterations per site of a side
SHOWN = (5, 10, 20, 40, 160)  # iterations of the pictures


class Phase(NamedTuple):
    """A part of training."""

    share: float  # of the option ``steps``
    rate: float  # largest learning rate
    decay: float  # slope of its decay
    before: int  # most iterations before those with gradients
    weight: float  # of the mean squared change of a settled state


PHASES = (Phase(1.0, 3e-3, 3.0, 25, 0.0), Phase(0.343, 1e-3, 1.0, 60, 3.0))


class Mazes(NamedTuple):
    """Inputs (M, 3, N, N): walls, the start, the end; targets (M, N, N), 1 on the path."""

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


def fill_dead_ends(inputs: Tensor) -> Tensor:
    """Close open sites with at most one open neighbour, except for the ends, until there is none.

    Returns the sites (M, N, N) that remain, int64.
    """
    cross = torch.tensor([[[[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]]])
    left, ends = 1 - inputs[:, :1], inputs[:, 1:].sum(1, keepdim=True)
    while True:
        fewer = left * ((F.conv2d(left, cross, padding=1) + 9 * ends) > 1)
        if torch.equal(fewer, left):
            return left[:, 0].long()
        left = fewer


class Cell(nn.Module):
    """``z <- z + g (c - z)``: a gate g and a candidate c of each site from its neighbours and the maze.

    Gates close where nothing is left to do, so states stay where they are.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.look = nn.Conv2d(channels + 3, channels, 3, padding=1)
        self.decide = nn.Conv2d(channels, 2 * channels, 1)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        features = F.relu(self.look(torch.cat([z, x], 1)))
        gate, candidate = self.decide(features).chunk(2, 1)
        return torch.lerp(z, torch.tanh(candidate), torch.sigmoid(gate))


class Still:
    """A rule for the option ``stop``: the state changed by less than 3e-4 of its norm.

    Closing gates let the state of a solved maze creep, so the estimated error of the state, which the
    default rule includes, stays large after the answer is final.
    """

    def __init__(self) -> None:
        self.before: Tensor | None = None

    def __call__(self, z: Tensor) -> Tensor:
        before = torch.zeros_like(z) if self.before is None else self.before
        self.before = z
        return (z - before).flatten(1).norm(dim=1) < 3e-4 * z.flatten(1).norm(dim=1)


class EquilibriumMaze(nn.Module):
    """Logits (M, 2, N, N) after iterations of a cell from zero.

    ``depth``: train with so many iterations and gradients through all of them, not with random numbers.
    """

    def __init__(self, channels: int, depth: int | None = None) -> None:
        super().__init__()
        self.depth = depth
        init = lambda x: x.new_zeros(len(x), channels, *x.shape[2:])  # noqa: E731
        self.layer = DEQ.from_update(Cell(channels), init=init)
        self.readout = nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor, phase: Phase = PHASES[0]) -> tuple[Tensor, Tensor]:
        """Return the logits after the iterations of a training batch, and the penalty of the phase."""
        window = random.randint(*WINDOW)
        count = window + random.randint(0, phase.before)
        if self.depth is not None:
            window = count = self.depth
        z, penalty = self.layer.unrolled(count, window=window)(x), x.new_zeros(())
        if phase.weight > 0 and count >= SETTLED:
            penalty = phase.weight * (self.layer.update(z, x) - z).square().mean()
        return self.readout(z), penalty

    def solve(self, x: Tensor) -> solvers.Solution:
        """Iterate until the state of each maze is still."""
        return self.layer.solve(
            x, solver=solvers.Forward(), tolerance=1e-3, max_steps=LONGEST * x.shape[2], adjoint=None,
            stop=Still(), on_failure="ignore",
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

    def forward(self, x: Tensor, phase: Phase = PHASES[0]) -> tuple[Tensor, Tensor]:
        z = self.first(x)
        for layer in self.layers:
            z = z + layer(z)
        return self.readout(z), x.new_zeros(())


def train(model: Any, mazes: Mazes, steps: int, phase: Phase) -> None:
    """Run steps of Adam with batches of 16 mazes."""
    optimizer = torch.optim.Adam(model.parameters())
    losses: list[float] = []
    for number in range(steps):
        share = number / steps
        factor = min(1.0, 20 * share + 0.05, phase.decay * (1 - share) + 0.02)
        optimizer.param_groups[0]["lr"] = phase.rate * factor
        chosen = torch.randint(len(mazes.targets), (16,))
        logits, penalty = model(mazes.inputs[chosen], phase)
        loss = F.cross_entropy(logits, mazes.targets[chosen])
        optimizer.zero_grad()
        (loss + penalty).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    print(f"  {steps} steps, last loss {sum(last) / len(last):.4f}", flush=True)


def equal(logits: Tensor, targets: Tensor) -> float:
    """Return the share of mazes whose answer is the target at every site."""
    return (logits.argmax(1) == targets).flatten(1).all(1).double().mean().item()


def answer(model: Any, label: str, x: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Return the logits, the mean evaluations, and the share of mazes that came to rest."""
    if label in (CONVERGED, CONTINUED):
        end = model.solve(x)
        still = (end.evaluations < LONGEST * x.shape[2]).double().mean().item()
        mean = end.evaluations.double().mean().item()
        return model.readout(end.value), {"evaluations": mean, "still": still}
    depth = DEPTH if label == SAME_DEPTH else len(model.layers)
    return model(x)[0], {"evaluations": float(depth), "still": 0.0}


def by_iterations(model: EquilibriumMaze, mazes: Mazes, seed: int) -> Table:
    """Return the share of mazes that are right after 1, 2, 4, ... iterations."""
    rows, size = Table(), mazes.targets.shape[1]
    z, done = model.layer.init(mazes.inputs), 0  # type: ignore[operator]
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
    return x, [model.readout(each).softmax(1)[k, 1].where(x[0] == 0, torch.nan) for each in z]


def mazes(
    steps: int = 3500,  # number of training steps
    tests: int = 30,  # number of test mazes of each size, fewer of large ones
    seeds: int = 3,  # number of trainings of each model
    largest: int = 99,  # largest test size
    channels: int = 16,  # channels of the state
) -> Result:
    measured, course, paths = Table(), Table(), list[Any]()
    for seed in range(seeds):
        rows, shares, path = one_seed(seed, steps, tests, largest, channels)
        measured += rows
        course += shares
        paths.append(path)
    return {"seeds": measured, "course": course}, draw(measured, course, paths[0])


def one_seed(
    seed: int, steps: int, tests: int, largest: int, channels: int
) -> tuple[Table, Table, tuple[Tensor, list[Tensor]]]:
    """Train and test all models; return the rows of the two tables and a path that fills in."""
    pool = draw_mazes(min(5000, 16 * steps), 9, TREES, 0)
    sizes = [size for size in SIZES if size <= largest]
    held = {
        (size, kind): draw_mazes(-(-number // part), size, kind, seed + 1)
        for kind, part in ((TREES, 1), (BUSHES, 2), (LOOPS, 2))
        for size in sizes
        for number in [min(tests, max(4, tests * 900 // size**2))]
        if kind == TREES or size <= 39
    }
    measured, course, path = Table(), Table(), (torch.empty(0), list[Tensor]())
    # A step of the rival with 30 iterations has gradients through all of them.
    contenders: list[tuple[Any, int, int, tuple[str, ...]]] = [
        (lambda: EquilibriumMaze(channels), steps, 2, (CONVERGED,)),
        (lambda: EquilibriumMaze(channels, DEPTH), (steps + 1) // 2, 1, (SAME_DEPTH, CONTINUED)),
        (lambda: Network(3 * channels // 4, 2), steps, 1, (SAME_PARAMETERS,)),
    ]
    for build, number, phases, labels in contenders:
        print(f"seed {seed}: {labels[0]}", flush=True)
        torch.manual_seed(seed)
        random.seed(seed)
        model = build()
        for phase in PHASES[:phases]:
            train(model, pool, round(phase.share * number), phase)
        known = {"parameters": sum(each.numel() for each in model.parameters()), "seed": seed}
        with torch.no_grad():
            for label in labels:
                for (size, kind), test in held.items():
                    if label != CONVERGED and (size > 39 or kind != TREES):
                        continue
                    logits, row = answer(model, label, test.inputs)
                    row["solved"] = equal(logits, test.targets)
                    row["as_filling"] = equal(logits, fill_dead_ends(test.inputs))
                    measured.append({"model": label, "kind": kind, "size": size} | known | row)
                    print("  ", *measured[-1].values(), flush=True)
            if labels == (CONVERGED,):
                for size in sizes[1:3]:
                    course += by_iterations(model, held[size, TREES], seed)
                path = filling(model, held[sizes[min(2, len(sizes) - 1)], TREES])
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
