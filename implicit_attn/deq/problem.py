"""Arguments of :func:`solvers.fixed_point` for a layer: checked and prepared inputs, state and function.

``DEQ.solve`` calls, in this order, :func:`check_inputs`, :func:`prepare`, :func:`initial_state` and
:class:`Map`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.dropout import SolveMasks
from implicit_attn.energies.energy import AttentionContext
from implicit_attn.energies.heads import AttentionInput
from implicit_attn.updates.update import EnergyStep, Update
from solvers.core.checks import require_finite
from solvers.core.layout import Layout
from solvers.core.modes import in_transform
from solvers.core.validate import draws

Modules = Mapping[str, nn.Module]  # ``dict(update.named_modules())``


def check_inputs(x: Any, mask: Tensor | None, parts: Modules, z0: Any = None) -> Any:
    """Check the mask, shapes, finiteness and, without autocast, the dtype, which must be the parameters'.

    Finiteness is checked on the CPU only, because the check would wait for a GPU.

    Returns:
        ``x``, with a shared matrix of pairs expanded to one per sample.
    """
    if mask is not None and (
        not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2
    ):
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise TypeError(f"mask must be a bool tensor (B, N), got {what}")
    wanted: set[torch.dtype] = set()
    for part in parts.values():
        for parameter in part._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                wanted.add(parameter.dtype)
    # Values are not available to compilers and exporters or inside transforms.
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
    """Expand a shared matrix of pairs in ``x`` to one per sample, and check the mask's batch size.

    A two-dimensional tensor may be such a matrix, so the batch size is read from a deeper tensor.
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
            f"mask must have the batch size of x, {deep[0].shape[0]}, got shape {tuple(mask.shape)}"
        )
    return x


def _expand_pairs(x: Any, batch: int) -> Any:
    """Expand ``pairs`` and ``pair_bias`` (N, M) to one per sample, without copying memory.

    ``x`` is an ``AttentionInput``, or a pytree that contains some. Solvers only accept tensors (B, ...).
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
    """Check that tensors with at least three dimensions in ``x`` have the batch size of the initial state.

    A matrix may be shared by all samples, such as pairs (N, N).
    """
    leaves = [leaf for leaf in pytree.tree_leaves(start) if isinstance(leaf, Tensor)]
    if not leaves or leaves[0].dim() == 0:
        return  # the solver raises an error
    batch = leaves[0].shape[0]
    for leaf in pytree.tree_leaves(x):
        if isinstance(leaf, Tensor) and leaf.dim() > 2 and leaf.shape[0] != batch:
            raise ValueError(
                f"x must have the batch size of the initial state, {batch}, along dim 0, got shape "
                f"{tuple(leaf.shape)}"
            )


def batch_and_device(*trees: Any) -> tuple[int, torch.device]:
    """Return batch size and device of the first tensor in ``trees``."""
    tensors = (t for t in pytree.tree_leaves(trees) if isinstance(t, Tensor) and t.dim())
    first = next(tensors, None)
    if first is None:
        raise TypeError("x must contain a tensor (B, ...) when the update has dropout, got none")
    return first.shape[0], first.device


def refuse_sharded_parts(parts: Modules) -> None:
    """Raise ValueError if FSDP gathers weights at every evaluation of an update.

    Processes whose samples need different numbers of evaluations would deadlock or mix up weights.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # no module is sharded
        return
    newer = (fsdp.FSDPModule,) if hasattr(fsdp, "FSDPModule") else ()
    kinds = (fsdp.FullyShardedDataParallel, *newer)
    if any(isinstance(part, kinds) for part in parts.values()):
        raise ValueError(
            "the update must not contain modules sharded by FSDP, because processes evaluate it different "
            "numbers of times: shard the DEQ layer or the block around it (fully_shard(layer))"
        )


def prepares(parts: Modules) -> bool:
    """Return whether a part of the update defines ``prepare``."""
    updates = (part for part in parts.values() if isinstance(part, Update))
    own = (part for part in updates if type(part).prepare is not Update.prepare)
    return any(not isinstance(part, EnergyStep) for part in own)  # EnergyStep asks its energy


def prepare(
    update: Update, x: Any, mask: Tensor | None, seeds: Tensor | None, dropped: SolveMasks | None
) -> Any:
    """Return ``update.prepare(x, mask=mask)`` with the dropout of ``seeds``."""
    if dropped is None or seeds is None:
        return update.prepare(x, mask=mask)
    with dropped.within(seeds):
        return update.prepare(x, mask=mask)


def flat(prepared: Any) -> tuple[Any, Any]:
    """Flatten a context to its tensors and their places, because solvers handle a flat tuple faster.

    Other prepared inputs are returned unchanged, with None for the places.
    """
    if not isinstance(prepared, AttentionContext):
        return prepared, None
    leaves, spec = pytree.tree_flatten(prepared)
    tensors: list[Tensor] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            leaves[place] = _PLACE
    return tuple(tensors), (leaves, spec)


