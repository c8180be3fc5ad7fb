"""What an official Hyper-SET is made of, in one record, and our model of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from implicit_attn.energies.hyperset_energy import ATTENTIONS, FEEDFORWARDS
from implicit_attn.models.hyperset import HyperSET
from implicit_attn.models.image_classifier import ImageClassifier
from implicit_attn.models.official.masked_codes import MaskedCodes
from implicit_attn.models.sudoku import SudokuModel
from implicit_attn.updates.official.descent import DESCENTS
from solvers.core.checks import require_choice, require_count, require_positive

TASKS = ("images", "sudoku", "codes")
NETWORKS = {
    "images": ("normed", "twice-normed", None),
    "sudoku": ("raw",),
    "codes": ("sinusoids",),
}
CONDITIONS = ("state", "input")


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
        attention, feedforward: names of ``ATTENTIONS`` and ``FEEDFORWARDS``. Images have "gelu" in
            place of the paper's "relu" but for the variants of the feed-forward part.
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
        require_choice("task", self.task, TASKS)
        for name in ("dim", "heads", "memories", "layers", "iterations"):
            require_count(name, getattr(self, name))
        if self.network not in NETWORKS[self.task]:
            raise ValueError(
                f"network must be one of {NETWORKS[self.task]} for task={self.task!r}, got "
                f"{self.network!r}"
            )
        require_choice("attention", self.attention, ATTENTIONS)
        require_choice("feedforward", self.feedforward, FEEDFORWARDS)
        require_choice("condition", self.condition, CONDITIONS)
        require_choice("descent", self.descent, DESCENTS)
        require_positive("step", self.step)
        images = self.task == "images"
        if self.alternative and not (
            images and self.layers == 1 and self.network == "twice-normed"
        ):
            raise ValueError(
                "alternative must be False but for images, one layer and network='twice-normed'; got "
                f"task={self.task!r}, layers={self.layers}, network={self.network!r}"
            )
        if self.lora_rank and not (images and self.layers == 1 and self.memories == self.dim):
            raise ValueError(
                "lora_rank must be 0 but for images, one layer and memories = dim; got "
                f"{self.lora_rank} for task={self.task!r}, layers={self.layers}, "
                f"memories={self.memories}, dim={self.dim}"
            )
        if self.task == "codes":
            self._check_codes()

    def _check_codes(self) -> None:
        if self.layers != 1:
            raise ValueError(f"layers must be 1 for task='codes', got {self.layers}")
        if self.descent not in ("plain", "momentum"):
            raise ValueError(
                "descent must be 'plain' or 'momentum' for task='codes', whose official code takes "
                f"fixed steps with the others, got {self.descent!r}"
            )

    def build(self) -> nn.Module:
        """Our model of this layout, with new random weights."""
        backbone = HyperSET(self.dim, self.heads, self.memories, **self._backbone())
        if self.task == "images":
            return ImageClassifier(
                backbone, self.image_size, self.channels, self.classes, patch=self.patch,
                pixel_norm=True,
            )  # fmt: skip
        if self.task == "sudoku":
            # The dropout in training is the official code's; evaluation has none.
            return SudokuModel(backbone, dropout=0.1, positions=self.positions, final_norm="rms")
        return MaskedCodes(backbone, codes=self.codes, side=self.side)

    @property
    def beta(self) -> float | None:
        """The inverse temperature where it is not ``1 / sqrt(p)``."""
        if self.task == "images" and self.attention == "relu":
            return 1.0  # the official code leaves the temperature out there
        if self.task == "codes" and self.attention.startswith("linear"):
            return 1.0 / self.side  # (number of tokens)^-1/2
        return None

    def _backbone(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "layers": self.layers,
            "iterations": self.iterations,
            "attention": self.attention,
            "feedforward": self.feedforward,
            "epsilon": None,
            "beta": self.beta,
            "descent": self.descent,
            "gains": "separate" if self.task == "images" else "shared",
        }
        if self.lora_rank:
            options |= {"lora_rank": self.lora_rank, "lora_scale": self.lora_scale}
        if self.network is None:
            return options | {"step_size": "fixed", "initial_step": self.step}
        return options | {
            "step_size": f"conditioned-{self.condition}",
            "step_network": self.network,
            "time_dim": self.dim if self.task == "codes" else self.time_dim,
            "share_steps": True,
        }
