"""One step down a gradient: joint values, step sizes, symmetry of the Jacobian."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases.energies import EnergyCase, build, few_energies, masks, relative_error, tokens
from implicit_attn import DEQ, GradientStep
from implicit_attn.energies import BiSoftmaxAttention, Energy, Quadratic, ReLUFeedForward
from solvers import Tolerance

DIM = 6
TIGHT = Tolerance(rtol=1e-12)


def convex() -> Energy:
    """A strongly convex energy, so that every step leads to the same point."""
    torch.manual_seed(3)
    memory = ReLUFeedForward(DIM, 9, bound=1.0)
    return (0.1 * BiSoftmaxAttention(DIM, heads=2, bound=1.0) + 0.3 * memory + Quadratic()).double()


def inputs(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, DIM, generator=generator, dtype=torch.float64)


@few_energies("quadratic-input", "composition", "function", "softmax-cross-tiny-bound")
@pytest.mark.parametrize("mask", ["no-mask", "holes", "empty-sample"])
def test_joint_is_one_consistent_triple(case: EnergyCase, mask: str) -> None:
    update = GradientStep(build(case), 0.3)
    z, x = tokens(case)
    chosen = masks()[mask]
    moved, value, gradient = update.joint(z, x, mask=chosen)
    torch.testing.assert_close(moved, update(z, x, mask=chosen), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(value, update.energy(z, x, mask=chosen), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moved, z - 0.3 * gradient, rtol=1e-13, atol=1e-13)
    point = z.clone().requires_grad_()
    (reference,) = torch.autograd.grad(update.energy(point, x, mask=chosen).sum(), point)
    assert relative_error(gradient, reference) <= 1e-9
    if chosen is not None:
        assert torch.equal(moved[~chosen], z[~chosen])


def test_the_fixed_point_does_not_depend_on_the_step() -> None:
    energy, x = convex(), inputs()
    reference = DEQ(energy, tolerance=TIGHT, max_steps=200)(x)
    solution = DEQ(GradientStep(energy, 0.3), tolerance=TIGHT, max_steps=200).solve(x)
    assert bool(solution.converged.all())
    assert relative_error(solution.value.detach(), reference.detach()) <= 1e-10


@pytest.mark.parametrize("mask", [None, torch.tensor([[True, False, True]])], ids=["all", "mask"])
def test_the_jacobian_is_symmetric(mask: Tensor | None) -> None:
    update, z, x = GradientStep(convex(), 0.3), inputs()[:1], inputs(1)[:1]
    assert update.symmetric

    def step(flat: Tensor) -> Tensor:
        return update(flat.view_as(z), x, mask=mask).flatten()

    jacobian = torch.autograd.functional.jacobian(step, z.flatten())
    assert relative_error(jacobian, jacobian.mT) < 1e-12  # type: ignore[union-attr,arg-type]


def test_bad_steps() -> None:
    with pytest.raises(ValueError, match="step_size must be"):
        GradientStep(Quadratic(), 0.0)
