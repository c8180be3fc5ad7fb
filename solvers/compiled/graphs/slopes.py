"""Derivatives of activations as products with their slope.

The backward operator of an activation takes a vector and the point at once. Written as ``vector * slope``,
with ``slope`` a function of the point alone, the slope of a linearisation is computed once, and not again for
every vector that is multiplied by the Jacobian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

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
