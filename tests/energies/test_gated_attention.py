"""Gated linear attention among frozen keys: its formulas, gates and running sums."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.energies import relative_error
from implicit_attn import DEQ, GradientStep
from implicit_attn.energies import AttentionInput, GatedLinearAttention, Quadratic
from implicit_attn.energies.feature_maps import map_features

DIM, HEADS, WIDTH, TOKENS = 6, 2, 3, 7


def make(seed: int = 0, **options: Any) -> GatedLinearAttention:
    torch.manual_seed(seed)
    options = {"norm": None, "beta": (0.6, 1.5)} | options
    return GatedLinearAttention(DIM, HEADS, **options).double()


def draw(seed: int = 1, keys: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(2, TOKENS, DIM, generator=generator, dtype=torch.float64)
    return z, torch.randn(2, keys, DIM, generator=generator, dtype=torch.float64)


def gates_of(energy: GatedLinearAttention, x: Tensor) -> Tensor:
    """``gamma`` (B, H, N, M), one product after the other."""
    batch, count = x.shape[:2]
    gamma = torch.ones(batch, HEADS, TOKENS, count, dtype=torch.float64)
    if energy.gates is not None and energy.gate_bias is not None:
        gate = (x @ energy.gates.weight.mT + energy.gate_bias).sigmoid().mT
        if energy.gate == "keys":
            gamma = gamma * gate[:, :, None]
        else:
            for i, j in itertools.product(range(TOKENS), range(count)):
                gamma[:, :, i, j] = gate[:, :, j + 1 : i + 1].prod(-1)
    return gamma.tril() if energy.causal else gamma


def by_the_formula(energy: GatedLinearAttention, z: Tensor, x: Tensor) -> Tensor:
    """The double sum of the docstring, (B,)."""

    def features(tokens: Tensor, weight: Tensor) -> Tensor:
        raw = (tokens @ weight.mT).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        return map_features(energy.feature_map, raw).value

    scores = features(z, energy.query.weight) @ features(x, energy.key.weight).mT
    gamma, temperature = gates_of(energy, x), 1.0 / torch.as_tensor(energy.beta)
    return -0.5 * ((gamma * scores.square()).sum((-1, -2)) * temperature).sum(1)


ROWS: list[dict[str, Any]] = [
    {},
    {"gate": "keys"},
    {"feature_map": "relu"},
    {"feature_map": "elu", "gate": "keys"},
    {"causal": True},
    {"causal": True, "gate": "keys"},
    {"causal": True, "gate": "decay"},
    {"causal": True, "gate": "decay", "feature_map": "elu"},
]
each_row = pytest.mark.parametrize("options", ROWS, ids=str)


@each_row
def test_value_gradient_and_hessian_are_those_of_the_double_sum(options: dict[str, Any]) -> None:
    """By autograd, at three points and weights."""
    for seed in range(3):
        energy = make(seed, **options)
        z, x = draw(seed, keys=TOKENS if energy.causal else 4)
        at = z.clone().requires_grad_()
        value = by_the_formula(energy, at, x)
        (gradient,) = torch.autograd.grad(value.sum(), at, create_graph=True)
        v = torch.flip(z, (1,))
        (product,) = torch.autograd.grad((gradient * v).sum(), at)
        with torch.no_grad():
            assert relative_error(energy(z, x), value) <= 1e-10
            assert relative_error(energy.grad(z, x), gradient) <= 1e-10
            assert relative_error(energy.hvp(z, v, x), product) <= 1e-10


def test_causal_queries_see_no_later_token() -> None:
    energy = make(causal=True, gate="decay")
    z, x = draw()
    other = x.clone()
    other[:, 4:] += 1.0
    before, after = energy.grad(z, x), energy.grad(z, other)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_decays_start_as_those_of_retnet() -> None:
    energy = make(causal=True, gate="decay")
    assert energy.gate_bias is not None
    decays = energy.gate_bias.detach().sigmoid().tolist()
    assert decays == pytest.approx([1 - 2.0**-5, 1 - 2.0**-6], abs=1e-7)


def test_keys_may_be_masked_or_missing() -> None:
    energy = make(gate="keys", feature_map="elu")
    z, x = draw(keys=4)
    mask = torch.tensor([[True, False, True, True], [False] * 4])
    value, gradient = energy.value_and_grad(z, (x.masked_fill(~mask[..., None], 9.0), mask))
    alone = energy(z[:1], x[:1, mask[0]])
    assert relative_error(value[:1], alone) <= 1e-13
    assert value[1] == 0 and (gradient[1] == 0).all()
    assert (energy(z, x[:, :0]) == 0).all() and (energy.grad(z, x[:, :0]) == 0).all()


def test_gradients_where_a_query_has_no_key_are_numbers() -> None:
    energy = make(feature_map="elu", causal=True, gate="decay")
    z, x = draw()
    mask = torch.tensor([[False, True, True, False, True, True, True]] * 2)
    value, gradient = energy.value_and_grad(z.requires_grad_(), x, mask=mask)
    (value.sum() + gradient.square().sum()).backward()
    assert z.grad is not None and z.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in energy.parameters())


@pytest.mark.parametrize("causal", [False, True])
def test_sums_over_many_keys_do_not_overflow_in_half_precision(causal: bool) -> None:
    """Each is beyond the largest number of float16, and the answer is not."""
    energy = GatedLinearAttention(2, 1, norm=None, causal=causal)
    with torch.no_grad():
        for projection in (energy.query, energy.key):
            projection.weight.copy_(torch.eye(2))
    generator = torch.Generator().manual_seed(0)
    x = 4.0 + 0.1 * torch.randn(1, 15_000, 2, generator=generator)
    z = 0.001 * (x if causal else x[:, :4])
    wide = copy.deepcopy(energy).double().value_and_grad(z.half().double(), x.half().double())
    value, gradient = energy.half().value_and_grad(z.half(), x.half())
    assert relative_error(value.double(), wide[0]) <= 0.01
    assert relative_error(gradient.double(), wide[1]) <= 0.01


def test_a_layer_prepares_the_sums_once() -> None:
    rows: list[dict[str, Any]] = [{"gate": "keys"}, {"causal": True, "gate": "decay"}]
    for options in rows:
        energy = make(norm=None, bound=0.3, beta=4.0, **options)
        z, x = draw()
        prepared = energy.prepare(x)
        assert torch.equal(energy.grad(z, prepared), energy.grad(z, x))
        layer = DEQ(GradientStep(energy + Quadratic()), max_steps=200)
        x = (0.3 * x).requires_grad_()
        layer(x).square().sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()
        assert layer.last is not None and layer.last.converged.all()


def test_mistakes() -> None:
    z, x = draw()
    with pytest.raises(ValueError, match='gate="decay" needs causal=True'):
        make(gate="decay")
    with pytest.raises(ValueError, match="x must hold the 7 tokens of z"):
        energy = make(causal=True)
        energy.grad(z, energy.prepare(x[:, :3]))
    with pytest.raises(ValueError, match="takes no pairs"):
        make().grad(z, AttentionInput(memory=x, pairs=torch.ones(7, 7).bool()))
    with pytest.raises(ValueError, match="with causal=True mask is that of x"):
        make(causal=True).grad(z, (x, torch.ones(2, TOKENS).bool()))
    assert math.isfinite(make()(z, AttentionInput(memory=x)).sum().item())
