"""Derivatives through the layer: against finite differences and against dense linear algebra."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
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
from solvers import Anderson, OneStep, Phantom, Tolerance, Unrolled

each_layer = pytest.mark.parametrize("name", LAYERS)
MASK = torch.tensor([[True, True, False], [True, True, True]])


@pytest.mark.parametrize(
    ("name", "mask"),
    [(name, None) for name in LAYERS]
    + [(n, MASK) for n in ("gradient", "context", "channels", "activation")],
)
def test_gradcheck(name: str, mask: Tensor | None) -> None:
    layer = make(name, **EXACT)
    function, inputs = with_parameters(layer, tokens(), mask)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("seed", [0, 1, 2])
@each_layer
def test_dense_reference(name: str, seed: int) -> None:
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


@pytest.mark.parametrize("bound", [None, 0.6])
def test_outer_cache_changes_nothing(bound: float | None) -> None:
    """``parametrize.cached()`` around the whole training step, as its documentation proposes."""
    results = []
    for context in (nullcontext, parametrize.cached):
        torch.manual_seed(0)
        layer = DEQ(energy(bound=bound), **EXACT)
        x = tokens().requires_grad_()
        with context():
            z = layer(x)
            z.pow(3).sum().backward()
        results.append(gradients(layer) | {"x": x.grad, "z": z.detach()})
    for key, reference in results[0].items():
        assert relative_error(results[1][key], reference) <= 1e-10, key


@each_layer
def test_layer_called_twice_in_one_graph(name: str) -> None:
    layer = make(name, **EXACT)
    function, inputs = with_parameters(layer, tokens(batch=1))
    assert torch.autograd.gradcheck(
        lambda x, *weights: function(function(x, *weights), *weights), inputs, fast_mode=True
    )


def test_backward_twice_over_a_retained_graph() -> None:
    layer = make("gradient", **EXACT)
    x = tokens().requires_grad_()
    loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    first = gradients(layer)
    loss.backward()
    for key, gradient in gradients(layer).items():
        torch.testing.assert_close(gradient, 2 * first[key], rtol=1e-12, atol=1e-14)


def test_two_forwards_before_one_backward() -> None:
    layer = make("gradient", **EXACT)
    parts = []
    for seed in (0, 1):
        layer.zero_grad()
        layer(tokens(seed=seed)).square().sum().backward()
        parts.append(gradients(layer))
    layer.zero_grad()
    first, second = layer(tokens(seed=0)), layer(tokens(seed=1))
    (first.square().sum() + second.square().sum()).backward()
    for key, gradient in gradients(layer).items():
        torch.testing.assert_close(gradient, parts[0][key] + parts[1][key], rtol=1e-9, atol=1e-12)


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


def test_no_gradient_where_none_is_wanted() -> None:
    layer = make("gradient")
    assert not layer.solve(tokens(), adjoint=None).value.requires_grad
    with torch.no_grad():
        assert not layer(tokens()).requires_grad
    layer.requires_grad_(False)
    assert not layer(tokens()).requires_grad
    x = tokens().requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in layer.parameters())


def test_inference_mode() -> None:
    layer = make("gradient")
    with torch.no_grad():
        expected = layer(tokens())
    with torch.inference_mode():
        found = layer(tokens())
    torch.testing.assert_close(found.clone(), expected)


@each_layer
def test_solvers_agree_on_gradients(name: str) -> None:
    found = []
    for solver in (None, Anderson(memory=3)):
        layer = make(name, solver=solver, **EXACT)
        x = tokens().requires_grad_()
        layer(x).pow(3).sum().backward()
        found.append(x.grad)
    assert relative_error(found[0], found[1]) <= 1e-9
