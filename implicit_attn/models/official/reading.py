"""What the weights of an official Hyper-SET say of its layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from implicit_attn.models.official.layout import OfficialLayout
from solvers.core.checks import require_count

WRAPPERS = ("model_state_dict", "state_dict")  # in which the official checkpoints keep the weights
PREFIXES = ("model.", "module.")  # of all keys, from PyTorch Lightning and DistributedDataParallel
ITERATIONS = {"images": 12, "sudoku": 24, "codes": 12}
CONDITION = {"images": "state", "sudoku": "input", "codes": "input"}


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
    for prefix, reader in (("enc.", _images), ("blocks.", _sudoku), ("transformer.", _codes)):
        if any(key.startswith(prefix) for key in weights):
            return reader(weights, options)
    raise ValueError(
        "state must be of an official Hyper-SET, with keys that begin with 'enc.', 'blocks.' or "
        f"'transformer.', got {sorted(weights)[:4]}"
    )


def _images(weights: Mapping[str, Tensor], options: dict[str, Any]) -> OfficialLayout:
    alternative = any(key.startswith("enc.0.time_mlp_inner.") for key in weights)
    network = None
    if alternative or "time_mlp.1.2.weight" in weights:
        network = "twice-normed"
    elif any(key.startswith("time_mlp.") for key in weights):
        network = "normed"
    if alternative and options["attention"] is None and options["feedforward"] is None:
        raise ValueError(
            "attention or feedforward must be given for the official variants: their weights do not "
            "tell; got neither"
        )
    if network is None and options["step"] is None:
        raise ValueError("step must be given where the step sizes are fixed, got None")
    if network is not None:
        _refuse("step", options, "where the weights have a network of the step sizes")
    if options["image_size"] is None:
        raise ValueError("image_size must be given: the weights do not tell, got None")
    differences = sum(key.startswith("deltaW_attention_B.") for key in weights)
    if differences and options["iterations"] not in (None, differences):
        raise ValueError(
            f"iterations must be {differences}, as many as there are differences of the weights, got "
            f"{options['iterations']}"
        )
    if differences and options["lora_scale"] is None:
        raise ValueError("lora_scale must be given, the official alpha / r, got None")
    if not differences:
        _refuse("lora_scale", options, "where the weights have no low-rank differences")
    channels = options["channels"]
    patch = math.isqrt(_size(weights, "emb.1.weight", 1) // channels)
    time = "time_mlp.1.weight" if alternative else "time_mlp.0.1.weight"
    shared = _shared("images", weights, options, "enc.0.", "enc.0.attn.ln1_1.weight")
    if differences:
        shared |= {"iterations": differences, "lora_scale": options["lora_scale"]}
        shared["lora_rank"] = _size(weights, "deltaW_attention_B.0", 1)
    return OfficialLayout(
        network=network,
        alternative=alternative,
        feedforward=_given(options, "feedforward", "gelu"),
        time_dim=_size(weights, time, 1) if network else 512,
        step=_given(options, "step", 1.0),
        layers=_count(weights, "enc."),
        channels=channels,
        image_size=options["image_size"],
        patch=patch,
        classes=_size(weights, "fc.1.weight", 0),
        **shared,
    )


def _sudoku(weights: Mapping[str, Tensor], options: dict[str, Any]) -> OfficialLayout:
    return OfficialLayout(
        network="raw",
        feedforward=_given(options, "feedforward", "relu"),
        time_dim=_size(weights, "time_mlp.0.1.weight", 1),
        layers=_count(weights, "blocks."),
        positions="learned" if "pos_emb" in weights else "sincos",
        **_shared("sudoku", weights, options, "blocks.0.", "blocks.0.attn.ln1.weight"),
    )


def _codes(weights: Mapping[str, Tensor], options: dict[str, Any]) -> OfficialLayout:
    return OfficialLayout(
        network="sinusoids",
        feedforward=_given(options, "feedforward", "relu"),
        codes=_size(weights, "tok_emb.weight", 0) - 1,
        side=options["side"],
        **_shared("codes", weights, options, "transformer.", "transformer.ln1.weight"),
    )


def _shared(
    task: str, weights: Mapping[str, Tensor], options: dict[str, Any], part: str, norm: str
) -> dict[str, Any]:
    """What the tasks have in common, read from the keys that begin with ``part``."""
    if task != "images":
        for name in ("image_size", "step", "lora_scale"):
            _refuse(name, options, f"for the weights of {task}")
    dim, width = _size(weights, f"{part}mlp.weight", 1), _size(weights, norm, 0)
    if dim % width:
        raise ValueError(f"state[{norm!r}] must have a size that divides dim={dim}, got {width}")
    return {
        "task": task,
        "dim": dim,
        "heads": dim // width,
        "memories": _size(weights, f"{part}mlp.weight", 0),
        "iterations": _given(options, "iterations", ITERATIONS[task]),
        "attention": _given(options, "attention", "bisoftmax"),
        "condition": _given(options, "condition", CONDITION[task]),
        "descent": options["descent"],
    }


def _given(options: Mapping[str, Any], name: str, default: Any) -> Any:
    """The option, or the default where it is None: 0 and "" are answers, to be refused as such."""
    return default if options[name] is None else options[name]


def _refuse(name: str, options: Mapping[str, Any], where: str) -> None:
    if options[name] is not None:
        raise ValueError(f"{name} must be None {where}, got {options[name]!r}")


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


def _count(weights: Mapping[str, Tensor], prefix: str) -> int:
    """How many layers' keys begin with ``prefix`` and a number."""
    rests = (key.removeprefix(prefix) for key in weights if key.startswith(prefix))
    return len({rest.split(".")[0] for rest in rests})
