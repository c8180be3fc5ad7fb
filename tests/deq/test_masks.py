"""Masked tokens keep their state and influence no other; pairs are given once or for each sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.deq import DIM, EXACT, gradients, make, relative_error, tokens
from implicit_attn import DEQ, Energy
from implicit_attn.energies import (
    AttentionInput,
    BiSoftmaxAttention,
    Quadratic,
    ReLUFeedForward,
    SoftmaxAttention,
)
from solvers import Anderson, Forward, Implicit, Tolerance

MASKED = ("gradient", "context", "activation", "softmax_couplings")
each_layer = pytest.mark.parametrize("name", MASKED)
TIGHT = {
    "tolerance": Tolerance(rtol=1e-12),
    "adjoint": Implicit(tolerance=Tolerance(rtol=1e-12)),
    "max_steps": 300,
}
LENGTHS = torch.tensor([5, 3, 1, 4])
MASK = torch.arange(5) < LENGTHS[:, None]


def padded(filling: float | None = None) -> Tensor:
    x = tokens(batch=4, count=5)
    if filling is not None:
        x[~MASK] = filling
    return x


@each_layer
def test_what_is_in_the_padding_does_not_matter(name: str, filling: float = 1e6) -> None:
    layer = make(name, **TIGHT)
    reference = layer(padded(), MASK)
    found = layer(padded(filling), MASK)
    torch.testing.assert_close(found[MASK], reference[MASK], rtol=1e-12, atol=1e-13)
    assert torch.equal(found[~MASK], padded(filling)[~MASK])


@each_layer
def test_padded_equals_cropped(name: str) -> None:
    """Every sample as if it were alone, with its padding cut off: values, steps and gradients."""
    layer = make(name, **TIGHT)
    x = padded().requires_grad_()
    solution = layer.solve(x, MASK)
    solution.value[MASK].pow(3).sum().backward()
    together = gradients(layer) | {"x": x.grad}
    layer.zero_grad()
    for index, length in enumerate(LENGTHS.tolist()):
        alone = padded()[index : index + 1, :length].requires_grad_()
        one = layer.solve(alone)
        torch.testing.assert_close(
            one.value[0], solution.value[index, :length], rtol=1e-9, atol=1e-10
        )
        # At this tolerance rounding decides about the last evaluations of a line search.
        assert abs(int(one.evaluations[0]) - int(solution.evaluations[index])) <= 3
        one.value.pow(3).sum().backward()
        assert alone.grad is not None and x.grad is not None
        torch.testing.assert_close(alone.grad[0], x.grad[index, :length], rtol=1e-8, atol=1e-9)
    for key, gradient in gradients(layer).items():
        reference = together[key]
        assert reference is not None
        if "step_size" not in key:
            assert relative_error(gradient, reference) <= 1e-8, key


@each_layer
@pytest.mark.parametrize("solver", [None, Anderson(), Forward(damping=0.5)], ids=str)
def test_full_mask_is_no_mask(name: str, solver: Anderson | None) -> None:
    layer = make(name, solver=solver, max_steps=200)
    full = torch.ones(4, 5, dtype=torch.bool)
    expected = layer.solve(padded())
    found = layer.solve(padded(), full)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-9, atol=1e-9)
    assert torch.equal(found.evaluations, expected.evaluations)


@each_layer
def test_sample_without_any_token(name: str) -> None:
    mask = MASK.clone()
    mask[2] = False
    layer = make(name, **TIGHT)
    x = padded().requires_grad_()
    solution = layer.solve(x, mask)
    assert bool(solution.converged.all()), solution.summary()
    assert torch.equal(solution.value[2], x[2])
    others = [0, 1, 3]
    expected = layer.solve(padded()[others], mask[others]).value
    torch.testing.assert_close(solution.value[others], expected, rtol=1e-10, atol=1e-11)
    solution.value[mask].sum().backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    for gradient in gradients(layer).values():
        assert bool(torch.isfinite(gradient).all())


def test_masked_tokens_stay_at_the_given_start() -> None:
    layer = make("gradient", init="zeros")
    z = layer(padded(), MASK)
    assert (z[~MASK] == 0).all()
    start = tokens(batch=4, count=5, seed=9)
    z = layer.solve(padded(), MASK, z0=start).value
    assert torch.equal(z[~MASK], start[~MASK])


def test_functions_with_a_mask() -> None:
    def energy(z: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        pull = (z - x).square().sum(-1)
        weight = torch.ones_like(pull) if mask is None else mask.to(pull.dtype)
        mean = (z * weight.unsqueeze(-1)).sum(1) / weight.sum(1, keepdim=True).clamp_min(1.0)
        return 0.5 * (pull * weight).sum(1) + 0.5 * mean.square().sum(1)

    def update(z: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        weight = torch.ones_like(z[..., :1]) if mask is None else mask.unsqueeze(-1).to(z.dtype)
        return x - 0.5 * (z * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)

    for layer in (DEQ.from_energy(energy, **TIGHT), DEQ.from_update(update, **TIGHT)):
        first, second = layer(padded(0.0), MASK), layer(padded(5.0), MASK)
        torch.testing.assert_close(first[MASK], second[MASK], rtol=1e-10, atol=1e-11)
        alone = layer(padded()[1:2, :3])
        torch.testing.assert_close(first[1:2, :3], alone, rtol=1e-10, atol=1e-11)


def test_functions_without_a_mask_refuse_it() -> None:
    layers = (
        DEQ.from_energy(lambda z, x: (z - x).square().flatten(1).sum(1)),
        DEQ.from_update(lambda z, x: 0.5 * x),
    )
    for layer in layers:
        with pytest.raises(ValueError, match=r"takes no mask.*\(4, 5\)"):
            layer(padded(), MASK)


@pytest.mark.parametrize(("mask", "error", "message"), [
    (MASK.float(), TypeError, "mask must be a bool tensor"),
    (MASK[:2], ValueError, r"mask must be batched.*\(2, 5\)"),
    (MASK[:, :3], ValueError, "mask has 3 tokens"),
    (MASK[0], TypeError, r"mask must be a bool tensor \(B, N\)"),
    ([[True]], TypeError, "mask must be a bool tensor"),
], ids=["float", "batch", "tokens", "one-dimension", "list"])  # fmt: skip
def test_bad_masks(mask: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make("gradient")(padded(), mask)


def test_cross_attention_with_a_masked_context() -> None:
    """The context has a mask of its own, which travels in x with the samples."""
    torch.manual_seed(0)
    attention = SoftmaxAttention(DIM, 2, cross=True, norm=None, bound=1.0).select("context")
    layer = DEQ(
        (0.5 * attention + Quadratic().select("x")).double(), init=lambda x: x["x"], **TIGHT
    )
    context = tokens(batch=4, count=5, seed=3)
    x = tokens(batch=4, count=2)
    reference = layer({"x": x, "context": (context, MASK)})
    changed = context.clone()
    changed[~MASK] = 50.0
    found = layer({"x": x, "context": (changed, MASK)})
    torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)
    alone = layer({"x": x[2:3], "context": context[2:3, :1]})
    torch.testing.assert_close(reference[2:3], alone, rtol=1e-9, atol=1e-10)


B, N, M = 3, 3, 4


class Seeing(Energy):
    """A user's energy that prepares nothing and looks at the whole input."""

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        weights = x.pairs.to(z.dtype) if x.pair_bias is None else x.pair_bias.tanh()
        return 0.05 * (z @ z.mT * weights).sum((1, 2))


