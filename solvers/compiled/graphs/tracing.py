"""Functions of tensors as graphs of operators, and graphs as compiled code.

Importing this imports torch's compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
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
