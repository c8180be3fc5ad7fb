"""Random fixed points, their gradients, linear systems: what must hold of residuals, statuses, counts.

A map works on vectors z (B, D) with parameters ``s`` (B, 1), ``b`` (B, D) of each sample and a matrix
``w`` (D, D) of all, in any dtype. ``terms`` are the magnitudes that its rounding errors are relative
to: in a dtype of unit ``eps`` an evaluation is off by at most about ``(D + 8) eps terms``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import solvers
from fuzz import DTYPES, Call, Draw, norms, valid
from solvers import Status

Formula = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (z, s, b, w) -> (B, D)


class Map(NamedTuple):
    """``f`` and the ``terms`` (B, D) of its rounding errors."""

    f: Formula
    terms: Formula


def _network_terms(z: Tensor, s: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return s.abs() * (z.abs() @ w.abs().T + b.abs() + 1)


def _affine_terms(z: Tensor, s: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return (s * z).abs() + b.abs()


def _root_terms(z: Tensor, s: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """The root enlarges an error of its argument without bound as that goes to zero."""
    size = _affine_terms(z, s, b, w)
    inside = (s * z + b).abs().clamp_min(1e-300)
    return size / (2 * inside.sqrt()) + inside.sqrt()


MAPS: dict[str, Map] = {
    "linear": Map(lambda z, s, b, w: s * (z @ w.T) + b,
        lambda z, s, b, w: s.abs() * (z.abs() @ w.abs().T) + b.abs()),
    "affine": Map(lambda z, s, b, w: s * z + b, _affine_terms),
    "tanh": Map(lambda z, s, b, w: s * torch.tanh(z @ w.T + b), _network_terms),
    "cos": Map(lambda z, s, b, w: s * torch.cos(z @ w.T + b), _network_terms),
    "relu": Map(lambda z, s, b, w: s * torch.relu(z @ w.T + b), _network_terms),
    "round": Map(lambda z, s, b, w: s * torch.round(z) + b,
        lambda z, s, b, w: (s * torch.round(z)).abs() + b.abs()),
    "box": Map(lambda z, s, b, w: (z - s * (z @ w.T - b)).clamp(-1.0, 1.0),
        lambda z, s, b, w: z.abs() + s.abs() * (z.abs() @ w.abs().T + b.abs())),
    "sqrt": Map(lambda z, s, b, w: torch.sqrt(s * z + b), _root_terms),
    "log": Map(lambda z, s, b, w: s * torch.log(z) + b,
        lambda z, s, b, w: s.abs() * (torch.log(z).abs() + 1) + b.abs()),
    "exp": Map(lambda z, s, b, w: s * torch.exp(z) + b,
        lambda z, s, b, w: s.abs() * torch.exp(z) + b.abs()),
    "logistic": Map(lambda z, s, b, w: s * z * (1 - z) + b,
        lambda z, s, b, w: (s * z).abs() * (1 + z.abs()) + b.abs()),
    "cubic": Map(lambda z, s, b, w: z - s * z * z * z + b,
        lambda z, s, b, w: z.abs() + (s * z * z * z).abs() + b.abs()),
    "constant": Map(lambda z, s, b, w: b.clone(), lambda z, s, b, w: b.abs()),
    "identity": Map(lambda z, s, b, w: z, lambda z, s, b, w: z.abs()),
    "zero": Map(lambda z, s, b, w: 0 * z, lambda z, s, b, w: 0 * z),
}  # fmt: skip


class Potential(NamedTuple):
    """A sum of ``density`` over D, and ``map`` is ``z - dE/dz``."""

    density: Formula
    map: Map


def _potential(density: Formula, terms: Formula) -> Potential:
    """``terms`` are the magnitudes of the gradient."""

    def step(z: Tensor, *given: Tensor) -> Tensor:
        with torch.enable_grad():
            point = z.detach().requires_grad_()
            total = density(point, *(t.detach() for t in given)).sum()
            return z - torch.autograd.grad(total, point)[0]

    return Potential(density, Map(step, lambda z, s, b, w: z.abs() + terms(z, s, b, w)))


POTENTIALS: dict[str, Potential] = {
    "quadratic": _potential(lambda z, s, b, w: 0.5 * s * (z - b) ** 2,
        lambda z, s, b, w: s.abs() * (z.abs() + b.abs())),
    "coupled": _potential(lambda z, s, b, w: 0.25 * s * z * (z @ (w + w.T)) + 0.5 * z * z - b * z,
        lambda z, s, b, w: s.abs() * (z.abs() @ (w.abs() + w.abs().T)) + z.abs() + b.abs()),
    "cosh": _potential(lambda z, s, b, w: torch.cosh(z - b) + 0 * s,
        lambda z, s, b, w: torch.cosh(z - b) * (1 + z.abs() + b.abs())),
    "quartic": _potential(lambda z, s, b, w: 0.25 * z**4 - 0.5 * z**2 - s * b * z,
        lambda z, s, b, w: z.abs() ** 3 + z.abs() + (s * b).abs()),
    "unbounded": _potential(lambda z, s, b, w: -0.3 * z**2 - b * z + 0 * s,
        lambda z, s, b, w: z.abs() + b.abs()),
}  # fmt: skip


POWERS = {torch.float64: 400, torch.float32: 100, torch.bfloat16: 100, torch.float16: 7}
FACTORS = ("contraction", "weak", "one", "expansive", "minus", "huge", "mixed")


@dataclass
class Witness:
    """What the calls of ``f`` have shown of every sample."""

    calls: Tensor  # (B,) int64
    bad: Tensor  # (B,) bool: an output or a point was not finite, or so large that its norm is not
    largest: Tensor  # (B,) of the residual norms
    first: Tensor  # (B,) max of residual and reference norm at the first call

    @classmethod
    def of(cls, batch: int) -> Witness:
        zero = torch.zeros(batch, dtype=torch.float64)
        return cls(zero.long(), zero.bool(), zero.clone(), zero.clone())

    def see(self, names: Tensor, z: Tensor, value: Tensor) -> None:
        """One call of ``f`` for the samples ``names`` (n,) at z (n, D)."""
        wide, image = z.detach().double(), value.detach().double()
        norms_to = torch.finfo(torch.promote_types(z.dtype, torch.float32)).max ** 0.5 / 10
        limit = min(norms_to, torch.finfo(z.dtype).max)
        # A residual beyond the range of the dtype is infinite there, and so is a norm too large.
        gap = (image - wide).abs()
        far = ~(gap <= limit) | ~(image.abs() <= limit)
        self.bad[names] |= far.any(1)
        size = torch.linalg.vector_norm(gap, dim=1)
        reference = torch.linalg.vector_norm(image, dim=1)
        self.first[names] = torch.where(
            self.calls[names] == 0, torch.maximum(size, reference), self.first[names]
        )
        self.largest[names] = torch.maximum(self.largest[names], size.nan_to_num(torch.inf))
        self.calls[names] += 1


def wide(state: Tensor) -> Tensor:
    """(B, D) float64."""
    return (
        state.detach().double().flatten(1) if state.dim() > 1 else state.detach().double()[:, None]
    )


@dataclass
class FixedPoint:
    """``z = f(z, s, b, names, mask)``: arguments for ``solvers.fixed_point`` and the truth about it."""

    f: Callable[..., Any]
    z0: Tensor
    args: tuple[Any, ...]
    mask: Tensor | None
    law: Map
    w: Tensor
    scale: float  # a power of two: f(z) = scale law(z / scale)
    free: Tensor | None  # (B, D) bool, False at masked coordinates
    witness: Witness
    energetic: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.z0.dtype

    def exact(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In float64 at ``value``: the residual and f, (B, D), and a bound on errors of both, (B,)."""
        z = wide(value)
        s, b = (t.detach().double() for t in self.args[:2])
        w, c = self.w.double(), self.scale
        inside = z / c if self.free is None else torch.where(self.free, z / c, 0.0)
        image = c * self.law.f(inside, s, b, w)
        terms = (c * self.law.terms(inside, s, b, w)).abs() + image.abs() + z.abs()
        # Products may flush subnormal numbers to zero; float16, with few others, does not.
        kind = torch.finfo(self.dtype)
        low = 2.0**-24 if self.dtype == torch.float16 else kind.smallest_normal
        error = (z.shape[1] + 8) * kind.eps * terms + 8 * low * (1 + s.abs()) * max(c, 1.0)
        residual = image - z
        if self.free is not None:
            image, residual, error = (
                torch.where(self.free, t, 0.0) for t in (image, residual, error)
            )
        return residual, image, torch.linalg.vector_norm(error, dim=1)


