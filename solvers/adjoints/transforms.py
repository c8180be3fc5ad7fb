"""Fixed points under the transforms of ``torch.func``: ``grad``, ``vjp``, ``jacrev``, ``vmap``.

A solve branches on values, which are not available inside a transform. The solve is therefore a custom
autograd function whose body receives ordinary tensors. Its inputs are all tensors that ``f`` reads: the
state, the arguments and the tensors that ``f`` captures, which one evaluation detects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # type: ignore[attr-defined]
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)
from torch.utils import _pytree as pytree

from solvers.adjoints.implicit import Derivative, Linearization, Sliced
from solvers.adjoints.kinds import (
    Adjoint,
    Implicit,
    Iterated,
    OneStep,
    lost,
    without_derivative,
)
from solvers.adjoints.reads import Reads, Replacing
from solvers.core.layout import Layout
from solvers.core.modes import uncompiled
from solvers.core.problem import EnergyUpdate, Problem
from solvers.core.solution import Goal, Solution, Tolerance


def captured_by(
    function: Callable[..., object], tree: Any, known: Sequence[Tensor]
) -> list[Tensor]:
    """Return the tensors other than ``known`` that ``function(*tree)`` reads and that may need gradients.

    The function is evaluated on ordinary tensors, the first slice along the dimension of ``vmap``.
    """
    names = {id(tensor) for tensor in known}

    def ordinary(reads: Reads, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor below all transforms; ``f`` may overwrite the copy."""
        while _functorch.is_functorch_wrapped_tensor(tensor):
            dim = _functorch.maybe_get_bdim(tensor) if _functorch.is_batchedtensor(tensor) else -1
            tensor = _functorch.get_unwrapped(tensor)
            tensor = tensor if dim < 0 else tensor.select(dim, 0)
        tensor = tensor.detach().clone()
        reads.inside[id(tensor)] = tensor
        return tensor

    def look(reads: Reads, tensor: Tensor) -> Tensor:
        wrapped = _functorch.is_functorch_wrapped_tensor(tensor)
        if (wrapped or tensor.requires_grad) and id(tensor) not in names:
            reads.found.setdefault(id(tensor), tensor)
        return ordinary(reads, tensor) if wrapped else tensor

    reads = Reads(look)
    leaves, spec = pytree.tree_flatten(tree)
    plain = [ordinary(reads, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    with temporarily_clear_interpreter_stack(), torch.no_grad(), uncompiled(), reads:
        function(*pytree.tree_unflatten(plain, spec))
    return list(reads.found.values())


@dataclass(eq=False)
class Call:
    """A call of ``fixed_point`` as a function of a flat list of tensors."""

    solve: Callable[..., Solution]  # of (f, z0, args, energy=..., mask=...), without a gradient
    f: Callable[..., Any]
    energy: Callable[..., Tensor] | None
    leaves: list[Any]  # of (z0, args, mask); its tensors are the first of the list
    tree: Any  # their structure
    captured: list[Tensor]  # as f knows them; the rest of the list
    compact: bool  # f knows no batch size of its own

    def parts(self, tensors: Sequence[Any]) -> tuple[Any, Replacing]:
        """Return (z0, args, mask), and a context in which ``f`` reads the captured tensors of the list."""
        number = len(tensors) - len(self.captured)
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        own = {id(t): new for t, new in zip(self.captured, tensors[number:], strict=True)}
        swap = Replacing(lambda tensor: own.get(id(tensor), tensor))
        return pytree.tree_unflatten(leaves, self.tree), swap

    def run(self, tensors: Sequence[Tensor]) -> Solution:
        """Return the solution, whose value and states are matrices (B, D)."""
        (z0, args, mask), swap = self.parts(tensors)
        with swap:
            solution = self.solve(self.f, z0, args, energy=self.energy, mask=mask)
        vector = Layout.of(z0).vector
        solution.value = vector(solution.value)
        if solution.states is not None:
            solution.states = tuple(vector(state) for state in solution.states)
        return solution

    def linearize(self, z: Tensor, tensors: Sequence[Tensor]) -> Linearization:
        """Return ``f`` recorded at z (B, D), with the list as its sources."""
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        (z0, args, mask), swap = self.parts(leaves)

        def swapped(*args: Any) -> Any:
            with swap:
                return self.f(*args)

        problem = Problem.of(self.f, None, z0, args, mask, self.compact)
        problem.f = swapped
        record = Linearization.at(problem, z)
        known = {id(leaf) for leaf in leaves}
        if record.computed or not known.issuperset(map(id, record.sources)):
            raise RuntimeError(
                "f reads a tensor that requires grad and that torch.func cannot track (inside a custom "
                "torch.autograd.Function?): pass it in args"
            )
        return record.of(leaves)


_FIELDS = ("value", "status", "residual", "residual_norm", "steps", "evaluations", "energy")


class _Solve(Sliced):
    """Compute the ``_FIELDS`` of the solution and its states, (B, D) each, without a derivative."""

    @staticmethod
    def forward(call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        solution = call.run(tensors)
        energy = solution.residual if solution.energy is None else solution.energy
        found = [getattr(solution, name) for name in _FIELDS[:-1]]
        return *found, energy.clone(), *(solution.states or ())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return (None,) * len(ctx.needs_input_grad)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:  # type: ignore[override]
        """Solve all slices as one batch if they share everything else and f allows it, or one by one."""
        call, *tensors = inputs
        dims, number = in_dims[1:], len(tensors) - len(call.captured)
        shared = all(d is None for d in dims[number:])
        given = list(zip(tensors[:number], dims[:number], strict=True))
        scalars = any(d is not None and t.dim() == 1 for t, d in given)
        if not (shared and call.compact) or scalars:
            return super().vmap(info, in_dims, *inputs)
        size = info.batch_size

        def fold(tensor: Tensor, dim: int | None) -> Tensor:
            if dim is None and tensor.dim() == 0:
                return tensor
            whole = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            return whole.flatten(0, 1)

        folded = [fold(t, d) for t, d in given]
        found = cls.apply(call, *folded, *tensors[number:])
        parts = tuple(t.unflatten(0, (size, t.shape[0] // size)) for t in found)
        return parts, (0,) * len(parts)


def transformed_solution(
    solve: Callable[..., Solution], adjoint: Adjoint | None, tolerance: Tolerance | None, compact: bool,
    f: Callable[..., Any], energy: Callable[..., Tensor] | None, z0: Any, args: tuple[Any, ...], mask: Any,
) -> Solution:  # fmt: skip
    """Return the solution of a call of ``fixed_point`` inside a transform.

    Args:
        solve: ``fixed_point`` without a gradient, ``solve(f, z0, args, energy=..., mask=...)``.
        adjoint, tolerance, compact, f, energy, z0, args, mask: arguments of the call.
    """

    def evaluate(z0: Any, *args: Any) -> object:
        joint = f.joint if isinstance(f, EnergyUpdate) else f
        return joint(z0, *args), None if energy is None else energy(z0, *args)

    leaves, tree = pytree.tree_flatten((z0, args, mask))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    captured = captured_by(evaluate, (z0, *args), tensors)
    tensors += captured
    call = Call(solve, f, energy, leaves, tree, captured, compact)
    outputs = _Solve.apply(call, *tensors)
    solution, states = Solution(*outputs[: len(_FIELDS)]), outputs[len(_FIELDS) :]
    if energy is None and not isinstance(f, EnergyUpdate):
        solution.energy = None
    problem, near = Problem.of(f, energy, z0, args, mask, compact), adjoint
    if isinstance(adjoint, Implicit):
        value = solution.value
        allowed = Goal(tolerance, value.dtype, problem.autocast, value.device).tolerance
        derivative = Derivative(adjoint.adjoint_solve(solution.adjoint, allowed, f), call.linearize)
        solution.value = derivative.attach(value, tensors)
        near = adjoint.states or OneStep()
    if isinstance(near, Iterated):
        gone = lost(solution)
        states = [without_derivative(near.attach(problem, state), gone) for state in states]
        if near is adjoint:
            solution.value = near.attach(problem, solution.value)
        solution.value = without_derivative(solution.value, gone)
    tree_of = problem.layout.tree
    solution.value = tree_of(solution.value)
    solution.states = tuple(tree_of(state) for state in states) or None
    return solution


def refuse_in_transform(adjoint: Adjoint | None, *, record: bool) -> None:
    """Raise for forward mode, and for recorded and unrolled solves inside a transform."""
    if any(level.key() == TransformType.Jvp for level in retrieve_all_functorch_interpreters()):
        raise NotImplementedError(
            "forward-mode differentiation through a fixed point is not implemented; use reverse mode "
            "(torch.func.grad, vjp, jacrev; jacrev(jacrev(f)) instead of hessian(f))"
        )
    if record or not (adjoint is None or isinstance(adjoint, (Implicit, Iterated))):
        raise RuntimeError(
            "inside torch.func transforms fixed_point needs record=False and adjoint=Implicit(), "
            "Phantom(), OneStep(), None or Unrolled() without a callback, got "
            f"adjoint={adjoint!r}, record={record}"
        )
