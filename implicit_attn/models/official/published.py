"""The configurations of Hyper-SET whose number of parameters is published."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from implicit_attn.models.official.layout import OfficialLayout
from solvers.core.checks import require_choice


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
    options = {"network": "sinusoids", "feedforward": "relu", "condition": "input"}
    return OfficialLayout("codes", 768, 12, ratio * 768, iterations=iterations, **options)  # type: ignore[arg-type]


_SUDOKU = OfficialLayout(
    "sudoku", 768, 12, 4 * 768, iterations=24, network="raw", feedforward="relu", condition="input"
)
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
