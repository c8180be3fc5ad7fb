"""Implicit differentiation of a fixed point: first and second derivatives.

Where the adjoint is solved: :meth:`AdjointSystem.solve`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.adjoints.capture import Recorder
from solvers.compiled.evaluations import Linearization, Wanted
from solvers.compiled.programs import Weights
from solvers.core.layout import leaves_of
from solvers.core.modes import constant_weights, uncompiled
from solvers.core.problem import JacobianProduct, Problem, gradients, pullback
from solvers.core.rows import merge_rows, scatter_rows
from solvers.core.solution import AdjointReport, Solution, Status, Tolerance, apply_policy
from solvers.krylov import CG, GMRES, MINRES, LinearSolver
from solvers.linear import OneMinus, solve_linear

_CG, _GMRES = CG(), GMRES()


@dataclass(frozen=True)
class AdjointSystem:
    """How to solve ``(I - J^T) u = g``, and for which samples."""

    solver: LinearSolver | None  # None: the choice of :class:`solvers.Implicit`
    tolerance: Tolerance
    max_steps: int
    on_failure: str
    report: AdjointReport  # receives the outcome
    batch: int  # samples of the fixed point
    rows: Tensor | None  # (n,) samples that take part, or None for all
    f: object = None  # whose adjoint it is, for warnings

    def solve(self, product: JacobianProduct, right: Tensor, symmetric: bool) -> Tensor:
        """Solve the adjoint system ``u - product(u) = right`` for vectors (n, D)."""
        run = partial(
            solve_linear,
            OneMinus(product),
            tolerance=self.tolerance,
            compact=False,
            on_failure="ignore",
        )
        solver = self.solver or (_CG if symmetric else _GMRES)
        solution = run(right, solver=solver, max_steps=self.max_steps)
        if self.solver is None and symmetric:
            solution = self._retry_saddles(run, solution, right)
        self.report.solution = self._of_whole_batch(solution)
        self.report.solves += 1
        # Samples without a finite evaluation were reported by the forward solve already.
        apply_policy(solution, self.on_failure, "adjoint solve", self.f)
        return solution.value

    def _retry_saddles(
        self, run: Callable[..., Solution], first: Solution, right: Tensor
    ) -> Solution:
        """MINRES, with the products that are left, for samples where CG met negative curvature."""
        saddles = first.status == Status.INDEFINITE
        if not bool(saddles.any()):
            return first
        left = self.max_steps - int(first.evaluations[saddles].max())
        if left <= 0:
            return first
        # A right-hand side of zero keeps the solved samples out of the second run.
        b, start = (torch.where(saddles[:, None], t, 0) for t in (right, first.value))
        second = run(b, solver=MINRES(), max_steps=left, x0=start)
        return replace(
            merge_rows(saddles, second, first),
            steps=first.steps + torch.where(saddles, second.steps, 0),
            evaluations=first.evaluations + torch.where(saddles, second.evaluations, 0),
        )

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


@dataclass
class Record:
    """What the backward passes of one solve share: the recording ``output = f(point)``.

    Second derivatives, too, are taken of its graph, which holds the values of the forward pass:
    where one of them has been changed in place since, autograd raises.
    """

    system: AdjointSystem
    recorder: Any  # a Recorder, or what knows its inputs
    point: Tensor
    output: Tensor

    def saved(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What autograd keeps for the backward pass, beside the value."""
        return inputs

    def gradients(self, value: Tensor, cotangent: Tensor) -> list[Tensor | None]:
        """Those of the inputs."""
        return first_derivative(self, cotangent)[1]

    def recorded(self, value: Tensor, saved: list[Tensor]) -> tuple[Record, list[Tensor]]:
        """The recording of which second derivatives are taken, and its inputs."""
        return self, saved


def record_at(problem: Problem, z: Tensor, system: AdjointSystem) -> Record:
    """``f`` recorded at the fixed point z (B, D)."""
    recorder = Recorder(problem)
    return Record(system, recorder, *recorder.record(z))


def implicit_value(problem: Problem, z: Tensor, system: AdjointSystem) -> Tensor:
    """The fixed point z (B, D) with the implicit gradient attached."""
    record = record_at(problem, z, system)
    recorder = record.recorder
    return _ImplicitValue.apply(record, z, *recorder.inputs)[0] if recorder.inputs else z


def zero_derivative(problem: Problem, z: Tensor, *others: Tensor) -> Tensor:
    """z (B, D), of samples that have no derivative: zero by what ``f`` reads and by ``others``."""
    recorder = Recorder(problem)
    recorder.record(z)
    inputs = [*recorder.inputs, *(tensor for tensor in others if tensor.requires_grad)]
    return _ZeroDerivative.apply(z, *inputs) if inputs else z


