"""Updates as the functions that :func:`solvers.fixed_point` takes."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.dropout import SolveMasks
from implicit_attn.energies.energy import Energy, Prepared, Scaled, Select, Sum
from implicit_attn.updates.gradient_step import EnergyStep
from implicit_attn.updates.update import Update
from solvers.compiled.programs import Programs
from solvers.core.guards.reading import found_once, parts_of
from solvers.core.layout import Layout

# Sums, multiples and selections ask the energies in them, which are parts of the update too.
ASKING = tuple(kind.prepare for kind in (Energy, Scaled, Select, Sum))


def prepares(update: nn.Module) -> bool:
    """Whether a part of the update has a ``prepare`` of its own."""
    return found_once(("prepares", update), lambda: _prepares(update))


def _prepares(update: nn.Module) -> bool:
    return any(
        isinstance(part, Update)
        and not isinstance(part, EnergyStep)  # which asks its energy
        and type(part).prepare is not Update.prepare
        for _, part in parts_of(update)
    )


def may_prepare(update: nn.Module) -> bool:
    """Whether what the update prepares may be more than x, by a part of its own or of its energy."""
    return found_once(("may prepare", update), lambda: _may_prepare(update))


def _may_prepare(update: nn.Module) -> bool:
    energies = (part for _, part in parts_of(update) if isinstance(part, Energy))
    return prepares(update) or any(type(e).prepare not in ASKING for e in energies)


def flat(prepared: Any) -> tuple[Any, Any]:
    """The tensors of what was prepared, through which solvers go often, and how they belong together.

    What is no deep tree stays as it is, with None for the other part.
    """
    if not isinstance(prepared, Prepared):
        return prepared, None
    leaves, spec = pytree.tree_flatten(prepared)
    return tuple(leaves), spec


class Map:
    """An update as the function ``f(z, x, mask, seeds)`` that ``solvers.fixed_point`` takes.

    ``seeds`` (B,) are those of the dropout in the update, None where it has none.
    """

    def __init__(
        self,
        update: Update,
        layer: nn.Module,
        spec: Any,
        dropped: SolveMasks | None,
        programs: Programs | None = None,
    ) -> None:
        self.programs = programs
        self.update, self.symmetric = update, update.symmetric
        self.layer = layer  # named by warnings
        self.spec, self.dropped = spec, dropped

    def __call__(self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None) -> Any:
        if self.dropped is None or seeds is None:
            return self.update(z, self.whole(x), mask=mask)
        with self.dropped.within(seeds):
            return self.update(z, self.whole(x), mask=mask)

    def on(self, update: Update) -> Map:
        """The same map with another update in the place of this one, of the same kind."""
        other = copy(self)
        other.update, other.programs = update, None
        other.dropped = None if self.dropped is None else SolveMasks.of(update)
        return other

    def static_key(self) -> tuple[Any, ...]:
        """What a compiled evaluation depends on beside tensors and the modules' own attributes."""
        return type(self), self.spec, self.dropped is None

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
    """A map with the masked tokens held constant: their rows and columns of its Jacobian are zero."""

    def __init__(self, function: Map) -> None:
        self.function = function

    def __call__(self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None) -> Any:
        if mask is None:
            return self.function(z, x, mask, seeds)
        layout = Layout.of(z)
        keep, vector = layout.mask_vector(mask), layout.vector(z)
        held = layout.tree(torch.where(keep, vector, vector.detach()))
        image = layout.vector(self.function(held, x, mask, seeds))
        return layout.tree(torch.where(keep, image, 0))
