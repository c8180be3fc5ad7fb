"""Official weights in our models: the dense transcription's forward pass, round trips, wrong states."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.official import (
    State,
    code_shapes,
    codes_forward,
    image_shapes,
    images_forward,
    random_state,
    sudoku_forward,
    sudoku_shapes,
)
from implicit_attn.models import HyperSET, ImageClassifier, SudokuModel
from implicit_attn.models.official import PUBLISHED, OfficialLayout, load_official, to_official

TOLERANCE = 1e-10


def images(size: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(2))


def assert_loads(state: State, model: nn.Module, inputs: Tensor, expected: Tensor) -> None:
    """The forward pass within 1e-10, and the way back bit by bit."""
    assert not model.training
    found = model(inputs)
    assert expected.std() > 0.05
    assert (found - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.abs().max()))
    alternative = any("time_mlp_inner" in key for key in state)
    back = to_official(model, alternative=alternative)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


# Official options of images: shapes, options of ours, options of the transcription.
IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}, {}),
    "basic": ({"network": "basic"}, {}, {}),
    "input": ({}, {"condition": "input"}, {"source": "input"}),
    "layers": ({"layers": 2, "memories": 12}, {}, {}),
    "fixed": ({"network": "none"}, {"step": 0.3}, {"step": 0.3}),
    "lora": ({"rank": 2}, {"lora_scale": 1.7}, {"scale": 1.7}),
    "one-head": ({"heads": 1}, {}, {}),
}
OUR_MAPS = {"elup1": "elu", "elu": "plain-elu"}
MAPS = ("sigmoid", "tanh", "softplus", "silu", "gelu", "elu", "elup1")
SCORES = {"sigma": "sigmoid", "sigma_square": "sigmoid-squared", "relu-scores": "relu"}
for name in (*SCORES, *MAPS, "bisoftmax"):
    ours = SCORES.get(name, name if name == "bisoftmax" else f"linear-{OUR_MAPS.get(name, name)}")
    IMAGES[f"attention-{name}"] = (
        {"network": "alternative"}, {"attention": ours}, {"attention": name},
    )  # fmt: skip
for name in ("relu", "softmax", *(f"gated-{each}" for each in MAPS)):
    kind, _, phi = name.partition("-")
    ours = "gated" if phi == "gelu" else f"gated-{OUR_MAPS.get(phi, phi)}" if phi else kind
    IMAGES[f"feedforward-{name}"] = (
        {"network": "alternative"}, {"feedforward": ours}, {"feedforward": name},
    )  # fmt: skip


@pytest.mark.parametrize(("sizes", "options", "written"), IMAGES.values(), ids=IMAGES.keys())
def test_images(sizes: dict[str, Any], options: dict[str, Any], written: dict[str, Any]) -> None:
    state = random_state(image_shapes(**sizes))
    model = load_official(state, iterations=3, image_size=6, **options)
    expected = images_forward(state, images(), patch=2, iterations=3, **written)
    assert_loads(state, model, images(), expected)


SUDOKU: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}, {}),
    "sincos": ({"learned": False}, {}, {}),
    "state": ({}, {"condition": "state"}, {"source": "state"}),
    "layers": ({"layers": 2}, {}, {}),
    **{
        kind: ({}, {"descent": kind}, {"descent": kind})
        for kind in ("momentum", "rmsprop", "rmsprop-momentum", "adam")
    },
}


@pytest.mark.parametrize(("sizes", "options", "written"), SUDOKU.values(), ids=SUDOKU.keys())
def test_sudoku(sizes: dict[str, Any], options: dict[str, Any], written: dict[str, Any]) -> None:
    state = random_state(sudoku_shapes(**sizes))
    model = load_official(state, iterations=3, **options)
    puzzles = integers(10, 2, 81)
    assert_loads(state, model, puzzles, sudoku_forward(state, puzzles, iterations=3, **written))


CODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "momentum": ({"descent": "momentum"}, {"descent": "momentum"}),
    "state": ({"condition": "state"}, {"source": "state"}),
    "sigma": ({"attention": "sigmoid"}, {"attention": "sigma"}),
    "relu": ({"attention": "relu"}, {"attention": "relu-scores"}),
    "softmax": ({"feedforward": "softmax"}, {"feedforward": "softmax"}),
    "phi": (
        {"attention": "linear-silu", "feedforward": "gated-silu"},
        {"attention": "silu", "feedforward": "gated-silu"},
    ),
}


@pytest.mark.parametrize(("options", "written"), CODES.values(), ids=CODES.keys())
def test_codes(options: dict[str, Any], written: dict[str, Any]) -> None:
    state = random_state(code_shapes())
    model = load_official(state, iterations=3, side=3, **options)
    codes = integers(8, 2, 3, 3)
    expected = codes_forward(state, codes, iterations=3, **written)
    assert_loads(state, model, codes, expected)
    assert torch.equal(model(codes.flatten(1)), model(codes))
    with pytest.raises(ValueError, match=r"codes must be integers \(B, 9\) or \(B, 3, 3\), got"):
        model(codes[:, :2])


def test_ours_becomes_official_and_comes_back() -> None:
    """The other way round, from a model that was built here, in float32, with two channels."""
    layout = OfficialLayout(
        "images", 8, 2, 8, channels=2, image_size=6, patch=3, time_dim=6, network="twice-normed"
    )
    model = layout.build().eval()
    state = to_official(model)
    again = load_official(state, image_size=6, channels=2)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    x = images()[:, :2].float()
    assert torch.equal(model(x), again(x))
    state["cls_token"].zero_()  # a copy: the model keeps its own
    assert torch.equal(model(x), again(x))


@pytest.mark.parametrize("wrapper", ["model_state_dict", "state_dict"])
@pytest.mark.parametrize("prefix", ["model.", "module.model.", ""])
def test_checkpoints_are_unwrapped(wrapper: str, prefix: str) -> None:
    state = random_state(sudoku_shapes())
    wrapped = {wrapper: {f"{prefix}{key}": weight for key, weight in state.items()}, "epoch": 3}
    before = torch.random.get_rng_state()
    found = to_official(load_official(wrapped))
    assert all(torch.equal(found[key], state[key]) for key in state)
    assert torch.equal(torch.random.get_rng_state(), before)


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
    (drop("enc.0.ln2.weight", "fc.0.bias"), IMAGE, "'enc.0.ln2.weight', 'fc.0.bias' missing"),
    (change("pos_emb", torch.zeros(1).double()), IMAGE, "'pos_emb' superfluous"),
    (change("fc.1.bias", torch.zeros(4).double()), IMAGE, "'fc.1.bias' of shape (4,), expected (5"),
    (change("emb.1.weight", torch.zeros(8)), IMAGE, "state['emb.1.weight'] must have more than 1"),
    (drop(), {}, "image_size must be given"),
    (drop(*image_shapes()), {}, "state must be of an official Hyper-SET, with keys that"),
]


@pytest.mark.parametrize(("spoil", "options", "message"), BAD, ids=[bad[2][:30] for bad in BAD])
def test_wrong_states(
    spoil: Callable[[State], None], options: dict[str, Any], message: str
) -> None:
    state = random_state(image_shapes())
    spoil(state)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_official(state, **options)


def test_what_weights_do_not_tell_must_be_given() -> None:
    def refuse(message: str, sizes: dict[str, Any], **options: Any) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            load_official(random_state(image_shapes(**sizes)), image_size=6, **options)

    refuse("attention or feedforward must be given", {"network": "alternative"})
    refuse("step must be given", {"network": "none"})
    refuse("lora_scale must be given", {"rank": 2})
    refuse("iterations must be 3", {"rank": 2}, lora_scale=2.0, iterations=4)
    refuse("step must be finite and > 0, got 0.0", {"network": "none"}, step=0.0)  # no default
    refuse("step must be None where the weights have a network", {}, step=0.5)
    with pytest.raises(TypeError, match=r"state\['epoch'\] must be a tensor, got int"):
        load_official({"epoch": 3})
    mask = random_state(sudoku_shapes()) | {"blocks.0.attn.mask": torch.ones(1, 1, 81, 81).double()}
    with pytest.raises(ValueError, match="must be the lower triangle of ones"):
        load_official(mask)


def test_models_that_are_not_official() -> None:
    plain = ImageClassifier(HyperSET(8, 2, 8, time_dim=6), 6, 3, 5, patch=2)
    with pytest.raises(ValueError, match="model must have trained gains and the official norms"):
        to_official(plain)
    options: dict[str, Any] = {"gains": "separate", "epsilon": None, "time_dim": 6}
    with pytest.raises(ValueError, match="model must take its step sizes from a network"):
        to_official(ImageClassifier(HyperSET(8, 2, 8, **options), 6, 3, 5, patch=2))
    options["step_network"] = "normed"
    with pytest.raises(ValueError, match=r"it lacks embed\.norm\.bias, embed\.norm\.weight"):
        to_official(ImageClassifier(HyperSET(8, 2, 8, **options), 6, 3, 5, patch=2))
    options |= {"gains": "shared", "step_network": "raw"}
    model = SudokuModel(HyperSET(8, 2, 8, **options))
    with pytest.raises(ValueError, match=r"it has norm\.bias, for which there is no place"):
        to_official(model)
    with pytest.raises(ValueError, match="alternative must be False but for images"):
        to_official(model, alternative=True)
    with pytest.raises(TypeError, match="model must be an ImageClassifier, SudokuModel or"):
        to_official(nn.Linear(2, 2))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_parameters(name: str) -> None:
    """Within 0.5 %, and the rounding of the printed number."""
    layout, millions, digits, _ = PUBLISHED[name]
    with torch.device("meta"):
        count = sum(weight.numel() for weight in layout.build().parameters())
    assert abs(count / (millions * 1e6) - 1) <= 0.005
    assert abs(count / 1e6 - millions) <= 0.7 * 10.0**-digits
