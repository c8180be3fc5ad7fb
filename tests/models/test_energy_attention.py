"""Energy attention against stock attention, its masks, its gradients, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.models import EnergyAttention, QueryTrajectory
from solvers import Implicit, Tolerance

TIGHT: dict[str, Any] = {
    "tolerance": Tolerance(rtol=1e-12),
    "adjoint": Implicit(tolerance=Tolerance(rtol=1e-12)),
    "on_failure": "raise",
}


def build(*arguments: Any, seed: int = 0, **options: Any) -> EnergyAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return EnergyAttention(*arguments, **options).double()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def heads_of(y: Tensor, heads: int) -> Tensor:
    return y.unflatten(-1, (heads, -1)).transpose(1, 2)


def stock(model: EnergyAttention, x: Tensor, source: Tensor, **options: Any) -> Tensor:
    """The same weights in torch's attention, with the keys for values."""
    query = heads_of(F.linear(x, model.query.weight), model.heads)
    key = heads_of(F.linear(source, model.key.weight), model.heads)
    attended = F.scaled_dot_product_attention(query, key, key, **options)
    return F.linear(attended.transpose(1, 2).flatten(2), model.output.weight)


def masks(keys: int) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand(2, keys, generator=generator) < 0.7
    seen[:, 0] = True
    pairs = torch.rand(2, 8, 6, keys, generator=generator) < 0.7
    pairs[..., 0] = True
    floating = torch.where(pairs, draw(2, 8, 6, keys), -torch.inf)
    return {"none": None, "keys": seen, "pairs": pairs[:, 0], "heads": pairs, "floating": floating}


def as_stock(mask: Tensor | None) -> Tensor | None:
    if mask is None or mask.dim() == 4:
        return mask
    return mask[:, None, None] if mask.dim() == 2 else mask[:, None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", masks(6))
@pytest.mark.parametrize("cross", [False, True])
def test_one_step_is_stock_attention(cross: bool, name: str, dtype: torch.dtype) -> None:
    """Eight heads of 64 features, and the published bounds: 1e-12 and 1e-6."""
    model = build(48, 20 if cross else None, heads=8, head_dim=64).to(dtype)
    x = draw(2, 6, 48).to(dtype)
    context = draw(2, 7, 20, seed=1).to(dtype) if cross else None
    mask = masks(7 if cross else 6)[name]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    source = x if context is None else context
    if name == "keys" and not cross:  # a masked token asks nothing, either
        assert mask is not None
        x = source = x.masked_fill(~mask.unsqueeze(-1), 0.0)
    found = model(x, context, mask)
    expected = stock(model, x, source, attn_mask=as_stock(mask))
    if name == "keys" and not cross:  # and learns nothing
        assert mask is not None
        expected = expected.masked_fill(~mask.unsqueeze(-1), 0.0)
    bound = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found, expected, rtol=0.0, atol=bound)


def test_causal_attention() -> None:
    model = build(16, heads=2, causal=True)
    x = draw(2, 6, 16)
    torch.testing.assert_close(model(x), stock(model, x, x, is_causal=True), rtol=0.0, atol=1e-12)
    mask = torch.tensor([[True] * 5 + [False], [True] * 6])
    both = mask[:, None, None] & torch.ones(6, 6, dtype=torch.bool).tril()
    hidden = x.masked_fill(~mask.unsqueeze(-1), 0.0)
    expected = stock(model, hidden, hidden, attn_mask=both).masked_fill(~mask.unsqueeze(-1), 0.0)
    torch.testing.assert_close(model(x, mask=mask), expected, rtol=0.0, atol=1e-12)
    open_rows = torch.ones(2, 6, 6, dtype=torch.bool)
    torch.testing.assert_close(model(x, mask=open_rows), model(x), rtol=0.0, atol=0.0)


def test_values_by_the_inverse_of_the_keys() -> None:
    """One head of full width: ``W_o = W_v W_k^-1`` makes it attention with any values."""
    model = build(32, head_dim=32)
    x, values = draw(2, 6, 32), draw(32, 32, seed=4) / 32**0.5
    with torch.no_grad():
        model.output.weight.copy_(torch.linalg.solve(model.key.weight.T, values.T).T)
    query, key = F.linear(x, model.query.weight), F.linear(x, model.key.weight)
    expected = F.scaled_dot_product_attention(query, key, F.linear(x, values))
    torch.testing.assert_close(model(x), expected, rtol=0.0, atol=1e-12)


def test_values_of_heads() -> None:
    model, x = build(12, heads=3, values="after"), draw(2, 5, 12)
    plain = build(12, heads=3)
    torch.testing.assert_close(model(x), plain(x), rtol=0.0, atol=1e-14)  # identities
    assert isinstance(model.values, torch.nn.Parameter)
    with torch.no_grad():
        model.values.copy_(draw(3, 4, 4, seed=2))
    attended = heads_of(plain.descent(*_state(plain, x)), 3)
    moved = torch.einsum("hpq,bhnq->bnhp", model.values, attended).flatten(2)
    expected = F.linear(moved, model.output.weight)
    torch.testing.assert_close(model(x), expected, rtol=0.0, atol=1e-12)


