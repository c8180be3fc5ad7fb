"""The problem that a layer solves: its checked input, and its update as a function for the solver."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.dropout import SolveMasks, dropout_seeds
from implicit_attn.energies.energy import AttentionContext
from implicit_attn.energies.heads import AttentionInput
from implicit_attn.updates.update import EnergyStep, GradientStep, Update
from solvers.checking import batch_norms, draws, refuse_drawing_modules
from solvers.core.checks import require_finite
from solvers.core.context import weights_of, within
from solvers.core.layout import tensors_of
from solvers.core.messages import warn_user
from solvers.core.modes import in_transform, lacks_numbers
from solvers.core.problem import Sharing

Modules = Mapping[str, nn.Module]  # ``dict(update.named_modules())``


def check_inputs(x: Any, mask: Tensor | None, parts: Modules, z0: Any = None) -> Any:
    """Check the mask, shapes, finiteness and, without autocast, the dtype, which must be the parameters'.

    Finiteness is checked on the CPU only, because the check would wait for a GPU.

    Returns:
        ``x``, with a shared matrix of pairs expanded to one per sample, and with zeros where it was NaN or
        infinite at masked tokens on the CPU.
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
    # Values are not available to compilers and exporters, inside transforms, or of fake tensors.
    has_numbers = not (torch.compiler.is_compiling() or in_transform() or lacks_numbers(x))
    if mask is not None and has_numbers:
        if mask.device.type == "cpu" and mask.numel() and not bool(mask.any(1).all()):
            warn_user(
                "the mask leaves no token of some samples. The mask of a DEQ is True at the tokens to keep; "
                "src_key_padding_mask of a block is True at padding",
                UserWarning,
            )
        x = pytree.tree_map(lambda leaf: _finite_at_masked_tokens(leaf, mask), x)
    leaves = tensors_of(x)
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
    # A matrix may be one of pairs that all samples share, so the batch size is read from a deeper tensor.
    deep = [leaf for leaf in leaves if leaf.dim() > 2] or _batched(z0)
    if deep or mask is not None:
        x = _expand_pairs(x, deep[0].shape[0] if deep else len(mask))  # type: ignore[arg-type]
    deep = deep or _batched(x)
    if mask is not None and deep and mask.shape[0] != deep[0].shape[0]:
        raise ValueError(
            f"mask must have the batch size of x, {deep[0].shape[0]}, got shape {tuple(mask.shape)}"
        )
    return x


def _finite_at_masked_tokens(leaf: Any, mask: Tensor) -> Any:
    """Return a tensor (B, N, ...) with zeros for NaN and infinity at masked tokens; others unchanged."""
    if not isinstance(leaf, Tensor) or leaf.device.type != "cpu" or not leaf.is_floating_point():
        return leaf
    fits = leaf.dim() > 2 and leaf.shape[:2] == mask.shape
    if not fits or math.isfinite(leaf.detach().sum().item()):
        return leaf
    hidden = ~mask.reshape(*mask.shape, *[1] * (leaf.dim() - 2))
    return leaf.masked_fill(hidden & ~leaf.detach().isfinite(), 0.0)


def _batched(tree: Any) -> list[Tensor]:
    """Return the tensors of a pytree that have a batch dimension."""
    return list(filter(Tensor.dim, tensors_of(tree)))


def _expand_pairs(x: Any, batch: int) -> Any:
    """Expand ``pairs`` and ``pair_bias`` (N, M) to one per sample, without copying memory.

    ``x`` is an ``AttentionInput``, or a pytree that contains some. Solvers only accept tensors (B, ...).
    """
    if isinstance(x, Tensor) or x is None:
        return x
    if isinstance(x, AttentionInput) and x.pairs is None and x.pair_bias is None:
        return x

    def expanded(part: Any) -> Any:
        if not isinstance(part, AttentionInput):
            return part
        for name in ("pairs", "pair_bias"):
            t = getattr(part, name)
            if isinstance(t, Tensor) and t.dim() == 2:
                part = part._replace(**{name: t.expand(batch, *t.shape)})
        return part

    return pytree.tree_map(expanded, x, is_leaf=lambda part: isinstance(part, AttentionInput))


def batch_and_device(*trees: Any) -> tuple[int, torch.device]:
    """Return batch size and device of the first tensor in ``trees``."""
    first = next((t for tree in trees for t in _batched(tree)), None)
    if first is None:
        raise TypeError("x must contain a tensor (B, ...), got none")
    return first.shape[0], first.device


