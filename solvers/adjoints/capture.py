"""A recorded evaluation of ``f`` at the solution, cut off from the surrounding autograd graph.

Every tensor that ``f`` reads and that requires a gradient (an argument, a parameter, a tensor that a
closure captured) is replaced by a detached alias while ``f`` runs. The recorded graph has these
aliases and the state as its leaves, so that its derivatives are the partial ones that implicit
differentiation needs. No list of parameters is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from solvers.core.layout import leaves_of
from solvers.core.modes import constant_weights, uncompiled
from solvers.core.problem import Problem


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
