"""Fixed points under the transforms of ``torch.func``: ``grad``, ``vjp``, ``jacrev``, ``vmap``.

A solve branches on numbers, which the tensors of a transform do not show. So to a transform the solve is one
operation, a custom autograd function that is given ordinary tensors. Its inputs are everything that ``f``
reads: the state, the arguments and the tensors that ``f`` captured, which one evaluation finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # type: ignore[attr-defined]
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from solvers.adjoints.checkpoints import Reads
from solvers.adjoints.implicit import Linearization, first_derivative, second_derivative
from solvers.adjoints.kinds import Adjoint, Implicit, OneStep, Phantom, lost, without_derivative
from solvers.core.layout import Layout
from solvers.core.modes import uncompiled
from solvers.core.problem import EnergyUpdate, Problem
from solvers.core.solution import AdjointReport, Solution, Tolerance, criterion


class _Captures(Reads):
    """Finds the tensors beside ``known`` that ``f`` reads and that a derivative may be asked of.

    Within, everything is computed with ordinary tensors, those of the first slice under ``vmap``.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {id(tensor) for tensor in known}

    def ordinary(self, tensor: Any) -> Any:
        """A copy of the ordinary tensor behind those of all transforms, as ``f`` may overwrite it."""
        if not isinstance(tensor, Tensor):
            return tensor
        while _functorch.is_functorch_wrapped_tensor(tensor):
            dim = _functorch.maybe_get_bdim(tensor) if _functorch.is_batchedtensor(tensor) else -1
            tensor = _functorch.get_unwrapped(tensor)
            tensor = tensor if dim < 0 else tensor.select(dim, 0)
        tensor = tensor.detach().clone()
        self.inside[id(tensor)] = tensor
        return tensor

    def seen(self, tensor: Tensor) -> Tensor:
        wrapped = _functorch.is_functorch_wrapped_tensor(tensor)
        if (wrapped or tensor.requires_grad) and id(tensor) not in self.known:
            self.found.setdefault(id(tensor), tensor)
        return self.ordinary(tensor) if wrapped else tensor


class _Swap(TorchFunctionMode):
    """Within, functions of torch get other tensors in the place of those with these identities."""

    def __init__(self, others: dict[int, Tensor]) -> None:
        super().__init__()
        self.others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (tuple(args), kwargs or {})
        args, kwargs = pytree.tree_map(lambda value: self.others.get(id(value), value), given)
        return func(*args, **kwargs)


class Swapped:
    """A function that reads other tensors in the place of those it captured."""

    def __init__(self, function: Any, others: dict[int, Tensor]) -> None:
        self.function, self.others = function, others
        self.symmetric = bool(getattr(function, "symmetric", False))

    def __call__(self, *args: Any) -> Any:
        with _Swap(self.others):
            return self.function(*args)


class SwappedUpdate(Swapped, EnergyUpdate):
    def joint(self, z: Any, *args: Any) -> Any:
        with _Swap(self.others):
            return self.function.joint(z, *args)


