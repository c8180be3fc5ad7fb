"""Steps with trained gains, their descents and networks: masks, derivatives, what an energy says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.energies.hyperset import ATTENTIONS
from implicit_attn.models import HyperSET
from implicit_attn.studies import HeldStep
from implicit_attn.updates.official import DESCENTS, OfficialHyperSETLayer

DIM, HEADS, MEMORIES, TOKENS = 8, 2, 10, 6


def tokens(seed: int = 0, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, TOKENS, DIM, generator=generator, dtype=torch.float64)


def build(**options: Any) -> HyperSET:
    """A model with random gains, whose step sizes depend on time and tokens."""
    torch.manual_seed(1)
    settings = {"iterations": 3, "time_dim": 8, "initial_step": 0.2} | options
    model = HyperSET(DIM, HEADS, MEMORIES, **settings).double()
    for name, parameter in model.named_parameters():
        if "gains" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        if "last.weight" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_gains_of_one_change_nothing(attention: str, kind: str) -> None:
    plain = build(attention=attention, epsilon=1e-6)
    gained = build(attention=attention, epsilon=1e-6, gains=kind)
    gained.load_state_dict(plain.state_dict(), strict=False)
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[1, 3:] = False
    for name, parameter in gained.named_parameters():
        if "gains" in name:
            nn.init.ones_(parameter)
    for seen in (None, mask):
        assert torch.allclose(gained(tokens(), mask=seen), plain(tokens(), mask=seen), atol=1e-12)
    nn.init.constant_(gained.layers[0].gains.query.weight, 0.7)
    assert not torch.allclose(gained(tokens()), plain(tokens()), atol=1e-3)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("options", [{"gains": "separate"}, {"gains": "shared", "descent": "adam"}])
def test_masks(attention: str, options: dict[str, Any]) -> None:
    """Masked tokens keep their state and change nothing for the others, whatever they hold."""
    model = build(attention=attention, epsilon=None, **options)
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[0, 2:4], mask[1, 5:], mask[2] = False, False, False
    x = tokens(batch=3)
    full = model(x, mask=mask)
    assert torch.equal(full[~mask], x[~mask])
    assert torch.allclose(full[:1, mask[0]], model(x[:1, mask[0]]), atol=1e-12)
    assert torch.allclose(full[1:2, mask[1]], model(x[1:2, mask[1]]), atol=1e-12)
    result = model(torch.where(mask.unsqueeze(-1), x, float("nan")), mask=mask)
    assert torch.equal(result[mask], full[mask])
    gradients = torch.autograd.grad(result[mask].square().sum(), list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_step_with_gains_is_no_gradient() -> None:
    """Its Jacobian is not symmetric, so no energy has it as a gradient; what is monitored has no gains."""
    model = build(gains="separate", step_size="fixed", attention="linear", iterations=1)
    layer, z = model.layers[0], tokens(batch=1)[:, :2]
    direction = lambda z: layer.gains.attention_direction(layer.attention, z, None, None)  # noqa: E731
    jacobian = torch.autograd.functional.jacobian(direction, z).reshape(2 * DIM, 2 * DIM)
    assert (jacobian - jacobian.T).abs().max() > 0.1 * jacobian.abs().max()  # type: ignore[union-attr]
    value, _, features = layer.observe(z, 0)
    assert torch.equal(value, layer.attention(z))
    assert torch.allclose(features.square().mean(-1), torch.ones(()).double(), atol=1e-4)


@pytest.mark.parametrize("kind", DESCENTS)
def test_descents_start_anew_with_each_solve(kind: str) -> None:
    model = build(descent=kind)
    first = model(tokens())
    assert torch.equal(model(tokens()), first)
    assert torch.equal(copy.deepcopy(model)(tokens()), first)
    states = model.states(tokens(), iterations=5)
    assert torch.allclose(states[3], first, atol=1e-12)
    # The same layer without memory takes other steps, but for the plain rule.
    z = tokens()
    for t in (1, 2, 3):
        z = model.layers[0](z, tokens(), t)
    assert torch.allclose(z, first, atol=1e-12) == (kind == "plain")


def test_what_has_no_energy_or_fixed_point() -> None:
    """The studies ask: no energy is monitored along a step that follows none, none is solved for."""
    assert build().layers[0].is_plain
    assert not build(gains="shared").layers[0].is_plain
    remembering = build(descent="momentum")
    assert not remembering.layers[0].is_plain
    HeldStep(build(gains="separate"))
    with pytest.raises(ValueError, match="descent must be 'plain' where a fixed point"):
        HeldStep(remembering)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"step_network": "raw", "step_size": "fixed"},
            ValueError,
            "must be 'paper' where .* no ne",
        ),
        ({"step_network": "sinusoids"}, ValueError, "time_dim must be dim=8 .* got 512"),
        ({"epsilon": None}, TypeError, "epsilon must be"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OfficialHyperSETLayer(DIM, HEADS, MEMORIES, **options)
