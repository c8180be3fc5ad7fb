"""Hyper-SET, unrolled and solved; the models and weights of its official code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.models import HyperSET, HyperSETEquilibrium
from implicit_attn.updates import HyperSETLayer
from solvers import Status, Tolerance
from tools.convert_hyperset import build_official, load_official

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


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_the_model_repeats_its_layers(options: dict[str, Any]) -> None:
    """Also beyond the four iterations of training."""
    model, x = build(**options), tokens()
    z, states = x, [x]
    for layer in model.layers:
        assert isinstance(layer, HyperSETLayer)
        for t in range(1, 8):
            z = layer(z, x, t)
            states.append(z)
    assert torch.allclose(model(x, iterations=7, z0=x), z, atol=1e-12)
    assert torch.allclose(model.states(x, iterations=7), torch.stack(states), atol=1e-12)
    assert torch.equal(model(x), model(x, iterations=4))


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
    """Weights that no symmetry makes equal."""
    generator, state = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for item in RECORDED[case]["shapes"].split():
        key, sizes = item.split(":")
        shape = [int(size) for size in sizes.split("x")]
        state[key] = 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return state


@pytest.mark.parametrize("case", RECORDED)
def test_official_weights_give_official_logits(case: str) -> None:
    expected = torch.tensor(RECORDED[case]["logits"], dtype=torch.float64)
    model = load_official(official_state(case), iterations=3, **RECORDED[case]["options"])
    assert not model.training
    if case.startswith("images"):
        drawn = torch.Generator().manual_seed(1)
        found = model(torch.randn(2, 3, 6, 6, generator=drawn, dtype=torch.float64))
    else:
        drawn = torch.Generator().manual_seed(2)
        found = model(torch.randint(0, 10, (2, 81), generator=drawn))[:, ::40, ::4]
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-10, atol=1e-10)


def test_checkpoints_are_unwrapped() -> None:
    state = official_state("images default")
    wrapped = {"epoch": 1, "state_dict": {f"model.module.{k}": w for k, w in state.items()}}
    plain, other = (load_official(each, image_size=6).state_dict() for each in (state, wrapped))
    assert all(torch.equal(plain[key], other[key]) for key in plain)


State = dict[str, Tensor]
# What is changed in a state of images, the options, and what the error says.
IMAGE: dict[str, Any] = {"image_size": 6}
BAD: list[tuple[Callable[[State], Any], dict[str, Any], str]] = [
    (lambda state: state.pop("enc.0.ln2.weight"), IMAGE, "gains.memory.weight"),
    (lambda state: state.update(pos_emb=torch.zeros(1, 1)), IMAGE, "position"),
    (lambda state: state.update({"fc.1.bias": torch.zeros(4)}), IMAGE, "head.bias"),
    (lambda state: state.clear(), IMAGE, "state"),
    (lambda state: None, {}, "image_size"),
    (lambda state: None, {**IMAGE, "step": 0.1}, "step"),
]


@pytest.mark.parametrize(("spoil", "options", "message"), BAD, ids=[bad[2] for bad in BAD])
def test_wrong_states(spoil: Callable[[State], Any], options: dict[str, Any], message: str) -> None:
    state = official_state("images default")
    spoil(state)
    with pytest.raises((RuntimeError, ValueError), match=message):
        load_official(state, **options)


# Parameters as the paper prints them, in millions, and the digits behind the point; all heads have 64
# features. The network "twice-normed" is the one for training from scratch on CIFAR.
CIFAR: dict[str, Any] = {"image_size": 32, "channels": 3, "patch": 4}
IMAGENET: dict[str, Any] = {"image_size": 224, "channels": 3, "patch": 14}
# The paper does not say it, but the printed numbers fit sinusoids as many as features, and not 512.
WIDE: dict[str, Any] = {"network": "twice-normed", "time_dim": 1536}
PUBLISHED: list[tuple[int, int, dict[str, Any], dict[str, Any], float, int]] = [
    (384, 10, CIFAR, {"network": "twice-normed"}, 0.96, 2),
    (512, 10, CIFAR, {"network": "twice-normed"}, 1.61, 2),
    (1536, 10, CIFAR, WIDE, 14.3, 1),
    (1536, 100, CIFAR, WIDE, 14.4, 1),
    (512, 100, IMAGENET, {}, 1.93, 2),
    (512, 100, IMAGENET, {"lora": (4, 2.0)}, 2.03, 2),
    (512, 100, IMAGENET, {"lora": (32, 2.0)}, 2.72, 2),
    (384, 1000, IMAGENET, {}, 1.55, 2),
    (384, 1000, IMAGENET, {"network": None, "step": 0.1}, 0.91, 2),
    (640, 1000, IMAGENET, {}, 3.40, 2),
    (512, 1000, IMAGENET, {"layers": 12, "iterations": 1}, 8.17, 2),
    (768, 1000, IMAGENET, {"layers": 12, "iterations": 1}, 17.56, 2),
]


@pytest.mark.parametrize(("dim", "classes", "shape", "options", "millions", "digits"), PUBLISHED)
def test_published_numbers_of_parameters(
    dim: int,
    classes: int,
    shape: dict[str, Any],
    options: dict[str, Any],
    millions: float,
    digits: int,
) -> None:
    """Within 0.5 %, and the rounding of the printed number."""
    settings: Any = {"network": "normed", **options, "around": {**shape, "classes": classes}}
    with torch.device("meta"):
        model = build_official("images", dim, dim // 64, dim, **settings)
    count = sum(weight.numel() for weight in model.parameters())
    assert abs(count / (millions * 1e6) - 1) <= 0.005
    assert abs(count / 1e6 - millions) <= 0.7 * 10.0**-digits


def test_published_number_of_parameters_for_sudoku() -> None:
    with torch.device("meta"):
        model = build_official("sudoku", 768, 12, 4 * 768, network="raw", around={})
    count = sum(weight.numel() for weight in model.parameters())
    assert abs(count / 1e6 - 5.20) <= 0.007