def refuse_sharded_parts(parts: Modules) -> None:
    """Raise ValueError if FSDP gathers weights at every evaluation of an update.

    Processes whose samples need different numbers of evaluations would deadlock or mix up weights.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # no module is sharded
        return
    kinds = (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
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


def run_weight_hooks(modules: list[nn.Module]) -> None:
    """Run the forward pre-hooks of modules that are never called because energies read their weights.

    ``torch.nn.utils.prune`` and ``torch.nn.utils.spectral_norm`` compute a weight in such a hook.
    """
    for module in modules:
        if module._forward_pre_hooks and type(module).forward is nn.Module.forward:
            for hook in module._forward_pre_hooks.values():
                hook(module, ())


_TENSOR = object()  # stands for a tensor


class Map:
    """The update of a layer as a function ``f(z, x, mask, seeds)`` for ``solvers.fixed_point``.

    ``x`` is what :meth:`prepare_arguments` prepared, ``seeds`` (B,) are those of dropout, or None.
    """

    # How the tensors of x lie in an ``AttentionContext``; None for other inputs, which are passed as is.
    places: tuple[list[Any], Any] | None = None

    def __init__(self, layer: Any) -> None:
        self.layer = layer  # warnings include its name
        self.update: Update = layer.update
        self.init, self.symmetric = layer.init, self.update.symmetric
        self.parts: Modules = dict(self.update.named_modules())
        self.walked_modules: list[nn.Module] = list(self.parts.values())
        run_weight_hooks(self.walked_modules)
        self.masks = SolveMasks(self.walked_modules)
        self.prepared: tuple[Any, Any] = (
            None,
            None,
        )  # the latest x, and the prepared input that it is

    @property
    def step_size(self) -> Any:
        """The step size of a gradient step, None for other updates."""
        return self.update.step_size if isinstance(self.update, GradientStep) else None

    @property
    def modulus(self) -> Any:
        """The constant of strong convexity of the energy, None where it is not known."""
        if not isinstance(self.update, GradientStep):
            return None
        energy = self.update.energy
        return None if getattr(energy, "is_replaced", False) else energy.modulus

    @property
    def spec(self) -> Any:
        """What a recording depends on besides the map's type."""
        return self.places

    def weights_once(self) -> AbstractContextManager[object]:
        """Compute the parametrised weights of the update, which are read within the context.

        It has no effect while Dynamo traces, which merges equal computations itself.
        """
        if torch.compiler.is_dynamo_compiling():
            return nullcontext()
        return within(weights=weights_of(self.walked_modules))

    def __call__(self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None) -> Any:
        if x is not self.prepared[0]:
            self.rebuild(x)
        with nullcontext() if seeds is None else self.masks.within(seeds):
            return self.update(z, self.prepared[1], mask=mask)

    def rebuild(self, x: Any) -> None:
        """Make the prepared input of its tensors; it serves the following calls with the same tensors."""
        self.prepared = x, x
        if self.places is not None:
            (leaves, spec), tensors = self.places, iter(x)
            leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in leaves]
            self.prepared = x, pytree.tree_unflatten(leaves, spec)

    def check_modules(self, *, unrolled: bool = False) -> None:
        """Refuse modules that draw at every evaluation, and warn of those that mix samples in a solve.

        Modules in ``prepare``, which is called once, may do both.
        """
        if prepares(self.parts):
            return
        refuse_drawing_modules(self.parts.items(), "the update")
        for message in () if unrolled else batch_norms(self.parts.items()):
            warn_user(message, UserWarning, self)

    def seeds(self, *trees: Any) -> Tensor | None:
        """Draw seeds for the samples of the first tensor in ``trees``; None if nothing is dropped."""
        return dropout_seeds(*batch_and_device(*trees)) if self.masks.numbers else None

    def prepare_arguments(
        self, x: Any, mask: Tensor | None, seeds: Tensor | None = None, z0: Any = None
    ) -> tuple[tuple[Any, ...], Any]:
        """Return the arguments of the map for the checked input ``x``, and the initial state."""
        with nullcontext() if seeds is None else self.masks.within(seeds):
            prepared = self.update.prepare(x, mask=mask)
        start = self._start(x, prepared) if z0 is None else z0
        found = _batched(start)
        for leaf in tensors_of(x) if found else ():  # without a tensor the solver raises an error
            # A matrix may be shared by all samples, such as pairs (N, N).
            if leaf.dim() > 2 and leaf.shape[0] != found[0].shape[0]:
                raise ValueError(
                    f"x must have the batch size of the initial state, {found[0].shape[0]}, along dim 0, "
                    f"got shape {tuple(leaf.shape)}"
                )
        if isinstance(prepared, AttentionContext):  # solvers handle a flat tuple faster
            leaves, spec = pytree.tree_flatten(prepared._replace(start=None))
            prepared = tuple(filter(torch.is_tensor, leaves))
            self.places = [_TENSOR if isinstance(t, Tensor) else t for t in leaves], spec
        return (prepared, mask) if seeds is None else (prepared, mask, seeds), start

    def _start(self, x: Any, prepared: Any) -> Any:
        init, kind = self.init, type(self.update)
        if callable(init):
            return init(x)
        own = kind.initial is not Update.initial or kind.start is not Update.start
        if init == "input" and own:
            return self.update.start(x, prepared)
        if not isinstance(x, Tensor):
            raise TypeError(
                f"x must be a tensor when init={init!r}, got {type(x)}; pass a function x -> z0 as init"
            )
        return x if init == "input" else torch.zeros_like(x)

    def prepares_alike(self, x: Any) -> bool:
        """Return whether a recorded solve may prepare the input, in the same way each time.

        All tensors of ``x`` must be batched, as arguments of ``f`` are, and ``init`` must be a name.
        """
        leaves = tensors_of(x)
        sizes = {leaf.shape[0] if leaf.dim() else None for leaf in leaves}
        if not isinstance(self.init, str) or len(sizes) != 1 or None in sizes:
            return False
        changing = [p for p in self.walked_modules if draws(p) or isinstance(p, _NormBase)]
        own = type(self.update).prepare is not Update.prepare
        return own and not (self.update.monitored or any(part.training for part in changing))


