"""Narrow products of matrices, transposed where that is faster.

Libraries of linear algebra are made for results of 16 columns and more. A result (M, N) of few columns, as
spins of few components have it, may take three times as long as its transpose. Which is faster
is measured when a program is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

NARROW = 16  # columns from which on products are left as they are
GAIN = 0.85  # of the time, at most, that makes the transposed product worth its copy
ROUNDS = 15

aten = torch.ops.aten
_FASTER: dict[Any, bool] = {}  # by what the two matrices look like, and threads


def with_faster_products(graph: GraphModule) -> GraphModule:
    """The traced ``graph`` with narrow products transposed where that is faster; changed in place."""
    for node in list(graph.graph.nodes):
        factors = _factors(node)
        if factors is None or not _transposed_is_faster(*[each.meta["val"] for each in factors]):
            continue
        with graph.graph.inserting_before(node):
            turned = [_call(graph, aten.permute.default, each, [1, 0]) for each in factors]
            product = _call(graph, aten.mm.default, *reversed(turned))
            found = _call(graph, aten.permute.default, product, [1, 0])
            if node.target is aten.addmm.default:
                found = _call(graph, aten.add.Tensor, found, node.args[0])
            # Laid out as the product was: views of it may follow. The copy is fused into what reads it.
            found = _call(graph, aten.clone.default, found, memory_format=torch.contiguous_format)
        found.meta = dict(node.meta)  # the next product asks
        node.replace_all_uses_with(found)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _call(graph: GraphModule, target: Any, *args: Any, **kwargs: Any) -> Node:
    return graph.graph.call_function(target, args, kwargs)


def _factors(node: Node) -> tuple[Node, Node] | None:
    """The matrices (M, K) and (K, N) that a node multiplies, where its result is narrow and long."""
    if node.target is aten.mm.default:
        first, second = node.args
    elif node.target is aten.addmm.default and not node.kwargs and len(node.args) == 3:
        _, first, second = node.args
    else:
        return None
    value = node.meta.get("val")
    if not isinstance(first, Node) or not isinstance(second, Node) or value is None:
        return None
    rows, columns = value.shape
    fits = value.device.type == "cpu" and value.dtype in (torch.float32, torch.float64)
    return (first, second) if fits and 1 < columns < NARROW and rows >= 4 * columns else None


def _transposed_is_faster(first: Tensor, second: Tensor) -> bool:
    key = (
        first.shape,
        first.stride(),
        second.shape,
        second.stride(),
        first.dtype,
        torch.get_num_threads(),
    )
    if key not in _FASTER:
        a, b = (_like(each) for each in (first, second))
        plain, transposed = _least_times(lambda: torch.mm(a, b), lambda: torch.mm(b.mT, a.mT))
        _FASTER[key] = transposed < GAIN * plain
    return _FASTER[key]


def _like(tensor: Tensor) -> Tensor:
    """Numbers in the layout of a tensor without data."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.fill_(0.5)


def _least_times(*runs: Callable[[], object]) -> list[float]:
    """The least seconds that each has taken, run in turns: other processes only ever add to them."""
    least = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        for number, run in enumerate(runs):
            start = time.perf_counter()
            run()
            least[number] = min(least[number], time.perf_counter() - start)
    return least
