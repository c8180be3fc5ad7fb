"""The models of Hyper-SET's official code: built as published, and loaded from its weights.

    python tools/convert_hyperset.py official.pt ours.safetensors --image-size 32

reads a checkpoint of https://github.com/huyunzhe/hyper-set and writes our model's state dict as safetensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from implicit_attn.models import HyperSET, ImageClassifier, SudokuModel

WRAPPERS = ("model_state_dict", "state_dict")  # in which the official checkpoints keep the weights
PREFIXES = ("model.", "module.")  # of all keys, from PyTorch Lightning and DistributedDataParallel
LAYER, STEPS = r"backbone.layers.\1", "backbone.step_sizes"
# The beginning of an official key and of ours. The official variants of images keep their step sizes in
# the first layer; the first three rules bring them into the layout of the others.
NAMES = {
    r"enc\.0\.time_mlp_inner\.": "time_mlp.1.",
    r"enc\.0\.ln_inp\.": "ln_inp.",
    r"time_mlp\.(\d\.(?:weight|bias))$": r"time_mlp.0.\1",
    r"time_mlp\.0\.1\.": f"{STEPS}.embedding.0.",  # the official network counts the sinusoids as the first
    r"time_mlp\.0\.2\.": f"{STEPS}.embedding.1.",
    r"time_mlp\.0\.3\.": f"{STEPS}.embedding.2.",
    r"time_mlp\.0\.4\.": f"{STEPS}.embedding.3.",
    r"time_mlp\.0\.5\.": f"{STEPS}.embedding.4.",
    r"time_mlp\.0\.6\.": f"{STEPS}.embedding.5.",
    r"time_mlp\.1\.0\.": f"{STEPS}.outer.",
    r"time_mlp\.1\.[12]\.": f"{STEPS}.last.",
    r"ln_inp\.": f"{STEPS}.inner.",
    r"(?:enc|blocks)\.(\d+)\.attn\.qkv\.": f"{LAYER}.attention.projection.",
    r"(?:enc|blocks)\.(\d+)\.mlp\.": f"{LAYER}.feedforward.projection.",
    r"(?:enc|blocks)\.(\d+)\.attn\.ln1(?:_1)?\.": f"{LAYER}.gains.query.",
    r"enc\.(\d+)\.attn\.ln1_2\.": f"{LAYER}.gains.key.",
    r"enc\.(\d+)\.attn\.ln1_3\.": f"{LAYER}.gains.value.",
    r"(?:enc|blocks)\.(\d+)\.ln2\.": f"{LAYER}.gains.memory.",
    r"deltaW_attention_B\.": "backbone.layers.0.attention_deltas.left.",
    r"deltaW_attention_A\.": "backbone.layers.0.attention_deltas.right.",
    r"deltaW_ff_B\.": "backbone.layers.0.feedforward_deltas.left.",
    r"deltaW_ff_A\.": "backbone.layers.0.feedforward_deltas.right.",
    r"emb\.0\.": "embed.norm.",
    r"emb\.1\.": "embed.linear.",
    r"emb\.2\.": "embedding_norm.",
    r"fc\.0\.": "norm.",
    r"fc\.1\.": "head.",
    r"cls_token": "class_token",
    r"tok_emb\.": "digits.",
    r"pos_emb": "position",
    r"ln_f\.": "norm.",
}


def build_official(
    task: str,
    dim: int,
    heads: int,
    memories: int,
    *,
    network: str | None,
    step: float | None = None,
    condition: str = "state",
    lora: tuple[int, float] | None = None,
    around: Mapping[str, Any],
    **options: Any,
) -> nn.Module:
    """Build a model of Hyper-SET's official code with new random weights.

    Args:
        task: "images" (an ``ImageClassifier``) or "sudoku" (a ``SudokuModel``).
        dim, heads, memories: as for ``HyperSET``.
        network: network of the step sizes, "normed" or "twice-normed" for images, "raw" for Sudoku; None
            for the fixed ``step``.
        condition: condition of the step sizes, "state" or "input".
        lora: rank and scale of the differences between iterations.
        around: arguments of the model around the backbone, such as ``image_size`` or ``positions``.
        options: further arguments of ``HyperSET``.
    """
    images = task == "images"
    options |= {"gains": "separate" if images else "shared", "epsilon": None}
    if images and options.get("attention") == "relu":
        options["beta"] = 1.0  # the official code has no temperature there
    if lora is not None:
        options |= {"lora_rank": lora[0], "lora_scale": lora[1]}
    if network is None:
        options |= {"step_size": "fixed", "initial_step": step}
    else:
        options |= {"step_size": f"conditioned-{condition}", "share_steps": True}
        options["step_network"] = network
    backbone = HyperSET(dim, heads, memories, **options)
    if images:
        return ImageClassifier(backbone, pixel_norm=True, **around)
    # The dropout in training is the official code's; evaluation has none.
    return SudokuModel(backbone, dropout=0.1, final_norm="rms", **around)


def rename(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of an official checkpoint, or of its state dict alone, by our keys.

    A key without a rule in ``NAMES`` stays as it is, so that loading the weights refuses it.
    """
    for wrapper in WRAPPERS:
        state = state.get(wrapper, state)
    for prefix in PREFIXES * 2:  # in either order
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): weight for key, weight in state.items()}
    ours: dict[str, Tensor] = {}
    for key, weight in state.items():
        if key.endswith(".attn.mask"):  # a causal mask that the official Sudoku model never uses
            continue
        name = key
        for pattern, begin in NAMES.items():
            name = re.sub(f"^{pattern}", begin, name)
        ours[name] = weight[0, 0] if key == "cls_token" else weight
        if key == "pos_emb":
            ours[name] = weight[0]
    # The official code keeps a weight for each iteration, ours one for all of them.
    stacks = {key.rpartition(".")[0] for key in ours if "_deltas." in key}
    for stack in stacks:
        count = sum(key.startswith(f"{stack}.") for key in ours)
        ours[stack] = torch.stack([ours.pop(f"{stack}.{index}") for index in range(count)])
    return ours


