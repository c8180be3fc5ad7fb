"""Evaluations of an unrolled solve that are repeated in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from solvers.adjoints.reads import Reads, read_by
from solvers.core.context import CONTEXT, constant_weights, sequence_number, within
from solvers.core.modes import uncompiled
from solvers.core.validate import version_of

_CHANGED = (
    "f reads a tensor of shape {} that {} the forward pass (an optimizer's step, a replaced weight, or the "
    "end of torch.func.functional_call?): call backward before, or use Unrolled() without checkpoints"
)


class Checkpoints:
    """Evaluations of one solve; a repetition must find everything as it was in the forward pass.

    The first evaluation of each batch size finds the tensors that ``f`` reads. A backward pass raises
    RuntimeError if one of them has changed in place or if ``f`` reads another parameter.
    """

    def __init__(self, args: tuple[Any, ...], modules: list[nn.Module]) -> None:
        self.modules = modules  # that f may call
        self.batch = -1  # samples of the latest evaluation
        # The tensors that f reads with their versions; None for those that f itself changes.
        self.read: dict[int, tuple[Tensor, int | None]] = {}
        for leaf in pytree.tree_leaves(args):
            if isinstance(leaf, Tensor):
                self.read[id(leaf)] = leaf, version_of(leaf)

    def __call__(self, function: Callable[[Tensor], Any], z: Tensor) -> Any:
        """``function(z)``, recorded."""
        weights = CONTEXT.weights
        assert weights is not None
        weights.checkpointed = True
        watched, self.batch = z.shape[0] != self.batch, z.shape[0]
        reads, calls, noted = self._watch(z), 0, False

        def run(z: Tensor) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                # A compiler would take the watch for a part of the evaluation.
                with (
                    uncompiled() if watched else nullcontext(),
                    within(weights=weights),
                    reads if watched else nullcontext(),
                ):
                    return function(z)
            self._check()
            # If nothing is noted yet, f itself takes a derivative and is being watched.
            with (
                constant_weights(self.modules, weights, repeated=True),
                uncompiled() if watched else nullcontext(),
                self._watch(z, again=True) if noted else nullcontext(),
            ):
                return function(z)

        output = checkpoint(run, z, use_reentrant=False)
        if watched:
            self._note(reads, output)
            noted = True
        return output

    def _watch(self, z: Tensor, *, again: bool = False) -> Reads:
        """Return a context that finds the tensors that an evaluation at ``z`` reads.

        ``again`` raises RuntimeError for parameters that the first evaluation did not read. Other tensors may
        be results that a nested backward pass has made.
        """
        start, known = sequence_number(), self.read

        def look(reads: Reads, tensor: Tensor) -> Tensor:
            node = tensor.grad_fn
            if node is None or node._sequence_nr() < start:
                reads.found.setdefault(id(tensor), (tensor, version_of(tensor)))
                if again and isinstance(tensor, Parameter) and id(tensor) not in known:
                    raise RuntimeError(_CHANGED.format(tuple(tensor.shape), "it did not read in"))
            return tensor

        return Reads(look, z)

    def _note(self, reads: Reads, output: Any) -> None:
        """Remember what was read; tensors that the evaluation itself changed (a counter) may change."""
        found: dict[int, tuple[Tensor, int | None]] = self.read | reads.found
        inside = {number for number, tensor in reads.inside.items() if tensor.is_leaf}
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                for each in read_by(leaf, inside)[0]:
                    found[id(each)] = each, version_of(each)
        reads.inside, reads.found = {}, {}
        for number, (tensor, version) in found.items():
            found[number] = tensor, version if version == version_of(tensor) else None
        self.read = found

    def _check(self) -> None:
        for tensor, version in self.read.values():
            if version is not None and version_of(tensor) != version:
                raise RuntimeError(
                    _CHANGED.format(tuple(tensor.shape), "was changed in place after")
                )
