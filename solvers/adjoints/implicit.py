"""Implicit differentiation of a fixed point: first and second derivatives.

With ``z = f(z, theta)``, ``J = df/dz`` and an incoming gradient g, the gradient of theta is
``(df/dtheta)^T u`` where ``u = g + J^T u``. That is a fixed point as well, and by default the same loop
finds it: :meth:`AdjointSolve.__call__`. Three autograd functions, each the derivative of the one before,
are the graph: :class:`_Value`, :class:`_Gradient` and :class:`_Second`. They serve ordinary backward passes
and, as they tell ``vmap`` what to do, the transforms of ``torch.func``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch  # type: ignore[attr-defined]
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from solvers.adjoints.reads import Replacing, nodes_of, read_by
from solvers.core.context import constant_weights, sequence_number
from solvers.core.layout import Layout, leaves_of
from solvers.core.loop import Options
from solvers.core.modes import in_transform, twice_differentiable, uncompiled, without_autocast
from solvers.core.problem import JacobianProduct, Problem, VectorProblem, gradients, pullback
from solvers.core.rows import merge_rows, scaled_norm, small_dtype, where_rows
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
    """How to solve ``u = g + J^T u``."""

    solver: LinearSolver | None  # None: Anderson's method, see :class:`solvers.Implicit`
    tolerance: Tolerance
    max_steps: int
    on_failure: str
    report: AdjointReport  # receives the outcome
    f: object = None  # whose adjoint it is, for warnings

    def __call__(self, product: JacobianProduct, right: Tensor, symmetric: bool) -> Tensor:
        """Solutions u (B, D) of ``u - product(u) = right``.

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
        finite, size = right.to(wide).where(given[:, None], 0.0), size.where(given, 0.0)
        with torch.no_grad(), without_autocast(right.device.type):
            solution = self._each(product, finite, size, right.dtype, symmetric)
            if solution is None:
                solution = self._together(product, finite, right.dtype)
        u = solution.value.to(right.dtype)
        fits = torch.linalg.vector_norm(u, torch.inf, dim=1) < torch.inf
        lost = ~(given & fits & (solution.status != Status.NONFINITE))
        solution.value = u = u.masked_fill(lost[:, None], torch.nan)
        # A gradient that is not finite shows itself, as everywhere in torch, and needs no warning.
        others = replace(solution, status=solution.status.masked_fill(lost, int(Status.CONVERGED)))
        solution.status = solution.status.masked_fill(lost, int(Status.NONFINITE))
        solution.residual_norm = solution.residual_norm.masked_fill(lost, torch.inf)
        solution.residual = solution.residual.masked_fill(lost, torch.inf)
        self.report.solution, self.report.solves = solution, self.report.solves + 1
        apply_policy(others, self.on_failure, "adjoint solve", self.f)
        return u

    def _each(
        self, product: JacobianProduct, right: Tensor, size: Tensor, dtype: torch.dtype, symmetric: bool
    ) -> Solution | None:  # fmt: skip
        """Solve for each sample; None where it turns out that the samples influence each other.

        The system of each sample is scaled to a right-hand side of norm one, so that neither small nor large
        gradients leave the range of the dtype on the way.
        """
        limit = self.tolerance.rtol or float(self.tolerance.atol > 0)
        scale = self.tolerance.threshold(size) / (limit or 1.0)
        scale = scale.masked_fill(scale == 0, 1.0)
        unit, allowed = right / scale[:, None], Tolerance(rtol=0.0, atol=limit)
        # The scales of samples that influence each other matter. Half precision has no numbers for small
        # ones.
        relative = (scale / scale.max())[:, None].clamp_min(torch.finfo(scale.dtype).tiny)

        def image(u: Tensor) -> Tensor:
            if dtype != right.dtype:
                return product(u.to(dtype)).to(u.dtype)
            return product(u * relative) / relative

        by_krylov = partial(
            solve_linear, lambda v: v - image(v), tolerance=allowed, compact=False,
            on_failure="ignore",
        )  # fmt: skip
        if self.solver is not None:
            found = by_krylov(unit, solver=self.solver, max_steps=self.max_steps)
        else:
            most = min(self.max_steps, max(FIRST_TRY, self.max_steps // 2))
            found, norm = _anderson(image, unit, allowed, most)
            last = scaled_norm(unit + image(found.value) - found.value) if norm is None else norm()
            length = torch.linalg.vector_norm(found.value, dim=1)
            open_rows = ~found.converged
            # A sample that had ended has another residual when those that it depends on have moved on.
            changed = exceeds(last, limit, length, unit.dtype) & (last < torch.inf) & ~open_rows
            wrong, unsolved = torch.stack((changed, open_rows)).any(1).tolist()
            if wrong or (unsolved and _coupled(image, unit)):
                return None
            left = self.max_steps - int(found.evaluations.max()) if unsolved else 0
            if left >= 2:
                # A right-hand side of zero keeps the solved samples out of the second attempt.
                b, x0 = (t.where(open_rows[:, None], 0.0) for t in (unit, found.value))
                method = MINRES() if symmetric else GMRES()
                second = by_krylov(b, solver=method, max_steps=left, x0=x0)
                better = open_rows & (second.residual_norm < found.residual_norm)
                steps, spent = second.steps * open_rows, second.evaluations * open_rows
                steps, spent = found.steps + steps, found.evaluations + spent
                found = merge_rows(better, second, found)
                found = replace(found, steps=steps, evaluations=spent)
        norm = found.residual_norm * scale
        residual = norm / size.masked_fill(size == 0, 1.0)
        return replace(
            found, value=found.value * scale[:, None], residual_norm=norm, residual=residual
        )

    def _together(self, product: JacobianProduct, right: Tensor, dtype: torch.dtype) -> Solution:
        """Solve for all samples as one system; each reports its residual and its number of products."""
        shape = right.shape
        size = torch.linalg.vector_norm(right)

        def image(u: Tensor) -> Tensor:
            return product(u.view(shape).to(dtype)).to(u.dtype).view(1, -1)

        limit = max(self.tolerance.rtol, self.tolerance.atol / float(size))
        allowed = Tolerance(rtol=0.0, atol=limit)
        found, _ = _anderson(image, (right / size).view(1, -1), allowed, self.max_steps)
        each: dict[str, Any] = {
            name: getattr(found, name).expand(len(right)).clone()
            for name in ("status", "residual_norm", "steps", "evaluations")
        }
        norm = each.pop("residual_norm")
        value = found.value.view(shape) * size
        return Solution(value=value, residual=norm, residual_norm=norm * size, **each)


def _anderson(
    image: JacobianProduct, unit: Tensor, allowed: Tolerance, max_steps: int
) -> tuple[Solution, Callable[[], Tensor] | None]:
    """Solve ``u = unit + image(u)`` by Anderson's method from zero, whose image needs no product.

    Also returns a function that gives the residual norms (B,) of all samples in the last evaluation, or
    None if they are unknown.
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
    odd = [number.bit_count() % 2 == 1 for number in range(len(unit))]
    some = torch.tensor(odd, device=unit.device)
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
            if not (isinstance(leaf, Tensor) and leaf.requires_grad):
                return leaf
            if id(leaf) not in pairs:
                own.append(leaf.detach().requires_grad_())
                pairs[id(leaf)] = (leaf, own[-1].view_as(own[-1]))
            return pairs[id(leaf)][1]

        def alias_early(tensor: Tensor) -> Tensor:
            node = tensor.grad_fn
            return tensor if node is None or node._sequence_nr() >= start else alias(tensor)

        def evaluate(mode: AbstractContextManager[Any]) -> tuple[Tensor, list[Tensor], bool]:
            with constant_weights(problem.modules, weights, repeated=True), mode:
                output = replace(problem, args=args).masked_map(point)
            return output, *read_by(output, {id(leaf) for leaf in own}, start)

        with torch.enable_grad(), uncompiled():
            weights = problem.weights
            start = sequence_number() if weights is None else weights.start
            args = problem.args
            if any([isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves_of(args)]):
                args = pytree.tree_map(alias, args)
            # Not the leaf itself: torch cannot follow the gradients of leaves where it tracks modules.
            point = own[0].view_as(own[0])
            # Modules seldom read what was computed before the solve. Plain functions often do.
            module = isinstance(origin_of(problem.f), nn.Module)
            output, leaves, computed = evaluate(nullcontext() if module else Replacing(alias_early))
            if module and computed:
                output, leaves, computed = evaluate(Replacing(alias_early))
        if not output.requires_grad and (pairs or _trains(problem.f)):
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
        if not any("ScaledDotProduct" in node.name() for node in nodes_of(self.output)):
            return self
        with twice_differentiable():
            # Numbers of nodes are those of a thread, and a backward pass may have its own.
            problem = replace(self.problem, weights=None)
            return Linearization.at(problem, self.point.detach()).of(self.sources)

    def of(self, sources: Sequence[Tensor]) -> Linearization:
        """The same with these sources in this order; f need not read all of them."""
        known = {id(s): alias for s, alias in zip(self.sources, self.aliases, strict=True)}
        unused = self.point.new_zeros(()).requires_grad_()
        aliases = [known.get(id(source), unused) for source in sources]
        return replace(self, sources=list(sources), aliases=aliases)


def _trains(f: object) -> bool:
    """Whether f is or belongs to a module with weights that are trained."""
    module = origin_of(f)
    return isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters())


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


@dataclass(eq=False)
class Derivative:
    """The implicit derivative of one fixed point.

    ``linearize(z, sources)`` is called with ordinary tensors in the forward pass, because the modules that f
    reads may have other weights in the backward pass (``torch.func.functional_call``). Within ``vmap`` it is
    called for each slice. The number of its record travels with the value as a tensor.
    """

    solve: AdjointSolve
    linearize: Callable[[Tensor, Sequence[Tensor]], Linearization]
    records: list[Linearization] = field(default_factory=list)

    def attach(self, z: Tensor, sources: Sequence[Tensor], through: Tensor | None = None) -> Tensor:
        """Return z (B, D) with the derivative by the sources.

        Args:
            through: the output of f where the gradient also goes through its graph.
        """
        if through is None and not sources:
            return z
        return _Value.apply(self, z, through, *sources)[0]


class Sliced(torch.autograd.Function):
    """A function that ``vmap`` calls for each slice, because weights may differ between slices."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:  # type: ignore[override]
        slices = []
        for index in range(info.batch_size):
            pairs = zip(inputs, in_dims, strict=True)
            slices.append(cls.apply(*(t if d is None else t.select(d, index) for t, d in pairs)))
        stacked = tuple(torch.stack(parts) for parts in zip(*slices, strict=True))
        return stacked, (0,) * len(stacked)


class _Value(Sliced):
    """(z, sources) -> z with the backward pass of the implicit function theorem.

    It returns z twice: the caller may change the first in place, and second derivatives go through the
    second.
    """

    @staticmethod
    def forward(
        derivative: Derivative, z: Tensor, through: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        derivative.records.append(derivative.linearize(z, sources))
        return z.clone(), z.detach(), torch.tensor(len(derivative.records) - 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.derivative, ctx.computed = inputs[0], inputs[2] is not None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*output[1:], *inputs[3:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        given = [c for c in cotangents[:2] if c is not None]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        cotangent = given[0] if len(given) == 1 else given[0] + given[1]
        z, ticket, *sources = ctx.saved_tensors  # none has been changed in place since
        if not (torch.is_grad_enabled() or in_transform()):
            u, found = _first(ctx.derivative, ticket, cotangent)
            return None, None, u if ctx.computed else None, *found
        if ctx.computed:
            raise RuntimeError(
                "f reads a tensor that was computed before the solve and requires grad: pass it in args for "
                "second derivatives"
            )
        _, *found = _Gradient.apply(ctx.derivative, ticket, cotangent, z, *sources)
        return None, None, None, *found


def _first(
    derivative: Derivative, ticket: Tensor, cotangent: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """``u = (I - J^T)^-1 cotangent`` and ``(df/dsource)^T u``."""
    record = derivative.records[int(ticket)]
    product = pullback(record.output, record.point)
    u = derivative.solve(product, cotangent, record.problem.symmetric)
    return u, gradients(record.output, record.aliases, u) if record.aliases else []


class _Gradient(Sliced):
    """(cotangent, z, sources) -> u and the gradients of the sources, themselves differentiable once.

    With ``u = A^-T g``, ``A = I - J`` and outputs ``G = f_theta^T u``, cotangents c give
    ``r = f_theta c``, ``w = A^-1 r``, and then ``dL/dg = w`` and
    ``dL/d(z, theta) = d/d(z, theta) [ u^T Df(z, theta) (w, c) ]`` with u, w, c held fixed.
    """

    @staticmethod
    def forward(
        derivative: Derivative, ticket: Tensor, cotangent: Tensor, z: Tensor, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        with temporarily_clear_interpreter_stack():
            u, found = _first(derivative, ticket, cotangent)
        return u, *_zeros_for_none(found, sources)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.derivative = inputs[0]
        ctx.mark_non_differentiable(output[0])
        ctx.save_for_backward(output[0], inputs[1], *inputs[3:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        u, ticket, *upstream = ctx.saved_tensors
        return None, None, *_Second.apply(ctx.derivative, ticket, u, *cotangents[1:], *upstream)


class _Second(Sliced):
    """(u, cotangents c, z, sources) -> gradients by the cotangent g, z and the sources.

    See :class:`_Gradient`. The last inputs are there so that a third derivative is noticed.
    """

    @staticmethod
    def forward(
        derivative: Derivative, ticket: Tensor, u: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        cotangents = inputs[: len(inputs) // 2]
        with torch.no_grad(), temporarily_clear_interpreter_stack():
            record = derivative.records[int(ticket)].twice()
            symmetric, point, output = record.problem.symmetric, record.point, record.output
            variables = [point, *record.aliases]
            with torch.enable_grad():
                weight = u.detach().requires_grad_()
                images = gradients(output, variables, weight, create_graph=True)
                direction = _inner(images[1:], cotangents)
            right = None if direction is None else gradients(direction, [weight])[0]
            right = torch.zeros_like(u) if right is None else right
            # The pullback of J^T weight with respect to weight is the product with J.
            recorded = (output, point) if symmetric else (images[0], weight)
            w = derivative.solve(pullback(*recorded), right, symmetric)
            with torch.enable_grad():
                total = _inner(images, (w, *cotangents))
            none: list[Tensor | None] = [None] * len(variables)
            found = none if total is None else gradients(total, variables)
        return w, *_zeros_for_none(found, inputs[len(cotangents) :])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing to remember."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        raise RuntimeError(
            "third derivatives of an implicit fixed point are not implemented; use adjoint=Unrolled(). "
            "torch.autograd.functional.hvp needs one: use vhp, or torch.func.jacrev twice"
        )


def _zeros_for_none(found: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(found, like, strict=True)
    return [torch.zeros_like(t) if gradient is None else gradient for gradient, t in pairs]


def _inner(first: Sequence[Tensor | None], second: Sequence[Tensor]) -> Tensor | None:
    """Sum of inner products of matching tensors that both exist and depend on something."""
    terms = [
        (a * b).sum()
        for a, b in zip(first, second, strict=True)
        if a is not None and a.requires_grad
    ]
    return sum(terms[1:], terms[0]) if terms else None
