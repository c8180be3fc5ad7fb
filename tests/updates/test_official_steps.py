"""Steps with trained gains, their descents and networks: masks, derivatives, what an energy says."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.energies.hyperset import ATTENTIONS
from implicit_attn.models import HyperSET
from implicit_attn.studies import HeldStep
from implicit_attn.updates.official import (
    DESCENTS,
    STEP_NETWORKS,
    Descent,
    OfficialHyperSETLayer,
    OfficialStepSizes,
)

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


@pytest.mark.parametrize(
    "options",
    [
        {"gains": "separate", "step_network": "normed"},
        {"gains": "shared", "step_network": "raw", "descent": "momentum"},
        {"attention": "linear-tanh", "gains": "separate", "step_network": "twice-normed"},
        {"attention": "sigmoid-squared", "gains": "separate", "descent": "rmsprop"},
        {"gains": "shared", "step_network": "sinusoids", "descent": "rmsprop-momentum"},
        {"feedforward": "gated-silu", "gains": "separate", "descent": "adam"},
    ],
    ids=str,
)
def test_derivatives_are_right(options: dict[str, Any]) -> None:
    model = build(iterations=2, epsilon=None, **options)
    x = tokens(batch=1)[:, :3].requires_grad_()
    weights = dict(model.named_parameters())
    names = [name for name in weights if "gains" in name]

    def run(x: Tensor, *gains: Tensor) -> Tensor:
        changed = weights | dict(zip(names, gains, strict=True))
        return torch.func.functional_call(model, changed, (x,))

    assert torch.autograd.gradcheck(run, (x, *(weights[name] for name in names)))
    model(x).square().sum().backward()
    for name, parameter in weights.items():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


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


@pytest.mark.parametrize("kind", DESCENTS)
def test_descents_of_a_constant_gradient(kind: str) -> None:
    """Closed forms for the same g again and again: geometric sums."""
    g, descent = torch.tensor([2.0, -0.5, 0.0], dtype=torch.float64), Descent(kind)
    moments = descent.start()
    for t in range(1, 6):
        step = descent(moments, g)
        grown = (1 - 0.9**t) / (1 - 0.9)
        scaled = [g / (g.abs() * (1 - 0.8**n) ** 0.5 + 1e-6) for n in range(1, t + 1)]
        expected = {
            "plain": g,
            "momentum": grown * g,
            "rmsprop": scaled[-1],
            "rmsprop-momentum": sum((0.9**n * s for n, s in enumerate(reversed(scaled))), 0 * g),
            "adam": g / (g.abs() + 1e-6),
        }
        assert torch.allclose(step, expected[kind], atol=1e-12)


@pytest.mark.parametrize("kind", ["rmsprop", "adam"])
def test_a_gradient_of_zero_has_finite_derivatives(kind: str) -> None:
    g = torch.tensor([0.0, 1e-30, 1.0], requires_grad=True)
    descent = Descent(kind)
    moments = descent.start()
    (slope,) = torch.autograd.grad((descent(moments, g) + descent(moments, g)).sum(), g)
    assert slope.isfinite().all()


@pytest.mark.parametrize("network", STEP_NETWORKS[1:])
def test_step_networks_depend_on_time_and_condition(network: str) -> None:
    torch.manual_seed(0)
    sizes = OfficialStepSizes(DIM, network, "input", time_dim=DIM).double()
    nn.init.normal_(sizes.last.weight, std=0.3)
    context = sizes.prepare(tokens(), torch.tensor([1, 2]))
    first, second = (sizes(tokens(3), context, index)[0] for index in (0, 1))
    assert first.shape == tokens().shape
    assert (first - second).abs().max() > 1e-2
    other = sizes.prepare(tokens(1), torch.tensor([1, 2]))
    assert (sizes(tokens(3), other, 0)[0] - first).abs().max() > 1e-2


@pytest.mark.parametrize("network", ["normed", "raw"])
def test_the_official_start_leaves_the_time_without_effect(network: str) -> None:
    """Zero weights in both parts of the embedding never get a gradient; ours start at random."""
    for official in (True, False):
        torch.manual_seed(0)
        sizes = OfficialStepSizes(DIM, network, time_dim=DIM).double()
        nn.init.normal_(sizes.last.weight, std=0.3)
        linears = [part for part in sizes.embedding if isinstance(part, nn.Linear)]
        for part in linears if official else ():
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)
        alpha, _ = sizes(tokens(), sizes.prepare(tokens(), torch.tensor([3])), 0)
        alpha.square().sum().backward()
        got = [
            part.weight.grad is not None and part.weight.grad.abs().max() > 0 for part in linears
        ]
        assert [bool(each) for each in got] == [not official] * 2


def test_layers_share_one_network() -> None:
    options: dict[str, Any] = {"layers": 3, "time_dim": 8}
    apart, shared = build(**options), build(share_steps=True, **options)
    network = sum(parameter.numel() for parameter in apart.layers[0].step_sizes.parameters())
    count = [sum(each.numel() for each in model.parameters()) for model in (apart, shared)]
    assert count[0] - count[1] == 2 * network
    assert all(layer.steps is shared.step_sizes for layer in shared.layers)
    assert not any(key.startswith("layers.") and "step_sizes" in key for key in shared.state_dict())
    assert shared.step_sizes is not None
    for layer in apart.layers:
        layer.step_sizes.load_state_dict(shared.step_sizes.state_dict())
        layer.attention.load_state_dict(shared.layers[0].attention.state_dict())
        layer.feedforward.load_state_dict(shared.layers[0].feedforward.state_dict())
    for layer in shared.layers:
        layer.attention.load_state_dict(shared.layers[0].attention.state_dict())
        layer.feedforward.load_state_dict(shared.layers[0].feedforward.state_dict())
    assert torch.equal(apart(tokens()), shared(tokens()))
    copied = copy.deepcopy(shared)
    assert copied.layers[1].steps is copied.step_sizes is not shared.step_sizes


def test_a_compiler_sees_one_graph() -> None:
    torch._dynamo.reset()
    options = {"gains": "separate", "descent": "adam", "step_network": "normed"}
    model = build(iterations=2, layers=2, share_steps=True, **options).float()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(tokens().float()), model(tokens().float()))


BAD: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    (
        OfficialHyperSETLayer,
        {"gains": "all"},
        ValueError,
        "gains must be one of ('none', 'shared', ",
    ),
    (OfficialHyperSETLayer, {"descent": "sgd"}, ValueError, "descent must be one of ('plain', "),
    (
        OfficialHyperSETLayer,
        {"step_network": "big"},
        ValueError,
        "step_network must be one of ('paper', ",
    ),
    (
        OfficialHyperSETLayer,
        {"step_network": "raw", "step_size": "fixed"},
        ValueError,
        "step_network must be 'paper' where step_size='fixed' has no network, got 'raw'",
    ),
    (
        OfficialHyperSETLayer,
        {"step_network": "sinusoids"},
        ValueError,
        "time_dim must be dim=8 for step_network='sinusoids', got 512",
    ),
    (OfficialHyperSETLayer, {"step_size": 0.1}, ValueError, "step_size must be one of"),
    (OfficialHyperSETLayer, {"epsilon": None}, TypeError, "epsilon must be"),
    (HyperSET, {"share_steps": 1}, TypeError, "share_steps must be"),
]


@pytest.mark.parametrize(("cls", "options", "error", "message"), BAD, ids=[str(b[1]) for b in BAD])
def test_bad_arguments(
    cls: Callable[..., Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        cls(DIM, HEADS, MEMORIES, **options)
