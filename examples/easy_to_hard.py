"""Easy to hard: parity along a ring, trained on small rings and solved on larger ones with more iterations.

The answer at a position is the parity of the bits since the last mark, which takes as many local steps as
the run is long. A local block is trained with random numbers of iterations, so that its answer is a fixed
point; it solves larger rings with more iterations. Baselines are transformers with equal parameters or
equal evaluations, the same block with a fixed number of iterations or with one iteration, and the majority
class. The example takes twenty minutes.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from options import Recipe
from runner import Result, Table, columns, draw_band, run
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn import DEQ, Update

EQUILIBRIUM, ALWAYS, ONCE = "equilibrium", "same block, iterations not random", "one iteration"
SAME_PARAMETERS, SAME_DEPTH = "transformer, equal parameters", "transformer, equal evaluations"
MAJORITY, ANDERSON = "majority class", f"{EQUILIBRIUM}, Anderson"
FOLLOWED = (1.0, 2.0, 4.0)  # factors of size of which solved shares are followed over iterations
FURTHER = (1.5, 3.0, 8.0, 16.0)
LONG, MOST = 4, 64  # times the iterations of training: a long run, and the limit of a solve
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

    Each evaluation lets a position look at its neighbours and reads the input anew. ``forward`` iterates
    from zero and is differentiated through all ``iterations``, more than a small ring needs, so that the
    model learns to keep its answer. ``layer`` solves for the fixed point.

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
        """Return what every evaluation sees of the inputs (B, N, 2)."""
        bias = self.bias(inputs.shape[1]).expand(len(inputs), -1, -1, -1)
        return Surroundings(self.embedding(inputs), bias)

    def decode(self, state: Tensor) -> Tensor:
        """Return logits (B, N, 2) of a state (B, N, d)."""
        return self.readout(self.norm(state))

    def states(self, inputs: Tensor) -> Iterator[Tensor]:
        """Yield the state after each iteration from zero."""
        x = self.encode(inputs)
        z = self.layer.update.initial(x)
        while True:
            z = self.layer.update(z, x)
            yield z

    def forward(self, inputs: Tensor, *, iterations: int | None = None) -> Tensor:
        """Return logits after ``iterations`` evaluations from zero."""
        last = (iterations or self.iterations) - 1
        return self.decode(next(itertools.islice(self.states(inputs), last, None)))

    def solve(self, inputs: Tensor, solver: solvers.Solver, most: int) -> solvers.Solution:
        """Solve until each ring is at a residual of 1e-3."""
        options: Any = {"max_steps": most, "adjoint": None, "on_failure": "ignore"}
        return self.layer.solve(self.encode(inputs), solver=solver, tolerance=1e-3, **options)


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


def train(model: nn.Module, sizes: tuple[int, int], recipe: Any) -> None:
    """``recipe.epochs`` steps, each on rings of one size."""
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = recipe.build_optimizer(model)
    for step in range(recipe.epochs):
        optimizer.param_groups[0]["lr"] = recipe.rate_at(step / recipe.epochs)
        batch = draw_some_size(recipe.batch, sizes, generator)
        iterations = recipe.draw_iterations(generator)
        options: dict[str, Any] = {} if iterations is None else {"iterations": iterations}
        loss = F.cross_entropy(model(batch.inputs, **options).mT, batch.targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def draw_some_size(number: int, sizes: tuple[int, int], generator: torch.Generator) -> Rings:
    least, most = sizes
    positions = int(torch.randint(least, most + 1, (), generator=generator))
    return draw_rings(number, positions, generator)


def shares(logits: Tensor, rings: Rings) -> dict[str, float]:
    """Return the shares of solved rings and of right positions."""
    right = logits.argmax(2) == rings.targets
    return {"solved": mean(right.all(1)), "accuracy": mean(right)}


def mean(numbers: Tensor) -> float:
    return numbers.double().mean().item()


def answer(model: Any, rings: Rings, way: int | tuple[solvers.Solver, int]) -> dict[str, Any]:
    """Return the measures of a model after ``way`` iterations, or by a solver with at most so many."""
    if isinstance(way, tuple):
        end = model.solve(rings.inputs, *way)
        found = shares(model.decode(end.value), rings) | {"evaluations": mean(end.evaluations)}
        wrong = (model.decode(end.value).argmax(2) != rings.targets).any(1)
        return found | {"converged": mean(end.converged), "wrong": mean(end.converged & wrong)}
    options = {} if isinstance(model, LayeredRing) else {"iterations": way}
    found = shares(model(rings.inputs, **options), rings)
    return found | {"evaluations": float(way), "converged": None, "wrong": None}


def follow(model: EquilibriumRing, rings: Rings, known: dict[str, Any]) -> tuple[Table, Table]:
    """Return solved shares against iterations, and the iterations that rings of each difficulty need."""
    budgets = multiples(model.iterations)
    ends = [model.decode(z) for z in itertools.islice(model.states(rings.inputs), budgets[-1])]
    curves = [{**known, "iterations": n, **shares(ends[n - 1], rings)} for n in budgets]
    # Iterations after which each ring is solved for good, 0 where it is not.
    solved = torch.stack([(end.argmax(2) == rings.targets).all(1) for end in ends])
    ever_after = solved.flip(0).long().cumprod(0).flip(0)
    first = torch.where(ever_after[-1] > 0, ever_after.argmax(0) + 1, 0)
    needed = Table()
    for difficulty in rings.difficulty.unique().tolist():
        reached = first[(rings.difficulty == difficulty) & (first > 0)]
        row = known | {"difficulty": difficulty, "solved rings": len(reached)}
        needed.append(row | {"iterations": mean(reached) if len(reached) else float("nan")})
    return curves, needed


def multiples(trained: int) -> list[int]:
    """Return a quarter to 16 times the iterations of training, each twice the one before."""
    return sorted({max(1, round(trained * 2.0**power)) for power in range(-2, 5)})


def over_seeds(table: Table, same: list[str], measures: list[str]) -> Table:
    """Merge rows that agree in ``same``: mean, least and most of each measure that is not None."""
    groups: dict[Any, Table] = {}
    for row in table:
        groups.setdefault(tuple(row[name] for name in same), []).append(row)
    merged: Table = []
    for key, rows in groups.items():
        new: dict[str, Any] = {**dict(zip(same, key, strict=True)), "seeds": len(rows)}
        for name in measures:
            values = [row[name] for row in rows if row[name] is not None] or [float("nan")]
            new |= {name: sum(values) / len(values), f"{name}_least": min(values)}
            new[f"{name}_most"] = max(values)
        merged.append(new)
    return merged


def easy_to_hard(
    size: int = 16,  # number of positions of the largest training rings
    steps: int = 200,  # training batches of the equilibrium block
    tests: int = 100,  # number of test rings of each size
    seeds: int = 3,  # number of trainings of each model
    seed: int = 0,  # random seed of the first training
    factors: tuple[float, ...] = FURTHER,  # additional test sizes, as multiples of size
) -> Result:
    sizes, trained, depth = (max(2, size // 2 - 2), size), 2 * size, 3 * size // 2
    long, twice = LONG * trained, 2 * steps
    ring, layers = partial(EquilibriumRing, DIM, HEADS), partial(LayeredRing, heads=HEADS)
    # model, steps, learning rate, iterations in training; the ways in which it answers
    contenders: dict[str, tuple[Any, int, float, Any, dict[str, Any]]] = {
        EQUILIBRIUM: (partial(ring, iterations=trained), steps, 3e-3, (size, trained), {
            f"{EQUILIBRIUM}, {trained} iterations as in training": trained,
            f"{EQUILIBRIUM}, {long} iterations": long,
            f"{EQUILIBRIUM}, stops by itself": (solvers.Forward(), MOST * trained),
            ANDERSON: (solvers.Anderson(), LONG * long),
        }),
        SAME_DEPTH: (partial(layers, DIM, layers=depth, local=True), twice, 2e-3, None, {SAME_DEPTH: depth}),
        SAME_PARAMETERS: (partial(layers, DIM // 2, layers=LAYERS), twice * depth // LAYERS, 3e-3, None,
                          {SAME_PARAMETERS: LAYERS}),
        ALWAYS: (partial(ring, iterations=depth), steps, 3e-3, depth,
                 {f"{ALWAYS}, {number} iterations": number for number in (depth, long)}
                 | {f"{ALWAYS}, stops by itself": (solvers.Forward(), MOST * trained)}),
        ONCE: (partial(ring, iterations=1), twice, 3e-3, 1, {ONCE: 1}),
    }  # fmt: skip
    rings = {
        factor: draw_rings(tests, number, torch.Generator().manual_seed(TEST_SEED + number))
        for factor in sorted({*FOLLOWED, *factors})
        for number in [round(size * factor)]
    }
    measured, curves, needed = Table(), Table(), Table()
    for now in range(seed, seed + seeds):
        for name, (build, batches, rate, times, ways) in contenders.items():
            print(f"seed {now}: {name}", flush=True)
            torch.manual_seed(now)
            model = build()
            recipe = Recipe(epochs=batches, batch=64, rate=rate, seed=now, random_iterations=times)
            train(model, sizes, recipe.fill({"warmup": 0.1}))
            parameters = sum(each.numel() for each in model.parameters())
            with torch.no_grad():
                for (label, way), (factor, test) in itertools.product(ways.items(), rings.items()):
                    if label != ANDERSON or factor in FOLLOWED:  # it is slow on the largest rings
                        row = {"model": label, "seed": now, "size": test.targets.shape[1]}
                        row |= {"parameters": parameters, **answer(model, test, way)}
                        measured.append(row)
                for factor in FOLLOWED if name == EQUILIBRIUM else ():
                    known = {"size": rings[factor].targets.shape[1], "seed": now}
                    found = follow(model, rings[factor], known)
                    curves, needed = curves + found[0], needed + found[1]
    drawn = draw_some_size(1000, sizes, torch.Generator().manual_seed(0)).targets
    common = F.one_hot(drawn.flatten().mode().values, 2)[None, None]
    for test in rings.values():
        row = {"model": MAJORITY, "seed": 0, "size": test.targets.shape[1], "parameters": 0}
        row |= {**shares(common, test), "evaluations": 0.0, "converged": None, "wrong": None}
        measured.append(row)
    shown = ["solved", "accuracy", "evaluations", "wrong"]
    tested = [test.targets.shape[1] for test in rings.values()]
    summary: dict[str, dict[str, Any]] = {}  # a row for each model, means over seeds
    for row in over_seeds(measured, ["model", "parameters", "size"], shown):
        blank = dict.fromkeys(f"{measure}_{n}" for n in tested for measure in shown)
        known = {"model": row["model"], "parameters": row["parameters"]}
        line = summary.setdefault(row["model"], known | blank)
        line |= {f"{measure}_{row['size']}": row[measure] for measure in shown}
    note = f"; {seeds} seeds, mean and range" if seeds > 1 else ""
    title = f"Easy to hard: parity along a ring, trained on small rings{note}"
    tables = {"sizes": measured, "curves": curves, "needed": needed}
    return {"summary": [*summary.values()], **tables}, draw(title, tables, sizes)


def draw_seeds(axes: Any, rows: Table, against: str, **look: Any) -> None:
    """Draw the solved share, mean over seeds and range."""
    merged = sorted(over_seeds(rows, [against], ["solved"]), key=lambda row: row[against])
    draw_band(axes, merged, against, "solved", "_least", "_most", 0.18, marker="o", **look)


def draw(title: str, tables: dict[str, Table], sizes: tuple[int, int]) -> Figure:
    figure, (larger, iterations, need) = plt.subplots(1, 3, figsize=(15, 4.7), dpi=80)
    figure.suptitle(title)
    size, trained = sizes[1], 2 * sizes[1]
    labels = {
        f"{EQUILIBRIUM}, stops by itself": ("#8c6bb1", "-"),
        f"{EQUILIBRIUM}, {LONG * trained} iterations": ("C0", "-"),
        f"{EQUILIBRIUM}, {trained} iterations as in training": ("C0", ":"),
        f"{ALWAYS}, {LONG * trained} iterations": ("C2", "--"),
        SAME_DEPTH: ("C3", "-"), SAME_PARAMETERS: ("C1", "-"), ONCE: ("C4", "--"), MAJORITY: ("black", ":"),
    }  # fmt: skip
    for label, (color, style) in labels.items():
        rows = [row for row in tables["sizes"] if row["model"] == label]
        draw_seeds(larger, rows, "size", color=color, label=label, linestyle=style)
    tested = sorted({row["size"] for row in tables["sizes"]})
    larger.set_xscale("log", base=2)
    larger.set_xticks(tested, [str(number) for number in tested])
    larger.set(xlabel="positions of the ring (grey: in training)", ylabel="rings solved")
    larger.set(title="larger rings than in training", ylim=(-0.03, 2.1))
    larger.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])  # the legend stands above
    larger.legend(fontsize=8, loc="upper right")
    followed = sorted({row["size"] for row in tables["needed"]})
    for number, color in zip(followed, ("C2", "C0", "C3"), strict=False):
        rows = [row for row in tables["curves"] if row["size"] == number]
        label = f"{number} positions ({number / size:g}x)"
        draw_seeds(iterations, rows, "iterations", color=color, label=label)
        points = columns(tables["needed"], "difficulty", "iterations", size=number)
        need.plot(*points, "o", color=color, markersize=4, alpha=0.5, label=f"{number} positions")
    factors = {budget: budget / trained for budget in multiples(trained)}
    names = [f"{b}\n{f:.3g}x" if f >= 1 else f"{b}\n1/{1 / f:.3g}x" for b, f in factors.items()]
    iterations.set_xscale("log", base=2)
    iterations.set_xticks(list(factors), names)
    iterations.axvline(trained, color="black", linestyle=":", linewidth=1)
    iterations.set(xlabel="iterations; multiples of training's most", ylim=(-0.03, 1.03))
    iterations.set(title="equilibrium: more iterations, larger rings", ylabel="rings solved")
    iterations.legend(fontsize=9, loc="lower right")
    ends = [1, max(row["difficulty"] for row in tables["needed"])]
    need.plot(ends, ends, color="black", linewidth=1, label="one position an iteration")
    need.set(xlabel="difficulty: longest run between marks (grey: in training)")
    need.set(ylabel="iterations until solved for good", title="what an instance needs, forward")
    need.legend(fontsize=9, loc="upper left")
    larger.axvspan(*sizes, color="C4", alpha=0.15, linewidth=0)
    need.axvspan(1, size, color="C4", alpha=0.15, linewidth=0)
    return figure


if __name__ == "__main__":
    run(easy_to_hard)
