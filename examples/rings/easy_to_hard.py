"""Easy to hard: parity along a ring, trained on small rings, solved on larger ones by more iterations.

    python examples/rings/easy_to_hard.py        # a quarter of an hour

The answer at a position is the parity of the bits since the last mark, which takes as many local steps as
a run is long. A local block is trained with random numbers of iterations, so that its answer is a fixed
point; larger rings then take more iterations and nothing else. Beside it: transformers of equal parameters
and of equal evaluations, the same block with a number of iterations that is not random, one iteration, and
the majority class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from parity import Rings, draw_rings, train
from ring_models import EquilibriumRing, LayeredRing
from torch import Tensor, nn

import solvers
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
TEST_SEED = 1_000_000_007  # apart from those of training
Table = list[dict[str, Any]]


class Answer(NamedTuple):
    """Classes (B, N), evaluations (B,), and which instances reached the tolerance, (B,)."""

    predicted: Tensor
    evaluations: Tensor
    converged: Tensor


Method = Callable[[Any, Sequence[int]], list[Answer]]  # (inputs, rising budgets) -> an answer each


def spent(logits: Tensor, evaluations: int) -> Answer:
    number = torch.full(logits.shape[:1], evaluations)
    return Answer(logits.argmax(2), number, torch.zeros_like(number, dtype=torch.bool))


def fixed_depth(model: nn.Module, evaluations: int) -> Method:
    return lambda inputs, budgets: [spent(model(inputs), evaluations)] * len(budgets)


def begin(model: EquilibriumRing, inputs: Any) -> tuple[Any, Any]:
    """What an evaluation is given in place of x, and the initial state."""
    x = model.encode(inputs)
    prepared = model.layer.update.prepare(x)
    return prepared, model.layer.update.start(x, prepared)


def iterate(model: EquilibriumRing, z: Tensor, x: Any, count: int, damping: float = 1.0) -> Tensor:
    for _ in range(count):
        new = model.layer.update(z, x)
        z = new if damping == 1 else torch.lerp(z, new, damping)
    return z


def iterated(model: EquilibriumRing, damping: float = 1.0) -> Method:
    """``z <- z + damping (f(z, x) - z)``, the last state of each budget."""

    def answer(inputs: Any, budgets: Sequence[int]) -> list[Answer]:
        (x, z), found, made = begin(model, inputs), [], 0
        for budget in budgets:
            z, made = iterate(model, z, x, budget - made, damping), budget
            found.append(spent(model.decode(z), budget))
        return found

    return answer


def annealed(model: EquilibriumRing, noise: float = 0.5, stages: int = 4) -> Method:
    """Iterations in S equal parts; after the first evaluation of part s the state moves by
    ``noise (1 - s / (S - 1))`` times its root mean square times N(0, 1), if evaluations follow to mend it."""

    def answer(inputs: Any, budgets: Sequence[int]) -> list[Answer]:
        found = []
        for budget in budgets:
            generator = torch.Generator().manual_seed(0)
            x, z = begin(model, inputs)
            ends = [round(budget * stage / stages) for stage in range(stages + 1)]
            for stage in range(stages):
                level, left = noise * (1 - stage / (stages - 1)), ends[stage + 1] - ends[stage]
                if level > 0 and left > 1:
                    z, left = iterate(model, z, x, 1), left - 1
                    size = z.square().flatten(1).mean(1).sqrt().view(-1, *[1] * (z.dim() - 1))
                    z = z + level * size * torch.randn(z.shape, generator=generator)
                z = iterate(model, z, x, left)
            found.append(spent(model.decode(z), budget))
        return found

    return answer


def solved_by(model: EquilibriumRing, solver: solvers.Solver, rtol: float = 1e-6) -> Method:
    """A solve for each budget, in which an instance stops at the tolerance; the best iterate answers."""

    def answer(inputs: Any, budgets: Sequence[int]) -> list[Answer]:
        x, found = model.encode(inputs), []
        for budget in budgets:
            end = model.layer.solve(
                x, solver=solver, tolerance=solvers.Tolerance(rtol=rtol), max_steps=budget,
                adjoint=None, on_failure="ignore",
            )  # fmt: skip
            predicted = model.decode(end.value).argmax(2)
            found.append(Answer(predicted, end.evaluations, end.converged))
        return found

    return answer


def shares(right: Tensor) -> dict[str, float]:
    """Of solved rings and of right positions, from ``right`` (B, N)."""
    solved, accuracy = right.all(1).double().mean().item(), right.double().mean().item()
    return {"solved": solved, "accuracy": accuracy}


def curve(method: Method, rings: Rings, budgets: Sequence[int]) -> Table:
    found = zip(budgets, method(rings.inputs, budgets), strict=True)
    return [
        {"iterations": budget, "evaluations": each.evaluations.double().mean().item()}
        | shares(rings.right(each.predicted))
        for budget, each in found
    ]


def by_difficulty(rings: Rings, rows: Callable[[Tensor], dict[str, Any]]) -> Table:
    kinds = rings.difficulty.unique().tolist()
    return [{"difficulty": kind, **rows(rings.difficulty == kind)} for kind in kinds]


def adaptive(model: EquilibriumRing, rings: Rings, solver: Any, most: int) -> tuple[Table, Table]:
    """Each ring stops where its own residual is small enough: by tolerance, and by difficulty, too."""
    table: Table = []
    stops: Table = []
    for rtol in RTOLS:
        (end,) = solved_by(model, solver, rtol)(rings.inputs, [most])
        numbers = end.evaluations.double()
        row = {"rtol": rtol, "evaluations": numbers.mean().item()}
        row["evaluations_90"] = numbers.quantile(0.9).item()
        row["converged"] = end.converged.double().mean().item()
        table.append(row | shares(rings.right(end.predicted)))

        def mean(some: Tensor, rtol: float = rtol, numbers: Tensor = numbers) -> dict[str, Any]:
            return {
                "rtol": rtol,
                "samples": int(some.sum()),
                "evaluations": numbers[some].mean().item(),
            }

        stops += by_difficulty(rings, mean)
    return table, stops


def needed(model: EquilibriumRing, rings: Rings, most: int) -> Table:
    """By difficulty: iterations after which a ring is solved for good; mean and most of those solved."""
    answers = iterated(model)(rings.inputs, range(1, most + 1))
    solved = torch.stack([rings.right(each.predicted).all(1) for each in answers])
    lasting = solved.flip(0).long().cumprod(0).flip(0)
    first = torch.where(lasting[-1] > 0, lasting.argmax(0) + 1, 0)

    def row(some: Tensor) -> dict[str, Any]:
        reached = first[some & (first > 0)]
        mean, longest = (
            (reached.double().mean().item(), int(reached.max())) if len(reached) else (None,) * 2
        )
        number = int(some.sum())
        found = {"samples": number, "solved": len(reached) / number}
        return found | {"iterations": mean, "iterations_most": longest}

    return by_difficulty(rings, row)


def unfolding(model: EquilibriumRing, rings: Rings, most: int) -> Tensor:
    """(most, N) bool: where the hardest ring is right after each iteration, from its longest run on."""
    hardest = rings.select(rings.difficulty.argmax()[None])
    answers = iterated(model)(hardest.inputs, range(1, most + 1))
    right = torch.cat([hardest.right(answer.predicted) for answer in answers])
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
            values = [row[name] for row in rows if row[name] is not None]
            new[name] = sum(values) / len(values) if values else None
            new[f"{name}_least"], new[f"{name}_most"] = (
                min(values, default=None),
                max(values, default=None),
            )
        merged.append(new)
    return merged


def easy_to_hard(
    size: int = 16, steps: int = 200, tests: int = 100, seeds: int = 3, seed: int = 0
) -> tuple[dict[str, Table], Figure]:
    """Prefix parity on rings: trained on small ones, solved on larger ones by more iterations.

    Args:
        size: positions of the largest rings in training, at least 4.
        steps: batches of the equilibrium's training; transformers get twice its evaluations.
        tests: rings of each size in the test.
        seeds: trainings of each model.
        seed: the first of them.
    """
    if size < 4:
        raise ValueError(f"size must be >= 4, got {size}")
    least, trained, depth = max(2, size // 2 - 2), 2 * size, 3 * size // 2

    def draw(number: int, generator: torch.Generator) -> Rings:
        positions = int(torch.randint(least, size + 1, (), generator=generator))
        return draw_rings(number, positions, generator)

    ring = partial(EquilibriumRing, DIM, HEADS)
    once, long = trained, LONG * trained
    contenders: dict[str, tuple[Any, ...]] = {  # model, steps, learning rate, iterations in training
        EQUILIBRIUM: (partial(ring, iterations=trained), steps, 3e-3, (size, trained)),
        SAME_DEPTH: (
            partial(LayeredRing, DIM, HEADS, depth, local=True), 2 * steps, 2e-3, None,
        ),
        SAME_PARAMETERS: (
            partial(LayeredRing, DIM // 2, HEADS, LAYERS), 2 * steps * depth // LAYERS, 3e-3, None,
        ),
        ALWAYS: (partial(ring, iterations=depth), steps, 3e-3, depth),
        ONCE: (partial(ring, iterations=1), 2 * steps, 3e-3, 1),
    }  # fmt: skip
    rings = {
        factor: draw_rings(tests, number, torch.Generator().manual_seed(TEST_SEED + number))
        for factor in FACTORS
        for number in [round(size * factor)]
    }
    names = ("sizes", "curves", "adaptive", "stops", "needed")
    tables: dict[str, Table] = {name: [] for name in names}
    picture = None
    for now in range(seed, seed + seeds):
        for name, settings in contenders.items():
            print(f"seed {now}: {name}", flush=True)
            build, batches, rate, times = settings
            torch.manual_seed(now)
            model = build()
            recipe = Recipe(batches, 64, rate, warmup=0.1, seed=now, iterations=times)
            train(model, draw, recipe)
            ways: list[tuple[str, int, Method]]
            if name == EQUILIBRIUM:
                stop = solved_by(model, solvers.Forward(), 1e-3)
                ways = [
                    (f"{name}, {once} iterations as in training", once, iterated(model)),
                    (f"{name}, {long} iterations", long, iterated(model)),
                    (f"{name}, stops by itself", LONG * long, stop),
                ]
            elif name == ALWAYS:
                ways = [(f"{name}, {n} iterations", n, iterated(model)) for n in (depth, long)]
            else:
                number = {SAME_DEPTH: depth, SAME_PARAMETERS: LAYERS, ONCE: 1}[name]
                ways = [(name, number, fixed_depth(model, number))]
            parameters = sum(each.numel() for each in model.parameters())
            with torch.no_grad():
                for label, budget, method in ways:
                    for test in rings.values():
                        (row,) = curve(method, test, [budget])
                        del row["iterations"]
                        known = {"model": label, "seed": now, "size": test.targets.shape[1]}
                        tables["sizes"].append({**known, "parameters": parameters, **row})
                if name == EQUILIBRIUM:
                    follow(
                        model, {factor: rings[factor] for factor in FOLLOWED}, trained, now, tables
                    )
                    if picture is None:
                        picture = unfolding(model, rings[FOLLOWED[-1]], long)
    common = draw(1000, torch.Generator().manual_seed(0)).targets.flatten().mode().values
    for test in rings.values():
        row = {"model": MAJORITY, "seed": 0, "size": test.targets.shape[1], "parameters": 0}
        right = test.right(torch.full_like(test.targets, int(common)))
        tables["sizes"].append({**row, "evaluations": 0.0, **shares(right)})
    measures = ["evaluations", "evaluations_90", "converged", "solved", "accuracy"]
    first = {
        "summary": summary(tables["sizes"]),
        "stopping": over_seeds(tables["adaptive"], ["method", "size", "rtol"], measures),
    }
    note = f"; {seeds} seeds, mean and range" if seeds > 1 else ""
    title = f"Easy to hard: parity along a ring, trained on small rings{note}"
    return first | tables, draw_all(title, tables, picture, size, least)


def follow(
    model: EquilibriumRing,
    tests: dict[float, Rings],
    trained: int,
    seed: int,
    tables: dict[str, Table],
) -> None:
    """The equilibrium against iterations: all methods, fixed and adaptive, and by difficulty."""
    ways = {
        FORWARD: iterated(model), DAMPED: iterated(model, 0.5),
        ANDERSON: solved_by(model, solvers.Anderson()), ANNEALED: annealed(model),
    }  # fmt: skip
    for factor, test in tests.items():
        known = {"size": test.targets.shape[1], "seed": seed}
        for name, method in ways.items():
            if name == FORWARD or factor == FOLLOWED[1]:
                rows = curve(method, test, multiples(trained))
                tables["curves"] += [{"method": name, **known, **row} for row in rows]
        tables["needed"] += [known | row for row in needed(model, test, LONG * trained)]
        for name, solver in ((FORWARD, solvers.Forward()), (ANDERSON, solvers.Anderson())):
            found = adaptive(model, test, solver, LONG * LONG * trained)
            for table, rows in zip(("adaptive", "stops"), found, strict=True):
                tables[table] += [{"method": name, **known, **row} for row in rows]


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
    places = [row[against] for row in merged]
    low, high, mean = ([row[f"solved{end}"] for row in merged] for end in ("_least", "_most", ""))
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
    larger.set(
        xlabel="positions of the ring (grey: in training)", title="larger rings than in training"
    )
    larger.set(ylim=(-0.03, 1.85), yticks=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0])  # the legend stands above
    larger.legend(fontsize=8, loc="upper right")

    sizes = {number: color for number, color in zip(
        sorted({row["size"] for row in tables["needed"]}), ("C2", "C0", "C3"), strict=False
    )}  # fmt: skip
    for number, color in sizes.items():
        rows = [row for row in curves if row["method"] == FORWARD and row["size"] == number]
        draw_seeds(
            iterations, rows, "iterations", color, f"{number} positions ({number / size:g}x)"
        )
    iterations.set_xlabel("iterations; multiples of training's most")
    iterations.set_title("equilibrium: more iterations, larger rings")
    iterations.legend(fontsize=9, loc="lower right")

    middle = next(row["size"] for row in curves if row["method"] == ANDERSON)
    colors = {FORWARD: "C0", DAMPED: "C2", ANDERSON: "C1", ANNEALED: "C3"}
    for name, color in colors.items():
        rows = [row for row in curves if row["method"] == name and row["size"] == middle]
        style = "--" if name == ANNEALED else "-"  # it often lies on the first
        draw_seeds(methods, rows, "iterations", color, name, style)
    for name in (FORWARD, ANDERSON):
        rows = [
            row for row in tables["adaptive"] if row["method"] == name and row["size"] == middle
        ]
        merged = over_seeds(rows, ["rtol"], ["evaluations", "solved"])
        means = [[row[key] for row in merged] for key in ("evaluations", "solved")]
        label = f"{name}, each ring stops by itself"
        methods.plot(*means, "s--", color=colors[name], markerfacecolor="white", label=label)
    methods.set_xlabel("evaluations at most; squares: mean, tolerances 0.1 to 1e-4")
    methods.set_title(f"equilibrium: ways of solving, {middle} positions")
    methods.legend(fontsize=8, loc="lower right")
    for panel in (iterations, methods):
        panel.set_xscale("log", base=2)
        budgets = multiples(trained)
        factors = [b / trained for b in budgets]
        names = [f"{f:.3g}x" if f >= 1 else f"1/{1 / f:.3g}x" for f in factors]
        panel.set_xticks(budgets, [f"{b}\n{name}" for b, name in zip(budgets, names, strict=True)])
        panel.axvline(trained, color="black", linestyle=":", linewidth=1)
        panel.set_ylim(-0.03, 1.03)
    for panel in axes[0]:
        panel.set_ylabel("rings solved")

    stops = [row for row in tables["stops"] if row["rtol"] == 1e-3 and row["method"] == FORWARD]
    for panel, rows, key in ((need, tables["needed"], "iterations"), (stop, stops, "evaluations")):
        for number, color in sizes.items():
            some = [row for row in rows if row["size"] == number and row[key] is not None]
            places, taken = ([row[name] for row in some] for name in ("difficulty", key))
            look: Any = {"color": color, "markersize": 4, "alpha": 0.5}
            panel.plot(places, taken, "o", label=f"{number} positions", **look)
        end = max(row["difficulty"] for row in rows)
        panel.plot(
            [1, end], [1, end], color="black", linewidth=1, label="one position an iteration"
        )
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
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    unfold.text(
        positions, trained, "training's most ", fontsize=8, ha="right", va="bottom", bbox=box
    )
    unfold.set(xlabel="position, from a mark on", ylabel="iteration")
    unfold.set_title(f"the hardest ring of {positions}: right answers are dark")
    return figure


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    from runner import run

    run(easy_to_hard)
