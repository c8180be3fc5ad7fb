"""A traced function in two parts: what hangs on some of its inputs, and all else, computed once.

A solve evaluates its map at many states with the same weights and inputs. What does not depend on the state
(a normalised weight, what a layer makes of its input, the linearisation of which products are taken) need
not be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from solvers.compiled.graphs.slopes import with_slopes
from solvers.compiled.graphs.tracing import functional

Run = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Part:
    """A graph of its own, and what it takes: inputs of the whole by their number, then ``saved`` nodes."""

    graph: GraphModule
    inputs: tuple[int, ...]
    examples: list[Tensor]


@dataclass(frozen=True)
class Split:
    """``first`` computes what is saved; each of ``then`` takes varying inputs, others, and what is saved."""

    first: Part
    then: tuple[Part, ...]


@dataclass
class Bound:
    """A second part as a function of the varying inputs alone; it holds all else that it takes."""

    run: Run
    others: Sequence[Tensor]

    def __call__(self, *varying: Tensor) -> Sequence[Tensor]:
        return self.run(*varying, *self.others)


@dataclass(frozen=True)
class Stages:
    """The compiled parts of a function; the numbers are of its inputs."""

    first: Run | None  # None: nothing is saved
    first_inputs: tuple[int, ...]
    then: tuple[Run, ...]
    then_inputs: tuple[tuple[int, ...], ...]  # beside the varying ones

    def at(self, inputs: Sequence[Tensor]) -> list[Bound]:
        """The functions of the varying inputs alone."""
        saved: Sequence[Any] = ()
        if self.first is not None:
            saved = self.first(*[inputs[n] for n in self.first_inputs])
        pairs = zip(self.then, self.then_inputs, strict=True)
        return [Bound(run, [*(inputs[n] for n in numbers), *saved]) for run, numbers in pairs]


def made(
    whole: GraphModule,
    examples: Sequence[Tensor],
    varying: Sequence[int],
    wanted: Sequence[slice],
    compiled: Callable[[GraphModule, list[Tensor]], Run],
) -> Stages:
    """A graph split by :func:`split` and its parts ``compiled``; ``wanted`` says slices of its outputs."""
    whole = with_slopes(functional(whole, examples), examples)
    outputs = range(len(whole.graph.output_node().args[0]))  # type: ignore[arg-type]
    parts = split(whole, examples, varying, [outputs[chosen] for chosen in wanted])
    first = parts.first
    return Stages(
        compiled(first.graph, first.examples) if first.graph.graph.output_node().args[0] else None,
        first.inputs,
        tuple(compiled(part.graph, part.examples) for part in parts.then),
        tuple(part.inputs for part in parts.then),
    )


def split(
    whole: GraphModule,
    examples: Sequence[Tensor],
    varying: Sequence[int],
    wanted: Sequence[Sequence[int]],
) -> Split:
    """Split a graph by what depends on the ``varying`` inputs.

    Args:
        whole: a graph of operators that write to nothing, one output node with a list.
        examples: tensors like its inputs.
        varying: numbers of inputs.
        wanted: for each second part, which outputs of the graph it returns.
    """
    nodes = list(whole.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    outputs = list(nodes[-1].args[0])
    depends = {inputs[n] for n in varying}
    for node in nodes:
        if any(n in depends for n in node.all_input_nodes):
            depends.add(node)
    needs = [_Need.of([outputs[n] for n in part], depends) for part in wanted]
    saved = [node for node in nodes if any(node in need.saved for need in needs)]
    numbers = {node: n for n, node in enumerate(inputs)}

    def part(results: Sequence[Any], copied: set[Node], before: Sequence[Node]) -> Part:
        """A graph that computes ``results`` from the nodes ``before`` and from inputs, which come between."""
        used = [n for n in inputs if n in copied and n not in before]
        given = [*before[: len(varying)], *used, *before[len(varying) :]] if before else used
        graph, at = Graph(), dict[Node, Node]()
        for node in given:
            at[node] = graph.placeholder(node.name)
            at[node].meta = dict(node.meta)
        for node in nodes:
            if node in copied and node not in at:
                at[node] = graph.node_copy(node, lambda n: at[n])
        graph.output([at[r] if isinstance(r, Node) else r for r in results])
        like = [examples[numbers[n]] if n in numbers else n.meta["val"] for n in given]
        return Part(GraphModule(whole, graph), tuple(numbers[n] for n in used), like)

    own = _closure(saved)
    first = part(saved, own, ())
    heads = [inputs[n] for n in varying]
    then = [
        part([outputs[n] for n in chosen], need.copied, [*heads, *saved])
        for chosen, need in zip(wanted, needs, strict=True)
    ]
    return Split(first, tuple(then))


@dataclass(frozen=True)
class _Need:
    """What a second part is made of: nodes to compute in it, inputs among them, and nodes to save for it."""

    copied: set[Node]
    saved: set[Node]

    @classmethod
    def of(cls, results: Sequence[Any], depends: set[Node]) -> _Need:
        copied, saved = set[Node](), set[Node]()
        open_nodes = [r for r in results if isinstance(r, Node)]
        while open_nodes:
            node = open_nodes.pop()
            if node in copied or node in saved:
                continue
            if node in depends or node.op == "placeholder" or _free(node):
                copied.add(node)
                open_nodes += node.all_input_nodes
            else:
                saved.add(node)
        return cls(copied, saved)


def _free(node: Node) -> bool:
    """Whether it is better computed again than kept: a view, a constant."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    aliases = [argument.alias_info for argument in node.target._schema.arguments]
    return any(alias is not None for alias in aliases) or not node.all_input_nodes


def _closure(results: Sequence[Node]) -> set[Node]:
    """All that these nodes are computed from, themselves included."""
    found, open_nodes = set[Node](), list(results)
    while open_nodes:
        node = open_nodes.pop()
        if node not in found:
            found.add(node)
            open_nodes += node.all_input_nodes
    return found
