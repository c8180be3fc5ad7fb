"""Random gradients through fixed points, by every adjoint, against dense formulas in float64.

For ``z = f(z)`` with ``J = df/dz`` and the loss gradient g, implicit differentiation gives
``p^T (I - J)^-T g`` for a parameter with ``p = df/dparameter``; ``steps`` phantom iterations of damping
t give ``t sum_k A^k`` with ``A = (1 - t) I + t J`` in place of the inverse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import solvers
from fuzz.cases import Call, Draw, valid

TIGHT = solvers.Tolerance(1e-11)


def network(z: Tensor, b: Tensor, s: Tensor, w: Tensor) -> Tensor:
    """``s tanh(z w^T + b)`` for one sample (D,) or many (B, D)."""
    return s * torch.tanh(z @ w.T + b)


def check(draw: Draw) -> None:
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
    second = kind == "implicit" and not lost and draw.chance(0.3)
    backward = Call(
        draw, lambda: torch.autograd.grad((whole * g).sum(), inputs, create_graph=second)
    )
    if backward.error is not None:
        draw.expect(False, "backward", f"{type(backward.error).__name__}: {backward.error}"[:300])
        return
    exact = _exact(solution.value.detach(), g, (b, s, w), mask, lost, adjoint)
    for name, value, expected in zip("bsw", backward.result, exact, strict=True):
        apart = float((value.detach() - expected).norm() / expected.norm().clamp_min(1e-6))
        draw.expect(apart <= 1e-6, "gradient", f"of {name} is off by {apart:.3g}")
    if second:
        _check_second(draw, backward.result, inputs, (z0, g, mask))


def _adjoint(draw: Draw, kind: str) -> solvers.Adjoint:
    random = draw.random
    if kind == "phantom":
        steps, damping = random.randint(1, 6), random.uniform(0.2, 1.2)
        return draw.note("kind", solvers.Phantom(steps, damping))
    if kind == "unrolled":
        return draw.note("kind", solvers.Unrolled(checkpoint=draw.chance(0.5)))
    if kind == "one step":
        return solvers.OneStep()
    linear = random.choice((None, solvers.GMRES(10)))
    return draw.note("kind", solvers.Implicit(linear, TIGHT, max_steps=100))


def _exact(
    z: Tensor, g: Tensor, inputs: Any, mask: Tensor | None, lost: bool, adjoint: solvers.Adjoint
) -> list[Tensor]:
    """Gradients of b, s and w by dense Jacobians; a lost sample has none."""
    b, s, w = (t.detach() for t in inputs)
    total_b, total_s, total_w = torch.zeros_like(b), torch.zeros_like(s), torch.zeros_like(w)
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
        total_w += torch.einsum("d,d...->...", u, others[2])
    return [total_b, total_s, total_w]


def _check_second(draw: Draw, first: Any, inputs: Any, constants: Any) -> None:
    """A second derivative against that of 300 plain iterations."""
    z0, g, mask = constants
    b, s, w = inputs
    seed = [draw.normal(*t.shape) for t in first]
    total = torch.stack([(t * v).sum() for t, v in zip(first, seed, strict=True)]).sum()
    call = Call(draw, lambda: torch.autograd.grad(total, inputs))
    if call.error is not None:
        draw.expect(False, "backward", f"second: {type(call.error).__name__}: {call.error}"[:300])
        return
    z = z0 if mask is None else torch.where(mask, z0, 0.0)
    for _ in range(300):
        z = network(z, b, s, w)
        z = z if mask is None else torch.where(mask, z, 0.0)
    g = g if mask is None else torch.where(mask, g, 0.0)
    plain = torch.autograd.grad((z * g).sum(), inputs, create_graph=True)
    total = torch.stack([(t * v).sum() for t, v in zip(plain, seed, strict=True)]).sum()
    exact = torch.autograd.grad(total, inputs)
    for name, value, expected in zip("bsw", call.result, exact, strict=True):
        apart = float((value - expected).norm() / expected.norm().clamp_min(1e-4))
        draw.expect(apart <= 1e-5, "second", f"derivative by {name} is off by {apart:.3g}")
