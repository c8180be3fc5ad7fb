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
from solvers.core.solution import AdjointReport, Solution, Tolerance, criterion


class _Captures(TorchFunctionMode):
    """Finds the tensors that functions read beside ``known`` and that a derivative may be asked of.

    The evaluation is an ordinary one, of the first slice of everything that ``vmap`` maps over.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {id(tensor) for tensor in known}
        self.inside: dict[int, Tensor] = {}
        self.found: dict[int, Tensor] = {}

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
        if (wrapped or value.requires_grad) and id(value) not in self.known:
            self.found.setdefault(id(value), value)
        return self.ordinary(value) if wrapped else value


class _Swap(TorchFunctionMode):
    """Within, functions of torch get other tensors in the place of those with these identities."""

    def __init__(self, others: dict[int, Tensor]) -> None:
        super().__init__()
        self.others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        swap = lambda value: self.others.get(id(value), value)  # noqa: E731
        args, kwargs = pytree.tree_map(swap, (tuple(args), kwargs or {}))
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


Record = tuple[Linearization, AdjointSolve]


@dataclass(eq=False)
class Operation:
    """A solve as a function of a flat list of tensors: the state, arguments, mask, captured ones."""

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
        """``f``, the energy, z0, args and mask that read ``tensors`` instead of those they captured."""
        number = len(tensors) - len(self.captured)
        others = dict(zip(map(id, self.captured), tensors[number:], strict=True))
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        swap = SwappedUpdate if isinstance(self.f, EnergyUpdate) else Swapped
        energy = None if self.energy is None else Swapped(self.energy, others)
        return swap(self.f, others), energy, *pytree.tree_unflatten(leaves, self.tree)


class _Sliced(torch.autograd.Function):
    """``vmap`` goes slice by slice, as weights that differ between slices need it."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:  # type: ignore[override]
        pairs = list(zip(inputs, in_dims, strict=True))
        slices = [
            cls.apply(*(t if d is None else t.select(d, index) for t, d in pairs))
            for index in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(parts) for parts in zip(*slices, strict=True))
        return stacked, (0,) * len(stacked)


_FIELDS = ("value", "status", "residual", "residual_norm", "steps", "evaluations", "energy")


class _Solve(_Sliced):
    """The ``_FIELDS`` of the solution and its states, (B, D) each, without a derivative."""

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

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:  # type: ignore[override]
        """One solve of all slices where f knows no batch size and they share all else; or one each."""
        operation, *tensors = inputs
        number, size = len(tensors) - len(operation.captured), info.batch_size
        given = list(zip(tensors[:number], in_dims[1 : number + 1], strict=True))
        shared = all(d is None for d in in_dims[number + 1 :])
        if not (shared and operation.compact) or any(
            d is not None and t.dim() == 1 for t, d in given
        ):
            return super().vmap(info, in_dims, *inputs)

        def fold(tensor: Tensor, dim: int | None) -> Tensor:
            if dim is None and tensor.dim() == 0:
                return tensor
            whole = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            return whole.flatten(0, 1)

        found = cls.apply(operation, *(fold(t, d) for t, d in given), *tensors[number:])
        parts = tuple(t.unflatten(0, (size, t.shape[0] // size)) for t in found)
        return parts, (0,) * len(parts)


class _Attach(_Sliced):
    """The value with its implicit derivative, and the number of the recording behind it.

    The recording is made now: when a derivative is asked for, the modules that ``f`` reads may hold
    other weights (``torch.func.functional_call``).
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
                "f reads a tensor that requires a gradient by ways that torch.func does not see (in a "
                "custom autograd function?): pass it in args"
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


class _Gradient(_Sliced):
    """``u = (I - J^T)^-1 cotangent``, and the gradients of the tensors."""

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


def _placed(
    places: list[int], found: Sequence[Tensor | None], like: Sequence[Tensor]
) -> list[Tensor]:
    """What was ``found`` for tensors at their ``places`` among others, for which it is zero."""
    results = [torch.zeros_like(tensor) for tensor in like]
    for place, gradient in zip(places, found, strict=True):
        if gradient is not None:
            results[place] = gradient
    return results


class _Second(_Sliced):
    """Gradients of :class:`_Gradient` by the cotangent, the value and the tensors.

    These follow the cotangents of the tensors in ``inputs``, for a third derivative to be noticed.
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
            "outside of torch.func"
        )


def transformed_solution(
    solve: Callable[..., Solution], adjoint: Adjoint | None, tolerance: Tolerance | None, compact: bool,
    f: Callable[..., Any], energy: Callable[..., Tensor] | None, z0: Any, args: tuple[Any, ...], mask: Any,
) -> Solution:  # fmt: skip
    """One call of ``fixed_point``, whose arguments these are, with tensors of a transform.

    ``solve(f, z0, args, energy=..., mask=...)`` is ``fixed_point`` without a gradient.
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
        chosen, _ = criterion(tolerance, value.dtype, problem.autocast, device=value.device)
        solve = adjoint.adjoint_solve(report, chosen, value.shape[0], None)
        return Linearization.at(problem, value), solve

    leaves, tree = pytree.tree_flatten((z0, args, mask))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    reads = _Captures(tensors)
    plain = pytree.tree_map(reads.ordinary, (z0, *args))
    with temporarily_clear_interpreter_stack(), torch.no_grad(), uncompiled(), reads:
        (f.joint if isinstance(f, EnergyUpdate) else f)(*plain)
        _ = energy and energy(*plain)
    captured = list(reads.found.values())
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
    """Raise where a transform cannot pass: forward mode, a recorded or an unrolled solve."""
    if any(level.key() == TransformType.Jvp for level in retrieve_all_functorch_interpreters()):
        raise NotImplementedError(
            "forward-mode differentiation through a fixed point is not implemented; use reverse mode "
            "(torch.func.grad, vjp, jacrev; jacrev(jacrev(f)) instead of hessian(f))"
        )
    if record or not (adjoint is None or isinstance(adjoint, (Implicit, Phantom, OneStep))):
        raise RuntimeError(
            "inside of torch.func's transforms fixed_point needs adjoint=Implicit(), Phantom(), "
            "OneStep() or None, or Unrolled() without callback, and record=False; got "
            f"adjoint={adjoint!r}, record={record}"
        )
