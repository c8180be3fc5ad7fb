"""Attention energies that see the layer's input: values, masks, gradients through a solve, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.deq import EXACT
from cases.energies import relative_error
from implicit_attn import DEQ, Energy
from implicit_attn.energies import (
    AttentionInput,
    BiSoftmaxAttention,
    LinearAttention,
    Quadratic,
    ScoreAttention,
    SoftmaxAttention,
)

DIM, WIDTH, HEADS, B, N, M = 4, 3, 2, 2, 3, 5
SELF = {
    "bisoftmax": BiSoftmaxAttention,
    "sigmoid": ScoreAttention,
    "linear": LinearAttention,
    "inner": SoftmaxAttention,
    "elastic": lambda *a, **o: SoftmaxAttention(*a, energy="elastic", **o),
}
each_self = pytest.mark.parametrize("kind", SELF)


def make(kind: str, **options: Any) -> Any:
    """An energy whose biases are not zero."""
    torch.manual_seed(1)
    energy = SELF[kind](DIM, HEADS, **{"context_dim": WIDTH, **options}).double()
    with torch.no_grad():
        for parameter in energy.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return energy


def state(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A state, an input of another width, and a memory."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((B, N, DIM), (B, N, WIDTH), (B, M, DIM))
    z, x, memory = (torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)
    return z, x, memory


def joined(energy: Any) -> Any:
    """The energy without input of the states ``(z, x)``, with the weights side by side."""
    torch.manual_seed(1)
    cls, options = type(energy), {"bias": True, "head_dim": DIM // HEADS}
    if isinstance(energy, SoftmaxAttention):
        other: Any = cls(DIM + WIDTH, HEADS, energy=energy.energy, **options).double()
        parts = (("query", "query_context"), ("key", "key_context"))
        other.query_bias, other.key_bias = energy.query_bias, energy.key_bias
    else:
        other = cls(DIM + WIDTH, HEADS, **options).double()
        parts, other.bias = (("projection", "context"),), energy.bias
    for name, context in parts:
        both = [getattr(energy, part).weight for part in (name, context)]
        with torch.no_grad():
            getattr(other, name).weight.copy_(torch.cat(both, 1))
    return other


@pytest.mark.parametrize("masked", [False, True])
@each_self
def test_the_input_is_a_part_of_the_state_that_is_held(kind: str, masked: bool) -> None:
    """``norm(W z + P x + b)`` are the features of ``(z, x)`` under ``(W, P)``: so are the gradients."""
    energy, (z, x, _) = make(kind), state()
    mask = torch.tensor([[True, False, True], [False] * N]) if masked else None
    both = torch.cat((z, x), -1)
    v = torch.cat((torch.flip(z, (0, 1)), torch.zeros_like(x)), -1)
    value, gradient = joined(energy).value_and_grad(both, mask=mask)
    for form in (x, energy.prepare(x, mask=mask), AttentionInput(tokens=x)):
        assert relative_error(energy(z, form, mask=mask), value) <= 1e-12
        assert relative_error(energy.grad(z, form, mask=mask), gradient[..., :DIM]) <= 1e-12
        product = joined(energy).hvp(both, v, mask=mask)[..., :DIM]
        assert relative_error(energy.hvp(z, v[..., :DIM], form, mask=mask), product) <= 1e-12


@each_self
def test_a_layer_without_context_ignores_the_input_and_prepares_nothing(kind: str) -> None:
    energy, (z, x, _) = SELF[kind](DIM, HEADS).double(), state()
    assert energy.prepare(x) is None
    assert torch.equal(energy.grad(z, x), energy.grad(z))
    assert torch.equal(energy.grad(z, AttentionInput(tokens=x)), energy.grad(z))
    assert not any("bias" in name or "context" in name for name in energy.state_dict())


def layer_of(attention: Energy) -> DEQ:
    """The state is as wide as the tokens that the quadratic pulls to, the context is narrower."""
    pulled = 0.3 * attention.select("attention") + Quadratic().select("pull")
    return DEQ(pulled, init=lambda x: x["pull"], **EXACT)


def test_a_solve_prepares_once_and_takes_the_rows_along() -> None:
    """Samples that finish early leave with their part; one pattern for all samples stays whole."""
    torch.manual_seed(0)
    attention = BiSoftmaxAttention(DIM, HEADS, context_dim=WIDTH, bound=1.0).double()
    layer = layer_of(attention)
    calls: list[int] = []
    assert attention.context is not None
    attention.context.register_forward_hook(lambda *_: calls.append(1))
    z, x, _ = state()
    pairs = torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.7
    parts = [torch.cat([t] * 3)[:N] for t in (z, x)]  # as many samples as tokens
    one = {"attention": AttentionInput(tokens=parts[1], pairs=pairs), "pull": parts[0]}
    solution = layer.solve(one)
    start = solution.value.detach().clone()
    start[0] += 3.0
    again = layer.solve(one, z0=start)
    assert again.evaluations[1:].max() < again.evaluations[0]
    torch.testing.assert_close(again.value, solution.value)
    many = AttentionInput(tokens=parts[1], pairs=pairs.expand(N, N, N))
    torch.testing.assert_close(layer({"attention": many, "pull": parts[0]}), solution.value)


ERRORS: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, r"x must hold tokens \(B, N, 3\), got NoneType"),
    ({"a": torch.zeros(B, N, WIDTH)}, TypeError, r"\.select\(key\)"),
    (torch.zeros(B, N, DIM), ValueError, r"x must have the shape \(B, N, 3\), got \(2, 3, 4\)"),
    (torch.zeros(B, N + 1, WIDTH).double(), ValueError, r"tokens of z, \(2, 3\), got \(2, 4\)"),
    (torch.zeros(B, N, WIDTH, device="meta"), ValueError, r"x must be on cpu like the weights, go"),
    (AttentionInput(), TypeError, r"x must hold tokens \(B, N, 3\), got NoneType"),
    (torch.zeros(B, N, WIDTH), TypeError, "x must have the dtype of the weights, torch.float64"),
    (AttentionInput(memory=torch.zeros(B, M, DIM)), ValueError, r"x\.memory needs cross-attention"),
]


@pytest.mark.parametrize(("x", "error", "message"), ERRORS)
@each_self
def test_bad_input(kind: str, x: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make(kind).grad(state()[0], x)


def test_parts_of_a_named_tuple_are_selected_by_name() -> None:
    z = state()[0]
    other = torch.flip(z, (0,))
    given = AttentionInput(tokens=other, pairs=torch.ones(N, N) > 0)
    energy = Quadratic().select("tokens")
    assert torch.equal(energy.grad(z, given), Quadratic().grad(z, other))
    with pytest.raises(ValueError, match="x must hold 'token'"):
        Quadratic().select("token").grad(z, given)
    for method in ("count", "_replace"):  # what every named tuple has besides its fields
        with pytest.raises(ValueError, match=f"x must hold {method!r}"):
            Quadratic().select(method).grad(z, given)


CROSS: dict[str, Any] = {
    f"{energy}-{backend}": lambda e=energy, b=backend, **o: SoftmaxAttention(
        DIM, HEADS, energy=e, cross=True, backend=b, bias=True, **o
    ).double()
    for energy in ("inner", "elastic")
    for backend in ("reference", "flash", "auto")
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CROSS)
def test_an_empty_memory_has_energy_zero(name: str, masked: bool) -> None:
    energy, (z, _, memory) = CROSS[name](), state()
    mask = torch.tensor([[True, False, True], [False] * N]) if masked else None
    empty = memory[:, :0]
    forms: list[Any] = [empty, AttentionInput(memory=empty), energy.prepare(empty, mask=mask)]
    if not name.endswith("flash"):
        forms.append(AttentionInput(memory=empty, pairs=torch.ones(N, 0) > 0))
    for form in forms:
        value, gradient = energy.value_and_grad(z, form, mask=mask)
        assert (value == 0).all() and (gradient == 0).all()
        assert (energy.hvp(z, z, form, mask=mask) == 0).all()
        total = value.sum() + gradient.square().sum()
        given = torch.autograd.grad(total, list(energy.parameters()), allow_unused=True)
        assert all(g is None or (g == 0).all() for g in given)
    with pytest.raises(ValueError, match=r"pairs must have the shape \(3, 0\)"):
        energy.grad(z, AttentionInput(memory=empty, pairs=torch.ones(N, M) > 0))