class _ZeroDerivative(torch.autograd.Function):
    """z -> z with a gradient of zero for the inputs."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return z.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return None, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


class _ImplicitValue(torch.autograd.Function):
    """z -> z with the backward pass of the implicit function theorem, by a record or known inputs.

    Twice: the caller may change the first in place. The second, in the memory of the recording, is what
    second derivatives go through.
    """

    @staticmethod
    def forward(
        ctx: Any, source: Record | KnownInputs, z: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.source = source
        ctx.set_materialize_grads(False)
        own = z.detach()
        ctx.save_for_backward(own, *source.saved(inputs))
        return z.clone(), own

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        given = [c for c in cotangents if c is not None]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        cotangent = given[0] if len(given) == 1 else given[0] + given[1]
        value, *saved = ctx.saved_tensors  # none has been changed in place since
        if torch.is_grad_enabled():
            record, inputs = ctx.source.recorded(value, saved)
            results = ImplicitGradient.apply(record, cotangent, value, *inputs)
        else:
            results = ctx.source.gradients(value, cotangent)
        return (None, None, *results)


def first_derivative(record: Record, cotangent: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """``u = (I - J^T)^-1 cotangent`` and ``(df/dinput)^T u``."""
    product = pullback(record.output, record.point)
    u = record.system.solve(product, cotangent, record.recorder.problem.symmetric)
    return u, gradients(record.output, record.recorder.aliases, u)


class ImplicitGradient(torch.autograd.Function):
    """(cotangent, z, inputs) -> gradients of the inputs, itself differentiable once.

    With ``u = A^-T g``, ``A = I - J`` and outputs ``G = f_theta^T u``, cotangents c give
    ``r = f_theta c``, ``w = A^-1 r``, and then ``dL/dg = w`` and
    ``dL/d(z, theta) = d/d(z, theta) [ u^T Df(z, theta) (w, c) ]`` with u, w, c held fixed.
    """

    @staticmethod
    def forward(
        ctx: Any, record: Record, cotangent: Tensor, value: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        u, results = first_derivative(record, cotangent)
        ctx.record = record
        ctx.save_for_backward(u, value, *inputs)
        pairs = zip(results, inputs, strict=True)
        return tuple(torch.zeros_like(t) if g is None else g for g, t in pairs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        record: Record = ctx.record
        u, value, *inputs = ctx.saved_tensors
        with torch.no_grad():
            results = second_derivative(record, u, cotangents)
        if torch.is_grad_enabled():
            upstream = [*cotangents, u, value, *inputs]
            results = [None if t is None else _NoThird.apply(t, *upstream) for t in results]
        return (None, *results)


def second_derivative(
    record: Record, u: Tensor, cotangents: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Gradients with respect to (cotangent, value, inputs); see :class:`ImplicitGradient`."""
    symmetric = record.recorder.problem.symmetric
    point, output = record.point, record.output
    variables = [point, *record.recorder.aliases]
    with torch.enable_grad():
        weight = u.detach().requires_grad_()
        images = gradients(output, variables, weight, create_graph=True)
        direction = _inner(images[1:], cotangents)
    right = None if direction is None else gradients(direction, [weight])[0]
    right = torch.zeros_like(u) if right is None else right
    # The pullback of J^T weight with respect to weight is the product with J.
    recorded = (output, point) if symmetric else (images[0], weight)
    w = record.system.solve(pullback(*recorded), right, symmetric)
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
            "third derivatives of an implicit fixed point are not implemented; "
            "use adjoint=Unrolled() for them"
        )


def _inner(first: list[Tensor | None], second: tuple[Tensor, ...]) -> Tensor | None:
    """Sum of inner products of matching tensors that both exist and depend on something."""
    terms = [
        (a * b).sum()
        for a, b in zip(first, second, strict=True)
        if a is not None and b is not None and a.requires_grad
    ]
    return sum(terms[1:], terms[0]) if terms else None


@dataclass
class KnownInputs:
    """A compiled solve, whose inputs are known: the arguments and the weights of a module.

    It stands in the place of a :class:`Record`, and of the :class:`Recorder` of one: where the backward pass
    is itself recorded it is the ordinary one, since compiled programs cannot be differentiated.
    """

    problem: Problem
    wanted: Wanted
    weights: Weights
    system: AdjointSystem
    aliases: list[Tensor] = field(default_factory=list)

    @property
    def inputs(self) -> list[Tensor]:
        return self.wanted.inputs(self.problem.args, self.weights.tensors)

    def saved(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """All tensors that an evaluation reads: to change one before the backward pass is an error."""
        leaves = leaves_of((self.problem.args, self.problem.mask))
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return [*found, *self.weights.tensors.values()]

    def gradients(self, value: Tensor, cotangent: Tensor) -> list[Tensor | None]:
        """Those of the inputs, by compiled programs."""
        with constant_weights():
            linear = Linearization(self.problem, value, self.wanted, self.weights)
            u = self.system.solve(linear.product, cotangent, self.problem.symmetric)
            return linear.gradients(u)

    def recorded(self, value: Tensor, saved: list[Tensor]) -> tuple[Record, list[Tensor]]:
        """An ordinary recording, with the tensors of :meth:`saved`, and its inputs."""
        given = iter(saved)
        leaves, spec = pytree.tree_flatten((self.problem.args, self.problem.mask))
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, mask = pytree.tree_unflatten(leaves, spec)
        weights = Weights(dict(zip(self.weights.tensors, given, strict=True)), self.weights.kind)
        problem = replace(self.problem, args=args, mask=mask)
        known = replace(self, problem=problem, weights=weights)
        problem.programs.check_unchanged(weights)
        return Record(self.system, known, *known.record(value)), known.inputs

    def record(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """``point`` and ``output = f(point; aliases)``, (B, D) both."""
        args, weights = self.wanted.opened(self.problem.args, self.weights.tensors)
        self.aliases = self.wanted.inputs(args, weights)
        programs = self.problem.programs
        point = z.detach().requires_grad_()
        with programs.cloned(), constant_weights(), torch.enable_grad(), uncompiled():
            f = programs.traced_map(self.problem.f)
            plain = replace(self.problem, f=f, args=args, programs=None)
            output = programs.within(weights, plain.masked_map, point)
        return point, output


def compiled_value(problem: Problem, z: Tensor, system: AdjointSystem) -> Tensor:
    """The fixed point z (B, D) with the implicit gradient attached, by compiled programs."""
    weights = problem.programs.weights()
    known = KnownInputs(problem, Wanted.of(problem.args, weights.tensors), weights, system)
    inputs = known.inputs
    return _ImplicitValue.apply(known, z, *inputs)[0] if inputs else z
