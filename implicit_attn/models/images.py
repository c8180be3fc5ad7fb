"""Image models with any backbone: classifiers and masked patches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.updates.hyperset import LONGEST_PERIOD
from solvers.core.checks import require_choice, require_count, require_flag

STEMS = ("patch", "conv")


def split_patches(images: Tensor, patch: int) -> Tensor:
    """Return the pixels of the patches of images, (B, C, S, S) -> (B, N, C patch^2), row by row.

    Raises:
        RuntimeError: if ``patch`` does not divide S.
    """
    return F.pixel_unshuffle(images, patch).flatten(2).mT


def join_patches(pixels: Tensor, patch: int) -> Tensor:
    """The inverse of :func:`split_patches`: (B, N, C patch^2) -> (B, C, S, S), S = sqrt(N) patch."""
    side = math.isqrt(pixels.shape[1])
    return F.pixel_shuffle(pixels.mT.unflatten(2, (side, side)), patch)


def hidden_patches(images: Tensor, patch: int) -> Tensor:
    """(B, N) bool, True where a patch of the images (B, C, S, S) holds a NaN."""
    return split_patches(images, patch).isnan().any(-1)


def hide_patches(images: Tensor, hidden: Tensor, patch: int) -> Tensor:
    """The images (B, C, S, S) with NaN in all pixels of the patches ``hidden`` (B, N) bool."""
    pixels = split_patches(images, patch)
    return join_patches(pixels.masked_fill(hidden.unsqueeze(-1), math.nan), patch)


class PatchEmbedding(nn.Module):
    """Embed images (B, C, S, S) as tokens (B, (S / patch)^2, dim) by ``nn.Linear`` of a patch's pixels.

    With ``pixel_norm`` a LayerNorm over the pixels of each patch precedes it.
    """

    def __init__(self, channels: int, patch: int, dim: int, pixel_norm: bool = False) -> None:
        super().__init__()
        self.patch = patch
        self.linear = nn.Linear(channels * patch**2, dim)
        self.norm = nn.LayerNorm(channels * patch**2) if pixel_norm else None

    def forward(self, images: Tensor) -> Tensor:
        parts = split_patches(images, self.patch)
        return self.linear(parts if self.norm is None else self.norm(parts))


class ConvolutionalStem(nn.Module):
    """Embed images (B, C, S, S) as tokens (B, (S / patch)^2, dim) by convolutions.

    It applies a 3x3 convolution, a learned offset per pixel, GELU, and a convolution with stride ``patch``.
    Since the offset precedes the nonlinearity, a token depends on the position of its pixels.
    """

    def __init__(self, channels: int, image_size: int, patch: int, dim: int) -> None:
        super().__init__()
        width = max(dim // 2, 8)
        self.local = nn.Conv2d(channels, width, 3, padding=1)
        self.position = nn.Parameter(0.5 * torch.randn(width, image_size, image_size))
        self.embed = nn.Conv2d(width, dim, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.embed(F.gelu(self.local(images) + self.position)).flatten(2).mT


def count_patches(image_size: int, patch: int) -> int:
    """Return the number of patches of a square image."""
    if require_count("image_size", image_size) % require_count("patch", patch):
        raise ValueError(f"patch must divide image_size={image_size}, got {patch}")
    return (image_size // patch) ** 2


def check_images(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return ``images`` if they have the shape (B, *shape), else raise ValueError."""
    if images.dim() != 4 or tuple(images.shape[1:]) != shape:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"images must have the shape (B, {expected}), got {tuple(images.shape)}")
    return images


