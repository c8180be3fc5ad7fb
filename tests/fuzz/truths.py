"""Random maps that break what a solve assumes: CONVERGED must be true of the returned batch all the same.

The rows of a batch see each other, an argument that all samples share has the length of the batch, half
precision overflows. A status is false where a sample is CONVERGED and the
residual of the returned value, from one evaluation with the whole batch, is above the slack of
``solvers.core.verify``: twice the tolerance and 32 roundings of ``|f(z)|``, 2 in half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import solvers
from fuzz import DTYPES, Call, Draw, norms
from solvers.core.solution import HALF
from solvers.core.verify import ROUNDINGS, SLACK

KINDS = (
    "plain",
    "mean",
    "attention",
    "nearest",
    "graph",
    "centred",
    "shared",
    "overflow",
)


def check_true_value(draw: Draw) -> None:
    """One solve, and the residual of what it returns."""
    random = draw.random
    kind = draw.choose("kind", KINDS, (1, 3, 3, 2, 3, 2, 3, 3))
    halves = {torch.float16: 3, torch.bfloat16: 1}
    weights = [
        halves.get(each, 0) if kind == "overflow" else int(each not in HALF) for each in DTYPES
    ]
    dtype = draw.choose("dtype", DTYPES, weights)
    batch = draw.note("B", random.choice((2, 3, 5, 8, 17, 40)))
    size = draw.note("D", batch if kind == "shared" else random.choice((1, 2, 4, 8)))
    spread = draw.note("spread", random.choice((0.0, 1.0, 3.0)))
    x = draw.normal(batch, size) * torch.logspace(-spread, 0, batch, dtype=torch.float64)[:, None]
    scale = 10.0 ** draw.note("log10 scale", random.uniform(1, 4.5) if kind == "overflow" else 0.0)
    x = (scale * x).clamp(-6e4, 6e4).to(dtype)
    maps = Maps(draw, kind, batch, size, dtype)
    f, truth = maps.function()
    start = x if draw.chance(0.5) else torch.zeros_like(x)
    args = (x, maps.shared) if kind == "shared" else (x,)
    options = _options(draw, kind)
    graph = draw.note("gradients", draw.chance(0.3))
    inputs = [t.detach().requires_grad_() for t in args] if graph else args

    def solve() -> solvers.Solution:
        with torch.set_grad_enabled(graph):
            return solvers.fixed_point(f, start, tuple(inputs), **options)

    call = Call(draw, solve, (start, args))
    solution = call.result
    if solution is None:  # shapes that do not fit, in a smaller batch
        named = "samples that are still being solved" in str(call.error)
        draw.expect(named, "exceptions", f"{type(call.error).__name__}: {call.error}"[:300])
        return
    value = solution.value.detach()
    with torch.no_grad():
        image = truth(value, *args)
    residual, reference = norms(image.double() - value.double()), norms(image)
    rtol = options["tolerance"].rtol
    roundings = 2.0 if dtype in HALF else ROUNDINGS
    rounding = (roundings + size) * torch.finfo(dtype).eps * reference
    true = residual <= 1.01 * SLACK * rtol * reference + rounding
    told = {"true": residual / reference, "reported": solution.residual}
    draw.expect_rows(true | ~solution.converged, "CONVERGED", **told)


def _options(draw: Draw, kind: str) -> dict[str, Any]:
    random = draw.random
    kinds = [
        None,
        None,
        solvers.Forward(),
        solvers.Forward(0.5),
        solvers.Anderson(),
        solvers.Broyden(),
    ]
    rtol = draw.note("rtol", random.choice((1e-2, 1e-3, 1e-4, 1e-5)))
    if kind == "overflow":
        rtol = max(rtol, 1e-2)
    return {
        "solver": draw.note("solver", random.choice(kinds)),
        "tolerance": solvers.Tolerance(rtol),
        "max_steps": draw.note("max_steps", random.choice((5, 20, 50, 200))),
        "compact": draw.note("compact", draw.chance(0.4 if kind == "graph" else 0.7)),
        "record": draw.note("record", draw.chance(0.2)),
        "on_failure": "ignore",
    }


class Maps:
    """``b tanh(mix(z) w) + x`` with rows that are mixed as the kind says."""

    def __init__(self, draw: Draw, kind: str, batch: int, size: int, dtype: torch.dtype) -> None:
        random = draw.random
        self.kind = kind
        w = draw.normal(size, size)
        w = w / torch.linalg.matrix_norm(w, 2).clamp_min(1e-12)
        self.w = (draw.note("gain", random.choice((0.3, 0.6, 0.9, 1.1))) * w).to(dtype)
        self.strength = draw.note("strength", random.choice((1e-3, 0.1, 0.5, 1.0)))
        adjacency = draw.mask(batch, batch, share=0.3).to(dtype)
        self.adjacency = adjacency / adjacency.sum(1, keepdim=True).clamp_min(1)
        self.shared = draw.normal(size, dtype=dtype).tanh()
        self.power = draw.note("power", random.choice((0.5, 1.0, 2.0)))

    def function(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """The map for the solver, and the one by which it is judged."""
        if self.kind == "shared":
            return self._share, self._share
        if self.kind == "overflow":
            return self._overflow, self._overflow
        return self._mixed, self._mixed

    def _plain(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.w) + x

    def _mixed(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh((z + self.strength * self._others(z, x)) @ self.w) + x

    def _others(self, z: Tensor, x: Tensor) -> Tensor:
        """What a row receives of the others."""
        if self.kind == "mean":
            return z.mean(0, keepdim=True)
        if self.kind == "attention":
            return (z @ z.mT / z.shape[1] ** 0.5).softmax(1) @ z
        if self.kind == "nearest":
            return z[torch.cdist(x, x).topk(min(3, len(x)), largest=False).indices].mean(1)
        if self.kind == "graph":
            return self.adjacency @ z
        if self.kind == "centred":
            return -z.mean(0, keepdim=True) / (1 + z.var(0, unbiased=False, keepdim=True))
        return torch.zeros_like(z)

    def _share(self, z: Tensor, x: Tensor, p: Tensor) -> Tensor:
        return p * torch.tanh(z @ self.w) + x

    def _overflow(self, z: Tensor, x: Tensor) -> Tensor:
        return z @ self.w + self.strength * z * z / 100 + x
