"""Backward operators of activations as products: the same numbers, and what is left for each vector."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from solvers.compiled.graphs.slopes import RULES, with_slopes
from solvers.compiled.graphs.stages import made

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu by tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "sharp softplus": partial(F.softplus, beta=3.0, threshold=2.0),
}


def pulled(activation: Callable[..., Tensor], vector: Tensor, x: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return list(torch.autograd.grad(activation(x), x, vector))


def graph_of(activation: Callable[..., Tensor], vector: Tensor, x: Tensor) -> torch.fx.GraphModule:
    return make_fx(partial(pulled, activation), tracing_mode="fake")(vector, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_products_with_the_slope_are_what_autograd_computes(
    activation: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.cat((4 * torch.randn(50), torch.tensor([0.0, 30.0, -30.0]))).to(dtype)
    vector = torch.randn(53).to(dtype)
    graph = graph_of(activation, vector, x)
    changed = with_slopes(graph, [vector, x])
    assert any(node.target in RULES for node in graph.graph.nodes)
    assert not any(node.target in RULES for node in changed.graph.nodes)
    (expected,) = pulled(activation, vector, x)
    (found,) = changed(vector, x)
    assert found.dtype == dtype
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=8 * precision, atol=8 * precision)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_each_vector_costs_one_product(activation: Callable[..., Tensor]) -> None:
    """What is computed for every vector, beside the first part that is computed once."""
    vector, x = torch.randn(4), torch.randn(4)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., list[Tensor]]:
        graphs.append(graph)
        return graph.forward

    stages = made(graph_of(activation, vector, x), [vector, x], [0], [slice(None)], keep)
    _, then = graphs
    assert [str(n.target) for n in then.graph.nodes if n.op == "call_function"] == [
        "aten.mul.Tensor"
    ]
    (bound,) = stages.at([vector, x])
    torch.testing.assert_close(list(bound(vector)), pulled(activation, vector, x))
