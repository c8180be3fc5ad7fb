"""Gradients of layers, and masks in layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import solvers
from cases.deq import DIM, EXACT, LAYERS, gradients, make, relative_error, tokens, with_parameters
from implicit_attn import DEQ, apply_norm
from implicit_attn.energies import (
    AttentionInput,
    BiSoftmaxAttention,
    FunctionEnergy,
    Quadratic,
    ReLUFeedForward,
)
from implicit_attn.updates import Update
from solvers import Implicit

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
def test_gradgradcheck(name: str) -> None:
    layer = make(name, **EXACT)
    function, inputs = with_parameters(layer, tokens(batch=1))
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


TIGHT: dict[str, Any] = {
    "tolerance": 1e-12,
    "adjoint": Implicit(tolerance=1e-12),
    "max_steps": 300,
}


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", [*LAYERS, "by autograd"])
def test_weights_put_in_place_have_the_gradients_of_the_layer(name: str) -> None:
    """``torch.func.functional_call`` with first and second derivatives; transforms name what works."""
    x = tokens(batch=3)
    if name == "by autograd":
        wave = FunctionEnergy(lambda z, x: (0.5 * (z - x).square() + z.cos() / 3).flatten(1).sum(1))
        layer = DEQ(wave, **TIGHT)
    else:
        layer = make(name, **TIGHT)
    weights = {key: p.detach().clone().requires_grad_() for key, p in layer.named_parameters()}
    other = make(name, **TIGHT) if name in LAYERS else layer
    for parameter in other.parameters():
        parameter.data.mul_(0.5)

    def derivatives(call: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(call(inputs[0]).pow(2).sum(), inputs, create_graph=True)
        size = torch.stack([each.square().sum() for each in first]).sum()
        return [*first, *torch.autograd.grad(size, inputs)]

    leaf = x.clone().requires_grad_()
    expected = derivatives(layer, [leaf, *layer.parameters()])
    found = derivatives(lambda x: functional_call(other, weights, x), [leaf, *(weights.values())])
    for one, reference in zip(found, expected, strict=True):
        close(one, reference)
    with pytest.raises(RuntimeError, match="unrolled"):
        grad(lambda x: layer(x).sum())(x)


MASKED = ("gradient", "context", "activation", "softmax_couplings")
each_masked = pytest.mark.parametrize("name", MASKED)
LENGTHS = torch.tensor([5, 3, 0, 4])
PADDING = torch.arange(5) < LENGTHS[:, None]


def padded(filling: float | None = None) -> Tensor:
    x = tokens(batch=4, count=5)
    if filling is not None:
        x[~PADDING] = filling
    return x


@each_masked
def test_padded_equals_cropped(name: str) -> None:
    """Every sample as if it were alone, whatever is in its padding; one has no token."""
    layer = make(name, **TIGHT)
    x = padded(1e6).requires_grad_()
    with pytest.warns(UserWarning, match="no token"):
        solution = layer.solve(x, PADDING)
    assert bool(solution.converged.all())
    assert torch.equal(solution.value[~PADDING], x[~PADDING])
    solution.value[PADDING].pow(3).sum().backward()
    together = gradients(layer)
    layer.zero_grad()
    for index, length in enumerate(LENGTHS.tolist()):
        if length == 0:
            continue
        alone = padded()[index : index + 1, :length].requires_grad_()
        one = layer.solve(alone)
        close(one.value[0], solution.value[index, :length])
        # At this tolerance rounding decides about the last evaluations of a line search.
        assert abs(int(one.evaluations[0]) - int(solution.evaluations[index])) <= 3
        one.value.pow(3).sum().backward()
        assert alone.grad is not None and x.grad is not None
        close(alone.grad[0], x.grad[index, :length])
    for key, gradient in gradients(layer).items():
        if "step_size" not in key:
            assert relative_error(gradient, together[key]) <= 1e-8, key


N = 3


def zeros(x: AttentionInput) -> Tensor:
    assert x.tokens is not None
    return torch.zeros_like(x.tokens)


@pytest.mark.parametrize(("batch", "biased"), [(2, True), (N, False)])
def test_a_matrix_of_pairs_is_one_for_each_sample(biased: bool, batch: int) -> None:
    """Also where there are as many samples as tokens, and finished ones leave the batch."""
    torch.manual_seed(0)
    attention = 0.2 * BiSoftmaxAttention(DIM, 2, bound=1.0)
    energy = (attention + 0.2 * ReLUFeedForward(DIM, 8) + Quadratic().select("tokens")).double()
    matrix = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    part = {"pair_bias": matrix.double()} if biased else {"pairs": matrix > 0}
    x = AttentionInput(tokens(batch, N), **part)
    layer = DEQ(energy, init=zeros, **EXACT)
    found = layer(x)
    start = found.detach().clone()
    start[0] += 3.0
    again = layer.solve(x, z0=start)
    assert again.evaluations[1:].max() < again.evaluations[0]
    each = x._replace(**{name: t.expand(batch, N, N) for name, t in part.items()})
    torch.testing.assert_close(again.value, layer(each))
    torch.testing.assert_close(energy.grad(found, x), 0 * found)


def test_second_derivatives_pass_through_attention_of_torch() -> None:
    """Gradient penalties, the Jacobian's penalty and Newton: fused attention has one derivative only."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return x + 0.3 * self.attention(z, z, z, need_weights=False)[0]

    f = Attends()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    layer = DEQ.from_update(f, tolerance=1e-11, max_steps=100)
    inputs = [x, attention.in_proj_weight, attention.out_proj.weight]

    def iterated(x: Tensor) -> Tensor:
        z = x
        for _ in range(60):
            z = f(z, x)
        return z

    def penalty(model: Callable[[Tensor], Tensor]) -> Any:
        (slope,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), inputs)

    with sdpa_kernel(SDPBackend.MATH):
        exact = penalty(iterated)
    torch.testing.assert_close(penalty(layer), exact, rtol=1e-6, atol=1e-8)
    value = layer(x).detach()
    layer.jacobian_penalty(value, x).sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in inputs[1:])
    newton = layer.solve(x, solver="newton", max_steps=300)
    torch.testing.assert_close(newton.value, value)


