"""Plain functions and modules as updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.updates import FunctionUpdate, Update

Z = torch.arange(12.0).reshape(2, 3, 2)
X = torch.ones(2, 3, 2)
MASK = torch.tensor([[True, True, False], [True, False, False]])


def of_state(z: Tensor) -> Tensor:
    return 2 * z


def of_input(z: Tensor, x: Tensor) -> Tensor:
    return 2 * z + x


def of_mask(z: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
    return 2 * z + x * (1.0 if mask is None else mask.unsqueeze(-1))


def of_state_and_mask(z: Tensor, *, mask: Tensor | None) -> Tensor:
    return z * (1.0 if mask is None else mask.unsqueeze(-1))


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(z) + x)


@pytest.mark.parametrize(
    ("function", "mask", "expected"),
    [
        (of_state, None, 2 * Z),
        (of_input, None, 2 * Z + X),
        (of_mask, None, 2 * Z + X),
        (of_mask, MASK, 2 * Z + X * MASK.unsqueeze(-1)),
        (of_state_and_mask, MASK, Z * MASK.unsqueeze(-1)),
        (partial(of_input, x=3 * X), None, 2 * Z + 3 * X),
        (lambda *inputs: inputs[0] - inputs[1], None, Z - X),
        (lambda z, x=None: z + x, None, Z + X),
    ],
    ids=["z", "z-x", "z-x-mask", "mask", "keyword-mask", "partial", "starred", "default"],
)
def test_signatures(function: Callable[..., Any], mask: Tensor | None, expected: Tensor) -> None:
    torch.testing.assert_close(FunctionUpdate(function)(Z, X, mask=mask), expected)


def test_module_is_registered() -> None:
    cell = Cell()
    update = FunctionUpdate(cell)
    assert {id(p) for p in update.parameters()} == {id(p) for p in cell.parameters()}
    torch.testing.assert_close(update(Z, X), cell(Z, X))
    assert set(update.state_dict()) == {"function.linear.weight", "function.linear.bias"}


def test_stock_module_sees_the_state_alone() -> None:
    linear = nn.Linear(2, 2)
    torch.testing.assert_close(FunctionUpdate(linear)(Z, X), linear(Z))


@pytest.mark.parametrize("function", [of_state, of_input])
def test_mask_that_would_be_ignored(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"takes no mask.*\(2, 3\)"):
        FunctionUpdate(function)(Z, X, mask=MASK)


@pytest.mark.parametrize(
    "function",
    [
        3,
        None,
        lambda: Z,
        lambda *, mask: mask,
        lambda z, x, context: z,  # a third input that nobody gives
        lambda z, *, strength: z,
    ],
    ids=["number", "none", "nothing", "only-mask", "three", "keyword"],
)
def test_uncallable(function: Any) -> None:
    with pytest.raises(TypeError, match="callable"):
        FunctionUpdate(function)


def test_base_class_says_what_is_missing() -> None:
    class Empty(Update):
        pass

    with pytest.raises(NotImplementedError, match="Empty must define forward"):
        Empty()(Z)
    with pytest.raises(NotImplementedError, match="Empty descends no energy"):
        Empty().joint(Z)
