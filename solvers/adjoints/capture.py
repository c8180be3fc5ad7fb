"""A recorded evaluation of ``f`` at the solution, cut off from the surrounding autograd graph.

Every tensor that ``f`` reads and that requires a gradient (an argument, a parameter, a tensor that a
closure captured) is replaced by a detached alias while ``f`` runs. The recorded graph has these
aliases and the state as its leaves, so that its derivatives are the partial ones that implicit
differentiation needs. No list of parameters is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from solvers.core.layout import leaves_of
from solvers.core.modes import constant_weights, uncompiled, weights_of_this_solve
from solvers.core.problem import Problem
from solvers.core.purity import version_of


@dataclass
class Recorder:
    """Records an evaluation of ``problem``; outside tensors are found by identity."""

    problem: Problem
    pairs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # (outside, alias)
    others: list[Tensor] = field(default_factory=list)  # leaves that escaped: their own aliases

    @property
    def inputs(self) -> list[Tensor]:
        """The outside tensors that ``f`` reads, in the order of ``aliases``."""
        return [*map(itemgetter(0), self.pairs.values()), *self.others]

    @property
    def aliases(self) -> list[Tensor]:
        return [*map(itemgetter(1), self.pairs.values()), *self.others]

    def alias(self, outside: Tensor) -> Tensor:
        """The alias of ``outside``, made at the first call."""
        known = self.pairs.get(id(outside))
        if known is None:
            known = (outside, outside.detach().requires_grad_())
            self.pairs[id(outside)] = known
        return known[1]

    def record(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """``point`` and ``output = f(point; aliases)``, (B, D) both; finds what to alias.

        A tensor that escapes the substitution (as an argument of a custom autograd function) stays
        attached to its own graph, which is followed to its leaves, so that no gradient is lost.
        Compiled functions run as they were before compilation: their compiler would see other aliases
        each time and compile anew, and what it makes cannot be differentiated twice.
        """
        point = z.detach().requires_grad_()
        args = self.problem.args
        if any(_requires_grad(leaf) for argument in args for leaf in leaves_of(argument)):
            args = pytree.tree_map(lambda t: self.alias(t) if _requires_grad(t) else t, args)
        mode = _Substitution(self, point)
        with constant_weights(), torch.enable_grad(), uncompiled(), mode:
            output = replace(self.problem, args=args).masked_map(point)
        self.others = other_leaves(output, mode.inside)
        return point, output


class _Substitution(TorchFunctionMode):
    """Replaces outside tensors that require a gradient in the arguments of every torch function."""

    def __init__(self, recorder: Recorder, point: Tensor) -> None:
        super().__init__()
        self.recorder = recorder
        self.start = sequence_number()
        # Leaves that belong to the evaluation: the state, the aliases, leaves made by f itself.
        known = (point, *recorder.aliases)
        self.inside = dict(zip(map(id, known), known, strict=True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A leaf that a function returns was made by f, unless the same tensor went in as a leaf (as
        # with a .to() that changes nothing). Asked before: .requires_grad_() makes leaves in place.
        given: set[int] = set()
        own = self._replaced(args, given)
        named = (
            dict(zip(kwargs, self._replaced(kwargs.values(), given), strict=True)) if kwargs else {}
        )
        result = func(*own, **named)
        if isinstance(result, Tensor) and result.requires_grad and result.is_leaf:
            self.inside.update({} if id(result) in given else {id(result): result})
        return result

    def _replaced(self, values: Iterable[Any], given: set[int]) -> list[Any]:
        """The values with aliases for tensors from outside; ``given`` gets those that require a gradient."""
        found, inside, pairs = [], self.inside, self.recorder.pairs
        recorded = torch.is_grad_enabled()
        for value in values:
            if isinstance(value, Tensor):
                if value.requires_grad:
                    if recorded and id(value) not in inside:
                        node = value.grad_fn
                        if id(value) in pairs or node is None or node._sequence_nr() < self.start:
                            value = self.recorder.alias(value)
                            inside[id(value)] = value
                    given.add(id(value))
            elif recorded and type(value) in (list, tuple):
                value = type(value)(self._replaced(value, set()))
            found.append(value)
        return found


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def other_leaves(output: Tensor, inside: dict[int, Tensor]) -> list[Tensor]:
    """Leaves of the graph of ``output`` that are not among ``inside``, by identity."""
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
    """Number that autograd gives to the next node of this thread."""
    known = getattr(torch.autograd, "_get_sequence_nr", None)
    if known is not None:  # not in every version of torch
        return known()
    with torch.enable_grad():
        probe = torch.ones((), requires_grad=True) * 1
    node = probe.grad_fn
    assert node is not None
    return node._sequence_nr()


class Checkpoints:
    """Evaluations of one solve; a repetition must find everything as it was in the forward pass.

    What ``f`` reads is found at the first evaluation of each batch size; a backward pass repeats one of
    these. RuntimeError is raised where one of these tensors has been changed in place since, as by
    autograd for the tensors that it saves, and where ``f`` reads another parameter (one was replaced).
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.read = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        self.versions = [version_of(leaf) for leaf in self.read]
        self.known = WeakTensorKeyDictionary()  # its keys: what f reads, and what it made and keeps
        self.batch = -1  # samples of the latest evaluation

    def __call__(self, function: Callable[[Tensor], Any], z: Tensor) -> Any:
        """``function(z)``, recorded."""
        weights = weights_of_this_solve()
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
            with uncompiled() if watched else nullcontext(), weights.constant(), watch:
                return function(z)

        output = checkpoint(run, z, use_reentrant=False)
        if watched:
            self._note(reads, output)
            noted = True
            self.known.update(dict.fromkeys(t for t, _ in weights.computed.values()))
        return output

    def _note(self, reads: _Reads, output: Any) -> None:
        """Remember what an evaluation read; versions, but of what it changed itself (a counter)."""
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
                    f"a tensor of shape {tuple(tensor.shape)} that f reads was changed in place after "
                    "the forward pass (by an optimizer's step?), so Unrolled(checkpoint=True) cannot "
                    "repeat its evaluations: call backward before, or use Unrolled()"
                )


class _Reads(TorchFunctionMode):
    """Finds the tensors from outside that an evaluation at ``z`` reads, with their versions."""

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
    """Raises where an evaluation reads what the forward pass did not."""

    def __init__(self, record: Checkpoints, z: Tensor) -> None:
        super().__init__(z)
        self.record = record

    def note(self, tensor: Tensor) -> None:
        # Others may be results that a nested backward pass has made.
        parameter = isinstance(tensor, Parameter)
        if parameter and tensor not in self.record.known:
            raise RuntimeError(
                f"f reads a tensor of shape {tuple(tensor.shape)} that it did not read in the forward "
                "pass (a weight was replaced, or torch.func.functional_call has ended?), so "
                "Unrolled(checkpoint=True) cannot repeat its evaluations: call backward before, or "
                "use Unrolled()"
            )
