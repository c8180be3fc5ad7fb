"""Implicit differentiation as autograd functions: first and second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solvers.adjoints.capture import Aliases, Tracked, track
from solvers.core.failures import report
from solvers.core.problem import Problem
from solvers.core.solution import AdjointReport, Solution, Status
from solvers.core.tolerance import Tolerance
from solvers.krylov.solve import CG, GMRES, MINRES, LinearSolver, solve_linear


@dataclass
class AdjointSystem:
    """How to solve ``(I - J^T) u = g`` and where to say how it went."""

    solver: LinearSolver | None
    tolerance: Tolerance
    max_steps: int
    on_failure: str
    report: AdjointReport
    rows: Tensor | None = None  # samples that take part, where not all do
    batch: int = 0

    def solve(self, product: Callable[[Tensor], Tensor], right: Tensor, symmetric: bool) -> Tensor:
        """Solve ``u - product(u) = right`` for vectors (B, D)."""

        def matvec(u: Tensor) -> Tensor:
            return u - product(u)

        def run(solver: LinearSolver, b: Tensor, steps: int, x0: Tensor | None = None) -> Solution:
            return solve_linear(
                matvec,
                b,
                solver=solver,
                tolerance=self.tolerance,
                max_steps=steps,
                x0=x0,
                compact=False,
                on_failure="ignore",
            )

        if self.solver is not None or not symmetric:
            solution = run(self.solver or GMRES(), right, self.max_steps)
        else:
            solution = run(CG(), right, self.max_steps)
            saddles = solution.status == Status.INDEFINITE
            if bool(saddles.any()):
                # A right-hand side of zero keeps the solved samples out of the second run.
                left = self.max_steps - int(solution.evaluations[saddles].max())
                if left > 0:
                    zero = right.new_zeros(())
                    b = torch.where(saddles[:, None], right, zero)
                    x0 = torch.where(saddles[:, None], solution.value, zero)
                    solution = _combine(solution, run(MINRES(), b, left, x0))
        whole = solution
        if self.rows is not None:
            whole = _spread(solution, self.rows, self.batch)
        self.report.solution = whole
        self.report.solves += 1
        # Samples without a finite evaluation were reported by the forward solve already.
        report(solution, self.on_failure, "adjoint solve")
        return solution.value


def _combine(first: Solution, second: Solution) -> Solution:
    """``second`` where ``first`` met non-positive curvature; costs add up there."""
    again = first.status == Status.INDEFINITE
    cost = torch.where(again, second.evaluations, 0)
    pick = torch.where
    return Solution(
        value=pick(again[:, None], second.value, first.value),
        status=pick(again, second.status, first.status),
        residual=pick(again, second.residual, first.residual),
        residual_norm=pick(again, second.residual_norm, first.residual_norm),
        steps=first.steps + pick(again, second.steps, 0),
        evaluations=first.evaluations + cost,
    )


def _spread(part: Solution, rows: Tensor, batch: int) -> Solution:
    """A solution of some rows as one of the whole batch; the others are NONFINITE, at no cost."""

    def whole(values: Tensor, empty: float) -> Tensor:
        return values.new_full((batch, *values.shape[1:]), empty).index_copy(0, rows, values)

    return Solution(
        value=whole(part.value, 0.0),
        status=whole(part.status, int(Status.NONFINITE)),
        residual=whole(part.residual, torch.inf),
        residual_norm=whole(part.residual_norm, torch.inf),
        steps=whole(part.steps, 0),
        evaluations=whole(part.evaluations, 0),
    )


@dataclass
class _Record:
    """What the backward passes of one solve share."""

    problem: Problem
    tracked: Tracked
    aliases: Aliases
    system: AdjointSystem


def implicit_value(problem: Problem, solution: Solution, system: AdjointSystem) -> Tensor:
    """The solution's value (B, D) with the implicit gradient attached.

    Samples without any finite evaluation have no derivative: they are left out of the recording, so
    that their NaN does not reach the gradients of the others.
    """
    z = solution.value
    rows = evaluable_rows(solution, problem)
    if rows is None:
        return _attach(problem, z, system)
    if rows.numel() == 0:
        return z
    system.rows, system.batch = rows, z.shape[0]
    part = _attach(problem.rows(rows, z.shape[0]), z.index_select(0, rows), system)
    return z.index_copy(0, rows, part)


def evaluable_rows(solution: Solution, problem: Problem) -> Tensor | None:
    """Samples with a finite evaluation, or None where that is all of them.

    None also where ``compact=False`` forbids to leave any out: NaN of a sample may then reach the
    gradients of weights that the samples share.
    """
    finite = torch.isfinite(solution.residual)
    whole = not problem.compact or bool(finite.all())
    return None if whole else torch.nonzero(finite).flatten()


def _attach(problem: Problem, z: Tensor, system: AdjointSystem) -> Tensor:
    aliases = Aliases()
    tracked = track(problem, z, aliases, discover=True)
    if not tracked.inputs:
        return z
    record = _Record(problem, tracked, aliases, system)
    return _ImplicitValue.apply(record, z, *tracked.inputs)


class _ImplicitValue(torch.autograd.Function):
    """z -> z, whose backward is the implicit function theorem."""

    @staticmethod
    def forward(ctx: Any, record: _Record, z: Tensor, *inputs: Tensor) -> Tensor:
        ctx.record = record
        value = z.clone()
        ctx.save_for_backward(value, *inputs)
        return value

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (cotangent,) = cotangents
        record: _Record = ctx.record
        value, *inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            gradients = _ImplicitGradient.apply(record, cotangent, value, *inputs)
        else:
            gradients = _first_derivative(record, cotangent)[1]
        return (None, None, *gradients)


def _first_derivative(record: _Record, cotangent: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """``u = (I - J^T)^-1 cotangent`` and ``(df/dinput)^T u``."""
    tracked = record.tracked
    u = record.system.solve(tracked.pullback, cotangent, record.problem.symmetric)
    return u, tracked.input_gradients(u)


class _ImplicitGradient(torch.autograd.Function):
    """(cotangent, z, inputs) -> gradients of the inputs, itself differentiable once.

    With ``u = A^-T g``, ``A = I - J`` and outputs ``G = f_theta^T u``, cotangents c give
    ``r = f_theta c``, ``w = A^-1 r``, and then ``dL/dg = w`` and
    ``dL/d(z, theta) = d/d(z, theta) [ u^T Df(z, theta) (w, c) ]`` with u, w, c held fixed.
    """

    @staticmethod
    def forward(
        ctx: Any, record: _Record, cotangent: Tensor, value: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        u, gradients = _first_derivative(record, cotangent)
        ctx.record = record
        ctx.save_for_backward(u, value, *inputs)
        pairs = zip(gradients, inputs, strict=True)
        return tuple(torch.zeros_like(t) if g is None else g for g, t in pairs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        record: _Record = ctx.record
        u, value, *inputs = ctx.saved_tensors
        with torch.no_grad():
            results = _second_derivative(record, u, value, cotangents)
        if torch.is_grad_enabled():
            upstream = [*cotangents, u, value, *inputs]
            results = [None if t is None else _NoThird.apply(t, *upstream) for t in results]
        return (None, *results)


def _second_derivative(
    record: _Record, u: Tensor, value: Tensor, cotangents: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Gradients with respect to (cotangent, value, inputs); see :class:`_ImplicitGradient`."""
    tracked = track(record.problem, value, record.aliases, discover=False)
    symmetric = record.problem.symmetric
    with torch.enable_grad():
        weight = u.detach().requires_grad_()
        variables = [tracked.point, *tracked.aliases]
        pullbacks = _gradients(tracked.output, variables, weight, create_graph=True)
        direction = _inner(pullbacks[1:], cotangents)
    right = None if direction is None else _gradients(direction, [weight], None)[0]
    right = torch.zeros_like(u) if right is None else right
    product = _pushforward(tracked, pullbacks[0], weight, symmetric)
    w = record.system.solve(product, right, symmetric)
    with torch.enable_grad():
        total = _inner(pullbacks, (w, *cotangents))
    if total is None:
        return [w, *[None] * len(variables)]
    return [w, *_gradients(total, variables, None)]


