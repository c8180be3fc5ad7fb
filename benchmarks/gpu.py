"""Training steps on a CUDA device: solvers against torchdeq's, and layers against an encoder layer.

python benchmarks/gpu.py race [--seconds 55] [--tiny]
python benchmarks/gpu.py layers [--seconds 55] [--tiny]

The tables hold median milliseconds of a training step (forward and backward pass); lower is better. With
``--tiny`` everything runs at small sizes on a CPU, to test the program; its times mean nothing.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import solvers
from benchmarks.measure import interleaved, table
from benchmarks.step import MeanField, theirs
from implicit_attn import DEQ, DEQTransformer, EquilibriumBlock
from implicit_attn.updates import TransformerStep
from solvers.core.cuda import forced

TOLERANCE = 1e-3
Shape = tuple[int, int, int]  # samples, tokens, features
RACE: list[Shape] = [(32, 16, 64), (128, 65, 192), (64, 197, 384)]
LAYERS: list[tuple[Shape, str]] = [
    ((32, 16, 64), "TF32"),
    ((128, 65, 192), "bf16"),
    ((64, 197, 384), "TF32"),
    ((64, 197, 384), "bf16"),
    ((8, 1024, 512), "bf16"),
]
TINY: list[Shape] = [(2, 3, 8), (2, 5, 8)]
Run = Callable[[], object]


class Spins(nn.Module):
    """The mean-field update of ``benchmarks/step.py`` as a map of (z, x)."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.inner = MeanField(samples=samples)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.inner.update(z, x, self.inner.couplings())


def median_milliseconds(runs: dict[str, Run], device: torch.device, tiny: bool) -> dict[str, Any]:
    """Interleaved medians; a contestant that raises has its error in the place of a time."""
    found: dict[str, Any] = {}
    able: dict[str, Run] = {}

    def waiting(run: Run) -> Run:
        def timed() -> None:
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()

        return timed

    for name, run in runs.items():
        try:
            for _ in range(1 if tiny else 3):
                waiting(run)()
            able[name] = waiting(run)
        except Exception as error:
            found[name] = type(error).__name__
    seconds = interleaved(able, 1 if tiny else 9)
    return found | {name: 1e3 * each for name, each in seconds.items()}


def step(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> Run:
    """A training step: the forward pass, and gradients of all parameters and of x."""
    given = [x, *(p for p in module.parameters() if p.requires_grad)]
    cotangent = torch.randn_like(function(x).detach())

    def run() -> object:
        return torch.autograd.grad(function(x), given, cotangent, allow_unused=True)

    return run


def race(seconds: float = 55.0, tiny: bool = False) -> None:
    """Our solvers and torchdeq's on the same maps with the same stopping rule, relative 1e-3."""
    device, begin = _device(tiny), time.monotonic()
    rows: list[dict[str, Any]] = []
    shapes: list[Shape | int] = [4 if tiny else 64, *(TINY if tiny else RACE)]
    for shape, precision in [(s, p) for p in ("float32", "TF32") for s in shapes]:
        name = f"mean-field {shape} x 17 x 10" if isinstance(shape, int) else f"transformer {shape}"
        name = f"{name}, {precision}"
        if time.monotonic() - begin > seconds:
            rows.append({"map": f"{name}: no time left"})
            continue
        torch.backends.cuda.matmul.allow_tf32 = precision == "TF32"
        rows.append({"map": name} | _race(shape, device, tiny))
        print(table(rows), flush=True)
    torch.backends.cuda.matmul.allow_tf32 = False


def _race(shape: Shape | int, device: torch.device, tiny: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    if isinstance(shape, int):
        spins: Any = Spins(shape)
        x = spins.inner.x.to(device).requires_grad_()
        layer = DEQ.from_update(spins, tolerance=TOLERANCE).to(device)
    else:
        x = torch.randn(*shape, device=device).requires_grad_()
        layer = DEQ(TransformerStep(shape[2], 2 if tiny else 4), tolerance=TOLERANCE).to(device)
    compiled = copy.deepcopy(layer)
    compiled.compile()
    runs = {"ours": step(layer, layer, x), "ours, compiled": step(compiled, compiled, x)}
    for solver in ("anderson", "broyden", "fixed_point_iter"):

        def peer(x: Tensor, solver: str = solver) -> Tensor:
            prepared = layer.update.prepare(x)
            deq = theirs(solver, (TOLERANCE, TOLERANCE), 50)
            return deq(lambda z: layer.update(z, prepared), torch.zeros_like(x))[0][-1]

        runs[f"torchdeq {solver}"] = step(peer, layer, x)
    found = median_milliseconds(runs, device, tiny)
    peers = [t for name, t in found.items() if name.startswith("torchdeq") and isinstance(t, float)]
    for name in ("ours", "ours, compiled"):
        if peers and isinstance(found[name], float):
            found[f"{name} / fastest torchdeq"] = found[name] / min(peers)
    return found


def layers(seconds: float = 55.0, tiny: bool = False) -> None:
    """Our blocks, eager and compiled, against ``nn.TransformerEncoderLayer``."""
    device, begin = _device(tiny), time.monotonic()
    rows: list[dict[str, Any]] = []
    for shape, precision in [(s, "bf16") for s in TINY] if tiny else LAYERS:
        name = f"{' x '.join(map(str, shape))}, {precision}"
        if time.monotonic() - begin > seconds:
            rows.append({"shape": f"{name}: no time left"})
            continue
        torch.backends.cuda.matmul.allow_tf32 = precision == "TF32"
        rows.append({"shape": name} | _layers(shape, precision, device, tiny))
        print(table(rows), flush=True)
    torch.backends.cuda.matmul.allow_tf32 = False


def _layers(shape: Shape, precision: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    dim, heads = shape[2], 2 if tiny else max(4, shape[2] // 64)
    x = torch.randn(*shape, device=device).requires_grad_()
    converged: dict[str, Any] = {"iterations": "converged", "gradient": "implicit"}
    modules: dict[str, Any] = {
        "encoder layer": nn.TransformerEncoderLayer(dim, heads, 2 * dim, 0.0, batch_first=True),
        "EquilibriumBlock": EquilibriumBlock(dim, heads),
        "DEQTransformer": DEQTransformer(dim, heads, **converged),
    }
    for name in ("EquilibriumBlock", "DEQTransformer"):
        modules[f"{name}, compiled"] = copy.deepcopy(modules[name])
        modules[f"{name}, compiled"].deq.compile()
    runs = {}
    for name, module in modules.items():
        module.to(device)

        def forward(x: Tensor, module: nn.Module = module) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                return module(x)

        runs[name] = step(forward, module, x)
    found = median_milliseconds(runs, device, tiny)
    encoder = found["encoder layer"]
    for name in ("EquilibriumBlock", "EquilibriumBlock, compiled"):
        if isinstance(encoder, float) and isinstance(found[name], float):
            found[f"{name} / encoder"] = found[name] / encoder
    return found


def _device(tiny: bool) -> torch.device:
    if not tiny and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a CUDA device; --tiny tests it on a CPU")
    return torch.device("cpu" if tiny else "cuda")


if __name__ == "__main__":
    warnings.simplefilter("ignore", solvers.SolveWarning)
    with forced() if "--tiny" in sys.argv else nullcontext():
        tyro.extras.subcommand_cli_from_dict({"race": race, "layers": layers})
