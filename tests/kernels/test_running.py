"""Running sums against the sums over all earlier tokens, in chunks of every size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases.energies import relative_error
from implicit_attn.kernels import running_products, running_states


def draw(tokens: int, width: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    query, features = torch.randn(2, 2, 2, tokens, width, generator=generator, dtype=torch.float64)
    decay = torch.rand(2, 2, tokens, generator=generator, dtype=torch.float64)
    return query, features, (0.3 + 0.7 * decay).log()


def gates(decay: Tensor | None, tokens: int) -> Tensor:
    """``gamma_ij`` (2, 2, N, N), each a product of decays, one at a time."""
    gamma = torch.ones(2, 2, tokens, tokens, dtype=torch.float64).tril()
    if decay is not None:
        for i in range(tokens):
            for j in range(i):
                gamma[:, :, i, j] = decay[:, :, j + 1 : i + 1].exp().prod(-1)
    return gamma


@pytest.mark.parametrize("decayed", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 5, 7, 64])
def test_running_products_are_the_masked_sums(chunk: int, decayed: bool) -> None:
    query, features, decay = draw(7)
    given, gamma = (decay, gates(decay, 7)) if decayed else (None, gates(None, 7))
    expected = (gamma * (query @ features.mT)) @ features
    products = running_products(query, features, given, chunk=chunk)
    assert relative_error(products, expected) <= 1e-14
    states = running_states(features, given, chunk=chunk)
    again = running_products(query, features, given, states=states, chunk=chunk)
    assert torch.equal(again, products)


def test_a_decay_of_long_sequences_neither_overflows_nor_vanishes() -> None:
    """Products of 1,000 decays of 1/2 are below the least number; their quotients are not used."""
    ones = torch.ones(1, 1, 1000, 1)
    sums = running_products(ones, ones, torch.full((1, 1, 1000), 0.5).log(), chunk=64)
    assert torch.isfinite(sums).all()
    torch.testing.assert_close(sums[0, 0, -1], torch.tensor([2.0]))


@pytest.mark.parametrize("chunk", [2, 4, 7, 64])
@pytest.mark.parametrize("reset", [-1e2, -1e4, -1e8, -torch.inf])
def test_nothing_is_lost_after_a_decay_near_zero(reset: float, chunk: int) -> None:
    """float32 against one decay after the other; what follows a decay of 0 begins anew."""
    query, features, decay = (t.float() for t in draw(7))
    decay[:, :, 2] = reset
    wide, gamma = features.double(), gates(decay.double(), 7)
    expected = (gamma * (query.double() @ wide.mT)) @ wide
    decay.requires_grad_()
    products = running_products(query, features, decay, chunk=chunk)
    assert relative_error(products.detach().double(), expected) <= 1e-6
    (gradient,) = torch.autograd.grad(products.square().sum(), decay)
    assert gradient.isfinite().all() and (gradient[:, :, 2].abs() < 1e-30).all()
    assert (gradient[:, :, 3:] != 0).all()


def test_derivatives() -> None:
    query, features, decay = (t[:1, :1].requires_grad_() for t in draw(4, 2))

    def products(query: Tensor, features: Tensor, decay: Tensor) -> Tensor:
        return running_products(query, features, -decay.square(), chunk=3)  # <= 0 wherever moved

    assert gradcheck(products, (query, features, decay))
    assert gradgradcheck(products, (query, features, decay))


def test_no_tokens_no_sums() -> None:
    query, features, decay = draw(0)
    assert running_products(query, features, decay).shape == query.shape


def test_mistakes() -> None:
    query, features, decay = draw(4)
    with pytest.raises(ValueError, match=r"log_decay must have the shape \(B, H, N\)"):
        running_states(features, decay[:, :, :2])
    with pytest.raises(ValueError, match="query must be like features"):
        running_products(query[:, :, :2], features)
    with pytest.raises(ValueError, match="values must have the shape"):
        running_states(features[0])
    with pytest.raises(TypeError, match="floating"):
        running_states(features.long())
    with pytest.raises(ValueError, match="chunk must be >= 1"):
        running_states(features, chunk=0)
