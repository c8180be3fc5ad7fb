"""Solves, training and inference in several threads give what each gives alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import solvers
from implicit_attn import DEQ, Update
from implicit_attn.energies import (
    BiSoftmaxAttention,
    Couplings,
    Quadratic,
    ReLUFeedForward,
    VectorSpin,
)


def bounded(seed: int = 0, **options: Any) -> DEQ:
    torch.manual_seed(seed)
    return DEQ(BiSoftmaxAttention(8, 2, bound=0.5) + Quadratic(), **options)


def sample(seed: int = 0) -> Tensor:
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed))


def together(*functions: Callable[[], object]) -> list[Any]:
    """The results of functions that run at the same time, each in a thread of its own."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in functions]]


class Interleaved:
    """Callbacks by which the first solve begins, the second begins, the first ends, the second."""

    def __init__(self) -> None:
        self.first_is_in, self.second_is_in = threading.Event(), threading.Event()
        self.first_is_out = threading.Event()

    def first(self, progress: solvers.Progress) -> None:
        self.first_is_in.set()
        assert self.second_is_in.wait(30)

    def second(self, progress: solvers.Progress) -> None:
        self.second_is_in.set()
        assert self.first_is_out.wait(30)


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(layer(x).square().sum(), list(layer.parameters())))


def move(layer: nn.Module) -> None:
    """What an optimizer does, by a step that bounds do not undo."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter[::2] *= 0.1


@pytest.mark.defect("A1")
def test_a_solve_that_ends_within_another_leaves_no_weights_behind() -> None:
    layers, x, order = (bounded(0), bounded(1)), sample(), Interleaved()

    def first() -> None:
        layers[0].solve(x, callback=order.first, adjoint=None)
        order.first_is_out.set()

    def second() -> None:
        assert order.first_is_in.wait(30)
        layers[1].solve(x, callback=order.second, adjoint=None)

    together(first, second)
    for layer in layers:
        move(layer)
        alone = bounded()
        alone.load_state_dict(layer.state_dict())
        for mine, other in zip(gradients(layer, x), gradients(alone, x), strict=True):
            assert torch.equal(mine, other)
            assert bool(mine.any())


def test_a_weight_is_computed_once_a_solve() -> None:
    calls = []

    class Count(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            calls.append(1)
            return 0.5 * weight

    linear = nn.Linear(3, 3)
    parametrize.register_parametrization(linear, "weight", Count())
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    for outside in (False, True):
        calls.clear()
        with parametrize.cached() if outside else torch.no_grad():
            solution = solvers.fixed_point(lambda z, x: torch.tanh(linear(z) + x), x, (x,),
                                           adjoint=None)  # fmt: skip
        assert int(solution.evaluations.max()) > 2
        assert len(calls) == 1


class WeightNorm(Update):
    """A plain network whose weight is parametrised by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return torch.tanh(0.3 * self.linear(z) + x)


def trained(template: nn.Module) -> list[Tensor]:
    layer = deepcopy(template)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    losses = []
    for step in range(6):
        loss = layer(sample(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in layer.parameters())]


def inferred(layer: nn.Module) -> list[Tensor]:
    with torch.inference_mode():
        return [layer(sample(seed)) for seed in range(10)]


@pytest.mark.defect("A1")
def test_training_and_inference_at_once_are_bit_equal_to_each_alone() -> None:
    torch.manual_seed(0)
    energy = BiSoftmaxAttention(8, 2, bound=0.5) + ReLUFeedForward(8, 16, bound=0.5)
    to_train: list[nn.Module] = [
        bounded(),
        DEQ(WeightNorm()),
        DEQ(VectorSpin(Couplings(4, 8, bound=0.5)), on_failure="ignore"),
        DEQ(energy + Quadratic(), adjoint=solvers.Unrolled(), max_steps=20),
    ]
    shared = bounded(9)
    jobs = [partial(trained, layer) for layer in to_train]
    jobs += [partial(inferred, shared), partial(inferred, shared), partial(inferred, bounded(7))]
    alone = [job() for job in jobs]
    for _ in range(2):
        for results, expected in zip(together(*jobs), alone, strict=True):
            for one, other in zip(results, expected, strict=True):
                assert torch.equal(one, other)
