"""How gradients flow through a fixed point: implicitly, unrolled, or by a few iterations.

With ``z = f(z, theta)``, ``J = df/dz`` and an incoming gradient g, the gradient of theta is
``(df/dtheta)^T u`` where ``u = g + J^T u``. The solution u is a fixed point as well, and the same loop finds
it: :meth:`Linearization.solve`. The evaluation ``image = f(z, theta)`` is recorded in the caller's own graph.
The backward pass gives ``u`` to ``image``, and torch carries it to whatever f reads. The backward pass can
itself be differentiated, because u has the derivative of a fixed point: :meth:`Linearization.differentiable`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch  # type: ignore[attr-defined]
from torch.func import functional_call
from torch.utils import _pytree as pytree

from solvers.core.checks import require_count, require_kind, require_number
from solvers.core.context import weights_of, within
from solvers.core.layout import Layout
from solvers.core.loop import Options
from solvers.core.modes import (
    compiles_backward,
    eager,
    twice_differentiable,
    uncompiled,
    without_autocast,
)
from solvers.core.problem import JacobianProduct, Problem, RootUpdate, minus_identity, pullback
from solvers.core.rows import Evaluation, merge_rows, scaled_norm, small_dtype
from solvers.core.solution import AdjointReport, Solution, Status, apply_policy, check_on_failure
from solvers.core.tolerance import Goal, Tolerance, read_tolerance
from solvers.krylov import GMRES, LINEAR, MINRES, LinearSolver
from solvers.linear import solve_linear
from solvers.methods.anderson import Anderson
from solvers.methods.dispatch import run_solver

_ANDERSON = Anderson(memory=20)
# Least number of products after which GMRES continues with the samples that Anderson has not solved.
FIRST_TRY = 50
# Receives an evaluation at the returned value, and (B,) bool samples that it is about (None: all).
Check = Callable[[Evaluation, Tensor | None], None]


class Adjoint(ABC):
    """How gradients flow through a fixed point; subclasses are frozen dataclasses of options."""

    @abstractmethod
    def attach(
        self, problem: Problem, start: Tensor, solution: Solution, goal: Goal, check: Check | None
    ) -> Tensor:
        """Return the value (B, D) of ``solution`` with its gradient.

        ``check`` receives the evaluation at the value that is made on the way.
        """


class _AtSolution(Adjoint):
    """An adjoint that needs evaluations near the solution only."""

    def attach(
        self, problem: Problem, start: Tensor, solution: Solution, goal: Goal, check: Check | None
    ) -> Tensor:
        value, kept = solution.value, None
        if not solution.all_converged():
            failed = failures(solution)
            if bool(failed.all()):
                return zero_gradient(value, problem.masked_map(value), start)
            kept = ~failed if bool(failed.any()) else None
        z = value
        if kept is not None and problem.compact:
            # NaN of a failed sample would reach the gradients of shared weights, so another takes its place.
            places = torch.arange(len(value), device=value.device)
            places = places.where(kept, places[kept][0])
            problem, z = problem.rows(places, len(value)), value.index_select(0, places)
        point = _point(z, problem.tensors)
        # What a compiler makes of f has no repeated products with the Jacobian.
        with uncompiled() if isinstance(self, Implicit) else nullcontext():
            image, output, gradient = problem.masked_joint(point, problem.unit_free)
        if check is not None:
            gradient = None if gradient is None else gradient.detach()
            check(problem.point(z, image.detach(), None, gradient), kept)
        if not _differentiable(problem, image, point):
            return value
        output = output if isinstance(self, Implicit) else image
        attached = self.attach_at(problem, point, output, solution, goal, kept)
        return attached if kept is None else torch.where(kept[:, None], attached, value)

    @abstractmethod
    def attach_at(
        self, problem: Problem, point: Tensor, image: Tensor, solution: Solution, goal: Goal,
        kept: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return ``point`` with its gradient, where ``image = f(point)`` is recorded.

        For :class:`Implicit` it is :meth:`solvers.core.problem.Problem.differentiated`. Samples that are not
        ``kept`` (B,) bool have no gradient.
        """


