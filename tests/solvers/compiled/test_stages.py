"""A traced function in two parts: the same values, and nothing constant is computed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from solvers.compiled.graphs import stages, tracing

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
Function = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]


def inputs() -> list[Tensor]:
    """A state, an input and a weight."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(2)] + [
        torch.randn(4, 4, generator=generator, dtype=torch.float64)
    ]


def parts(f: Function, **options: Any) -> tuple[stages.Stages, list[Counter[str]]]:
    """The stages of f, varying by its first input, and the operators of each of their graphs."""
    graph, examples = tracing.trace(lambda *given: list(f(*given)), inputs())
    operators: list[Counter[str]] = []

    def compiled(part: GraphModule, like: list[Tensor]) -> Any:
        nodes = [node for node in part.graph.nodes if node.op == "call_function"]
        operators.append(Counter(str(node.target) for node in nodes))
        places = [node for node in part.graph.nodes if node.op == "placeholder"]
        assert [n.meta["val"].shape for n in places] == [t.shape for t in like]
        return part.forward

    wanted = options.get("wanted", (slice(None),))
    return stages.made(graph, examples, [0], wanted, compiled), operators


def constants(z: Tensor, x: Tensor, w: Tensor) -> Any:
    weight = w / torch.linalg.matrix_norm(w)
    return [torch.tanh(z @ weight) + torch.tensor([1.0, 2.0, 3.0, 4.0]) * torch.exp(x)]


def views(z: Tensor, x: Tensor, w: Tensor) -> Any:
    left, right = x.split(2, 1)
    return [torch.cat((z[:, 2:] * left, z[:, :2] * right), 1) @ w.mT.reshape(4, 4)]


def writes(z: Tensor, x: Tensor, w: Tensor) -> Any:
    made = torch.zeros_like(z)
    made[:, 0] = z[:, 1]
    made[:, 1:] += x[:, :3].sin()
    bias = x.clone()
    bias.view(-1)[::2].mul_(2)
    return [made.add_(bias), bias]


def tuples(z: Tensor, x: Tensor, w: Tensor) -> Any:
    normed = nn.functional.layer_norm(x, (4,))
    values, index = (z * normed).max(1, keepdim=True)
    least, _ = x.min(1, keepdim=True)
    return [nn.functional.layer_norm(z, (4,)) + values + least, index]


def repeated(z: Tensor, x: Tensor, w: Tensor) -> Any:
    image = z + x
    return [image, x, image, w.mT, z, torch.ones(5, 4), x.sin()]


def masked(z: Tensor, x: Tensor, w: Tensor) -> Any:
    return [torch.where(x > 0, z.sin(), 0.0).masked_fill(x.isnan(), 1.0)]


def of_numbers(z: Tensor, x: Tensor, w: Tensor) -> Any:
    return [z * torch.tensor(2.0) + x * 3, torch.full_like(x, 0.5)]


def without_state(z: Tensor, x: Tensor, w: Tensor) -> Any:
    return [x @ w]


def identity(z: Tensor, x: Tensor, w: Tensor) -> Any:
    return [z]


@pytest.mark.parametrize(
    "f", [constants, views, writes, tuples, repeated, masked, of_numbers, without_state, identity]
)
def test_same_values_as_the_whole(f: Function) -> None:
    made, _ = parts(f)
    z, x, w = inputs()
    before = [t.clone() for t in (x, w)]
    (run,) = made.at([z, x, w])
    for state in (z, z + 1, z):  # the same function serves all states
        for found, expected in zip(run(state), f(state, x, w), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
            assert found.stride() == expected.stride()
    assert all(torch.equal(a, b) for a, b in zip((x, w), before, strict=True))


def test_nothing_constant_is_computed_twice() -> None:
    made, (first, then) = parts(constants)
    assert made.first is not None
    assert first["aten.exp.default"] == first["aten.div.Tensor"] == 1
    assert not then["aten.exp.default"] + then["aten.div.Tensor"] + then["aten.abs.default"]
    assert then["aten.mm.default"] == then["aten.tanh.default"] == 1


def test_views_are_made_anew_and_cost_no_first_stage() -> None:
    made, operators = parts(lambda z, x, w: [z @ w.mT + x.view(5, 4)[:, :]])
    assert made.first is None and len(operators) == 1


def test_one_first_stage_serves_several_functions() -> None:
    def f(z: Tensor, x: Tensor, w: Tensor) -> Any:
        kept = torch.exp(x)
        return [z * kept, z.sin() @ w, kept]

    made, (first, one, both) = parts(f, wanted=(slice(1), slice(None)))
    assert first["aten.exp.default"] == 1
    assert not one["aten.sin.default"] and both["aten.sin.default"] == 1
    z, x, w = inputs()
    runs = made.at([z, x, w])
    assert len(runs[0](z)) == 1
    for found, expected in zip(runs[1](z), f(z, x, w), strict=True):
        torch.testing.assert_close(found, expected)
