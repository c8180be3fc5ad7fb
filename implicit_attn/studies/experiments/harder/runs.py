"""Train every contender on small rings and measure it on larger ones, with all numbers of iterations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.data.tasks.instances import Instances
from implicit_attn.data.tasks.ring_parity import draw_rings
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.experiments.harder.contenders import (
    ALWAYS,
    EQUILIBRIUM,
    MAJORITY,
    ONCE,
    Contender,
    Settings,
    contenders,
)
from implicit_attn.studies.experiments.harder.found import Found
from implicit_attn.studies.experiments.harder.kept import kept
from implicit_attn.studies.harder.curves import (
    adaptive_curve,
    iteration_curve,
    multiples,
    needed_by_difficulty,
    shares,
)
from implicit_attn.studies.harder.methods import (
    Method,
    annealed,
    fixed_depth,
    iterated,
    repeated,
    solved_by,
)

FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0)  # sizes of the test, as multiples of the largest of training
CURVES = (1.0, 2.0, 4.0)  # of which solved shares are followed over iterations
LONG = 4  # times the iterations of training: what the equilibrium is given on any size
FORWARD, DAMPED, ANDERSON, ANNEALED = "forward", "damped, 1/2", "Anderson", "annealed"
Tests = dict[float, Instances]  # by size, as a multiple of the largest of training
TEST_SEED = 1_000_000_007  # apart from those of training


def run_all(
    settings: Settings, seeds: Sequence[int], advance: Advance, keep: Path | None = None
) -> Found:
    """Train and measure, seed after seed; every seed is measured on the same instances.

    Args:
        keep: folder of a file for each training, which is read where it is there.
    """
    tests = {factor: draw_test(round(settings.size * factor), settings.tests) for factor in FACTORS}
    found = Found()
    for seed in seeds:
        for name, contender in contenders(settings).items():
            by = [asdict(settings), contender.steps, contender.rate, contender.iterations]
            run = partial(_run_one, settings, seed, name, contender, tests, advance)
            found.add(kept(keep, name, seed, by, run))
    common = most_common(settings)
    for instances in tests.values():
        right = instances.right(torch.full_like(instances.targets, common))
        row = {"model": MAJORITY, "seed": 0, "size": instances.targets.shape[1]}
        row |= {"parameters": 0, "evaluations": 0.0}
        found.sizes.append(row | shares(right, instances))
    return found


def _run_one(
    settings: Settings, seed: int, name: str, contender: Contender, tests: Tests, advance: Advance
) -> Found:
    """What a training of one model finds."""
    found = Found()
    model = contender.train(settings, seed, _every_quarter(seed, name, contender, advance))
    advance(f"seed {seed}: {name}, measured")
    known = {"parameters": sum(each.numel() for each in model.parameters())}
    for label, budget, method in _answering(name, model, settings, contender.evaluations):
        for instances in tests.values():
            row = iteration_curve(method, instances, [budget])[0]
            row.pop("iterations")
            first = {"model": label, "seed": seed, "size": instances.targets.shape[1]}
            found.sizes.append(first | known | row)
    if name == EQUILIBRIUM:
        _follow(model, tests, settings, seed, found, advance)
    return found


def most_common(settings: Settings) -> int:
    """The class that is most common among the answers of a thousand rings of training."""
    rings = settings.draw(1000, torch.Generator().manual_seed(0))
    return int(rings.targets.flatten().mode().values)


def _every_quarter(
    seed: int, name: str, contender: Contender, advance: Advance
) -> Callable[[int], None]:
    every = -(-contender.steps // 4)

    def step(number: int) -> None:
        if number % every == 0:
            advance(f"seed {seed}: {name}, step {number}")

    return step


def draw_test(size: int, number: int) -> Instances:
    """The instances of a size, the same in every run."""
    return draw_rings(number, size, generator=torch.Generator().manual_seed(TEST_SEED + size))


def _answering(
    name: str, model: Any, settings: Settings, evaluations: int
) -> list[tuple[str, int, Method]]:
    """Labels, budgets and methods by which a model is measured on every size."""
    if name == ONCE:
        return [(name, 1, repeated(model))]
    if name == ALWAYS:
        counts = (evaluations, LONG * settings.trained)
        return [(f"{name}, {count} iterations", count, iterated(model)) for count in counts]
    if name != EQUILIBRIUM:
        return [(name, evaluations, fixed_depth(model, evaluations))]
    once, long = settings.trained, LONG * settings.trained
    stop = solved_by(model, solvers.Forward(), solvers.Tolerance(rtol=1e-3))
    return [
        (f"{name}, {once} iterations as in training", once, iterated(model)),
        (f"{name}, {long} iterations", long, iterated(model)),
        (f"{name}, stops by itself", LONG * long, stop),
    ]


def _follow(
    model: Any,
    tests: Tests,
    settings: Settings,
    seed: int,
    found: Found,
    advance: Callable[[str], object],
) -> None:
    """The equilibrium against iterations: all methods, fixed and adaptive, and by difficulty."""
    budgets = multiples(settings.trained)
    ways: dict[str, Method] = {
        FORWARD: iterated(model),
        DAMPED: iterated(model, damping=0.5),
        ANDERSON: solved_by(model, solvers.Anderson()),
        ANNEALED: annealed(model),
    }
    for factor in CURVES:
        instances = tests[factor]
        first = {"size": instances.targets.shape[1], "seed": seed}
        for name, method in ways.items():
            if name == FORWARD or factor == CURVES[1]:
                advance(f"seed {seed}: {name}, size {first['size']}")
                rows = iteration_curve(method, instances, budgets)
                found.curves += [{"method": name, **first, **row} for row in rows]
        dense = range(1, LONG * settings.trained + 1)
        needed = needed_by_difficulty(iterated(model), instances, dense)
        found.needed += [first | row for row in needed]
        for name, solver in ((FORWARD, solvers.Forward()), (ANDERSON, solvers.Anderson())):
            adapt = partial(adaptive_curve, model, instances, solver)
            table, depths = adapt(LONG * LONG * settings.trained)
            found.adaptive += [{"method": name, **first, **row} for row in table]
            found.stops += [{"method": name, **first, **row} for row in depths]
    found.picture = unfolding(model, tests[CURVES[-1]], LONG * settings.trained)


@torch.no_grad()
def unfolding(model: Any, instances: Instances, most: int) -> Tensor:
    """(most, N) bool: where the hardest instance is answered rightly after each iteration.

    The positions begin at the mark that opens its longest run.
    """
    hardest = instances.select(instances.difficulty.argmax()[None])
    answers = iterated(model)(hardest.inputs, range(1, most + 1))
    right = torch.cat([hardest.right(answer.predicted) for answer in answers])
    return right.roll(-longest_run(hardest.inputs[0, :, 1] > 0), dims=1)


def longest_run(marked: Tensor) -> int:
    """The mark (N,) bool from which it is farthest to the next."""
    places = marked.nonzero().flatten()
    gaps = (places.roll(-1) - places - 1) % len(marked)
    return int(places[gaps.argmax()])
