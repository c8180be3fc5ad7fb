"""What programs of a solve read beside its state, in one of a few batch sizes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from solvers.compiled.packing import Packed, pack
from solvers.core.layout import leaves_of, map_tensors, take
from solvers.core.problem import Problem

WASTE = 2  # a batch is padded to a size that programs exist for, up to so many times its own


@dataclass
class Given:
    """The inputs of a map."""

    args: tuple[Any, ...]
    mask: Tensor | None

    @classmethod
    def of(cls, problem: Problem, padding: Padding) -> Packed:
        """The inputs of ``problem`` with rows added to the batch, packed."""
        args, mask = map_tensors(detached, (problem.args, problem.mask))
        return pack(cls(padding.tree(args), padding.tree(mask)))

    def problem(self, like: Problem) -> Problem:
        """``like`` with these tensors, within a program."""
        return replace(
            like,
            f=like.programs.traced_map(like.f),
            args=self.args,
            mask=self.mask,
            programs=None,
            compiled=None,
            checked=True,
            draws=None,
        )


def detached(tensor: Tensor) -> Tensor:
    """Without a graph, and not of inference mode: no backward pass could save such a tensor.

    Nor with a sign that is yet to be flipped: generated code reads the numbers as they lie.
    """
    return tensor.clone() if tensor.is_inference() else tensor.detach().resolve_neg()


@dataclass(frozen=True)
class Padding:
    """Copies of the last sample that fill a batch up to a size that programs exist for."""

    batch: int
    index: Tensor | None  # rows of the padded batch in the caller's; None: the same

    @classmethod
    def of(cls, problem: Problem, state: Tensor) -> Padding:
        """The padding for ``problem`` and a state (B, D); see :func:`program_size`."""
        batch = state.shape[0]
        shapes = tuple(
            (tuple(leaf.shape[1:]), leaf.dtype)
            for leaf in leaves_of(problem.args)
            if isinstance(leaf, Tensor)
        )
        fixed = not problem.compact
        kind = (problem.layout.shapes, shapes)
        return cls.to_size(problem.programs, kind, batch, fixed, state.device)

    @classmethod
    def to_size(
        cls, programs: Any, kind: Hashable, batch: int, fixed: bool, device: torch.device
    ) -> Padding:
        """The padding of a batch of samples of this ``kind``; none where it is ``fixed``."""
        sizes = programs.sizes.setdefault(kind, [])
        size = batch if fixed else program_size(batch, sizes)
        if size == batch:
            return cls(batch, None)
        return cls(batch, torch.arange(size, device=device).clamp_max(batch - 1))

    def rows(self, tensor: Tensor) -> Tensor:
        """(B, ...) -> (size, ...), contiguous."""
        padded = tensor if self.index is None else tensor.index_select(0, self.index)
        return padded.contiguous()

    def own(self, tensor: Tensor) -> Tensor:
        """(size, ...) -> (B, ...), where no later program writes: CUDA graphs do to what they returned."""
        cut = tensor if self.index is None else tensor[: self.batch]
        return cut.clone() if tensor.is_cuda else cut

    def zeros(self, tensor: Tensor) -> Tensor:
        """(B, ...) -> (size, ...), the added rows zero."""
        tensor = tensor.detach().resolve_neg().contiguous()
        if self.index is None:
            return tensor
        added = tensor.new_zeros(len(self.index) - self.batch, *tensor.shape[1:])
        return torch.cat((tensor, added))

    def gradients(
        self, found: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """What was ``found`` for padded inputs, for the ``inputs``; no two in the same memory.

        Autograd takes a gradient over as ``.grad``, which the user may change in place.
        """
        seen, cut = set[int](), list[Tensor | None]()
        for gradient, like in zip(found, inputs, strict=True):
            if gradient is not None:
                if self.index is not None and like.dim():
                    gradient = gradient[: len(like)]
                memory = gradient.untyped_storage().data_ptr()
                if memory in seen:
                    gradient = gradient.clone()
                seen.add(memory)
                if gradient.is_cuda:  # a later program may write there
                    gradient = gradient.clone()
            cut.append(gradient)
        return cut

    def tree(self, tree: Any) -> Any:
        """The pytree with its batched tensors padded."""
        return tree if self.index is None else take(tree, self.index, self.batch)


def program_size(batch: int, sizes: list[int]) -> int:
    """The size of batch to compile for; a new one is added to ``sizes``.

    A batch that fills at least half of a known size is padded to it. The first two other sizes are taken as
    they come, later ones are powers of two.
    """
    known = [size for size in sizes if batch <= size <= WASTE * batch]
    if batch in sizes:
        return batch
    if known:
        return min(known)
    size = batch if len(sizes) < 2 else 1 << (batch - 1).bit_length()
    sizes.append(size)
    return size
