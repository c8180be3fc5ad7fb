"""Maps and energies that torch.compile has compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from solvers import Anderson, Descent, Implicit, Newton, OneStep, Phantom, Unrolled, fixed_point

pytestmark = [  # inside torch's compiler
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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
    model, graphs = Map(), list[Any]()

    def backend(module: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(model, backend=backend)
    for seed in range(4):
        x = sample(seed)
        results = []
        for f in (compiled, model):
            value = fixed_point(f, torch.zeros_like(x), (x,), compact=False).value
            results.append(torch.autograd.grad(value.square().sum(), [x, *model.parameters()]))
        torch.testing.assert_close(*results)
    assert len(graphs) == 1


@pytest.mark.defect("D10")
@pytest.mark.parametrize(
    ("solver", "adjoint"), [(None, Implicit()), (Newton(), Implicit()), (Anderson(), Unrolled())]
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


@pytest.mark.parametrize("adjoint", [Implicit(), OneStep(), Phantom(2), Unrolled()], ids=repr)
def test_compiled_autograd_has_the_same_gradients(adjoint: Any) -> None:
    model, front = Map(), nn.Linear(5, 5).double()
    weights = [*model.parameters(), *front.parameters()]

    def step(x: Tensor) -> None:
        inputs = front(x)
        value = fixed_point(model, torch.zeros_like(inputs), (inputs,), adjoint=adjoint).value
        value.square().sum().backward()

    def gradients(run: Callable[[Tensor], None]) -> list[Tensor]:
        for weight in weights:
            weight.grad = None
        run(sample(0).detach())
        assert all(weight.grad is not None for weight in weights)
        return [weight.grad for weight in weights if weight.grad is not None]

    plain = gradients(step)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.testing.assert_close(gradients(torch.compile(step, backend="eager")), plain)


def test_compiled_autograd_has_no_second_derivatives_of_a_fixed_point() -> None:
    model, x = Map(), sample(0)

    def step() -> None:
        value = fixed_point(model, torch.zeros_like(x), (x,)).value
        (slope,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
        slope.square().sum().backward()

    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(RuntimeError, match="first derivatives only"),
    ):
        torch.compile(step, backend="eager")()
