"""Random maps that break what a solve assumes: CONVERGED must be true of the returned batch all the same.

The rows of a batch see each other, an argument that all samples share has the length of the batch, half
precision overflows. A status is false where a sample is CONVERGED and the
residual of the returned value, from one evaluation with the whole batch, is above the slack of
``solvers.core.verify``: twice the tolerance and 32 roundings of ``|f(z)|``, 2 in half precision.

:func:`check_error` judges by the true error instead: residuals that stay bounded while the state runs away,
units of the state and of an energy from 1e-4 to 1e4, slow modes, rows that influence each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import solvers
from fuzz import DTYPES, Call, Draw, norms
from solvers.core.tolerance import HALF
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


def norm_of(matrix: Tensor) -> Tensor:
    """Spectral norms (B,) of matrices, shaped to divide a matrix or, squared, a vector."""
    return torch.linalg.matrix_norm(matrix, 2)[:, None]


def apply(matrix: Tensor, vector: Tensor) -> Tensor:
    """(B, M, D), (B, D) -> (B, M)."""
    return (matrix @ vector[..., None])[..., 0]


def soft(z: Tensor, threshold: Tensor | float) -> Tensor:
    """Soft threshold."""
    return z.sign() * (z.abs() - threshold).clamp_min(0)


@dataclass
class Posed:
    """A map of one unit of the state, its float64 arguments and perhaps its energy."""

    f: Callable[..., Tensor]
    args: tuple[Tensor, ...]
    energy: Callable[..., Tensor] | None = None


def _affine(draw: Draw, batch: int, size: int) -> Posed:
    """A contraction of the noted rate, linear or bent."""
    rate = draw.note("rate", draw.random.choice((0.3, 0.7, 0.9, 0.97)))
    a = draw.normal(batch, size, size)
    a = a + a.mT if draw.note("symmetric", draw.chance(0.5)) else a
    a, bend = rate * a / norm_of(a)[..., None], draw.note("bend", draw.random.choice((0.0, 0.5)))
    b = draw.normal(batch, size)
    return Posed(lambda z, a, b: apply(a, (1 - bend) * z + bend * torch.tanh(z)) + b, (a, b))


def _regression(draw: Draw, batch: int, size: int, slope: Callable[[Tensor], Tensor]) -> Posed:
    """Gradient steps of a robust regression."""
    a = draw.normal(batch, 2 * size + 2, size)
    noise = draw.note("noise", draw.random.choice((1.0, 3.0, 10.0)))
    y = apply(a, 3 * draw.normal(batch, size)) + noise * draw.normal(batch, 2 * size + 2)
    t = norm_of(a) ** -2
    return Posed(lambda z, a, y, t: z - t * apply(a.mT, slope(apply(a, z) - y)), (a, y, t))


def _lasso(draw: Draw, batch: int, size: int, splitting: bool) -> Posed:
    """ISTA or Douglas-Rachford steps with more unknowns than data."""
    rows = 1 + size // 2
    a, y = draw.normal(batch, rows, size) / rows**0.5, draw.normal(batch, rows)
    if splitting:
        m = torch.linalg.inv(torch.eye(size, dtype=a.dtype) + a.mT @ a)

        def step(z: Tensor, a: Tensor, y: Tensor, m: Tensor) -> Tensor:
            x = soft(z, 0.1)
            return z + apply(m, 2 * x - z + apply(a.mT, y)) - x

        return Posed(step, (a, y, m))
    t = norm_of(a) ** -2
    ista = lambda z, a, y, t: soft(z - t * apply(a.mT, apply(a, z) - y), 0.1 * t)  # noqa: E731
    return Posed(ista, (a, y, t))


def _saturating(draw: Draw, batch: int, size: int) -> Posed:
    step = draw.note("step", draw.random.choice((0.1, 0.5, 1.0)))
    slope = draw.choose("slope", (torch.tanh, torch.atan))
    return Posed(lambda z, c: z - step * slope(z - c), (1 + draw.normal(batch, size),))


def _energy(draw: Draw, batch: int, size: int) -> Posed:
    """A strongly convex quadratic and log-cosh terms; the largest curvature is near 1."""
    q = torch.linalg.qr(draw.normal(batch, size, size)).Q
    condition = draw.note("condition", draw.random.choice((1.0, 10.0, 30.0)))
    values = torch.linspace(1 / condition, 1, size, dtype=torch.float64)
    h, w, b = (
        q @ torch.diag(values) @ q.mT,
        draw.normal(batch, size, size),
        draw.normal(batch, size),
    )
    w = 0.5 * w / norm_of(w)[..., None]

    def energy(z: Tensor, h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        d, v = z - b, apply(w, z).abs()
        return 0.5 * (d * apply(h, d)).sum(1) + (v + torch.log1p(torch.exp(-2 * v))).sum(1)

    def f(z: Tensor, h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return z - apply(h, z - b) - apply(w.mT, torch.tanh(apply(w, z)))

    return Posed(f, (h, w, b), energy)


def _coupled(draw: Draw, batch: int, size: int) -> Posed:
    """Rows of unlike sizes that depend on their mean or on each other by attention."""
    kind = draw.choose("mix", ("mean", "attention"))
    a, x = draw.normal(size, size), draw.normal(batch, size)
    a = draw.note("gain", draw.random.choice((0.3, 0.6))) * a / torch.linalg.matrix_norm(a, 2)
    x = x * torch.logspace(-2, 0, batch, dtype=x.dtype)[:, None]

    def f(z: Tensor, x: Tensor) -> Tensor:
        mean = z.mean(0, keepdim=True) if kind == "mean" else (z @ z.mT).softmax(1) @ z
        return torch.tanh((z + 0.5 * mean) @ a.to(z)) + x

    return Posed(f, (x,))


POSED: dict[str, Callable[[Draw, int, int], Posed]] = {
    "affine": _affine,
    "huber": lambda draw, b, n: _regression(draw, b, n, lambda r: r.clamp(-1, 1)),
    "log-cosh": lambda draw, b, n: _regression(draw, b, n, torch.tanh),
    "lasso": lambda draw, b, n: _lasso(draw, b, n, False),
    "douglas-rachford": lambda draw, b, n: _lasso(draw, b, n, True),
    "saturating": _saturating,
    "energy": _energy,
    "coupled": _coupled,
}
STEPS, WITHIN = 3000, 10.0  # of the reference; tolerances


def reference(posed: Posed, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The limit of plain iteration, its rate (B,), and whether it is known to 1e-11 (B,)."""
    rate, before = torch.zeros(len(z), dtype=z.dtype), torch.full((len(z),), torch.inf).to(z)
    for step in range(STEPS):
        image = posed.f(z, *posed.args)
        if step % 10 == 0:
            size, residual = norms(image), norms(image - z)
            seen = residual > 1e-9 * size
            rate = torch.where(seen, (residual / before) ** 0.1, rate)
            before = residual
            if bool((residual <= 1e-14 * size).all()):
                break
        z = image
    return z, rate, norms(posed.f(z, *posed.args) - z) <= 1e-11 * (1 - rate) * norms(z)


