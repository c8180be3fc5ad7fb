"""The models of Hyper-SET's official code: built as published, loaded from its weights, written back.

    python tools/convert_hyperset.py official.pt ours.safetensors --image-size 32

reads a checkpoint of https://github.com/huyunzhe/hyper-set and writes our model's state dict as safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from implicit_attn.models.backbones import HyperSET
from implicit_attn.models.boards import SudokuModel
from implicit_attn.models.images import ImageClassifier, MaskedCodes
from implicit_attn.updates.hyperset import DESCENTS, PlainStepSizes
from solvers.core.checks import require_choice, require_count, require_positive

NETWORKS = {"images": ("normed", "twice-normed", None), "sudoku": ("raw",), "codes": ("sinusoids",)}
# What the official code is configured with, by task; for images the defaults of the layout.
DEFAULTS: dict[str, dict[str, Any]] = {
    "images": {},
    "sudoku": {"iterations": 24, "network": "raw", "feedforward": "relu", "condition": "input"},
    "codes": {"network": "sinusoids", "feedforward": "relu", "condition": "input"},
}


@dataclass(frozen=True)
class OfficialLayout:
    """Sizes and options of a model of Hyper-SET's official code.

    Args:
        task: "images" (classification), "sudoku", or "codes" (masked image modelling).
        dim, heads, memories, layers, iterations: as for ``HyperSET``.
        network: of the step sizes, "normed" or "twice-normed" for images, "raw" for Sudoku,
            "sinusoids" for codes; None: the fixed ``step``, for images.
        alternative: the layout of the official code's variants of images, in which each layer keeps
            the last part of the network; with one layer and "twice-normed" alone.
        attention, feedforward: as for ``HyperSETLayer``. Images have "gelu" in place of the paper's
            "relu" but for the variants of the feed-forward part.
        condition: of the step sizes, "state" or "input".
        descent: one of ``DESCENTS``.
        time_dim: sinusoids of the time.
        step: both step sizes where they are fixed.
        lora_rank, lora_scale: of the differences between iterations, 0: none; for images with one
            layer and memories = dim.
        channels, image_size, patch, classes: of images; ``patch`` in pixels.
        positions: of Sudoku's cells, "learned" or "sincos".
        codes, side: of the codes' grid.
    """

    task: str
    dim: int
    heads: int
    memories: int
    layers: int = 1
    iterations: int = 12
    network: str | None = "normed"
    alternative: bool = False
    attention: str = "bisoftmax"
    feedforward: str = "gelu"
    condition: str = "state"
    descent: str = "plain"
    time_dim: int = 512
    step: float = 1.0
    lora_rank: int = 0
    lora_scale: float = 2.0
    channels: int = 3
    image_size: int = 32
    patch: int = 4
    classes: int = 10
    positions: str = "learned"
    codes: int = 1024
    side: int = 16

    def __post_init__(self) -> None:
        require_choice("task", self.task, NETWORKS)
        if self.network not in NETWORKS[self.task]:
            raise ValueError(
                f"network must be one of {NETWORKS[self.task]} for task={self.task!r}, got "
                f"{self.network!r}"
            )
        # For codes the official code takes fixed steps with the other descents.
        require_choice("descent", self.descent, DESCENTS[: 2 if self.task == "codes" else None])
        require_positive("step", self.step)
        single = self.task == "images" and self.layers == 1
        if self.alternative and not (single and self.network == "twice-normed"):
            raise ValueError(
                "alternative must be False but for images, one layer and network='twice-normed', "
                f"got {self}"
            )
        if self.lora_rank and not (single and self.memories == self.dim):
            raise ValueError(
                f"lora_rank must be 0 but for images, one layer and memories = dim, got {self}"
            )
        if self.task == "codes" and self.layers != 1:
            raise ValueError(f"layers must be 1 for task='codes', got {self.layers}")

    def build(self) -> nn.Module:
        """Our model of this layout, with new random weights."""
        images, codes = self.task == "images", self.task == "codes"
        options: dict[str, Any] = {
            "layers": self.layers, "iterations": self.iterations, "attention": self.attention,
            "feedforward": self.feedforward, "epsilon": None, "descent": self.descent,
            "gains": "separate" if images else "shared",
        }  # fmt: skip
        if images and self.attention == "relu":
            options["beta"] = 1.0  # the official code leaves the temperature out there
        elif codes and self.attention.startswith("linear"):
            options["beta"] = 1.0 / self.side  # (number of tokens)^-1/2
        if self.lora_rank:
            options |= {"lora_rank": self.lora_rank, "lora_scale": self.lora_scale}
        if self.network is None:
            options |= {"step_size": "fixed", "initial_step": self.step}
        else:
            options |= {"step_size": f"conditioned-{self.condition}", "share_steps": True}
            options |= {"step_network": self.network}
            options |= {"time_dim": self.dim if codes else self.time_dim}
        backbone = HyperSET(self.dim, self.heads, self.memories, **options)
        if codes:
            return MaskedCodes(backbone, codes=self.codes, side=self.side)
        if self.task == "sudoku":
            # The dropout in training is the official code's; evaluation has none.
            return SudokuModel(backbone, dropout=0.1, positions=self.positions, final_norm="rms")
        sizes = (self.image_size, self.channels, self.classes)
        return ImageClassifier(backbone, *sizes, patch=self.patch, pixel_norm=True)


STEPS = "backbone.step_sizes"


class Entry(NamedTuple):
    """A weight by its official key and by ours, and how the one becomes the other.

    Attributes:
        official: the official key.
        ours: our key; None: a constant of the official code, which ``write`` makes of any weight.
        write, read: from ours to the official tensor, and back but for dimensions of size 1.
        part: of ours along its first dimension, where that holds several official weights.
    """

    official: str
    ours: str | None
    write: Callable[[Tensor], Tensor] = lambda weight: weight
    read: Callable[[Tensor], Tensor] = lambda weight: weight
    part: int | None = None

    def official_tensor(self, ours: Mapping[str, Tensor]) -> Tensor:
        if self.ours is None:
            return self.write(next(iter(ours.values())))
        weight = ours[self.ours]
        return self.write(weight if self.part is None else weight[self.part])


def entries(layout: OfficialLayout) -> list[Entry]:
    """All weights of a model of this layout."""
    of_task = {"images": _image_entries, "sudoku": _sudoku_entries, "codes": _code_entries}
    return list(of_task[layout.task](layout))


def _image_entries(layout: OfficialLayout) -> Iterator[Entry]:
    # Our pixels are ordered by channel, row, column, the official ones by row, column, channel.
    shape = (layout.channels, layout.patch, layout.patch)
    order = torch.arange(math.prod(shape)).view(shape).movedim(0, -1).flatten()
    back = order.argsort()
    pixels = {"emb.0.weight": "embed.norm.weight", "emb.0.bias": "embed.norm.bias"}
    pixels["emb.1.weight"] = "embed.linear.weight"
    for theirs, ours in pixels.items():
        yield Entry(
            theirs, ours, lambda weight: weight[..., order], lambda weight: weight[..., back]
        )
    yield from _plain({"emb.1": "embed.linear"}, "bias")
    yield Entry("cls_token", "class_token", lambda weight: weight[None, None])
    yield from _plain({"emb.2": "embedding_norm", "fc.0": "norm", "fc.1": "head"})
    for layer in range(layout.layers):
        theirs, ours = f"enc.{layer}", f"backbone.layers.{layer}"
        yield from _layer_entries(theirs + ".attn", theirs, ours)
        gains = {f"{theirs}.attn.ln1_{k}": n for k, n in enumerate(("query", "key", "value"), 1)}
        gains[f"{theirs}.ln2"] = "memory"
        yield from _plain({key: f"{ours}.gains.{n}" for key, n in gains.items()}, "weight")
    if layout.network is not None:
        alone = "enc.0." if layout.alternative else ""
        first = "time_mlp" if layout.alternative else "time_mlp.0"
        last = "enc.0.time_mlp_inner" if layout.alternative else "time_mlp.1"
        # Official places count the sinusoids as the first; ours come without them.
        places = {f"{first}.{k}": f"{STEPS}.embedding.{k - 1}" for k in (1, 2, 4, 5, 6)}
        yield from _plain(places | {f"{alone}ln_inp": f"{STEPS}.inner"}, "weight")
        yield from _plain({key: places[key] for key in (f"{first}.1", f"{first}.5")}, "bias")
        twice = layout.network == "twice-normed"
        if twice:
            yield Entry(f"{last}.0.weight", f"{STEPS}.outer.weight")
        yield from _plain({f"{last}.{2 if twice else 1}": f"{STEPS}.last"})
    if layout.lora_rank:
        for theirs, ours in (("attention", "attention_deltas"), ("ff", "feedforward_deltas")):
            for side, name in (("B", "left"), ("A", "right")):
                key = f"backbone.layers.0.{ours}.{name}"
                for index in range(layout.iterations):
                    yield Entry(f"deltaW_{theirs}_{side}.{index}", key, part=index)


def _sudoku_entries(layout: OfficialLayout) -> Iterator[Entry]:
    if layout.positions == "learned":
        yield Entry("pos_emb", "position", lambda weight: weight[None])
    for layer in range(layout.layers):
        theirs, ours = f"blocks.{layer}", f"backbone.layers.{layer}"
        yield from _layer_entries(theirs + ".attn", theirs, ours)
        gains = {f"{theirs}.attn.ln1": "query", f"{theirs}.ln2": "memory"}
        yield from _plain({key: f"{ours}.gains.{n}" for key, n in gains.items()}, "weight")
        # The causal mask that the official Sudoku model keeps and never uses.
        yield Entry(f"{theirs}.attn.mask", None, lambda like: like.new_ones(1, 1, 81, 81).tril())
    yield from _plain({"tok_emb": "digits", "ln_f": "norm", "head": "head"}, "weight")
    places = {"time_mlp.0.1": "embedding.0", "time_mlp.0.3": "embedding.2", "time_mlp.1.1": "last"}
    yield from _plain({theirs: f"{STEPS}.{ours}" for theirs, ours in places.items()})


def _code_entries(layout: OfficialLayout) -> Iterator[Entry]:
    ours = "backbone.layers.0"
    yield from _layer_entries("transformer", "transformer", ours)
    weights = {"transformer.ln1": f"{ours}.gains.query", "transformer.ln2": f"{ours}.gains.memory"}
    weights |= {"transformer.time_mlp.1.0": f"{STEPS}.outer"}
    yield from _plain(weights | {"tok_emb": "embed", "lm_head.0": "norm"}, "weight")
    yield from _plain({"transformer.time_mlp.1.2": f"{STEPS}.last", "lm_head.1": "head"})


def _plain(keys: Mapping[str, str], *names: str) -> Iterator[Entry]:
    """Modules, official and ours, whose weight and bias (or ``names`` alone) are the same."""
    for theirs, ours in keys.items():
        for name in names or ("weight", "bias"):
            yield Entry(f"{theirs}.{name}", f"{ours}.{name}")


def _layer_entries(attention: str, theirs: str, ours: str) -> Iterator[Entry]:
    parts = {f"{attention}.qkv": "attention", f"{theirs}.mlp": "feedforward"}
    yield from _plain({key: f"{ours}.{n}.projection" for key, n in parts.items()}, "weight")


WRAPPERS = ("model_state_dict", "state_dict")  # in which the official checkpoints keep the weights
PREFIXES = ("model.", "module.")  # of all keys, from PyTorch Lightning and DistributedDataParallel
# The task by how keys begin; the keys of its first layer, and of the norm of the queries there.
PLACES = {
    "images": ("enc.", "enc.0.", "enc.0.attn.ln1_1.weight"),
    "sudoku": ("blocks.", "blocks.0.", "blocks.0.attn.ln1.weight"),
    "codes": ("transformer.", "transformer.", "transformer.ln1.weight"),
}


def unwrap(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights by their official keys, from a checkpoint or from its state dict alone."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict of tensors, got {type(state).__name__}")
    for wrapper in WRAPPERS:
        if isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
            break
    weights = dict(state)
    for prefix in PREFIXES * 2:  # in whichever order
        if weights and all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): weight for key, weight in weights.items()}
    for key, weight in weights.items():
        if not isinstance(weight, Tensor):
            raise TypeError(f"state[{key!r}] must be a tensor, got {type(weight).__name__}")
    return weights


def read_layout(weights: Mapping[str, Tensor], options: dict[str, Any]) -> OfficialLayout:
    """The layout of these weights; ``options`` says what they do not, as in ``load_official``."""
    require_count("channels", options["channels"])
    # 0 and "" are answers, to be refused as such.
    given = {name: value for name, value in options.items() if value is not None}
    tasks = [task for task in PLACES if any(key.startswith(PLACES[task][0]) for key in weights)]
    if not tasks:
        raise ValueError(
            "state must be of an official Hyper-SET, with keys that begin with 'enc.', 'blocks.' or "
            f"'transformer.', got {sorted(weights)[:4]}"
        )
    task, (start, part, norm) = tasks[0], PLACES[tasks[0]]
    dim, width = _size(weights, f"{part}mlp.weight", 1), _size(weights, norm, 0)
    if dim % width:
        raise ValueError(f"state[{norm!r}] must have a size that divides dim={dim}, got {width}")
    layout: dict[str, Any] = {"task": task, "dim": dim, "heads": dim // width, **DEFAULTS[task]}
    layout["memories"] = _size(weights, f"{part}mlp.weight", 0)
    if task != "codes":
        layout["layers"] = len({key.split(".")[1] for key in weights if key.startswith(start)})
    if task == "images":
        layout |= _read_images(weights, given)
    else:
        _refuse(given, f"for the weights of {task}", "image_size", "step", "lora_scale")
    if task == "sudoku":
        layout["time_dim"] = _size(weights, "time_mlp.0.1.weight", 1)
        layout["positions"] = "learned" if "pos_emb" in weights else "sincos"
    if task == "codes":
        layout["codes"] = _size(weights, "tok_emb.weight", 0) - 1
    return OfficialLayout(**layout | given)


def _read_images(weights: Mapping[str, Tensor], given: dict[str, Any]) -> dict[str, Any]:
    """What images alone have."""
    alternative = any(key.startswith("enc.0.time_mlp_inner.") for key in weights)
    network = None
    if alternative or "time_mlp.1.2.weight" in weights:
        network = "twice-normed"
    elif any(key.startswith("time_mlp.") for key in weights):
        network = "normed"
    if alternative and not {"attention", "feedforward"} & given.keys():
        raise ValueError(
            "attention or feedforward must be given for the official variants: their weights do not "
            "tell; got neither"
        )
    layout: dict[str, Any] = {"network": network, "alternative": alternative}
    layout["classes"] = _size(weights, "fc.1.weight", 0)
    layout["patch"] = math.isqrt(_size(weights, "emb.1.weight", 1) // given["channels"])
    needed = {"image_size": "the weights do not tell"}
    if network is None:
        needed["step"] = "the step sizes are fixed"
    else:
        _refuse(given, "where the weights have a network of the step sizes", "step")
        time = "time_mlp.1.weight" if alternative else "time_mlp.0.1.weight"
        layout["time_dim"] = _size(weights, time, 1)
    differences = sum(key.startswith("deltaW_attention_B.") for key in weights)
    if differences:
        needed["lora_scale"] = "the official alpha / r of the low-rank differences"
        if given.get("iterations", differences) != differences:
            raise ValueError(
                f"iterations must be {differences}, as many as there are differences of the weights, "
                f"got {given['iterations']}"
            )
        layout["iterations"] = differences
        layout["lora_rank"] = _size(weights, "deltaW_attention_B.0", 1)
    else:
        _refuse(given, "where the weights have no low-rank differences", "lora_scale")
    for name, reason in needed.items():
        if name not in given:
            raise ValueError(f"{name} must be given: {reason}, got None")
    return layout


def _refuse(given: Mapping[str, Any], where: str, *names: str) -> None:
    for name in names:
        if name in given:
            raise ValueError(f"{name} must be None {where}, got {given[name]!r}")


def _size(weights: Mapping[str, Tensor], key: str, dimension: int) -> int:
    """A size of the weight of this key."""
    if key not in weights:
        raise ValueError(f"state must have the key {key!r}, which is missing")
    weight = weights[key]
    if weight.dim() <= dimension or not weight.shape[dimension]:
        raise ValueError(
            f"state[{key!r}] must have more than {dimension} dimensions, none of size 0, got the "
            f"shape {tuple(weight.shape)}"
        )
    return weight.shape[dimension]


def load_official(
    state: Mapping[str, Any],
    *,
    iterations: int | None = None,
    image_size: int | None = None,
    channels: int = 3,
    side: int = 16,
    attention: str | None = None,
    feedforward: str | None = None,
    condition: str | None = None,
    descent: str = "plain",
    step: float | None = None,
    lora_scale: float | None = None,
) -> nn.Module:
    """Our model with the weights of an official Hyper-SET, in evaluation mode and the weights' dtype.

    The task, the sizes and the network of the step sizes are read off keys and shapes: image
    classification (``ImageClassifier``), with its variants, fixed steps and low-rank differences;
    Sudoku (``SudokuModel``); masked image modelling (``MaskedCodes``). What weights do not tell has to
    be said. Torch's random state stays as it is.

    Args:
        state: the state dict, or a checkpoint with it under "model_state_dict" or "state_dict".
        iterations: official ``n_recur``; None: 12, for Sudoku 24, as configured there.
        image_size: height = width of the images; needed for images, None for the others.
        channels: of the images.
        side: of the grid of codes, for masked image modelling.
        attention: a name of ``implicit_attn.energies.feedforward.ATTENTIONS``; None:
            "bisoftmax". Official "sigma" is "sigmoid", "sigma_square" is "sigmoid-squared", a
            feature map NAME is "linear-NAME", where "elup1" is our "elu" and "elu" our "plain-elu".
        feedforward: a name of ``FEEDFORWARDS`` there; None: "gelu" for images, else "relu". An
            official function NAME of the gated kind is "gated-NAME", and "gated" for GELU.
        condition: of the step sizes, "state" or "input" (official ``input_cond``); None: "state" for
            images, else "input".
        descent: one of ``DESCENTS`` (official ``adaptive_mode``).
        step: the step size where it is fixed; needed there, else None.
        lora_scale: official ``lora_alpha / lora_r``; needed with low-rank differences, else None.

    Raises:
        ValueError: keys are missing or superfluous, or weights have other shapes than the layout;
            all are named. Something that is needed is not given, or given where it has no meaning.
        TypeError: ``state`` is no dict of tensors.

    Source: the names and shapes are those of the official code of Hu, Zou, Xu, "Hyper-SET"
    (https://arxiv.org/abs/2502.11646), https://github.com/huyunzhe/hyper-set.
    """
    options: dict[str, Any] = {
        "iterations": iterations, "image_size": image_size, "channels": channels, "side": side,
        "attention": attention, "feedforward": feedforward, "condition": condition,
        "descent": descent, "step": step, "lora_scale": lora_scale,
    }  # fmt: skip
    weights = unwrap(state)
    layout = read_layout(weights, options)
    with torch.random.fork_rng(devices=[]):  # the weights that are drawn here are replaced
        model = layout.build()
    model = model.to(next(iter(weights.values())).dtype)
    table, ours = entries(layout), model.state_dict()
    _check(weights, {entry.official: entry.official_tensor(ours) for entry in table})
    with torch.no_grad():
        for entry in table:
            if entry.ours is not None:
                place = ours[entry.ours] if entry.part is None else ours[entry.ours][entry.part]
                place.copy_(entry.read(weights[entry.official]).view_as(place))
    return model.eval()


def to_official(model: nn.Module, *, alternative: bool = False) -> dict[str, Tensor]:
    """The weights of our model as the state dict of the official Hyper-SET: copies, on their device.

    Options that are no weights (iterations, the kind of attention, the condition) are not in it.

    Args:
        model: an ``ImageClassifier``, ``SudokuModel`` or ``MaskedCodes`` around a ``HyperSET``, with
            the options that the official code has (``OfficialLayout.build``).
        alternative: write the layout of the official variants of images.

    Raises:
        TypeError: ``model`` is none of these.
        ValueError: it has weights for which the official code has no place, or lacks some; they are
            named.
    """
    layout = _layout_of(model, alternative)
    # The step sizes of a single layer are the same thing, whoever owns them.
    own = "backbone.layers.0.step_sizes" if layout.layers == 1 else STEPS
    ours = {k.replace(own, STEPS): weight.detach() for k, weight in model.state_dict().items()}
    table = entries(layout)
    known = {entry.ours for entry in table if entry.ours is not None}
    lacking, left = sorted(known - ours.keys()), sorted(ours.keys() - known)
    problems = [f"lacks {', '.join(lacking)}"] if lacking else []
    problems += [f"has {', '.join(left)}, for which there is no place"] if left else []
    if problems:
        raise ValueError(f"model must be of the official layout; it {' and '.join(problems)}")
    return {entry.official: entry.official_tensor(ours).clone() for entry in table}


def _layout_of(model: nn.Module, alternative: bool) -> OfficialLayout:
    """The layout of a model, as far as it matters for the keys."""
    tasks = ((ImageClassifier, "images"), (SudokuModel, "sudoku"), (MaskedCodes, "codes"))
    task = next((name for kind, name in tasks if isinstance(model, kind)), None)
    backbone: Any = getattr(model, "backbone", None)
    if task is None or not isinstance(backbone, HyperSET):
        raise TypeError(
            "model must be an ImageClassifier, SudokuModel or MaskedCodes around a HyperSET, got "
            f"{type(model).__name__} around {type(backbone).__name__}"
        )
    layer: Any = backbone.layers[0]
    gains = getattr(layer, "gains", None)
    if gains is None or gains.memory.eps is not None:
        raise ValueError(
            "model must have trained gains and the official norms, HyperSET(gains=..., "
            "epsilon=None)"
        )
    network = getattr(layer.steps, "network", None)
    if network == "paper" or not (network or isinstance(layer.steps, PlainStepSizes)):
        raise ValueError(
            "model must take its step sizes from a network of the official code, HyperSET("
            "step_network=...), or fix them"
        )
    options: dict[str, Any] = {"task": task, "network": network}
    if isinstance(model, ImageClassifier):
        channels, size, _ = model.image_shape
        options |= {"channels": channels, "image_size": size, "alternative": alternative}
        options["patch"] = getattr(model.embed, "patch", 1)
    elif alternative:
        raise ValueError("alternative must be False but for images, got True")
    if task == "sudoku" and "position" not in model.state_dict():
        options["positions"] = "sincos"
    if layer.attention_deltas is not None:
        options["iterations"], _, options["lora_rank"] = layer.attention_deltas.left.shape
    memories, dim = layer.feedforward.weight.shape
    heads, layers = layer.attention.heads, len(backbone.layers)
    return OfficialLayout(dim=dim, heads=heads, memories=memories, layers=layers, **options)


def _check(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare keys, shapes and dtypes, and the constants among the weights."""
    missing, superfluous = sorted(expected.keys() - weights), sorted(weights.keys() - expected)
    problems = [f"{', '.join(map(repr, missing))} missing"] if missing else []
    problems += [f"{', '.join(map(repr, superfluous))} superfluous"] if superfluous else []
    for key in sorted(expected.keys() & weights):
        shape, wanted = tuple(weights[key].shape), tuple(expected[key].shape)
        if shape != wanted:
            problems.append(f"{key!r} of shape {shape}, expected {wanted}")
        elif key.endswith(".attn.mask") and not torch.equal(weights[key], expected[key]):
            problems.append(f"{key!r} must be the lower triangle of ones")
        elif weights[key].dtype != expected[key].dtype:
            problems.append(f"{key!r} of {weights[key].dtype}, expected {expected[key].dtype}")
    if problems:
        raise ValueError(f"state does not fit the official layout: {'; '.join(problems)}")


class Published(NamedTuple):
    """A published configuration.

    Attributes:
        layout: of the model.
        parameters: as printed, in millions.
        digits: printed behind the point.
        source: where it stands in the paper.
    """

    layout: OfficialLayout
    parameters: float
    digits: int
    source: str


def _images(dim: int, classes: int, **options: object) -> OfficialLayout:
    # Heads have 64 features in all sizes that the paper lists.
    return OfficialLayout("images", dim, dim // 64, dim, classes=classes, **options)  # type: ignore[arg-type]


def _cifar(dim: int, classes: int = 10, **options: object) -> OfficialLayout:
    # The network with one norm more is the one for training from scratch on CIFAR.
    return _images(dim, classes, network="twice-normed", **options)


def _imagenet(dim: int, classes: int = 1000, **options: object) -> OfficialLayout:
    return _images(dim, classes, image_size=224, patch=14, **options)


def _codes(ratio: int, iterations: int) -> OfficialLayout:
    options: dict[str, Any] = DEFAULTS["codes"] | {"iterations": iterations}
    return OfficialLayout("codes", 768, 12, ratio * 768, **options)


_SUDOKU = OfficialLayout("sudoku", 768, 12, 4 * 768, **DEFAULTS["sudoku"])
_LORA = "depth-wise LoRA on ImageNet-100"
_SCALED = "appendix, scaling results on images"
_COST = "appendix, parameter efficiency and computational cost"
_SINGLE = "image classification, recurrent depth"
_STACKED = "image classification, 12 layers"
# Not said in the paper: the printed numbers fit sinusoids as many as features, and not 512.
_WIDE_TIME = {"time_dim": 1536}
PUBLISHED: dict[str, Published] = {
    "cifar10-384": Published(_cifar(384), 0.96, 2, "image classification on CIFAR-10, version 3"),
    "cifar10-512": Published(_cifar(512), 1.61, 2, "image classification on CIFAR-10, version 3"),
    "cifar10-1536": Published(_cifar(1536, **_WIDE_TIME), 14.3, 1, _SCALED),
    "cifar100-1536": Published(_cifar(1536, 100, **_WIDE_TIME), 14.4, 1, _SCALED),
    "imagenet100-512": Published(_imagenet(512, 100), 1.93, 2, _LORA),
    "imagenet100-512-lora4": Published(_imagenet(512, 100, lora_rank=4), 2.03, 2, _LORA),
    "imagenet100-512-lora8": Published(_imagenet(512, 100, lora_rank=8), 2.13, 2, _LORA),
    "imagenet100-512-lora16": Published(_imagenet(512, 100, lora_rank=16), 2.33, 2, _LORA),
    "imagenet100-512-lora32": Published(_imagenet(512, 100, lora_rank=32), 2.72, 2, _LORA),
    "imagenet1k-384": Published(_imagenet(384), 1.55, 2, _COST),
    "imagenet1k-384-fixed": Published(_imagenet(384, network=None, step=0.1), 0.91, 2, _COST),
    "imagenet1k-512": Published(_imagenet(512), 2.39, 2, _SINGLE),
    "imagenet1k-640": Published(_imagenet(640), 3.40, 2, _SINGLE),
    "imagenet1k-512-12": Published(_imagenet(512, layers=12, iterations=1), 8.17, 2, _STACKED),
    "imagenet1k-768-12": Published(_imagenet(768, layers=12, iterations=1), 17.56, 2, _STACKED),
    "sudoku": Published(_SUDOKU, 5.20, 2, "appendix, solving Sudoku"),
    "codes": Published(_codes(1, 12), 3.94, 2, "appendix, masked image modeling"),
    "codes-wide": Published(_codes(8, 24), 8.07, 2, "masked image modeling, 24 iterations"),
}


def build_official(name: str) -> nn.Module:
    """Our model of a published configuration of Hyper-SET, with new random weights.

    Args:
        name: a key of ``PUBLISHED``: the data and the width d; "12" stands for twelve layers, each
            once. ``PUBLISHED[name].parameters`` is the number in the paper.

    Example:
        >>> model = build_official("cifar10-384")
        >>> sum(weight.numel() for weight in model.parameters())
        962602

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646.
    """
    return PUBLISHED[require_choice("name", name, PUBLISHED)].layout.build()


def convert(
    official: Path,
    ours: Path,
    /,
    iterations: int | None = None,
    image_size: int | None = None,
    channels: int = 3,
    attention: str | None = None,
    feedforward: str | None = None,
    step: float | None = None,
    lora_scale: float | None = None,
) -> None:
    """Write the weights of an official checkpoint as our model's; options as of ``load_official``."""
    options: Any = {
        name: value for name, value in locals().items() if name not in ("official", "ours")
    }
    model = load_official(torch.load(official, map_location="cpu", weights_only=True), **options)
    save_model(model, str(ours))
    print(
        f"{ours}: {type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters"
    )


if __name__ == "__main__":
    import tyro

    tyro.cli(convert)
