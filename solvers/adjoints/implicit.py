"""Implicit differentiation of a fixed point: first and second derivatives.

With ``z = f(z, theta)``, ``J = df/dz`` and an incoming gradient g, the gradient of theta is
``(df/dtheta)^T u`` where ``u = g + J^T u``. That is a fixed point as well, and by default the same loop
finds it: :meth:`AdjointSolve.__call__`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from solvers.adjoints.checkpoints import read_by
from solvers.core.context import constant_weights, sequence_number
from solvers.core.layout import Layout, leaves_of
from solvers.core.loop import Options
from solvers.core.modes import twice_differentiable, uncompiled, without_autocast
from solvers.core.problem import JacobianProduct, Problem, VectorProblem, gradients, pullback
from solvers.core.rows import scaled_norm, scatter_rows, small_dtype, where_rows
from solvers.core.solution import AdjointReport, Solution, Status, Tolerance, apply_policy
from solvers.core.telling import origin_of
from solvers.core.validate import exceeds
from solvers.krylov import GMRES, MINRES, LinearSolver
from solvers.linear import solve_linear
from solvers.methods.anderson import Anderson
from solvers.methods.iterate import iterate

_ANDERSON = Anderson(memory=20)
# Products after which what Anderson's method leaves unsolved is given to a Krylov method.
FIRST_TRY = 50


@dataclass(frozen=True)
class AdjointSolve:
    """How to solve ``u = g + J^T u``, and for which samples."""

    solver: LinearSolver | None  # None: Anderson's method, see :class:`solvers.Implicit`
    tolerance: Tolerance
    max_steps: int
    on_failure: str
    report: AdjointReport  # receives the outcome
    batch: int  # samples of the fixed point
    rows: Tensor | None  # (n,) samples that take part, or None for all
    f: object = None  # whose adjoint it is, for warnings

    def __call__(self, product: JacobianProduct, right: Tensor, symmetric: bool) -> Tensor:
        """Solutions u (n, D) of ``u - product(u) = right``.

        A sample whose right-hand side is not finite, or whose solution leaves the dtype, gets NaN.
        """
        if _functorch.is_batchedtensor(right) or _functorch.is_legacy_batchedtensor(right):
            raise RuntimeError(
                "a backward pass through a fixed point does not support vmap (is_grads_batched, "
                "vectorize=True): apply torch.func.jacrev to the function that solves"
            )
        wide = small_dtype(right.dtype)
        size = scaled_norm(right).to(wide)
        given = size < torch.inf
        right_given, size = right.to(wide).where(given[:, None], 0.0), size.where(given, 0.0)
        with torch.no_grad(), without_autocast(right.device.type):
            solution = self._each(product, right_given, size, right.dtype, symmetric)
            if solution is None:
                solution = self._together(product, right_given, right.dtype)
        u = solution.value.to(right.dtype)
        finite = torch.linalg.vector_norm(u, torch.inf, dim=1) < torch.inf
        lost = ~(given & finite & (solution.status != Status.NONFINITE))
        known = reported = replace(solution, value=u)
        if bool(lost.any()):
            u = u.masked_fill(lost[:, None], torch.nan)
            # A gradient that is not finite shows itself, as everywhere in torch.
            known = replace(solution, status=solution.status.masked_fill(lost, 0))
            reported = replace(
                solution,
                value=u,
                status=solution.status.masked_fill(lost, int(Status.NONFINITE)),
                residual_norm=solution.residual_norm.masked_fill(lost, torch.inf),
                residual=solution.residual.masked_fill(lost, torch.inf),
            )
        self.report.solution = self._of_whole_batch(reported)
        self.report.solves += 1
        apply_policy(known, self.on_failure, "adjoint solve", self.f)
        return u

    def _each(
        self,
        product: JacobianProduct,
        right: Tensor,
        size: Tensor,
        dtype: torch.dtype,
        symmetric: bool,
    ) -> Solution | None:
        """Solve for each sample; None where it turns out that the samples influence each other.

        The system of each sample is scaled to a right-hand side of norm one, so that neither small nor large
        gradients leave the range of the dtype on the way.
        """
        limit = self.tolerance.rtol or float(self.tolerance.atol > 0)
        scale = self.tolerance.threshold(size) / (limit or 1.0)
        scale = scale.masked_fill(scale == 0, 1.0)
        unit = right / scale[:, None]
        # The scales of samples that influence each other matter. Half precision has no numbers for small
        # ones.
        relative = (scale / scale.max())[:, None].clamp_min(torch.finfo(scale.dtype).tiny)

        def image(u: Tensor) -> Tensor:
            if dtype != right.dtype:
                return product(u.to(dtype)).to(u.dtype)
            return product(u * relative) / relative

        found = self._scaled(image, unit, Tolerance(rtol=0.0, atol=limit), symmetric)
        if found is None:
            return None
        norm = found.residual_norm * scale
        residual = norm / size.masked_fill(size == 0, 1.0)
        value = found.value * scale[:, None]
        return replace(found, value=value, residual_norm=norm, residual=residual)

    def _scaled(
        self, image: JacobianProduct, unit: Tensor, allowed: Tolerance, symmetric: bool
    ) -> Solution | None:
        """The solution of the scaled systems, whose residuals are absolute."""

        def by_krylov(
            solver: LinearSolver, right: Tensor, most: int, x0: Tensor | None
        ) -> Solution:
            return solve_linear(
                lambda v: v - image(v), right, solver=solver, tolerance=allowed, max_steps=most, x0=x0,
                compact=False, on_failure="ignore",
            )  # fmt: skip

        if self.solver is not None:
            return by_krylov(self.solver, unit, self.max_steps, None)
        solution, norm = _anderson(image, unit, allowed, self.first_try)
        last = (
            scaled_norm(unit + image(solution.value) - solution.value) if norm is None else norm()
        )
        length = torch.linalg.vector_norm(solution.value, dim=1)
        open_rows = ~solution.converged
        # A sample that had ended has another residual when those that it depends on have moved on.
        changed = exceeds(last, allowed.atol, length, unit.dtype) & (last < torch.inf)
        wrong, unsolved = torch.stack((changed & ~open_rows, open_rows)).any(1).tolist()
        if wrong or (unsolved and _coupled(image, unit)):
            return None
        left = self.max_steps - int(solution.evaluations.max()) if unsolved else 0
        if left < 2:
            return solution
        # A right-hand side of zero keeps the solved samples out of the second attempt.
        b, start = (where_rows(open_rows, t, torch.zeros_like(t)) for t in (unit, solution.value))
        second = by_krylov(MINRES() if symmetric else GMRES(), b, left, start)
        better = open_rows & (second.residual_norm < solution.residual_norm)
        spent = torch.where(open_rows, second.evaluations, 0)
        return replace(
            solution,
            value=where_rows(better, second.value, solution.value),
            status=torch.where(better, second.status, solution.status),
            residual_norm=torch.where(better, second.residual_norm, solution.residual_norm),
            steps=solution.steps + torch.where(open_rows, second.steps, 0),
            evaluations=solution.evaluations + spent,
        )

    @property
    def first_try(self) -> int:
        """Products after which another method goes on."""
        return min(self.max_steps, max(FIRST_TRY, self.max_steps // 2))

    def _together(self, product: JacobianProduct, right: Tensor, dtype: torch.dtype) -> Solution:
        """Solve for all samples as one system; each reports its residual and its number of products."""
        shape = right.shape
        size = torch.linalg.vector_norm(right)
        unit = (right / size).view(1, -1)

        def image(u: Tensor) -> Tensor:
            return product(u.view(shape).to(dtype)).to(u.dtype).view(1, -1)

        limit = max(self.tolerance.rtol, self.tolerance.atol / float(size))
        found, _ = _anderson(image, unit, Tolerance(rtol=0.0, atol=limit), self.max_steps)
        each: dict[str, Any] = {
            name: getattr(found, name).expand(len(right)).clone()
            for name in ("status", "residual_norm", "steps", "evaluations")
        }
        norm = each.pop("residual_norm")
        value = found.value.view(shape) * size
        return Solution(value=value, residual=norm, residual_norm=norm * size, **each)

    def _of_whole_batch(self, part: Solution) -> Solution:
        """The samples that took no part are NONFINITE, at no cost."""
        if self.rows is None:
            return part
        fills = {
            "value": 0,
            "status": int(Status.NONFINITE),
            "residual": torch.inf,
            "residual_norm": torch.inf,
            "steps": 0,
            "evaluations": 0,
        }
        whole: dict[str, Any] = {
            name: scatter_rows(getattr(part, name), self.rows, self.batch, fill)
            for name, fill in fills.items()
        }
        return replace(part, **whole)


def _anderson(
    image: JacobianProduct, unit: Tensor, allowed: Tolerance, max_steps: int
) -> tuple[Solution, Callable[[], Tensor] | None]:
    """``u = unit + image(u)`` by Anderson's method from zero, whose evaluation is known: no product is
    needed.

    Also a function that gives the residual norms (B,) of all samples in the last evaluation, where they are
    known.
    """
    problem = VectorProblem(lambda u: unit + image(u), Layout.of(unit), compact=False)
    first = problem.point(torch.zeros_like(unit), unit)
    solution, last = iterate(problem, first, _ANDERSON, Options(allowed, max_steps + 1))
    solution.evaluations, solution.steps = solution.evaluations - 1, solution.steps - 1
    return solution, None if last is None else lambda: last().norm


def _coupled(image: JacobianProduct, unit: Tensor) -> bool:
    """Whether samples influence each other: the image of some must be zero in the others.

    The samples are those whose numbers have an odd count of ones in binary, since these pick one of a pair
    for every distance between two samples.
    """
    some = torch.tensor(
        [bool(bin(number).count("1") % 2) for number in range(len(unit))], device=unit.device
    )
    others = image(where_rows(some, unit, torch.zeros_like(unit)))[~some]
    # A Jacobian that is not finite makes NaN of zeros, which is no influence.
    return bool(others.nan_to_num(0.0, 0.0, 0.0).any())


@dataclass
class Linearization:
    """``f`` recorded once at the fixed point: ``output = f(point)``.

    An argument that requires a gradient is replaced by a detached alias, so that a product with the Jacobian
    goes through f alone and not through the model in front of it. Everything else that f reads, such as
    weights and the tensors of a closure, is read as it is. Its leaves are found in the graph. ``computed``
    says that f also reads a tensor that was computed before the solve and is no argument: its gradient goes
    through the graph of ``output``.
    """

    problem: Problem
    point: Tensor
    output: Tensor
    sources: list[Tensor]  # what receives a gradient: arguments and leaves
    aliases: list[Tensor]  # where it is taken
    computed: bool

    @classmethod
    def at(cls, problem: Problem, z: Tensor) -> Linearization:
        """Record ``f`` at z (B, D)."""
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        own = [z.detach().requires_grad_()]

        def alias(leaf: Any) -> Any:
            if not _trained(leaf):
                return leaf
            if id(leaf) not in pairs:
                own.append(leaf.detach().requires_grad_())
                pairs[id(leaf)] = (leaf, own[-1].view_as(own[-1]))
            return pairs[id(leaf)][1]

        def evaluate(substitution: AbstractContextManager[Any]) -> Tensor:
            weights = constant_weights(problem.modules, problem.weights, repeated=True)
            with weights, substitution:
                return replace(problem, args=args).masked_map(point)

        with torch.enable_grad(), uncompiled():
            known = problem.weights
            start = sequence_number() if known is None else known.start
            args = problem.args
            if any(_trained(leaf) for leaf in leaves_of(args)):
                args = pytree.tree_map(alias, args)
            # Not the leaf itself: torch cannot follow the gradients of leaves where it tracks modules.
            point = own[0].view_as(own[0])
            # Modules seldom read what was computed before the solve. Plain functions often do.
            module = isinstance(origin_of(problem.f), nn.Module)
            output = evaluate(nullcontext() if module else _Substitution(alias, start))
            leaves, computed = read_by(output, {id(leaf) for leaf in own}, start)
            if module and computed:
                output = evaluate(_Substitution(alias, start))
                leaves, computed = read_by(output, {id(leaf) for leaf in own}, start)
        if not output.requires_grad and (pairs or trained_by(problem.f)):
            raise RuntimeError(
                "f(z, *args) does not require grad although an input or a weight does: f uses "
                "torch.no_grad(), detach() or NumPy. Pass adjoint=None if you need no gradients"
            )
        if computed:
            leaves = []  # their gradients go through the graph
        sources, aliases = [s for s, _ in pairs.values()], [a for _, a in pairs.values()]
        return cls(problem, point, output, sources + leaves, aliases + leaves, computed)

    def twice(self) -> Linearization:
        """The same for second derivatives, which fused attention lacks: recorded again where f uses it."""
        seen, stack, fused = set[Any](), [self.output.grad_fn], False
        while stack and not fused:
            node = stack.pop()
            if node is not None and node not in seen:
                seen.add(node)
                fused = "ScaledDotProduct" in node.name()
                stack += [edge[0] for edge in node.next_functions]
        if not fused:
            return self
        with twice_differentiable():
            # Numbers of nodes are those of a thread, and a backward pass may have its own.
            problem = replace(self.problem, weights=None)
            again = Linearization.at(problem, self.point.detach())
        # The graph may name the leaves in another order.
        places = {id(s): alias for s, alias in zip(again.sources, again.aliases, strict=True)}
        return replace(again, sources=self.sources, aliases=[places[id(s)] for s in self.sources])


class _Substitution(TorchFunctionMode):
    """Within, functions of torch get an alias of a tensor that requires a gradient and was computed before.

    Leaves are left alone, since the graph names them. What a custom ``autograd.Function`` reads is left alone
    too, because torch does not show it to a mode.
    """

    def __init__(self, alias: Callable[[Any], Any], start: int) -> None:
        super().__init__()
        self.alias, self.start = alias, start

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            own = isinstance(value, Tensor) and (value.is_leaf or not self._is_early(value))
            if not own and (isinstance(value, Tensor) or type(value) in (tuple, list, dict)):
                args = [self._seen(value) for value in args]
                kwargs = {name: self._seen(value) for name, value in kwargs.items()}
                break
        return func(*args, **kwargs)

    def _is_early(self, value: Tensor) -> bool:
        return value.grad_fn is not None and value.grad_fn._sequence_nr() < self.start

    def _seen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.alias(value) if self._is_early(value) else value
        if type(value) in (tuple, list, dict):
            return pytree.tree_map(self._seen, value)
        return value


def _trained(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def trained_by(f: object) -> bool:
    """Whether f is or belongs to a module with weights that are trained."""
    module = origin_of(f)
    return isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters())


def implicit_value(record: Linearization, z: Tensor, solve: AdjointSolve) -> Tensor:
    """The fixed point z (B, D) with the implicit gradient attached."""
    through = record.output if record.computed else None
    if through is None and not record.sources:
        return z
    return _ImplicitValue.apply(record, solve, z, through, *record.sources)[0]


def zero_derivative(problem: Problem, z: Tensor, *others: Tensor) -> Tensor:
    """z (B, D), of samples that have no derivative: zero by what ``f`` reads and by ``others``."""
    record = Linearization.at(problem, z)
    inputs = [*record.sources, *(tensor for tensor in others if tensor.requires_grad)]
    through = record.output if record.computed else None
    return z if through is None and not inputs else _ZeroDerivative.apply(z, through, *inputs)


class _ZeroDerivative(torch.autograd.Function):
    """z -> z with a gradient of zero for the inputs."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, through: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return z.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return None, None, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


