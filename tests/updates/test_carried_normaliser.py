"""Carried normalisers: the fixed points and implicit gradients of plain gradient steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from implicit_attn import DEQ, GradientStep
from implicit_attn.energies import (
    BiSoftmaxAttention,
    Energy,
    Field,
    Quadratic,
    ReLUFeedForward,
    SigmoidAttention,
    SoftmaxFeedForward,
)
from implicit_attn.updates import CarriedNormaliser, CarriedState
from solvers import Broyden, Implicit, Tolerance

EXACT = Tolerance(rtol=1e-11)
ENERGIES: dict[str, Callable[[], Energy]] = {
    "alone": lambda: 0.4 * BiSoftmaxAttention(8, heads=2) + Quadratic(),
    "strong": lambda: 2.0 * (0.5 * BiSoftmaxAttention(8, heads=2, bound=2.0)) + Quadratic(),
    "composition": lambda: (
        Quadratic()
        + 0.1 * ReLUFeedForward(8, 12)
        + BiSoftmaxAttention(8, heads=2).weighted(0.3, maximum=1.0)
    ),
    "two attentions": lambda: (
        0.3 * BiSoftmaxAttention(8, heads=4)
        + 0.02 * SigmoidAttention(8, heads=2)
        + 0.1 * SoftmaxFeedForward(8, 6)
        + Quadratic()
    ),
    "no norm": lambda: 0.1 * BiSoftmaxAttention(8, heads=1, norm=None, bound=0.5) + Quadratic(),
    "blocks": lambda: 0.4 * BiSoftmaxAttention(8, heads=2, backend="blocks") + Quadratic(),
}


def build(name: str) -> Energy:
    torch.manual_seed(0)
    return ENERGIES[name]().double()


def inputs(count: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, count, 8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", list(ENERGIES))
def test_fixed_point_and_gradients_are_those_of_the_plain_step(name: str, masked: bool) -> None:
    energy, x = build(name), inputs()
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2]) if masked else None
    update = CarriedNormaliser(energy)
    options = {"tolerance": EXACT, "adjoint": Implicit(tolerance=EXACT), "max_steps": 200}
    results = []
    for layer in (
        DEQ(GradientStep(energy), **options),
        DEQ(update, **options),
        DEQ(update, solver=Broyden(), **options),
    ):
        point = x.clone().requires_grad_()
        solution = layer.solve(point, mask)
        assert solution.converged.all()
        z = solution.value.tokens if isinstance(solution.value, CarriedState) else solution.value
        gradients = torch.autograd.grad(z.pow(3).mean(), [point, *energy.parameters()])
        results.append([z, *gradients])
    for other in results[1:]:
        for ours, theirs in zip(other, results[0], strict=True):
            assert (ours - theirs).norm() <= 1e-7 * theirs.norm()


def test_the_state_carries_the_lse_of_the_last_evaluation() -> None:
    energy, x = build("composition"), inputs(280)
    update = CarriedNormaliser(energy)
    start = update.initial(x)
    assert start.lse.shape == (2, 280, 2)
    first = update(start, x)
    torch.testing.assert_close(first.tokens, GradientStep(energy)(x, x))
    torch.testing.assert_close(first.lse, start.lse)
    late = update(CarriedState(first.tokens, start.lse), x)
    assert (late.tokens - GradientStep(energy)(first.tokens, x)).norm() > 1e-4
    torch.testing.assert_close(late.lse, update.initial(first.tokens).lse)


def test_the_step_scales_the_move() -> None:
    energy, x = build("alone"), inputs()
    state = CarriedNormaliser(energy).initial(x)
    whole, half = (CarriedNormaliser(energy, step)(state, 0 * x).tokens for step in (1.0, 0.5))
    torch.testing.assert_close(half - x, 0.5 * (whole - x))


@pytest.mark.parametrize(
    "energy",
    [
        Quadratic() + Field(),
        BiSoftmaxAttention(8, heads=2, causal=True) + Quadratic(),
        BiSoftmaxAttention(8, heads=2) + BiSoftmaxAttention(8, heads=2),
        2.0 * (BiSoftmaxAttention(8, heads=2) + Quadratic()),
    ],
)
def test_energies_it_cannot_carry_are_refused(energy: Energy) -> None:
    with pytest.raises(ValueError, match="exactly one BiSoftmaxAttention among its terms"):
        CarriedNormaliser(energy)


def test_other_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match="energy must be an Energy"):
        CarriedNormaliser(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    update = CarriedNormaliser(build("alone"))
    with pytest.raises(TypeError, match=r"update\.initial\(x\) is; got Tensor"):
        update(inputs())
    with pytest.raises(ValueError, match="step_size must be finite and > 0"):
        CarriedNormaliser(build("alone"), -1.0)
    with pytest.raises(ValueError, match="causal=False"):
        x = inputs()
        attention = BiSoftmaxAttention(8, heads=2, causal=True).double()
        attention.carried_gradient(x, torch.zeros(2, 2, 6, dtype=x.dtype))
