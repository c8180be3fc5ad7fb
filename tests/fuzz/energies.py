"""Random energies and kernels: closed forms against autograd and dense formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import solvers
from cases.energies import COUNT, ENERGIES, MEMORIES, NORMS, EnergyCase
from cases.kernels import Case, Problem, dense, problem_of
from fuzz import Draw, valid
from implicit_attn import DEQ
from implicit_attn.energies import (
    Energy,
    GatedFeedForward,
    GELUFeedForward,
    Quadratic,
    ReLUFeedForward,
    SoftmaxFeedForward,
)
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp, frozen_key_attention

SAMPLES = 3
# Where a field leaves the domain of such units, the energy is minus infinity and its gradient NaN.
LIMITED = ("rbm-laplace", "rbm-exponential")
EXACT = 1e-9  # of float64, relative to the largest number; curvatures of small tokens reach 1e5


def check_energy(draw: Draw) -> None:
    """One energy with random weights and tokens."""
    case: EnergyCase = draw.random.choice(ENERGIES)
    dim = draw.note("d", draw.random.choice((4, 8)))
    count = COUNT if case.placed else draw.random.choice((1, 2, 3, 5, 9))
    width = None if not draw.chance(0.2) else draw.random.choice((1, 3, dim))
    if width is not None:
        case = EnergyCase("memories", _memories(draw, width), True)
    draw.note("energy", case.id)
    torch_state = torch.get_rng_state()
    torch.manual_seed(draw.number)
    energy = case.factory(dim).double()
    torch.set_rng_state(torch_state)
    size = draw.note("size of z", draw.random.choice((1.0, 1.0, 1.0, 0.1, 3.0)))
    shape = (draw.note("B", draw.random.randint(1, SAMPLES)), draw.note("N", count), dim)
    z, v = size * draw.normal(*shape), draw.normal(*shape)
    x = draw.normal(*shape) if case.needs_x or draw.chance(0.3) else None
    if width is not None:
        x = draw.normal(*shape[:2], width)
    mask = draw.note("mask", draw.mask(*shape[:2])) if draw.chance(0.5) else None
    inputs = (z, v, x, mask, list(energy.parameters()))
    call = valid(draw, lambda: energy.value_and_grad(z, x, mask=mask), inputs)
    product = valid(draw, lambda: energy.hvp(z, v, x, mask=mask), inputs).result
    if call.result is None or product is None:
        return
    value, gradient = (t.detach() for t in call.result)
    outside = value == -torch.inf
    if case.id in LIMITED and outside.any():
        draw.expect_rows(gradient.isnan().flatten(1).any(1) == outside, "domain", value=value)
        return
    draw.expect_rows(torch.isfinite(value), "finite energy", value=value)
    _check_derivatives(draw, energy, (z, v, x, mask), value, gradient, product.detach())
    prepared = energy.prepare(x, mask=mask)
    _close(draw, "prepared", energy.grad(z, prepared, mask=mask).detach(), gradient)
    _close(draw, "prepared", energy.hvp(z, v, prepared, mask=mask).detach(), product.detach())
    if mask is not None:
        _check_mask(draw, case, energy, (z, v, x, mask), value, gradient)
    if not case.placed and "causal" not in case.id:
        _check_order(draw, energy, (z, v, x, mask), value, gradient)
    if draw.chance(0.4):
        _check_descent(draw, energy, z, x, mask)


def _memories(draw: Draw, width: int) -> Callable[[int], Energy]:
    """A feed-forward energy that sees an input of ``width`` features, with drawn options."""
    cls: Any = draw.random.choice(
        (ReLUFeedForward, SoftmaxFeedForward, GatedFeedForward, GELUFeedForward)
    )
    options: dict[str, Any] = {
        "gates": cls is not SoftmaxFeedForward and draw.chance(0.5),
        "norm": NORMS[draw.random.choice(list(NORMS))],
        "bound": draw.random.choice((None, 0.7)),
    }
    draw.note("memories", f"{cls.__name__} {options}")

    def make(dim: int) -> Energy:
        energy = cls(dim, MEMORIES, context_dim=width, **options)
        with torch.no_grad():
            for name, parameter in energy.named_parameters():
                if not name.startswith("projection"):
                    parameter.copy_(torch.randn(parameter.shape))
        return energy

    return make


def _close(draw: Draw, name: str, value: Tensor, expected: Tensor, room: float = EXACT) -> None:
    scale = max(float(expected.abs().max()), 1e-3) if expected.numel() else 1.0
    apart = float((value - expected).abs().max()) / scale if value.numel() else 0.0
    draw.expect(apart <= room, name, f"relative error {apart:.3g} of numbers up to {scale:.3g}")


def _check_derivatives(
    draw: Draw, energy: Energy, inputs: Any, value: Tensor, gradient: Tensor, product: Tensor
) -> None:
    """Value, gradient and Hessian product against automatic differentiation of the value."""
    z, v, x, mask = inputs
    point = z.clone().requires_grad_()
    number = energy(point, x, mask=mask)
    _close(draw, "value", value, number.detach())
    (expected,) = torch.autograd.grad(number.sum(), point, create_graph=True)
    _close(draw, "gradient", gradient, expected.detach())
    if expected.requires_grad:
        (second,) = torch.autograd.grad((expected * v).sum(), point, allow_unused=True)
        # Second derivatives of norms without a floor are large: the room is for rounding.
        _close(draw, "hvp", product, torch.zeros_like(v) if second is None else second, 1e-7)


def _check_mask(
    draw: Draw, case: EnergyCase, energy: Energy, inputs: Any, value: Tensor, gradient: Tensor
) -> None:
    """Masked tokens have no gradient and no influence, NaN included."""
    z, _, x, mask = inputs
    hidden = ~mask[:, :, None]
    draw.expect(
        (gradient.masked_select(hidden) == 0).all(), "mask", "masked tokens have a gradient"
    )
    other = torch.where(hidden, torch.nan if draw.chance(0.5) else 7.0, z)
    if "cross" not in case.id and x is not None:  # an input per token, not a context of its own
        x = torch.where(hidden, torch.nan if draw.chance(0.5) else 7.0, x)
    again = valid(draw, lambda: energy.value_and_grad(other, x, mask=mask), (other, x)).result
    if again is not None:
        _close(draw, "mask", again[0].detach(), value)
        _close(draw, "mask", again[1].detach(), gradient)


def _check_order(draw: Draw, energy: Energy, inputs: Any, value: Tensor, gradient: Tensor) -> None:
    """Another order of the tokens gives the same energy and the gradient in that order."""
    z, _, x, mask = inputs
    order = torch.randperm(z.shape[1], generator=draw.generator)
    z, x, mask = (None if t is None else t[:, order] for t in (z, x, mask))
    result = valid(draw, lambda: energy.value_and_grad(z, x, mask=mask), (z, x)).result
    if result is not None:
        _close(draw, "permutation", result[0].detach(), value)
        _close(draw, "permutation", result[1].detach(), gradient[:, order])


def _check_descent(draw: Draw, energy: Energy, z: Tensor, x: Tensor | None, mask: Any) -> None:
    """A solve of ``E + Quadratic()``: the energies of accepted states never rise."""
    layer = DEQ(energy + Quadratic(), on_failure="ignore", init="input")
    given: Any = z if x is None else x
    if x is not None and x.shape != z.shape:  # of another width: it enters the energy alone
        layer = DEQ(energy.select("x") + Quadratic().select("z"), on_failure="ignore")
        given = {"x": x, "z": draw.normal(*z.shape)}
    call = valid(draw, lambda: layer.solve(given, mask, z0=z, record=True), (z, x))
    if call.result is None:
        return
    solution: solvers.Solution = call.result
    trace = solution.trace
    assert trace is not None and trace.energy is not None and trace.accepted is not None
    for row in range(len(z)):
        taken = trace.energy[row][trace.accepted[row]]
        allowed = 8.5 * torch.finfo(taken.dtype).eps * taken[:-1].abs()
        rises = taken[1:] - taken[:-1]
        draw.expect(
            (rises <= allowed).all(), "energy falls", f"sample {row}: {taken.tolist()}"[:200]
        )
    if mask is not None:
        kept = solution.value.detach()[~mask] == z[~mask]
        draw.expect(kept.all(), "mask", "the solve moved masked tokens")
    norm = torch.linalg.vector_norm
    with torch.no_grad():
        moved = layer.update(solution.value, layer.update.prepare(given, mask=mask), mask=mask)
        step = moved - solution.value
    if mask is not None:
        step, moved = (torch.where(mask[:, :, None], t, 0.0) for t in (step, moved))
    size, limit = norm(step.flatten(1), dim=1), 1e-4 * norm(moved.flatten(1), dim=1)
    met = (size <= limit * 1.0001) | ~solution.converged
    draw.expect_rows(met, "CONVERGED", size=size, limit=limit)


# --- kernels of attention: every backend against dense formulas in float64, derivatives included -------

NEAR = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
COUNTS = (1, 2, 3, 5, 15, 16, 17, 33, 64, 65, 130)
TRITON_COUNTS = (1, 2, 16, 17, 33)
MASKS = ("none", "random", "rows", "padding")


def check_kernel(draw: Draw) -> None:
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
    # Means of tokens, which may cancel.
    _near(draw, "gradient", gradient, exact[0], room, float(problem.z.detach().nan_to_num().norm()))
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
