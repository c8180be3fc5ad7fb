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
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def trace(
    function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]
) -> tuple[GraphModule, list[Tensor]]:
    """The operators that ``function`` applies to tensors like ``inputs``, and such tensors, without data.

    Raises:
        ValueError: it reads a tensor of which a gradient may be asked and that is no input.
        Exception: what it raises where it asks for the numbers in a tensor, which are not known.
    """
    # Inductor keeps on disk what it makes of tensors from such a mode.
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    examples: list[Tensor] = [mode.from_tensor(t.detach(), static_shapes=True) for t in inputs]
    tracer = make_fx(function, tracing_mode="fake", _error_on_data_dependent_ops=True)
    graph = tracer(*examples)
    for node in graph.graph.nodes:
        value = getattr(graph, node.target, None) if node.op == "get_attr" else None
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(
                f"it reads a tensor of shape {tuple(value.shape)} that requires a gradient and is no "
                "parameter of the update: register it as one, or pass it in x"
            )
    return graph, examples


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
            patches = {} if mode in (None, "default") else torch._inductor.list_mode_options(mode)
            make: Any = torch._inductor.compile
            return make(graph, list(tensors), options=patches | (options or {}))
        make = backend if callable(backend) else torch._dynamo.lookup_backend(backend)
        return make(graph, list(tensors))
