"""Updates of spins: mean fields with learned and input couplings, adaptive TAP, kinetic, saddle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import solvers
from implicit_attn import DEQ
from implicit_attn.updates import (
    AdaptiveTAPAttention,
    KineticAttention,
    MeanFieldAttention,
    NormedMLP,
    SaddleAttention,
    SoftmaxCouplingAttention,
)
from solvers import (
    AdaptiveTAP,
    GaussianSite,
    Implicit,
    IsingSite,
    PottsSite,
    Site,
    SpinState,
    Tolerance,
)

SITES, DIM = 5, 3
EXACT: dict[str, Any] = {
    "tolerance": Tolerance(rtol=1e-13),
    "adjoint": Implicit(tolerance=Tolerance(rtol=1e-13)),
    "max_steps": 400,
    "on_failure": "raise",
}
MASK = torch.tensor([[True] * 5, [True, False, True, True, False], [False, True, True, True, True]])


def make(**options: Any) -> MeanFieldAttention:
    torch.manual_seed(0)
    given: dict[str, Any] = {"scale": 0.5} | options
    return MeanFieldAttention(SITES, DIM, **given).double()


def pair(dim: int = DIM, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z, x = torch.randn(2, 3, SITES, dim, generator=generator, dtype=torch.float64)
    return z, x


@pytest.mark.parametrize("correction", ["network", None, NormedMLP(DIM, 4, bound=0.6)])
def test_formula(correction: Any) -> None:
    update = make(correction=correction)
    z, x = pair()
    expected = x + torch.einsum("ijab,njb->nia", update.couplings.weight, z)
    if update.correction is not None:
        expected = expected - torch.cat([update.correction(part) for part in z.split(1, 1)], 1)
    torch.testing.assert_close(update(z, x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(update(z), update(z, x) - x, rtol=1e-12, atol=1e-12)


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


WIDE = 6
SEEN = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 5])


def attention(heads: int = 2, **options: Any) -> SoftmaxCouplingAttention:
    torch.manual_seed(0)
    return SoftmaxCouplingAttention(WIDE, heads, **options).double()


@pytest.mark.parametrize("correction", ["network", None])
def test_formula_of_couplings(correction: str | None) -> None:
    """Every head against torch's attention with the state for values."""
    heads = 3
    update = attention(heads, strength=0.7, correction=correction)
    z, x = pair(WIDE)
    query, key = x @ update.query.weight.T, x @ update.key.weight.T
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (query, key, z))
    expected = x + 0.7 * F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    if update.correction is not None:
        expected -= update.correction(z)
    torch.testing.assert_close(update(z, x), expected, rtol=1e-12, atol=1e-12)
    prepared = update.prepare(x)
    torch.testing.assert_close(update(z, prepared), expected, rtol=1e-12, atol=1e-12)


