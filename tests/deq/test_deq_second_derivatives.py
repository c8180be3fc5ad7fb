"""Second derivatives through the layer, and weights that change between the derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call
from torch.nn.utils import parametrize

from cases.deq import (
    DIM,
    EXACT,
    LAYERS,
    energy,
    gradients,
    make,
    relative_error,
    tokens,
    with_parameters,
)
from implicit_attn import DEQ

each_layer = pytest.mark.parametrize("name", LAYERS)


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


@pytest.mark.parametrize("calls", [1, 2])
def test_second_derivative_under_an_outer_cache(calls: int) -> None:
    results = []
    for context in (nullcontext, parametrize.cached):
        torch.manual_seed(0)
        layer = DEQ(energy(bound=0.6), **EXACT)
        x = tokens().requires_grad_()
        with context():
            z = x
            for _ in range(calls):
                z = layer(z)
            (slope,) = torch.autograd.grad(z.pow(3).sum(), x, create_graph=True)
            slope.square().sum().backward()
        results.append(gradients(layer) | {"x": x.grad})
    for key, reference in results[0].items():
        assert relative_error(results[1][key], reference) <= 1e-8, key


def test_closed_over_tensors_get_gradients() -> None:
    """Nobody lists parameters: what the plain function reads is found."""
    torch.manual_seed(0)
    weight = nn.Parameter(0.3 * torch.randn(DIM, DIM, dtype=torch.float64))
    upstream = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    def run(weight: Tensor, upstream: Tensor) -> Tensor:
        scale = upstream.exp()
        layer = DEQ.from_update(lambda z, x: torch.tanh(z @ weight) * scale / 2 + x, **EXACT)
        return layer(tokens())

    assert torch.autograd.gradcheck(run, (weight, upstream), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (weight, upstream), fast_mode=True)


@pytest.mark.parametrize("name", ["gradient", "activation", "update"])
def test_functional_call(name: str) -> None:
    """Parameters handed over from outside: right first derivatives, and never wrong second ones."""
    layer = make(name, **EXACT)
    names = [n for n, _ in layer.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]

    def run(*parameters: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (tokens(batch=1),))

    assert torch.autograd.gradcheck(run, values, fast_mode=True)
    with right_or_refused():
        assert torch.autograd.gradgradcheck(run, values, fast_mode=True)


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
