"""Easy to hard: parity along a ring, trained on small rings and solved on larger ones with more iterations.

The answer at a position is the parity of the bits since the last mark, which takes as many local steps as
the run is long. A local block is trained with random numbers of iterations, so that its answer is a fixed
point; it solves larger rings with more iterations. Baselines are transformers with equal parameters or
equal evaluations, the same block with a fixed number of iterations or with one iteration, and the majority
class. The example takes twenty minutes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
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
MAJORITY = "majority class"
FORWARD, DAMPED, ANDERSON, ANNEALED = "forward", "damped, 1/2", "Anderson", "annealed"
FOLLOWED = (1.0, 2.0, 4.0)  # factors of size of which solved shares are followed over iterations
LONG = 4  # times the iterations of training: what the equilibrium is given on any size
RTOLS = (0.1, 0.03, 0.01, 1e-3, 1e-4)
WAYS: dict[str, dict[str, float]] = {
    FORWARD: {},
    DAMPED: {"step": 0.5},
    ANDERSON: {},
    ANNEALED: {"noise": 0.5},
}
SOLVERS = {FORWARD: solvers.Forward(), ANDERSON: solvers.Anderson()}
DIM, HEADS, LAYERS = 32, 4, 4  # LAYERS: of the transformer of equal parameters
MOST = 64  # times the iterations of training, at most, where a ring stops by itself
FURTHER = (1.5, 3.0, 8.0, 16.0)
SURE = 0.99  # least largest probability of an answered position, where no residual tells
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

    def states(
        self, inputs: Tensor, count: int, step: float = 1.0, noise: float = 0.0
    ) -> Iterator[Tensor]:
        """After each of ``count`` iterations ``z <- z + step (f(z, x) - z)`` from zero.

        With ``noise`` they come in four equal parts; after the first evaluation of part s the state moves
        by ``noise (1 - s / 3)`` times its root mean square times N(0, 1), if others follow to mend it.
        """
        x, generator = self.encode(inputs), torch.Generator().manual_seed(0)
        parts = enumerate(pairwise(round(count * part / 4) for part in range(5)))
        levels = {first: noise * (1 - s / 3) for s, (first, end) in parts if end - first > 1}
        z = self.layer.update.initial(x)
        for made in range(count):
            new = self.layer.update(z, x)
            z = new if step == 1 else torch.lerp(z, new, step)
            if levels.get(made, 0.0) > 0:
                size = z.square().flatten(1).mean(1).sqrt().view(-1, 1, 1)
                z = z + levels[made] * size * torch.randn(z.shape, generator=generator)
            yield z

    def forward(self, inputs: Tensor, *, iterations: int | None = None, **way: float) -> Tensor:
        """Logits after ``iterations`` evaluations from zero."""
        (end,) = deque(self.states(inputs, iterations or self.iterations, **way), maxlen=1)
        return self.decode(end)

    def solve(self, inputs: Tensor, solver: Any, most: int, rtol: float = 1e-6) -> Any:
        """A solve in which a ring stops at the tolerance; the best iterate answers."""
        options: Any = {"max_steps": most, "adjoint": None, "on_failure": "ignore"}
        tolerance = solvers.Tolerance(rtol=rtol)
        return self.layer.solve(self.encode(inputs), solver=solver, tolerance=tolerance, **options)


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
    """Of solved rings and of right positions."""
    right = logits.argmax(2) == rings.targets
    return {"solved": mean(right.all(1)), "accuracy": mean(right)}


def answers(logits: Tensor, rings: Rings, converged: Tensor | None = None) -> dict[str, float]:
    """Shares of all rings: answered (converged, or every position above SURE), and answered wrong."""
    said = logits.softmax(2).amax(2).amin(1) > SURE if converged is None else converged
    right = (logits.argmax(2) == rings.targets).all(1)
    return {"answered": mean(said), "wrong": mean(said & ~right)}


def mean(numbers: Tensor) -> float:
    return numbers.double().mean().item()


def follow(
    model: EquilibriumRing, rings: Rings, ways: list[str], known: dict[str, Any], tables: dict[str, Table]
) -> None:  # fmt: skip
    """The equilibrium against iterations, to tolerances, and by difficulty: rows for the tables."""
    trained = model.iterations
    for name in ways:
        for budget in multiples(trained):
            if name == ANDERSON:
                end = model.solve(rings.inputs, SOLVERS[name], budget)
                logits, spent = model.decode(end.value), mean(end.evaluations)
            else:
                logits, spent = model(rings.inputs, iterations=budget, **WAYS[name]), float(budget)
            row = {"method": name, **known, "iterations": budget, "evaluations": spent}
            tables["curves"].append(row | shares(logits, rings))
    # Iterations after which each ring is solved for good, 0 where it is not.
    ends = (model.decode(z).argmax(2) for z in model.states(rings.inputs, LONG * trained))
    solved = torch.stack([(end == rings.targets).all(1) for end in ends])
    ever_after = solved.flip(0).long().cumprod(0).flip(0)
    first = torch.where(ever_after[-1] > 0, ever_after.argmax(0) + 1, 0)
    of_kind = {d: rings.difficulty == d for d in rings.difficulty.unique().tolist()}
    for difficulty, some in of_kind.items():
        reached, samples = first[some & (first > 0)], int(some.sum())
        row = known | {"difficulty": difficulty, "samples": samples}
        row |= {"solved": len(reached) / samples, "iterations": None, "iterations_most": None}
        if len(reached):
            row |= {"iterations": mean(reached), "iterations_most": int(reached.max())}
        tables["needed"].append(row)
    for name, solver in SOLVERS.items():
        for rtol in RTOLS:
            end = model.solve(rings.inputs, solver, LONG * LONG * trained, rtol)
            numbers, most = end.evaluations.double(), end.evaluations.double().quantile(0.9).item()
            row = {"method": name, **known, "rtol": rtol, "evaluations": mean(numbers)}
            row |= {"evaluations_90": most, "converged": mean(end.converged)}
            tables["adaptive"].append(row | shares(model.decode(end.value), rings))
            for difficulty, some in of_kind.items():
                row = {"method": name, **known, "difficulty": difficulty}
                row |= {"samples": int(some.sum()), "rtol": rtol}
                tables["stops"].append(row | {"evaluations": mean(numbers[some])})


def multiples(trained: int) -> list[int]:
    """From a quarter to 16 times the iterations of training, each twice the one before."""
    return sorted({max(1, round(trained * 2.0**power)) for power in range(-2, 5)})


def unfolding(model: EquilibriumRing, rings: Rings) -> Tensor:
    """(T, N) bool: where the hardest ring is right after each iteration, from its longest run on."""
    hardest = Rings(*(each[rings.difficulty.argmax()[None]] for each in rings))
    ends = model.states(hardest.inputs, LONG * model.iterations)
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
    # model, steps, learning rate, iterations in training; in how many evaluations it answers (None: stops)
    contenders: dict[str, tuple[Any, int, float, Any, dict[str, int | None]]] = {
        EQUILIBRIUM: (partial(ring, iterations=trained), steps, 3e-3, (size, trained), {
            f"{EQUILIBRIUM}, {trained} iterations as in training": trained,
            f"{EQUILIBRIUM}, {long} iterations": long, f"{EQUILIBRIUM}, stops by itself": None,
        }),
        SAME_DEPTH: (partial(layers, DIM, layers=depth, local=True), twice, 2e-3, None, {SAME_DEPTH: depth}),
        SAME_PARAMETERS: (partial(layers, DIM // 2, layers=LAYERS), twice * depth // LAYERS, 3e-3, None,
                          {SAME_PARAMETERS: LAYERS}),
        ALWAYS: (partial(ring, iterations=depth), steps, 3e-3, depth,
                 {f"{ALWAYS}, {number} iterations": number for number in (depth, long)}
                 | {f"{ALWAYS}, stops by itself": None}),
        ONCE: (partial(ring, iterations=1), twice, 3e-3, 1, {ONCE: 1}),
    }  # fmt: skip
    rings = {
        factor: draw_rings(tests, number, torch.Generator().manual_seed(TEST_SEED + number))
        for factor in sorted({*FOLLOWED, *factors})
        for number in [round(size * factor)]
    }
    tables = {name: Table() for name in ("sizes", "curves", "adaptive", "stops", "needed")}
    picture = None
    for now in range(seed, seed + seeds):
        for name, (build, batches, rate, times, ways) in contenders.items():
            print(f"seed {now}: {name}", flush=True)
            torch.manual_seed(now)
            model = build()
            recipe = Recipe(epochs=batches, batch=64, rate=rate, seed=now, random_iterations=times)
            train(model, sizes, recipe.fill({"warmup": 0.1}))
            with torch.no_grad():
                for label, budget in ways.items():
                    for test in rings.values():
                        evaluations, converged = float(budget or 0), None
                        if budget is None:
                            end = model.solve(test.inputs, SOLVERS[FORWARD], MOST * trained, 1e-3)
                            logits, evaluations = model.decode(end.value), mean(end.evaluations)
                            converged = end.converged
                        elif isinstance(model, EquilibriumRing):
                            logits = model(test.inputs, iterations=budget)
                        else:
                            logits = model(test.inputs)
                        row = {"model": label, "seed": now, "size": test.targets.shape[1]}
                        row["parameters"] = sum(each.numel() for each in model.parameters())
                        row |= {"evaluations": evaluations, **shares(logits, test)}
                        row |= answers(logits, test, converged)
                        tables["sizes"].append(row)
                if name == EQUILIBRIUM:
                    for factor in FOLLOWED:
                        known = {"size": rings[factor].targets.shape[1], "seed": now}
                        ways_of = [*WAYS] if factor == FOLLOWED[1] else [FORWARD]
                        follow(model, rings[factor], ways_of, known, tables)
                    picture = unfolding(model, rings[FOLLOWED[-1]]) if now == seed else picture
    drawn = draw_some_size(1000, sizes, torch.Generator().manual_seed(0)).targets
    common = F.one_hot(drawn.flatten().mode().values, 2)
    for test in rings.values():
        row = {"model": MAJORITY, "seed": 0, "size": test.targets.shape[1], "parameters": 0}
        row |= {"evaluations": 0.0, **shares(common[None, None], test)}
        tables["sizes"].append(row | answers(common[None, None], test, torch.ones(tests) > 0))
    summary: dict[str, dict[str, Any]] = {}  # a row for each model, means over seeds
    named = ["model", "parameters", "size"]
    shown = ["solved", "accuracy", "answered", "wrong"]
    for row in over_seeds(tables["sizes"], named, shown):
        known = {name: row[name] for name in named[:2]}
        for measure in shown:
            summary.setdefault(row["model"], known)[f"{measure}_{row['size']}"] = row[measure]
    measures = ["evaluations", "evaluations_90", "converged", "solved", "accuracy"]
    stopping = over_seeds(tables["adaptive"], ["method", "size", "rtol"], measures)
    note = f"; {seeds} seeds, mean and range" if seeds > 1 else ""
    title = f"Easy to hard: parity along a ring, trained on small rings{note}"
    figure = draw(title, tables, picture, sizes)
    return {"summary": [*summary.values()], "stopping": stopping, **tables}, figure


def draw_seeds(axes: Any, rows: Table, against: str, **look: Any) -> None:
    """The solved share, mean over seeds and range."""
    merged = sorted(over_seeds(rows, [against], ["solved"]), key=lambda row: row[against])
    draw_band(axes, merged, against, "solved", "_least", "_most", 0.18, marker="o", **look)


def draw(title: str, tables: dict[str, Table], picture: Any, sizes: tuple[int, int]) -> Figure:
    figure, axes = plt.subplots(2, 3, figsize=(15, 8.6), dpi=80)
    figure.suptitle(title)
    (larger, iterations, methods), (need, stop, unfold) = axes
    size, trained, curves = sizes[1], 2 * sizes[1], tables["curves"]
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
    larger.axvspan(*sizes, color="C4", alpha=0.15, linewidth=0)
    tested = sorted({row["size"] for row in tables["sizes"]})
    larger.set_xscale("log", base=2)
    larger.set_xticks(tested, [str(number) for number in tested])
    larger.set_xlabel("positions of the ring (grey: in training)")
    larger.set_title("larger rings than in training")
    larger.set(ylim=(-0.03, 2.1), yticks=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0])  # the legend stands above
    larger.legend(fontsize=8, loc="upper right")

    followed = sorted({row["size"] for row in tables["needed"]})
    colors_of = dict(zip(followed, ("C2", "C0", "C3"), strict=False))
    for number, color in colors_of.items():
        rows = [row for row in curves if (row["method"], row["size"]) == (FORWARD, number)]
        label = f"{number} positions ({number / size:g}x)"
        draw_seeds(iterations, rows, "iterations", color=color, label=label)
    iterations.set_xlabel("iterations; multiples of training's most")
    iterations.set_title("equilibrium: more iterations, larger rings")
    iterations.legend(fontsize=9, loc="lower right")

    middle = next(row["size"] for row in curves if row["method"] == ANDERSON)
    colors = dict(zip(WAYS, ("C0", "C2", "C1", "C3"), strict=True))
    for name, color in colors.items():
        rows = [row for row in curves if (row["method"], row["size"]) == (name, middle)]
        style = "--" if name == ANNEALED else "-"  # it often lies on the first
        draw_seeds(methods, rows, "iterations", color=color, label=name, linestyle=style)
    for name in SOLVERS:
        mine = [r for r in tables["adaptive"] if (r["method"], r["size"]) == (name, middle)]
        keys = ["evaluations", "solved"]
        points = columns(over_seeds(mine, ["rtol"], keys), *keys)
        look: Any = {"color": colors[name], "markerfacecolor": "white"}
        methods.plot(*points, "s--", label=f"{name}, each ring stops by itself", **look)
    methods.set_xlabel("evaluations at most; squares: mean, tolerances 0.1 to 1e-4")
    methods.set_title(f"equilibrium: ways of solving, {middle} positions")
    methods.legend(fontsize=8, loc="upper right")
    factors = {budget: budget / trained for budget in multiples(trained)}
    names = [f"{b}\n{f:.3g}x" if f >= 1 else f"{b}\n1/{1 / f:.3g}x" for b, f in factors.items()]
    for panel in (iterations, methods):
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(factors), names)
        panel.axvline(trained, color="black", linestyle=":", linewidth=1)
        panel.set_ylim(-0.03, 1.03)
    methods.set(ylim=(-0.03, 1.75), yticks=larger.get_yticks())  # the legend stands above
    for panel in axes[0]:
        panel.set_ylabel("rings solved")

    stops = [row for row in tables["stops"] if row["rtol"] == 1e-3 and row["method"] == FORWARD]
    for panel, rows, key in ((need, tables["needed"], "iterations"), (stop, stops, "evaluations")):
        for number, color in colors_of.items():
            solved = [row for row in rows if row[key] is not None]
            points = columns(solved, "difficulty", key, size=number)
            look = {"color": color, "markersize": 4, "alpha": 0.5}
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
