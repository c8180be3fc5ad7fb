"""What a compiled layer computes of its input before a solve: the same values and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.turns import take_turns
from implicit_attn import DEQ, EquilibriumBlock
from implicit_attn.dropout import VariationalDropout
from implicit_attn.updates import Update
from solvers import Implicit, Tolerance

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
EXACT: Any = {"tolerance": Tolerance(1e-12), "adjoint": Implicit(tolerance=Tolerance(1e-12))}


@pytest.fixture(autouse=True, params=[False, True], ids=["blocks", "turns"])
def turns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Solves in blocks, and in turns as Inductor has them on a CPU; whether in turns."""
    if request.param:
        take_turns(monkeypatch)
    return request.param


class Projected(Update):
    """``z -> tanh(W z) / 2 + p``, where ``p`` is prepared: ``sin(V x)``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(0.3 * torch.randn(3, 3, dtype=torch.float64))
        self.v = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        self.scale, self.noise = 1.0, 0.0

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        made = torch.sin(x @ self.v.mT) * self.scale + self.frozen
        if self.noise:
            made = made + self.noise * torch.randn_like(made)
        return made, x, made.detach()

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        made, given, _ = x if isinstance(x, tuple) else self.prepare(x)
        return 0.5 * torch.tanh(z @ self.w.mT) + made + 0.1 * given


def pair(layer: Any) -> tuple[Any, Any]:
    other = copy.deepcopy(layer)
    for module in (other, *other.modules()):
        if isinstance(module, DEQ):
            module.compile(backend="eager", block=2)
    return layer, other


def sample(batch: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, generator=generator, dtype=torch.float64)


def made(layer: Any) -> list[str]:
    """Names of the programs that prepare."""
    names = [key[0][0] for key in (*layer._programs.made, *layer._programs.staged)]
    return sorted(name for name in names if name in ("_outputs", "_gradients", "linearized"))


def wanted(turns: bool) -> list[str]:
    """What :func:`made` returns: in turns one linearisation has both."""
    return ["linearized"] if turns else ["_gradients", "_outputs"]


def results(layer: Any, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    value = layer(leaf)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return [value, *torch.autograd.grad(value.cos().sum(), [leaf, *parameters])]


def test_values_and_gradients(turns: bool) -> None:
    first, second = pair(DEQ(Projected(), **EXACT))
    for batch in (4, 3, 4):  # the second is padded
        for one, other in zip(
            results(first, sample(batch)), results(second, sample(batch)), strict=True
        ):
            torch.testing.assert_close(other, one)
    assert made(second) == wanted(turns)
    for layer in (first, second):
        with torch.no_grad():
            layer.update.v.mul_(0.5)
    torch.testing.assert_close(results(second, sample(4)), results(first, sample(4)))
    assert made(second) == wanted(turns)
    for layer in (first, second):
        layer.update.scale = 2.0
    with torch.no_grad():
        torch.testing.assert_close(second(sample(4)), first(sample(4)))


def test_second_derivatives() -> None:
    layer = pair(DEQ(Projected(), **EXACT))[1]
    x = sample(1).requires_grad_()
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)
    v = layer.update.v
    found = []
    for each in (layer, DEQ(layer.update, **EXACT)):
        slope = torch.autograd.grad(each(x).square().sum(), v, create_graph=True)[0]
        found.append(torch.autograd.grad(slope.square().sum(), [v, x]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_random_numbers_are_drawn_once_a_solve_as_without() -> None:
    first, second = pair(DEQ(Projected(), **EXACT))
    values = []
    for layer in (first, second):
        layer.update.noise = 0.1
        torch.manual_seed(1)
        values.append(layer(sample(2)))
    torch.testing.assert_close(values[1], values[0])


class Dropping(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = VariationalDropout(0.5)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        found, given, _ = super().prepare(x, mask=mask)
        return self.dropout(found), given, found.detach()


def test_dropout_has_the_masks_of_the_solve(turns: bool) -> None:
    first, second = pair(DEQ(Dropping(), **EXACT))
    found = []
    for layer in (first, second):
        torch.manual_seed(2)
        found.append(results(layer, sample(3)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one)
    assert made(second) == wanted(turns)


def test_what_changes_before_the_backward_pass_is_noticed() -> None:
    layer = pair(DEQ(Projected(), **EXACT))[1]
    value = layer(sample(2))
    with torch.no_grad():
        layer.update.v.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()
    value = layer(sample(2))
    layer.update.scale = 3.0
    with pytest.raises(RuntimeError, match="was changed between"):
        value.sum().backward()


def test_autocast() -> None:
    first, second = pair(DEQ(Projected().float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = [layer(sample(2).float()) for layer in (first, second)]
    torch.testing.assert_close(values[1], values[0], rtol=2e-2, atol=2e-2)
    assert values[1].dtype == values[0].dtype


def test_a_block_with_masks() -> None:
    torch.manual_seed(0)
    first, second = pair(EquilibriumBlock(8, 2, layer={"tolerance": Tolerance(1e-8)}).double())
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    padding = torch.zeros(3, 4, dtype=torch.bool)
    padding[0, 3] = True
    found = []
    for block in (first, second):
        leaf = x.clone().requires_grad_()
        block(leaf, src_key_padding_mask=padding).square().sum().backward()
        found.append([leaf.grad, *(p.grad for p in block.parameters())])
    torch.testing.assert_close(found[1], found[0])
