"""Traced functions as graphs of operators: made, split by what they depend on, rewritten, compiled.

A solve evaluates its map at many states with the same weights and inputs. What does not depend on the state
(a normalised weight, what a layer makes of its input, the linearisation of which products are taken) need
not be computed again. The backward operator of an activation takes a vector and the point at once. Written
as ``vector * slope``, with ``slope`` a function of the point alone, the slope is computed once.

Importing this imports torch's compiler, which takes seconds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def trace(
    function: Callable[..., list[Tensor]], inputs: Sequence[Tensor], *, fixed: int = 0
) -> tuple[GraphModule, list[Tensor]]:
    """The operators that ``function`` applies to tensors like ``inputs``, and such tensors, without data.

    Args:
        function, inputs: what to trace.
        fixed: so many of the inputs, the last ones, must not be written to.

    Raises:
        ValueError: it reads a tensor that is no input, draws random numbers, or writes to a fixed input.
        Exception: what it raises where it asks for the numbers in a tensor, which are not known.
    """
    # Inductor keeps on disk what it makes of tensors from such a mode.
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    examples: list[Tensor] = [mode.from_tensor(t.detach(), static_shapes=True) for t in inputs]
    tracer = make_fx(function, tracing_mode="fake", _error_on_data_dependent_ops=True)
    graph = tracer(*examples)
    nodes = list(graph.graph.nodes)
    kept = set([node for node in nodes if node.op == "placeholder"][len(inputs) - fixed :])
    for node in nodes:
        if node.op == "get_attr":
            _check_constant(getattr(graph, node.target, None), node)
        elif isinstance(node.target, torch._ops.OpOverload):
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise ValueError(f"it draws random numbers ({node.target})")
            if any(value in kept for value in _written_by(node)):
                raise ValueError(
                    f"it changes a parameter or buffer at every evaluation ({node.target}), as a "
                    "parametrisation with power iteration does: call eval(), or bound the weight otherwise"
                )
    return graph, examples


def functional(graph: GraphModule, examples: Sequence[Tensor]) -> GraphModule:
    """The graph with operators that write to nothing: the same, if none of its own does."""
    if not any(_written_by(node) for node in graph.graph.nodes):
        return graph
    without: Any = torch.func.functionalize(lambda *tensors: graph(*tensors), remove="mutations")
    with torch.no_grad():
        return make_fx(without, tracing_mode="fake")(*examples)


def _written_by(node: Node) -> list[Any]:
    """The arguments that an operator writes to."""
    found: list[Any] = []
    if not isinstance(node.target, torch._ops.OpOverload):
        return found
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return found


def _check_constant(value: object, node: Node) -> None:
    """Raise ValueError for a tensor from outside; one that the function itself made is copied at once."""
    made = {torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default}
    if not isinstance(value, Tensor) or all(user.target in made for user in node.users):
        return
    if value.dim() or value.requires_grad:  # a number serves, without a gradient
        raise ValueError(
            f"it reads a tensor of shape {tuple(value.shape)} that is no parameter or buffer of the update: "
            "register it as one, or pass it in x"
        )


def compiled(
    graph: GraphModule,
    tensors: Sequence[Tensor],
    backend: Any,
    mode: str | None,
    options: dict[str, Any] | None,
) -> Callable[..., Sequence[Tensor]]:
    """The graph as a callable, compiled for tensors like ``tensors``; see ``Programs`` for the options."""
    if backend == "eager":
        return graph.forward
    with warnings.catch_warnings():  # torch's own, about its own code
        warnings.simplefilter("ignore")
        if backend == "inductor":
            chosen = {} if mode in (None, "default") else torch._inductor.list_mode_options(mode)
            # A program's key holds the sizes and strides of its inputs.
            patches = {"size_asserts": False, **chosen}
            make: Any = torch._inductor.compile
            return make(graph, list(tensors), options=patches | (options or {}))
        make = backend if callable(backend) else torch._dynamo.lookup_backend(backend)
        return make(graph, list(tensors))


aten = torch.ops.aten


def with_slopes(graph: GraphModule, examples: Sequence[Tensor]) -> GraphModule:
    """The graph with the backward operators in ``RULES`` written as products; itself, if it has none."""
    if not any(node.target in RULES for node in graph.graph.nodes):
        return graph
    with torch.no_grad():
        return make_fx(graph, decomposition_table=RULES, tracing_mode="fake")(*examples)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * density
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    bend = torch.tanh(scale * (x + cubic * x * x * x))
    return 0.5 * (1 + bend) + 0.5 * x * (1 - bend * bend) * scale * (1 + 3 * cubic * x * x)


def _silu(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gate * (1 + x * (1 - gate))


def _sigmoid(value: Tensor) -> Tensor:
    return value * (1 - value)


def _tanh(value: Tensor) -> Tensor:
    return 1 - value * value


def _softplus(x: Tensor, beta: float, threshold: float) -> Tensor:
    return torch.where(x * beta > threshold, 1.0, torch.sigmoid(x * beta))


def _product(slope: Callable[..., Tensor]) -> Callable[..., Any]:
    """The backward operator of what has this slope, in float32 at least."""

    def rule(vector: Tensor, at: Tensor, *rest: Any, **options: Any) -> Any:
        if at.is_complex():
            return NotImplemented
        wide = torch.promote_types(at.dtype, torch.float32)
        return (vector.to(wide) * slope(at.to(wide), *rest, **options)).to(vector.dtype)

    return rule


RULES: dict[Any, Callable[..., Any]] = {
    aten.gelu_backward.default: _product(_gelu),
    aten.silu_backward.default: _product(_silu),
    aten.sigmoid_backward.default: _product(_sigmoid),  # of its value, as tanh's
    aten.tanh_backward.default: _product(_tanh),
    aten.softplus_backward.default: _product(_softplus),
}


Run = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Part:
    """A graph of its own, and what it takes: inputs of the whole by their number, then ``saved`` nodes."""

    graph: GraphModule
    inputs: tuple[int, ...]
    examples: list[Tensor]


@dataclass(frozen=True)
class Bound:
    """A second part as a function of the varying inputs alone; it holds all else that it takes."""

    run: Run
    others: Sequence[Tensor]

    def __call__(self, *varying: Tensor) -> Sequence[Tensor]:
        return self.run(*varying, *self.others)


@dataclass(frozen=True)
class Stages:
    """The compiled parts of a function, each with the numbers of the inputs that it takes."""

    first: Run | None  # None: nothing is saved
    first_inputs: tuple[int, ...]
    then: list[tuple[Run, tuple[int, ...]]]  # beside the varying ones

    def at(self, inputs: Sequence[Tensor]) -> list[Bound]:
        """The functions of the varying inputs alone."""
        saved: Sequence[Any] = ()
        if self.first is not None:
            saved = self.first(*[inputs[n] for n in self.first_inputs])
        return [Bound(run, [*(inputs[n] for n in numbers), *saved]) for run, numbers in self.then]


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
    first, then = split(whole, examples, varying, [outputs[chosen] for chosen in wanted])
    return Stages(
        compiled(first.graph, first.examples) if first.graph.graph.output_node().args[0] else None,
        first.inputs,
        [(compiled(part.graph, part.examples), part.inputs) for part in then],
    )


def split(
    whole: GraphModule,
    examples: Sequence[Tensor],
    varying: Sequence[int],
    wanted: Sequence[Sequence[int]],
) -> tuple[Part, list[Part]]:
    """Split a graph by what depends on the ``varying`` inputs.

    The first part computes what is saved; each of the others takes varying inputs, others, and what is saved.

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
    return first, then


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
