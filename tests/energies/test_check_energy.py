"""``check_energy`` names every kind of mistake; that it passes right ones: test_every_energy.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.energies import masks
from implicit_attn.energies import Energy, EnergyReport, Prepared, Quadratic, check_energy
from implicit_attn.energies.checking import CHECKS
from implicit_attn.energies.tokens import hide, sum_samples

STATE = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
INPUT = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2))
MASK = masks()["holes"]


class Right(Energy):
    """``sum 1/2 |z|^2 + a log cosh(z - x)``, from which the wrong ones below differ in one thing each."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        z, x = hide(z, mask), hide(x, mask)
        return sum_samples(self.density(z, x))

    def density(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z**2 + self.a * torch.log(torch.cosh(z - x))


class TwoNumbers(Right):
    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return self.density(hide(z, mask), hide(x, mask)).sum((1, 2), keepdim=True)


class OneNumber(Right):
    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z, x, mask=mask).sum()


class Infinite(Right):
    def density(self, z: Tensor, x: Tensor) -> Tensor:
        return z.log()


class Raises(Right):
    def density(self, z: Tensor, x: Tensor) -> Tensor:
        raise KeyError("lost")


class Drops(Right):
    def density(self, z: Tensor, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().density(z, x), 0.5, self.training)


class Counts(Right):
    calls: Tensor

    def density(self, z: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return super().density(z, x)


class Overwrites(Right):
    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        x.clamp_(-0.5, 0.5)
        return super().forward(z, x, mask=mask)


class BatchMean(Right):
    def density(self, z: Tensor, x: Tensor) -> Tensor:
        return super().density(z, x - x.mean(0))


class BatchGradient(Right):
    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        gradient = hide(z + self.a * torch.tanh(z - x), mask)
        return gradient - gradient.mean(0)


class Detached(Right):
    def density(self, z: Tensor, x: Tensor) -> Tensor:
        return super().density(z, x) + z.detach() * z


class WrongSign(Right):
    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return hide(z - self.a * torch.tanh(z - x), mask)


class WrongPair(Right):
    def value_and_grad(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        return self.forward(z, x, mask=mask), hide(z + 2 * self.a * torch.tanh(z - x), mask)


class WrongValue(Right):
    def value_and_grad(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        return 2 * self.forward(z, x, mask=mask), hide(z + self.a * torch.tanh(z - x), mask)


class Structure(Right):
    def value_and_grad(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        return self.forward(z, x, mask=mask), (hide(z + self.a * torch.tanh(z - x), mask),)


class NeedsGrad(Right):
    """Differentiates itself, and forgets that solves run under ``no_grad``."""

    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        point = z.detach().requires_grad_()
        value = self.forward(point, x, mask=mask).sum()
        return torch.autograd.grad(value, point, create_graph=True)[0]


class KeepsGraph(Right):
    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        with torch.enable_grad():
            return hide(z + self.a * torch.tanh(z - x), mask)


class OtherUnderNoGrad(Right):
    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        exact = torch.is_grad_enabled()
        return hide(z + self.a * (torch.tanh(z - x) if exact else (z - x)), mask)


class WrongProduct(Right):
    def hvp(self, z: Any, v: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return 2 * super().hvp(z, v, x, mask=mask)


class Twisted(Right):
    def hvp(self, z: Any, v: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().hvp(z, v, x, mask=mask) + hide(v.cumsum(-1), mask)


class CutFromState(Right):
    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return hide(z + self.a * torch.tanh(z - x).detach(), mask)


class CutFromWeight(Right):
    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return hide(z + self.a.detach() * torch.tanh(z - x), mask)


class CutFromInput(Right):
    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return hide(z + self.a * torch.tanh(z - x.detach()), mask)


class NotConcave(Right):
    concave = True


class WrongPrepared(Right):
    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return Prepared(2 * x)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z, x.parts if isinstance(x, Prepared) else x, mask=mask)


class OnesAreTwos(Right):
    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z, x, mask=mask) * (1 if mask is None else 2)


class IgnoresMask(Right):
    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z, x)


class SeesMasked(Right):
    """Attends to masked tokens, and hides its gradient there."""

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z + 0.1 * z.detach().mean(1, keepdim=True), x, mask=mask)

    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        z = z + 0.1 * z.detach().mean(1, keepdim=True)
        return hide(z + self.a * torch.tanh(z - x), mask)


class MultipliesMask(Right):
    """0 times NaN is NaN."""

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        keep = 1.0 if mask is None else mask.unsqueeze(-1).to(z.dtype)
        return sum_samples(self.density(z, x) * keep)


class ForgetsDouble(Right):
    def density(self, z: Tensor, x: Tensor) -> Tensor:
        return super().density(z, x).float()


class WideGradient(Right):
    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return hide(z + self.a * torch.tanh(z - x), mask).double()


class NarrowGradient(Right):
    def hvp(self, z: Any, v: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().hvp(z, v, x, mask=mask).double().float()


def test_a_right_one_passes_every_check() -> None:
    report = check_energy(Right(), STATE, INPUT, mask=MASK, strict=True)
    assert [finding.check for finding in report.findings] == list(CHECKS)
    assert [f.check for f in report.findings if f.passed is None] == ["concave"]
    assert report.failures == () and report.name == "Right"
    assert str(report).startswith("Right: 13 of 13 checks passed\n  ok   value ")


# Check -> energies that fail it, with words of the sentence that says so.
WRONG: list[tuple[str, Callable[[], Energy], str]] = [
    ("value", TwoNumbers, r"one number per sample, shape \(B,\) = \(3,\), got shape \(3, 1, 1\)"),
    ("value", OneNumber, "returned a scalar"),
    ("value", Raises, "KeyError was raised: 'lost'"),
    ("deterministic", Drops, "two calls differ: it draws random numbers .*VariationalDropout"),
    ("inputs", Counts, "buffer calls was changed in place: work on a copy"),
    ("inputs", Overwrites, "x was changed in place"),
    ("samples", BatchMean, "the energy of sample 0 is another when the other samples are"),
    ("samples", BatchGradient, "the gradient of sample 0 is another when the other samples are"),
    ("slope", Detached, "autograd's gradient of forward is not its slope: .*cut from the graph"),
    ("gradient", WrongSign, "the gradient of value_and_grad is not the gradient of forward"),
    ("gradient", WrongPair, "the gradient of value_and_grad is not the gradient of forward"),
    ("gradient", WrongValue, "the value of value_and_grad is not that of forward"),
    ("gradient", Structure, "another structure than z"),
    ("no_grad", NeedsGrad, "RuntimeError was raised: .*does not require grad"),
    ("no_grad", KeepsGraph, "requires grad under torch.no_grad"),
    ("no_grad", OtherUnderNoGrad, "the gradient is another under torch.no_grad"),
    ("hessian", WrongProduct, "hvp is not the derivative of grad times v"),
    ("hessian", Twisted, "hvp is not symmetric"),
    ("hessian", CutFromState, "autograd's derivative of grad is not its slope"),
    ("second order", CutFromWeight, "the derivative of grad by parameter a is not that of forward"),
    ("second order", CutFromInput, "the derivative of grad by x is not that of forward"),
    ("concave", NotConcave, "concave is True, and the curvature .* is positive, .*concave = False"),
    ("prepare", WrongPrepared, r"with prepare\(x\) in place of x value is another"),
    ("mask of ones", OnesAreTwos, "with a mask of ones value is another than without"),
    ("masked tokens", IgnoresMask, "the gradient at a masked token is .*: it must be 0 there"),
    (
        "masked tokens",
        SeesMasked,
        "the content of masked tokens changes the value: start from hide",
    ),
    ("masked tokens", MultipliesMask, "NaN in masked tokens changes the value"),
    ("dtype", ForgetsDouble, "in float64 the energy is of torch.float32"),
    ("dtype", WideGradient, r"as given the gradient is of .*torch.float64.*: return it like z"),
    ("dtype", NarrowGradient, r"in float64 the product is of .*torch.float32.*: return it like z"),
]


@pytest.mark.parametrize(("check", "factory", "words"), WRONG, ids=[w[1].__name__ for w in WRONG])
def test_each_mistake_is_named(check: str, factory: Callable[[], Energy], words: str) -> None:
    report = check_energy(factory(), STATE, INPUT, mask=MASK)
    found = {finding.check: finding for finding in report.failures}
    assert check in found, str(report)
    with pytest.raises(ValueError, match=words):
        EnergyReport(report.name, (found[check],)).raise_failures()


def test_every_check_has_a_mistake() -> None:
    assert {check for check, _, _ in WRONG} == set(CHECKS)


def test_after_a_broken_value_nothing_else_is_checked() -> None:
    first, *others = check_energy(OneNumber(), STATE, INPUT).findings
    assert first.passed is False
    assert {finding.passed for finding in others} == {None}
    assert others[0].text == 'not checked: "value" must pass before'


def test_strict_raises_the_report() -> None:
    with pytest.raises(ValueError, match=r"(?s)WrongProduct: .*FAIL hessian.*error 1\.0e\+00"):
        check_energy(WrongProduct(), STATE, INPUT, strict=True)


def test_what_was_not_given_is_said() -> None:
    report = check_energy(Quadratic(), STATE[:1])
    texts = {finding.check: finding.text for finding in report.findings}
    assert report.ok
    assert texts["masked tokens"].startswith("not checked: no mask was given")
    assert texts["samples"] == "not checked: z has one sample; give two or more"
    assert texts["second order"].startswith("not checked: there are no parameters")
    full = check_energy(Quadratic(), STATE, mask=torch.ones(3, 5, dtype=torch.bool))
    assert "not checked: the mask hides no token" in str(full)


def test_functions_modules_and_pytrees() -> None:
    class Coupled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, z: dict[str, Tensor]) -> Tensor:
            return (self.linear(z["a"]).tanh() * z["b"]).flatten(1).sum(1)

    report = check_energy(Coupled(), {"a": STATE, "b": INPUT})
    assert report.ok and report.name == "Coupled", str(report)

    def wrong(z: Tensor) -> Tensor:
        return (z - z.mean()).square().flatten(1).sum(1)

    assert [f.check for f in check_energy(wrong, STATE).failures] == ["samples"]


def test_the_energy_and_its_inputs_stay_as_they_are() -> None:
    energy, z, x = Counts(), STATE.clone().requires_grad_(), INPUT.clone()
    state = torch.random.get_rng_state()
    check_energy(energy, z, x, mask=MASK)
    assert energy.calls == 0 and energy.a.dtype == torch.float32 and energy.a.grad is None
    assert torch.equal(z, STATE) and z.grad is None and torch.equal(x, INPUT)
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.inference_mode():
        assert check_energy(Right(), STATE.clone(), INPUT.clone(), mask=MASK).ok


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"z": STATE.long()}, TypeError, "z must be a floating tensor"),
        ({"z": {}}, TypeError, "z must be a floating tensor"),
        ({"tolerance": 0.0}, ValueError, "tolerance"),
        ({"seed": -1}, ValueError, "seed"),
        ({"strict": 1}, TypeError, "strict"),
        ({"mask": torch.ones(3, 4, dtype=torch.bool)}, ValueError, "mask must have the shape"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], error: Any, words: str) -> None:
    given = {"energy": Quadratic(), "z": STATE} | options
    with pytest.raises(error, match=words):
        check_energy(**given)


def test_a_mask_of_a_pytree_is_of_its_tokens() -> None:
    """As in a solve, a leaf without tokens counts whole."""

    class Mixed(Energy):
        def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
            tokens = hide(z["tokens"], mask).square().flatten(1).sum(1)
            return (1 + z["whole"].square().sum(1)) * tokens

    class Seen(Mixed):
        def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
            return super().forward(z)

    mask = torch.tensor([[True, True, True, False, False]] * 3)
    state = {"tokens": STATE, "whole": torch.linspace(-1, 1, 6).reshape(3, 2)}
    report = check_energy(Mixed(), state, mask=mask)
    assert report.ok and "not checked: the mask" not in str(report), str(report)
    assert [f.check for f in check_energy(Seen(), state, mask=mask).failures] == ["masked tokens"]
    with pytest.raises(ValueError, match="mask must have the shape"):
        check_energy(Mixed(), state, mask=mask[:, :4])