class TokenClassifier(nn.Module):
    """Base class of image classifiers.

    A subclass sets ``class_token`` (a vector (d,) or None), ``norm`` and ``head``, in the order of drawing
    their initial values.
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
        """Prepend the class token, if there is one, to the tokens (B, N, d)."""
        if self.class_token is None:
            return x
        return torch.cat([self.class_token.expand(x.shape[0], 1, -1).to(x.dtype), x], dim=1)

    def classify(self, z: Tensor) -> Tensor:
        """Convert states of the tokens (B, N, d) to logits (B, classes)."""
        if self.readout == "class":
            return self.head(self.norm(z[:, 0]))
        z = self.norm(z)
        return self.head(z.mean(1) if self.readout == "mean" else z.flatten(1))


POSITIONS = ("sinusoidal", "learned")
READOUTS = ("class", "mean", "tokens")


def _angles(count: int, dim: int) -> Tensor:
    """Return ``i 10^4^(-2 k / dim)`` for i < count and k < dim/2, (count, dim / 2), float64."""
    exponents = torch.arange(dim // 2, dtype=torch.float64) / (dim // 2)
    return torch.arange(count, dtype=torch.float64).unsqueeze(-1) * LONGEST_PERIOD**-exponents


def sinusoidal_positions(count: int, dim: int) -> Tensor:
    """Return sines in even and cosines in odd channels, (count, dim), with periods 2 pi to 2 pi 10^4
    (Vaswani et al., https://arxiv.org/abs/1706.03762, section 3.5)."""
    if dim % 2:
        raise ValueError(f"dim must be even for sinusoidal positions, got {dim}")
    angles = _angles(count, dim)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()


def grid_positions(side: int, dim: int) -> Tensor:
    """Return sines and cosines of the column, then of the row, of each cell, (side^2, dim), float32.

    With ``f_k = 10^4^(-4 k / dim)``, k from 0 to dim/4 - 1, a cell in row r and column c has
    ``(sin c f, cos c f, sin r f, cos r f)``, a quarter of the channels each, in row-major order.

    Source: He et al., "Masked Autoencoders" (https://arxiv.org/abs/2111.06377), as in the official code
    of Hyper-SET (https://arxiv.org/abs/2502.11646).
    """
    if dim % 4:
        raise ValueError(f"dim must be a multiple of 4 for 2-D sinusoidal positions, got {dim}")
    angles = _angles(side, dim // 2)
    line = torch.cat([angles.sin(), angles.cos()], dim=-1)  # (side, dim / 2)
    return torch.cat([line.repeat(side, 1), line.repeat_interleave(side, 0)], dim=-1).float()


class ImageClassifier(TokenClassifier):
    """Image classifier with a patch embedding, a backbone and a linear readout.

    Args:
        backbone: module with ``dim`` and ``forward(tokens, *, iterations)``.
        image_size: height = width of an image, a multiple of ``patch``.
        channels, classes: number of image channels and of classes.
        patch: height = width of a patch in pixels. ("Patch 8" of the Hyper-SET paper on CIFAR-10
            must mean 8 patches of 4 pixels per side, according to its number of parameters.)
        positions: "sinusoidal" (added, constant), or "learned" (initially N(0, 0.02^2)).
        readout: "class" for a class token, "mean" for the mean of all tokens, "tokens" for all tokens.
        stem: "patch" for a linear embedding, "conv" for one with a 3x3 convolution.
        embedding_norm: whether a LayerNorm follows the embedding.
        pixel_norm: whether a LayerNorm of a patch's pixels precedes the embedding, as in Hyper-SET's
            official code; for the stem "patch" only.

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
        dim: Any = backbone.dim
        patches = count_patches(image_size, patch)
        if require_flag("pixel_norm", pixel_norm) and stem != "patch":
            raise ValueError(f"pixel_norm must be False for the stem {stem!r}, got True")
        self.embed: nn.Module
        if require_choice("stem", stem, STEMS) == "patch":
            self.embed = PatchEmbedding(channels, patch, dim, pixel_norm)
        else:
            self.embed = ConvolutionalStem(channels, image_size, patch, dim)
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
        """Convert images to the backbone's input, (B, N, d)."""
        patches = self.embed(check_images(images, self.image_shape))
        x = self.with_class_token(self.embedding_norm(patches))
        # Loaders that convert only parameters leave this buffer in its dtype.
        return x + self.position.to(self.norm.weight.dtype)

    def forward(self, images: Tensor, iterations: int | None = None) -> Tensor:
        return self.classify(self.backbone(self.tokens(images), iterations=iterations))


class MaskedImageModel(nn.Module):
    r"""Model that predicts the pixels of masked patches from the visible ones ::

        x_i = W p_i + w + position_i   of a visible patch with pixels p_i
        x_i = mask token + position_i  of a masked patch
        predicted pixels of patch i = V LN(backbone(x)_i) + v

    A patch with a NaN pixel is masked, and only its position reaches the backbone. No norm precedes the
    backbone, because it would remove the brightness of a patch.

    Args:
        backbone: module with ``dim`` and ``forward(tokens (B, N, d), *, iterations=None)``; Hyper-SET's
            paper uses ``step_size="conditioned-input"`` here.
        image_size, channels, patch: S, C, and the height = width of a patch, which divides S.
        positions: "learned" (added, initially N(0, 0.5^2)) or "sinusoidal" (``grid_positions``).

    Shapes: images (B, C, S, S) -> images (B, C, S, S), every patch predicted; :meth:`fill` keeps the
    visible pixels.

    Example:
        >>> from implicit_attn.models import HyperSET
        >>> model = MaskedImageModel(HyperSET(64, 4, 64), 8, 1, patch=2)
        >>> images = torch.rand(3, 1, 8, 8)
        >>> images[:, :, :2, :2] = float("nan")  # mask the first patch
        >>> model.fill(images).isnan().any().item()
        False

    Source: the masked image modelling of Hu, Zou, Xu, "Hyper-SET"
    (https://arxiv.org/abs/2502.11646), with pixels of patches instead of codes of a pretrained
    quantiser; Xie et al., "SimMIM" (https://arxiv.org/abs/2111.09886), for predicting pixels by a
    linear readout.
    """

    def __init__(
        self,
        backbone: nn.Module,
        image_size: int,
        channels: int,
        *,
        patch: int = 4,
        positions: str = "learned",
    ) -> None:
        super().__init__()
        dim: Any = backbone.dim
        patches = count_patches(image_size, patch)
        self.patch, self.positions = patch, require_choice("positions", positions, POSITIONS)
        self.image_shape = (require_count("channels", channels), image_size, image_size)
        self.embed = PatchEmbedding(channels, patch, dim)
        self.mask_token = nn.Parameter(0.02 * torch.randn(dim))
        if positions == "learned":
            self.position = nn.Parameter(0.5 * torch.randn(patches, dim))
        else:
            places = grid_positions(image_size // patch, dim)
            self.register_buffer("position", places, persistent=False)
        self.backbone = backbone
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, channels * patch**2)

    def tokens(self, images: Tensor) -> Tensor:
        """Convert images with NaN in masked patches to the backbone's input, (B, N, d)."""
        hidden = hidden_patches(check_images(images, self.image_shape), self.patch).unsqueeze(-1)
        # NaN times zero is NaN, so masked pixels are replaced before any product.
        x = self.embed(images.masked_fill(images.isnan(), 0.0))
        return torch.where(hidden, self.mask_token.to(x.dtype), x) + self.position

    def pixels(self, z: Tensor) -> Tensor:
        """Convert states (B, N, d) to predicted images (B, C, S, S)."""
        return join_patches(self.head(self.norm(z)), self.patch)

    def forward(self, images: Tensor, iterations: int | None = None) -> Tensor:
        return self.pixels(self.backbone(self.tokens(images), iterations=iterations))

    def fill(self, images: Tensor, iterations: int | None = None) -> Tensor:
        """Return the images with NaN replaced by the predicted pixels."""
        return torch.where(images.isnan(), self(images, iterations).to(images.dtype), images)

    def extra_repr(self) -> str:
        return f"image_shape={self.image_shape}, patch={self.patch}, positions={self.positions}"