def row_tokens(batch: int = B, keys: int = N) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, keys, DIM, generator=generator, dtype=torch.float64)


def zeros(x: AttentionInput) -> Tensor:
    assert x.tokens is not None
    return torch.zeros_like(x.tokens)


TERMS = {
    "a memory": lambda: ReLUFeedForward(DIM, 8),
    "heads": lambda: BiSoftmaxAttention(DIM, 2, bound=1.0),
    "a user's": Seeing,
}


@pytest.mark.parametrize("batch", [2, N])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", TERMS)
def test_a_matrix_of_pairs_is_one_for_each_sample(name: str, biased: bool, batch: int) -> None:
    """Also where there are as many samples as tokens, and finished ones leave the batch."""
    torch.manual_seed(0)
    attention = 0.2 * BiSoftmaxAttention(DIM, 2, bound=1.0)
    energy = (attention + 0.2 * TERMS[name]() + Quadratic().select("tokens")).double()
    matrix = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    part = {"pair_bias": matrix.double()} if biased else {"pairs": matrix > 0}
    x = AttentionInput(row_tokens(batch), **part)
    layer = DEQ(energy, init=zeros, **EXACT)
    found = layer(x)
    start = found.detach().clone()
    start[0] += 3.0
    again = layer.solve(x, z0=start)
    assert again.evaluations[1:].max() < again.evaluations[0]
    each = x._replace(**{name: t.expand(batch, N, N) for name, t in part.items()})
    torch.testing.assert_close(again.value, layer(each))
    torch.testing.assert_close(energy.grad(found, x if name != "a user's" else each), 0 * found)
