"""A vision transformer around any backbone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.models.patches import (
    PatchEmbedding,
    TokenClassifier,
    build_stem,
    count_patches,
    token_width,
)
from implicit_attn.updates.step_sizes import LONGEST_PERIOD
from solvers.core.checks import require_choice, require_count, require_flag

POSITIONS = ("sinusoidal", "learned", "none")
READOUTS = ("class", "mean", "tokens")


def sinusoidal_positions(count: int, dim: int) -> Tensor:
    """Sines in even and cosines in odd channels, (count, dim); periods 2 pi to 2 pi 10^4
    (Vaswani et al., https://arxiv.org/abs/1706.03762, section 3.5)."""
    if dim % 2:
        raise ValueError(f"dim must be even for sinusoidal positions, got {dim}")
    frequencies = LONGEST_PERIOD ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(count, dtype=torch.float64).unsqueeze(-1) * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()


def grid_positions(side: int, dim: int) -> Tensor:
    """Sines and cosines of the column, then of the row, of each cell: (side^2, dim), float32.

    With ``f_k = 10^4^(-4 k / dim)``, k from 0 to dim/4 - 1, a cell in row r and column c has
    ``(sin c f, cos c f, sin r f, cos r f)``, a quarter of the channels each; the rows of the grid come
    one after another.

    Raises:
        ValueError: ``dim`` is not a multiple of 4.

    Source: He et al., "Masked Autoencoders" (https://arxiv.org/abs/2111.06377), as in the official code
    of Hyper-SET (https://arxiv.org/abs/2502.11646).
    """
    side, dim = require_count("side", side), require_count("dim", dim)
    if dim % 4:
        raise ValueError(f"dim must be a multiple of 4 for positions of a grid, got {dim}")
    frequencies = LONGEST_PERIOD ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    angles = torch.arange(side, dtype=torch.float64).unsqueeze(-1) * frequencies
    line = torch.cat([angles.sin(), angles.cos()], dim=-1)  # (side, dim / 2)
    columns, rows = line.repeat(side, 1), line.repeat_interleave(side, 0)
    return torch.cat([columns, rows], dim=-1).float()


class ImageClassifier(TokenClassifier):
    """Patch tokens of an image through a backbone, then a linear readout.

    Args:
        backbone: module with ``dim``, ``iterations`` and ``forward(tokens, *, iterations)``.
        image_size: height = width of an image, a multiple of ``patch``.
        channels, classes: image channels, number of classes.
        patch: height = width of a patch in pixels. ("Patch 8" of the Hyper-SET paper on CIFAR-10
            must be 8 patches a side, of 4 pixels: its number of parameters fits only that.)
        positions: "sinusoidal" (added, constant), "learned" (initially N(0, 0.02^2)) or "none".
        readout: "class" reads a class token, "mean" the mean of all tokens, "tokens" all of them.
        stem: "patch" embeds linearly, "conv" through a 3x3 convolution.
        embedding_norm: LayerNorm after the embedding.
        pixel_norm: LayerNorm of a patch's pixels before the embedding, as in Hyper-SET's official
            code; for the stem "patch".

    Shapes: images (B, C, S, S) -> logits (B, classes). The class token comes first.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (https://arxiv.org/abs/2010.11929);
    Hu, Zou, Xu, "Hyper-SET" (https://arxiv.org/abs/2502.11646).
    """

    def __init__(
        self,
        backbone: nn.Module,
        image_size: int,
        channels: int,
        classes: int,
        *,
        patch: int = 4,
        positions: str = "sinusoidal",
        readout: str = "class",
        stem: str = "patch",
        embedding_norm: bool = True,
        pixel_norm: bool = False,
    ) -> None:
        super().__init__(channels, image_size, require_choice("readout", readout, READOUTS))
        dim, patches = token_width(backbone), count_patches(image_size, patch)
        self.positions = require_choice("positions", positions, POSITIONS)
        linear: Any = PatchEmbedding
        if require_flag("pixel_norm", pixel_norm):
            if stem != "patch":
                raise ValueError(f"pixel_norm must be False for the stem {stem!r}, got True")
            linear = partial(PatchEmbedding, pixel_norm=True)
        self.embed = build_stem(stem, linear, channels, image_size, patch, dim)
        self.embedding_norm = nn.LayerNorm(dim) if embedding_norm else nn.Identity()
        self.class_token = nn.Parameter(torch.randn(dim)) if readout == "class" else None
        count = patches + (readout == "class")
        if positions == "learned":
            self.position = nn.Parameter(0.02 * torch.randn(count, dim))
        elif positions == "sinusoidal":
            self.register_buffer("position", sinusoidal_positions(count, dim), persistent=False)
        self.backbone = backbone
        width = patches * dim if readout == "tokens" else dim
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(width, require_count("classes", classes))

    def tokens(self, images: Tensor) -> Tensor:
        """Images -> the backbone's input, (B, N, d)."""
        x = self.with_class_token(self.embedding_norm(self.embed(self.check_images(images))))
        if self.positions == "none":
            return x
        # Some loaders convert weights to half precision and leave what is no weight as it is.
        return x + self.position.to(self.norm.weight.dtype)

    def forward(self, images: Tensor, iterations: int | None = None) -> Tensor:
        return self.classify(self.backbone(self.tokens(images), iterations=iterations))


ViT = ImageClassifier
