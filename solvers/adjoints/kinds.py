"""The ways to differentiate a fixed point: implicit, unrolled, phantom gradient, one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from solvers.adjoints.checkpoints import Checkpoints
from solvers.adjoints.implicit import AdjointSolve, Linearization, implicit_value, zero_derivative
from solvers.core.checks import (
    require_count,
    require_flag,
    require_instance,
    require_kind,
    require_number,
)
from solvers.core.loop import keeps_failures_out
from solvers.core.problem import Problem
from solvers.core.solution import (
    AdjointReport,
    Solution,
    Status,
    Tolerance,
    check_on_failure,
    read_tolerance,
)
from solvers.core.validate import judge_again
from solvers.krylov import LINEAR, LinearSolver

Run = Callable[..., Solution]  # (problem, start (B, D), *, verify) solves a problem
FALLBACK_RTOL = 1e-6  # of the adjoint where the forward tolerance is absolute


class Adjoint(ABC):
    """How gradients flow through a fixed point; subclasses are frozen dataclasses of options."""

    @abstractmethod
    def solve(self, problem: Problem, start: Tensor, run: Run, tolerance: Tolerance) -> Solution:
        """Solve from ``start`` (B, D) by ``run``; the returned value (B, D) carries the gradient.

        So do its ``states``.
        """


@dataclass(frozen=True)
class Implicit(Adjoint):
    r"""Implicit differentiation: exact at a fixed point, with the memory of one evaluation.

    With ``J = df/dz`` at the solution and the loss gradient ``g``, solve ``(I - J^T) u = g``; the gradient of
    any input is ``(df/dinput)^T u``. The second derivative applies the same rule to this system; a third one
    raises. Samples that are DIVERGED or NONFINITE have a gradient of zero. A sample whose loss gradient is
    not finite, or whose ``u`` leaves the dtype, has a gradient of NaN, as elsewhere in torch.

    A tensor that ``f`` reads from a closure receives its gradient, too. If it was computed before the solve,
    such as an embedding, pass it in ``args`` for second derivatives.

    Args:
        solver: a linear solver, its class or its name (``"gmres"``). None: Anderson's method on ``u = g + J^T
            u`` with a memory of 20, and after 50 products, or half of ``max_steps`` where that is more,
            MINRES (where J is symmetric) or GMRES for the samples that are left.
        tolerance: of the linear solve, relative to ``|g|``; None takes the forward
            solve's ``rtol``, or 1e-6 where that is 0.
        max_steps: products with ``J^T`` per sample, an upper bound. Samples that turn out to influence each
            other are solved once more, as one system, with as many.
        on_failure: "warn", "raise" or "ignore" when adjoint systems are not solved.
        states: how gradients flow through the states of ``states_at``, at which the equation does not
            hold: ``Phantom(...)``, or None for ``OneStep()``.

    The outcome of the latest backward pass is in ``solution.adjoint.solution``.

    Example:
        >>> import torch, solvers
        >>> b = torch.ones(2, 3, requires_grad=True)
        >>> adjoint = solvers.Implicit(solver=solvers.GMRES(), max_steps=50)
        >>> solution = solvers.fixed_point(
        ...     lambda z, b: 0.5 * z + b, b.detach(), (b,), adjoint=adjoint
        ... )
        >>> solution.value.sum().backward()
        >>> b.grad[0]  # 1 / (1 - 0.5), within the tolerance
        tensor([2.0000, 2.0000, 2.0000])
        >>> solution.adjoint.solution.converged
        tensor([True, True])

    Source: Bai, Kolter and Koltun, "Deep Equilibrium Models" (2019), theorem 1,
    https://arxiv.org/abs/1909.01377.
    """

    solver: LinearSolver | type[LinearSolver] | str | None = None
    tolerance: Tolerance | float | None = None
    max_steps: int = 100
    on_failure: str = "warn"
    states: Phantom | OneStep | None = None

    def __post_init__(self) -> None:
        solver = require_kind("solver", self.solver, LinearSolver, LINEAR, optional=True)
        object.__setattr__(self, "solver", solver)
        object.__setattr__(self, "tolerance", read_tolerance("tolerance", self.tolerance))
        require_count("max_steps", self.max_steps)
        check_on_failure(self.on_failure)
        kinds = "solvers.Phantom(...) or solvers.OneStep()"
        require_instance("states", self.states, (Phantom, OneStep), kinds, optional=True)

    def solve(self, problem: Problem, start: Tensor, run: Run, tolerance: Tolerance) -> Solution:
        with torch.no_grad():
            solution = run(problem, start.detach(), verify=False)

        def attach(part: Problem, z: Tensor, rows: Tensor | None) -> Tensor:
            # As the solve has found it to be, where it depends on what f does.
            goal = problem.goal
            solved = tolerance if goal is None else goal.tolerance
            record = Linearization.at(part, z)
            if goal is not None:
                with torch.no_grad():
                    point = part.exact(part.point(z, record.output.detach()))
                    judge_again(solution, point, solved, goal.precision, rows)
            solve = self.adjoint_solve(solution.adjoint, solved, start.shape[0], rows, part.f)
            return implicit_value(record, z, solve)

        gone, start = lost(solution), start.detach()
        _attach(self.states or OneStep(), problem, start, gone, solution.states or ())
        solution.value = differentiated(problem, solution.value, start, gone, attach)
        return solution

    def adjoint_solve(
        self,
        report: AdjointReport,
        tolerance: Tolerance,
        batch: int,
        rows: Tensor | None,
        f: object = None,
    ) -> AdjointSolve:
        """How to solve the adjoint of a solve to ``tolerance``; see :class:`AdjointSolve`."""
        own: Any = self.tolerance
        linear: Any = self.solver  # an instance or None, since __post_init__
        return AdjointSolve(
            solver=linear,
            tolerance=own or Tolerance(rtol=tolerance.rtol or FALLBACK_RTOL),
            max_steps=self.max_steps,
            on_failure=self.on_failure,
            report=report,
            batch=batch,
            rows=rows,
            f=f,
        )


@dataclass(frozen=True)
class Unrolled(Adjoint):
    """Differentiate through every iteration of the solver; gradients reach ``z0`` too.

    Memory grows with the number of evaluations. Derivatives of any order. Where a sample has no finite
    first evaluation, that evaluation is repeated without it. One that diverges has the gradient of the
    steps that it made. If its iterates overflow, it may bring NaN into the gradients of weights that all
    samples share; with the other adjoints it does not, unless ``compact=False``.

    Args:
        checkpoint: keep the states only, and evaluate ``f`` once more in the backward pass, which
            raises RuntimeError where a tensor that ``f`` reads has been changed or replaced meanwhile.
    """

    checkpoint: bool = False

    def __post_init__(self) -> None:
        require_flag("checkpoint", self.checkpoint)

    def solve(self, problem: Problem, start: Tensor, run: Run, tolerance: Tolerance) -> Solution:
        if self.checkpoint:
            problem = replace(problem, recorder=Checkpoints(problem.args))

        again: list[Solution] = []

        def attach(part: Problem, value: Tensor, rows: Tensor | None, state: int | None) -> Tensor:
            if rows is None or keeps_failures_out(value.device):
                return value
            # A second, recorded solve of the other samples keeps the NaN out of the graph.
            if not again:
                again.append(run(part, start.index_select(0, rows)))
            return again[0].value if state is None else again[0].states[state].value

        plain = replace(problem, recorder=None)
        solution = run(problem, start)
        left_out = ~torch.isfinite(solution.residual)  # without any finite evaluation
        for number, each in [*enumerate(solution.states or ()), (None, solution)]:
            own = partial(attach, state=number)
            each.value = differentiated(problem, each.value, start, left_out, own)
            if not each.value.requires_grad:  # the start: no step was taken
                each.value = zero_derivative(plain, each.value)
        return solution


@dataclass(frozen=True)
class Phantom(Adjoint):
    """Gradient of ``steps`` damped iterations from the detached solution: an approximation.

    The value stays the solution. Only its gradient is that of the iterations; it is zero for samples that
    are DIVERGED or NONFINITE.

    Args:
        steps: iterations, >= 1.
        damping: in (0, 2].

    Source: Geng et al., "On Training Implicit Models" (2021), eq. 9 (unrolling-based phantom gradient),
    https://arxiv.org/abs/2111.05177.
    """

    steps: int = 5
    damping: float = 1.0

    def __post_init__(self) -> None:
        require_count("steps", self.steps)
        require_number("damping", self.damping, low=0.0, high=2.0, closed=False)

    def solve(self, problem: Problem, start: Tensor, run: Run, tolerance: Tolerance) -> Solution:
        with torch.no_grad():
            solution = run(problem, start.detach())
        each = [*(solution.states or ()), solution]
        _attach(self, problem, start.detach(), lost(solution), each)
        return solution

    def attach(self, problem: Problem, anchor: Tensor) -> Tensor:
        """``anchor`` (B, D) with the gradient of the iterations from it."""
        z = anchor
        for _ in range(self.steps):
            z = torch.lerp(z, problem.masked_map(z), self.damping)
        return _WithDerivative.apply(anchor, z) if z.requires_grad else anchor


def _attach(
    adjoint: Phantom | OneStep, problem: Problem, start: Tensor, gone: Tensor, each: Sequence[Any]
) -> None:
    """Let ``adjoint`` give the ``value`` of a solution, or of its states, its gradient."""

    def attach(part: Problem, anchor: Tensor, rows: Tensor | None) -> Tensor:
        return adjoint.attach(part, anchor)

    for one in each:
        one.value = differentiated(problem, one.value, start, gone, attach)


class _WithDerivative(torch.autograd.Function):
    """The value of ``anchor`` with the derivative of ``z``; also where z is not finite."""

    generate_vmap_rule = True

    @staticmethod
    def forward(anchor: Tensor, z: Tensor) -> Tensor:
        return anchor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Nothing to remember."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return None, cotangents[0]


@dataclass(frozen=True)
class OneStep(Adjoint):
    """Gradient of one evaluation at the solution, ``u = g`` (Jacobian-free backpropagation).

    Source: Fung et al., "JFB: Jacobian-Free Backpropagation for Implicit Networks" (2022),
    https://arxiv.org/abs/2103.12803.
    """

    def solve(self, problem: Problem, start: Tensor, run: Run, tolerance: Tolerance) -> Solution:
        return Phantom(steps=1).solve(problem, start, run, tolerance)

    def attach(self, problem: Problem, anchor: Tensor) -> Tensor:
        """``anchor`` (B, D) with the gradient of one evaluation."""
        return Phantom(steps=1).attach(problem, anchor)


def read_adjoint(value: Any) -> Adjoint | None:
    """An :class:`Adjoint` with its defaults where its class or name is given; None stays None."""
    return require_kind(
        "adjoint", value, Adjoint, (Implicit, Unrolled, Phantom, OneStep), optional=True
    )


Attach = Callable[[Problem, Tensor, Tensor | None], Tensor]


def differentiated(
    problem: Problem, value: Tensor, start: Tensor, left_out: Tensor, attach: Attach
) -> Tensor:
    """``value`` (B, D) of a solution with the gradient that ``attach(problem, value, rows)`` gives it.

    A sample that is ``left_out`` has no derivative: zero is what its gradient is set to, and its NaN
    would reach the gradients of the others through weights that they share. So ``attach`` sees only the
    other samples: ``rows`` (n,), or None where that is all of them or ``compact=False`` forbids to
    leave any out; then their cotangents are zero.
    """
    if not bool(left_out.any()):
        return attach(problem, value, None)
    if bool(left_out.all()):
        return zero_derivative(problem, value.detach(), start)
    if not problem.compact:
        return without_derivative(attach(problem, value, None), left_out)
    rows = torch.nonzero(~left_out).flatten()
    part = problem.rows(rows, len(value))
    found = attach(part, value.index_select(0, rows), rows)
    return value.detach().index_copy(0, rows, found)


def without_derivative(value: Tensor, left_out: Tensor) -> Tensor:
    """``value`` (B, D), constant in the rows ``left_out`` (B,)."""
    return torch.where(left_out.unsqueeze(1), value.detach(), value)


def lost(solution: Solution) -> Tensor:
    """Samples (B,) that are nowhere near a fixed point: there is nothing to differentiate."""
    away = (solution.status == Status.DIVERGED) | (solution.status == Status.NONFINITE)
    return away | ~torch.isfinite(solution.residual)