@dataclass(frozen=True)
class Implicit(_AtSolution):
    r"""Implicit differentiation: exact at a fixed point, with the memory of one evaluation.

    With ``J = df/dz`` at the solution and the loss gradient ``g``, solve ``(I - J^T) u = g``; the gradient of
    any input is ``(df/dinput)^T u``. DIVERGED and NONFINITE samples contribute zero gradient. If the loss
    gradient of a sample is not finite, or ``u`` is not, its gradient is NaN.

    First derivatives reach every tensor that ``f`` reads. Higher derivatives apply the same rule to the
    backward pass. They are available for tensors in ``args`` and for the parameters of a module that is
    ``f``; if ``f`` captures another tensor that requires grad, they raise RuntimeError.

    Args:
        solver: linear solver, its class or its name (``"gmres"``), such as ``CG(preconditioner=M)``, where M
            approximates the inverse of ``I - J^T``. None: Anderson acceleration of ``u = g + J^T u`` with
            memory 20. If J is symmetric, samples unsolved after 20 products continue with MINRES; otherwise
            those unsolved after ``max(50, max_steps / 2)`` continue with GMRES.
        tolerance: tolerance of the linear solve relative to ``|g|``; None uses the forward
            solve's ``rtol``, or 1e-6 if that is 0.
        max_steps: maximum number of products with ``J^T`` per sample.
        on_failure: "warn", "raise" or "ignore" adjoint systems that did not converge although their loss
            gradient is finite.

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

    def __post_init__(self) -> None:
        solver = require_kind("solver", self.solver, LinearSolver, LINEAR, optional=True)
        object.__setattr__(self, "solver", solver)
        object.__setattr__(self, "tolerance", read_tolerance("tolerance", self.tolerance))
        require_count("max_steps", self.max_steps)
        check_on_failure(self.on_failure)

    def attach_at(
        self, problem: Problem, point: Tensor, image: Tensor, solution: Solution, goal: Goal,
        kept: Tensor | None,
    ) -> Tensor:  # fmt: skip
        tolerance = self.own_tolerance(goal.tolerance)
        solver: Any = self.solver  # an instance or None, since __post_init__
        own = self
        if solver is not None and solver.preconditioner is not None:
            vectors = replace(solver, preconditioner=solver.on_vectors(problem.layout))
            own = replace(self, solver=vectors)
        report, f = solution.adjoint, problem.f
        linear = Linearization(own, problem, point, image, tolerance, report, kept, origin=f)
        return linear.attach()

    def own_tolerance(self, forward: Tolerance) -> Tolerance:
        """Return the tolerance of the linear solve after a solve to the tolerance ``forward``."""
        chosen: Any = self.tolerance  # a Tolerance or None, since __post_init__
        if chosen is not None:
            return chosen
        if forward.rtol and not forward.atol:
            return forward
        return Tolerance(forward.rtol or 1e-6, patience=forward.patience)


class Iterated(_AtSolution):
    """The gradient of ``steps`` damped iterations from the detached solution."""

    steps: int
    damping: float

    def attach_at(
        self, problem: Problem, point: Tensor, image: Tensor, solution: Solution, goal: Goal,
        kept: Tensor | None,
    ) -> Tensor:  # fmt: skip
        anchor = point.detach()
        z = torch.lerp(anchor, image, self.damping)
        for _ in range(self.steps - 1):
            z = torch.lerp(z, problem.masked_map(z), self.damping)
        return _WithGradientOf.apply(anchor, z)  # type: ignore[no-any-return]


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


@dataclass(frozen=True)
class Unrolled(Adjoint):
    """Differentiate through every iteration of the solver, to any order and with respect to ``z0``, too.

    Memory grows with the number of evaluations; ``torch.utils.checkpoint`` inside ``f`` reduces it. Samples
    whose first evaluation is not finite contribute zero gradient. A sample that diverges has the gradient of
    its steps; if its iterates overflow, it may bring NaN into the gradients of weights that all samples
    share. The other adjoints avoid this unless ``compact=False``.
    """

    def attach(
        self, problem: Problem, start: Tensor, solution: Solution, goal: Goal, check: Check | None
    ) -> Tensor:
        value = solution.value
        if check is not None:
            with torch.no_grad():
                check(problem.evaluate(value.detach()), None)
        failed = ~torch.isfinite(solution.residual)  # the loop has kept them out of the graph
        if bool(failed.all()) or not value.requires_grad:  # or no step was taken from the start
            return zero_gradient(value.detach(), problem.masked_map(value.detach()), start)
        return torch.where(failed[:, None], value.detach(), value) if bool(failed.any()) else value


def read_adjoint(value: Any) -> Adjoint | None:
    """Return an :class:`Adjoint` from an instance, a class or a name; None stays None."""
    kinds = (Implicit, Unrolled, Phantom, OneStep)
    return require_kind("adjoint", value, Adjoint, kinds, optional=True)


def failures(solution: Solution) -> Tensor:
    """Return a mask (B,) of the samples that have no gradient because they have no solution."""
    away = (solution.status == Status.DIVERGED) | (solution.status == Status.NONFINITE)
    return away | ~(solution.residual < torch.inf)


@dataclass(eq=False)
class Linearization:
    """One evaluation, recorded in the caller's graph, and the adjoint solves with it.

    ``image`` is what :meth:`solvers.core.problem.Problem.differentiated` returns at ``point``.
    """

    adjoint: Implicit
    problem: Problem
    point: Tensor
    image: Tensor
    tolerance: Tolerance
    report: AdjointReport
    kept: Tensor | None = None  # (B,) bool, samples that have a gradient; None: all
    origin: object = None  # the user's f, for messages
    leaves: list[Any] = field(default_factory=list)  # of problem.args
    spec: Any = None  # the structure of problem.args
    names: list[str] = field(default_factory=list)  # of the parameters of f, if it is a module
    compiled: bool = False  # the graph of ``image`` is not there when the backward pass runs

    def attach(self) -> Tensor:
        """Return the point with its gradient."""
        if compiles_backward():  # which takes no None for the gradient of a source
            self.compiled = True
            return _Attached.apply(self, self.point.detach(), self.image)[0]
        self.leaves, self.spec = pytree.tree_flatten(self.problem.args)
        sources = list(filter(torch.is_tensor, self.leaves))
        module = module_of(self.problem.f)
        for name, parameter in () if module is None else module.named_parameters():
            if parameter.requires_grad:
                self.names.append(name)
                sources.append(parameter)
        return _Attached.apply(self, self.point.detach(), self.image, *sources)[0]

    @eager
    def solve(self, g: Tensor, image: Tensor | None = None, point: Tensor | None = None) -> Tensor:
        """Return u (B, D) with ``u = g + J^T u``; NaN for samples without a finite solution."""
        if _functorch.is_batchedtensor(g) or _functorch.is_legacy_batchedtensor(g):
            raise RuntimeError(
                "a backward pass through a fixed point does not support vmap (is_grads_batched, "
                "vectorize=True): compute one backward pass per row, or differentiate layer.unrolled(k)"
            )
        if image is None or point is None:
            image, point = self.image, self.point
            if self.compiled:
                with torch.enable_grad():
                    point = point.detach().requires_grad_()
                    image = self.problem.differentiated(point)
        g = g if self.kept is None else g.masked_fill(~self.kept[:, None], 0.0)
        wide = small_dtype(g.dtype)
        size = scaled_norm(g).to(wide)
        finite = size < torch.inf
        right, size = g.to(wide).where(finite[:, None], 0.0), size.where(finite, 0.0)
        with torch.no_grad(), without_autocast(g.device.type):
            scale, allowed = scaled_tolerance(self.tolerance, size)
            unit = right / scale[:, None]
            solution = self._solve_scaled(pullback(image, point), unit, g.dtype, allowed)
        solution.value = u = (solution.value * scale[:, None]).to(g.dtype)
        norm = solution.residual_norm * scale
        fits = torch.linalg.vector_norm(u, torch.inf, dim=1) < torch.inf
        lost = ~(finite & fits & (solution.status != Status.NONFINITE))
        solution.value = u = u.masked_fill(lost[:, None], torch.nan)
        solution.status = solution.status.masked_fill(lost, int(Status.NONFINITE))
        solution.residual_norm = norm.masked_fill(lost, torch.inf)
        residual = norm / size.masked_fill(size == 0, 1.0)
        solution.residual = residual.masked_fill(lost, torch.inf)
        self.report.solution, self.report.solves = solution, self.report.solves + 1
        # A gradient that arrives with NaN or infinity shows itself, as everywhere in torch.
        known = solution.status.masked_fill(~finite, int(Status.CONVERGED))
        others = replace(solution, status=known)
        apply_policy(others, self.adjoint.on_failure, "adjoint solve", self.origin)
        return u

    def _solve_scaled(
        self, product: JacobianProduct, unit: Tensor, dtype: torch.dtype, allowed: Tolerance
    ) -> Solution:
        """Solve ``u = unit + product(u)`` for the scaled right-hand sides ``unit`` (B, D)."""
        most, chosen = self.adjoint.max_steps, self.adjoint.solver
        free = self.problem.unit_free
        operator = minus_identity(product, free, dtype)

        def image(u: Tensor) -> Tensor:
            return unit + (u - operator(u) if free else product(u.to(dtype)).to(u.dtype))

        given: Any = {"tolerance": allowed, "compact": False, "on_failure": "ignore"}
        by_krylov = partial(solve_linear, operator, **given)
        if chosen is not None:
            return by_krylov(unit, solver=chosen, max_steps=most)
        problem = Problem(image, Layout.of(unit), compact=False)
        first = problem.point(torch.zeros_like(unit), unit)  # needs no product
        # MINRES needs the fewest products that are possible; Anderson's are as few up to its memory.
        symmetric = self.problem.symmetric
        tries = min(most, _ANDERSON.memory if symmetric else max(FIRST_TRY, most // 2))
        found, _ = run_solver(problem, first, _ANDERSON, Options(allowed, tries + 1))
        found.evaluations, found.steps = found.evaluations - 1, found.steps - 1
        unsolved = not found.all_converged()
        left = most - int(found.evaluations.max()) if unsolved else 0
        if left < 2:
            return found
        # A right-hand side of zero keeps the solved samples out of the second attempt.
        open_rows = ~found.converged
        b, x0 = (t.where(open_rows[:, None], 0.0) for t in (unit, found.value))
        method = MINRES() if symmetric else GMRES()
        second = by_krylov(b, solver=method, max_steps=left, x0=x0)
        # Also where only the estimated error was too large: of a linear system the residual decides.
        better = open_rows & (second.converged | (second.residual_norm < found.residual_norm))
        steps = found.steps + second.steps * open_rows
        spent = found.evaluations + second.evaluations * open_rows
        return replace(merge_rows(better, second, found), steps=steps, evaluations=spent)

    def evaluate(self, z: Tensor, sources: Sequence[Tensor]) -> Tensor:
        """Return the image at z (B, D), where f reads ``sources`` as its arguments and parameters."""
        given = iter(sources)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        problem = replace(self.problem, args=pytree.tree_unflatten(leaves, self.spec))
        module = module_of(self.problem.f)
        if module is not None and self.names:
            weights = {f"module.{n}": t for n, t in zip(self.names, given, strict=True)}
            f: Any = problem.f
            caller = Caller(f.joint if problem.unit_free else f, module)
            call = lambda *args: functional_call(caller, weights, args)  # noqa: E731
            if problem.unit_free:
                f = copy(f)
                object.__setattr__(f, "joint", call)  # also of a frozen dataclass
                problem.constant_step()
            problem.f = f if problem.unit_free else call
        return problem.differentiated(z)

    def differentiable(
        self, g: Tensor, z: Tensor, sources: list[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of the ``needed`` sources with a graph.

        Each derivative is taken with the other inputs constant. Their own dependence enters by u, which is
        a fixed point of ``u = g + J(z, sources)^T u``, and afterwards through the gate.
        """
        gate = Gate()
        with torch.enable_grad(), twice_differentiable():
            point = _Gated.apply(gate, z)
            own = [_Gated.apply(gate, t) if t.requires_grad else t for t in sources]
            image = self.evaluate(point, own)
            # Constants, and the points at which layers within f are differentiated.
            known = (_Gated._backward_cls, _Point._backward_cls)  # type: ignore[attr-defined]
            if captured_by(image, stop=known):
                raise RuntimeError(
                    "f captures a tensor that requires grad and is neither in args nor a parameter of a "
                    "module that is f, so it has first derivatives only (create_graph=True was asked "
                    "for): pass it in args, make f a module, or use adjoint=Unrolled()"
                )
            with torch.no_grad():
                u = self.solve(g.detach(), image, point)
            layout = Layout.of(u)
            f = RootUpdate(_Pulled(self)) if self.problem.unit_free else _Pulled(self)
            pulled = Problem(
                f, layout, (g, z, *sources), compact=False,
                symmetric=self.problem.symmetric,
            )  # fmt: skip
            at = _point(u, pulled.tensors)
            linear = Linearization(
                self.adjoint, pulled, at, pulled.differentiated(at), self.tolerance, self.report,
                origin=self.origin,
            )  # fmt: skip
            u = linear.attach() if linear.image.requires_grad else u
            wanted = [t for t, need in zip(own, needed, strict=True) if need]
            found = iter(
                torch.autograd.grad(image, wanted, u, create_graph=True, allow_unused=True)
                if wanted and image.requires_grad
                else [None] * len(wanted)
            )
        gate.open = True
        return [next(found) if need else None for need in needed]


