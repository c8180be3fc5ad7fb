"""Feed-forward energies that see an input: hidden biases ``U x + c`` and gates ``2 sigmoid(G x + g)``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cases.energies import NORMS
from implicit_attn import DEQ
from implicit_attn.energies import (
    GatedFeedForward,
    GELUFeedForward,
    Quadratic,
    ReLUFeedForward,
    SoftmaxFeedForward,
)
from implicit_attn.energies.feedforward import MemoryEnergy
from implicit_attn.models import HyperSETEquilibrium
from solvers import Implicit, Tolerance

DIM, WIDTH, UNITS = 4, 3, 6  # features of z, of x; hidden units


def gelu_integral(y: Tensor) -> Tensor:
    density = torch.exp(-0.5 * y**2) / (2 * torch.pi) ** 0.5
    return 0.5 * ((y**2 - 1) * torch.special.ndtr(y) + y * density)


POTENTIALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda y, g: -0.5 * (g * y.clamp_min(0) ** 2).sum(-1),
    "gelu": lambda y, g: -(g * gelu_integral(y)).sum(-1),
    "softmax": lambda y, g: -(g * y.exp()).sum(-1).log(),
    "gated-gelu": lambda y, g: -0.5 * (g * F.gelu(y)).sum(-1) ** 2,
    "gated-relu": lambda y, g: -0.5 * (g * F.relu(y)).sum(-1) ** 2,
}
CLASSES: dict[str, tuple[Callable[..., MemoryEnergy], dict[str, Any]]] = {
    "relu": (ReLUFeedForward, {}),
    "gelu": (GELUFeedForward, {}),
    "softmax": (SoftmaxFeedForward, {}),
    "gated-gelu": (GatedFeedForward, {}),
    "gated-relu": (GatedFeedForward, {"activation": "relu"}),
}
GATED = [name for name in CLASSES if name != "softmax"]
each_kind = pytest.mark.parametrize(
    ("name", "gates"), [(name, False) for name in CLASSES] + [(name, True) for name in GATED]
)


def make(name: str, *, random: bool = True, **options: Any) -> MemoryEnergy:
    torch.manual_seed(0)
    cls, own = CLASSES[name]
    energy = cls(DIM, UNITS, **own | options).double()
    if random:
        with torch.no_grad():
            for parameter in energy.parameters():
                parameter.copy_(0.7 * torch.randn(parameter.shape))
    return energy


def pair(batch: int = 2, count: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, count, DIM), (batch, count, WIDTH)
    z, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return z, x


@pytest.mark.parametrize("norm", NORMS)
@each_kind
def test_value_is_the_formula(name: str, gates: bool, norm: str) -> None:
    energy = make(name, context_dim=WIDTH, gates=gates, norm=NORMS[norm])
    z, x = pair()
    weights = dict(energy.named_parameters())
    assert weights["context.weight"].shape == (UNITS, WIDTH) and weights["bias"].shape == (UNITS,)
    raw = z @ weights["projection.weight"].T + x @ weights["context.weight"].T + weights["bias"]
    epsilon = {"soft": 1.0, "tiny": 1e-6, "none": None}[norm]
    y = raw if epsilon is None else raw / (raw.square().mean(-1, keepdim=True) + epsilon).sqrt()
    g = torch.ones_like(y)
    if gates:
        g = 2 / (1 + torch.exp(-(x @ weights["gate.weight"].T + weights["gate.bias"])))
    for given in (x, energy.prepare(x)):
        torch.testing.assert_close(energy(z, given), POTENTIALS[name](y, g).sum(1))
        torch.testing.assert_close(energy.features(z, given), y)


@each_kind
def test_what_a_context_begins_as(name: str, gates: bool) -> None:
    """No biases and open gates: at first the energy at ``x = 0`` is that without a context."""
    plain = make(name, random=False)
    seen = make(name, random=False, context_dim=WIDTH, gates=gates)
    z, x = pair()
    torch.testing.assert_close(seen(z, torch.zeros_like(x)), plain(z))
    assert not torch.allclose(seen(z, x), plain(z))
    assert seen.context is not None and abs(seen.context.weight.std().item() * WIDTH**0.5 - 1) < 0.5
    with torch.no_grad():
        seen.context.weight.zero_()
    torch.testing.assert_close(seen(z, x), plain(z))


@pytest.mark.parametrize("name", CLASSES)
def test_without_options_nothing_is_added(name: str) -> None:
    energy = make(name)
    assert list(energy.state_dict()) == ["projection.weight"]
    z, x = pair()
    assert energy.prepare(x) is None
    assert torch.equal(energy(z, x), energy(z))  # x is ignored
    biased = make(name, bias=True)
    assert sorted(biased.state_dict()) == ["bias", "projection.weight"]
    assert biased.prepare(x) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_kind
def test_sums_over_many_units_are_taken_in_float32(
    name: str, gates: bool, dtype: torch.dtype
) -> None:
    """Half precision would stop counting at a few hundred or thousand."""
    cls, own = CLASSES[name]
    torch.manual_seed(0)
    energy = cls(DIM, 20000, **own, context_dim=WIDTH, gates=gates, norm=None).to(dtype)
    with torch.no_grad():
        energy.projection.weight.mul_(0.1)
        energy.get_parameter("bias").fill_(1.0 if "gated" not in name else 0.01)
    reference = copy.deepcopy(energy).double()
    z, x = (t.to(dtype) for t in pair())
    value, gradient = energy.value_and_grad(z, energy.prepare(x))
    assert value.dtype == torch.float32 and gradient.dtype == dtype
    room = {torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(value.double(), reference(z.double(), x.double()), rtol=room, atol=0)


ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: make("relu", gates=True), ValueError, r"gates=True needs a context.*context_dim=None"),
    (lambda: make("softmax", gates=True, context_dim=3), ValueError, r"gates must be False for a"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_wrong_options(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_inputs_that_do_not_fit() -> None:
    energy = make("relu", context_dim=WIDTH)
    z, x = pair()
    mask = torch.ones(2, 3, dtype=torch.bool)
    label = "ReLUFeedForward: x must"
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (None, None, TypeError, rf"{label} hold tokens \(B, ..., 3\), got NoneType"),
        (x.int(), None, TypeError, rf"{label} have the dtype of the weights, torch.float64, got"),
        (z, None, ValueError, rf"{label} have the shape \(B, ..., 3\), got \(2, 3, 4\)"),
        (x[:, :2], None, ValueError, rf"{label} have the tokens of z.*\(2, 3, 3\), got \(2, 2,"),
        (x[:, :2], mask, ValueError, r"x: mask must have the shape \(B, N\) = \(2, 2\), got"),
        (x.to("meta"), None, ValueError, rf"{label} be on cpu like the weights, got meta"),
    ]
    for given, keep, error, message in cases:
        with pytest.raises(error, match=message):
            energy.grad(z, given, mask=keep)
    with pytest.raises(ValueError, match=r"tokens of z, .* got \(2, 2, 3\)"):
        energy.grad(z, energy.prepare(x[:, :2]))
    with pytest.raises(ValueError, match=r"x must have the shape"):
        DEQ(energy + Quadratic())(z)


TIGHT: dict[str, Any] = {
    "tolerance": Tolerance(1e-13),
    "adjoint": Implicit(tolerance=Tolerance(1e-13)),
    "max_steps": 400,
    "on_failure": "raise",
}


@pytest.mark.parametrize("context", [False, True])
def test_only_with_a_context_the_equilibrium_is_no_proximal_operator(context: bool) -> None:
    """``dz*/dx`` is ``(I + H)^-1``, symmetric, as long as x enters by ``1/2 |z - x|^2`` alone."""
    torch.manual_seed(0)
    model = HyperSETEquilibrium(
        4, 2, 6, layer=TIGHT, feedforward="gelu", weight=0.3, context=context
    )
    model = model.double()
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    jacobian: Any = torch.autograd.functional.jacobian(
        lambda flat: model(flat.view(1, 3, 4)).flatten(), x.flatten()
    )
    asymmetry = (jacobian - jacobian.mT).norm() / jacobian.norm()
    assert (asymmetry > 0.03) if context else (asymmetry < 1e-8)
    # The Hessian by z is symmetric in both, which is what solver and adjoint need.
    energy: Any = model.layer.update.energy
    hessian: Any = torch.autograd.functional.jacobian(
        lambda flat: energy.grad(flat.view_as(x), energy.prepare(x)).flatten(), x.flatten()
    )
    torch.testing.assert_close(hessian, hessian.mT)