def _shape(draw: Draw) -> tuple[int, ...]:
    """Of the state, without the batch."""
    kind = draw.choose("state", ("matrix", "tokens", "number"), (5, 4, 0.5))
    if kind == "number":
        return ()
    if kind == "matrix":
        return (draw.random.choice((1, 1, 2, 3, 5, 8, 16, 40)),)
    return (draw.random.randint(2, 4), draw.random.randint(1, 3))


def _factors(draw: Draw, batch: int) -> Tensor:
    """``s`` (B, 1): one kind for all samples, or another for each."""
    kind = draw.choose("factors", FACTORS, (5, 2, 1, 2, 1, 1, 3))

    def one(kind: str) -> float:
        u = draw.random.random()
        values = {"contraction": 0.7 * u, "weak": 0.7 + 0.29 * u, "one": 1.0, "minus": -1.2 * u}
        values |= {"expansive": 1 + 3 * u, "huge": 10 ** (1 + 3 * u)}
        return values[kind]

    kinds = [kind if kind != "mixed" else draw.random.choice(FACTORS[:-1]) for _ in range(batch)]
    return torch.tensor([[one(kind)] for kind in kinds], dtype=torch.float64)


def _matrix(draw: Draw, size: int) -> Tensor:
    """``w`` (D, D) of spectral norm at most 1."""
    kind = draw.choose("w", ("any", "symmetric", "definite", "orthogonal", "rank one", "zero"))
    w = draw.normal(size, size)
    if kind == "symmetric":
        w = w + w.T
    elif kind == "definite":
        w = w @ w.T
    elif kind == "orthogonal":
        w = torch.linalg.qr(w).Q
    elif kind == "rank one":
        w = w[:, :1] @ w[:1]
    elif kind == "zero":
        return 0 * w
    return w / torch.linalg.matrix_norm(w, 2).clamp_min(1e-300)