def scaled_tolerance(tolerance: Tolerance, size: Tensor) -> tuple[Tensor, Tolerance]:
    """Return scales (B,) of right-hand sides with norms ``size`` (B,), and the tolerance after scaling.

    The scaled right-hand sides have norm one, so neither small nor large gradients leave the range of the
    dtype. Residual and error of each scaled system are compared with ``limit max(1, |u|)``.
    """
    limit = tolerance.rtol or float(tolerance.atol > 0)
    scale = tolerance.threshold(size) / limit if limit else size
    return scale.masked_fill(scale == 0, 1.0), replace(tolerance, rtol=limit, atol=limit)


class _Attached(torch.autograd.Function):
    """The point, whose backward pass gives ``u`` to ``image``.

    It returns the point twice: the caller may change the first in place, and higher derivatives go through
    the second.
    """

    @staticmethod
    def forward(
        ctx: Any, linear: Linearization, z: Tensor, image: Tensor, *sources: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.linear, value = linear, z.view_as(z)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(value, *sources)
        return z.clone(), value

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        linear, needed = ctx.linear, ctx.needs_input_grad[3:]
        given = [c for c in cotangents if c is not None]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        g = given[0] if len(given) == 1 else given[0] + given[1]
        if not torch.is_grad_enabled():
            return None, None, linear.solve(g), *[None] * len(needed)
        if linear.compiled:
            raise RuntimeError(
                "a fixed point has first derivatives only within compiled autograd: set "
                "torch._dynamo.config.compiled_autograd = False"
            )
        z, *sources = ctx.saved_tensors  # raises if one of them was changed in place
        return None, None, None, *linear.differentiable(g, z, sources, needed)


@dataclass(eq=False)
class _Pulled:
    """The map ``u -> g + J(z, sources)^T u``, whose fixed point is the solution of the adjoint system.

    Where the residual is in units of its own it is ``u -> (I - J)^T u - g``, whose root is the solution.
    """

    linear: Linearization

    def __call__(self, u: Tensor, g: Tensor, z: Tensor, *sources: Tensor) -> Tensor:
        linear = self.linear
        with twice_differentiable():
            image = linear.evaluate(z, sources)
        value = g
        if image.requires_grad:
            (product,) = torch.autograd.grad(image, z, u, create_graph=True, allow_unused=True)
            value = g if product is None else g + product
        free = linear.problem.unit_free
        if linear.kept is not None:
            value = value.where(linear.kept[:, None], -u if free else 0.0)
        return -value if free else value


class Gate:
    """Whether derivatives pass from an evaluation on to what its inputs were computed from."""

    open = False


class _Gated(torch.autograd.Function):
    """A tensor that is constant until the gate opens."""

    @staticmethod
    def forward(ctx: Any, gate: Gate, tensor: Tensor) -> Tensor:
        ctx.gate = gate
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return None, cotangents[0] if ctx.gate.open else None


class _Point(torch.autograd.Function):
    """z as a constant that has a node of its own in the graph."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, *above: Tensor) -> Tensor:
        ctx.number = 1 + len(above)
        ctx.set_materialize_grads(False)
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return (None,) * ctx.number


def _point(z: Tensor, read: list[Tensor]) -> Tensor:
    """Return z (B, D) as the point at which f is recorded.

    Its node lies above those of the tensors that f reads: a product with the Jacobian,
    ``autograd.grad(image, point)``, then visits the graph of f only, and not that of the model in front of f.
    No gradient is accumulated for z.
    """
    above = [t for t in read if t.grad_fn is not None]
    above = [] if compiles_backward() else above  # which takes no None for a gradient
    return _Point.apply(z.detach().requires_grad_(), *above)  # type: ignore[no-any-return]


class _WithGradientOf(torch.autograd.Function):
    """Return the value of ``anchor`` with the gradient of ``z``, which need not be finite."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, z: Tensor) -> Tensor:
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return None, cotangents[0]


class _ZeroGradient(torch.autograd.Function):
    """z with a gradient of zero for the sources."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        return z.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return None, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


def zero_gradient(z: Tensor, *outputs: Tensor) -> Tensor:
    """Return z (B, D) with a gradient of zero for all leaves in the graphs of ``outputs``."""
    leaves = {id(leaf): leaf for output in outputs for leaf in captured_by(output)}
    return _ZeroGradient.apply(z, *leaves.values()) if leaves else z


def captured_by(output: Tensor, stop: Any = None) -> list[Tensor]:
    """Return the leaves of the graph of ``output``; the search does not pass nodes of the types ``stop``."""
    if output.grad_fn is None:
        return [output] if output.requires_grad else []
    if stop is not None and isinstance(output.grad_fn, stop):
        return []
    seen, stack, leaves = {output.grad_fn}, [output.grad_fn], list[Tensor]()
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                if stop is None or not isinstance(following, stop):
                    stack.append(following)
    return leaves


def _differentiable(problem: Problem, image: Tensor, point: Tensor) -> bool:
    """Whether a tensor that f reads requires grad.

    Raises RuntimeError if an argument or a parameter does, but the image of f does not.
    """
    module = module_of(problem.f)
    read = chain(problem.tensors, () if module is None else module.parameters())
    trained = any(map(attrgetter("requires_grad"), read))
    if image.requires_grad:
        return trained or bool(captured_by(image, stop=type(point.grad_fn)))
    if trained:
        raise RuntimeError(
            "f(z, *args) does not require grad although an input or a weight does: f uses "
            "torch.no_grad(), detach() or NumPy. Pass adjoint=None if you need no gradients"
        )
    return False


def module_of(f: Any) -> nn.Module | None:
    """Return the module that ``f``, or its ``update``, ``energy`` or ``function``, is or is a method of."""
    while isinstance(f, partial):
        f = f.func
    parts = [f]
    for name in ("update", "energy", "function"):
        parts.append(getattr(f, name, None))
    for part in parts:
        for home in (part, getattr(part, "__self__", None)):
            if isinstance(home, nn.Module):
                return home
    return None


class Caller(nn.Module):
    """Calls ``f``, so that ``functional_call`` can replace the parameters of its module."""

    def __init__(self, f: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self.module, self.called = module, [f]

    def forward(self, *args: Any) -> Any:
        with within(weights=weights_of(self.module.modules())):
            return self.called[0](*args)
