"""Attention of kinetic vector spins: its formula, convergence, symmetry, masks, gradients, mistakes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn import DEQ
from implicit_attn.energies import Prepared
from implicit_attn.updates import KineticAttention
from solvers import Implicit, Tolerance

TOKENS, DIM = 5, 12
EXACT: dict[str, Any] = {
    "tolerance": Tolerance(rtol=1e-12),
    "adjoint": Implicit(tolerance=Tolerance(rtol=1e-12)),
    "max_steps": 200,
    "on_failure": "raise",
}
MASK = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 5])
CLOSURES = ("gaussian", "naive", "tap", "plefka")


def attention(heads: int = 3, **options: Any) -> KineticAttention:
    torch.manual_seed(0)
    return KineticAttention(DIM, heads, **options).double()


def tokens(batch: int = 3, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, TOKENS, DIM, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("closure", ["gaussian", "naive"])
@pytest.mark.parametrize("heads", [1, 3])
def test_formula(heads: int, closure: str) -> None:
    """Every head of every sample by itself, against torch's attention with the state for values."""
    update = attention(heads, beta=1.3, closure=closure, scale=0.7)
    x, z = tokens(), 0.2 * tokens(seed=2)
    width = DIM // heads
    radius = math.sqrt(width / 2)
    parts = [radius * F.normalize(part, dim=-1) for part in x.split(width, dim=-1)]
    query, key = (torch.cat(parts, -1) @ update.queries_keys.weight.T).chunk(2, dim=-1)
    expected = []
    for head, part in enumerate(parts):
        place = slice(head * width, (head + 1) * width)
        q, k, m = query[..., place], key[..., place], z[..., place]
        attended = F.scaled_dot_product_attention(q, k, m, scale=0.7)
        theta = 1.3 * (part + attended)
        squares = torch.softmax(0.7 * q @ k.mT, dim=-1).square()
        noise = 1.69 * squares @ (radius**2 - m.square().sum(-1, keepdim=True))
        size = theta.square().sum(-1, keepdim=True) + (noise if closure == "gaussian" else 0)
        expected.append(theta / (1 + (1 + size / radius**2).sqrt()))
    torch.testing.assert_close(update(z, x), torch.cat(expected, -1))
    torch.testing.assert_close(update(z, update.prepare(x)), torch.cat(expected, -1))


def test_a_solve_starts_at_the_means_of_the_field_alone() -> None:
    update, x = attention(), tokens()
    field, couplings = update.prepare(x).parts
    uncoupled = Prepared((field, torch.zeros_like(couplings)))
    alone = update(torch.zeros_like(x), uncoupled)
    without = attention(closure="naive")(torch.zeros_like(x), uncoupled)
    torch.testing.assert_close(alone, without)
    torch.testing.assert_close(update.initial(x), without)


@pytest.mark.parametrize(("dim", "heads", "count"), [(64, 4, 17), (64, 1, 40), (32, 16, 9)])
def test_every_sample_converges_within_thirty_evaluations(dim: int, heads: int, count: int) -> None:
    torch.manual_seed(0)
    layer = DEQ(KineticAttention(dim, heads), max_steps=30)  # which would warn
    generator = torch.Generator().manual_seed(1)
    for scale in (1e-3, 1.0, 100.0):
        with torch.no_grad():
            layer(scale * torch.randn(32, count, dim, generator=generator))
        assert layer.last is not None and bool(layer.last.converged.all())
        assert layer.last.residual.max() <= 1e-4


def test_the_naive_closure_contracts() -> None:
    """By beta / 2 in the norm of the longest token of a head."""
    update, x = attention(1, beta=1.6, closure="naive"), tokens()
    prepared = update.prepare(x)
    first, second = tokens(seed=3), tokens(seed=4)
    before = (first - second).norm(dim=-1).amax(-1)
    after = (update(first, prepared) - update(second, prepared)).norm(dim=-1).amax(-1)
    assert bool((after <= 0.8 * before).all())


@pytest.mark.parametrize("closure", CLOSURES)
def test_masked_tokens_influence_none_and_keep_their_state(closure: str) -> None:
    update = attention(closure=closure, beta=0.7)
    layer, x = DEQ(update, **EXACT), tokens()
    z = layer(x, MASK)
    assert torch.equal(z[~MASK], update.initial(x)[~MASK])
    torch.testing.assert_close(z[0], layer(x[:1])[0])
    open_tokens = MASK[1]
    torch.testing.assert_close(z[1, open_tokens], layer(x[1:2, open_tokens])[0])
    changed = torch.where(MASK.unsqueeze(-1), x, torch.nan_to_num(x * 7 + 1))
    torch.testing.assert_close(layer(changed, MASK)[MASK], z[MASK])


def test_causal_tokens_do_not_see_the_next() -> None:
    layer, x = DEQ(attention(causal=True), **EXACT), tokens()
    z = layer(x)
    later = x.clone()
    later[:, 3:] += 1
    torch.testing.assert_close(layer(later)[:, :3], z[:, :3])
    torch.testing.assert_close(layer(x[:, :3]), z[:, :3])
    assert not torch.allclose(layer(later)[:, 3:], z[:, 3:])


@pytest.mark.parametrize("causal", [False, True])
def test_own_couplings_may_be_left_out(causal: bool) -> None:
    update, x = attention(self_coupling=False, causal=causal), tokens()
    couplings = update.couplings(update.on_spheres(x))
    assert bool((couplings.diagonal(dim1=-2, dim2=-1) == 0).all())
    rows = torch.ones(TOKENS, dtype=torch.float64)
    rows[0] = 0 if causal else 1  # the first token has no key
    torch.testing.assert_close(couplings.sum(-1), rows.expand(couplings.shape[:-1]))


@pytest.mark.parametrize("closure", CLOSURES)
def test_gradients(closure: str) -> None:
    layer = DEQ(attention(2, closure=closure, beta=0.6), **EXACT)
    x = tokens(2)[:, :3].clone().requires_grad_()

    mask = MASK[:2, :3]

    def solved(x: Tensor) -> Tensor:
        return layer(x, mask)[mask]  # masked tokens are constants

    assert torch.autograd.gradcheck(solved, x, atol=1e-6, rtol=1e-4, fast_mode=True)
    layer(x).square().sum().backward()
    gradient = next(layer.parameters()).grad
    assert gradient is not None and bool(gradient.abs().sum() > 0)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"heads": 5}, "heads"),
    ({"heads": 12}, "heads must leave each head at least 2 features"),
    ({"scale": -1.0}, "scale must be"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KineticAttention(DIM, **options)


def test_wrong_inputs() -> None:
    update, x = attention(), tokens()
    with pytest.raises(ValueError, match=r"x must be a tensor \(B, N, 12\), got \(3, 5, 7\)"):
        update.prepare(x[..., :7])
    with pytest.raises(ValueError, match="mask must have the shape"):
        update(x, x, mask=MASK[:, :2])
    with pytest.raises(TypeError, match="dtype of the weights"):
        update.prepare(x.float())