def check_error(draw: Draw) -> None:
    """One solve whose answer is known; CONVERGED says that the value is near it or another fixed point.

    The error may be ten tolerances up to a rate of 0.9, and grows as ``1 / (1 - rate)`` above it. Where
    plain iteration does not find the answer, the residual must have fallen or be small against the start.
    """
    random = draw.random
    kind = draw.choose("kind", tuple(POSED))
    dtype = draw.choose("dtype", (torch.float64, torch.float32), (3, 1))
    batch, size = (
        draw.note("B", random.choice((1, 2, 4, 7))),
        draw.note("D", random.choice((1, 2, 4, 8))),
    )
    unit = 10 ** draw.note("log10 unit", random.uniform(-4, 4))
    height = 10 ** draw.note("log10 height", random.uniform(-4, 4))
    posed = POSED[kind](draw, batch, size)
    start = draw.note("distance", random.choice((0.0, 1.0, 10.0))) * draw.normal(batch, size)
    exact, rate, known = reference(posed, start)

    def f(z: Tensor, *args: Tensor) -> Tensor:
        return unit * posed.f(z / unit, *args)

    update: Any = f
    if posed.energy is not None:
        energy = posed.energy
        update = solvers.Descent(lambda z, *args: height * energy(z / unit, *args))
    names = (None, None, "anderson", "newton", *(("broyden", "forward") if update is f else ()))
    graph = draw.note("gradients", draw.chance(0.3))
    args = tuple(t.to(dtype) for t in posed.args)
    rtol = draw.note(
        "rtol", random.choice((1e-3, 1e-4) if dtype == torch.float32 else (1e-3, 1e-4, 1e-6))
    )
    options: dict[str, Any] = {
        "solver": draw.note("solver", random.choice(names)), "tolerance": solvers.Tolerance(rtol),
        "max_steps": draw.note("max_steps", random.choice((20, 50, 200, 1000))), "on_failure": "ignore",
    }  # fmt: skip
    z0 = (unit * start).to(dtype)
    inputs = tuple(t.detach().requires_grad_(graph) for t in args)

    def solve() -> solvers.Solution:
        with torch.set_grad_enabled(graph):
            return solvers.fixed_point(update, z0, inputs, **options)

    call = Call(draw, solve, (z0, args))
    if call.error is not None:
        raise call.error
    solution = call.result
    value = solution.value.detach().double() / unit
    margin = 1 / (1 - rate).clamp_min(1e-9)
    slack, eps = rtol * WITHIN * (0.1 * margin).clamp_min(1), torch.finfo(dtype).eps
    first, residual = posed.f(start, *posed.args), norms(posed.f(value, *posed.args) - value)
    scale = torch.maximum(norms(first), norms(start))

    def near(answer: Tensor) -> Tensor:
        rounding = 100 * size * eps * margin * (1 + norms(answer))
        return norms(value - answer) <= slack * norms(answer) + rounding

    true = near(exact)
    if bool((solution.converged & ~true).any()):
        # There may be another fixed point, to which plain iteration leads from the value.
        other, _, _ = reference(posed, value)
        left = norms(posed.f(other, *posed.args) - other)
        true = true | near(other) & (left <= 1e-10 * torch.maximum(scale, norms(exact)))
    fell = torch.maximum(WITHIN * rtol * scale, 0.02 * norms(first - start))
    small = residual <= fell + 100 * size * eps * (1 + norms(value).clamp_max(scale.max()))
    told = {"error": norms(value - exact) / norms(exact), "rate": rate, "residual": residual}
    true = torch.where(known, true, small)
    draw.expect_rows(true | ~solution.converged, "CONVERGED", known=known, **told)
