"""Adjoints of a fixed point: implicit, unrolled, phantom and one-step gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from solvers.adjoints.checkpoints import Checkpoints
from solvers.adjoints.implicit import (
    AdjointSolve,
    Derivative,
    Linearization,
    zero_derivative,
)
from solvers.core.checks import (
    require_count,
    require_flag,
    require_instance,
    require_kind,
    require_number,
)
from solvers.core.context import constant_weights
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


class Adjoint(ABC):
    """How gradients flow through a fixed point; subclasses are frozen dataclasses of options."""

    @abstractmethod
    def solve(self, problem: Problem, start: Tensor, run: Run) -> Solution:
        """Solve from ``start`` (B, D) with ``run`` and attach the gradient to the value and ``states``."""


@dataclass(frozen=True)
class Implicit(Adjoint):
    r"""Implicit differentiation: exact at a fixed point, with the memory of one evaluation.

    With ``J = df/dz`` at the solution and the loss gradient ``g``, solve ``(I - J^T) u = g``; the gradient of
    any input is ``(df/dinput)^T u``. Second derivatives apply the same rule to this system; third derivatives
    raise. DIVERGED and NONFINITE samples contribute zero gradient. If the loss gradient of a sample is not
    finite, or ``u`` overflows, its gradient is NaN.

    Tensors that ``f`` reads from a closure receive gradients, too. If a custom ``autograd.Function`` in ``f``
    reads such a tensor, and it was computed before the solve, pass it in ``args`` for second derivatives.

    Args:
        solver: linear solver, its class or its name (``"gmres"``). None: Anderson acceleration of
            ``u = g + J^T u`` with memory 20; samples unsolved after ``max(50, max_steps / 2)`` products
            continue with MINRES if J is symmetric and with GMRES otherwise.
        tolerance: tolerance of the linear solve relative to ``|g|``; None uses the forward
            solve's ``rtol``, or 1e-6 if that is 0.
        max_steps: maximum number of products with ``J^T`` per sample. If samples influence each other, they
            are solved again as one system with the same maximum.
        on_failure: "warn", "raise" or "ignore" adjoint systems that did not converge.
        states: adjoint of the intermediate states of ``states_at``, where the fixed-point equation does
            not hold: ``Phantom(...)``, or None for ``OneStep()``.

    ``solution.adjoint.solution`` reports the latest backward pass.

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

    def solve(self, problem: Problem, start: Tensor, run: Run) -> Solution:
        start, goal = start.detach(), problem.goal
        assert goal is not None
        with torch.no_grad():
            solution = run(problem, start, verify=False)
        gone = None if solution.all_converged() else lost(solution)

        def attach(part: Problem, z: Tensor) -> Tensor:
            record = Linearization.at(part, z)
            with torch.no_grad():
                point = part.point(z, record.output.detach())
                among = None if gone is None else ~gone
                judge_again(solution, point, goal.tolerance, goal.precision, among)
            own = self.adjoint_solve(solution.adjoint, goal.tolerance, part.f)
            through = record.output if record.computed else None
            return Derivative(own, lambda z, sources: record).attach(z, record.sources, through)

        near = self.states or OneStep()
        for state in solution.states or ():
            state.value = keep_out(problem, state.value, start, gone, near.attach)
        solution.value = keep_out(problem, solution.value, start, gone, attach)
        return solution

    def adjoint_solve(self, report: AdjointReport, tolerance: Tolerance, f: object) -> AdjointSolve:
        """Return how to solve the adjoint system of a solve of ``f`` to ``tolerance``."""
        solver: Any = self.solver  # an instance or None, since __post_init__
        own = self.own_tolerance(tolerance)
        return AdjointSolve(solver, own, self.max_steps, self.on_failure, report, f)

    def own_tolerance(self, forward: Tolerance) -> Tolerance:
        """Return the tolerance of the linear solve after a solve to the tolerance ``forward``."""
        given: Any = self.tolerance  # a Tolerance or None, since __post_init__
        return given or Tolerance(rtol=forward.rtol or 1e-6)


