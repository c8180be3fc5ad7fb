"""Evaluations of an unrolled solve that are repeated in the backward pass, and the tensors that f reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from solvers.core.context import CONTEXT, constant_weights, sequence_number, within
from solvers.core.modes import uncompiled
from solvers.core.validate import version_of


def read_by(output: Tensor, inside: set[int], start: int = 0) -> tuple[list[Tensor], bool]:
    """Leaves of the graph of ``output``, and whether it goes on to nodes made before ``start``."""
    leaves: list[Tensor] = []
    computed, seen, stack = False, set[Any](), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) not in inside:
                leaves.append(variable)
        elif node._sequence_nr() < start:
            computed = True
        else:
            for following, _ in node.next_functions:
                stack.append(following)
    return leaves, computed


class Reads(TorchFunctionMode):
    """Within, ``seen`` gets every tensor that a function of torch takes and that was not made within."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.inside = {id(tensor): tensor for tensor in given}  # kept, so that no id is used again
        self.found: dict[int, Any] = {}

    def seen(self, tensor: Tensor) -> Tensor:
        """The tensor that the function gets instead."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def see(value: Any) -> Any:
            outside = isinstance(value, Tensor) and id(value) not in self.inside
            return self.seen(value) if outside else value

        args, kwargs = pytree.tree_map(see, (tuple(args), kwargs or {}))
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self.found:
                self.inside[id(leaf)] = leaf
        return result


class _Versions(Reads):
    """Finds the tensors that an evaluation at ``z`` reads; all parameters must be ``known``, if given."""

    def __init__(self, z: Tensor, known: WeakTensorKeyDictionary | None = None) -> None:
        super().__init__(z)
        self.start, self.known = sequence_number(), known

    def seen(self, tensor: Tensor) -> Tensor:
        node = tensor.grad_fn
        if node is None or node._sequence_nr() < self.start:
            self.found.setdefault(id(tensor), (tensor, version_of(tensor)))
            # Other tensors may be results that a nested backward pass has made.
            if (
                self.known is not None
                and isinstance(tensor, Parameter)
                and tensor not in self.known
            ):
                raise RuntimeError(_CHANGED.format(tuple(tensor.shape), "it did not read in"))
        return tensor


_CHANGED = (
    "f reads a tensor of shape {} that {} the forward pass (an optimizer's step, a replaced weight, or the "
    "end of torch.func.functional_call?): call backward before, or use Unrolled() without checkpoints"
)


class Checkpoints:
    """Evaluations of one solve; a repetition must find everything as it was in the forward pass.

    The first evaluation of each batch size finds the tensors that ``f`` reads. A backward pass raises
    RuntimeError if one of them has changed in place or if ``f`` reads another parameter.
    """

    def __init__(self, args: tuple[Any, ...], modules: list[nn.Module]) -> None:
        self.modules = modules  # that f may call
        leaves = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        self.read = {id(leaf): (leaf, version_of(leaf)) for leaf in leaves}
        self.known = WeakTensorKeyDictionary()  # its keys: tensors that f reads or keeps
        self.batch = -1  # samples of the latest evaluation

    def __call__(self, function: Callable[[Tensor], Any], z: Tensor) -> Any:
        """``function(z)``, recorded."""
        weights = CONTEXT.weights
        assert weights is not None
        weights.checkpointed = True
        watched, self.batch = z.shape[0] != self.batch, z.shape[0]
        reads, calls, noted = _Versions(z), 0, False

        def run(z: Tensor) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                self._check()
            watch: Any = reads if calls == 1 and watched else nullcontext()
            if calls > 1 and noted:  # else f itself takes a derivative, and is being watched
                watch = _Versions(z, self.known)
            again = calls > 1 and constant_weights(self.modules, repeated=True)
            # A compiler would take the watch for a part of the evaluation.
            uncompiled_if_watched = uncompiled() if watched else nullcontext()
            with again or nullcontext(), uncompiled_if_watched, within(weights=weights), watch:
                return function(z)

        output = checkpoint(run, z, use_reentrant=False)
        if watched:
            self._note(reads, output)
            noted = True
        return output

    def _note(self, reads: Reads, output: Any) -> None:
        """Remember the tensors that were read, without those that the evaluation changed (a counter)."""
        found = self.read | reads.found
        inside = {number for number, tensor in reads.inside.items() if tensor.is_leaf}
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                found |= {id(t): (t, version_of(t)) for t in read_by(leaf, inside)[0]}
        for tensor in (*reads.inside.values(), *(t for t, _ in found.values())):
            self.known[tensor] = None
        reads.inside, reads.found = {}, {}
        self.read = {n: pair for n, pair in found.items() if pair[1] == version_of(pair[0])}

    def _check(self) -> None:
        for tensor, version in self.read.values():
            if version_of(tensor) != version:
                raise RuntimeError(
                    _CHANGED.format(tuple(tensor.shape), "was changed in place after")
                )
