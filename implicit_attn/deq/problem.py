"""What a layer hands to :func:`solvers.fixed_point`: checked inputs, what is prepared, state and function.

In the order in which ``DEQ.solve`` needs it: :func:`check_inputs`, :func:`prepare`, :func:`initial_state`,
:class:`Map`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.dropout import SolveMasks
from implicit_attn.energies.energy import Prepared
from implicit_attn.energies.heads import AttentionInput
from implicit_attn.updates.update import EnergyStep, Update
from solvers.core.checks import require_finite
from solvers.core.layout import Layout
from solvers.core.modes import found_once, in_transform, parts_of, read_anew


def check_inputs(x: Any, mask: Tensor | None, update: nn.Module, z0: Any = None) -> Any:
    """Check the mask, shapes, finiteness and, unless autocast is on, the dtype: that of the parameters.

    Finiteness is checked on the CPU only: on a GPU the check would wait for the device.

    Returns:
        ``x``, with a matrix of pairs for all samples expanded to one for each of them.
    """
    if mask is not None and (
        not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2
    ):
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise TypeError(f"mask must be a bool tensor (B, N), got {what}")
    parameters = (p for _, part in parts_of(update) for p in part._parameters.values())
    wanted = {p.dtype for p in parameters if p is not None and p.is_floating_point()}
    # Tensors show none to a compiler or an exporter, nor within a transform.
    has_numbers = not (torch.compiler.is_compiling() or in_transform())
    leaves = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    if isinstance(x, Tensor) and x.dim() == 0:
        raise ValueError("x must have a batch dimension (B, ...), got a tensor without dimensions")
    for leaf in leaves:
        if leaf.is_nested:
            raise TypeError(
                "x must be a tensor (B, N, ...) with a mask (B, N), got a nested tensor: "
                "torch.nested.to_padded_tensor makes one of it"
            )
        if not leaf.is_floating_point():
            continue
        kind = leaf.device.type
        if leaf.dim() > 1 and has_numbers:
            require_finite("x", leaf)
        if len(wanted) == 1 and leaf.dtype not in wanted and not torch.is_autocast_enabled(kind):
            raise TypeError(
                f"x must have the dtype of the layer's parameters, {next(iter(wanted))}, got "
                f"{leaf.dtype}; convert one of them with .to()"
            )
    return _batched(x, leaves, mask, z0)


def _batched(x: Any, leaves: list[Tensor], mask: Tensor | None, z0: Any) -> Any:
    """``x`` with a matrix of pairs for all samples expanded to one for each; the mask has as many.

    A tensor of two dimensions may be such a matrix, so the number of samples is that of a deeper one.
    """
    starts = [leaf for leaf in pytree.tree_leaves(z0) if isinstance(leaf, Tensor) and leaf.dim()]
    deep = [leaf for leaf in leaves if leaf.dim() > 2] or starts
    if deep:
        x = _expand_pairs(x, deep[0].shape[0])
    elif mask is not None:
        x = _expand_pairs(x, mask.shape[0])
        deep = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    if mask is not None and deep and mask.shape[0] != deep[0].shape[0]:
        raise ValueError(
            f"mask must be batched like x, {deep[0].shape[0]} samples, got shape {tuple(mask.shape)}"
        )
    return x


def _expand_pairs(x: Any, batch: int) -> Any:
    """An input with a copy of ``pairs`` and ``pair_bias`` (N, M) for each sample, which copies nothing.

    ``x`` is an ``AttentionInput``, or a pytree that holds some. Solvers take tensors (B, ...) alone.
    """
    if isinstance(x, Tensor) or x is None:
        return x

    def expanded(part: Any) -> Any:
        if not isinstance(part, AttentionInput):
            return part
        pairs, bias = (
            t.expand(batch, *t.shape) if isinstance(t, Tensor) and t.dim() == 2 else t
            for t in (part.pairs, part.pair_bias)
        )
        return part._replace(pairs=pairs, pair_bias=bias)

    return pytree.tree_map(expanded, x, is_leaf=lambda part: isinstance(part, AttentionInput))


def check_batched(x: Any, start: Any) -> None:
    """Tensors of three dimensions or more in ``x`` have one sample for each of the initial state.

    A matrix may be a pattern for all samples, such as pairs (N, N), of which each gets its own.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(start) if isinstance(leaf, Tensor)]
    if not leaves or leaves[0].dim() == 0:
        return  # for the solver to say
    batch = leaves[0].shape[0]
    for leaf in pytree.tree_leaves(x):
        if isinstance(leaf, Tensor) and leaf.dim() > 2 and leaf.shape[0] != batch:
            raise ValueError(
                f"x must be batched along dim 0 like the initial state ({batch} samples), got shape "
                f"{tuple(leaf.shape)}"
            )