class Nested(Update):
    """``inner(z) / 2 + x``, or ``tanh(W z) + x`` without an inner layer."""

    def __init__(self, inner: DEQ | None = None) -> None:
        super().__init__()
        self.inner, self.linear = inner, None if inner else nn.Linear(4, 4).double()
        if self.linear is not None:
            apply_norm(self.linear, "bound", target=0.5)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        if self.linear is not None:
            return torch.tanh(self.linear(z)) + x
        assert self.inner is not None
        return 0.5 * self.inner(z) + x


def test_a_layer_within_a_layer_has_second_derivatives() -> None:
    torch.manual_seed(0)
    options: Any = {"tolerance": 1e-12, "max_steps": 200}
    layer = DEQ(Nested(DEQ(Nested(), **options)), **options)
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x, atol=1e-5)


def test_a_module_given_to_root_has_second_derivatives() -> None:
    torch.manual_seed(0)
    cube = nn.ParameterList([torch.rand(3, dtype=torch.float64) + 1])

    class Cube(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = cube

        def forward(self, z: Tensor) -> Tensor:
            return z**3 - self.weights[0]

    value = solvers.root(Cube(), torch.ones(2, 3).double(), tolerance=1e-12).value
    (first,) = torch.autograd.grad(value[0].sum(), cube[0], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), cube[0])
    weight = cube[0].detach()  # the root is its third root
    torch.testing.assert_close(first.detach(), weight ** (-2 / 3) / 3, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(second, -2 * weight ** (-5 / 3) / 9, rtol=1e-5, atol=1e-7)


class Repeated(Nested):
    """The same map, whose evaluations are repeated in the backward pass."""

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return checkpoint(super().forward, z, x, use_reentrant=False)


@pytest.mark.parametrize("adjoint", [Implicit(tolerance=1e-12), solvers.Unrolled()])
def test_a_checkpoint_in_an_update_computes_bounded_weights_again(adjoint: solvers.Adjoint) -> None:
    torch.manual_seed(0)
    plain, repeated = (
        DEQ(kind(), tolerance=1e-12, max_steps=200, adjoint=adjoint) for kind in (Nested, Repeated)
    )
    repeated.load_state_dict(plain.state_dict())
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    expected, found = (
        torch.autograd.grad(layer(x).pow(3).sum(), [x, *layer.parameters()])
        for layer in (plain, repeated)
    )
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    assert torch.autograd.gradgradcheck(repeated, x, atol=1e-5)