def draw_fixed_point(draw: Draw, energy: bool) -> FixedPoint:
    """A problem; with ``energy`` ``f`` is a ``Descent``."""
    shape = draw.note("shape", _shape(draw))
    batch = draw.note("B", draw.random.randint(1, 9))
    dtype = draw.choose("dtype", DTYPES, (4, 5, 1, 1))
    power = min(POWERS[dtype], 10) if energy else POWERS[dtype]
    scale = 2.0 ** draw.note("log2 scale", draw.random.randint(-power, power) * draw.chance(0.3))
    size = prod(shape)
    name = draw.choose("potential", list(POTENTIALS)) if energy else draw.choose("map", list(MAPS))
    law = POTENTIALS[name].map if energy else MAPS[name]
    s, w = _factors(draw, batch).to(dtype), _matrix(draw, size).to(dtype)
    b = draw.normal(batch, size, dtype=dtype)
    if name in ("sqrt", "log"):
        b = b + 2 * draw.choose("shift", (0, 1))
    start = scale * (draw.normal(batch, size) + (name == "log") + (name == "sqrt"))
    if draw.chance(0.1):
        start = 0 * draw.note("start", 0) * start
    z0 = start.reshape(batch, *shape).to(dtype)
    mask = None
    if len(shape) == 2 and draw.chance(0.25):
        mask = draw.note("mask", draw.mask(batch, shape[0]))
    witness = Witness.of(batch)

    def inner(z: Tensor, mask: Tensor | None) -> Tensor:
        z = z.reshape(len(z), -1) / scale
        return z if mask is None else torch.where(_free(mask, shape), z, 0.0)

    def f(z: Tensor, s: Tensor, b: Tensor, names: Tensor, mask: Tensor | None) -> Tensor:
        value = law.f(inner(z, mask), s, b, w) * scale
        witness.see(names, z.reshape(len(z), -1), value)
        return value.reshape(z.shape)

    def density(z: Tensor, s: Tensor, b: Tensor, names: Tensor, mask: Tensor | None) -> Tensor:
        each = POTENTIALS[name].density(inner(z, mask), s, b, w)
        if mask is not None:
            each = torch.where(_free(mask, shape), each, 0.0)
        # The gradient by z is then scale d density: a unit step in units of the scale.
        return each.sum(1) * scale * scale

    return FixedPoint(
        solvers.Descent(density) if energy else f, z0, (s, b, torch.arange(batch), mask), mask, law,
        w, scale, None if mask is None else _free(mask, shape), witness, energy,
    )  # fmt: skip


