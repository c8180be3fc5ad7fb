"""Hyper-SET, unrolled and solved; the models and weights of its official code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.models import HyperSET, HyperSETEquilibrium
from implicit_attn.updates import HyperSETLayer
from solvers import Status, Tolerance
from tools.convert_hyperset import PUBLISHED, load_official, to_official

# Hyper-SET as a backbone: iterations, trajectories, masks, parameter counts, equilibrium.


DIM, HEADS, MEMORIES, TOKENS = 12, 3, 16, 6


def tokens(seed: int = 0, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, TOKENS, DIM, generator=generator, dtype=torch.float64)


def build(**options: Any) -> HyperSET:
    """A model whose step sizes depend on time and tokens, as after training."""
    torch.manual_seed(1)
    settings: dict[str, Any] = {"iterations": 4, "time_dim": 16} | options
    model = HyperSET(DIM, HEADS, MEMORIES, **settings).double()
    for layer in model.layers:
        if hasattr(layer.step_sizes, "last"):
            nn.init.normal_(layer.step_sizes.last.weight, std=0.05)
            nn.init.constant_(layer.step_sizes.last.bias, 0.1)
    return model


MODELS: dict[str, dict[str, Any]] = {
    "state": {},
    "input": {"step_size": "conditioned-input"},
    "learned": {"step_size": "learned"},
    "fixed-sigmoid-gelu": {"step_size": "fixed", "attention": "sigmoid", "feedforward": "gelu"},
    "linear-softmax": {"attention": "linear", "feedforward": "softmax"},
    "softmax-gated": {"attention": "softmax", "feedforward": "gated"},
    "lora": {"lora_rank": 2},
    "layers": {"layers": 2},
}
each_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())


@each_model
@pytest.mark.parametrize("iterations", [None, 7])
def test_the_model_repeats_its_layers(options: dict[str, Any], iterations: int | None) -> None:
    model = build(**options)
    count = iterations or 4
    x = tokens()
    z, states = x, [x]
    plan = [(layer, t) for layer in range(len(model.layers)) for t in range(1, count + 1)]
    for layer, t in plan:
        module = model.layers[layer]
        assert isinstance(module, HyperSETLayer)
        z = module(z, x, t)
        states.append(z)
    assert torch.allclose(model(x, iterations=iterations), z, atol=1e-12)
    assert torch.allclose(model(x, iterations=iterations, z0=x), z, atol=1e-12)
    assert torch.allclose(model.states(x, iterations=iterations), torch.stack(states), atol=1e-12)


@pytest.mark.parametrize("name", ["state", "linear-softmax", "lora", "layers"])
def test_masks(name: str) -> None:
    model = build(**MODELS[name])
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[0, 4:], mask[2] = False, False
    x = tokens()
    z = model(x, mask=mask)
    assert torch.equal(z[~mask], x[~mask])
    assert torch.allclose(z[:1, :4], model(x[:1, :4]), atol=1e-12)
    other = torch.where(mask.unsqueeze(-1), x, float("nan")).requires_grad_()
    result = model(other, mask=mask)
    assert torch.equal(result[mask], z[mask])
    assert torch.equal(model.states(other, mask=mask)[:, mask], model.states(x, mask=mask)[:, mask])
    gradients = torch.autograd.grad(result[mask].square().sum(), [other, *model.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][~mask] == 0).all()


@pytest.mark.parametrize(
    "options", [{}, {"attention": "sigmoid", "feedforward": "gelu"}, {"attention": "linear"}]
)
def test_equilibrium(options: dict[str, Any]) -> None:
    """The output is where the exact energy, differentiated here by autograd, is stationary."""
    torch.manual_seed(0)
    layer = {"tolerance": Tolerance(rtol=1e-10), "max_steps": 300}
    model = HyperSETEquilibrium(DIM, HEADS, MEMORIES, layer=layer, **options).double()
    x = tokens()
    z = model(x).detach().requires_grad_()
    assert model.layer.last is not None
    assert (model.layer.last.status == Status.CONVERGED).all(), model.layer.last.summary()
    energy: Any = model.layer.update.energy
    (gradient,) = torch.autograd.grad(energy(z, x).sum(), z)
    assert gradient.norm() <= 1e-8 * z.norm()
    assert not torch.allclose(z, x, atol=1e-2)
    value = energy.attention(z) + energy.feedforward(z) + 0.5 * (z - x).square().sum((1, 2))
    assert torch.allclose(energy(z, x), value)
    assert (energy(z, x) < energy(x, x)).all()


# Weights of the official code. The file has, by case, the options, the official names and shapes, and logits
# that a transcription of the official formulas in float64 gave for the weights that are drawn here.

RECORDED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("official_hyperset.json").read_text("utf-8")
)


def official_state(case: str) -> dict[str, Tensor]:
    """Weights that no symmetry makes equal; the causal mask is the constant that it is."""
    generator, state = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for item in RECORDED[case]["shapes"].split():
        key, sizes = item.split(":")
        shape = [int(size) for size in sizes.split("x")]
        state[key] = 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        if key.endswith(".attn.mask"):
            state[key] = torch.ones(shape, dtype=torch.float64).tril()
    return state


@pytest.mark.parametrize("case", RECORDED)
def test_official_weights_give_official_logits_and_come_back(case: str) -> None:
    state = official_state(case)
    expected = torch.tensor(RECORDED[case]["logits"], dtype=torch.float64)
    model = load_official(state, iterations=3, **RECORDED[case]["options"])
    assert not model.training
    if case.startswith("images"):
        drawn = torch.Generator().manual_seed(1)
        found = model(torch.randn(2, 3, 6, 6, generator=drawn, dtype=torch.float64))
    else:
        drawn = torch.Generator().manual_seed(2)
        found = model(torch.randint(0, 10, (2, 81), generator=drawn))[:, ::40, ::4]
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-10, atol=1e-10)
    back = to_official(model, alternative=any("time_mlp_inner" in key for key in state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


State = dict[str, Tensor]


def change(key: str, weight: Any) -> Callable[[State], None]:
    return lambda state: state.update({key: weight})


def drop(*keys: str) -> Callable[[State], None]:
    def spoil(state: State) -> None:
        for key in keys:
            del state[key]

    return spoil


# The state of images that is changed, the options, and what the error says.
IMAGE: dict[str, Any] = {"image_size": 6}
BAD: list[tuple[Callable[[State], None], dict[str, Any], str]] = [
    (drop("enc.0.ln2.weight", "fc.0.bias"), IMAGE, "enc.0.ln2.weight"),
    (change("pos_emb", torch.zeros(1).double()), IMAGE, "pos_emb"),
    (change("fc.1.bias", torch.zeros(4).double()), IMAGE, "fc.1.bias"),
    (change("emb.1.weight", torch.zeros(8)), IMAGE, "emb.1.weight"),
    (drop(), {}, "image_size"),
    (lambda state: state.clear(), {}, "state"),
]


@pytest.mark.parametrize(("spoil", "options", "message"), BAD, ids=[bad[2][:30] for bad in BAD])
def test_wrong_states(
    spoil: Callable[[State], None], options: dict[str, Any], message: str
) -> None:
    state = official_state("images default")
    spoil(state)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_official(state, **options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_parameters(name: str) -> None:
    """Within 0.5 %, and the rounding of the printed number."""
    layout, millions, digits, _ = PUBLISHED[name]
    with torch.device("meta"):
        count = sum(weight.numel() for weight in layout.build().parameters())
    assert abs(count / (millions * 1e6) - 1) <= 0.005
    assert abs(count / 1e6 - millions) <= 0.7 * 10.0**-digits
