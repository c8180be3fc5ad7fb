"""Compiled solves as Inductor has them, without generating code."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn import DEQ
from implicit_attn.updates import Update


def pair(f: Any, **options: Any) -> tuple[Any, Any]:
    layer = f if isinstance(f, nn.Module) else DEQ.from_update(f, **options)
    return layer, compiled(layer)


def compiled(layer: Any) -> Any:
    other = copy.deepcopy(layer)
    other.compile(backend="eager")
    return other


def sample(batch: int = 4, size: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, size, generator=generator, dtype=torch.float64)


def assert_same_solution(first: Any, second: Any, x: Any, **given: Any) -> Any:
    with torch.no_grad():
        one, other = first.solve(x, **given), second.solve(x, **given)
    for name in ("status", "evaluations", "steps"):
        assert torch.equal(getattr(other, name), getattr(one, name)), name
    torch.testing.assert_close(other.value, one.value, equal_nan=True)
    for name in ("residual", "residual_norm"):
        found, wanted = getattr(other, name), getattr(one, name)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-12, equal_nan=True)
    return other


def results(layer: Any, *inputs: Tensor, twice: bool = False) -> list[Any]:
    """The value and the gradients by inputs and weights, of one backward pass or two."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    value = layer(leaves[0] if len(leaves) == 1 else tuple(leaves))
    variables = [*leaves, *(p for p in layer.parameters() if p.requires_grad)]
    loss = value.sin().square().sum()
    options: Any = {"allow_unused": True, "retain_graph": twice}
    found = [value, *torch.autograd.grad(loss, variables, **options)]
    if twice:
        again = torch.autograd.grad(loss, variables, allow_unused=True)
        for one, other in zip(found[1:], again, strict=True):
            assert one is None or torch.equal(one, other)
    return found


def assert_same(first: Any, second: Any, *inputs: Tensor, twice: bool = False) -> None:
    wanted, got = results(first, *inputs, twice=twice), results(second, *inputs, twice=twice)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    reports = [layer.last.adjoint.solution for layer in (first, second)]
    assert (reports[0] is None) == (reports[1] is None)
    if reports[0] is not None:
        assert torch.equal(reports[1].status, reports[0].status)
        assert torch.equal(reports[1].evaluations, reports[0].evaluations)


class Cell(Update):
    """``tanh(W z) scale + p``, where ``p = sin(V x)`` is prepared."""

    def __init__(self, symmetric: bool = False) -> None:
        super().__init__()
        weight = 0.3 * sample(6, 6, 1)
        self.w = nn.Parameter((weight + weight.mT) / 2 if symmetric else weight)
        self.v = nn.Parameter(0.5 * sample(6, 6, 2))
        self.scale, self.symmetric, self.raised = 1.0, symmetric, False

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return torch.sin(x @ self.v.mT)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        linear = z @ self.w.mT
        return self.scale * (linear if self.symmetric else torch.tanh(linear)) + x
