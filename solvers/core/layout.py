"""Pytrees of batched tensors as one matrix (B, D), and checks of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_LEAF = pytree.tree_structure(0)


def leaves_of(tree: Any) -> list[Any]:
    """``pytree.tree_leaves``, at once for a tensor on its own and for tuples of tensors."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is not tuple:
        return pytree.tree_leaves(tree)
    found: list[Any] = []
    parts = list(tree[::-1])
    while parts:
        part = parts.pop()
        if part is None or isinstance(part, Tensor):
            found.append(part)
        elif type(part) is tuple:
            parts += part[::-1]
        else:
            found += pytree.tree_leaves(part)
    return found


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the leaves that are tensors."""
    return list(filter(torch.is_tensor, leaves_of(tree)))


def map_tensors(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """``pytree.tree_map`` for functions of tensors, at once for tuples of them; other leaves pass as is."""
    if isinstance(tree, Tensor):
        return function(tree, *others)
    if type(tree) is tuple:
        return tuple([map_tensors(function, *parts) for parts in zip(tree, *others, strict=True)])
    if tree is None:
        return None

    def mapped(leaf: Any, *same: Any) -> Any:
        return function(leaf, *same) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(mapped, tree, *others)


@dataclass(frozen=True)
class Layout:
    """How a pytree of tensors (B, ...) lies in a matrix (B, D).

    ``vector`` and ``tree`` are inverse to each other for any batch size, so the same layout serves
    a batch from which finished samples have left.
    """

    spec: Any
    shapes: tuple[torch.Size, ...]  # per leaf, without the batch dimension
    dtypes: tuple[torch.dtype, ...]
    dtype: torch.dtype  # of the matrix: the leaves' common one
    last: tuple[bool, ...]  # leaves whose channels, dim 1, lie last in memory
    sizes: tuple[int, ...]  # numbers of each leaf in a row of the matrix; empty for one leaf
    # Without the batch dimension, of a state that is one tensor in the usual order of memory.
    only: torch.Size | None

    @classmethod
    def of(cls, state: Any, name: str = "z0", *, empty: bool = True) -> Layout:
        """Read the layout of ``state``; raises TypeError/ValueError that speak of ``name``.

        ``empty``: it may have no sample, or no number in a sample.
        """
        leaves, spec = ([state], _LEAF) if isinstance(state, Tensor) else pytree.tree_flatten(state)
        _check_leaves(leaves, name, empty)
        dtypes = tuple([t.dtype for t in leaves])
        dtype, shapes = reduce(torch.promote_types, dtypes), tuple([t.shape[1:] for t in leaves])
        last: tuple[bool, ...] = tuple(map(_channels_last, leaves))
        only = shapes[0] if spec.is_leaf() and not last[0] else None
        sizes = tuple(map(prod, shapes)) if len(shapes) > 1 else ()
        return cls(spec, shapes, dtypes, dtype, last, sizes, only)

    def scalars(self, batch: int) -> str:
        """What a message says where a vector (B,) may have been meant as one problem."""
        if self.shapes != ((),) or batch == 1:
            return ""
        return f" (z0 is {batch} problems with one unknown; z0[None] is one with {batch})"

    def vector(self, state: Any) -> Tensor:
        """Pytree -> (B, D); a single tensor is viewed, not copied, where its strides allow."""
        leaves = [state] if isinstance(state, Tensor) else pytree.tree_leaves(self.ordered(state))
        parts = []
        for leaf, moved in zip(leaves, self.last, strict=True):
            leaf = leaf.movedim(1, -1) if moved else leaf
            parts.append(leaf.reshape(leaf.shape[0], prod(leaf.shape[1:])))
        return parts[0] if len(parts) == 1 else torch.cat([t.to(self.dtype) for t in parts], 1)

    def ordered(self, state: Any) -> Any:
        """``state`` with the keys of its dicts in this layout's order."""
        if isinstance(state, Tensor) or pytree.tree_structure(state) == self.spec:
            return state
        return _reorder(pytree.tree_unflatten(list(self.shapes), self.spec), state)

    def tree(self, vector: Tensor) -> Any:
        """(B, D) -> pytree, each leaf in its own shape and, of several leaves, dtype."""
        if self.only is not None:
            return vector.reshape(vector.shape[0], *self.only)
        parts, leaves = vector.split([prod(shape) for shape in self.shapes], dim=1), []
        kinds = zip(parts, self.shapes, self.dtypes, self.last, strict=True)
        for part, shape, dtype, moved in kinds:
            part = part if len(parts) == 1 else part.to(dtype)
            leaf = part.reshape(vector.shape[0], *(shape[1:] + shape[:1] if moved else shape))
            leaves.append(leaf.movedim(-1, 1) if moved else leaf)
        return pytree.tree_unflatten(leaves, self.spec)

    def vector_map(self, function: Callable[[Any], Any], name: str) -> Callable[[Tensor], Tensor]:
        """``function``, which maps pytrees to their like, as a map of matrices (n, D) of any floating dtype.

        Messages about its result speak of ``name``. The map records no gradient.
        """

        def mapped(vectors: Tensor) -> Tensor:
            own = vectors.to(self.dtype)
            version = None if own.is_inference() else own._version
            sent = self.tree(own)
            received = self.ordered(function(sent))
            if version is not None and own._version != version:
                raise ValueError(
                    f"{name} must not modify its argument in place: return a new tensor"
                )
            check_like(received, sent, f"{name}(v)", "v")
            return self.vector(received).detach().to(vectors.dtype)

        return mapped

    def mask_vector(self, mask: Any, like: Tensor) -> Tensor:
        """The mask (B, D) bool of a mask (B, N), or of a pytree of them, for the batch of ``like`` (B, ...).

        A pytree has the structure of the state, with None for leaves that count whole. One mask is for the
        leaves of tokens, (B, N, ...) with at least three dimensions; a vector (B, N) next to them may be of
        N features. Only where there is no such leaf, those of shape (B, N) are masked.

        Raises:
            TypeError, ValueError: if the mask does not fit.
        """
        masks: list[Any] = [mask]
        if not isinstance(mask, Tensor):
            masks, spec = pytree.tree_flatten(self.ordered(mask), is_leaf=lambda part: part is None)
            if spec != self.spec or all(leaf is None for leaf in masks):
                raise TypeError(
                    "mask must be a bool tensor (B, N), or a pytree of such tensors and None with the "
                    f"structure of z0, got {mask!r}"
                )
        for leaf in masks:
            if leaf is None:
                continue
            if not isinstance(leaf, Tensor) or leaf.dtype != torch.bool or leaf.dim() != 2:
                raise TypeError(f"mask must be a bool tensor (B, N), got {leaf!r}")
            check_batched(leaf, "mask", len(like), like.device, "z0", "f")
        shapes = [(len(like), *shape) for shape in self.shapes]
        if isinstance(mask, Tensor):
            fitting = [shape[1:2] == mask.shape[1:] for shape in shapes]
            tokens = [fits and len(shape) > 2 for fits, shape in zip(fitting, shapes, strict=True)]
            masks = [mask if takes else None for takes in (tokens if any(tokens) else fitting)]
            if not any(fitting):
                raise ValueError(
                    f"mask has {mask.shape[1]} tokens, but no leaf of z0 does: {shapes}"
                )
        parts = []
        for leaf, shape in zip(masks, shapes, strict=True):
            part = torch.ones(shape, dtype=torch.bool, device=like.device)
            if leaf is not None:
                if shape[1:2] != leaf.shape[1:]:
                    raise ValueError(
                        f"mask has {leaf.shape[1]} tokens, but its leaf of z0 has shape {shape}"
                    )
                part = part & leaf.reshape(*leaf.shape, *([1] * (len(shape) - 2)))
            parts.append(part)
        return replace(self, dtype=torch.bool).vector(pytree.tree_unflatten(parts, self.spec))