def batch_and_device(*trees: Any) -> tuple[int, torch.device]:
    """Those of the first tensor in ``trees``."""
    tensors = (t for t in pytree.tree_leaves(trees) if isinstance(t, Tensor) and t.dim())
    first = next(tensors, None)
    if first is None:
        raise TypeError("x must hold a tensor (B, ...) where the update has dropout, got none")
    return first.shape[0], first.device


def refuse_sharded_parts(update: nn.Module) -> None:
    """Raise ValueError where FSDP gathers weights at every evaluation of an update.

    Processes whose samples take different numbers of evaluations would wait for each other for ever, or
    take each other's weights.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # nobody has sharded anything
        return
    newer = (fsdp.FSDPModule,) if hasattr(fsdp, "FSDPModule") else ()
    kinds = (fsdp.FullyShardedDataParallel, *newer)
    if any(isinstance(part, kinds) for _, part in parts_of(update)):
        raise ValueError(
            "the update must hold no module that FSDP shards, as processes make different numbers of "
            "evaluations: shard the DEQ layer, or the block around it (fully_shard(layer))"
        )


def prepares(update: nn.Module) -> bool:
    """Whether a part of the update has a ``prepare`` of its own."""

    def find() -> bool:
        parts = (part for _, part in parts_of(update) if isinstance(part, Update))
        own = (part for part in parts if type(part).prepare is not Update.prepare)
        return any(not isinstance(part, EnergyStep) for part in own)  # which asks its energy

    return found_once(("prepares", update), find)


def prepare(
    update: Update,
    x: Any,
    mask: Tensor | None,
    seeds: Tensor | None,
    dropped: SolveMasks | None,
) -> Any:
    """``update.prepare(x, mask=mask)`` with the dropout of ``seeds``."""
    if dropped is None or seeds is None:
        return update.prepare(x, mask=mask)
    with dropped.within(seeds):
        return update.prepare(x, mask=mask)


def flat(prepared: Any) -> tuple[Any, Any]:
    """The tensors of a ``Prepared``, and its tree: solvers go through a flat tuple faster.

    What an update prepares that is no ``Prepared`` stays as it is, with None for the tree.
    """
    if not isinstance(prepared, Prepared):
        return prepared, None
    leaves, spec = pytree.tree_flatten(prepared)
    return tuple(leaves), spec


def initial_state(update: Update, init: str | Callable[[Any], Any], x: Any, prepared: Any) -> Any:
    """The initial state by a layer's ``init``, for its input and what the update prepared of it."""
    kind = type(update)
    own = kind.initial is not Update.initial or kind.start is not Update.start
    if callable(init) or (init == "input" and own):
        made = init(x) if callable(init) else update.start(x, prepared)
        read_anew()  # a user's own code may have changed a module
        return made
    if not isinstance(x, Tensor):
        raise TypeError(
            f"x must be a tensor where init={init!r}, got {type(x)}; give init a function x -> z0"
        )
    return x if init == "input" else torch.zeros_like(x)


class Map:
    """An update as the function ``f(z, x, mask, seeds)`` that ``solvers.fixed_point`` takes.

    ``x`` and ``spec`` are what was prepared of the layer's input, by :func:`flat`. ``seeds`` (B,) are those
    of the dropout in the update, None where it has none; ``dropped`` makes the masks of them.
    """

    def __init__(
        self,
        update: Update,
        layer: nn.Module,
        spec: Any,
        dropped: SolveMasks | None,
    ) -> None:
        self.update, self.symmetric = update, update.symmetric
        self.layer = layer  # named by warnings
        self.spec, self.dropped = spec, dropped

    def __call__(self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None) -> Any:
        if self.dropped is None or seeds is None:
            return self.update(z, self.whole(x), mask=mask)
        with self.dropped.within(seeds):
            return self.update(z, self.whole(x), mask=mask)

    def whole(self, x: Any) -> Any:
        """What was prepared, from the tensors in it."""
        return x if self.spec is None else pytree.tree_unflatten(list(x), self.spec)


class MonitoredMap(Map, solvers.EnergyUpdate):
    """A monitored update as a ``solvers.EnergyUpdate``."""

    def joint(  # type: ignore[override]
        self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None
    ) -> tuple[Any, Tensor, Any | None]:
        if self.dropped is None or seeds is None:
            return self.update.joint(z, self.whole(x), mask=mask)
        with self.dropped.within(seeds):
            return self.update.joint(z, self.whole(x), mask=mask)


class Held:
    """A map in which masked tokens are constant: their rows and columns of the Jacobian are zero."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None) -> Any:
        if mask is None:
            return self.function(z, x, mask, seeds)
        layout = Layout.of(z)
        keep, vector = layout.mask_vector(mask), layout.vector(z)
        held = layout.tree(torch.where(keep, vector, vector.detach()))
        image = layout.vector(self.function(held, x, mask, seeds))
        return layout.tree(torch.where(keep, image, 0))
