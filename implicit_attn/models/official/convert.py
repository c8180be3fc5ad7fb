"""Official weights of Hyper-SET into our model, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.models.hyperset import HyperSET
from implicit_attn.models.image_classifier import ImageClassifier
from implicit_attn.models.official.entries import STEPS, Entry, entries
from implicit_attn.models.official.layout import OfficialLayout
from implicit_attn.models.official.masked_codes import MaskedCodes
from implicit_attn.models.official.reading import read_layout, unwrap
from implicit_attn.models.sudoku import SudokuModel
from implicit_attn.updates.official.networks import OfficialStepSizes
from implicit_attn.updates.step_sizes import PlainStepSizes


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
        attention: a name of ``implicit_attn.energies.hyperset_energy.ATTENTIONS``; None:
            "bisoftmax". Official "sigma" is "sigmoid", "sigma_square" is "sigmoid-squared", a
            feature map NAME is "linear-NAME", where "elup1" is our "elu" and "elu" our "plain-elu".
        feedforward: a name of ``FEEDFORWARDS`` there; None: "gelu" for images, else "relu". An
            official function NAME of the gated kind is "gated-NAME", and "gated" for GELU.
        condition: of the step sizes, "state" or "input" (official ``input_cond``); None: "state" for
            images, else "input".
        descent: one of ``Descent``'s kinds (official ``adaptive_mode``).
        step: the step size where it is fixed; needed there, else None.
        lora_scale: official ``lora_alpha / lora_r``; needed with low-rank differences, else None.

    Raises:
        ValueError: keys are missing or superfluous, or weights have other shapes than the layout;
            all are named. Something that is needed is not given, or given where it has no meaning.
        TypeError: ``state`` is no dict of tensors.

    Example:
        >>> from implicit_attn.models.official import build_official, to_official
        >>> model = build_official("sudoku")
        >>> state = to_official(model)
        >>> state["time_mlp.1.1.weight"].shape
        torch.Size([1536, 768])
        >>> again = load_official(state)
        >>> all(torch.equal(state[name], weight) for name, weight in to_official(again).items())
        True

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
    _check(weights, {entry.official: _official(entry, ours) for entry in table})
    parts: dict[str, list[Tensor]] = {}
    for entry in table:
        if entry.ours is not None:
            parts.setdefault(entry.ours, []).append(entry.read(weights[entry.official]))
    whole = {entry.ours for entry in table if entry.part is None}
    read = {key: each[0] if key in whole else torch.stack(each) for key, each in parts.items()}
    model.load_state_dict(read)
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
    own = "backbone.layers.0.step_sizes."
    single = layout.layers == 1
    ours = {
        key.replace(own, f"{STEPS}.") if single else key: weight.detach()
        for key, weight in model.state_dict().items()
    }
    table = entries(layout)
    lacking = sorted({entry.ours for entry in table if entry.ours is not None} - ours.keys())
    left = sorted(ours.keys() - {entry.ours for entry in table})
    if lacking or left:
        problems = [f"lacks {', '.join(lacking)}"] if lacking else []
        problems += [f"has {', '.join(left)}, for which there is no place"] if left else []
        raise ValueError(f"model must be of the official layout; it {' and '.join(problems)}")
    return {entry.official: _official(entry, ours).clone() for entry in table}


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
    if layer.gains is None or layer.gains.memory.eps is not None:
        raise ValueError(
            "model must have trained gains and the official norms, HyperSET(gains=..., "
            "epsilon=None)"
        )
    options: dict[str, Any] = {"task": task, "network": _network_of(layer.step_sizes)}
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


def _network_of(step_sizes: nn.Module) -> str | None:
    if isinstance(step_sizes, OfficialStepSizes):
        return step_sizes.network
    if isinstance(step_sizes, PlainStepSizes):
        return None
    raise ValueError(
        "model must take its step sizes from a network of the official code, HyperSET("
        "step_network=...), or fix them"
    )


def _official(entry: Entry, ours: Mapping[str, Tensor]) -> Tensor:
    """The official tensor of an entry, from our weights."""
    if entry.ours is None:
        return entry.write(next(iter(ours.values())))
    weight = ours[entry.ours]
    return entry.write(weight if entry.part is None else weight[entry.part])


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