def _channels_last(tensor: Tensor) -> bool:
    usual = tensor.dim() <= 3 or tensor.is_contiguous()
    return not usual and tensor.movedim(1, -1).is_contiguous()


def _reorder(template: Any, state: Any) -> Any:
    """Follow the template into dicts with the same keys and sequences of the same length."""
    if isinstance(template, torch.Size):
        return state
    if isinstance(template, dict) and isinstance(state, dict) and template.keys() == state.keys():
        return {key: _reorder(part, state[key]) for key, part in template.items()}
    sequence = type(state) in (list, tuple) and type(template) is type(state)
    if sequence and len(template) == len(state):
        return type(state)(_reorder(a, b) for a, b in zip(template, state, strict=True))
    return state


def _check_leaves(leaves: list[Any], name: str, empty: bool) -> None:
    """Raise unless every leaf is a floating tensor, of one non-zero batch size, on one device."""
    if not leaves:
        raise ValueError(f"{name} must contain at least one tensor, got an empty pytree")
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name} must be a tensor or a pytree of tensors, got {type(leaf)}")
        if not leaf.is_floating_point():
            hint = "; use torch.view_as_real on it and inside f" if leaf.is_complex() else ""
            raise TypeError(f"{name} must have a floating-point dtype, got {leaf.dtype}{hint}")
        if leaf.dim() == 0:
            raise ValueError(f"{name} must have a batch dimension (B, ...), got a 0-d tensor")
    first = leaves[0]
    for leaf in leaves:
        if leaf.shape[0] != first.shape[0]:
            sizes = [t.shape[0] for t in leaves]
            raise ValueError(f"the leaves of {name} must have one batch size, got {sizes}")
        if leaf.device != first.device:
            devices = sorted({str(t.device) for t in leaves})
            raise ValueError(f"the leaves of {name} must be on one device, got {devices}")
    if empty:
        return
    if first.shape[0] == 0:
        raise ValueError(f"{name} must contain at least one sample, got batch size 0")
    if not sum(map(Tensor.numel, leaves)):
        raise ValueError(f"{name} must contain at least one number per sample, got none")


