"""Random linear systems by every Krylov method: residuals and statuses against float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import solvers
from fuzz.cases import DTYPES, Draw, norms, valid
from solvers import Status

MATRICES = (
    "definite", "hard", "indefinite", "any", "singular", "zero", "identity", "nilpotent", "skew",
)  # fmt: skip
POWERS = {torch.float64: 60, torch.float32: 30, torch.bfloat16: 30, torch.float16: 6}


def check(draw: Draw) -> None:
    """One system."""
    dtype = draw.choose("dtype", DTYPES, (4, 4, 1, 1))
    batch = draw.note("B", draw.random.randint(1, 6))
    shape = draw.choose("shape", ((1,), (2,), (3,), (8,), (20,), (2, 3), ()))
    size = max(1, torch.Size(shape).numel())
    power = POWERS[dtype]
    exponents = [draw.random.randint(-power, power) * draw.chance(0.3) for _ in range(2)]
    scales = [2.0 ** draw.note(n, e) for n, e in zip("Ab", exponents, strict=True)]
    matrix = torch.stack([_matrix(draw, size) for _ in range(batch)]) * scales[0]
    matrix = matrix.to(dtype)
    b = (draw.normal(batch, size) * scales[1]).to(dtype)
    if draw.chance(0.2):
        b[0] = draw.choose("first b", (0.0, torch.nan, torch.inf))
    options = _options(draw)
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
    solution = call.result
    if isinstance(call.error, solvers.SolveError):
        solution = call.error.solution
    if solution is None:
        return
    failed = not bool(solution.converged.all())
    raised = call.error is not None
    draw.expect(raised == (failed and options["on_failure"] == "raise"), "policy", "raise")
    warns = failed and options["on_failure"] == "warn"
    draw.expect(len(call.warned) == int(warns), "policy", f"{len(call.warned)} warnings")
    _check_solution(draw, solution, matrix, b, options)


def _matrix(draw: Draw, size: int) -> Tensor:
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


def _options(draw: Draw) -> dict[str, Any]:
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


def _check_solution(
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
