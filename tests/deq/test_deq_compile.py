"""``torch.compile`` around a model that holds a layer: same values, same gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from cases.deq import DIM, gradients, make, relative_error, tokens
from solvers import Tolerance

pytestmark = [
    # Where compiled code goes on after a layer, torch's tracer looks at the .grad of its input.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # torch's code generator uses parts of torch and Python that are deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, DIM).double()
        self.layer = make(name, tolerance=Tolerance(rtol=1e-10), max_steps=200)
        self.head = nn.Linear(DIM, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.relu(self.embed(x)))).mean(1))


def run(function: nn.Module, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    value = function(leaf)
    value.square().sum().backward()
    assert leaf.grad is not None
    return gradients(model) | {"x": leaf.grad, "value": value.detach()}


@pytest.mark.parametrize(("name", "backend"), [
    ("gradient", "aot_eager"),
    ("update", "eager"),
])  # fmt: skip
def test_compiled_model_equals_eager(name: str, backend: str) -> None:
    model = Model(name)
    compiled = torch.compile(model, backend=backend)
    for seed, batch in ((0, 2), (1, 3)):
        x = tokens(batch=batch, dim=3, seed=seed)
        expected = run(model, model, x)
        found = run(compiled, model, x)  # type: ignore[arg-type]
        for key, reference in expected.items():
            assert relative_error(found[key], reference) <= 1e-8, key
    layer = model.layer
    assert layer.last is not None and bool(layer.last.converged.all())
    assert layer.last.adjoint.solution is not None
