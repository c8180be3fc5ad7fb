"""Mean fields of spins with learned couplings, and with couplings of the input."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn import functional as F

from implicit_attn import DEQ
from implicit_attn.updates import MeanFieldAttention, NormedMLP, SoftmaxCouplingAttention
from solvers import Forward, Implicit, SolveWarning, Tolerance

SITES, DIM = 5, 3
EXACT: dict[str, Any] = {
    "tolerance": Tolerance(rtol=1e-13),
    "adjoint": Implicit(tolerance=Tolerance(rtol=1e-13)),
    "max_steps": 400,
    "on_failure": "raise",
}
MASK = torch.tensor([[True] * 5, [True, False, True, True, False], [False, True, True, True, True]])


class Damping(nn.Module):
    """A correction of the user's: ``V z`` with one learned V for all sites."""

    def __init__(self) -> None:
        super().__init__()
        self.variance = nn.Parameter(torch.linspace(0.1, 0.9, DIM))

    def forward(self, z: Tensor) -> Tensor:
        return self.variance * z


def make(**options: Any) -> MeanFieldAttention:
    torch.manual_seed(0)
    given: dict[str, Any] = {"scale": 0.5} | options
    return MeanFieldAttention(SITES, DIM, **given).double()


def pair(batch: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    z, x = torch.randn(2, batch, SITES, DIM, generator=generator, dtype=torch.float64)
    return z, x


@pytest.mark.parametrize("correction", ["network", None, "module"])
def test_formula(correction: Any) -> None:
    update = make(correction=Damping() if correction == "module" else correction)
    z, x = pair()
    for i in range(SITES):
        expected = x[:, i].clone()
        for j in range(SITES):
            expected += z[:, j] @ update.couplings.weight[i, j].T
        if update.correction is not None:
            expected -= update.correction(z[:, i : i + 1]).squeeze(1)
        torch.testing.assert_close(update(z, x)[:, i], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(update(z), update(z, x) - x, rtol=1e-12, atol=1e-12)


def test_network_formula() -> None:
    torch.manual_seed(0)
    network = NormedMLP(DIM, 7, epsilon=0.5).double()
    z, _ = pair()
    norm = (z - z.mean(-1, keepdim=True)) / (z.var(-1, keepdim=True, correction=0) + 0.5).sqrt()
    hidden = nn.functional.gelu(norm @ network.first.weight.T + network.first.bias)
    expected = hidden @ network.second.weight.T + network.second.bias
    torch.testing.assert_close(network(z), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("correction", ["network", None])
def test_masked_layer_is_the_layer_on_the_other_sites_alone(correction: str | None) -> None:
    """Values, and gradients by the input, the couplings and the correction."""
    update = make(correction=correction)
    _, x = pair()
    inputs = x.masked_fill(~MASK.unsqueeze(-1), 3.0).requires_grad_()
    z = DEQ(update, **EXACT)(inputs, MASK)
    assert torch.equal(z[~MASK], inputs[~MASK])
    z[MASK].pow(3).sum().backward()
    assert inputs.grad is not None and (inputs.grad[~MASK] == 0).all()
    found = [p.grad.clone() for p in update.parameters() if p.grad is not None]

    losses: list[Tensor] = []
    alone_x = x.clone().requires_grad_()
    weight = update.couplings.weight
    for index, keep in enumerate(MASK):
        part = weight[keep][:, keep]

        def one(z: Tensor, x: Tensor, part: Tensor = part) -> Tensor:
            field = torch.einsum("ijab,njb->nia", part, z) + x
            return field if update.correction is None else field - update.correction(z)

        alone = DEQ.from_update(one, **EXACT)(alone_x[index : index + 1, keep])
        torch.testing.assert_close(alone[0], z[index, keep], rtol=1e-10, atol=1e-10)
        losses.append(alone.pow(3).sum())
    gradients = torch.autograd.grad(torch.stack(losses).sum(), [*update.parameters(), alone_x])
    torch.testing.assert_close(inputs.grad, gradients[-1], rtol=1e-8, atol=1e-9)
    for gradient, reference in zip(found, gradients[:-1], strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-8, atol=1e-9)


def test_without_correction_the_response_is_linear() -> None:
    """``z = (I - J)^-1 x``; the Jacobian is symmetric, so the adjoint is solved by CG."""
    update = make(correction=None)
    assert update.symmetric and not make().symmetric
    assert not make(correction=None, symmetric_sites=False).symmetric
    _, x = pair()
    layer = DEQ(update, **EXACT)
    x.requires_grad_()
    z = layer(x)
    unit = torch.eye(SITES * DIM, dtype=torch.float64)
    inverse = torch.linalg.inv(unit - update.couplings.matrix.detach())
    torch.testing.assert_close(z.flatten(1), x.flatten(1) @ inverse, rtol=1e-11, atol=1e-11)
    cotangent, _ = pair()
    z.backward(cotangent)
    assert x.grad is not None
    expected = cotangent.flatten(1) @ inverse
    torch.testing.assert_close(x.grad.flatten(1), expected, rtol=1e-11, atol=1e-11)


def test_bounded_layer_contracts_whatever_the_weights() -> None:
    """|J| <= 0.5 and the network below 1.13 * 0.6^2 = 0.41: plain iteration converges."""
    for factor in (1.0, 10.0, 1e3):
        update = make(bound=0.5, correction=NormedMLP(DIM, bound=0.6))
        with torch.no_grad():
            for parameter in update.parameters():
                parameter.mul_(factor)
        z, x = pair()
        layer = DEQ(update, solver=Forward(), tolerance=Tolerance(rtol=1e-9), max_steps=250)
        with torch.no_grad():
            assert bool(layer.solve(x).converged.all())
        jacobian = torch.autograd.functional.jacobian(
            lambda flat, f=update, x=x: f(flat.view(1, SITES, DIM), x[:1]).flatten(), z[0].flatten()
        )
        assert isinstance(jacobian, Tensor)
        assert torch.linalg.matrix_norm(jacobian, ord=2) < 0.5 + 1.13 * 0.36


@pytest.mark.parametrize("correction", ["net", torch.tanh])
def test_bad_arguments(correction: Any) -> None:
    with pytest.raises(TypeError, match='correction must be "network", a module or None'):
        MeanFieldAttention(4, 3, correction=correction)


def test_bad_inputs() -> None:
    update = make()
    z, x = pair()
    with pytest.raises(ValueError, match=re.escape("z must have 5 sites (N), got shape (3, 4, 3)")):
        update(z[:, :4], x[:, :4])
    with pytest.raises(ValueError, match="x must have the shape of z"):
        update(z, x[:, :4])
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        update(z, x, mask=MASK.float())
    wrong = make(correction=nn.Linear(DIM, DIM + 1))
    with pytest.raises(
        ValueError, match=r"correction must return the shape of z, \(3, 5, 3\), got"
    ):
        wrong(z, x)


TOKENS, WIDE = 5, 6
SEEN = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 5])
HIDDEN = ~SEEN.unsqueeze(-1)
each_head = pytest.mark.parametrize("heads", [1, 3])


def attention(heads: int = 2, **options: Any) -> SoftmaxCouplingAttention:
    torch.manual_seed(0)
    return SoftmaxCouplingAttention(WIDE, heads, **options).double()


def wide_pair(batch: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    z, x = torch.randn(2, batch, TOKENS, WIDE, generator=generator, dtype=torch.float64)
    return z, x


@each_head
@pytest.mark.parametrize("correction", ["network", None])
def test_formula_of_couplings(heads: int, correction: str | None) -> None:
    """Every head against torch's attention with the state for values."""
    update = attention(heads, strength=0.7, correction=correction)
    z, x = wide_pair()
    width = WIDE // heads
    query, key = x @ update.query.weight.T, x @ update.key.weight.T
    expected = x.clone()
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        attended = F.scaled_dot_product_attention(query[..., part], key[..., part], z[..., part])
        expected[..., part] += 0.7 * attended
    if update.correction is not None:
        expected -= update.correction(z)
    torch.testing.assert_close(update(z, x), expected, rtol=1e-12, atol=1e-12)
    prepared = update.prepare(x)
    torch.testing.assert_close(update(z, prepared), expected, rtol=1e-12, atol=1e-12)


@each_head
def test_rows_of_the_couplings_share_the_strength(heads: int) -> None:
    _, x = wide_pair()
    for own in (True, False):
        update = attention(heads, strength=0.7, self_coupling=own)
        couplings = update.couplings(x)
        assert couplings.shape == (3, heads, TOKENS, TOKENS)
        torch.testing.assert_close(couplings.sum(-1), torch.full_like(couplings[..., 0], 0.7))
        diagonal = couplings.diagonal(dim1=-2, dim2=-1)
        assert (diagonal > 0).all() if own else (diagonal == 0).all()
        masked = update.couplings(x.masked_fill(HIDDEN, torch.nan), mask=SEEN)
        pairs = (SEEN[:, None, :, None] & SEEN[:, None, None, :]).expand_as(masked)
        assert (masked[~pairs] == 0).all()
        torch.testing.assert_close(masked[0], couplings[0])
        keep = SEEN[1]
        alone = update.couplings(x[1:2, keep])
        torch.testing.assert_close(masked[1][:, keep][:, :, keep], alone[0])


def test_token_without_keys_feels_its_input_only() -> None:
    update = attention(self_coupling=False, correction=None)
    z, x = wide_pair()
    assert torch.equal(update(z[:, :1], x[:, :1]), x[:, :1])
    lonely = torch.zeros(3, TOKENS, dtype=torch.bool)
    lonely[:, 2] = True
    assert torch.equal(update(z, x, mask=lonely)[:, 2], x[:, 2])


def test_a_layer_computes_the_couplings_once_with_all_their_gradients() -> None:
    update = attention()
    calls: list[int] = []
    layer, (_, x) = DEQ(update, **EXACT), wide_pair()
    plain = update.couplings

    def counted(x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        calls.append(1)
        return plain(x, mask=mask)

    update.couplings = counted  # type: ignore[method-assign]
    layer(x, SEEN)
    assert len(calls) == 1
    inputs = (x.requires_grad_(), *update.parameters())
    assert gradcheck(lambda x, *_: layer(x, SEEN)[SEEN], inputs, fast_mode=True, atol=1e-7)


def test_small_strength_contracts_whatever_the_input() -> None:
    """strength 0.5 and a network below 1.13 * 0.6^2 = 0.41, in the norm of the largest token."""
    update = attention(1, correction=NormedMLP(WIDE, bound=0.6))
    with torch.no_grad():
        for parameter in update.parameters():
            parameter.mul_(30.0)
    _, x = wide_pair()
    layer = DEQ(update, solver=Forward(), tolerance=Tolerance(rtol=1e-9), max_steps=250)
    for scale in (0.1, 1.0, 100.0):
        with torch.no_grad():
            assert bool(layer.solve(scale * x).converged.all())


def test_full_strength_has_no_equilibrium_for_a_common_shift() -> None:
    """``I - J`` maps equal tokens to zero, and no correction answers: the layer says so."""
    layer = DEQ(attention(correction=None, strength=1.0), solver=Forward(), max_steps=30)
    x = torch.ones(1, TOKENS, WIDE, dtype=torch.float64)
    with torch.no_grad(), pytest.warns(SolveWarning, match="fixed-point solve left samples"):
        layer(x)
    assert layer.last is not None and not layer.last.converged.any()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: attention(self_coupling=1), TypeError, "self_coupling must be"),
        (lambda: attention(correction=1), TypeError, "correction must be"),
    ],
)
def test_bad_couplings(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_bad_inputs_of_couplings() -> None:
    z, x = wide_pair()
    with pytest.raises(TypeError, match="x must be a tensor like z"):
        attention()(z)
    with pytest.raises(ValueError, match=re.escape("x must be a tensor (B, N, 6), got (3, 5, 4)")):
        attention().couplings(x[..., :4])
    with pytest.raises(ValueError, match=re.escape("x must be a tensor (B, N, 6), got dict")):
        DEQ(attention(), init=lambda x: x["a"])({"a": x})
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        attention()(z, x, mask=SEEN.float())
