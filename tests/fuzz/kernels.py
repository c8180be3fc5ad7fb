"""Random attention kernels: every backend against dense formulas in float64, derivatives included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cases.kernels import Case, Problem, dense, problem_of
from fuzz.cases import Draw, valid
from implicit_attn.kernels import (
    bisoftmax,
    bisoftmax_hvp,
    frozen_key_attention,
)

NEAR = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
COUNTS = (1, 2, 3, 5, 15, 16, 17, 33, 64, 65, 130)
TRITON_COUNTS = (1, 2, 16, 17, 33)
MASKS = ("none", "random", "rows", "padding")


def check(draw: Draw) -> None:
    """One kernel."""
    kind = draw.choose("kernel", ("bisoftmax", "bisoftmax", "frozen keys"))
    {"bisoftmax": _bisoftmax, "frozen keys": _frozen}[kind](draw)


def _draw_problem(draw: Draw, backend: str) -> tuple[Case, Problem]:
    triton = backend == "triton"
    dtypes = [torch.float32, torch.float16, torch.bfloat16] + [torch.float64] * (not triton)
    case = Case(
        tokens=draw.random.choice(TRITON_COUNTS if triton else COUNTS),
        width=draw.random.choice((16, 32) if triton else (1, 2, 5, 16, 40)),
        batch=draw.random.randint(1, 2 if triton else 3),
        heads=draw.random.randint(1, 1 if triton else 3), dtype=draw.random.choice(dtypes),
        mask=draw.random.choice(MASKS), causal=draw.chance(0.3), normalised=draw.chance(0.5),
        scale=draw.random.choice((1.0, 0.1, 4.0)), strided=draw.chance(0.3),
    )  # fmt: skip
    draw.note("case", case)
    return case, problem_of(case, "cpu", seed=draw.number)


def _near(
    draw: Draw, name: str, value: Tensor, exact: Tensor, room: float, least: float = 0.0
) -> None:
    """``least``: the size of the terms of a sum, which may cancel."""
    draw.expect(torch.isfinite(value).all(), "finite", f"{name} is not")
    apart = (value.detach().double() - exact).norm() / max(float(exact.norm()), least, 1e-300)
    draw.expect(apart <= room, name, f"relative error {apart:.3g} > {room:.3g}")


def _bisoftmax(draw: Draw) -> None:
    weights = (4, 8, 1)  # Triton's interpreter is slow
    backend = draw.random.choices(("reference", "blocks", "triton"), weights)[0]
    draw.note("backend", backend)
    case, problem = _draw_problem(draw, backend)
    shared: dict[str, Any] = {
        "mask": problem.mask,
        "causal": case.causal,
        "limit": case.limit,
        "backend": backend,
    }
    z, v = problem.z.detach().requires_grad_(), problem.v
    call = valid(draw, lambda: bisoftmax(z, case.beta, **shared), (problem.z, v))
    product = valid(draw, lambda: bisoftmax_hvp(problem.z, v, case.beta, **shared), (problem.z, v))
    if call.result is None or product.result is None:
        return
    gradient, lse = call.result
    exact = dense(case, problem, cotangent=False)
    # Scores of size r are rounded to eps r, which the exponential makes a relative error.
    size = case.beta * case.width * case.scale**2 * (4 if not case.normalised else 1)
    room = NEAR[case.dtype] * (1 + size)
    _near(draw, "gradient", gradient, exact[0], room)
    draw.expect((lse - exact[1]).abs().max() <= room * 10, "lse", "is off")
    _near(draw, "hvp", product.result, exact[2], room * 4, float(exact[0].norm()))
    counts = problem.mask if problem.mask is not None else torch.ones_like(lse[:, 0]) > 0
    cotangent = torch.where(counts[:, None], problem.cotangent.to(lse.dtype), 0.0)
    if draw.chance(0.5):
        # What torch.where leaves behind at masked tokens: 0 * NaN.
        cotangent = torch.where(counts[:, None], cotangent, torch.nan)
    g = v.masked_fill(~counts[:, None, :, None], 0.0)
    result = valid(
        draw, lambda: torch.autograd.grad((gradient, lse), z, (g, cotangent)), (problem.z, v)
    ).result
    if result is not None:
        _near(draw, "backward", result[0], dense(case, problem, cotangent=True)[2], room * 6)


def _plain(problem: Problem, case: Case) -> tuple[Tensor, Tensor]:
    counts = torch.ones(case.batch, case.tokens, dtype=torch.bool)
    counts = counts if problem.mask is None else problem.mask
    return problem.z.double().masked_fill(~counts[:, None, :, None], 0.0), counts


def _frozen(draw: Draw) -> None:
    backend = draw.choose("backend", ("reference", "flash"))
    case, problem = _draw_problem(draw, "frozen keys")
    key, counts = _plain(problem, case)
    query = draw.normal(case.batch, case.heads, draw.random.choice((1, 3, 20)), case.width)
    query = query.to(case.dtype)
    scores = (case.beta * query.double() @ key.mT).masked_fill(
        ~counts[:, None, None, :], -torch.inf
    )
    empty = ~counts.any(1)[:, None, None]
    lse = scores.logsumexp(-1).masked_fill(empty, 0.0)
    weights = (scores - lse[..., None]).exp()
    given = key.to(case.dtype)  # zero at masked keys, as the callers have them
    options: dict[str, Any] = {"mask": problem.mask, "backend": backend}
    call = valid(
        draw, lambda: frozen_key_attention(query, given, case.beta, **options), (query, given)
    )
    if call.result is None:
        return
    room = NEAR[case.dtype] * (1 + case.beta * case.width * case.scale)
    _near(draw, "mean", call.result[0], weights @ key, room * 2)
    draw.expect((call.result[1] - lse).abs().max() <= room * 10, "lse", "is off")