_PLACE = object()  # stands for a tensor


def initial_state(update: Update, init: str | Callable[[Any], Any], x: Any, prepared: Any) -> Any:
    """Return the initial state for a layer's ``init``, its input and the prepared input."""
    kind = type(update)
    own = kind.initial is not Update.initial or kind.start is not Update.start
    if callable(init) or (init == "input" and own):
        return init(x) if callable(init) else update.start(x, prepared)
    if not isinstance(x, Tensor):
        raise TypeError(
            f"x must be a tensor when init={init!r}, got {type(x)}; pass a function x -> z0 as init"
        )
    return x if init == "input" else torch.zeros_like(x)


class Map:
    """The update as a function ``f(z, x, mask, seeds)`` for ``solvers.fixed_point``.

    ``x`` and ``spec`` are the prepared input, flattened by :func:`flat`. ``seeds`` (B,) are those of the
    update's dropout, or None; ``dropped`` computes the masks from them.
    """

    def __init__(
        self,
        update: Update,
        layer: nn.Module,
        spec: Any,
        dropped: SolveMasks | None,
        parts: Modules,
    ) -> None:
        self.update, self.symmetric = update, update.symmetric
        self.walked_modules = list(parts.values())
        self.layer = layer  # warnings include its name
        self.spec, self.dropped = spec, dropped
        # The tensors and the prepared input of the latest call.
        self.known: tuple[Any, Any] = (None, None)

    def __call__(self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None) -> Any:
        if x is not self.known[0]:
            self.rebuild(x)
        if self.dropped is None or seeds is None:
            return self.update(z, self.known[1], mask=mask)
        with self.dropped.within(seeds):
            return self.update(z, self.known[1], mask=mask)

    def rebuild(self, x: Any) -> None:
        """Make the prepared input from its tensors; it serves the following calls with the same tensors."""
        prepared = x
        if self.spec is not None:
            (leaves, spec), tensors = self.spec, iter(x)
            leaves = [next(tensors) if leaf is _PLACE else leaf for leaf in leaves]
            prepared = pytree.tree_unflatten(leaves, spec)
        self.known = x, prepared


class PreparingMap:
    """``f(z, x, mask)`` of an update that prepares its input itself, for recorded solves."""

    def __init__(self, update: Update, layer: nn.Module, parts: Modules, init: Any) -> None:
        self.update, self.symmetric, self.layer = update, update.symmetric, layer
        self.walked_modules, self.parts, self.init = list(parts.values()), parts, init
        self.spec = init  # on which a recording depends

    def begin(self, x: Any, mask: Tensor | None) -> tuple[Map, tuple[Any, ...], Any]:
        """Return the map, its arguments and the initial state for ``x``, as ``DEQ.solve`` makes them."""
        prepared = self.update.prepare(x, mask=mask)
        start = initial_state(self.update, self.init, x, prepared)
        check_batched(x, start)
        given, spec = flat(prepared)
        return Map(self.update, self.update, spec, None, self.parts), (given, mask), start

    def __call__(self, z: Any, x: Any, mask: Tensor | None) -> Any:
        f, args, _ = self.begin(x, mask)
        return f(z, *args)


def prepares_alike(update: Update, parts: Modules, init: Any, x: Any) -> bool:
    """Return whether a recorded solve may prepare the input, in the same way each time.

    All tensors of ``x`` must be batched, as arguments of ``f`` are, and ``init`` must be a name.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    if not isinstance(init, str) or any(leaf.dim() == 0 for leaf in leaves):
        return False
    if len({leaf.shape[0] for leaf in leaves}) != 1:
        return False
    changing = (p for p in parts.values() if p.training and (draws(p) or isinstance(p, _NormBase)))
    own = type(update).prepare is not Update.prepare
    return own and not (update.monitored or any(changing))


class MonitoredMap(Map, solvers.EnergyUpdate):
    """A monitored update as a ``solvers.EnergyUpdate``."""

    def joint(  # type: ignore[override]
        self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None
    ) -> tuple[Any, Tensor, Any | None]:
        if x is not self.known[0]:
            self.rebuild(x)
        if self.dropped is None or seeds is None:
            return self.update.joint(z, self.known[1], mask=mask)
        with self.dropped.within(seeds):
            return self.update.joint(z, self.known[1], mask=mask)


class MaskedMap:
    """A map that holds masked tokens constant, so their rows and columns of the Jacobian are zero."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None) -> Any:
        if mask is None:
            return self.function(z, x, mask, seeds)
        layout = Layout.of(z)
        vector = layout.vector(z)
        keep = layout.mask_vector(mask, vector)
        held = layout.tree(torch.where(keep, vector, vector.detach()))
        image = layout.vector(self.function(held, x, mask, seeds))
        return layout.tree(torch.where(keep, image, 0))
