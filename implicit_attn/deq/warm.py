"""Warm starts: the fixed point and the adjoint solution of each sample, kept from visit to visit."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import solvers
from solvers.core.checks import require_count, require_flag
from solvers.core.layout import Layout
from solvers.core.modes import in_transform

# A sample that stalled or diverged starts anew the next time.
KEPT = (solvers.Status.CONVERGED, solvers.Status.MAX_STEPS)


class WarmStarts:
    """States and adjoint solutions of the samples visited last, by their ids.

    They are kept in the state's dtype and on its device, ``capacity D`` numbers for D in a state, twice
    as many with adjoints; memory is taken as ids come. Ids whose states have another structure, shape,
    dtype or device replace all that is kept. Copies and pickles of it are empty.

    Warm starts gain where tolerances are tight and weights change little between two visits. With many
    fixed points, which one a sample reaches then depends on its earlier visits.

    Args:
        capacity: number of samples, >= 1; beyond it, those visited longest ago are forgotten.
        adjoint: keep adjoint solutions, too. Each system then begins with one more product, which pays
            where it takes many.
    """

    def __init__(self, capacity: int, *, adjoint: bool = False) -> None:
        self.capacity = require_count("warm_start", capacity)
        self.adjoint = require_flag("adjoint", adjoint)
        self.clear()

    def clear(self) -> None:
        """Forget all samples."""
        self.slots: OrderedDict[int, int] = OrderedDict()  # by id, the one visited last at the end
        self.free: list[int] = []  # slots of forgotten samples
        self.with_adjoint: set[int] = set()  # slots that have an adjoint solution
        self.kind: Any = None  # layout and device of what is kept
        self.states = self.adjoints = torch.empty(0, 0)

    def __len__(self) -> int:
        return len(self.slots)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(WarmStarts, adjoint=self.adjoint), (self.capacity,)

    def visit(self, ids: Any, start: Any, mask: Tensor | None) -> Visit:
        """The solve of the samples ``ids`` that would else begin at ``start``."""
        layout = Layout.of(start)
        first = pytree.tree_leaves(start)[0]
        known = check_ids(ids, first.shape[0])
        if (layout, first.device) != self.kind:
            self.clear()
            self.kind = layout, first.device
        return Visit(self, known, layout, start, mask)

    def places(self, ids: list[int]) -> list[tuple[int, int]]:
        """(row, slot) of the rows whose ids are known."""
        return [(row, self.slots[each]) for row, each in enumerate(ids) if each in self.slots]

    def reserve(self, ids: list[int]) -> None:
        """Give each id a slot; those visited longest ago lose theirs where there are too many."""
        for each in ids:
            slot = self.slots.pop(each, None)
            if slot is None:
                slot = self._slot()
                self.with_adjoint.discard(slot)
            self.slots[each] = slot

    def _slot(self) -> int:
        if self.free:
            return self.free.pop()
        if len(self.slots) < self.capacity:
            return len(self.slots)
        return self.slots.popitem(last=False)[1]

    def forget(self, ids: list[int]) -> None:
        for each in ids:
            slot = self.slots.pop(each, None)
            if slot is not None:
                self.free.append(slot)

    def write(self, name: str, places: list[tuple[int, int]], vectors: Tensor) -> None:
        """Keep rows of ``vectors`` (B, D) in their slots."""
        if not places:
            return
        rows, slots = (
            torch.tensor(each, device=vectors.device) for each in zip(*places, strict=True)
        )
        # A buffer of inference mode could not be written to later.
        with torch.inference_mode(False), torch.no_grad():
            kept: Tensor = getattr(self, name)
            needed = 1 + max(slot for _, slot in places)
            if needed > len(kept):
                size = min(self.capacity, max(needed, 2 * len(kept)))
                larger = vectors.new_zeros(size, vectors.shape[1])
                if len(kept):
                    larger[: len(kept)] = kept
                kept = larger
                setattr(self, name, kept)
            kept.index_copy_(0, slots, vectors.detach().index_select(0, rows))


class Visit:
    """One solve from what is kept; ``start`` is the initial state of all samples.

    It is the memory of :class:`solvers.Implicit` for this solve.
    """

    def __init__(
        self, store: WarmStarts, ids: list[int], layout: Layout, start: Any, mask: Tensor | None
    ) -> None:
        self.store, self.ids, self.layout, self.kind = store, ids, layout, store.kind
        self.start = start
        places = store.places(ids)
        if not places:
            return
        cold = layout.vector(start)
        kept, known = self._spread(store.states, places, cold)
        if mask is not None:  # masked tokens keep their initial value
            known = known & layout.mask_vector(mask)
        self.start = layout.tree(torch.where(known, kept, cold))

    def adjoint(self, adjoint: solvers.Adjoint | None) -> solvers.Adjoint | None:
        """``adjoint`` with this memory, where it solves a linear system whose solution is kept."""
        if not (self.store.adjoint and isinstance(adjoint, solvers.Implicit)):
            return adjoint
        return replace(adjoint, memory=self)

    def note(self, solution: solvers.Solution) -> None:
        """Keep the fixed points of samples that have one, and forget the other samples."""
        status = solution.status.tolist()
        latest = {each: row for row, each in enumerate(self.ids) if each >= 0}
        good = [each for each, row in latest.items() if status[row] in KEPT]
        self.store.forget(list(latest.keys() - set(good)))
        self.store.reserve(good)
        places = [
            (latest[each], self.store.slots[each]) for each in good if each in self.store.slots
        ]
        self.store.write("states", places, self.layout.vector(solution.value))

    def recall(self, rows: Tensor | None) -> Tensor | None:
        places = [place for place in self._places(rows) if place[1] in self.store.with_adjoint]
        if not places:
            return None
        like = self.store.adjoints
        number = len(self.ids) if rows is None else len(rows)
        return self._spread(like, places, like.new_zeros(number, like.shape[1]))[0]

    def keep(self, u: Tensor, solved: Tensor, rows: Tensor | None) -> None:
        good = solved.tolist()
        places = {slot: row for row, slot in self._places(rows) if good[row]}  # one row for a slot
        self.store.write("adjoints", [(row, slot) for slot, row in places.items()], u)
        self.store.with_adjoint |= set(places)

    def _places(self, rows: Tensor | None) -> list[tuple[int, int]]:
        """(row, slot) of a backward pass, whose samples may have been replaced since."""
        if self.store.kind is not self.kind:
            return []
        ids = self.ids if rows is None else [self.ids[row] for row in rows.tolist()]
        return self.store.places(ids)

    @staticmethod
    def _spread(kept: Tensor, places: list[tuple[int, int]], like: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of the ``places`` in the shape of ``like`` (n, D), and the rows (n, 1) that have one."""
        rows, slots = (torch.tensor(each, device=like.device) for each in zip(*places, strict=True))
        found = torch.zeros_like(like).index_copy(0, rows, kept.index_select(0, slots))
        known = torch.zeros(len(like), 1, dtype=torch.bool, device=like.device)
        return found.detach(), known.index_fill(0, rows, True)


