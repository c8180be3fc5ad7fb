"""Gradients where a sample failed, where weights were replaced, and where outputs are changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from solvers import (
    Adjoint,
    Anderson,
    Implicit,
    OneStep,
    Phantom,
    Status,
    Tolerance,
    Unrolled,
    fixed_point,
)

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
@pytest.mark.parametrize("name", ["w"])
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


@pytest.mark.defect("A7")
def test_a_map_in_place_leaves_the_tensors_of_a_transform_alone() -> None:
    x = inputs()
    before = x.clone()
    b = torch.ones_like(x)

    def f(z: Tensor, b: Tensor) -> Tensor:
        return z.mul_(0.5).add_(b)

    for call in (
        lambda q: fixed_point(f, q, (b,)).value,
        lambda q: fixed_point(lambda z, q: q.mul_(0.5).add_(z), b, (q,)).value,
    ):
        with pytest.raises(ValueError, match="works in place"):
            vjp(call, x)
        assert torch.equal(x, before)


@pytest.mark.defect("D2")
@pytest.mark.parametrize("adjoint", ALL)
def test_a_batch_without_any_evaluation_has_a_gradient_of_zero_uncompacted(
    adjoint: Adjoint,
) -> None:
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    x = -torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    solution = fixed_point(
        lambda z, x: weight * x.log() + 0.1 * z, torch.ones_like(x), (x,), adjoint=adjoint,
        compact=False, on_failure="ignore",
    )  # fmt: skip
    assert (solution.status == Status.NONFINITE).all()
    for gradient in torch.autograd.grad(solution.value.sum(), (weight, x)):
        assert not bool(gradient.any())


@pytest.mark.defect("D2")
@pytest.mark.parametrize("adjoint", [Phantom(), OneStep(), Implicit(tolerance=TIGHT)])
def test_a_diverged_sample_leaves_the_gradients_of_the_others_alone(adjoint: Adjoint) -> None:
    def gradient(*z0: float) -> tuple[Tensor, Tensor]:
        weight = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        solution = fixed_point(
            lambda z: 0.1 * weight * z.exp(), torch.tensor(z0, dtype=torch.float64)[:, None],
            solver=Anderson(), adjoint=adjoint, tolerance=TIGHT, on_failure="ignore",
        )  # fmt: skip
        return solution.status, torch.autograd.grad(solution.value[0].sum(), weight)[0]

    _, expected = gradient(0.0)
    status, found = gradient(0.0, 6.0)
    assert status.tolist() == [int(Status.CONVERGED), int(Status.DIVERGED)]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


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


@pytest.mark.defect("A8")
def test_second_derivatives_after_the_output_was_changed_in_place() -> None:
    adjoint = Implicit(tolerance=TIGHT, max_steps=200)
    model, x = Wrapped(adjoint=adjoint, tolerance=TIGHT), inputs(2).requires_grad_()

    def shifted(x: Tensor) -> Tensor:
        return model(x).add_(1).pow(2)

    assert torch.autograd.gradcheck(shifted, x)
    assert torch.autograd.gradgradcheck(shifted, x)


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
