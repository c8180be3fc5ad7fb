"""``check_energy`` names every kind of mistake; that it passes right ones: test_every_energy.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.energies import masks
from implicit_attn.energies import (
    AttentionContext,
    Energy,
    Field,
    Hopfield,
    Quadratic,
    check_energy,
)
from implicit_attn.energies.checking import CHECKS
from implicit_attn.energies.tokens import hide, sum_samples

STATE, INPUT = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(1))
MASK = masks()["holes"]


class Right(Energy):
    """``sum 1/2 |z|^2 + a log cosh(z - x)``, from which the wrong ones below differ in one thing each."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return sum_samples(self.density(hide(z, mask), hide(x, mask)))

    def density(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z**2 + self.a * torch.log(torch.cosh(z - x))


def made(**methods: Any) -> type[Right]:
    return type("Wrong", (Right,), methods)


def value(change: Callable[..., Any]) -> type[Right]:
    """``forward`` is ``change(energy, z, x, mask)``."""
    return made(forward=lambda e, z, x=None, *, mask=None: change(e, z, x, mask))


def density(change: Callable[..., Any]) -> type[Right]:
    """``change(energy, right density, z, x)``."""
    return made(density=lambda e, z, x: change(e, Right.density(e, z, x), z, x))


def gradient(change: Callable[..., Any]) -> type[Right]:
    """``change(energy, tanh(z - x), z, x)``, where ``z + a tanh(z - x)`` would be right."""
    return made(
        grad=lambda e, z, x=None, *, mask=None: hide(change(e, torch.tanh(z - x), z, x), mask)
    )


def pair(change: Callable[..., Any]) -> type[Right]:
    """``change(value, gradient)`` of the right ones."""

    def both(e: Any, z: Any, x: Any = None, *, mask: Any = None) -> Any:
        return change(e.forward(z, x, mask=mask), hide(z + e.a * torch.tanh(z - x), mask))

    return made(value_and_grad=both)


def lost(*_: Any) -> Tensor:
    raise KeyError("lost")


def forgets_no_grad(e: Any, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
    """Differentiates itself, and forgets that solves run under ``no_grad``."""
    point = z.detach().requires_grad_()
    return torch.autograd.grad(e.forward(point, x, mask=mask).sum(), point, create_graph=True)[0]


def keeps_graph(e: Any, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
    with torch.enable_grad():
        return hide(z + e.a * torch.tanh(z - x), mask)


class WrongPrepared(Right):
    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return AttentionContext(2 * x)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z, x.parts if isinstance(x, AttentionContext) else x, mask=mask)


class SeesMasked(Right):
    """Attends to masked tokens, and hides its gradient there."""

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(smeared(z), x, mask=mask)

    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return hide(smeared(z) + self.a * torch.tanh(smeared(z) - x), mask)


def smeared(z: Tensor) -> Tensor:
    return z + 0.1 * z.detach().mean(1, keepdim=True)


def multiplied(e: Any, z: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    """0 times NaN is NaN."""
    return sum_samples(e.density(z, x) * (1.0 if mask is None else mask.unsqueeze(-1).to(z.dtype)))


detached = gradient(lambda e, t, z, x: z + e.a * t.detach())
counts = density(lambda e, d, z, x: d + 0 * e.calls.add_(1))

# Check -> energies that fail it.
WRONG: list[tuple[str, type[Energy]]] = [
    ("value", value(lambda e, z, x, mask: Right.forward(e, z, x, mask=mask)[:, None])),
    ("value", density(lambda e, d, z, x: z.log())),
    ("value", made(density=lost)),
    ("deterministic", density(lambda e, d, z, x: nn.functional.dropout(d, 0.5, e.training))),
    ("inputs", counts),
    ("inputs", value(lambda e, z, x, mask: Right.forward(e, z, x.clamp_(-0.5, 0.5), mask=mask))),
    ("samples", density(lambda e, d, z, x: Right.density(e, z, x - x.mean(0)))),
    ("samples", gradient(lambda e, t, z, x: z + e.a * t - (z + e.a * t).mean(0))),
    ("slope", density(lambda e, d, z, x: d + z.detach() * z)),
    ("gradient", gradient(lambda e, t, z, x: z - e.a * t)),
    ("gradient", pair(lambda e, g: (e, 2 * g))),
    ("gradient", pair(lambda e, g: (2 * e, g))),
    ("gradient", pair(lambda e, g: (e, (g,)))),
    ("no_grad", made(grad=forgets_no_grad)),
    ("no_grad", made(grad=keeps_graph)),
    ("no_grad", gradient(lambda e, t, z, x: z + e.a * (t if torch.is_grad_enabled() else z - x))),
    ("hessian", detached),
    ("second order", gradient(lambda e, t, z, x: z + e.a.detach() * t)),
    ("second order", gradient(lambda e, t, z, x: z + e.a * torch.tanh(z - x.detach()))),
    ("concave", made(concave=True)),
    ("prepare", WrongPrepared),
    ("mask of ones", value(lambda e, z, x, m: Right.forward(e, z, x, mask=m) * (1 + (m is None)))),
    ("masked tokens", value(lambda e, z, x, mask: Right.forward(e, z, x))),
    ("masked tokens", SeesMasked),
    ("masked tokens", value(multiplied)),
    ("dtype", density(lambda e, d, z, x: d.float())),
    ("dtype", gradient(lambda e, t, z, x: (z + e.a * t).double())),
    ("dtype", made(grad=lambda *given, mask=None: keeps_graph(*given, mask=mask).flatten(1))),
]


@pytest.mark.parametrize(("check", "factory"), WRONG)
def test_each_mistake_is_named(check: str, factory: Callable[[], Energy]) -> None:
    report = check_energy(factory(), STATE, INPUT, mask=MASK)
    assert check in {finding.check for finding in report.failures}, str(report)


def test_a_correct_energy_passes_every_check_and_strict_raises() -> None:
    report = check_energy(Right(), STATE, INPUT, mask=MASK, strict=True)
    assert [finding.check for finding in report.findings] == list(CHECKS)
    assert [f.check for f in report.findings if f.passed is None] == ["concave"]
    assert report.failures == () and report.name == "Right" and str(report).startswith("Right")
    assert {check for check, _ in WRONG} == set(CHECKS) - {"proximal"}  # which warns
    with pytest.raises(ValueError, match="hessian"):
        check_energy(detached(), STATE, INPUT, strict=True)


def with_matrix(z: Tensor, x: Tensor) -> Tensor:
    mixed = x @ torch.arange(16.0, dtype=x.dtype).view(4, 4)
    return 0.5 * (z - mixed).square().flatten(1).sum(1)


@pytest.mark.parametrize(("energy", "warned"), [
    (Quadratic(), True), (Quadratic() + Hopfield(torch.eye(4)), True), (2 * Quadratic() + Field(), True),
    (Quadratic() + Right(), False), (with_matrix, False),
    (lambda z, x: z.square().flatten(1).sum(1), False),  # x is the start alone
])  # fmt: skip
def test_an_input_that_enters_by_its_distance_alone_is_a_warning(energy: Any, warned: bool) -> None:
    """Which is no failure: a memory is a right energy of this kind."""
    mask = MASK if isinstance(energy, Energy) else None
    report = check_energy(energy, STATE, INPUT, mask=mask, strict=True)
    assert [finding.check for finding in report.warnings] == ["proximal"] * warned


def test_a_closure_over_float32_tensors_is_checked_in_float32() -> None:
    weight = nn.Linear(4, 4)

    def right(z: Tensor, x: Tensor) -> Tensor:
        return (0.5 * z.square() - weight(z + x).cosh().log()).flatten(1).sum(1)

    def wrong(z: Tensor, x: Tensor) -> Tensor:
        return (0.5 * z.square() - weight(z.detach() + x).cosh().log()).flatten(1).sum(1)

    z, x = STATE.float(), INPUT.float()
    report = check_energy(right, z, x)
    assert report.ok and "(in float32" in str(report), str(report)
    report = check_energy(wrong, z, x)
    assert [finding.check for finding in report.failures] == ["slope"]
    assert "(in float32" not in str(check_energy(Right(), z, x))
    assert not check_energy(right, STATE.double(), INPUT.double()).ok  # the state is not float32


def test_the_energy_and_its_inputs_stay_as_they_are() -> None:
    energy, z, x = counts(), STATE.clone().requires_grad_(), INPUT.clone()
    state = torch.random.get_rng_state()
    check_energy(energy, z, x, mask=MASK)
    assert energy.calls == 0 and energy.a.dtype == torch.float32 and energy.a.grad is None
    assert torch.equal(z, STATE) and z.grad is None and torch.equal(x, INPUT)
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.inference_mode():
        assert check_energy(Right(), STATE.clone(), INPUT.clone(), mask=MASK).ok


@pytest.mark.parametrize(("options", "error", "name"), [
    ({"z": STATE.long()}, TypeError, r"\bz\b"), ({"z": {}}, ValueError, r"\bz\b"),
    ({"tolerance": 0.0}, ValueError, "tolerance"), ({"seed": -1}, ValueError, "seed"),
    ({"strict": 1}, TypeError, "strict"), ({"mask": torch.ones(3, 4) > 0}, ValueError, "mask"),
])  # fmt: skip
def test_arguments_are_checked(options: dict[str, Any], error: Any, name: str) -> None:
    with pytest.raises(error, match=name):
        check_energy(**{"energy": Quadratic(), "z": STATE} | options)


class Mixed(Energy):
    """A state of tokens and of a leaf without tokens, which counts whole."""

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        tokens = hide(z["tokens"], mask).square().flatten(1).sum(1)
        return (1 + z["whole"].square().sum(1)) * tokens


class Seen(Mixed):
    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z)


def test_a_mask_of_a_pytree_is_of_its_tokens() -> None:
    state = {"tokens": STATE, "whole": torch.linspace(-1, 1, 6).reshape(3, 2)}
    assert check_energy(Mixed(), state, mask=MASK).ok
    assert [f.check for f in check_energy(Seen(), state, mask=MASK).failures] == ["masked tokens"]
    with pytest.raises(ValueError, match="mask"):
        check_energy(Mixed(), state, mask=torch.ones(3, 4) > 0)
