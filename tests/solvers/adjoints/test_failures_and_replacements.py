"""Gradients where a sample failed, where weights were replaced, and where outputs are changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from solvers import Adjoint, Implicit, OneStep, Phantom, Status, Tolerance, Unrolled, fixed_point

TIGHT = Tolerance(rtol=1e-12)
ALL: list[Adjoint] = [
    Implicit(tolerance=TIGHT, max_steps=200),
    Unrolled(),
    Unrolled(checkpoint=True),
    Phantom(3),
    OneStep(),
]


class Scaled(nn.Module):
    """``0.5 tanh(z w + x c)``."""

    c: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.9, 0.3, -0.5], dtype=torch.float64))
        self.register_buffer("c", torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64))
        self.cache: Tensor | None = None

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        if self.cache is None:  # a table made at the first call, and kept
            self.cache = torch.ones(3, dtype=z.dtype)
        return 0.5 * torch.tanh(z * self.w * self.cache + x * self.c)


def inputs(batch: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, generator=generator, dtype=torch.float64)


class Wrapped(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = Scaled(), options

    def forward(self, x: Tensor) -> Tensor:
        return fixed_point(self.inner, torch.zeros_like(x), (x,), **self.options).value


@pytest.mark.defect("A6")
@pytest.mark.parametrize("name", ["w", "c"])
@pytest.mark.parametrize("how", ["functional_call", "replaced"])
def test_checkpoints_raise_where_f_reads_other_tensors_than_before(name: str, how: str) -> None:
    model, x = Wrapped(adjoint=Unrolled(checkpoint=True)), inputs().requires_grad_()
    other = getattr(model.inner, name).detach() * 0.5
    other.requires_grad_(name == "w")
    if how == "functional_call":
        loss = functional_call(model, {f"inner.{name}": other}, x).sum()
    else:
        loss = model(x).sum()
        if name == "w":
            model.inner.w = nn.Parameter(other)
        else:
            model.inner.c = other
    with pytest.raises(RuntimeError, match="did not read in the forward pass"):
        loss.backward()


@pytest.mark.defect("A6")
def test_checkpoints_of_a_sample_without_evaluation_notice_a_replaced_weight() -> None:
    """The evaluation that is in the graph is then the second one."""
    model, x = Scaled(), inputs().requires_grad_()

    def f(z: Tensor, x: Tensor) -> Tensor:
        return model(z, x) + 0 * x.log()

    with torch.no_grad():
        x.abs_()[1] *= -1
    adjoint = Unrolled(checkpoint=True)
    solution = fixed_point(f, torch.zeros_like(x), (x,), adjoint=adjoint, on_failure="ignore")
    assert solution.status[1] == Status.NONFINITE
    model.w = nn.Parameter(model.w.detach() * 0.5)
    with pytest.raises(RuntimeError, match="did not read in the forward pass"):
        solution.value.sum().backward()


@pytest.mark.defect("A6")
def test_checkpoints_repeat_a_map_that_keeps_a_table() -> None:
    model, x = Wrapped(adjoint=Unrolled()), inputs(7).requires_grad_()
    expected = torch.autograd.grad(model(x).sum(), [x, model.inner.w])
    model.inner.cache, model.options["adjoint"] = None, Unrolled(checkpoint=True)
    found = torch.autograd.grad(model(x).sum(), [x, model.inner.w])
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