def _free(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(B, D) bool of a mask (B, N) of tokens."""
    return mask[:, :, None].expand(-1, -1, shape[1]).reshape(len(mask), -1)


def check_fixed_point(draw: Draw) -> None:
    """One solve."""
    problem = draw_fixed_point(draw, energy=draw.chance(0.25))
    options = draw_options(draw, problem)
    graph = options["adjoint"] is not None and problem.dtype in (torch.float32, torch.float64)
    seen: list[Any] = []
    if draw.chance(0.1):
        options["callback"] = seen.append
    inputs = (problem.z0, problem.args, problem.w)

    def solve() -> solvers.Solution:
        with torch.set_grad_enabled(graph):
            return solvers.fixed_point(problem.f, problem.z0, problem.args, **options)

    newton = isinstance(options["solver"], solvers.Newton)
    words = ("not differentiable",) if newton else ()  # what it may refuse
    call = valid(draw, solve, inputs, allowed=solvers.SolveError, words=words)
    solution = check_policy(draw, call, options["on_failure"])
    if solution is None:
        return
    check_solution(draw, problem, solution, options)
    check_counts(draw, problem, solution, options, seen)


def check_policy(draw: Draw, call: Call, on_failure: str) -> solvers.Solution | None:
    """The solution, also where an error brings it; errors and warnings come as they were asked for."""
    solution = call.error.solution if isinstance(call.error, solvers.SolveError) else call.result
    if solution is not None:
        failed = not bool(solution.converged.all())
        raised = call.error is not None
        draw.expect(raised == (failed and on_failure == "raise"), "policy", "raise")
        warns = failed and on_failure == "warn"
        draw.expect(len(call.warned) == int(warns), "policy", f"{len(call.warned)} warnings")
    return solution


def draw_options(draw: Draw, problem: FixedPoint) -> dict[str, Any]:
    """Keyword arguments for ``fixed_point``, all of them good."""
    uniform = draw.random.uniform
    rtol = draw.note("rtol", draw.random.choice((1e-4, 1e-4, 1e-2, 0.1, 1e-7, 1e-12, 0.0)))
    atol = draw.note("atol", draw.random.choice((0.0, 0.0, 0.0, 1e-3, 1e-6)) * problem.scale)
    solver = draw.note("solver", draw_solver(draw, problem))
    kinds = [None, None, None, solvers.Implicit(on_failure="ignore"), solvers.OneStep()]
    kinds += [solvers.Phantom(draw.random.randint(1, 4), uniform(0.1, 1.0))]
    kinds += [] if isinstance(solver, solvers.Newton) else [solvers.Unrolled()]
    return {
        "solver": solver,
        "tolerance": solvers.Tolerance(rtol, atol),
        "max_steps": draw.note("max_steps", draw.random.choice((1, 2, 3, 7, 20, 20, 50, 50, 120))),
        "adjoint": draw.note("adjoint", draw.random.choice(kinds)),
        "mask": problem.mask,
        "record": draw.note("record", draw.chance(0.3)),
        "compact": draw.note("compact", draw.chance(0.7)),
        "on_failure": draw.note("on_failure", draw.random.choice(("ignore", "warn", "raise"))),
        "verify": False,  # whose evaluations do not count; ``truths`` looks at what it finds
    }


def draw_solver(draw: Draw, problem: FixedPoint) -> Any:
    """A solver with random options that suits the problem."""
    random, uniform = draw.random, draw.random.uniform
    memory = random.choice((1, 2, 3, 6, 10, 30))
    damping = random.choice((1.0, 1.0, uniform(0.05, 1.5)))
    linear = random.choice((None, None, solvers.GMRES(random.choice((1, 3, 20)))))
    kinds = [
        solvers.Forward(damping),
        solvers.Anderson(memory, damping, random.choice((1e-12, 1e-8, 0.0))),
        solvers.Broyden(max(memory, 2), damping),
        solvers.GradientDescent(uniform(0.1, 1.2)),
        solvers.GradientDescent(uniform(0.1, 1.0), momentum=uniform(0.1, 0.9), nesterov=True),
        solvers.GradientDescent("auto"),
        None,
    ]
    if problem.dtype in (torch.float32, torch.float64):
        kinds.append(solvers.Newton(linear, uniform(0.01, 0.9)))
    if problem.energetic:
        kinds += [solvers.LBFGS(memory)] * 3
    return random.choice(kinds)


def check_solution(
    draw: Draw, problem: FixedPoint, solution: solvers.Solution, options: dict[str, Any]
) -> None:
    """Value, residual and status of every sample, recomputed in float64."""
    value, status = wide(solution.value), solution.status
    kinds = [(t.shape, t.dtype) for t in (solution.value, problem.z0)]
    draw.expect(kinds[0] == kinds[1], "structure", f"{kinds[0]}")
    draw.expect_rows(torch.isfinite(value).all(1), "finite value", value=value, status=status)
    if problem.free is not None:
        kept = (value == wide(problem.z0)) | problem.free
        draw.expect_rows(kept.all(1), "masked tokens", value=value)
    residual, image, error = problem.exact(solution.value)
    size, reference = norms(residual), norms(image)
    reported, relative = solution.residual_norm.double(), solution.residual.double()
    tolerance, told = options["tolerance"], {"status": status, "reported": reported, "true": size}
    unit = torch.finfo(problem.dtype).eps
    slack = 4 * (value.shape[1] + 8) * unit
    assert solution.error is not None
    limit = (tolerance.rtol * reference).clamp_min(tolerance.atol)
    converged, known = solution.converged, torch.isfinite(reported)
    met = size <= limit * (1 + slack) + error * (1 + tolerance.rtol)
    if problem.energetic and tolerance.rtol > 0:  # the error decides, see the family ``errors``
        scale = norms(value if problem.free is None else value.where(problem.free, 0.0))
        allowed = (tolerance.rtol * scale).clamp_min(tolerance.atol)
        met = met | (solution.error.double() * scale <= allowed * (1 + slack))
    draw.expect_rows(met | ~converged, "CONVERGED", limit=limit, error=error, **told)
    right = (reported - size).abs() <= error + slack * size
    # At the edge of a domain the value, exact in float64, may lie outside.
    draw.expect_rows(right | ~known | error.isnan(), "residual_norm", error=error, **told)
    if problem.energetic:  # the scale of a gradient step is the state
        inside = value if problem.free is None else value.where(problem.free, 0.0)
        reference = norms(inside)
    ratio = size / reference
    right = (relative - ratio).abs() <= (error * (1 + ratio) / (reference - error)) + slack * ratio
    unclear = ~known | ~(reference > 10 * error) | error.isnan()
    draw.expect_rows(right | unclear, "residual", relative=relative, ratio=ratio, **told)
    clearly = (relative <= 0.999 * tolerance.rtol) | (reported <= 0.999 * tolerance.atol)
    # Below the normal numbers a relative residual means nothing.
    unclear = ~known | ~(reference > torch.finfo(problem.dtype).smallest_normal)
    if problem.energetic:  # far from the start a residual may be small by growth alone
        unclear |= reference > 7 * problem.witness.first
    # The residual alone is not enough: the scale of the start and the estimated error count, too.
    unclear |= ~(solution.error.double() <= 0.999 * tolerance.rtol) | (
        size > 0.01 * problem.witness.first
    )
    draw.expect_rows(converged | ~clearly | unclear, "missed", relative=relative, **told)
    draw.expect_rows(known | (status == Status.NONFINITE), "unknown residual", **told)
    witness = problem.witness
    if not problem.energetic:
        broken = (status == Status.NONFINITE) & ~witness.bad
        draw.expect_rows(~broken, "NONFINITE", largest=witness.largest, **told)
        grown = ~(witness.largest <= 1e5 * witness.first)
        diverged = (status == Status.DIVERGED) & ~grown & ~witness.bad
        draw.expect_rows(
            ~diverged, "DIVERGED", first=witness.first, largest=witness.largest, **told
        )


def check_counts(
    draw: Draw, problem: FixedPoint, solution: solvers.Solution, options: dict[str, Any],
    seen: list[Any],
) -> None:  # fmt: skip
    """Evaluations, steps and the trace."""
    most, evaluations = options["max_steps"], solution.evaluations
    told = {"status": solution.status, "evaluations": evaluations, "calls": problem.witness.calls}
    draw.expect_rows((evaluations >= 1) & (evaluations <= most), "max_steps", **told)
    spent = (solution.status != Status.MAX_STEPS) | (evaluations == most)
    draw.expect_rows(spent, "MAX_STEPS", **told)
    steps = solution.steps
    draw.expect_rows((steps >= 0) & (steps <= evaluations), "steps", steps=steps, **told)
    newton = isinstance(options["solver"], solvers.Newton)
    if not problem.energetic and not newton:
        calls = problem.witness.calls
        if options["solver"] is not None:  # a second attempt by Newton's method counts its products
            draw.expect_rows(calls >= evaluations, "uncounted", **told)
        if options["adjoint"] is None:
            # Second attempts evaluate samples whose inner systems are solved along with the others.
            retried = options["solver"] is None and bool(calls.max() <= 5 * most)
            exact = retried or bool(calls.max() == evaluations.max())
            draw.expect(exact, "counted", f"{calls.max()} calls, {evaluations.max()} evaluations")
    if solution.energy is not None:
        finite = torch.isfinite(solution.energy) | (solution.status == Status.NONFINITE)
        draw.expect_rows(finite, "finite energy", energy=solution.energy, **told)
    trace = solution.trace
    draw.expect((trace is not None) == options["record"], "trace", f"{trace is not None}")
    if trace is not None:
        _check_trace(draw, solution, trace, newton or options["solver"] is None)
    if seen:
        counts = [progress.evaluation for progress in seen]
        again = options["solver"] is None  # samples tried again go on counting their own
        in_order = again or counts == list(range(1, len(counts) + 1))
        right = in_order and min(counts) >= 1 and max(counts) <= most
        draw.expect(right, "callback", f"{counts}")


def _check_trace(
    draw: Draw, solution: solvers.Solution, trace: solvers.Trace, products: bool
) -> None:
    """As many columns as evaluations, fewer where some are ``products``; energies that do not rise."""
    evaluations = solution.evaluations
    if solution.energy is None and bool(torch.isfinite(solution.residual).all()):
        columns, most = trace.residual.shape[1], int(evaluations.max())
        right = columns <= most if products else columns == most
        draw.expect(right, "trace", f"{columns} columns, {evaluations}")
    # Plain steps of a second attempt are judged by their residuals.
    if trace.energy is None or trace.accepted is None or products:
        return
    for row in range(len(evaluations)):
        taken = trace.energy[row][trace.accepted[row]].double()
        allowed = 8.5 * torch.finfo(trace.energy.dtype).eps * taken[:-1].abs()
        rise = taken[1:] - taken[:-1]
        worst = f"sample {row}: {taken.tolist()}"[:200]
        draw.expect((rise <= allowed).all(), "energy falls", worst)


# --- gradients through fixed points, by every adjoint, against dense formulas in float64 ------------

# For ``z = f(z)`` with ``J = df/dz`` and the loss gradient g, implicit differentiation gives
# ``p^T (I - J)^-T g`` for a parameter with ``p = df/dparameter``; ``steps`` phantom iterations of damping
# t give ``t sum_k A^k`` with ``A = (1 - t) I + t J`` in place of the inverse.

TIGHT = solvers.Tolerance(1e-11)


def network(z: Tensor, b: Tensor, s: Tensor, w: Tensor) -> Tensor:
    """``s tanh(z w^T + b)`` for one sample (D,) or many (B, D)."""
    return s * torch.tanh(z @ w.T + b)


def check_adjoint(draw: Draw) -> None:
    """One differentiated solve."""
    batch, size = (
        draw.note("B", draw.random.randint(1, 5)),
        draw.note("D", draw.random.randint(1, 6)),
    )
    symmetric = draw.note("symmetric", draw.chance(0.2))
    w = draw.normal(size, size)
    w = w + w.T if symmetric else w
    w = w / torch.linalg.matrix_norm(w, 2)
    s = torch.rand(batch, 1, generator=draw.generator, dtype=w.dtype) * 0.9
    b, z0, g = (draw.normal(batch, size) for _ in range(3))
    lost = draw.note("lost", draw.chance(0.2) and batch > 1)
    if lost:
        b[0] = 1e200  # tanh makes one of it, and the map below NaN
    mask = None
    if not lost and size > 1 and draw.chance(0.2):
        mask = draw.mask(batch, size)
    kind = draw.choose("adjoint", ("implicit", "implicit", "phantom", "one step", "unrolled"))
    adjoint = _adjoint(draw, kind)
    random = draw.random
    solver = random.choice((solvers.Forward(), solvers.Anderson(), solvers.Broyden()))
    solver = draw.note("solver", solvers.Forward() if kind == "unrolled" else solver)
    inputs = [t.requires_grad_() for t in (b, s, w)]

    def f(z: Tensor, b: Tensor, s: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            z = torch.where(mask, z, 0.0)
        value = network(z, b, s, w)
        return torch.where(b > 1e100, torch.nan, value) if lost else value

    options: dict[str, Any] = {
        "solver": solver,
        "tolerance": TIGHT,
        "max_steps": 400,
        "adjoint": adjoint,
        "mask": mask,
        "compact": draw.note("compact", lost or draw.chance(0.7)),
        "on_failure": "ignore",
    }
    call = valid(draw, lambda: solvers.fixed_point(f, z0, (b, s, mask), **options), (z0, *inputs))
    solution = call.result
    if solution is None:
        return
    live = solution.converged
    draw.expect(bool(live[1:].all()), "converges", f"{solution.status.tolist()}")
    if not bool(live[1:].all()) or (not lost and not bool(live.all())):
        return
    if lost:
        draw.expect(int(solution.status[0]) == solvers.Status.NONFINITE, "NONFINITE", "not said")
        g = torch.cat([0 * g[:1], g[1:]]) if draw.chance(0.5) else g
    whole = solution.value
    draw.expect(whole.requires_grad, "gradient", "the value has none")
    if not whole.requires_grad:
        return
    backward = Call(draw, lambda: torch.autograd.grad((whole * g).sum(), inputs))
    if backward.error is not None:
        draw.expect(False, "backward", f"{type(backward.error).__name__}: {backward.error}"[:300])
        return
    exact = _exact(solution.value.detach(), g, (b, s, w), mask, lost, adjoint)
    for name, value, (expected, size) in zip("bsw", backward.result, exact, strict=True):
        apart = float((value - expected).norm() / size.clamp_min(1e-6))
        draw.expect(apart <= 1e-6, "gradient", f"of {name} is off by {apart:.3g}")


def _adjoint(draw: Draw, kind: str) -> solvers.Adjoint:
    random = draw.random
    if kind == "phantom":
        steps, damping = random.randint(1, 6), random.uniform(0.2, 1.2)
        return draw.note("kind", solvers.Phantom(steps, damping))
    if kind == "unrolled":
        return draw.note("kind", solvers.Unrolled())
    if kind == "one step":
        return solvers.OneStep()
    linear = random.choice((None, solvers.GMRES(10)))
    return draw.note("kind", solvers.Implicit(linear, TIGHT, max_steps=100))


def _exact(
    z: Tensor, g: Tensor, inputs: Any, mask: Tensor | None, lost: bool, adjoint: solvers.Adjoint
) -> list[tuple[Tensor, Tensor]]:
    """Gradients of b, s and w by dense Jacobians, and their sizes; a lost sample has none."""
    b, s, w = (t.detach() for t in inputs)
    total_b, total_s, total_w = torch.zeros_like(b), torch.zeros_like(s), torch.zeros_like(w)
    size_w = w.new_zeros(())
    unit = torch.eye(z.shape[1], dtype=z.dtype)
    for row in range(int(lost), len(z)):
        free = unit[0] * 0 + 1 if mask is None else mask[row].to(z.dtype)

        def step(z: Tensor, b: Tensor, s: Tensor, w: Tensor, free: Tensor = free) -> Tensor:
            return free * network(free * z, b, s, w)

        point = (z[row], b[row], s[row], w)
        jacobian, *others = torch.autograd.functional.jacobian(step, point)
        matrix = torch.linalg.inv(unit - jacobian).T
        if isinstance(adjoint, (solvers.Phantom, solvers.OneStep)):
            steps, damping = 1, 1.0
            if isinstance(adjoint, solvers.Phantom):
                steps, damping = adjoint.steps, adjoint.damping
            once = (1 - damping) * unit + damping * jacobian
            powers = [torch.linalg.matrix_power(once, k) for k in range(steps)]
            matrix = damping * torch.stack(powers).sum(0).T
        u = matrix @ (free * g[row])
        total_b[row], total_s[row] = u @ others[0], u @ others[1]
        part = torch.einsum("d,d...->...", u, others[2])
        total_w, size_w = total_w + part, size_w + part.norm()  # the parts may cancel
    return [(total_b, total_b.norm()), (total_s, total_s.norm()), (total_w, size_w)]


# --- linear systems by every Krylov method ---------------------------------------------------------

MATRICES = (
    "definite", "hard", "indefinite", "any", "singular", "zero", "identity", "nilpotent", "skew",
)  # fmt: skip
LINEAR_POWERS = {torch.float64: 60, torch.float32: 30, torch.bfloat16: 30, torch.float16: 6}


def check_linear(draw: Draw) -> None:
    """One system."""
    dtype = draw.choose("dtype", DTYPES, (4, 4, 1, 1))
    batch = draw.note("B", draw.random.randint(1, 6))
    shape = draw.choose("shape", ((1,), (2,), (3,), (8,), (20,), (2, 3), ()))
    size = max(1, torch.Size(shape).numel())
    power = LINEAR_POWERS[dtype]
    exponents = [draw.random.randint(-power, power) * draw.chance(0.3) for _ in range(2)]
    scales = [2.0 ** draw.note(n, e) for n, e in zip("Ab", exponents, strict=True)]
    matrix = torch.stack([_system(draw, size) for _ in range(batch)]) * scales[0]
    matrix = matrix.to(dtype)
    b = (draw.normal(batch, size) * scales[1]).to(dtype)
    if draw.chance(0.2):
        b[0] = draw.choose("first b", (0.0, torch.nan, torch.inf))
    options = _linear_options(draw)
    x0 = None
    if draw.chance(0.3):
        x0 = (draw.normal(batch, size) * min(scales[1] / scales[0], 1e3)).to(dtype)
        draw.note("x0", "given")
    tree = draw.note("pytree", draw.chance(0.2))

    def wrap(vector: Tensor | None) -> Any:
        if vector is None:
            return None
        whole = vector.reshape(batch, *shape)
        return {"x": whole} if tree else whole

    def matvec(v: Any, a: Tensor) -> Any:
        leaf = pytree.tree_leaves(v)[0]
        image = (a @ leaf.reshape(len(leaf), -1, 1)).reshape(leaf.shape)
        return {"x": image} if tree else image

    right, start = wrap(b), wrap(x0)
    call = valid(
        draw, lambda: solvers.solve_linear(matvec, right, x0=start, args=(matrix,), **options),
        (right, start, matrix), allowed=solvers.SolveError,
    )  # fmt: skip
    solution = check_policy(draw, call, options["on_failure"])
    if solution is None:
        return
    _check_linear_solution(draw, solution, matrix, b, options)


def _system(draw: Draw, size: int) -> Tensor:
    kind = draw.choose("matrix", MATRICES, (4, 1, 2, 3, 2, 0.3, 1, 1, 1))
    a = draw.normal(size, size) / size**0.5
    if kind == "definite":
        return a @ a.T + 0.1 * torch.eye(size, dtype=a.dtype)
    if kind == "hard":
        return a @ torch.diag(torch.logspace(0, -10, size, dtype=a.dtype)) @ a.T
    if kind == "indefinite":
        return a + a.T
    if kind == "singular":
        return (
            a[:, :1] @ a[:1] if draw.chance(0.5) else a @ torch.diag((a[0] > 0).to(a.dtype)) @ a.T
        )
    if kind == "identity":
        return torch.eye(size, dtype=a.dtype)
    if kind == "nilpotent":
        return a.triu(1)
    if kind == "skew":
        return a - a.T
    return 0 * a if kind == "zero" else a


def _linear_options(draw: Draw) -> dict[str, Any]:
    random = draw.random
    kinds = [solvers.CG(), solvers.MINRES(), solvers.GMRES(random.choice((1, 2, 3, 5, 20)))]
    rtol = draw.note("rtol", random.choice((1e-6, 1e-6, 1e-3, 1e-10, 0.0)))
    atol = draw.note("atol", random.choice((0.0, 0.0, 0.0, 1e-3)))
    return {
        "solver": draw.note("solver", random.choice(kinds)),
        "tolerance": solvers.Tolerance(rtol, atol),
        "max_steps": draw.note("max_steps", random.choice((1, 2, 3, 4, 8, 30, 100))),
        "compact": draw.note("compact", draw.chance(0.7)),
        "on_failure": random.choice(("ignore", "ignore", "warn", "raise")),
        "record": draw.chance(0.3),
    }


def _check_linear_solution(
    draw: Draw, solution: solvers.Solution, matrix: Tensor, b: Tensor, options: dict[str, Any]
) -> None:
    """The residual at the value, by float64, and what the status says of it."""
    batch, size = b.shape
    x = pytree.tree_leaves(solution.value)[0].double().reshape(batch, size)
    a, right, status = matrix.double(), b.double(), solution.status
    draw.expect_rows(torch.isfinite(x).all(1), "finite value", x=x, status=status)
    sound = torch.isfinite(right).all(1)
    # In half precision the iterates of a singular system soon leave the range.
    wide = b.dtype in (torch.float32, torch.float64)
    large = norms(x) * torch.linalg.matrix_norm(a) > torch.finfo(b.dtype).max ** 0.4
    # A method for symmetric matrices promises nothing for others.
    symmetric = ((a - a.mT).abs() <= 8 * torch.finfo(b.dtype).eps * a.abs().amax()).all(2).all(1)
    suits = symmetric | isinstance(options["solver"], solvers.GMRES)
    broken = (status == Status.NONFINITE) & sound & ~large & wide & suits
    draw.expect_rows(~broken, "NONFINITE", status=status)
    draw.expect_rows(sound | (status == Status.NONFINITE), "not finite b", status=status)
    residual = right - (a @ x[:, :, None])[:, :, 0]
    true, reference = norms(residual), norms(right)
    reported, tolerance = solution.residual_norm.double(), options["tolerance"]
    eps = torch.finfo(b.dtype).eps
    tiny = torch.finfo(b.dtype).smallest_normal * size
    error = 50 * eps * (torch.linalg.matrix_norm(a) * norms(x) + reference) + tiny * (
        1 + a.abs().sum((1, 2))
    )
    limit = (tolerance.rtol * reference).clamp_min(tolerance.atol)
    told = {"status": status, "reported": reported, "true": true, "error": error}
    met = true <= limit * 1.01 + error
    draw.expect_rows(met | ~solution.converged, "CONVERGED", limit=limit, **told)
    known = torch.isfinite(reported) & sound
    right_norm = (reported - true).abs() <= error + 0.15 * torch.maximum(true, limit)
    draw.expect_rows(right_norm | ~known, "residual_norm", limit=limit, **told)
    draw.expect_rows(known | (status == Status.NONFINITE), "unknown residual", **told)
    spent = solution.evaluations
    draw.expect_rows(spent <= options["max_steps"], "max_steps", evaluations=spent, **told)
    indefinite = status == Status.INDEFINITE
    if bool(indefinite.any()):
        part = a + a.mT
        lowest = torch.linalg.eigvalsh(part).amin(1)
        size_a = torch.linalg.matrix_norm(a)
        bad = indefinite & symmetric & (lowest > 100 * eps * size_a * size + tiny)
        draw.expect_rows(~bad, "INDEFINITE", lowest=lowest, **told)
