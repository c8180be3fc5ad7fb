"""Derivatives through the layer: finite differences, dense linear algebra, transforms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize

from cases.deq import (
    EXACT,
    LAYERS,
    Cell,
    energy,
    gradients,
    make,
    relative_error,
    tokens,
    with_parameters,
)
from implicit_attn import DEQ
from implicit_attn.energies import BiSoftmaxAttention, FunctionEnergy, Quadratic
from solvers import Implicit, OneStep, Phantom, Tolerance, Unrolled

each_layer = pytest.mark.parametrize("name", LAYERS)
MASK = torch.tensor([[True, True, False], [True, True, True]])


@pytest.mark.parametrize(
    ("name", "mask"),
    [(name, None) for name in LAYERS] + [(n, MASK) for n in ("gradient", "context", "activation")],
)
def test_gradcheck(name: str, mask: Tensor | None) -> None:
    layer = make(name, **EXACT)
    function, inputs = with_parameters(layer, tokens(), mask)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@each_layer
def test_dense_reference(name: str, seed: int = 0) -> None:
    """``u = (I - J^T)^-1 g`` by a dense solve, then ``u^T df/d(input)``."""
    layer = make(name, seed, **EXACT | {"tolerance": Tolerance(rtol=1e-13)})
    x = tokens(seed=seed).requires_grad_()
    z = layer(x)
    weight = tokens(seed=seed + 10)
    (z * weight).sum().backward()
    found = gradients(layer) | {"x": x.grad}

    def step(flat: Tensor) -> Tensor:
        return layer.update(flat.view_as(z), x.detach()).flatten()

    point = z.detach().flatten()
    jacobian = torch.autograd.functional.jacobian(step, point)
    matrix = torch.eye(point.numel(), dtype=torch.float64) - jacobian.mT  # type: ignore[union-attr]
    u = torch.linalg.solve(matrix, weight.flatten())
    inputs = dict(layer.named_parameters()) | {"x": x}
    output = layer.update(z.detach(), x).flatten()
    expected = torch.autograd.grad(output, list(inputs.values()), u)
    for key, reference in zip(inputs, expected, strict=True):
        if "step_size" not in key:
            value = found[key]
            assert value is not None
            assert relative_error(value, reference) <= 1e-9, key


@each_layer
def test_layer_called_twice_in_one_graph(name: str) -> None:
    layer = make(name, **EXACT)
    function, inputs = with_parameters(layer, tokens(batch=1))
    assert torch.autograd.gradcheck(
        lambda x, *weights: function(function(x, *weights), *weights), inputs, fast_mode=True
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "adjoint", [None, OneStep(), Phantom(steps=40), Unrolled(), Unrolled(checkpoint=True)], ids=str
)
def test_both_modes_carry_a_gradient(training: bool, adjoint: Any) -> None:
    """Evaluation mode is for dropout and such; it says nothing about gradients."""
    torch.manual_seed(0)
    options: dict[str, Any] = {} if adjoint is None else {"adjoint": adjoint}
    layer = DEQ.from_update(
        Cell().double(), tolerance=Tolerance(rtol=1e-12), max_steps=60, **options
    ).train(training)
    x = tokens().requires_grad_()
    layer(x).square().sum().backward()
    found = gradients(layer)
    reference = make("update", **EXACT)
    y = tokens().requires_grad_()
    reference(y).square().sum().backward()
    tight = not isinstance(adjoint, OneStep)
    for key, gradient in gradients(reference).items():
        assert found[key].abs().max() > 0
        if tight:
            assert relative_error(found[key], gradient) <= 1e-5, key
    assert x.grad is not None and y.grad is not None
    if tight:
        assert relative_error(x.grad, y.grad) <= 1e-5


@each_layer
def test_gradgradcheck(name: str) -> None:
    layer = make(name, **EXACT)
    function, inputs = with_parameters(layer, tokens(batch=1))
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_active_spectral_bound_is_differentiated() -> None:
    """Weights far beyond the bound, so that what is checked goes through the bound's derivative."""
    torch.manual_seed(0)
    layer = DEQ(energy(bound=0.6), **EXACT)
    raw = [p for n, p in layer.named_parameters() if n.endswith("original")]
    assert len(raw) == 2
    for weight in raw:
        assert torch.linalg.matrix_norm(weight.detach(), ord=2) > 0.6
    function, inputs = with_parameters(layer, tokens(batch=1))
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["gradient", "activation"])
def test_second_derivative_after_the_outer_cache_has_gone(name: str) -> None:
    """The second backward pass then reads other weights than the forward pass did."""
    results = []
    for context in (nullcontext, parametrize.cached):
        layer = make(name, **EXACT)
        x = tokens().requires_grad_()
        with context():
            (slope,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        with right_or_refused():
            slope.square().sum().backward()
            results.append(gradients(layer))
    for key, reference in results[0].items():
        for found in results[1:]:
            assert relative_error(found[key], reference) <= 1e-8, key


@contextmanager
def right_or_refused() -> Iterator[None]:
    try:
        yield
    except GradcheckError:
        raise
    except RuntimeError as error:
        assert "second derivative is not at hand" in str(error)


TIGHT: dict[str, Any] = {
    "tolerance": Tolerance(rtol=1e-11),
    "adjoint": Implicit(tolerance=Tolerance(rtol=1e-11)),
    "max_steps": 300,
}


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.defect("D5")
@pytest.mark.parametrize("name", [*LAYERS, "bounded", "by autograd"])
def test_gradients_by_transforms_are_those_of_backward(name: str) -> None:
    torch.manual_seed(0)
    x = tokens(batch=3)
    if name == "bounded":
        energy = BiSoftmaxAttention(x.shape[-1], 2, bound=0.5) + Quadratic()
        layer = DEQ(energy, **TIGHT).double()
    elif name == "by autograd":
        wave = FunctionEnergy(lambda z, x: (0.5 * (z - x).square() + z.cos() / 3).flatten(1).sum(1))
        layer = DEQ(wave, **TIGHT)
    else:
        layer = make(name, **TIGHT)
    weights = {key: p.detach().clone() for key, p in layer.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, weights, x).pow(2).sum()

    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(layer(leaf).pow(2).sum(), [leaf, *layer.parameters()])
    last = layer.last
    close(grad(loss, 1)(weights, x), expected[0])
    for one, other in zip(grad(loss)(weights, x).values(), expected[1:], strict=True):
        close(one, other)

    def alone(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return loss(weights, row[None])

    each = vmap(grad(alone), in_dims=(None, 0))(weights, x)
    for one, other in zip(each.values(), expected[1:], strict=True):
        close(one.sum(0), other)
    assert layer.last is last