@dataclass(eq=False)
class Operation:
    """A call of ``fixed_point`` as a function of tensors: the state, arguments, mask, captured ones."""

    solve: Callable[..., Solution]  # fixed_point without a gradient
    adjoint: Adjoint | None
    tolerance: Tolerance | None
    compact: bool
    f: Any
    energy: Any
    inputs: tuple[Any, Any, Any]  # z0, args, mask
    report: AdjointReport = field(default_factory=AdjointReport)
    # What first_derivative takes, and the place of each source among the tensors; see _Attach.
    records: list[tuple[tuple[Any, Any], list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leaves, self.tree = pytree.tree_flatten(self.inputs)
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        reads = _Captures(self.tensors)
        z, args, _ = pytree.tree_map(reads.ordinary, self.inputs)
        with temporarily_clear_interpreter_stack(), torch.no_grad(), uncompiled(), reads:
            (self.f.joint if isinstance(self.f, EnergyUpdate) else self.f)(z, *args)
            if self.energy is not None:
                self.energy(z, *args)
        self.captured = list(reads.found.values())

    def parts(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """``f``, the energy, z0, args and mask that read ``tensors`` instead of those they captured."""
        others = dict(zip(map(id, self.captured), tensors[len(self.tensors) :], strict=True))
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        swap = SwappedUpdate if isinstance(self.f, EnergyUpdate) else Swapped
        energy = None if self.energy is None else Swapped(self.energy, others)
        return swap(self.f, others), energy, *pytree.tree_unflatten(leaves, self.tree)

    def placed(self, ticket: Tensor, found: Sequence[Any], like: Sequence[Tensor]) -> list[Tensor]:
        """The gradients ``found`` for the sources of a record among zeros for the other tensors."""
        results = [torch.zeros_like(tensor) for tensor in like]
        for place, gradient in zip(self.records[int(ticket)][1], found, strict=True):
            results[place] = results[place] if gradient is None else gradient
        return results


class _Sliced(torch.autograd.Function):
    """``vmap`` goes slice by slice, because weights may differ between slices."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:  # type: ignore[override]
        pairs = list(zip(inputs, in_dims, strict=True))
        each = [
            cls.apply(*(t if d is None else t.select(d, index) for t, d in pairs))
            for index in range(info.batch_size)
        ]
        stacked = tuple(map(torch.stack, zip(*each, strict=True)))
        return stacked, (0,) * len(stacked)


_FIELDS = ("value", "status", "residual", "residual_norm", "steps", "evaluations", "energy")


class _Solve(_Sliced):
    """The ``_FIELDS`` of the solution and its states, (B, D) each, without a derivative."""

    @staticmethod
    def forward(operation: Operation, *tensors: Tensor) -> tuple[Tensor, ...]:
        f, energy, z0, args, mask = operation.parts(tensors)
        solution = operation.solve(f, z0, args, energy=energy, mask=mask)
        vector = Layout.of(z0).vector
        solution.value = vector(solution.value)
        if solution.energy is None:  # every field is a tensor
            solution.energy = solution.residual.clone()
        states = [vector(state) for state in solution.states or ()]
        return *(getattr(solution, name) for name in _FIELDS), *states

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return (None,) * len(ctx.needs_input_grad)


class _Attach(_Sliced):
    """The value with its implicit derivative, and the number of the recording behind it.

    The recording is made now: when a derivative is asked for, the modules that ``f`` reads may hold
    other weights (``torch.func.functional_call``).
    """

    @staticmethod
    def forward(operation: Operation, value: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        adjoint: Any = operation.adjoint
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
            f, energy, z0, args, mask = operation.parts(leaves)
            problem = Problem.of(f, energy, z0, args, mask, operation.compact)
            linear = Linearization.at(problem, value)
        given, autocast = operation.tolerance, problem.autocast
        tolerance, _ = criterion(given, value.dtype, autocast, device=value.device)
        solve = adjoint.adjoint_solve(operation.report, tolerance, value.shape[0], None)
        places = {id(leaf): place for place, leaf in enumerate(leaves)}
        if linear.computed or not all(id(tensor) in places for tensor in linear.sources):
            raise RuntimeError(
                "f reads a tensor that requires a gradient, but torch.func does not see it (in a custom "
                "autograd function?): pass it in args"
            )
        operation.records.append(((linear, solve), [places[id(t)] for t in linear.sources]))
        return value.clone(), torch.tensor(len(operation.records) - 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.operation = inputs[0]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *inputs[2:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        value, ticket, *tensors = ctx.saved_tensors
        _, *found = _Gradient.apply(ctx.operation, ticket, cotangents[0], value, *tensors)
        return None, None, *found


class _Gradient(_Sliced):
    """``u = (I - J^T)^-1 cotangent``, and the gradients of the tensors."""

    @staticmethod
    def forward(operation: Operation, *inputs: Tensor) -> tuple[Tensor, ...]:
        ticket, cotangent, _, *tensors = inputs  # the third is the value
        with temporarily_clear_interpreter_stack():
            u, found = first_derivative(*operation.records[int(ticket)][0], cotangent)
        return u, *operation.placed(ticket, found, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.operation = inputs[0]
        ctx.mark_non_differentiable(output[0])
        ctx.save_for_backward(output[0], *inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        u, ticket, *upstream = ctx.saved_tensors
        return None, None, *_Second.apply(ctx.operation, ticket, u, *cotangents[1:], *upstream)


class _Second(_Sliced):
    """Gradients of :class:`_Gradient` with respect to the cotangent, the value and the tensors.

    These follow the cotangents of the tensors in ``inputs``, for a third derivative to be noticed.
    """

    @staticmethod
    def forward(operation: Operation, *inputs: Tensor) -> tuple[Tensor, ...]:
        ticket, u, *others = inputs
        record, places = operation.records[int(ticket)]
        cotangents = others[: len(others) // 2 - 1]
        with torch.no_grad(), temporarily_clear_interpreter_stack():
            found = second_derivative(*record, u, [cotangents[place] for place in places])
        along, by_value = (torch.zeros_like(u) if each is None else each for each in found[:2])
        return along, by_value, *operation.placed(ticket, found[2:], cotangents)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing to remember."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        raise RuntimeError(
            "third derivatives of an implicit fixed point are not implemented; use adjoint=Unrolled() "
            "outside of torch.func"
        )


def transformed_solution(
    solve: Callable[..., Solution], adjoint: Adjoint | None, tolerance: Tolerance | None, compact: bool,
    f: Callable[..., Any], energy: Callable[..., Tensor] | None, z0: Any, args: tuple[Any, ...], mask: Any,
) -> Solution:  # fmt: skip
    """One call of ``fixed_point``, whose arguments these are, with tensors of a transform.

    ``solve(f, z0, args, energy=..., mask=...)`` is ``fixed_point`` without a gradient.
    """
    layout = Layout.of(z0)
    operation = Operation(solve, adjoint, tolerance, compact, f, energy, (z0, args, mask))
    tensors = operation.tensors + operation.captured
    outputs = _Solve.apply(operation, *tensors)
    found: dict[str, Any] = dict(zip(_FIELDS, outputs, strict=False))
    states = outputs[len(_FIELDS) :]
    if energy is None and not isinstance(f, EnergyUpdate):
        found["energy"] = None
    value, near = found["value"], adjoint
    if isinstance(adjoint, Implicit):
        value, near = _Attach.apply(operation, value, *tensors)[0], adjoint.states or OneStep()
    if isinstance(near, (Phantom, OneStep)):
        problem = Problem.of(f, energy, z0, args, mask, compact)
        failed = lost(Solution(**found))
        states = [without_derivative(near.attach(problem, state), failed) for state in states]
        value = value if isinstance(adjoint, Implicit) else near.attach(problem, value)
        value = without_derivative(value, failed)
    found["value"] = layout.tree(value)
    found["states"] = tuple(layout.tree(state) for state in states) or None
    return Solution(**found, adjoint=operation.report)


def refuse_in_transform(adjoint: Adjoint | None, *, record: bool) -> None:
    """Raise where a transform cannot pass: forward mode, a recorded or an unrolled solve."""
    if any(level.key() == TransformType.Jvp for level in retrieve_all_functorch_interpreters()):
        raise NotImplementedError(
            "forward-mode differentiation through a fixed point is not implemented; use torch.func.grad, "
            "vjp or jacrev, and jacrev(jacrev(f)) instead of hessian(f)"
        )
    if record or not (adjoint is None or isinstance(adjoint, (Implicit, Phantom, OneStep))):
        raise RuntimeError(
            "adjoint must be Implicit(), Phantom(), OneStep() or None, or Unrolled() without callback, and "
            f"record=False, inside of torch.func's transforms; got {adjoint!r}, record={record}"
        )
