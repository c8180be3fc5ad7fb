"""Gradients where a sample failed, where weights were replaced, and where outputs are changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import solvers
from solvers import Adjoint, Forward, Implicit, OneStep, Phantom, Status, Unrolled, fixed_point

TIGHT = solvers.Tolerance(rtol=1e-12)
EXACT: list[Adjoint] = [Implicit(tolerance=TIGHT, max_steps=200), Unrolled(), Unrolled(True)]
ALL = [*EXACT, Phantom(3), OneStep()]


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
@pytest.mark.parametrize("how", ["functional_call", "replaced"])
def test_checkpoints_raise_where_f_reads_other_tensors_than_before(how: str) -> None:
    model, x = Wrapped(adjoint=Unrolled(checkpoint=True)), inputs().requires_grad_()
    other = nn.Parameter(0.5 * model.inner.w.detach())
    if how == "functional_call":
        loss = functional_call(model, {"inner.w": other}, x).sum()
    else:
        loss = model(x).sum()
        model.inner.w = other
    with pytest.raises(RuntimeError, match="did not read in the forward pass"):
        loss.backward()


def half_lost(weight: Tensor, x: Tensor, **options: Any) -> solvers.Solution:
    """Two samples: ``z = w z / 2 + x``; and a step of an energy without bound, ``z - dE = 3 w z + x``."""
    factor = torch.tensor([[0.5], [3.0]], dtype=torch.float64)
    return fixed_point(
        lambda z, x, factor: factor * weight * z + x, torch.zeros_like(x), (x, factor),
        solver=Forward(), tolerance=TIGHT, on_failure="ignore", max_steps=200, **options,
    )  # fmt: skip


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("adjoint", [Implicit(tolerance=TIGHT), Phantom(60), OneStep()])
@pytest.mark.parametrize("transformed", [False, True])
def test_a_sample_that_diverged_has_a_gradient_of_zero(
    adjoint: Adjoint, compact: bool, transformed: bool
) -> None:
    """Its best iterate is no solution, also where the adjoint system there has one."""
    weight = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    options = {"adjoint": adjoint, "compact": compact}
    solution = half_lost(weight, x, **options)
    assert solution.status.tolist() == [Status.CONVERGED, Status.DIVERGED]
    if transformed:

        def total(weight: Tensor, x: Tensor) -> Tensor:
            return half_lost(weight, x, **options).value.sum()

        by_weight, by_input = grad(total, argnums=(0, 1))(weight.detach(), x.detach())
    else:
        by_weight, by_input = torch.autograd.grad(solution.value.sum(), (weight, x))
    assert not bool(by_input[1].any())
    # z = x / (1 - w / 2) of the first sample; one evaluation knows df/dx = 1 and df/dw = z / 2 alone.
    slope, product = (1.0, 1.0) if isinstance(adjoint, OneStep) else (2.0, 2.0)
    torch.testing.assert_close(by_input[0], torch.full_like(x[0], slope))
    torch.testing.assert_close(by_weight.item(), 3 * product)


@pytest.mark.defect("D5")
def test_vmap_of_a_map_that_knows_the_batch() -> None:
    c, starts = inputs(), torch.stack([inputs(), inputs() * 2, inputs() * 3])

    def solve(q: Tensor) -> Tensor:
        return fixed_point(lambda z: 0.5 * z + c, q, compact=False, tolerance=TIGHT).value

    torch.testing.assert_close(vmap(solve)(starts), (2 * c).expand_as(starts))


@pytest.mark.defect("A8")
@pytest.mark.parametrize("adjoint", ALL)
def test_the_output_may_be_changed_in_place(adjoint: Adjoint) -> None:
    model, x = Wrapped(adjoint=adjoint, tolerance=TIGHT), inputs().requires_grad_()
    expected = torch.autograd.grad((model(x) + 1).pow(2).sum(), [x, *model.parameters()])
    value = model(x)
    value.add_(1)
    found = torch.autograd.grad(value.pow(2).sum(), [x, *model.parameters()])
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


@pytest.mark.defect("D2")
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_start_that_is_the_solution_has_a_gradient_of_zero(checkpoint: bool) -> None:
    """No step depends on the weight; the backward pass must run all the same."""
    weight = torch.tensor(0.5, requires_grad=True)
    solution = fixed_point(
        lambda z: weight * z, torch.zeros(2, 3), adjoint=Unrolled(checkpoint=checkpoint)
    )
    assert solution.converged.all()
    solution.value.sum().backward()
    assert weight.grad == 0