class MonitoredMap(Map, solvers.EnergyUpdate):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A monitored update as a ``solvers.EnergyUpdate``."""

    def joint(  # type: ignore[override]
        self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None
    ) -> tuple[Any, Tensor, Any | None]:
        if x is not self.prepared[0]:
            self.rebuild(x)
        with nullcontext() if seeds is None else self.masks.within(seeds):
            return self.update.joint(z, self.prepared[1], mask=mask)


class TokenRows(Sharing):
    """The map of a layer whose tokens do not see each other's states: each token is a row of its own.

    A token then stops by its own residual, and no bit of it depends on another token's state.
    """

    def __init__(self, f: Map, start: Tensor, args: tuple[Any, ...]) -> None:
        self.leaves, self.spec = pytree.tree_flatten(args)
        super().__init__(f, *(leaf for leaf in self.leaves if isinstance(leaf, Tensor)))
        self.update, self.shape, self.symmetric = f.update, start.shape, f.symmetric
        self.named = [f.layer]  # in a list, as the layer is no part of this module

    @property
    def layer(self) -> nn.Module:
        """The layer that warnings name."""
        return self.named[0]

    def forward(self, z: Tensor, *args: Any) -> Tensor:
        tensors = iter(self.shared)
        leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        value = self.f(z.view(self.shape), *pytree.tree_unflatten(leaves, self.spec))
        return value.reshape(z.shape)

    def solve(
        self, start: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> solvers.Solution:
        """Solve from ``start`` (B, N, d); the solution speaks of the samples."""
        tokens = start.shape[:2]
        options = options | {"mask": None if mask is None else mask.reshape(-1, 1)}
        options |= {"compact": False}
        found = solvers.fixed_point(self, start.reshape(-1, 1, start.shape[-1]), **options)
        found.value = found.value.view(self.shape)
        for name in ("status", "residual", "error", "steps", "evaluations"):
            setattr(found, name, getattr(found, name).view(tokens).amax(1))
        found.residual_norm = found.residual_norm.view(tokens).norm(dim=1)
        return found


class PreparingMap(Map):
    """``f(z, x, mask)`` of an update that prepares its input itself, for recorded solves."""

    @property
    def spec(self) -> Any:
        return self.init

    def begin(self, x: Any, mask: Tensor | None) -> tuple[Any, tuple[Any, ...], Any]:
        """Return the map of the prepared input, its arguments and the initial state."""
        return super().__call__, *self.prepare_arguments(x, mask)

    def __call__(self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None) -> Any:
        return super().__call__(z, *self.prepare_arguments(x, mask)[0])
