"""Walks through modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from implicit_attn import DEQ
from implicit_attn.updates import Update
from solvers.core.guards.reading import parts_of


def order(module: nn.Module) -> list[str]:
    return [path.removesuffix(".") for path, _ in parts_of(module)]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_updates_of_torchscript(kind: str) -> None:
    """Their modules keep their children in containers of their own."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    made: Any = torch.jit.script(plain) if kind == "script" else torch.jit.trace(plain, x)

    class Half(Update):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, z: Any, x: Any = None, *, mask: Any = None) -> Any:
            return 0.5 * self.part(z) + x

    layer, wanted = (DEQ(Half(part)) for part in (made, plain))
    assert order(layer) == [path for path, _ in layer.named_modules()]
    torch.testing.assert_close(layer(x), wanted(x))
