"""What the image classifiers share: images become tokens, the states of the tokens become logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solvers.core.checks import require_choice, require_count

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

    def check_images(self, images: Tensor) -> Tensor:
        """``images`` themselves, if they are (B, channels, image_size, image_size)."""
        if images.dim() != 4 or tuple(images.shape[1:]) != self.image_shape:
            raise ValueError(
                f"images must have shape (B, {', '.join(map(str, self.image_shape))}), got "
                f"{tuple(images.shape)}"
            )
        return images

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
