"""Gradients that leave out the samples which have none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from solvers.adjoints.implicit import zero_derivative
from solvers.core.problem import Problem
from solvers.core.solution import Solution, Status

Attach = Callable[[Problem, Tensor, Tensor | None], Tensor]


def differentiate_states(
    problem: Problem,
    solution: Solution,
    start: Tensor,
    left_out: Tensor | None,
    attach: list[Attach],
) -> None:
    """:func:`differentiate` for each of the solution's states, by its own of ``attach``."""
    for state, own in zip(solution.states or (), attach, strict=True):
        whole = replace(solution, value=state.value)
        state.value = differentiate(problem, whole, start, left_out, own).value


def differentiate(
    problem: Problem, solution: Solution, start: Tensor, left_out: Tensor | None, attach: Attach
) -> Solution:
    """Let ``attach(problem, value, rows)`` give the solution's value its gradient.

    A sample that is ``left_out`` has no derivative: zero is what its gradient is set to, and its NaN
    would reach the gradients of the others through weights that they share. So ``attach`` sees only the
    other samples: ``rows`` (n,), or None where that is all of them or ``compact=False`` forbids to
    leave any out; then their cotangents are zero.
    """
    if left_out is None or not bool(left_out.any()):
        solution.value = attach(problem, solution.value, None)
        return solution
    if bool(left_out.all()):
        solution.value = zero_derivative(problem, solution.value.detach(), start)
        return solution
    if not problem.compact:
        solution.value = without_derivative(attach(problem, solution.value, None), left_out)
        return solution
    rows = torch.nonzero(~left_out).flatten()
    whole = solution.value.detach()
    part = problem.rows(rows, whole.shape[0])
    value = attach(part, solution.value.index_select(0, rows), rows)
    solution.value = whole.index_copy(0, rows, value)
    return solution


def without_derivative(value: Tensor, left_out: Tensor) -> Tensor:
    """``value`` (B, D), constant in the rows ``left_out`` (B,)."""
    return torch.where(left_out.unsqueeze(1), value.detach(), value)


def no_evaluation(solution: Solution) -> Tensor | None:
    """Samples (B,) without any finite evaluation, None where there is none."""
    if math.isfinite(solution.residual.sum().item()):
        return None
    return ~torch.isfinite(solution.residual)


def failed(solution: Solution) -> Tensor:
    """Samples (B,) that are nowhere near a fixed point: there is nothing to differentiate."""
    return lost(solution.status, solution.residual)


def lost(status: Tensor, residual: Tensor) -> Tensor:
    """:func:`failed` of the status and the residual (B,)."""
    away = (status == Status.DIVERGED) | (status == Status.NONFINITE)
    return away | ~torch.isfinite(residual)