def _state(model: EnergyAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, model.query.weight), F.linear(x, model.key.weight)


@pytest.mark.parametrize("steps", [1, 3, None])
@pytest.mark.parametrize("cross", [False, True])
def test_gradients(cross: bool, steps: int | None) -> None:
    """By the tokens, the context and every weight, unrolled and at the fixed point."""
    settings: Any = {} if steps else TIGHT
    model = build(
        4, 3 if cross else None, heads=2, beta=0.5, steps=steps, values="after", **settings
    )
    x = draw(2, 3, 4).requires_grad_()
    context = draw(2, 4, 3, seed=1).requires_grad_() if cross else None
    mask = torch.ones(2, 4 if cross else 3, dtype=torch.bool)
    mask[0, 1] = False
    names = [name for name, _ in model.named_parameters()]
    tokens = [x] if context is None else [x, context]

    def run(*given: Tensor) -> Tensor:
        inputs, weights = [*given[: len(tokens)], None], given[len(tokens) :]
        named = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(model, named, (inputs[0], inputs[1], mask))

    assert torch.autograd.gradcheck(run, [*tokens, *model.parameters()], fast_mode=steps is None)


def test_trajectory_and_its_energies() -> None:
    model, x = build(12, heads=3, steps=6, beta=2.0), draw(2, 5, 12)
    found = model(x, return_trajectory=True)
    assert isinstance(found, QueryTrajectory)
    assert found.queries.shape == (7, 2, 3, 5, 4) and found.energies.shape == (7, 2, 3, 5)
    query, key = (heads_of(t, 3) for t in _state(model, x))
    torch.testing.assert_close(found.queries[0], query, rtol=0.0, atol=0.0)
    for at, energy in zip(found.queries, found.energies, strict=True):
        lse = (2.0 * at @ key.mT).logsumexp(-1) / 2.0
        torch.testing.assert_close(energy, 0.5 * at.square().sum(-1) - lse, rtol=1e-12, atol=1e-12)
    assert (found.energies.diff(dim=0) <= 1e-13).all()
    last = F.linear(found.queries[-1].transpose(1, 2).flatten(2), model.output.weight)
    torch.testing.assert_close(model(x), last, rtol=0.0, atol=1e-14)


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_floating_masks_exclude_by_minus_infinity_alone(wrong: float) -> None:
    model, x = build(8, heads=2), draw(1, 3, 8)
    bias = draw(1, 3, 3, seed=1)
    bias[0, 1, 2] = wrong
    with pytest.raises(ValueError, match="mask must hold finite numbers or minus infinity"):
        model(x, mask=bias)
    bias[0, 1, 2] = -torch.inf
    assert model(x, mask=bias).isfinite().all()


@pytest.mark.parametrize("name", ["pairs", "heads", "floating"])
def test_equilibrium_among_pairs_is_the_limit_of_the_steps(name: str) -> None:
    """For samples that end after different numbers of evaluations."""
    x, mask = draw(2, 6, 16) * torch.tensor([0.2, 1.0]).view(2, 1, 1), masks(6)[name]
    solved = build(16, heads=8, steps=None, beta=0.3, **TIGHT)
    limit = build(16, heads=8, steps=200, beta=0.3)
    torch.testing.assert_close(solved(x, mask=mask), limit(x, mask=mask), rtol=1e-9, atol=1e-9)
    assert solved.equilibrium is not None and solved.equilibrium.last is not None
    assert solved.equilibrium.last.evaluations.unique().numel() > 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"causal": True, "context_dim": 4}, ValueError, "causal=True needs self-attention"),
        ({"tolerance": Tolerance()}, TypeError, r"unknown arguments \['tolerance'\].*steps=None"),
    ],
)
def test_errors_of_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EnergyAttention(8, **options)


X = torch.zeros(2, 5, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X[..., :4],), ValueError, r"x must have the shape \(B, N, 8\), got \(2, 5, 4\)"),
        ((None,), ValueError, r"x must be a tensor \(B, N, 8\), got NoneType"),
        ((X.double(),), TypeError, "dtype of the weights, torch.float32, got torch.float64"),
        ((X, X), ValueError, "context must be None in self-attention, got Tensor"),
        ((X, None, torch.ones(2, 4).bool()), ValueError, r"mask must have the shape \(2, 5\)"),
        ((X, None, torch.ones(2, 5)), TypeError, "mask must be bool where it is one of keys"),
        ((X, None, torch.ones(2, 5).long()), TypeError, "mask must be bool, or floating"),
    ],
)
def test_errors_of_inputs(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EnergyAttention(8, heads=2)(*arguments)
