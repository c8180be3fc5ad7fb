"""A layer as a fixed number of evaluations of its update: for export, ``vmap``, ``jvp``, compilers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from implicit_attn.deq.inputs import batch_and_device, check_batched, check_inputs, initial_state
from implicit_attn.deq.maps import Map, flat, prepares
from implicit_attn.dropout import SolveMasks, dropout_seeds
from implicit_attn.updates.update import Update
from solvers.core.checks import require_count, require_number
from solvers.core.guards.purity import refuse_drawing_modules
from solvers.core.layout import Layout, check_mask
from solvers.core.modes import constant_weights

Module = TypeVar("Module", bound=nn.Module)


class UnrolledLayer(nn.Module):
    r"""A layer's update, evaluated a fixed number k of times: ``z_{i+1} = (1 - a) z_i + a f(z_i, x)``.

    Made by ``layer.unrolled(k)``, whose weights and initial state it shares. Nothing in it depends on
    numbers (no tolerance, no samples that leave), so ``torch.export``, ONNX, ``torch.compile`` with
    ``fullgraph=True`` and all transforms of ``torch.func`` go through it, forward mode (``jvp``) too.
    Its gradients are those of the k iterations, with memory that grows with k; they are not those of
    implicit differentiation, to which they converge as the iteration does.

    The result ``z_k`` is that of the layer with ``solver=Forward(damping)``, no tolerance and ``max_steps``
    k + 1, as long as residuals and, where an energy is monitored, energies fall: the layer spends its last
    evaluation on the residual of what it returns. Whether k is enough is not looked at here: ask the layer,
    ``layer.solve(x, solver="forward").evaluations``, on inputs like those to come.

    Args:
        update, init: of the layer.
        evaluations: k, >= 1.
        damping: a, in (0, 2].
        window: gradients go through the last ``window`` evaluations alone (truncated back-propagation),
            with memory of these; None: through all.

    Shapes: as for the layer. ``forward`` takes (x, mask), or ``z0`` for another initial state. Inputs are
    checked as by the layer, but for NaN inside of compilers and exporters.

    Example:
        >>> from implicit_attn import DEQ
        >>> from implicit_attn.energies import Hopfield, Quadratic
        >>> layer = DEQ(Quadratic() + 0.5 * Hopfield(torch.eye(4)))
        >>> program = layer.unrolled(12)  # for torch.export.export(program.eval(), (x,))
        >>> program(torch.ones(2, 3, 4)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(
        self,
        update: Update,
        evaluations: int,
        *,
        init: str | Callable[[Any], Any] = "input",
        damping: float = 1.0,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.update, self.init = update, init
        self.evaluations = require_count("evaluations", evaluations)
        self.damping = require_number("damping", damping, low=0.0, high=2.0, closed=False)
        self.window = evaluations if window is None else require_count("window", window)

    def forward(self, x: Any, mask: Tensor | None = None, *, z0: Any = None) -> Any:
        """``z_k`` for the input ``x``, of the structure of the initial state."""
        x = check_inputs(x, mask, self.update, z0)
        dropped = SolveMasks.of(self.update)
        with _weights():
            if dropped is None:
                prepared, seeds = self.update.prepare(x, mask=mask), None
            else:
                seeds = dropout_seeds(*batch_and_device(z0, x))
                with dropped.within(seeds):
                    prepared = self.update.prepare(x, mask=mask)
            start = initial_state(self.update, self.init, x, prepared) if z0 is None else z0
            check_batched(x, start)
            if not prepares(self.update):  # else the module may serve there, once
                refuse_drawing_modules(self.update, "the update")
            given, spec = flat(prepared)
            f, rest = Map(self.update, self, spec, dropped), (given, mask, seeds)
            early = self.evaluations - min(self.window, self.evaluations)
            if early:
                with torch.no_grad(), _weights():  # of their own: those of the others have a graph
                    start = self._iterate(early, f, start, *rest)
            return self._iterate(self.evaluations - early, f, start, *rest)

    def _iterate(
        self, count: int, f: Map, start: Any, x: Any, mask: Tensor | None, seeds: Tensor | None
    ) -> Any:
        layout = Layout.of(start)
        z = layout.vector(start)
        keep = None
        if mask is not None:
            check_mask(mask, layout, z.shape[0], z.device)
            keep = layout.mask_vector(mask)
        for _ in range(count):
            value = layout.vector(f(layout.tree(z), x, mask, seeds))
            if value.shape != z.shape:  # which might be broadcast
                raise ValueError(
                    f"the update must return a state like z0, {tuple(z.shape)} with the numbers of a "
                    f"sample in a row, got {tuple(value.shape)}"
                )
            value = value.to(z.dtype)
            if self.damping != 1.0:
                value = z + self.damping * (value - z)
            z = value if keep is None else torch.where(keep, value, z)  # masked tokens stay
        return layout.tree(z)

    def baked(self) -> UnrolledLayer:
        """A copy whose parametrised weights (``bound=...``) are the tensors that they are now.

        What bounds a weight is an eigenvalue, which ONNX cannot compute, and which a program for
        inference need not compute anew.
        """
        return bake(self)

    def extra_repr(self) -> str:
        return f"evaluations={self.evaluations}, damping={self.damping}"


def _weights() -> AbstractContextManager[None]:
    """Within, weights are computed once; but Dynamo traces no variables of a thread, and merges them."""
    return nullcontext() if torch.compiler.is_dynamo_compiling() else constant_weights()


def bake(module: Module) -> Module:
    """A copy of ``module`` with plain weights in the place of its parametrised ones.

    Frozen weights stay frozen, and buffers buffers.
    """
    copied = copy.deepcopy(module)
    for part in list(copied.modules()):
        if not parametrize.is_parametrized(part):
            continue
        lists: Any = part.parametrizations
        weights = {name: _plain(getattr(part, name), lists[name]) for name in lists}
        # Not by torch.nn.utils.parametrize, which would take the property off a class that the copy
        # shares with its original.
        part.__class__ = parametrize.type_before_parametrizations(part)
        del part.parametrizations
        for name, weight in weights.items():
            if isinstance(weight, nn.Parameter):
                part.register_parameter(name, weight)
            else:
                part.register_buffer(name, weight)
    return copied


def _plain(weight: Tensor, parametrization: nn.Module) -> Tensor:
    """A copy of a computed weight: a parameter, trained or frozen like its originals, or a buffer."""
    originals = list(parametrization.parameters())
    copied = weight.detach().clone()
    if not originals:
        return copied
    return nn.Parameter(copied, requires_grad=any(each.requires_grad for each in originals))


def unroll(model: nn.Module, evaluations: int, *, damping: float = 1.0) -> nn.Module:
    """``model`` with ``layer.unrolled(evaluations)`` in the place of each of its DEQ layers.

    A copy that shares all weights and buffers with ``model``, whose training changes both. What
    reads a layer's ``last`` finds none there.

    Args:
        model: any module; a DEQ itself gives its :class:`UnrolledLayer`, one within its update is
            replaced, too.
        evaluations, damping: as for :class:`UnrolledLayer`, for all layers.

    Raises:
        ValueError: no part of ``model`` is a DEQ.

    Example:
        >>> from implicit_attn import EquilibriumBlock
        >>> model = nn.Sequential(EquilibriumBlock(64, heads=4), nn.Linear(64, 10))
        >>> unroll(model, 8).eval()(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 10])
    """
    if _is_layer(model) and not any(_is_layer(part) for part in model.update.modules()):  # type: ignore[union-attr]
        return model.unrolled(evaluations, damping=damping)  # type: ignore[operator]
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(nn.ModuleList([model]), dict(shared))
    layers = [
        (parent, name, child)
        for parent in copied.modules()
        for name, child in parent._modules.items()  # one that is used twice, twice
        if child is not None and _is_layer(child)
    ]
    if not layers:
        raise ValueError(f"model must hold a DEQ layer, got {type(model).__name__} without one")
    found: Any
    for parent, name, found in layers:
        setattr(parent, name, found.unrolled(evaluations, damping=damping))
    return copied[0]


def _is_layer(module: nn.Module) -> bool:
    return isinstance(getattr(module, "update", None), Update) and hasattr(module, "unrolled")
