"""Recompute the evaluations of an unrolled solve in the backward pass, and record what they read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from solvers.core.context import CONTEXT, within
from solvers.core.modes import uncompiled
from solvers.core.purity import version_of


def other_leaves(output: Tensor, inside: dict[int, Tensor]) -> list[Tensor]:
    """Return the leaves of the graph of ``output`` that are not in ``inside``, by identity."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    stack: list[Any] = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in inside:
            found.append(variable)
        for edge in node.next_functions:
            stack.append(edge[0])
    return found


def sequence_number() -> int:
    """Return the sequence number of the next autograd node of this thread."""
    known = getattr(torch.autograd, "_get_sequence_nr", None)
    if known is not None:  # not in every version of torch
        return known()
    with torch.enable_grad():
        probe = torch.ones((), requires_grad=True) * 1
    node = probe.grad_fn
    assert node is not None
    return node._sequence_nr()


class Checkpoints:
    """Evaluations of one solve that the backward pass recomputes.

    The tensors that ``f`` reads are recorded at the first evaluation of each batch size. As for tensors
    saved by autograd, a RuntimeError is raised if one of them was modified in place before it is read
    again, or if ``f`` reads a parameter that it did not read before (one was replaced).
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.read = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        self.versions = [version_of(leaf) for leaf in self.read]
        self.known = WeakTensorKeyDictionary()  # its keys: what f reads, and what it made and keeps
        self.batch = -1  # samples of the latest evaluation

    def __call__(self, function: Callable[[Tensor], Any], z: Tensor) -> Any:
        """Return ``function(z)`` with a graph."""
        weights = CONTEXT.weights
        assert weights is not None
        weights.checkpointed = True
        watched, self.batch = z.shape[0] != self.batch, z.shape[0]
        reads = _Reads(z)
        repeating = noted = False

        def run(z: Tensor) -> Any:
            nonlocal repeating
            if repeating:
                self._check()
            watch = nullcontext() if not watched else _Repetition(self, z) if repeating else reads
            if repeating and not noted:  # by a derivative that f itself takes: it is being watched
                watch = nullcontext()
            repeating = True
            # A compiler would take the watch for a part of the evaluation.
            with uncompiled() if watched else nullcontext(), within(weights=weights), watch:
                return function(z)

        output = checkpoint(run, z, use_reentrant=False)
        if watched:
            self._note(reads, output)
            noted = True
            self.known.update(dict.fromkeys(t for t, _ in weights.computed.values()))
        return output

    def _note(self, reads: _Reads, output: Any) -> None:
        """Remember what an evaluation read, with versions except for tensors that it changed itself."""
        given = zip(self.read, self.versions, strict=True)
        found = {id(t): (t, version) for t, version in given} | reads.found
        leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        for leaf in leaves:
            if leaf.requires_grad:
                inside = {number: t for number, t in reads.inside.items() if t.is_leaf}
                found |= {id(t): (t, version_of(t)) for t in other_leaves(leaf, inside)}
        for tensor in (*reads.inside.values(), *(t for t, _ in found.values())):
            self.known[tensor] = None
        reads.inside, reads.found = {}, {}
        kept = [(t, version) for t, version in found.values() if version == version_of(t)]
        self.read, self.versions = [t for t, _ in kept], [version for _, version in kept]

    def _check(self) -> None:
        for tensor, version in zip(self.read, self.versions, strict=True):
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that f reads was modified in place after "
                    "the forward pass (by optimizer.step()?), so Unrolled(checkpoint=True) cannot "
                    "recompute its evaluations: call backward first, or use Unrolled()"
                )


class _Reads(TorchFunctionMode):
    """Record the external tensors that an evaluation at ``z`` reads, with their versions."""

    def __init__(self, z: Tensor) -> None:
        super().__init__()
        self.start = sequence_number()
        self.inside: dict[int, Tensor] = {id(z): z}
        self.found: dict[int, tuple[Tensor, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and self._outside(leaf):
                self.note(leaf)
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self.found:
                self.inside[id(leaf)] = leaf
        return result

    def _outside(self, tensor: Tensor) -> bool:
        node = tensor.grad_fn
        made_here = node is not None and node._sequence_nr() >= self.start
        return id(tensor) not in self.inside and not made_here

    def note(self, tensor: Tensor) -> None:
        """Called before each use."""
        self.found.setdefault(id(tensor), (tensor, version_of(tensor)))


class _Repetition(_Reads):
    """Raise RuntimeError if an evaluation reads a tensor that the forward pass did not read."""

    def __init__(self, record: Checkpoints, z: Tensor) -> None:
        super().__init__(z)
        self.record = record

    def note(self, tensor: Tensor) -> None:
        # Others may be results that a nested backward pass has made.
        parameter = isinstance(tensor, Parameter)
        if parameter and tensor not in self.record.known:
            raise RuntimeError(
                f"f reads a tensor of shape {tuple(tensor.shape)} that it did not read in the forward "
                "pass (was a weight replaced, or has torch.func.functional_call returned?), so "
                "Unrolled(checkpoint=True) cannot recompute its evaluations: call backward first, or "
                "use Unrolled()"
            )
