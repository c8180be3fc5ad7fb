"""What a solve keeps: states of the size of the problem, counted while f runs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import solvers
from solvers import LBFGS, Anderson, Broyden, Descent, Forward, GradientDescent, Solver, fixed_point

BATCH, SIZE = 2, 4096
STATE = BATCH * SIZE * 8  # bytes


class Storages(TorchDispatchMode):
    """Bytes of live storages made since it was entered; ``highest`` is the largest sum seen."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.live or self.live[key][0]() is None:
                    self.live[key] = (weakref.ref(storage), storage.nbytes())
                    weakref.finalize(storage, self.live.pop, key, None)
        self.highest = max(self.highest, self.now())
        return result

    def now(self) -> int:
        return sum(size for _, size in self.live.values())


def rotation(z: Tensor) -> Tensor:
    """A slow map without any solution in reach of few steps: keeps every solver busy."""
    return torch.roll(z, 1, dims=1).mul_(0.999).add_(1)  # makes one state, its result


def held(solver: Solver, steps: int, energy: bool = False) -> tuple[int, list[int]]:
    """States alive at the peak, and at each call of f before it has made anything."""
    counts: list[int] = []
    storages = Storages()

    def f(z: Tensor) -> Tensor:
        counts.append(round(storages.now() / STATE))
        return rotation(z)

    def quartic(z: Tensor) -> Tensor:
        counts.append(round(storages.now() / STATE))
        weights = torch.linspace(1, 50, SIZE, dtype=z.dtype)
        return (weights * (z - 1).square()).sum(1) / 100

    generator = torch.Generator().manual_seed(0)
    z0 = torch.randn(BATCH, SIZE, generator=generator, dtype=torch.float64)
    gc.collect()
    with storages:
        fixed_point(
            Descent(quartic) if energy else f, z0, solver=solver, max_steps=steps,
            tolerance=0.0, adjoint=None, on_failure="ignore",
        )  # fmt: skip
    return round(storages.highest / STATE), counts


@pytest.mark.parametrize("memory", [1, 5])
@pytest.mark.parametrize("steps", [15, 40])
def test_anderson_keeps_two_states_per_difference(memory: int, steps: int) -> None:
    peak, at_calls = held(Anderson(memory), steps)
    assert max(at_calls) <= 2 * memory + 6
    assert peak <= 2 * memory + 7  # with the result of f
    assert len(at_calls) == steps


@pytest.mark.parametrize(
    "solver", [Forward(), GradientDescent(momentum=0.5), GradientDescent("auto")]
)
def test_first_order_methods_keep_a_handful_of_states(solver: Solver) -> None:
    peak, at_calls = held(solver, 30)
    assert max(at_calls) <= 6
    assert peak <= 9


def test_broyden_grows_with_the_steps() -> None:
    short, early = held(Broyden(memory=1000), 4)
    long, calls = held(Broyden(memory=1000), 60)
    assert short <= 20  # nothing like a thousand vectors
    assert max(calls[:4]) <= max(early) + 1
    assert 60 <= max(calls) <= 80  # a vector per step, room for twice as many at most
    assert long <= 64 + 32 + 10  # while it grows, the old storage and the new one


def test_lbfgs_keeps_two_states_per_pair() -> None:
    _, calls = held(LBFGS(memory=5), 30, energy=True)
    assert max(calls) <= 2 * 5 + 10
    assert max(calls[15:]) <= max(calls[:15]) + 1


def test_nothing_stays_behind() -> None:
    """No cycle keeps a solve alive: its tensors go with the solution."""
    before = weakref.WeakSet[Tensor]()
    gc.collect()
    gc.disable()
    try:
        z0 = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
        solution = fixed_point(lambda z: 0.5 * z + 1, z0, tolerance=1e-4)
        before.add(solution.value)
        del solution
        assert len(before) == 0
    finally:
        gc.enable()


def test_unrolled_memory_is_cut_by_checkpoints() -> None:
    """The graph of f, wide inside, is not kept under checkpointing."""
    assert unrolled_elements(True) < unrolled_elements(False) / 3


def unrolled_elements(checkpoint: bool) -> int:
    """Numbers saved for the backward pass of ten unrolled steps of a wide map."""
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel()
        return tensor

    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)) / 512
    weight.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fixed_point(
            lambda z: torch.tanh(torch.tanh(z @ weight).sin() @ weight.mT) + 1, torch.zeros(4, 8),
            solver=Forward(), tolerance=0.0, max_steps=10, on_failure="ignore",
            adjoint=solvers.Unrolled(checkpoint),
        )  # fmt: skip
    return total
