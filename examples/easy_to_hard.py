"""Does a model trained on small rings solve larger ones if it iterates until its answer no longer changes?

    python examples/easy_to_hard.py        # three seeds, a quarter of an hour

The answer at a position of a ring is the parity of the bits since the last mark, which takes as many local
steps as the run is long. A local block is trained on rings of 6 to 16 positions with random numbers of
iterations, so that its answer is a fixed point. Left: iterated until it converges, the block solves rings of
256 positions, while transformers with equal parameters or equal evaluations solve no ring of 48 or more.
Right: a ring needs about one iteration for each position of its longest run.
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

CONVERGED = "equilibrium, until it converges"
AS_TRAINED = "equilibrium, iterations as in training"
SAME_PARAMETERS, SAME_DEPTH = "transformer, equal parameters", "transformer, equal evaluations"
STYLES = {
    CONVERGED: ("C0", "-"), AS_TRAINED: ("C0", ":"),
    SAME_DEPTH: ("C3", "-"), SAME_PARAMETERS: ("C1", "-"),
}  # fmt: skip
FACTORS = (
    1,
    1.5,
    2,
    3,
    4,
    8,
    16,
)  # sizes of the test rings, as multiples of the largest in training
FOLLOWED = {1: "C2", 2: "C0", 4: "C3"}  # those of which the needed iterations are drawn
MOST = 64  # limit of a solve, as a multiple of the iterations of training
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

    def solve(self, inputs: Tensor, most: int) -> solvers.Solution:
        """Iterate until each ring is at a residual of 1e-3."""
        return self.layer.solve(
            self.encode(inputs), solver=solvers.Forward(), tolerance=1e-3, max_steps=most,
            adjoint=None, on_failure="ignore",
        )  # fmt: skip


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


def draw_some_size(number: int, sizes: tuple[int, int], generator: torch.Generator) -> Rings:
    least, most = sizes
    positions = int(torch.randint(least, most + 1, (), generator=generator))
    return draw_rings(number, positions, generator)


def train(model: nn.Module, sizes: tuple[int, int], recipe: Recipe) -> None:
    """Each step has rings of one size, drawn between the ``sizes``."""

    def loss(generator: torch.Generator) -> Tensor:
        batch = draw_some_size(recipe.batch or 1, sizes, generator)
        iterations = recipe.draw_iterations(generator)
        options: dict[str, Any] = {} if iterations is None else {"iterations": iterations}
        return F.cross_entropy(model(batch.inputs, **options).mT, batch.targets)

    recipe.descend(model, loss)


def solved(logits: Tensor, rings: Rings) -> Tensor:
    """(B,) bool: which rings are answered right at every position."""
    return (logits.argmax(2) == rings.targets).all(1)


def answer(model: Any, label: str, rings: Rings) -> tuple[Tensor, float]:
    """Return which rings are solved, and the mean number of evaluations."""
    if label == CONVERGED:
        end = model.solve(rings.inputs, MOST * model.iterations)
        return solved(model.decode(end.value), rings), end.evaluations.double().mean().item()
    depth = model.iterations if label == AS_TRAINED else len(model.blocks)
    return solved(model(rings.inputs), rings), float(depth)


def needed(model: EquilibriumRing, rings: Rings, seed: int) -> Table:
    """Return the mean number of iterations after which rings of each difficulty are solved for good."""
    states = itertools.islice(model.states(rings.inputs), 16 * model.iterations)
    right = torch.stack([solved(model.decode(z), rings) for z in states])
    ever_after = right.flip(0).long().cumprod(0).flip(0)
    first = torch.where(ever_after[-1] > 0, ever_after.argmax(0) + 1.0, torch.nan)
    known = {"size": rings.targets.shape[1], "seed": seed}
    return [
        known | {"difficulty": each, "iterations": first[rings.difficulty == each].nanmean().item()}
        for each in rings.difficulty.unique().tolist()
    ]


def easy_to_hard(
    size: int = 16,  # number of positions of the largest training rings
    steps: int = 200,  # training batches of the equilibrium block
    tests: int = 100,  # number of test rings of each size
    seeds: int = 3,  # number of trainings of each model
) -> Result:
    sizes, trained, depth = (max(2, size // 2 - 2), size), 2 * size, 3 * size // 2
    layers = partial(LayeredRing, heads=HEADS)
    # The model, its training steps, learning rate and iterations in training, and how it answers.
    contenders: list[tuple[Any, int, float, Any, tuple[str, ...]]] = [
        (partial(EquilibriumRing, DIM, HEADS, trained), steps, 3e-3, (size, trained),
         (CONVERGED, AS_TRAINED)),
        (partial(layers, DIM, layers=depth, local=True), 2 * steps, 2e-3, None, (SAME_DEPTH,)),
        (partial(layers, DIM // 2, layers=LAYERS), 2 * steps * depth // LAYERS, 3e-3, None,
         (SAME_PARAMETERS,)),
    ]  # fmt: skip
    rings = {
        factor: draw_rings(tests, number, torch.Generator().manual_seed(TEST_SEED + number))
        for factor in FACTORS
        for number in [round(size * factor)]
    }
    measured, need = Table(), Table()
    for seed in range(seeds):
        for build, batches, rate, iterations, labels in contenders:
            print(f"seed {seed}: {labels[0]}", flush=True)
            torch.manual_seed(seed)
            model = build()
            recipe = Recipe(
                epochs=batches, batch=64, rate=rate, seed=seed, random_iterations=iterations
            )
            train(model, sizes, recipe.fill({"warmup": 0.1}))
            parameters = sum(each.numel() for each in model.parameters())
            with torch.no_grad():
                for label, test in itertools.product(labels, rings.values()):
                    right, evaluations = answer(model, label, test)
                    row = {"model": label, "parameters": parameters, "size": test.targets.shape[1]}
                    row |= {"seed": seed, "solved": right.double().mean().item()}
                    measured.append(row | {"evaluations": evaluations})
                for factor in FOLLOWED if isinstance(model, EquilibriumRing) else ():
                    need += needed(model, rings[factor], seed)
    summary = Table()
    for label, test in itertools.product(STYLES, rings.values()):
        known = {"model": label, "size": test.targets.shape[1]}
        shares, evaluations, parameters = columns(
            measured, "solved", "evaluations", "parameters", **known
        )
        row = known | {"parameters": parameters[0], "solved": sum(shares) / seeds}
        row |= {"solved_least": min(shares), "solved_most": max(shares)}
        summary.append(row | {"evaluations": sum(evaluations) / seeds})
    return {"summary": summary, "seeds": measured, "needed": need}, draw(summary, need, sizes)


def draw(summary: Table, need: Table, sizes: tuple[int, int]) -> Figure:
    figure, (larger, instance) = plt.subplots(1, 2, figsize=(12, 4.7), dpi=80)
    figure.suptitle("Parity along a ring, trained on small rings")
    for label, (color, style) in STYLES.items():
        rows = [row for row in summary if row["model"] == label]
        look: dict[str, Any] = {"color": color, "linestyle": style, "label": label, "marker": "o"}
        draw_band(larger, rows, "size", "solved", "_least", "_most", **look)
    (tested,) = columns(summary, "size", model=CONVERGED)
    larger.set_xscale("log", base=2)
    larger.set_xticks(tested, [str(number) for number in tested])
    larger.minorticks_off()
    larger.axvspan(*sizes, color="C4", alpha=0.15, linewidth=0)
    larger.set(xlabel="positions of the ring (grey: in training)", ylim=(-0.03, 1.03))
    larger.set(ylabel="share of rings solved", title="mean and range of the seeds")
    look = {"ncols": 2, "frameon": False, "loc": "upper center", "bbox_to_anchor": (0.5, -0.13)}
    larger.legend(fontsize=9, **look)
    for factor, color in FOLLOWED.items():
        number = round(sizes[1] * factor)
        points = columns(need, "difficulty", "iterations", size=number)
        look = {"color": color, "markersize": 4, "alpha": 0.5, "label": f"{number} positions"}
        instance.plot(*points, "o", **look)
    ends = [1, max(row["difficulty"] for row in need)]
    instance.plot(ends, ends, color="black", linewidth=1, label="one iteration per position")
    instance.axvspan(1, sizes[1], color="C4", alpha=0.15, linewidth=0)
    instance.set(xlabel="longest run between marks (grey: in training)")
    instance.set(ylabel="iterations until solved for good", title="what a ring needs")
    instance.legend(fontsize=9, loc="upper left")
    return figure


if __name__ == "__main__":
    run(easy_to_hard)
