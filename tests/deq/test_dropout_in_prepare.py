"""Variational dropout of what a layer computes of its input once a solve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn import DEQ
from implicit_attn.regularization import VariationalDropout
from implicit_attn.updates import Update
from solvers import Tolerance


class Prepared(Update):
    """Dropout of the features of the input, and nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = VariationalDropout(0.5)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Tensor:
        return self.dropout(x)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return 0.5 * torch.tanh(z) + x


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_in_prepare_alone_is_dropout(compiled: bool) -> None:
    deq = DEQ(Prepared(), tolerance=Tolerance(1e-12), max_steps=200)
    if compiled:
        deq.compile(backend="eager")
    x = 1 + torch.rand(3, 5, 4, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        z = deq(x)
    factor = (z - 0.5 * torch.tanh(z)) / x
    assert torch.allclose(factor, 2 * (factor > 1).to(factor), atol=1e-8)
    assert 0.2 < (factor > 1).double().mean() < 0.8
