"""Answers for our contestants: ``benchmarks/vs_jax.py`` starts it with the Python that runs it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import solvers
from benchmarks.jax_peers.protocol import Arrays, Contestant, serve
from benchmarks.step import MeanField, Ours, Pair
from implicit_attn import DEQ

MOST = 200  # evaluations


class Field(nn.Module):
    """The map of a MeanField ``layer`` as a module; its symmetric couplings are computed once a solve."""

    def __init__(self, layer: MeanField) -> None:
        super().__init__()
        self.layer = layer
        parametrize.register_parametrization(layer, "raw", Symmetric(layer.blocks))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.layer.update(z, x, self.layer.raw)


class Symmetric(nn.Module):
    def __init__(self, blocks: Tensor) -> None:
        super().__init__()
        self.blocks: Tensor
        self.register_buffer("blocks", blocks)

    def forward(self, raw: Tensor) -> Tensor:
        return (raw + raw.mT) / 2 * self.blocks


class Layer:
    """The training step by a ``DEQ`` around the map."""

    def __init__(self, layer: MeanField, *, compiled: bool) -> None:
        self.layer = layer
        self.deq = DEQ.from_update(Field(layer), init="zeros", max_steps=MOST)
        if compiled:
            self.deq.compile()

    def step(self, tolerances: Pair) -> Tensor:
        forward, backward = (solvers.Tolerance(each) for each in tolerances)
        solution = self.deq.solve(
            self.layer.x, tolerance=forward, adjoint=solvers.Implicit(tolerance=backward)
        )
        self.layer.zero_grad()
        solution.value.backward(self.layer.cotangent)
        return solution.value.detach()


class Step:
    """A contestant of ``benchmarks/step.py`` as one that can be asked."""

    def __init__(self, layer: MeanField, contestant: Ours | Layer) -> None:
        self.layer, self.contestant = layer, contestant

    def run(self, forward: float, backward: float) -> Tensor:
        return self.contestant.step((forward, backward))

    def read(self, result: Tensor) -> Arrays:
        found = {"z": result.numpy()}
        for name, parameter in self.layer.named_parameters():
            assert parameter.grad is not None
            found["raw" if name.startswith("parametrizations") else name] = parameter.grad.numpy()
        return found


MAKERS: dict[str, Callable[[MeanField], Step]] = {
    "ours": lambda layer: Step(layer, Ours(layer, None)),
    "ours, DEQ layer": lambda layer: Step(layer, Layer(layer, compiled=False)),
    "ours, DEQ layer compiled": lambda layer: Step(layer, Layer(layer, compiled=True)),
}


def load(arrays: Arrays) -> dict[str, Contestant]:
    return {name: make(restored(arrays)) for name, make in MAKERS.items()}


def restored(arrays: Arrays) -> MeanField:
    """The layer that the arrays belong to."""
    layer = MeanField()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.from_numpy(arrays[name]))
    layer.x, layer.cotangent = (torch.from_numpy(arrays[name]) for name in ("x", "cotangent"))
    return layer


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    warnings.simplefilter("ignore", solvers.SolveWarning)
    serve(list(MAKERS), {"torch": torch.__version__}, load)


if __name__ == "__main__":
    main()
