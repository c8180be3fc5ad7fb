"""Which tensors a function reads, and functions of torch that get others in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class Replacing(TorchFunctionMode):
    """Within the context, functions of torch get ``see(tensor)`` in the place of every tensor.

    What a custom ``autograd.Function`` reads is left alone, because torch does not show it to a mode.
    """

    def __init__(self, see: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._seen(args), **self._seen(kwargs or {}))

    def _replaced(self, tensor: Tensor) -> Tensor:
        return self.see(tensor)

    def _seen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._replaced(value)
        if type(value) in (list, tuple):
            return type(value)([self._seen(item) for item in value])
        if type(value) is dict:
            return {name: self._seen(item) for name, item in value.items()}
        return value


class Reads(Replacing):
    """Like :class:`Replacing`, except that tensors made within the context are left alone.

    They are collected in ``inside``. ``look(reads, tensor)`` replaces the others and may collect them in
    ``found``, both by ``id``. The dicts keep the tensors alive, so that no ``id`` is used again.
    """

    def __init__(self, look: Callable[[Reads, Tensor], Tensor], *inside: Tensor) -> None:
        super().__init__(lambda tensor: tensor)
        self.look = look  # without a reference to this object, which would be freed late
        self.inside = {id(tensor): tensor for tensor in inside}
        self.found: dict[int, Any] = {}

    def _replaced(self, tensor: Tensor) -> Tensor:
        return tensor if id(tensor) in self.inside else self.look(self, tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self.found:
                self.inside[id(leaf)] = leaf
        return result


def nodes_of(output: Tensor, start: int = 0) -> list[Any]:
    """Return the nodes of the graph of ``output``, without what follows nodes made before ``start``."""
    nodes: dict[Any, None] = {}
    stack = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            if node._sequence_nr() >= start:
                for following, _ in node.next_functions:
                    stack.append(following)
    return list(nodes)


def read_by(output: Tensor, inside: set[int], start: int = 0) -> tuple[list[Tensor], bool]:
    """Return the leaves of the graph of ``output``, and whether it goes on to nodes made before ``start``.

    Leaves whose ``id`` is in ``inside`` are left out.
    """
    leaves, computed = [], False
    for node in nodes_of(output, start):
        variable = getattr(node, "variable", None)
        if variable is None:
            computed |= node._sequence_nr() < start
        elif id(variable) not in inside:
            leaves.append(variable)
    return leaves, computed
