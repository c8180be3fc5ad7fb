"""Maps made by ``torch.compile`` are solved by programs: the same solutions and gradients.

The programs' operators run one by one here, which changes no result and spares the code generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.turns import take_turns
from solvers import Descent, Forward, Implicit, Tolerance, fixed_point
from solvers.compiled import captured, programs

pytestmark = [
    # Torch's tracer looks at the .grad of every tensor that it meets.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
OPTIONS: Any = {
    "solver": Forward(),
    "tolerance": Tolerance(1e-10),
    "adjoint": Implicit(tolerance=Tolerance(1e-10)),
}


@pytest.fixture(autouse=True)
def turns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Solves in turns, as Inductor has them on a CPU; where a test asks for it, in blocks."""
    if getattr(request, "param", True):
        take_turns(monkeypatch)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the programs that are made, by torch's own operators."""
    torch.compiler.reset()
    found: list[str] = []
    asked, make = captured.options_of, programs.Programs._traced

    def options_of(f: Any) -> dict[str, Any] | None:
        return None if asked(f) is None else {"backend": "eager", "block": 3}

    def counting(self: Any, function: Any, *rest: Any) -> Any:
        found.append(function.__name__)
        return make(self, function, *rest)

    monkeypatch.setattr(captured, "options_of", options_of)
    monkeypatch.setattr(programs.Programs, "_traced", counting)
    yield found
    torch.compiler.reset()


class Map(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(4, 4).double(), 0.3

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.scale * self.linear(z) + x)


def sample(seed: int = 0, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 4, generator=generator, dtype=torch.float64).requires_grad_()


def results(f: Any, x: Tensor, *inputs: Tensor, **options: Any) -> tuple[Any, list[Tensor]]:
    solution = fixed_point(f, torch.zeros_like(x), (x,), **OPTIONS | options)
    loss = solution.value.square().sum()
    return solution, [solution.value, *torch.autograd.grad(loss, [x, *inputs])]


def assert_same(first: Any, second: Any, x: Tensor, *inputs: Tensor, **options: Any) -> None:
    one, wanted = results(first, x, *inputs, **options)
    other, got = results(second, x, *inputs, **options)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(other.status, one.status)
    assert torch.equal(other.evaluations, one.evaluations)


def test_a_module(counted: list[str]) -> None:
    """Other numbers need no program; another plain attribute, mode or hook does, and is not missed."""
    model = Map()
    f = torch.compile(model)
    assert_same(model, f, sample(), *model.parameters())
    made = len(counted)
    assert 0 < made <= 6
    for seed in range(3):
        with torch.no_grad():
            model.linear.weight.mul_(0.9)
        assert_same(model, f, sample(seed), *model.parameters())
    assert len(counted) == made
    model.scale = 0.1
    with torch.no_grad():
        value = fixed_point(f, torch.zeros(3, 4).double(), (sample(),), **OPTIONS).value
        wanted = fixed_point(model, torch.zeros(3, 4).double(), (sample(),), **OPTIONS).value
    torch.testing.assert_close(value, wanted)
    assert len(counted) > made


@pytest.mark.parametrize("turns", [False, True], ids=["blocks", "turns"], indirect=True)
def test_a_function_made_anew_with_what_it_closes_over(counted: list[str]) -> None:
    raw = nn.Parameter(0.2 * torch.randn(4, 4, dtype=torch.float64, generator=torch.manual_seed(0)))

    def maps(scale: float) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        weight = raw + raw.mT  # has a graph, and is another tensor at every call

        def f(z: Tensor, x: Tensor) -> Tensor:
            return scale * torch.tanh(z @ weight) + x

        return f, torch.compile(f)

    for _ in range(3):
        assert_same(*maps(0.5), sample(), raw)
    made = len(counted)
    assert 0 < made <= 6
    results(maps(0.5)[1], sample(), raw)
    assert len(counted) == made
    assert_same(*maps(0.25), sample(), raw)


def test_second_derivatives(counted: list[str]) -> None:
    f = torch.compile(Map())

    def solve(x: Tensor) -> Tensor:
        return fixed_point(f, torch.zeros_like(x), (x,), **OPTIONS).value

    x = sample(batch=1)
    assert torch.autograd.gradcheck(solve, x)
    assert torch.autograd.gradgradcheck(solve, x)
    assert counted


def test_an_energy(counted: list[str]) -> None:
    weight = 0.3 * torch.randn(4, 4, dtype=torch.float64, generator=torch.manual_seed(0))
    weight.requires_grad_()

    def energy(z: Tensor, x: Tensor) -> Tensor:
        return (0.5 * (z - x).square() + (z @ weight).cosh()).sum(1)

    pair = Descent(energy, 0.5), Descent(torch.compile(energy), 0.5)
    assert_same(*pair, sample(), weight)
    assert counted


def test_the_start_may_be_the_input(counted: list[str]) -> None:
    model, found = Map(), []
    x = sample()
    for f in (model, torch.compile(model)):
        value = fixed_point(f, x, (x,), **OPTIONS).value
        found.append([value, *torch.autograd.grad(value.sum(), x)])
    torch.testing.assert_close(found[1], found[0])
    assert counted


def test_few_batch_sizes_have_programs(counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "SIZES", 1)
    model = Map()
    f, sizes = torch.compile(model, backend="eager"), (2, 3, 4, 5)
    captured.options_of = lambda g: {"backend": "eager"} if g is f else None  # type: ignore[assignment]
    numbers = []
    for batch in sizes:
        x = sample(batch=batch)
        with torch.no_grad():
            found = [fixed_point(g, torch.zeros_like(x), (x,), **OPTIONS).value for g in (model, f)]
        torch.testing.assert_close(found[1], found[0])
        numbers.append(len(counted))
    assert 0 < numbers[0] < numbers[1] == numbers[-1]  # the second graph is of any size


def breaks(z: Tensor, x: Tensor) -> Tensor:
    half = 0.5 * torch.tanh(z)
    torch._dynamo.graph_break()
    return half + x


def input_itself(z: Tensor, x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("f", [breaks, input_itself])
def test_what_no_graph_stands_for_is_as_before(f: Any, counted: list[str]) -> None:
    compiled = torch.compile(f, backend="eager")
    captured.options_of = lambda g: {"backend": "eager"} if g is compiled else None  # type: ignore[assignment]
    for seed in range(2):
        assert_same(f, compiled, sample(seed))
    assert not counted


def test_what_cannot_be_traced_is_as_before(counted: list[str]) -> None:
    def f(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(z) + x + 0 * torch.rand(1, dtype=z.dtype)

    compiled = torch.compile(f, backend="eager")
    captured.options_of = lambda g: {"backend": "eager"} if g is compiled else None  # type: ignore[assignment]
    assert_same(f, compiled, sample())
    made = len(counted)
    assert_same(f, compiled, sample())
    assert len(counted) == made  # not tried again
