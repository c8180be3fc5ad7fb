"""Hyper-SET, unrolled and solved; the models and weights of its official code."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
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


# The official code by names and shapes, and its forward pass in dense tensor operations, written from the
# formulas: every function takes the official state dict, in float64.

State = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
EPSILON = torch.finfo(torch.float64).eps


def pair(name: str, out: int, *inner: int) -> Shapes:
    return {f"{name}.weight": (out, *inner), f"{name}.bias": (out,)}


def image_shapes(
    *,
    d: int = 8,
    memories: int = 8,
    heads: int = 2,
    layers: int = 1,
    classes: int = 5,
    pixels: int = 12,
    time: int = 6,
    network: str = "normed",
    rank: int = 0,
    iterations: int = 3,
) -> Shapes:
    """Network "normed", "basic" (one norm more), "alternative" (in the layer), or "none"."""
    shapes: Shapes = {"cls_token": (1, 1, d)}
    shapes |= pair("emb.0", pixels) | pair("emb.1", d, pixels) | pair("emb.2", d)
    shapes |= pair("fc.0", d) | pair("fc.1", classes, d)
    for layer in range(layers):
        name = f"enc.{layer}"
        shapes |= {f"{name}.mlp.weight": (memories, d), f"{name}.attn.qkv.weight": (d, d)}
        shapes |= {f"{name}.attn.ln1_{i}.weight": (d // heads,) for i in (1, 2, 3)}
        shapes |= {f"{name}.ln2.weight": (memories,)}
    if network != "none":
        inside = network == "alternative"
        first = "time_mlp" if inside else "time_mlp.0"
        last = "enc.0.time_mlp_inner" if inside else "time_mlp.1"
        shapes |= pair(f"{first}.1", d, time) | pair(f"{first}.5", d, d)
        shapes |= {f"{first}.{place}.weight": (d,) for place in (2, 4, 6)}
        shapes |= {"enc.0.ln_inp.weight" if inside else "ln_inp.weight": (d,)}
        shapes |= {} if network == "normed" else {f"{last}.0.weight": (d,)}
        shapes |= pair(f"{last}.1" if network == "normed" else f"{last}.2", 2 * d, d)
    for name in ("attention", "ff") if rank else ():
        for t in range(iterations):
            shapes |= {f"deltaW_{name}_B.{t}": (d, rank), f"deltaW_{name}_A.{t}": (rank, d)}
    return shapes


def sudoku_shapes(
    *, d: int = 8, heads: int = 2, layers: int = 1, time: int = 6, learned: bool = True
) -> Shapes:
    shapes: Shapes = {"tok_emb.weight": (10, d), "ln_f.weight": (d,), "head.weight": (9, d)}
    shapes |= {"pos_emb": (1, 81, d)} if learned else {}
    for layer in range(layers):
        name = f"blocks.{layer}"
        shapes |= {f"{name}.mlp.weight": (4 * d, d), f"{name}.ln2.weight": (4 * d,)}
        shapes |= {f"{name}.attn.qkv.weight": (d, d), f"{name}.attn.ln1.weight": (d // heads,)}
        shapes |= {f"{name}.attn.mask": (1, 1, 81, 81)}
    shapes |= pair("time_mlp.0.1", d, time) | pair("time_mlp.0.3", d, d)
    return shapes | pair("time_mlp.1.1", 2 * d, d)


def random_state(shapes: Shapes, seed: int = 0) -> State:
    """Weights that no symmetry makes equal; the causal mask is the constant that it is."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        key: 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for key, shape in shapes.items()
    }
    for key in state:
        if key.endswith(".attn.mask"):
            state[key] = torch.ones(1, 1, 81, 81, dtype=torch.float64).tril()
    return state


def gelu(y: Tensor) -> Tensor:
    return 0.5 * y * (1.0 + torch.erf(y / math.sqrt(2.0)))


def softplus(y: Tensor) -> Tensor:
    return torch.log1p(y.exp())


PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda y: 1.0 / (1.0 + (-y).exp()),
    "relu": lambda y: y.clamp_min(0.0),
    "tanh": torch.tanh,
    "softplus": softplus,
    "silu": lambda y: y / (1.0 + (-y).exp()),
    "gelu": gelu,
    "elu": lambda y: torch.where(y > 0, y, y.exp() - 1.0),
    "elup1": lambda y: torch.where(y > 0, y + 1.0, y.exp()),
}