def load_official(
    state: Mapping[str, Any],
    *,
    iterations: int | None = None,
    image_size: int | None = None,
    channels: int = 3,
    attention: str | None = None,
    feedforward: str | None = None,
    condition: str | None = None,
    descent: str = "plain",
    step: float | None = None,
    lora_scale: float | None = None,
) -> nn.Module:
    """Return our model with the weights of an official Hyper-SET, in evaluation mode and their dtype.

    The task, the sizes and the network of the step sizes are read from keys and shapes: image
    classification (``ImageClassifier``), with its variants, fixed steps and low-rank differences, or
    Sudoku (``SudokuModel``). Torch's random state does not change.

    Args:
        state: the state dict, or a checkpoint with it under "model_state_dict" or "state_dict".
        iterations: official ``n_recur``; None: 12, for Sudoku 24, as configured there.
        image_size: height = width of the images; needed for images, else None.
        channels: of the images.
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
        ValueError: if a weight that tells a size is missing, or an option is missing or has no meaning
            for these weights.
        RuntimeError: if other weights are missing or superfluous or have other shapes; by our keys.

    Source: the names and shapes are those of the official code of Hu, Zou, Xu, "Hyper-SET"
    (https://arxiv.org/abs/2502.11646), https://github.com/huyunzhe/hyper-set.
    """
    weights = rename(state)

    def sizes(key: str) -> tuple[int, ...]:
        if key not in weights:
            raise ValueError(f"state must contain {key!r} (our name), got {sorted(weights)[:4]}")
        return tuple(weights[key].shape)

    memories, dim = sizes("backbone.layers.0.feedforward.projection.weight")
    (width,) = sizes("backbone.layers.0.gains.query.weight")
    images, variant = "class_token" in weights, any("time_mlp_inner" in key for key in state)
    network = None if images else "raw"
    if f"{STEPS}.inner.weight" in weights:
        network = "twice-normed" if f"{STEPS}.outer.weight" in weights else "normed"
    deltas = "backbone.layers.0.attention_deltas.left"
    fixed, differs = network is None, deltas in weights
    options = {"image_size": image_size, "step": step, "lora_scale": lora_scale}
    for (name, value), needed in zip(options.items(), (images, fixed, differs), strict=True):
        if (value is not None) != needed:
            wanted = "given" if needed else "None"
            raise ValueError(f"{name} must be {wanted} for these weights, got {value}")
    if variant and attention is None and feedforward is None:
        raise ValueError(
            "attention or feedforward must be given for official variants, got neither"
        )
    if images:
        patch = math.isqrt(sizes("embed.linear.weight")[1] // channels)
        around: dict[str, Any] = {"image_size": image_size, "channels": channels, "patch": patch}
        around["classes"] = sizes("head.weight")[0]
        # Our pixels are ordered by channel, row, column, the official ones by row, column, channel.
        order = torch.arange(patch * patch * channels).view(patch, patch, channels)
        for key in ("embed.norm.weight", "embed.norm.bias", "embed.linear.weight"):
            weights[key] = weights[key][..., order.movedim(-1, 0).flatten()]
    else:
        around = {"positions": "learned" if "position" in weights else "sincos"}
    more: dict[str, Any] = {} if fixed else {"time_dim": sizes(f"{STEPS}.embedding.0.weight")[1]}
    if differs:
        iterations, _, rank = sizes(deltas)
        more["lora"] = rank, lora_scale
    dtype = weights["head.weight"].dtype
    with torch.random.fork_rng(devices=[]):  # the weights that are drawn here are replaced
        model = build_official(
            "images" if images else "sudoku",
            dim,
            dim // width,
            memories,
            network=network,
            step=step,
            condition=condition or ("state" if images else "input"),
            around=around,
            layers=sum(key.endswith("attention.projection.weight") for key in weights),
            iterations=iterations or (12 if images else 24),
            attention=attention or "bisoftmax",
            feedforward=feedforward or ("gelu" if images else "relu"),
            descent=descent,
            **more,
        )
    model = model.to(dtype).eval()
    model.load_state_dict(weights)
    return model


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