class _ImplicitValue(torch.autograd.Function):
    """z -> z with the backward pass of the implicit function theorem.

    It returns z twice: the caller may change the first in place, and second derivatives go through the
    second.
    """

    @staticmethod
    def forward(
        ctx: Any,
        record: Linearization,
        solve: AdjointSolve,
        z: Tensor,
        through: Any,
        *sources: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.record, ctx.solve = record, solve
        ctx.set_materialize_grads(False)
        own = z.detach()
        ctx.save_for_backward(own, *sources)
        return z.clone(), own

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        given = [c for c in cotangents if c is not None]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        cotangent = given[0] if len(given) == 1 else given[0] + given[1]
        value, *sources = ctx.saved_tensors  # none has been changed in place since
        record: Linearization = ctx.record
        if not torch.is_grad_enabled():
            u, found = first_derivative(record, ctx.solve, cotangent)
            return (None, None, None, u if record.computed else None, *found)
        if record.computed:
            raise RuntimeError(
                "f reads a tensor that was computed before the solve and requires grad: pass it in args for "
                "second derivatives"
            )
        found = ImplicitGradient.apply(record, ctx.solve, cotangent, value, *sources)
        return (None, None, None, None, *found)


def first_derivative(
    record: Linearization, solve: AdjointSolve, cotangent: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """``u = (I - J^T)^-1 cotangent`` and ``(df/dsource)^T u``."""
    product = pullback(record.output, record.point)
    u = solve(product, cotangent, record.problem.symmetric)
    return u, gradients(record.output, record.aliases, u) if record.aliases else []


class ImplicitGradient(torch.autograd.Function):
    """(cotangent, z, sources) -> gradients of the sources, itself differentiable once.

    With ``u = A^-T g``, ``A = I - J`` and outputs ``G = f_theta^T u``, cotangents c give
    ``r = f_theta c``, ``w = A^-1 r``, and then ``dL/dg = w`` and
    ``dL/d(z, theta) = d/d(z, theta) [ u^T Df(z, theta) (w, c) ]`` with u, w, c held fixed.
    """

    @staticmethod
    def forward(
        ctx: Any, record: Linearization, solve: AdjointSolve, cotangent: Tensor, value: Tensor,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        u, results = first_derivative(record, solve, cotangent)
        ctx.record, ctx.solve = record, solve
        ctx.save_for_backward(u, value, *sources)
        pairs = zip(results, sources, strict=True)
        return tuple(torch.zeros_like(t) if g is None else g for g, t in pairs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        u, value, *sources = ctx.saved_tensors
        with torch.no_grad():
            results = second_derivative(ctx.record, ctx.solve, u, cotangents)
        if torch.is_grad_enabled():
            upstream = [*cotangents, u, value, *sources]
            results = [None if t is None else _NoThird.apply(t, *upstream) for t in results]
        return (None, None, *results)


def second_derivative(
    record: Linearization, solve: AdjointSolve, u: Tensor, cotangents: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients with respect to (cotangent, value, sources); see :class:`ImplicitGradient`."""
    record, symmetric = record.twice(), record.problem.symmetric
    point, output = record.point, record.output
    variables = [point, *record.aliases]
    with torch.enable_grad():
        weight = u.detach().requires_grad_()
        images = gradients(output, variables, weight, create_graph=True)
        direction = _inner(images[1:], cotangents)
    right = None if direction is None else gradients(direction, [weight])[0]
    right = torch.zeros_like(u) if right is None else right
    # The pullback of J^T weight with respect to weight is the product with J.
    recorded = (output, point) if symmetric else (images[0], weight)
    w = solve(pullback(*recorded), right, symmetric)
    with torch.enable_grad():
        total = _inner(images, (w, *cotangents))
    if total is None:
        return [w, *[None] * len(variables)]
    return [w, *gradients(total, variables)]


class _NoThird(torch.autograd.Function):
    """Identity on a second derivative; differentiating it raises RuntimeError."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *upstream: Tensor) -> Tensor:
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        raise RuntimeError(
            "third derivatives of an implicit fixed point are not implemented; use adjoint=Unrolled(). "
            "torch.autograd.functional.hvp needs one: use vhp, or torch.func.jacrev twice"
        )


def _inner(first: Sequence[Tensor | None], second: Sequence[Tensor]) -> Tensor | None:
    """Sum of inner products of matching tensors that both exist and depend on something."""
    terms = [
        (a * b).sum()
        for a, b in zip(first, second, strict=True)
        if a is not None and b is not None and a.requires_grad
    ]
    return sum(terms[1:], terms[0]) if terms else None
