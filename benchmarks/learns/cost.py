"""What a training step and an evaluation of the block cost beside an encoder layer, and where it goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from benchmarks.measure import interleaved, table
from implicit_attn import EquilibriumBlock

SHAPE = (32, 16, 64)  # samples, tokens, features


def costs(rounds: int) -> str:
    """Two tables: milliseconds of the processor and their ratios, and the parts of an evaluation."""
    torch.manual_seed(0)
    x, dim = torch.randn(SHAPE), SHAPE[2]
    layers: dict[str, nn.Module] = {
        "encoder layer": nn.TransformerEncoderLayer(
            dim, 4, 2 * dim, 0.0, norm_first=True, batch_first=True
        ),
        "block": EquilibriumBlock(dim, 4),
    }
    runs: dict[str, Callable[[], Any]] = {}
    for name, layer in layers.items():
        runs[f"{name}, training step"] = _training(layer, x)
        runs[f"{name}, evaluation"] = _evaluation(layer, x)
    runs |= _parts(layers["block"], x)
    times = interleaved(runs, rounds, clock=time.process_time)
    rows = []
    for name, seconds in times.items():
        base = "training step" if name.endswith("training step") else "evaluation"
        ratio = seconds / times[f"encoder layer, {base}"]
        rows.append({"what": name, "ms": f"{1e3 * seconds:.2f}", "/ encoder layer": f"{ratio:.1f}"})
    return f"(B, N, d) = {SHAPE}, {torch.get_num_threads()} thread(s)\n\n{table(rows)}"


def _training(layer: nn.Module, x: Tensor) -> Callable[[], Any]:
    def run() -> None:
        layer.train()
        layer.zero_grad()
        layer(x).square().sum().backward()

    return run


def _evaluation(layer: nn.Module, x: Tensor) -> Callable[[], Any]:
    def run() -> None:
        layer.eval()
        with torch.no_grad():
            layer(x)

    return run


def _parts(block: Any, x: Tensor) -> dict[str, Callable[[], Any]]:
    """What one evaluation of the block consists of besides the solver's own work."""
    energy, n = block.energy, F.rms_norm(x, x.shape[-1:])
    z = block.solve(x, adjoint=None).value

    @torch.no_grad()
    def bounds() -> None:
        for projection in (energy.attention.state, energy.memory.projection):
            weight = projection.parametrizations.weight
            weight[0](weight.original)

    def evaluate(times: int) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad(), parametrize.cached():
                given = energy.prepare(n)
                for _ in range(times):
                    energy.grad(z, given)

        return run

    return {
        "part: bounds of the weights": bounds,
        "part: what depends on x alone, and the bounds": evaluate(0),
        "part: that, and five gradients of the energy": evaluate(5),
    }
