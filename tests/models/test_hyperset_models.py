"""Hyper-SET, unrolled and solved; the models and weights of its official code."""

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
from implicit_attn.models import (
    HyperSET,
    HyperSETEquilibrium,
    ImageClassifier,
    SudokuModel,
)
from implicit_attn.models.official import PUBLISHED, OfficialLayout, load_official, to_official
from implicit_attn.updates import HyperSETLayer
from solvers import Status, Tolerance

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
@pytest.mark.parametrize("iterations", [None, 1, 7])
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


def test_time_after_training() -> None:
    """The state after T iterations does not depend on how many follow; "hold" repeats time T."""
    x = tokens()
    extrapolating, holding = build(), build(beyond="hold")
    long = extrapolating.states(x, iterations=9)
    assert torch.allclose(long[:5], extrapolating.states(x), atol=1e-12)
    held = holding.states(x, iterations=9)
    assert torch.allclose(held[:5], long[:5], atol=1e-12)
    z = held[4]
    for index in range(5, 10):
        z = holding.layers[0](z, x, 4)
        assert torch.allclose(held[index], z, atol=1e-12)
    assert not torch.allclose(held[-1], long[-1], atol=1e-4)


@each_model
def test_trajectory(options: dict[str, Any]) -> None:
    model = build(**options)
    x = tokens()
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[1, 3:] = False
    with torch.no_grad():
        path = model.trajectory(x, iterations=5, mask=mask)
        assert torch.equal(path.states, model.states(x, iterations=5, mask=mask))
    number = 1 + 5 * len(model.layers)
    assert path.attention_energy.shape == path.feedforward_energy.shape == (number, 3)
    assert path.features.shape == (number, 3, HEADS, TOKENS, DIM // HEADS)
    lengths = path.features.square().mean(-1)
    counts = mask[:, None].expand(3, HEADS, TOKENS)
    assert torch.allclose(lengths[:, counts], torch.ones(1, dtype=torch.float64), atol=2e-3)
    assert (lengths[:, ~counts] == 0).all()
    if "lora_rank" in options:
        return
    steps = [*model.schedule(5), model.schedule(5)[-1]]
    for t, (layer, _) in enumerate(steps):
        module, z = model.layers[layer], path.states[t]
        for energy, seen in (
            (module.attention, path.attention_energy[t]),
            (module.feedforward, path.feedforward_energy[t]),
        ):
            assert torch.allclose(energy(z, mask=mask), seen, atol=1e-10)


def test_small_steps_lower_both_energies() -> None:
    """Descent in spite of the dropped derivative, where the projections are orthogonal."""
    model = build(step_size="fixed", initial_step=0.01, iterations=20)
    for energy in (model.layers[0].attention, model.layers[0].feedforward):
        nn.init.orthogonal_(energy.projection.weight)
    with torch.no_grad():
        path = model.trajectory(tokens())
    assert (path.attention_energy.diff(dim=0) < 0).all()
    assert (path.feedforward_energy.diff(dim=0) < 0).all()


@each_model
def test_masks(options: dict[str, Any]) -> None:
    model = build(**options)
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


# Official weights in our models: the dense transcription's forward pass, round trips, wrong states.


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
    with pytest.raises(ValueError, match=r"codes must be integers \(B, 3, 3\), got"):
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
