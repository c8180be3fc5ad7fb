"""Easy to hard: parity along a ring, trained on small rings, solved on larger ones by more iterations.

    python examples/easy_to_hard.py        # a quarter of an hour

The answer at a position is the parity of the bits since the last mark, which takes as many local steps as
a run is long. A local block is trained with random numbers of iterations, so that its answer is a fixed
point; larger rings then take more iterations and nothing else. Beside it: transformers of equal parameters
and of equal evaluations, the same block with a number of iterations that is not random, one iteration, and
the majority class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from runner import Table, columns, run
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn import DEQ, Update
from implicit_attn.training import Recipe

EQUILIBRIUM, ALWAYS, ONCE = "equilibrium", "same block, iterations not random", "one iteration"
SAME_PARAMETERS, SAME_DEPTH = "transformer, equal parameters", "transformer, equal evaluations"
MAJORITY = "majority class"
FORWARD, DAMPED, ANDERSON, ANNEALED = "forward", "damped, 1/2", "Anderson", "annealed"
FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0)  # sizes of the test, as multiples of the largest of training
FOLLOWED = (1.0, 2.0, 4.0)  # of which solved shares are followed over iterations
LONG = 4  # times the iterations of training: what the equilibrium is given on any size
RTOLS = (0.1, 0.03, 0.01, 1e-3, 1e-4)
DIM, HEADS, LAYERS = 32, 4, 4  # LAYERS: of the transformer of equal parameters
FORBIDDEN = -1e4  # a score whose exponential is zero; infinity would be refused as a layer's input
TEST_SEED = 1_000_000_007  # apart from those of training


class Rings(NamedTuple):
    """Inputs (B, N, 2), the right classes (B, N) int64, and the longest run of each ring (B,)."""

    inputs: Tensor
    targets: Tensor
    difficulty: Tensor


def draw_rings(
    number: int, size: int, generator: torch.Generator, marks: tuple[int, int] = (1, 3)
) -> Rings:
    r"""Rings of random bits, some positions marked; the answer is the parity since the last mark.

    With bits ``b_i`` and positions counted around the ring::

        y_i = b_i                      where i is marked
        y_i = (b_i + y_{i-1}) mod 2    elsewhere

    A map that looks at neighbours alone needs as many applications as the longest run from a mark to
    the last position before the next one: this run is the difficulty. The inputs are ``2 b_i - 1`` and,
    at marks, 1, else -1. ``marks``: least and most marks of a ring, of which at most ``size`` are set.

    Source: prefix sums as a task of extrapolation: Bansal et al., "End-to-end Algorithm Synthesis with
    Recurrent Networks" (2022), https://arxiv.org/abs/2202.05826; ring and marks are ours.
    """
    bits = torch.randint(2, (number, size), generator=generator)
    wanted = torch.randint(marks[0], marks[1] + 1, (number, 1), generator=generator)
    marked = torch.rand(number, size, generator=generator).argsort(1).argsort(1) < wanted
    parity, run = torch.zeros_like(bits[:, 0]), torch.zeros_like(bits[:, 0])
    targets, longest = torch.empty_like(bits), torch.zeros_like(run)
    # Twice around: the second time, what came before the first mark is known. Runs that begin at no
    # mark, the first time, are too short, never too long.
    for here in [*range(size)] * 2:
        parity = torch.where(marked[:, here], bits[:, here], bits[:, here] ^ parity)
        run = torch.where(marked[:, here], 1, run + 1)
        targets[:, here] = parity
        longest = torch.maximum(longest, run)
    inputs = torch.stack([bits, marked.long()], dim=2).float() * 2 - 1
    return Rings(inputs, targets, longest)


class RingBias(nn.Module):
    """Biases of the pairs of a ring: ``forward(N)`` -> (heads, N, N), the same for every position.

    A learned number for each head and each offset in {-1, 0, 1}. ``local``: further pairs are masked.
    Otherwise all pairs see each other, with ``-exp(s) n`` added, n the positions back from i to j around
    the ring; the slopes ``exp(s)`` of the heads are learned from 1/2, 1/4, 1/8, ...

    Source: linear biases that extend to longer inputs: Press, Smith, Lewis, "Train short, test long"
    (2022), https://arxiv.org/abs/2108.12409.
    """

    def __init__(self, heads: int, local: bool) -> None:
        super().__init__()
        starts = -torch.arange(1, heads + 1) * torch.log(torch.tensor(2.0))
        self.slopes = None if local else nn.Parameter(starts)
        self.table = nn.Parameter(torch.randn(heads, 3))

    def forward(self, size: int) -> Tensor:
        places, half = torch.arange(size), (size - 1) // 2
        behind = places[:, None] - places[None, :]
        offsets = (behind + half) % size - half  # the shorter way round
        near = offsets.clamp(-1, 1)
        table = self.table[:, near + 1]
        if self.slopes is None:
            return table.masked_fill(near != offsets, FORBIDDEN)
        return table * (near == offsets) - self.slopes.exp()[:, None, None] * (behind % size)


class Surroundings(NamedTuple):
    """The input of a :class:`CellBlock`: cells x (B, N, d) and biases of pairs, ([B,] heads, N, N)."""

    cells: Tensor
    bias: Tensor


class CellBlock(Update):
    r"""``h = x + A(LN(z))``, ``h + W_2 relu(W_1 LN(h))``: what cells take from others is added to x.

    A is attention with scores ``q_i . k_j / sqrt(d / heads) + b_ij``, with 2 d hidden units W_1. With
    ``x = z`` it is a pre-norm layer of a transformer; with another x, the input of a fixed point, which
    begins at 0. All parts but x are bounded, so the map z -> f(z, x) has a fixed point whatever the weights.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.widen, self.narrow = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def initial(self, x: Surroundings) -> Tensor:
        return torch.zeros_like(x.cells)

    def forward(self, z: Tensor, x: Any = None) -> Tensor:  # type: ignore[override]
        normed = self.attention_norm(z)
        made = self.queries_keys_values(normed).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = made.chunk(3, dim=1)  # (B, heads, N, d / heads) each
        # Written out: with a bias that learns, the fused kernel is not to be had on the CPU.
        weights = ((query * query.shape[3] ** -0.5) @ key.mT + x.bias).softmax(dim=3)
        h = x.cells + self.output((weights @ value).transpose(1, 2).flatten(2))
        return h + self.narrow(F.relu(self.widen(self.feedforward_norm(h))))