def check_args(args: Any, batch: int, device: torch.device, like: str, home: str) -> None:
    """Raise unless ``args`` is a tuple of pytrees that pass :func:`check_batched`."""
    if not isinstance(args, tuple):
        raise TypeError(f"args must be a tuple of inputs, got {type(args)}")
    for position, argument in enumerate(args):
        check_batched(argument, f"args[{position}]", batch, device, like, home)


def check_batched(
    argument: Any, name: str, batch: int, device: torch.device, like: str, home: str
) -> None:
    """Raise ValueError unless tensors of a pytree have the batch size and device of ``like``.

    The message sends tensors that all samples share to the function ``home``.
    """
    for leaf in leaves_of(argument):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            continue
        if leaf.shape[0] != batch:
            raise ValueError(
                f"{name} must have the batch size of {like}, {batch}, along dim 0, got shape "
                f"{tuple(leaf.shape)}; close over tensors shared by all samples in {home}"
            )
        if leaf.device != device:
            raise ValueError(f"{name} must be on {device} like {like}, got {leaf.device}")


def check_like(tree: Any, like: Any, name: str, of: str, *, cast: bool = False) -> None:
    """Raise unless ``tree`` has the structure, shapes, dtypes and device of ``like``, called ``of``.

    ``cast``: it may have another floating-point dtype.
    """
    if not (isinstance(tree, Tensor) and isinstance(like, Tensor)):
        came, wanted = pytree.tree_structure(tree), pytree.tree_structure(like)
        if came != wanted:
            raise TypeError(f"{name} must have the structure of {of}, {wanted}, got {came}")
    errors = {"shape": ValueError, "dtype": TypeError, "device": ValueError}
    for leaf, other in zip(leaves_of(tree), leaves_of(like), strict=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name} must hold tensors like {of}, got {type(leaf)}")
        for attribute, error in errors.items():
            came, wanted = getattr(leaf, attribute), getattr(other, attribute)
            free = cast and attribute == "dtype" and leaf.is_floating_point()
            if came != wanted and not free:
                came, wanted = (tuple(x) if attribute == "shape" else x for x in (came, wanted))
                raise error(f"{name} must have the {attribute} of {of}, {wanted}, got {came}")


def take(tree: Any, index: Tensor, batch: int) -> Any:
    """Rows ``index`` of every tensor of ``tree`` whose first dimension is ``batch``.

    Other leaves (numbers, None, tensors of another length) pass unchanged. A tensor that stands at
    several places is copied once.
    """
    taken: dict[int, Tensor] = {}

    def rows(leaf: Tensor) -> Tensor:
        if leaf.dim() == 0 or leaf.shape[0] != batch:
            return leaf
        if id(leaf) not in taken:
            taken[id(leaf)] = leaf.index_select(0, index)
        return taken[id(leaf)]

    return map_tensors(rows, tree)