@dataclass(frozen=True)
class Unrolled(Adjoint):
    """Differentiate through every iteration of the solver, to any order and with respect to ``z0``, too.

    Memory grows with the number of evaluations. Samples whose first evaluation is not finite contribute
    zero gradient. A sample that diverges has the gradient of its steps; if its iterates overflow, it may
    bring NaN into the gradients of weights that all samples share. The other adjoints avoid this unless
    ``compact=False``.

    Args:
        checkpoint: store only the states and recompute ``f`` in the backward pass, which raises
            RuntimeError if a tensor that ``f`` reads was modified or replaced in between.
    """

    checkpoint: bool = False

    def __post_init__(self) -> None:
        require_flag("checkpoint", self.checkpoint)

    def solve(self, problem: Problem, start: Tensor, run: Run) -> Solution:
        recorder = Checkpoints(problem.args, problem.modules) if self.checkpoint else None
        solution = run(replace(problem, recorder=recorder), start)
        gone = ~torch.isfinite(solution.residual)  # the loop has kept them out of the graph
        for each in (*(solution.states or ()), solution):
            if bool(gone.all()) or not each.value.requires_grad:  # or the start: no step was taken
                each.value = zero_derivative(problem, each.value.detach(), start)
            elif bool(gone.any()):
                each.value = without_derivative(each.value, gone)
        return solution


class Iterated(Adjoint):
    """The gradient of ``steps`` damped iterations from the detached solution."""

    steps: int
    damping: float

    def solve(self, problem: Problem, start: Tensor, run: Run) -> Solution:
        start = start.detach()
        with torch.no_grad():
            solution = run(problem, start)
        gone = None if solution.all_converged() else lost(solution)
        for each in (*(solution.states or ()), solution):
            each.value = keep_out(problem, each.value, start, gone, self.attach)
        return solution

    def attach(self, problem: Problem, anchor: Tensor) -> Tensor:
        """Return ``anchor`` (B, D) with the gradient of the iterations that start there."""
        z = anchor
        with constant_weights(problem.modules, problem.weights, repeated=True):
            for _ in range(self.steps):
                z = torch.lerp(z, problem.masked_map(z), self.damping)
        return _WithDerivative.apply(anchor, z) if z.requires_grad else anchor


class _WithDerivative(torch.autograd.Function):
    """Return the value of ``anchor`` with the derivative of ``z``, which need not be finite."""

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
class Phantom(Iterated):
    """Approximate the gradient by that of ``steps`` damped iterations from the detached solution.

    The value remains the solution. DIVERGED and NONFINITE samples contribute zero gradient.

    Args:
        steps: number of iterations, >= 1.
        damping: damping factor of each iteration, in (0, 2].

    Source: Geng et al., "On Training Implicit Models" (2021), eq. 9 (unrolling-based phantom gradient),
    https://arxiv.org/abs/2111.05177.
    """

    steps: int = 5
    damping: float = 1.0

    def __post_init__(self) -> None:
        require_count("steps", self.steps)
        require_number("damping", self.damping, low=0.0, high=2.0, closed=False)


@dataclass(frozen=True)
class OneStep(Iterated):
    """Approximate the gradient by that of one evaluation, ``u = g`` (Jacobian-free backpropagation).

    Source: Fung et al., "JFB: Jacobian-Free Backpropagation for Implicit Networks" (2022),
    https://arxiv.org/abs/2103.12803.
    """

    steps, damping = 1, 1.0


def read_adjoint(value: Any) -> Adjoint | None:
    """Return an :class:`Adjoint` from an instance, a class or a name; None stays None."""
    return require_kind(
        "adjoint", value, Adjoint, (Implicit, Unrolled, Phantom, OneStep), optional=True
    )


def keep_out(
    problem: Problem,
    value: Tensor,
    start: Tensor,
    gone: Tensor | None,
    attach: Callable[[Problem, Tensor], Tensor],
) -> Tensor:
    """Return ``value`` (B, D) with the gradient of ``attach(problem, value)``, zero for samples in ``gone``.

    Their NaN would reach the gradients of shared weights, so another sample stands in their places when
    ``attach`` evaluates ``f``. With ``compact=False`` each sample must keep its place, and only the
    cotangents of ``gone`` are zero.
    """
    if gone is None or not bool(gone.any()):
        return attach(problem, value)
    if bool(gone.all()):
        return zero_derivative(problem, value.detach(), start)
    anchor = value
    if problem.compact:
        places = torch.arange(len(value), device=value.device)
        places = places.where(~gone, places[~gone][0])
        problem, anchor = problem.rows(places, len(value)), value.index_select(0, places)
    return torch.where(gone[:, None], value.detach(), attach(problem, anchor))


def without_derivative(value: Tensor, left_out: Tensor) -> Tensor:
    """Return ``value`` (B, D), detached in the rows ``left_out`` (B,)."""
    return torch.where(left_out.unsqueeze(1), value.detach(), value)


def lost(solution: Solution) -> Tensor:
    """Return a mask (B,) of the samples that failed and have no derivative."""
    away = (solution.status == Status.DIVERGED) | (solution.status == Status.NONFINITE)
    return away | ~(solution.residual < torch.inf)