def slope(phi: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    y = y.detach().requires_grad_()
    return torch.autograd.grad(phi(y).sum(), y)[0]


def rms(y: Tensor, gain: Tensor) -> Tensor:
    return gain * y / (y.square().mean(-1, keepdim=True) + EPSILON).sqrt()


def layer_norm(state: State, name: str, y: Tensor) -> Tensor:
    y = y - y.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return state[f"{name}.weight"] * y + state[f"{name}.bias"]


def linear(state: State, name: str, y: Tensor) -> Tensor:
    return y @ state[f"{name}.weight"].T + state.get(f"{name}.bias", torch.zeros(()))


def sinusoids(t: float, count: int) -> Tensor:
    half = count // 2
    angles = t * torch.exp(-math.log(1e4) / (half - 1) * torch.arange(half).double())
    return torch.cat([angles.sin(), angles.cos()])


def attend(x: Tensor, w: Tensor, gains: list[Tensor], kind: str, beta: float) -> Tensor:
    """``w`` (d, d); the gains of queries, keys and values; the official names of the kinds."""
    width = len(gains[0])
    raw = (x @ w.T).unflatten(-1, (-1, width)).transpose(1, 2)
    q, k, v = (rms(raw, gain) for gain in gains)
    scores = beta * q @ k.mT
    gate = 1.0 / (1.0 + (-scores).exp())
    if kind == "bisoftmax":
        weights = scores.exp()
        y = (weights / weights.sum(-1, keepdim=True) + weights / weights.sum(-2, keepdim=True)) @ v
    elif kind in ("sigma", "sigma_square", "relu-scores"):
        forms = {"sigma": gate * (1 - gate), "sigma_square": gate**2 * (1 - gate)}
        y = forms.get(kind, scores.clamp_min(0.0)) @ v
    else:
        phi = PHI[kind]
        y = beta * phi(v) @ (phi(q).mT @ phi(k)) * slope(phi, q)
    return y.transpose(1, 2).flatten(2) @ w


def recall(x: Tensor, d: Tensor, gain: Tensor, kind: str) -> Tensor:
    """``d`` (M, d): the memories' part, by "relu", "gelu", "softmax" or "gated-NAME"."""
    y = rms(x @ d.T, gain)
    if kind.startswith("gated-"):
        phi = PHI[kind.removeprefix("gated-")]
        return (phi(y).sum(-1, keepdim=True) * slope(phi, y)) @ d
    if kind == "softmax":
        return (y.exp() / y.exp().sum(-1, keepdim=True)) @ d
    return PHI[kind](y) @ d


def descend(kind: str, gradients: list[Tensor]) -> Tensor:
    """The last step from all gradients so far, written out as sums over them."""
    count = len(gradients)
    squares = [g * g for g in gradients]
    if kind == "plain":
        return gradients[-1]
    if kind == "momentum":
        return discounted(0.9, gradients)
    if kind == "adam":
        mean = 0.1 * discounted(0.9, gradients) / (1 - 0.9**count)
        square = 0.04 * discounted(0.96, squares) / (1 - 0.96**count)
        return mean / (square.sqrt() + 1e-6)
    roots = [(0.2 * discounted(0.8, squares[: n + 1])).sqrt() + 1e-6 for n in range(count)]
    scaled = [g / root for g, root in zip(gradients, roots, strict=True)]
    return scaled[-1] if kind == "rmsprop" else discounted(0.9, scaled)


def discounted(decay: float, values: list[Tensor]) -> Tensor:
    """``sum_n decay^n value_(last - n)``."""
    return torch.stack([decay**n * value for n, value in enumerate(reversed(values))]).sum(0)


def steps(state: State, t: int, x: Tensor, x0: Tensor, source: str) -> tuple[Tensor, Tensor]:
    """alpha and gamma of the iteration ``t`` of images or Sudoku, from 1."""
    c = x if source == "state" else x0
    inside = "enc.0.ln_inp.weight" in state
    first, last = ("time_mlp", "enc.0.time_mlp_inner") if inside else ("time_mlp.0", "time_mlp.1")
    hidden = linear(state, f"{first}.1", sinusoids(t, state[f"{first}.1.weight"].shape[1]))
    if f"{first}.3.weight" in state:  # Sudoku: no norms
        hidden = linear(state, f"{first}.3", gelu(hidden)) + c
        return linear(state, f"{last}.1", gelu(hidden)).chunk(2, -1)  # type: ignore[return-value]
    hidden = rms(gelu(rms(hidden, state[f"{first}.2.weight"])), state[f"{first}.4.weight"])
    hidden = rms(linear(state, f"{first}.5", hidden), state[f"{first}.6.weight"])
    hidden = hidden + rms(c, state["enc.0.ln_inp.weight" if inside else "ln_inp.weight"])
    if f"{last}.0.weight" in state:
        hidden = rms(hidden, state[f"{last}.0.weight"])
    name = f"{last}.1" if f"{last}.1.weight" in state else f"{last}.2"
    return linear(state, name, gelu(hidden)).chunk(2, -1)  # type: ignore[return-value]


def positions(count: int, d: int) -> Tensor:
    """Sines and cosines of a line in turn, rounded to float32 as in the official code."""
    place = torch.arange(count).double()[:, None] * 1e4 ** (-torch.arange(0, d, 2).double() / d)
    table = torch.zeros(count, d, dtype=torch.float64)
    table[:, 0::2], table[:, 1::2] = place.sin(), place.cos()
    return table.float().double()


def grid(side: int, d: int) -> Tensor:
    """Sines and cosines of column and row, rounded to float32 as in the official code."""
    f = 1e4 ** (-torch.arange(d // 4).double() / (d // 4))
    rows = [
        torch.cat([(c * f).sin(), (c * f).cos(), (r * f).sin(), (r * f).cos()])
        for r in range(side)
        for c in range(side)
    ]
    return torch.stack(rows).float().double()


def images_forward(
    state: State,
    images: Tensor,
    *,
    patch: int,
    iterations: int,
    attention: str = "bisoftmax",
    feedforward: str = "gelu",
    source: str = "state",
    step: float = 0.0,
    scale: float = 0.0,
) -> Tensor:
    """Logits; ``scale`` of the low-rank differences."""
    side = images.shape[-1] // patch
    cells = [images[:, :, patch * r :, patch * c :] for r in range(side) for c in range(side)]
    pixels = torch.stack(
        [cell[:, :, :patch, :patch].movedim(1, -1).flatten(1) for cell in cells], 1
    )
    x = layer_norm(state, "emb.2", linear(state, "emb.1", layer_norm(state, "emb.0", pixels)))
    x = torch.cat([state["cls_token"].expand(len(x), 1, -1), x], 1)
    x0 = x = x + positions(x.shape[1], x.shape[2])
    for layer in range(sum(key.endswith(".ln2.weight") for key in state)):
        name = f"enc.{layer}"
        gains = [state[f"{name}.attn.ln1_{i}.weight"] for i in (1, 2, 3)]
        beta = 1.0 if attention == "relu-scores" else len(gains[0]) ** -0.5
        for t in range(1, iterations + 1):
            w, d = state[f"{name}.attn.qkv.weight"], state[f"{name}.mlp.weight"]
            if scale:
                deltas = [
                    scale * state[f"deltaW_{part}_B.{t - 1}"] @ state[f"deltaW_{part}_A.{t - 1}"]
                    for part in ("attention", "ff")
                ]
                w, d = w + deltas[0], d + deltas[1]
            alpha = gamma = torch.tensor(step, dtype=torch.float64)
            if not step:
                alpha, gamma = steps(state, t, x, x0, source)
            x = x - alpha * attend(x, w, gains, attention, beta)
            x = x + gamma * recall(x, d, state[f"{name}.ln2.weight"], feedforward)
    return linear(state, "fc.1", layer_norm(state, "fc.0", x[:, 0]))


def sudoku_forward(
    state: State, puzzles: Tensor, *, iterations: int, source: str = "input", descent: str = "plain"
) -> Tensor:
    d = state["tok_emb.weight"].shape[1]
    places = state["pos_emb"][0] if "pos_emb" in state else grid(9, d)
    x0 = x = state["tok_emb.weight"][puzzles] + places
    for layer in range(sum(key.endswith(".ln2.weight") for key in state)):
        name = f"blocks.{layer}"
        gains = [state[f"{name}.attn.ln1.weight"]] * 3
        first: list[Tensor] = []
        second: list[Tensor] = []
        for t in range(1, iterations + 1):
            alpha, gamma = steps(state, t, x, x0, source)
            w, beta = state[f"{name}.attn.qkv.weight"], len(gains[0]) ** -0.5
            first.append(attend(x, w, gains, "bisoftmax", beta))
            x = x - alpha * descend(descent, first)
            memories, gain = state[f"{name}.mlp.weight"], state[f"{name}.ln2.weight"]
            second.append(recall(x, memories, gain, "relu"))
            x = x + gamma * descend(descent, second)
    return linear(state, "head", rms(x, state["ln_f.weight"]))


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
for name, ours in (("sigma_square", "sigmoid-squared"), ("relu-scores", "relu"), ("elup1", "linear-elu"),
                   ("bisoftmax", "bisoftmax")):  # fmt: skip
    IMAGES[f"attention-{name}"] = (
        {"network": "alternative"}, {"attention": ours}, {"attention": name},
    )  # fmt: skip
for name, ours in (
    ("relu", "relu"),
    ("softmax", "softmax"),
    ("gated-gelu", "gated"),
    ("gated-elu", "gated-plain-elu"),
):
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
        for kind in ("momentum", "rmsprop-momentum", "adam")
    },
}


@pytest.mark.parametrize(("sizes", "options", "written"), SUDOKU.values(), ids=SUDOKU.keys())
def test_sudoku(sizes: dict[str, Any], options: dict[str, Any], written: dict[str, Any]) -> None:
    state = random_state(sudoku_shapes(**sizes))
    model = load_official(state, iterations=3, **options)
    puzzles = integers(10, 2, 81)
    assert_loads(state, model, puzzles, sudoku_forward(state, puzzles, iterations=3, **written))


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
    (drop(*image_shapes()), {}, "state"),
]


@pytest.mark.parametrize(("spoil", "options", "message"), BAD, ids=[bad[2][:30] for bad in BAD])
def test_wrong_states(
    spoil: Callable[[State], None], options: dict[str, Any], message: str
) -> None:
    state = random_state(image_shapes())
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