class EquilibriumRing(nn.Module):
    r"""Classes of the positions of a ring from the fixed point ``z* = f(z*, x)`` of a local block.

    Each evaluation lets a position look at its neighbours and reads the input anew; nothing depends on
    the length of the ring or the place on it. ``forward`` iterates from zero and is differentiated
    through all ``iterations``, more than a small ring needs, so that what is found must stay. ``layer``
    solves for it by any solver.

    Source: input injection and random numbers of iterations for extrapolation: Bansal et al. (2022),
    https://arxiv.org/abs/2202.05826; fixed points that do not depend on the start: Anil et al. (2022),
    https://arxiv.org/abs/2211.09961.
    """

    def __init__(self, dim: int, heads: int, iterations: int = 32) -> None:
        super().__init__()
        self.iterations = iterations
        self.embedding = nn.Linear(2, dim)
        self.bias = RingBias(heads, local=True)
        self.layer = DEQ(CellBlock(dim, heads), max_steps=iterations, on_failure="ignore")
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, 2)

    def encode(self, inputs: Tensor) -> Surroundings:
        """What every evaluation sees of the inputs (B, N, 2)."""
        bias = self.bias(inputs.shape[1]).expand(len(inputs), -1, -1, -1)
        return Surroundings(self.embedding(inputs), bias)

    def decode(self, state: Tensor) -> Tensor:
        """Logits (B, N, 2) of a state (B, N, d)."""
        return self.readout(self.norm(state))

    def forward(self, inputs: Tensor, *, iterations: int | None = None) -> Tensor:
        """Logits after ``iterations`` evaluations from zero."""
        x = self.encode(inputs)
        z = self.layer.update.initial(x)
        for _ in range(self.iterations if iterations is None else iterations):
            z = self.layer.update(z, x)
        return self.decode(z)