class _NoThird(torch.autograd.Function):
    """Identity on a second derivative that refuses to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *upstream: Tensor) -> Tensor:
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        raise RuntimeError(
            "third derivatives of an implicit fixed point are not implemented; "
            "use adjoint=Unrolled() for them"
        )


def _pushforward(
    tracked: Tracked, pullback: Tensor | None, weight: Tensor, symmetric: bool
) -> Callable[[Tensor], Tensor]:
    """v -> J v, from the pullback ``J^T weight`` recorded as a function of ``weight``."""
    if symmetric:
        return tracked.pullback
    if pullback is None or not pullback.requires_grad:
        return torch.zeros_like

    def product(v: Tensor) -> Tensor:
        (result,) = _gradients(pullback, [weight], v)
        return torch.zeros_like(v) if result is None else result

    return product


def _gradients(
    output: Tensor, variables: list[Tensor], cotangent: Tensor | None, create_graph: bool = False
) -> list[Tensor | None]:
    return list(
        torch.autograd.grad(
            output,
            variables,
            cotangent,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
    )


def _inner(first: list[Tensor | None], second: tuple[Tensor, ...]) -> Tensor | None:
    """Sum of inner products of matching tensors that both exist and depend on something."""
    terms = [
        (a * b).sum()
        for a, b in zip(first, second, strict=True)
        if a is not None and b is not None and a.requires_grad
    ]
    return sum(terms[1:], terms[0]) if terms else None
