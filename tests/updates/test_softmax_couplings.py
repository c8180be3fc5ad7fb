"""Couplings from the input's attention."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional as F

from implicit_attn import DEQ
from implicit_attn.updates import NormedMLP, SoftmaxCouplingAttention
from solvers import Forward, Implicit, SolveWarning, Tolerance

TOKENS, DIM = 5, 6
EXACT: dict[str, Any] = {
    "tolerance": Tolerance(rtol=1e-13),
    "adjoint": Implicit(tolerance=Tolerance(rtol=1e-13)),
    "max_steps": 400,
    "on_failure": "raise",
}
MASK = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 5])
HIDDEN = ~MASK.unsqueeze(-1)
each_head = pytest.mark.parametrize("heads", [1, 3])


def attention(heads: int = 2, **options: Any) -> SoftmaxCouplingAttention:
    torch.manual_seed(0)
    return SoftmaxCouplingAttention(DIM, heads, **options).double()


def pair(batch: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    z, x = torch.randn(2, batch, TOKENS, DIM, generator=generator, dtype=torch.float64)
    return z, x


@each_head
@pytest.mark.parametrize("correction", ["network", None])
def test_formula(heads: int, correction: str | None) -> None:
    """Every head against torch's attention with the state for values."""
    update = attention(heads, strength=0.7, correction=correction)
    z, x = pair()
    width = DIM // heads
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
    _, x = pair()
    for own in (True, False):
        update = attention(heads, strength=0.7, self_coupling=own)
        couplings = update.couplings(x)
        assert couplings.shape == (3, heads, TOKENS, TOKENS)
        torch.testing.assert_close(couplings.sum(-1), torch.full_like(couplings[..., 0], 0.7))
        diagonal = couplings.diagonal(dim1=-2, dim2=-1)
        assert (diagonal > 0).all() if own else (diagonal == 0).all()
        masked = update.couplings(x.masked_fill(HIDDEN, torch.nan), mask=MASK)
        pairs = (MASK[:, None, :, None] & MASK[:, None, None, :]).expand_as(masked)
        assert (masked[~pairs] == 0).all()
        torch.testing.assert_close(masked[0], couplings[0])
        keep = MASK[1]
        alone = update.couplings(x[1:2, keep])
        torch.testing.assert_close(masked[1][:, keep][:, :, keep], alone[0])


def test_token_without_keys_feels_its_input_only() -> None:
    update = attention(self_coupling=False, correction=None)
    z, x = pair()
    assert torch.equal(update(z[:, :1], x[:, :1]), x[:, :1])
    lonely = torch.zeros(3, TOKENS, dtype=torch.bool)
    lonely[:, 2] = True
    assert torch.equal(update(z, x, mask=lonely)[:, 2], x[:, 2])


def test_a_layer_computes_the_couplings_once_with_all_their_gradients() -> None:
    update = attention()
    calls: list[int] = []
    layer, (_, x) = DEQ(update, **EXACT), pair()
    plain = update.couplings

    def counted(x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        calls.append(1)
        return plain(x, mask=mask)

    update.couplings = counted  # type: ignore[method-assign]
    layer(x, MASK)
    assert len(calls) == 1
    inputs = (x.requires_grad_(), *update.parameters())
    assert gradcheck(lambda x, *_: layer(x, MASK)[MASK], inputs, fast_mode=True, atol=1e-7)


def test_small_strength_contracts_whatever_the_input() -> None:
    """strength 0.5 and a network below 1.13 * 0.6^2 = 0.41, in the norm of the largest token."""
    update = attention(1, correction=NormedMLP(DIM, bound=0.6))
    with torch.no_grad():
        for parameter in update.parameters():
            parameter.mul_(30.0)
    _, x = pair()
    layer = DEQ(update, solver=Forward(), tolerance=Tolerance(rtol=1e-9), max_steps=250)
    for scale in (0.1, 1.0, 100.0):
        with torch.no_grad():
            assert bool(layer.solve(scale * x).converged.all())


def test_full_strength_has_no_equilibrium_for_a_common_shift() -> None:
    """``I - J`` maps equal tokens to zero, and no correction answers: the layer says so."""
    layer = DEQ(attention(correction=None, strength=1.0), solver=Forward(), max_steps=30)
    x = torch.ones(1, TOKENS, DIM, dtype=torch.float64)
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
def test_bad_arguments(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_bad_inputs() -> None:
    z, x = pair()
    with pytest.raises(TypeError, match="x must be a tensor like z"):
        attention()(z)
    with pytest.raises(ValueError, match=re.escape("x must be a tensor (B, N, 6), got (3, 5, 4)")):
        attention().couplings(x[..., :4])
    with pytest.raises(ValueError, match=re.escape("x must be a tensor (B, N, 6), got dict")):
        DEQ(attention(), init=lambda x: x["a"])({"a": x})
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        attention()(z, x, mask=MASK.float())