class LayeredRing(nn.Module):
    """Pre-norm layers with weights and biases of their own, each a :class:`CellBlock` with ``x = z``.

    ``local``: positions look at their neighbours, not at all others.
    """

    def __init__(self, dim: int, heads: int, layers: int, local: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Linear(2, dim)
        self.blocks: Any = nn.ModuleList(CellBlock(dim, heads) for _ in range(layers))
        self.biases: Any = nn.ModuleList(RingBias(heads, local) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        z = self.embedding(inputs)
        for block, bias in zip(self.blocks, self.biases, strict=True):
            z = block(z, Surroundings(z, bias(inputs.shape[1])))
        return self.readout(self.norm(z))


def train(model: nn.Module, draw: Callable[..., Rings], recipe: Recipe) -> list[float]:
    """The losses of ``recipe.epochs`` steps, each on one batch of ``draw(number, generator)``."""
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer, losses = recipe.build_optimizer(model), list[float]()
    for step in range(recipe.epochs):
        optimizer.param_groups[0]["lr"] = recipe.rate_at(step / recipe.epochs)
        batch = draw(recipe.batch, generator)
        iterations = recipe.draw_iterations(generator)
        options: dict[str, Any] = {} if iterations is None else {"iterations": iterations}
        loss = F.cross_entropy(model(batch.inputs, **options).mT, batch.targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    return losses


class Answer(NamedTuple):
    """Classes (B, N), evaluations (B,), and which rings reached the tolerance, (B,)."""

    predicted: Tensor
    evaluations: Tensor
    converged: Tensor


Method = Callable[[Any, Tensor, int], Answer]  # (model, inputs, evaluations at most)


def spent(logits: Tensor, evaluations: int) -> Answer:
    number = torch.full(logits.shape[:1], evaluations)
    return Answer(logits.argmax(2), number, torch.zeros_like(number, dtype=torch.bool))


def layered(model: LayeredRing, inputs: Tensor, budget: int) -> Answer:
    return spent(model(inputs), budget)


def states(model: EquilibriumRing, inputs: Tensor, count: int, step: float = 1) -> Iterator[Tensor]:
    """After each of ``count`` iterations ``z <- z + step (f(z, x) - z)``."""
    x = model.encode(inputs)
    z = model.layer.update.initial(x)
    for _ in range(count):
        new = model.layer.update(z, x)
        z = new if step == 1 else torch.lerp(z, new, step)
        yield z


def iterated(model: EquilibriumRing, inputs: Tensor, budget: int, step: float = 1) -> Answer:
    (end,) = deque(states(model, inputs, budget, step), maxlen=1)
    return spent(model.decode(end), budget)


def annealed(
    model: EquilibriumRing, inputs: Tensor, budget: int, noise: float = 0.5, parts: int = 4
) -> Answer:
    """Iterations in S equal parts; after the first evaluation of part s the state moves by
    ``noise (1 - s / (S - 1))`` times its root mean square times N(0, 1), if evaluations follow to mend it."""
    generator = torch.Generator().manual_seed(0)
    x = model.encode(inputs)
    z = model.layer.update.initial(x)
    ends = pairwise(round(budget * part / parts) for part in range(parts + 1))
    for part, (start, end) in enumerate(ends):
        level = noise * (1 - part / (parts - 1))
        for made in range(start, end):
            z = model.layer.update(z, x)
            if made == start and level > 0 and end - start > 1:
                size = z.square().flatten(1).mean(1).sqrt().view(-1, 1, 1)
                z = z + level * size * torch.randn(z.shape, generator=generator)
    return spent(model.decode(z), budget)


def solved_by(
    model: EquilibriumRing, inputs: Tensor, budget: int, solver: Any, rtol: float = 1e-6
) -> Answer:
    """A solve in which a ring stops at the tolerance; the best iterate answers."""
    end = model.layer.solve(
        model.encode(inputs), solver=solver, tolerance=solvers.Tolerance(rtol=rtol),
        max_steps=budget, adjoint=None, on_failure="ignore",
    )  # fmt: skip
    return Answer(model.decode(end.value).argmax(2), end.evaluations, end.converged)


WAYS: dict[str, Method] = {
    FORWARD: iterated, DAMPED: partial(iterated, step=0.5),
    ANDERSON: partial(solved_by, solver=solvers.Anderson()), ANNEALED: annealed,
}  # fmt: skip
SOLVERS = {FORWARD: solvers.Forward(), ANDERSON: solvers.Anderson()}


def shares(right: Tensor) -> dict[str, float]:
    """Of solved rings and of right positions, from ``right`` (B, N)."""
    solved, accuracy = right.all(1).double().mean().item(), right.double().mean().item()
    return {"solved": solved, "accuracy": accuracy}


def kinds(rings: Rings) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """The difficulties, and which rings have each."""
    for difficulty in rings.difficulty.unique().tolist():
        some = rings.difficulty == difficulty
        yield {"difficulty": difficulty, "samples": int(some.sum())}, some


def lasting(model: EquilibriumRing, rings: Rings, most: int) -> Tensor:
    """(B,): iterations after which a ring is solved for good, 0 where it is not."""
    ends = states(model, rings.inputs, most)
    solved = torch.stack([(model.decode(z).argmax(2) == rings.targets).all(1) for z in ends])
    ever_after = solved.flip(0).long().cumprod(0).flip(0)
    return torch.where(ever_after[-1] > 0, ever_after.argmax(0) + 1, 0)


def unfolding(model: EquilibriumRing, rings: Rings, most: int) -> Tensor:
    """(most, N) bool: where the hardest ring is right after each iteration, from its longest run on."""
    hardest = Rings(*(each[rings.difficulty.argmax()[None]] for each in rings))
    ends = states(model, hardest.inputs, most)
    right = torch.cat([model.decode(z).argmax(2) == hardest.targets for z in ends])
    places = (hardest.inputs[0, :, 1] > 0).nonzero().flatten()
    gaps = (places.roll(-1) - places - 1) % right.shape[1]
    return right.roll(-int(places[gaps.argmax()]), dims=1)


def over_seeds(table: Table, same: Sequence[str], measures: Sequence[str]) -> Table:
    """Rows that agree in ``same`` become one: mean, least and most of each measure."""
    groups: dict[Any, Table] = {}
    for row in table:
        groups.setdefault(tuple(row[name] for name in same), []).append(row)
    merged: Table = []
    for key, rows in groups.items():
        new: dict[str, Any] = {**dict(zip(same, key, strict=True)), "seeds": len(rows)}
        for name in measures:
            values = [row[name] for row in rows]
            new |= {name: sum(values) / len(values), f"{name}_least": min(values)}
            new[f"{name}_most"] = max(values)
        merged.append(new)
    return merged


def easy_to_hard(
    size: int = 16, steps: int = 200, tests: int = 100, seeds: int = 3, seed: int = 0
) -> tuple[dict[str, Table], Figure]:
    """Prefix parity on rings: trained on small ones, solved on larger ones by more iterations.

    Args:
        size: positions of the largest rings in training.
        steps: batches of the equilibrium's training; transformers get twice its evaluations.
        tests: rings of each size in the test.
        seeds: trainings of each model.
        seed: the first of them.
    """
    least, trained, depth = max(2, size // 2 - 2), 2 * size, 3 * size // 2
    long = LONG * trained

    def draw(number: int, generator: torch.Generator) -> Rings:
        positions = int(torch.randint(least, size + 1, (), generator=generator))
        return draw_rings(number, positions, generator)

    ring = partial(EquilibriumRing, DIM, HEADS)
    stop = partial(solved_by, solver=solvers.Forward(), rtol=1e-3)
    # model, steps, learning rate, iterations in training; how it answers, in how many evaluations
    contenders: dict[str, tuple[Any, int, float, Any, dict[str, tuple[Method, int]]]] = {
        EQUILIBRIUM: (partial(ring, iterations=trained), steps, 3e-3, (size, trained), {
            f"{EQUILIBRIUM}, {trained} iterations as in training": (iterated, trained),
            f"{EQUILIBRIUM}, {long} iterations": (iterated, long),
            f"{EQUILIBRIUM}, stops by itself": (stop, LONG * long),
        }),
        SAME_DEPTH: (
            partial(LayeredRing, DIM, HEADS, depth, local=True), 2 * steps, 2e-3, None,
            {SAME_DEPTH: (layered, depth)},
        ),
        SAME_PARAMETERS: (
            partial(LayeredRing, DIM // 2, HEADS, LAYERS), 2 * steps * depth // LAYERS, 3e-3, None,
            {SAME_PARAMETERS: (layered, LAYERS)},
        ),
        ALWAYS: (
            partial(ring, iterations=depth), steps, 3e-3, depth,
            {f"{ALWAYS}, {number} iterations": (iterated, number) for number in (depth, long)},
        ),
        ONCE: (partial(ring, iterations=1), 2 * steps, 3e-3, 1, {ONCE: (layered, 1)}),
    }  # fmt: skip
    rings = {
        factor: draw_rings(tests, number, torch.Generator().manual_seed(TEST_SEED + number))
        for factor in FACTORS
        for number in [round(size * factor)]
    }
    tables = {name: Table() for name in ("sizes", "curves", "adaptive", "stops", "needed")}
    picture = None
    for now in range(seed, seed + seeds):
        for name, (build, batches, rate, times, ways) in contenders.items():
            print(f"seed {now}: {name}", flush=True)
            torch.manual_seed(now)
            model = build()
            train(model, draw, Recipe(batches, 64, rate, warmup=0.1, seed=now, iterations=times))
            parameters = sum(each.numel() for each in model.parameters())
            with torch.no_grad():
                for label, (method, budget) in ways.items():
                    for test in rings.values():
                        found = method(model, test.inputs, budget)
                        row = {"model": label, "seed": now, "size": test.targets.shape[1]}
                        row |= {"parameters": parameters, "evaluations": mean(found.evaluations)}
                        tables["sizes"].append(row | shares(found.predicted == test.targets))
                if name == EQUILIBRIUM:
                    for factor in FOLLOWED:
                        known = {"size": rings[factor].targets.shape[1], "seed": now}
                        ways_of = list(WAYS) if factor == FOLLOWED[1] else [FORWARD]
                        follow(model, rings[factor], ways_of, trained, known, tables)
                    if picture is None:
                        picture = unfolding(model, rings[FOLLOWED[-1]], long)
    common = draw(1000, torch.Generator().manual_seed(0)).targets.flatten().mode().values
    for test in rings.values():
        row = {"model": MAJORITY, "seed": 0, "size": test.targets.shape[1], "parameters": 0}
        tables["sizes"].append({**row, "evaluations": 0.0, **shares(test.targets == common)})
    measures = ["evaluations", "evaluations_90", "converged", "solved", "accuracy"]
    first = {
        "summary": summary(tables["sizes"]),
        "stopping": over_seeds(tables["adaptive"], ["method", "size", "rtol"], measures),
    }
    note = f"; {seeds} seeds, mean and range" if seeds > 1 else ""
    title = f"Easy to hard: parity along a ring, trained on small rings{note}"
    return first | tables, draw_all(title, tables, picture, size, least)


def mean(numbers: Tensor) -> float:
    return numbers.double().mean().item()


def follow(
    model: EquilibriumRing, rings: Rings, ways: list[str], trained: int, known: dict[str, Any],
    tables: dict[str, Table],
) -> None:  # fmt: skip
    """The equilibrium against iterations, to tolerances, and by difficulty: rows for the tables."""
    for name in ways:
        for budget in multiples(trained):
            found = WAYS[name](model, rings.inputs, budget)
            row = {"method": name, **known, "iterations": budget}
            row |= {
                "evaluations": mean(found.evaluations),
                **shares(found.predicted == rings.targets),
            }
            tables["curves"].append(row)
    first = lasting(model, rings, LONG * trained)
    for kind, some in kinds(rings):
        reached = first[some & (first > 0)]
        row = known | kind | {"solved": len(reached) / kind["samples"]}
        row["iterations"] = mean(reached) if len(reached) else None
        row["iterations_most"] = int(reached.max()) if len(reached) else None
        tables["needed"].append(row)
    for name, solver in SOLVERS.items():
        for rtol in RTOLS:
            found = solved_by(model, rings.inputs, LONG * LONG * trained, solver, rtol)
            numbers = found.evaluations.double()
            row = {"method": name, **known, "rtol": rtol, "evaluations": mean(numbers)}
            row["evaluations_90"] = numbers.quantile(0.9).item()
            row["converged"] = mean(found.converged)
            tables["adaptive"].append(row | shares(found.predicted == rings.targets))
            for kind, some in kinds(rings):
                row = {"method": name, **known, **kind, "rtol": rtol}
                tables["stops"].append(row | {"evaluations": mean(numbers[some])})


def multiples(trained: int) -> list[int]:
    """From a quarter to 16 times the iterations of training, each twice the one before."""
    return sorted({max(1, round(trained * 2.0**power)) for power in range(-2, 5)})


def summary(sizes: Table) -> Table:
    """A row for each model: solved shares and accuracies of all sizes, means over seeds."""
    rows: dict[str, dict[str, Any]] = {}
    for row in over_seeds(sizes, ["model", "parameters", "size"], ["solved", "accuracy"]):
        known = {"model": row["model"], "parameters": row["parameters"]}
        for measure in ("solved", "accuracy"):
            rows.setdefault(row["model"], known)[f"{measure}_{row['size']}"] = row[measure]
    return list(rows.values())


def draw_seeds(
    axes: Any, rows: Table, against: str, color: str, label: str, style: str = "-"
) -> None:
    """The solved share, mean over seeds and range."""
    merged = sorted(over_seeds(rows, [against], ["solved"]), key=lambda row: row[against])
    places, low, high, mean = columns(merged, against, "solved_least", "solved_most", "solved")
    axes.fill_between(places, low, high, color=color, alpha=0.18, linewidth=0)
    axes.plot(places, mean, color=color, label=label, marker="o", linestyle=style)


def draw_all(title: str, tables: dict[str, Table], picture: Any, size: int, least: int) -> Figure:
    figure, axes = plt.subplots(2, 3, figsize=(15, 8.6), dpi=80)
    figure.suptitle(title)
    (larger, iterations, methods), (need, stop, unfold) = axes
    trained, curves = 2 * size, tables["curves"]
    labels = {
        f"{EQUILIBRIUM}, {LONG * trained} iterations": ("C0", "-"),
        f"{EQUILIBRIUM}, {trained} iterations as in training": ("C0", ":"),
        f"{ALWAYS}, {LONG * trained} iterations": ("C2", "--"),
        SAME_DEPTH: ("C3", "-"), SAME_PARAMETERS: ("C1", "-"), ONCE: ("C4", "--"), MAJORITY: ("black", ":"),
    }  # fmt: skip
    for label, (color, style) in labels.items():
        rows = [row for row in tables["sizes"] if row["model"] == label]
        draw_seeds(larger, rows, "size", color, label, style)
    larger.axvspan(least, size, color="C4", alpha=0.15, linewidth=0)
    larger.set_xticks(sorted({row["size"] for row in tables["sizes"]}))
    larger.set_xlabel("positions of the ring (grey: in training)")
    larger.set_title("larger rings than in training")
    larger.set(ylim=(-0.03, 1.85), yticks=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0])  # the legend stands above
    larger.legend(fontsize=8, loc="upper right")

    followed = sorted({row["size"] for row in tables["needed"]})
    sizes = dict(zip(followed, ("C2", "C0", "C3"), strict=False))
    for number, color in sizes.items():
        rows = [row for row in curves if (row["method"], row["size"]) == (FORWARD, number)]
        label = f"{number} positions ({number / size:g}x)"
        draw_seeds(iterations, rows, "iterations", color, label)
    iterations.set_xlabel("iterations; multiples of training's most")
    iterations.set_title("equilibrium: more iterations, larger rings")
    iterations.legend(fontsize=9, loc="lower right")

    middle = next(row["size"] for row in curves if row["method"] == ANDERSON)
    colors = {FORWARD: "C0", DAMPED: "C2", ANDERSON: "C1", ANNEALED: "C3"}
    for name, color in colors.items():
        rows = [row for row in curves if row["method"] == name and row["size"] == middle]
        style = "--" if name == ANNEALED else "-"  # it often lies on the first
        draw_seeds(methods, rows, "iterations", color, name, style)
    for name in SOLVERS:
        mine = [r for r in tables["adaptive"] if r["method"] == name and r["size"] == middle]
        means = columns(
            over_seeds(mine, ["rtol"], ["evaluations", "solved"]), "evaluations", "solved"
        )
        label = f"{name}, each ring stops by itself"
        methods.plot(*means, "s--", color=colors[name], markerfacecolor="white", label=label)
    methods.set_xlabel("evaluations at most; squares: mean, tolerances 0.1 to 1e-4")
    methods.set_title(f"equilibrium: ways of solving, {middle} positions")
    methods.legend(fontsize=8, loc="lower right")
    factors = {budget: budget / trained for budget in multiples(trained)}
    names = [f"{b}\n{f:.3g}x" if f >= 1 else f"{b}\n1/{1 / f:.3g}x" for b, f in factors.items()]
    for panel in (iterations, methods):
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(factors), names)
        panel.axvline(trained, color="black", linestyle=":", linewidth=1)
        panel.set_ylim(-0.03, 1.03)
    for panel in axes[0]:
        panel.set_ylabel("rings solved")

    stops = [row for row in tables["stops"] if row["rtol"] == 1e-3 and row["method"] == FORWARD]
    for panel, rows, key in ((need, tables["needed"], "iterations"), (stop, stops, "evaluations")):
        for number, color in sizes.items():
            solved = [row for row in rows if row[key] is not None]
            points = columns(solved, "difficulty", key, size=number)
            look: Any = {"color": color, "markersize": 4, "alpha": 0.5}
            panel.plot(*points, "o", label=f"{number} positions", **look)
        ends = [1, max(row["difficulty"] for row in rows)]
        panel.plot(ends, ends, color="black", linewidth=1, label="one position an iteration")
        panel.axvspan(1, size, color="C4", alpha=0.15, linewidth=0)
        panel.legend(fontsize=9, loc="upper left")
    need.set(xlabel="difficulty: longest run between marks (grey: in training)")
    need.set(ylabel="iterations until solved for good", title="what an instance needs, forward")
    stop.set(xlabel="difficulty (grey: in training)", ylabel="evaluations until it stops")
    stop.set_title("each instance stops at a residual of 0.001")

    most, positions = picture.shape
    unfold.imshow(
        picture.numpy(), cmap="Greys", vmin=-0.5, vmax=1.6, aspect="auto", origin="lower",
        extent=(0, positions, 0.5, most + 0.5), interpolation="nearest",
    )  # fmt: skip
    unfold.axhline(trained, color="black", linestyle=":", linewidth=1)
    text = unfold.text(positions, trained, "training's most ", fontsize=8, ha="right", va="bottom")
    text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})
    unfold.set(xlabel="position, from a mark on", ylabel="iteration")
    unfold.set_title(f"the hardest ring of {positions}: right answers are dark")
    return figure


if __name__ == "__main__":
    run(easy_to_hard)
