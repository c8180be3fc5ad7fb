"""Narrow products that are transposed: equal to those that the user wrote, and chosen by time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from solvers.compiled.graphs import narrow, tracing

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
mm = torch.ops.aten.mm.default


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))


def rewritten(f: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, int]:
    """What the rewritten graph computes, and how many of its products are transposed."""
    graph, _ = tracing.trace(lambda *tensors: [f(*tensors)], given)
    narrow.with_faster_products(graph)
    nodes = [node for node in graph.graph.nodes if node.target is mm]
    turned = [n for n in nodes if n.args[0].target is torch.ops.aten.permute.default]
    return graph(*given)[0], len(turned)


CASES: list[Any] = [
    pytest.param(lambda a, b: a @ b, 1, id="mm"),
    pytest.param(lambda a, b: a @ b.mT, 1, id="strides"),
    pytest.param(lambda a, b: a.view(8, 5, 6) @ b, 1, id="tokens"),
    pytest.param(lambda a, b: linear(a, b, b[0]), 1, id="bias"),
    pytest.param(lambda a, b: torch.addmm(a, a, b), 1, id="matrix"),
    pytest.param(lambda a, b: (a @ b) @ b, 2, id="chain"),
    pytest.param(lambda a, b: (a @ b).view(20, 12).sin(), 1, id="view of it"),
]


@pytest.mark.parametrize(("f", "products"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal(
    f: Callable[..., Tensor],
    products: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(narrow, "_transposed_is_faster", lambda *pair: True)
    a, b = draw(40, 6, dtype=dtype), draw(6, 6, dtype=dtype) @ torch.ones(6, 6, dtype=dtype)
    found, turned = rewritten(f, a, b)
    expected = f(a, b)
    assert turned == products
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize(
    "given",
    [
        (draw(80, 6), draw(6, 16)),  # wide
        (draw(80, 6), draw(6, 1)),  # a vector
        (draw(20, 6), draw(6, 6)),  # short
        (draw(80, 6).bfloat16(), draw(6, 6).bfloat16()),
    ],
    ids=["wide", "vector", "short", "half"],
)
def test_others_are_left(given: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "_transposed_is_faster", lambda *pair: True)
    assert rewritten(lambda a, b: a @ b, *given)[1] == 0


def test_what_is_not_faster_is_left_and_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def times(*runs: Callable[[], Tensor]) -> list[float]:
        asked.append(len(runs))
        torch.testing.assert_close(runs[1](), runs[0]().mT)
        return [1.0, 0.9]

    monkeypatch.setattr(narrow, "_FASTER", {})
    monkeypatch.setattr(narrow, "_least_times", times)
    for _ in range(2):
        assert rewritten(lambda a, b: a @ b, draw(40, 6), draw(6, 6))[1] == 0
    assert asked == [2]
    monkeypatch.setattr(narrow, "GAIN", 0.95)
    assert rewritten(lambda a, b: a @ b, draw(44, 6), draw(6, 6))[1] == 1
    assert asked == [2, 2]
