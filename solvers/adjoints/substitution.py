"""What a function reads inside the transforms of ``torch.func``, and other tensors in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # type: ignore[attr-defined]
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from solvers.core.modes import uncompiled
from solvers.core.problem import EnergyUpdate


def captured_by(
    function: Callable[..., object], tree: Any, known: Sequence[Tensor]
) -> list[Tensor]:
    """Tensors that ``function(*tree)`` reads beside ``known`` and a derivative may be asked of.

    The evaluation is an ordinary one, of the first slice of what ``vmap`` maps over.
    """
    reads = _Captures(known)
    plain = pytree.tree_map(lambda t: reads.numbers(t) if isinstance(t, Tensor) else t, tree)
    with temporarily_clear_interpreter_stack(), torch.no_grad(), uncompiled(), reads:
        function(*plain)
    return list(reads.found.values())


class _Captures(TorchFunctionMode):
    """Notes the tensors from outside of an evaluation, and lets it have their numbers."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {id(tensor) for tensor in known}
        self.inside: dict[int, Tensor] = {}
        self.found: dict[int, Tensor] = {}

    def numbers(self, tensor: Tensor) -> Tensor:
        """A copy of the ordinary tensor behind those of all transforms, as ``f`` may overwrite it."""
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
    """A function that reads other tensors in the place of those it captured."""

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