def test_a_layer_computes_the_couplings_once() -> None:
    update = attention()
    calls: list[int] = []
    layer, (_, x) = DEQ(update, **EXACT), pair(WIDE)
    plain = update.couplings

    def counted(x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        calls.append(1)
        return plain(x, mask=mask)

    update.couplings = counted  # type: ignore[method-assign]
    layer(x, SEEN)
    assert len(calls) == 1


F64 = torch.float64


def made(
    sites: int,
    dim: int,
    site: Site | None = None,
    seed: int = 0,
    rtol: float = 1e-10,
    **options: Any,
) -> tuple[DEQ, AdaptiveTAPAttention, Tensor]:
    torch.manual_seed(seed)
    update = AdaptiveTAPAttention(sites, dim, site=site, **options).double()
    adjoint = solvers.Implicit(tolerance=Tolerance(rtol))
    layer = DEQ(
        update, solver=AdaptiveTAP(), tolerance=Tolerance(rtol), max_steps=100, adjoint=adjoint
    )
    return layer, update, torch.randn(4, sites, dim, dtype=F64)


@pytest.mark.parametrize(
    ("site", "dim"),
    [(None, 3), (PottsSite(), 3), (IsingSite(), 1), (GaussianSite(0.5 * torch.eye(2)), 2)],
    ids=["sphere", "potts", "ising", "gaussian"],
)
def test_the_layer_solves_what_the_function_solves(site: Site | None, dim: int) -> None:
    layer, update, x = made(5, dim, site)
    state = layer(x)
    assert isinstance(state, SpinState)
    assert layer.last is not None and layer.last.converged.all()
    weight = update.couplings.weight.detach()
    wanted = solvers.adaptive_tap(weight, x, site=update.site).value
    torch.testing.assert_close(state.mean, wanted.mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(
        state.cavity_variance, wanted.cavity_variance.contiguous(), rtol=1e-8, atol=1e-9
    )


def test_first_and_second_derivatives() -> None:
    layer, update, x = made(3, 2, PottsSite(), scale=2.0, rtol=1e-12)
    x = x[:2].requires_grad_()

    def solve(x: Tensor, _: Tensor) -> Tensor:  # the parameter is the layer's own
        state = layer(x)
        return state.mean.square().sum() + state.cavity_variance.sum()

    free = update.couplings.free
    assert gradcheck(solve, (x, free), fast_mode=True)
    assert gradgradcheck(solve, (x, free), fast_mode=True, atol=1e-4)


def test_masked_sites_influence_nobody() -> None:
    layer, update, x = made(5, 3, scale=2.0)
    mask = torch.tensor([[True, True, True, False, False]]).expand(4, 5)
    state = layer(x, mask)
    weight = update.couplings.weight[:3, :3]
    wanted = solvers.adaptive_tap(weight, x[:, :3], site=update.site).value
    torch.testing.assert_close(state.mean[:, :3], wanted.mean, rtol=1e-8, atol=1e-9)
    assert not torch.allclose(layer(x).mean[:, :3], state.mean[:, :3], atol=1e-3)


def test_the_free_energy_is_an_output_with_exact_gradients() -> None:
    layer, update, x = made(4, 3, PottsSite(), scale=2.0, rtol=1e-12)
    mask = torch.tensor([[True, True, True, False]] * 4)
    x.requires_grad_()
    state = layer(x, mask)
    log_z = update.log_partition(state, x, mask=mask)
    weight = update.couplings.weight.detach()
    options: dict[str, Any] = {"site": update.site, "mask": mask, "log_partition": True}
    wanted = solvers.adaptive_tap(weight, x, **options).value
    torch.testing.assert_close(log_z, wanted.log_partition, rtol=1e-8, atol=1e-9)
    slope, free = torch.autograd.grad(log_z.sum(), (x, update.couplings.free))
    torch.testing.assert_close(slope, wanted.mean, rtol=1e-8, atol=1e-9)
    with torch.no_grad():
        state = layer(x, mask)
    constant = update.log_partition(state, x, mask=mask)
    (again,) = torch.autograd.grad(constant.sum(), update.couplings.free)
    torch.testing.assert_close(again, free, rtol=1e-7, atol=1e-9)
    assert update.log_partition(layer(0 * x)).shape == (4,)


SPIN_DIM = 12
CLOSE = EXACT | {
    "tolerance": Tolerance(rtol=1e-12), "adjoint": Implicit(tolerance=Tolerance(rtol=1e-12))
}  # fmt: skip
CLOSURES = ("gaussian", "plefka")


def kinetic(heads: int = 3, **options: Any) -> KineticAttention:
    torch.manual_seed(0)
    return KineticAttention(SPIN_DIM, heads, **options).double()


def tokens(seed: int = 1) -> Tensor:
    return pair(SPIN_DIM, seed)[0]


@pytest.mark.parametrize("closure", ["gaussian", "naive"])
def test_kinetic_formula(closure: str) -> None:
    """Every head by itself, against torch's attention with the state for values."""
    heads = 3
    update = kinetic(heads, beta=1.3, closure=closure, scale=0.7)
    x, z = tokens(), 0.2 * tokens(seed=2)
    width = SPIN_DIM // heads
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


@pytest.mark.parametrize("closure", CLOSURES)
def test_masked_tokens_influence_none_and_keep_their_state(closure: str) -> None:
    update = kinetic(closure=closure, beta=0.7)
    layer, x = DEQ(update, **CLOSE), tokens()
    z = layer(x, SEEN)
    assert torch.equal(z[~SEEN], update.initial(x)[~SEEN])
    torch.testing.assert_close(z[0], layer(x[:1])[0])
    open_tokens = SEEN[1]
    torch.testing.assert_close(z[1, open_tokens], layer(x[1:2, open_tokens])[0])
    changed = torch.where(SEEN.unsqueeze(-1), x, torch.nan_to_num(x * 7 + 1))
    torch.testing.assert_close(layer(changed, SEEN)[SEEN], z[SEEN])


KINDS = pytest.mark.parametrize("kind", ["free", "input"])


def saddle(kind: str, **options: Any) -> tuple[SaddleAttention, Tensor]:
    torch.manual_seed(0)
    layer = SaddleAttention(5, 8, kind, **options).double()
    return layer, torch.randn(3, 5, 8, dtype=torch.float64)


@KINDS
def test_the_saddle_is_that_of_the_function(kind: str) -> None:
    layer, x = saddle(kind, beta=0.7)
    normed = torch.nn.functional.layer_norm(x, (8,))
    if kind == "free":
        k = torch.zeros(5, 5, dtype=torch.float64)
        rows, columns = torch.triu_indices(5, 5, 1)
        k[rows, columns] = layer.free.free.detach()[:, 0, 0]
        k = 2 * 0.7 * (k + k.mT)
    else:
        n = normed / math.sqrt(8)
        scores = torch.tanh(layer.query(n) @ layer.key(n).mT * math.sqrt(8)).detach()
        k = 0.7 * (scores + scores.mT) / math.sqrt(40)
        k = k - torch.diag_embed(k.diagonal(dim1=1, dim2=2))
    wanted = solvers.spherical_saddle(k, 0.7 * normed).value
    torch.testing.assert_close(layer(x), wanted.mean)
    assert layer.last is not None and layer.last.converged.all()
    assert not layer.last.value.mean.requires_grad


@KINDS
def test_masked_tokens_influence_nobody(kind: str) -> None:
    layer, x = saddle(kind)
    mask = torch.tensor([[True, True, True, False, False]]).expand(3, 5)
    other = x.clone()
    other[:, 3:] += 1.0 + torch.arange(8)
    first, second = layer(x, mask), layer(other, mask)
    torch.testing.assert_close(first, second)
    assert not first[:, 3:].any()
    assert not torch.allclose(layer(x)[:, :3], first[:, :3])
    if kind == "input":  # any number of sites
        torch.testing.assert_close(layer(x[:, :3]), first[:, :3])


Z, X = pair()
SIXES = pair(WIDE)[1]
UPDATE = AdaptiveTAPAttention(3, 2)
STATE = SpinState(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2, 2))
MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: make(correction="net"), TypeError, "correction"),
    (lambda: make(correction=torch.tanh), TypeError, "correction"),
    (lambda: make()(Z[:, :4], X[:, :4]), ValueError, r"\bz\b"),
    (lambda: make()(Z, X, mask=MASK.float()), TypeError, "mask"),
    (lambda: attention(correction=1), TypeError, "correction"),
    (lambda: attention().couplings(SIXES[..., :4]), ValueError, r"\bx\b"),
    (lambda: DEQ(attention(), init=lambda x: x["a"])({"a": SIXES}), TypeError, r"\bx\b"),
    (lambda: AdaptiveTAPAttention(3, 2, site="sphere"), TypeError, "site"),  # type: ignore[arg-type]
    (lambda: UPDATE(STATE.mean), TypeError, "initial"),
    (lambda: UPDATE.initial(torch.zeros(1, 4, 2)), ValueError, "sites"),
    (lambda: DEQ(UPDATE, init="zeros")(torch.zeros(1, 3, 2)), TypeError, "SpinState"),
    (lambda: kinetic(5), ValueError, "heads"),
    (lambda: kinetic(12), ValueError, "heads"),
    (lambda: kinetic().prepare(tokens()[..., :7]), ValueError, r"\bx\b"),
    (lambda: kinetic().prepare(tokens().float()), TypeError, r"\bx\b"),
    (lambda: SaddleAttention(3, 2, beta=0.0), ValueError, "beta"),
    (lambda: SaddleAttention(3, 2, on_failure="quiet"), ValueError, "on_failure"),
    (lambda: saddle("free")[0](torch.zeros(3, 4, 8).double()), ValueError, "sites"),
    (lambda: saddle("free")[0](torch.zeros(3, 5, 4).double()), ValueError, "features"),
]


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES)
def test_mistakes(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
