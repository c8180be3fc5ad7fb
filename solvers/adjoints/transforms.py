"""Fixed points under the transforms of ``torch.func``: ``grad``, ``vjp``, ``jacrev``, ``vmap``.

A solve branches on values, which are not available inside a transform. The solve is therefore a custom
autograd function whose body receives ordinary tensors. Its inputs are all tensors that ``f`` reads: the
state, the arguments and the tensors that ``f`` captures, which one evaluation detects.
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

from solvers.adjoints.implicit import (
    AdjointSolve,
    Linearization,
    first_derivative,
    second_derivative,
)
from solvers.adjoints.kinds import Adjoint, Implicit, OneStep, Phantom, lost, without_derivative
from solvers.core.layout import Layout
from solvers.core.modes import uncompiled
from solvers.core.problem import EnergyUpdate, Problem
from solvers.core.solution import AdjointReport, Goal, Solution, Tolerance


def captured_by(
    function: Callable[..., object], tree: Any, known: Sequence[Tensor]
) -> list[Tensor]:
    """Return the tensors other than ``known`` that ``function(*tree)`` reads and that may need gradients.

    The function is evaluated on ordinary tensors, the first slice along the dimension of ``vmap``.
    """
    reads = _Captures(known)
    plain = pytree.tree_map(lambda t: reads.numbers(t) if isinstance(t, Tensor) else t, tree)
    with temporarily_clear_interpreter_stack(), torch.no_grad(), uncompiled(), reads:
        function(*plain)
    return list(reads.found.values())


class _Captures(TorchFunctionMode):
    """Record the external tensors that an evaluation reads, and give it their values."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {id(tensor) for tensor in known}
        self.inside: dict[int, Tensor] = {}
        self.found: dict[int, Tensor] = {}

    def numbers(self, tensor: Tensor) -> Tensor:
        """Return a copy of the ordinary tensor below all transforms; ``f`` may overwrite the copy."""
        while _functorch.is_functorch_wrapped_tensor(tensor):
            dim = _functorch.maybe_get_bdim(tensor) if _functorch.is_batchedtensor(tensor) else -1
            tensor = _functorch.get_unwrapped(tensor)
            tensor = tensor if dim < 0 else tensor.select(dim, 0)
        tensor = tensor.detach().clone()
        self.inside[id(tensor)] = tensor
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(self._seen, (tuple(args), kwargs or {}))
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self.found:
                self.inside[id(leaf)] = leaf
        return result

    def _seen(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in self.inside:
            return value
        wrapped = _functorch.is_functorch_wrapped_tensor(value)
        if not wrapped and not value.requires_grad:
            return value
        if id(value) not in self.known:
            self.found.setdefault(id(value), value)
        return self.numbers(value) if wrapped else value


class Swapped:
    """A function whose captured tensors are replaced by others."""

    def __init__(
        self, function: Callable[..., Any], pairs: dict[int, tuple[Tensor, Tensor]]
    ) -> None:
        self.function, self.pairs = function, pairs
        self.symmetric = bool(getattr(function, "symmetric", False))

    def __call__(self, *args: Any) -> Any:
        with _Swap(self.pairs):
            return self.function(*args)


class SwappedUpdate(Swapped, EnergyUpdate):
    function: Any

    def joint(self, z: Any, *args: Any) -> Any:
        with _Swap(self.pairs):
            return self.function.joint(z, *args)


class _Swap(TorchFunctionMode):
    def __init__(self, pairs: dict[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.pairs = pairs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._replace(args), **self._replace(kwargs or {}))

    def _replace(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.pairs[id(value)][1] if id(value) in self.pairs else value
        if type(value) in (list, tuple):
            return type(value)(self._replace(item) for item in value)
        if type(value) is dict:
            return {name: self._replace(item) for name, item in value.items()}
        return value


Record = tuple[Linearization, AdjointSolve]


@dataclass(eq=False)
class Operation:
    """A solve as a function of a flat list of tensors: state, arguments, mask and captured tensors."""

    f: Callable[..., Any]
    energy: Callable[..., Tensor] | None
    leaves: list[Any]  # of (z0, args, mask); its tensors are the first of the list
    tree: Any  # their structure
    captured: list[Tensor]  # as f knows them
    run: Callable[..., Solution]  # (f, energy, z0, args, mask), without transforms and gradients
    record: Callable[..., Record]  # (f, energy, z0, args, mask, value)
    compact: bool = True  # f knows no batch size of its own
    records: list[tuple[Record, list[int]]] = field(default_factory=list)  # see _Attach

    def parts(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Return ``f``, the energy, z0, args and mask with ``tensors`` in place of the captured ones."""
        number = len(tensors) - len(self.captured)
        own = zip(self.captured, tensors[number:], strict=True)
        pairs = {id(tensor): (tensor, given) for tensor, given in own}
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        swap = SwappedUpdate if isinstance(self.f, EnergyUpdate) else Swapped
        energy = None if self.energy is None else Swapped(self.energy, pairs)
        return swap(self.f, pairs), energy, *pytree.tree_unflatten(leaves, self.tree)


def _each(function: Any, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
    """Implement ``vmap`` slice by slice, because weights may differ between slices."""
    slices = []
    for index in range(info.batch_size):
        pairs = zip(inputs, in_dims, strict=True)
        slices.append(function.apply(*(t if d is None else t.select(d, index) for t, d in pairs)))
    stacked = tuple(torch.stack(parts) for parts in zip(*slices, strict=True))
    return stacked, (0,) * len(stacked)


_FIELDS = ("value", "status", "residual", "residual_norm", "steps", "evaluations", "energy")


class _Solve(torch.autograd.Function):
    """Compute the ``_FIELDS`` of the solution and its states, (B, D) each, without a derivative."""

    @staticmethod
    def forward(operation: Operation, *tensors: Tensor) -> tuple[Tensor, ...]:
        solution = operation.run(*operation.parts(tensors))
        energy = solution.residual if solution.energy is None else solution.energy
        found = [getattr(solution, name) for name in _FIELDS[:-1]]
        return *found, energy.clone(), *(solution.states or ())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """Solve all slices as one batch if they share everything else and f allows it, or one by one."""
        operation, *tensors = inputs
        dims, number = in_dims[1:], len(tensors) - len(operation.captured)
        shared = all(d is None for d in dims[number:])
        given = list(zip(tensors[:number], dims[:number], strict=True))
        scalars = any(d is not None and t.dim() == 1 for t, d in given)
        if not (shared and operation.compact) or scalars:
            return _each(_Solve, info, in_dims, operation, *tensors)
        size = info.batch_size

        def fold(tensor: Tensor, dim: int | None) -> Tensor:
            if dim is None and tensor.dim() == 0:
                return tensor
            whole = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            return whole.flatten(0, 1)

        folded = [fold(t, d) for t, d in given]
        found = _Solve.apply(operation, *folded, *tensors[number:])
        parts = tuple(t.unflatten(0, (size, t.shape[0] // size)) for t in found)
        return parts, (0,) * len(parts)


class _Attach(torch.autograd.Function):
    """Return the value with its implicit derivative, and the number of its recording.

    The recording is made in the forward pass, because the modules that ``f`` reads may have other weights
    in the backward pass (``torch.func.functional_call``).
    """

    @staticmethod
    def forward(operation: Operation, value: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
            record = operation.record(*operation.parts(leaves), value)
        places = {id(leaf): place for place, leaf in enumerate(leaves)}
        inputs, computed = record[0].sources, record[0].computed
        if computed or not all(id(tensor) in places for tensor in inputs):
            raise RuntimeError(
                "f reads a tensor that requires grad and that torch.func cannot track (inside a custom "
                "torch.autograd.Function?): pass it in args"
            )
        operation.records.append((record, [places[id(tensor)] for tensor in inputs]))
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

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _each(_Attach, info, in_dims, *inputs)


class _Gradient(torch.autograd.Function):
    """Compute ``u = (I - J^T)^-1 cotangent`` and the gradients of the tensors."""

    @staticmethod
    def forward(
        operation: Operation, ticket: Tensor, cotangent: Tensor, value: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        record, places = operation.records[int(ticket)]
        with temporarily_clear_interpreter_stack():
            u, found = first_derivative(*record, cotangent)
        return u, *_placed(places, found, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.operation = inputs[0]
        ctx.mark_non_differentiable(output[0])
        ctx.save_for_backward(output[0], *inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        u, ticket, *upstream = ctx.saved_tensors
        return None, None, *_Second.apply(ctx.operation, ticket, u, *cotangents[1:], *upstream)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _each(_Gradient, info, in_dims, *inputs)


def _placed(
    places: list[int], found: Sequence[Tensor | None], like: Sequence[Tensor]
) -> list[Tensor]:
    """Return gradients like ``like``: those of ``found`` at ``places`` and zero elsewhere."""
    results = [torch.zeros_like(tensor) for tensor in like]
    for place, gradient in zip(places, found, strict=True):
        if gradient is not None:
            results[place] = gradient
    return results


class _Second(torch.autograd.Function):
    """Gradients of :class:`_Gradient` with respect to the cotangent, the value and the tensors.

    ``inputs`` also contains the cotangents of the tensors, so that a third derivative is detected.
    """

    @staticmethod
    def forward(
        operation: Operation, ticket: Tensor, u: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        record, places = operation.records[int(ticket)]
        cotangents = inputs[: len(inputs) // 2 - 1]
        chosen = tuple(cotangents[place] for place in places)
        with torch.no_grad(), temporarily_clear_interpreter_stack():
            along, by_value, *found = second_derivative(*record, u, chosen)
        assert along is not None
        by_value = torch.zeros_like(u) if by_value is None else by_value
        return along, by_value, *_placed(places, found, cotangents)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing to remember."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        raise RuntimeError(
            "third derivatives of an implicit fixed point are not implemented; use adjoint=Unrolled() "
            "outside torch.func"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _each(_Second, info, in_dims, *inputs)


def transformed_solution(
    solve: Callable[..., Solution], adjoint: Adjoint | None, tolerance: Tolerance | None, compact: bool,
    f: Callable[..., Any], energy: Callable[..., Tensor] | None, z0: Any, args: tuple[Any, ...], mask: Any,
) -> Solution:  # fmt: skip
    """Return the solution of a call of ``fixed_point`` inside a transform.

    Args:
        solve: ``fixed_point`` without a gradient, ``solve(f, z0, args, energy=..., mask=...)``.
        adjoint, tolerance, compact, f, energy, z0, args, mask: arguments of the call.
    """
    report, layout = AdjointReport(), Layout.of(z0)

    def run(f: Any, energy: Any, z0: Any, args: Any, mask: Any) -> Solution:
        solution = solve(f, z0, args, energy=energy, mask=mask)
        vector = Layout.of(z0).vector
        solution.value = vector(solution.value)
        if solution.states is not None:
            solution.states = tuple(vector(state) for state in solution.states)
        return solution

    def recorded(f: Any, energy: Any, z0: Any, args: Any, mask: Any, value: Tensor) -> Record:
        assert isinstance(adjoint, Implicit)
        problem = Problem.of(f, energy, z0, args, mask, compact)
        chosen = Goal(tolerance, value.dtype, problem.autocast, value.device).tolerance
        solve = adjoint.adjoint_solve(report, chosen, value.shape[0], None)
        return Linearization.at(problem, value), solve

    def evaluate(z0: Any, *args: Any) -> object:
        joint = f.joint if isinstance(f, EnergyUpdate) else f
        return joint(z0, *args), None if energy is None else energy(z0, *args)

    leaves, tree = pytree.tree_flatten((z0, args, mask))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    captured = captured_by(evaluate, (z0, *args), tensors)
    operation = Operation(f, energy, leaves, tree, captured, run, recorded, compact)
    outputs = _Solve.apply(operation, *tensors, *captured)
    found: dict[str, Any] = dict(zip(_FIELDS, outputs, strict=False))
    states = outputs[len(_FIELDS) :]
    if energy is None and not isinstance(f, EnergyUpdate):
        found["energy"] = None
    near = adjoint
    if isinstance(near, Implicit):
        found["value"] = _Attach.apply(operation, found["value"], *tensors, *captured)[0]
        near = near.states or OneStep()
    if isinstance(near, (Phantom, OneStep)):
        problem = Problem.of(f, energy, z0, args, mask, compact)
        gone = lost(Solution(**found))
        states = [without_derivative(near.attach(problem, state), gone) for state in states]
        if not isinstance(adjoint, Implicit):
            found["value"] = near.attach(problem, found["value"])
        found["value"] = without_derivative(found["value"], gone)
    found["value"] = layout.tree(found["value"])
    found["states"] = tuple(layout.tree(state) for state in states) or None
    return Solution(**found, adjoint=report)


def refuse_in_transform(adjoint: Adjoint | None, *, record: bool) -> None:
    """Raise for forward mode, and for recorded and unrolled solves inside a transform."""
    if any(level.key() == TransformType.Jvp for level in retrieve_all_functorch_interpreters()):
        raise NotImplementedError(
            "forward-mode differentiation through a fixed point is not implemented; use reverse mode "
            "(torch.func.grad, vjp, jacrev; jacrev(jacrev(f)) instead of hessian(f))"
        )
    if record or not (adjoint is None or isinstance(adjoint, (Implicit, Phantom, OneStep))):
        raise RuntimeError(
            "inside torch.func transforms fixed_point needs record=False and adjoint=Implicit(), "
            "Phantom(), OneStep(), None or Unrolled() without a callback, got "
            f"adjoint={adjoint!r}, record={record}"
        )
