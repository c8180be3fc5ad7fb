"""Models of images in patches around any backbone: classifiers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.updates.hyperset import LONGEST_PERIOD
from solvers.core.checks import require_choice, require_count, require_flag

STEMS = ("patch", "conv")


class PatchEmbedding(nn.Module):
    """Images (B, C, S, S) -> tokens (B, (S / patch)^2, dim): ``nn.Linear`` of a patch's pixels.

    With ``pixel_norm`` a LayerNorm over the pixels of each patch comes first.
    """

    def __init__(self, channels: int, patch: int, dim: int, pixel_norm: bool = False) -> None:
        super().__init__()
        self.patch = patch
        self.linear = nn.Linear(channels * patch**2, dim)
        self.norm = nn.LayerNorm(channels * patch**2) if pixel_norm else None

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, size, _ = images.shape
        side = size // self.patch
        parts = images.reshape(batch, channels, side, self.patch, side, self.patch)
        parts = parts.permute(0, 2, 4, 1, 3, 5).reshape(batch, side * side, -1)
        return self.linear(parts if self.norm is None else self.norm(parts))


class PatchConvolution(nn.Conv2d):
    """As ``PatchEmbedding``, by a convolution whose stride is the patch."""

    def __init__(self, channels: int, patch: int, dim: int) -> None:
        super().__init__(channels, dim, patch, stride=patch)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).flatten(2).mT


class ConvolutionalStem(nn.Module):
    """Images (B, C, S, S) -> tokens (B, (S / patch)^2, dim).

    A 3x3 convolution, a learned offset per pixel, GELU, and the patch embedding. The offset comes
    before the nonlinearity, so that a token depends on where in the image its pixels are.
    """

    def __init__(self, channels: int, image_size: int, patch: int, dim: int) -> None:
        super().__init__()
        width = max(dim // 2, 8)
        self.local = nn.Conv2d(channels, width, 3, padding=1)
        self.position = nn.Parameter(0.5 * torch.randn(width, image_size, image_size))
        self.embed = PatchConvolution(width, patch, dim)

    def forward(self, images: Tensor) -> Tensor:
        return self.embed(F.gelu(self.local(images) + self.position))


def build_stem(
    stem: str, linear: type[nn.Module], channels: int, image_size: int, patch: int, dim: int
) -> nn.Module:
    """``linear(channels, patch, dim)`` for the stem "patch", ``ConvolutionalStem`` for "conv"."""
    if require_choice("stem", stem, STEMS) == "patch":
        return linear(channels, patch, dim)
    return ConvolutionalStem(channels, image_size, patch, dim)


def token_width(backbone: object) -> int:
    """The features d of a backbone's tokens, its attribute ``dim``."""
    dim = getattr(backbone, "dim", None)
    if not isinstance(backbone, nn.Module) or not isinstance(dim, int):
        raise TypeError(
            "backbone must be a module (B, N, d) -> (B, N, d) with an integer attribute dim, "
            f"got {type(backbone)}"
        )
    return dim


def count_patches(image_size: int, patch: int) -> int:
    """Patches of a square image."""
    if require_count("image_size", image_size) % require_count("patch", patch):
        raise ValueError(f"patch must divide image_size={image_size}, got {patch}")
    return (image_size // patch) ** 2


def check_images(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """``images`` themselves, if they are (B, channels, image_size, image_size)."""
    if images.dim() != 4 or tuple(images.shape[1:]) != shape:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"images must have shape (B, {expected}), got {tuple(images.shape)}")
    return images


class TokenClassifier(nn.Module):
    """Base of the image classifiers, which differ in how tokens are made and what acts on them.

    A subclass sets ``class_token`` (a vector (d,) or None), ``norm`` and ``head``, in the order in
    which their initial values are to be drawn.
    """

    class_token: nn.Parameter | None
    norm: nn.LayerNorm
    head: nn.Linear

    def __init__(self, channels: int, image_size: int, readout: str) -> None:
        super().__init__()
        size = require_count("image_size", image_size)
        self.image_shape = (require_count("channels", channels), size, size)
        self.readout = readout

    def with_class_token(self, x: Tensor) -> Tensor:
        """The class token, where there is one, in front of the tokens (B, N, d)."""
        if self.class_token is None:
            return x
        return torch.cat([self.class_token.expand(x.shape[0], 1, -1).to(x.dtype), x], dim=1)

    def classify(self, z: Tensor) -> Tensor:
        """States of the tokens (B, N, d) -> logits (B, classes)."""
        if self.readout == "class":
            return self.head(self.norm(z[:, 0]))
        z = self.norm(z)
        return self.head(z.mean(1) if self.readout == "mean" else z.flatten(1))


POSITIONS = ("sinusoidal", "learned")
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
        positions: "sinusoidal" (added, constant), or "learned" (initially N(0, 0.02^2)).
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
        if require_flag("pixel_norm", pixel_norm) and stem != "patch":
            raise ValueError(f"pixel_norm must be False for the stem {stem!r}, got True")
        linear: Any = partial(PatchEmbedding, pixel_norm=pixel_norm)
        self.embed = build_stem(stem, linear, channels, image_size, patch, dim)
        self.embedding_norm = nn.LayerNorm(dim) if embedding_norm else nn.Identity()
        self.class_token = nn.Parameter(torch.randn(dim)) if readout == "class" else None
        count = patches + (readout == "class")
        if require_choice("positions", positions, POSITIONS) == "learned":
            self.position = nn.Parameter(0.02 * torch.randn(count, dim))
        else:
            self.register_buffer("position", sinusoidal_positions(count, dim), persistent=False)
        self.backbone = backbone
        width = patches * dim if readout == "tokens" else dim
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(width, require_count("classes", classes))

    def tokens(self, images: Tensor) -> Tensor:
        """Images -> the backbone's input, (B, N, d)."""
        patches = self.embed(check_images(images, self.image_shape))
        x = self.with_class_token(self.embedding_norm(patches))
        # Some loaders convert weights to half precision and leave what is no weight as it is.
        return x + self.position.to(self.norm.weight.dtype)

    def forward(self, images: Tensor, iterations: int | None = None) -> Tensor:
        return self.classify(self.backbone(self.tokens(images), iterations=iterations))
