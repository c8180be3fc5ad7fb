"""The implicit gradient of a compiled solve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.adjoints.implicit import AdjointSystem, ImplicitGradient, Record
from solvers.compiled.evaluations import Linearization, Wanted
from solvers.compiled.programs import Weights
from solvers.core.layout import leaves_of
from solvers.core.modes import constant_weights, uncompiled
from solvers.core.problem import Problem


@dataclass
class KnownInputs:
    """Records an evaluation whose inputs are known: the arguments and the weights of a module.

    It stands in the place of a :class:`solvers.adjoints.capture.Recorder`.
    """

    problem: Problem
    wanted: Wanted
    weights: Weights
    aliases: list[Tensor] = field(default_factory=list)

    @property
    def inputs(self) -> list[Tensor]:
        return self.wanted.inputs(self.problem.args, self.weights.tensors)

    def tensors(self) -> list[Tensor]:
        """All tensors that an evaluation reads."""
        leaves = leaves_of((self.problem.args, self.problem.mask))
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return [*found, *self.weights.tensors.values()]

    def reading(self, tensors: Sequence[Tensor]) -> KnownInputs:
        """The same with these in the place of :meth:`tensors`."""
        given = iter(tensors)
        leaves, spec = pytree.tree_flatten((self.problem.args, self.problem.mask))
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, mask = pytree.tree_unflatten(leaves, spec)
        weights = dict(zip(self.weights.tensors, given, strict=True))
        problem = replace(self.problem, args=args, mask=mask)
        return KnownInputs(problem, self.wanted, Weights(weights, self.weights.kind))

    def record(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """``point`` and ``output = f(point; aliases)``, (B, D) both."""
        leaves, spec = pytree.tree_flatten(self.problem.args)
        for number in self.wanted.leaves:
            leaves[number] = leaves[number].detach().requires_grad_()
        weights = {name: weight.detach() for name, weight in self.weights.tensors.items()}
        for name in self.wanted.weights:
            weights[name].requires_grad_()
        args = pytree.tree_unflatten(leaves, spec)
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
    wanted = Wanted.of(problem.args, weights.tensors)
    known = KnownInputs(problem, wanted, weights)
    inputs = known.inputs
    return _CompiledValue.apply(known, system, z, *inputs)[0] if inputs else z


def _record(known: KnownInputs, system: AdjointSystem, z: Tensor) -> Record:
    known.problem.programs.check_unchanged(known.weights)
    return Record(system, known, *known.record(z))


class _CompiledValue(torch.autograd.Function):
    """z -> z with the backward pass of the implicit function theorem; twice, as ``_ImplicitValue``.

    Where the backward pass is itself recorded, it is the ordinary one: compiled programs cannot be
    differentiated.
    """

    @staticmethod
    def forward(
        ctx: Any, known: KnownInputs, system: AdjointSystem, z: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.known, ctx.system = known, system
        ctx.set_materialize_grads(False)
        own = z.detach()
        # All of them, so that what is changed in place before the backward pass is noticed.
        ctx.save_for_backward(own, *known.tensors())
        return z.clone(), own

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        given = [c for c in cotangents if c is not None]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        cotangent = given[0] if len(given) == 1 else given[0] + given[1]
        value, *tensors = ctx.saved_tensors  # none has been changed in place since
        known, system = ctx.known, ctx.system
        if torch.is_grad_enabled():
            known = known.reading(tensors)
            record = _record(known, system, value)
            results = ImplicitGradient.apply(record, cotangent, value, *known.inputs)
        else:
            results = _gradients(known, system, value, cotangent)
        return (None, None, None, *results)


def _gradients(
    known: KnownInputs, system: AdjointSystem, z: Tensor, cotangent: Tensor
) -> list[Tensor | None]:
    problem = known.problem
    with constant_weights():
        linear = Linearization(problem, z, known.wanted, known.weights)
        u = system.solve(linear.product, cotangent, problem.symmetric)
        return linear.gradients(u)