def warm_starts(given: Any) -> WarmStarts | None:
    """The store of ``DEQ(warm_start=given)``."""
    return given if given is None or isinstance(given, WarmStarts) else WarmStarts(given)


def visit_of(
    store: WarmStarts | None, ids: Any, start: Any, mask: Tensor | None, training: bool
) -> Visit | None:
    """The visit of a solve with these ``ids``; None for a cold start, as always in evaluation mode."""
    if ids is None:
        return None
    if store is None:
        raise ValueError(
            "ids name samples for a layer with warm_start, DEQ(..., warm_start=samples)"
        )
    if not training:
        check_ids(ids, len(pytree.tree_leaves(start)[0]))
        return None
    return store.visit(ids, start, mask)


def check_ids(ids: Any, batch: int) -> list[int]:
    """``ids`` as a list of ``batch`` integers; TypeError or ValueError naming it."""
    if in_transform():
        raise RuntimeError("ids cannot be used inside of torch.func's transforms: leave them out")
    if isinstance(ids, Tensor):
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"ids must be integers, one for each sample, got dtype {ids.dtype}")
        if tuple(ids.shape) != (batch,):
            raise ValueError(f"ids must be of shape ({batch},), got {tuple(ids.shape)}")
        return ids.tolist()
    if not isinstance(ids, (list, tuple)):
        raise TypeError(f"ids must be a tensor (B,) or a list of integers, got {type(ids)}")
    if len(ids) != batch:
        raise ValueError(f"ids must hold one integer for each of {batch} samples, got {len(ids)}")
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise TypeError(f"ids must be integers, one for each sample, got {ids!r}")
    return list(ids)
