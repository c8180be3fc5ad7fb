"""Ways of answering within a budget of evaluations: iterations, solvers, annealing, fixed depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import solvers
from implicit_attn.deq import DEQ
from solvers.core.checks import require_count, require_nonnegative, require_number

EXACT = solvers.Tolerance(
    rtol=1e-6
)  # near rounding in float32: a solver stops where it cannot go on


class Answer(NamedTuple):
    """Classes (B, N) int64, the evaluations (B,) int64 that each instance took, and (B,) bool which
    instances reached the tolerance; None where a method asks for none."""

    predicted: Tensor
    evaluations: Tensor
    converged: Tensor | None = None


Method = Callable[[Any, Sequence[int]], list[Answer]]
"""``method(inputs, budgets)``, budgets increasing -> the answer within each of them."""


class Equilibrium(Protocol):
    """A model that reads its classes from the state of a DEQ layer; the layer starts as its update says.

    ``encode(inputs)`` -> what ``layer`` takes; ``decode(state)`` -> logits (B, N, C).
    """

    layer: DEQ

    def encode(self, inputs: Any) -> Any: ...

    def decode(self, state: Any) -> Tensor: ...


def repeated(model: Callable[..., Tensor]) -> Method:
    """Of any ``model(inputs, iterations=)`` -> logits (B, N, C): called once for each budget."""

    def answer(inputs: Any, budgets: Sequence[int]) -> list[Answer]:
        found = (model(inputs, iterations=budget) for budget in budgets)
        return [_spent(logits, budget) for logits, budget in zip(found, budgets, strict=True)]

    return answer


def fixed_depth(model: Callable[..., Tensor], evaluations: int) -> Method:
    """Of ``model(inputs)`` -> logits: the same answer, by so many evaluations, for every budget."""

    def answer(inputs: Any, budgets: Sequence[int]) -> list[Answer]:
        return [_spent(model(inputs), evaluations)] * len(budgets)

    return answer


def iterated(model: Equilibrium, damping: float = 1.0) -> Method:
    """``z <- z + damping (f(z, x) - z)``, the last state of each budget."""
    require_number("damping", damping, low=0.0, high=2.0, closed=False)

    def answer(inputs: Any, budgets: Sequence[int]) -> list[Answer]:
        x, z = _begin(model, inputs)
        found, made = [], 0
        for budget in budgets:
            z = _iterate(model, z, x, budget - made, damping)
            made = budget
            found.append(_spent(model.decode(z), budget))
        return found

    return answer


def annealed(
    model: Equilibrium, noise: float = 0.5, stages: int = 4, *, damping: float = 1.0, seed: int = 0
) -> Method:
    r"""Iterations with noise that falls to none: ``stages`` equal parts of each budget.

    After the first evaluation of part s = 0 .. S-1 the state moves by ``noise (1 - s / (S-1))`` times
    its root mean square times N(0, 1); before it, a state that starts at zero would have no size. A
    part of a single evaluation has no noise, which nothing would mend. A method for maps with several
    fixed points: noise leaves poor ones. Where there is one fixed point it can but cost evaluations.

    Args:
        noise: of the first part, relative to the state.
        stages: S >= 2; the last part has no noise.
        damping: of the iterations.
        seed: of the noise, the same for each budget and each batch: an instance's noise is that of its
            place in the batch.
    """
    require_nonnegative("noise", noise)
    require_count("stages", stages, low=2)
    require_number("damping", damping, low=0.0, high=2.0, closed=False)

    def answer(inputs: Any, budgets: Sequence[int]) -> list[Answer]:
        found = []
        for budget in budgets:
            generator = torch.Generator().manual_seed(seed)
            x, z = _begin(model, inputs)
            ends = [round(budget * (stage + 1) / stages) for stage in range(stages)]
            for stage, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                level, left = noise * (1 - stage / (stages - 1)), end - start
                if level > 0 and left > 1:
                    z, left = _iterate(model, z, x, 1, damping), left - 1
                    drawn = torch.randn(z.shape, generator=generator, dtype=z.dtype).to(z.device)
                    size = z.square().flatten(1).mean(1).sqrt().view(-1, *[1] * (z.dim() - 1))
                    z = z + level * size * drawn
                z = _iterate(model, z, x, left, damping)
            found.append(_spent(model.decode(z), budget))
        return found

    return answer


def solved_by(
    model: Equilibrium, solver: solvers.Solver, tolerance: solvers.Tolerance = EXACT
) -> Method:
    """A solve for each budget, in which an instance stops at the tolerance; the best iterate answers."""

    def answer(inputs: Any, budgets: Sequence[int]) -> list[Answer]:
        x, found = model.encode(inputs), []
        options: dict[str, Any] = {"solver": solver, "tolerance": tolerance, "adjoint": None}
        for budget in budgets:
            end = model.layer.solve(x, max_steps=budget, on_failure="ignore", **options)
            predicted = model.decode(end.value).argmax(2)
            found.append(Answer(predicted, end.evaluations, end.converged))
        return found

    return answer


def _begin(model: Equilibrium, inputs: Any) -> tuple[Any, Any]:
    """What an evaluation is given in place of x, and the initial state."""
    update, x = model.layer.update, model.encode(inputs)
    prepared = update.prepare(x)
    return prepared, update.start(x, prepared)


def _iterate(model: Equilibrium, z: Tensor, x: Any, count: int, damping: float) -> Tensor:
    for _ in range(count):
        new = model.layer.update(z, x)
        z = new if damping == 1 else torch.lerp(z, new, damping)
    return z


def _spent(logits: Tensor, evaluations: int) -> Answer:
    number = torch.full(logits.shape[:1], evaluations, dtype=torch.int64, device=logits.device)
    return Answer(logits.argmax(2), number)
