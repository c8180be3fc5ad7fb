"""Compiled maps and what they are made of: stages, slopes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from solvers import Anderson, Descent, Implicit, Newton, Unrolled, fixed_point
from solvers.compiled import graphs
from solvers.compiled.graphs import RULES, made, with_slopes

pytestmark = [  # inside torch's compiler
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class CountingBackend:
    """A backend that runs what it is given as it is, and counts."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return module.forward


class Map(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 5).double()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.linear(z) + x)


def sample(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 5, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.defect("D10")
def test_a_compiled_map_is_compiled_once() -> None:
    model, counter = Map(), CountingBackend()
    compiled = torch.compile(model, backend=counter)
    for seed in range(4):
        x = sample(seed)
        results = []
        for f in (compiled, model):
            value = fixed_point(f, torch.zeros_like(x), (x,), compact=False).value
            results.append(torch.autograd.grad(value.square().sum(), [x, *model.parameters()]))
        torch.testing.assert_close(*results)
    assert counter.graphs == 1


@pytest.mark.defect("D10")
@pytest.mark.parametrize(
    ("solver", "adjoint"),
    [(None, Implicit()), (Anderson(), Implicit()), (Newton(), Implicit()), (None, Unrolled())],
    ids=["lbfgs", "anderson", "newton", "unrolled"],
)
def test_a_compiled_energy_has_derivatives(solver: Any, adjoint: Any) -> None:
    """``aot_eager`` refuses second derivatives as the code generators do."""
    weight = Map().linear.weight

    def energy(z: Tensor, x: Tensor) -> Tensor:
        return (0.5 * (z - x).square() + (0.3 * (z @ weight)).cosh()).sum(1)

    compiled = torch.compile(energy, backend="aot_eager")
    x = sample(0)
    results = []
    for function in (compiled, energy):
        descent = Descent(function, 0.5)
        value = fixed_point(descent, x.detach(), (x,), solver=solver, adjoint=adjoint).value
        results.append(torch.autograd.grad(value.square().sum(), [x, weight]))
    torch.testing.assert_close(*results)


def test_the_compiler_is_left_as_it_was() -> None:
    """Also where the evaluation fails."""
    counter = CountingBackend()

    def f(z: Tensor, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("no recording")
        return 0.5 * z + x

    x = sample(0)
    with pytest.raises(RuntimeError, match="no recording"):
        fixed_point(f, torch.zeros_like(x), (x,))
    torch.compile(lambda x: x + 1, backend=counter)(x)
    assert counter.graphs == 1


Function = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]


def inputs() -> list[Tensor]:
    """A state, an input and a weight."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(2)] + [
        torch.randn(4, 4, generator=generator, dtype=torch.float64)
    ]


def parts(f: Function, **options: Any) -> tuple[graphs.Stages, list[Counter[str]]]:
    """The stages of f, varying by its first input, and the operators of each of their graphs."""
    graph, examples = graphs.trace(lambda *given: list(f(*given)), inputs())
    operators: list[Counter[str]] = []

    def compiled(part: GraphModule, like: list[Tensor]) -> Any:
        nodes = [node for node in part.graph.nodes if node.op == "call_function"]
        operators.append(Counter(str(node.target) for node in nodes))
        places = [node for node in part.graph.nodes if node.op == "placeholder"]
        assert [n.meta["val"].shape for n in places] == [t.shape for t in like]
        return part.forward

    wanted = options.get("wanted", (slice(None),))
    return graphs.made(graph, examples, [0], wanted, compiled), operators


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
    torch.testing.assert_close(runs[1](z), f(z, x, w))


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
    # The slope is a difference of numbers as large as x; bfloat16 is computed with in float32.
    size = 1 if dtype == torch.bfloat16 else 10
    torch.testing.assert_close(found, expected, rtol=8 * precision, atol=8 * size * precision)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_each_vector_costs_one_product(activation: Callable[..., Tensor]) -> None:
    """What is computed for every vector, beside the first part that is computed once."""
    vector, x = torch.randn(4), torch.randn(4)
    made_graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., list[Tensor]]:
        made_graphs.append(graph)
        return graph.forward

    stages = made(graph_of(activation, vector, x), [vector, x], [0], [slice(None)], keep)
    _, then = made_graphs
    assert [str(n.target) for n in then.graph.nodes if n.op == "call_function"] == [
        "aten.mul.Tensor"
    ]
    (bound,) = stages.at([vector, x])
    torch.testing.assert_close(list(bound(vector)), pulled(activation, vector, x))
