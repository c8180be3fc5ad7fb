"""One step down a gradient: joint values, step sizes, symmetry of the Jacobian."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.energies import EnergyCase, build, few_energies, masks, relative_error, tokens
from implicit_attn import DEQ, GradientStep
from implicit_attn.energies import BiSoftmaxAttention, Energy, Quadratic, ReLUFeedForward
from solvers import Tolerance

DIM = 6
STEPS: dict[str, dict[str, Any]] = {
    "unit": {},
    "small": {"step_size": 0.3},
    "channels": {"step_size": 0.4, "channels": DIM},
    "learned": {"step_size": 0.7, "learned": True},
    "learned-channels": {"step_size": 0.5, "channels": DIM, "learned": True},
}
TIGHT = Tolerance(rtol=1e-12)

each_step = pytest.mark.parametrize("options", STEPS.values(), ids=STEPS.keys())


def convex() -> Energy:
    """A strongly convex energy, so that every step leads to the same point."""
    torch.manual_seed(3)
    memory = ReLUFeedForward(DIM, 9, bound=1.0)
    return (0.1 * BiSoftmaxAttention(DIM, heads=2, bound=1.0) + 0.3 * memory + Quadratic()).double()


def inputs(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, DIM, generator=generator, dtype=torch.float64)


def spread(step: GradientStep) -> None:
    """Give the channels of a step different values."""
    factors = torch.linspace(0.5, 1.0, DIM, dtype=torch.float64)
    with torch.no_grad():
        for tensor in (*step.step_size.parameters(), *step.step_size.buffers()):
            tensor.mul_(factors if tensor.dim() else 1.0)


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


@each_step
def test_step_value(options: dict[str, Any]) -> None:
    update = GradientStep(Quadratic(), **options).double()
    z, x = inputs(), inputs(1)
    expected = z - options.get("step_size", 1.0) * (z - x)
    torch.testing.assert_close(update(z, x), expected, rtol=1e-6, atol=1e-6)
    trained = [name for name, _ in update.named_parameters()]
    assert trained == (["step_size.raw"] if options.get("learned") else [])


@each_step
def test_fixed_point_does_not_depend_on_the_step(options: dict[str, Any]) -> None:
    energy, x = convex(), inputs()
    reference = DEQ(energy, tolerance=TIGHT, max_steps=200)(x)
    update = GradientStep(energy, **options).double()
    spread(update)
    solution = DEQ(update, tolerance=TIGHT, max_steps=200).solve(x)
    assert bool(solution.converged.all())
    assert relative_error(solution.value.detach(), reference.detach()) <= 1e-10


@each_step
@pytest.mark.parametrize("masked", [False, True])
def test_symmetric_flag_tells_the_truth(options: dict[str, Any], masked: bool) -> None:
    update = GradientStep(convex(), **options).double()
    spread(update)
    z, x = inputs()[:1], inputs(1)[:1]
    mask = torch.tensor([[True, False, True]]) if masked else None

    def step(flat: Tensor) -> Tensor:
        return update(flat.view_as(z), x, mask=mask).flatten()

    jacobian = torch.autograd.functional.jacobian(step, z.flatten())
    asymmetry = relative_error(jacobian, jacobian.mT)  # type: ignore[union-attr,arg-type]
    assert update.symmetric == (asymmetry < 1e-12)
    assert update.symmetric == ("channels" not in options)
    if not update.symmetric:
        assert asymmetry > 1e-3


@pytest.mark.parametrize(("channels", "error"), [(0, ValueError), (2.5, TypeError)])
def test_bad_steps(channels: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="channels must be"):
        GradientStep(Quadratic(), channels=channels)
