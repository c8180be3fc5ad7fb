"""Vision transformer around any backbone: patches, positions, readout."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from implicit_attn.models.patch_classifier import ConvolutionalStem
from implicit_attn.updates.step_sizes import LONGEST_PERIOD
from solvers.core.checks import require_count

POSITIONS = ("sinusoidal", "learned", "none")
READOUTS = ("class", "mean", "tokens")
STEMS = ("patch", "conv")


class Backbone(Protocol):
    """Tokens (B, N, d) -> tokens (B, N, d) in a number of iterations."""

    dim: int
    iterations: int

    def __call__(self, x: Tensor, *, iterations: int | None = None) -> Tensor: ...


def sinusoidal_positions(count: int, dim: int) -> Tensor:
    """Sines in even and cosines in odd channels, (count, dim); periods 2 pi to 2 pi 10^4.

    Source: Vaswani et al. (2017), section 3.5.
    """
    if dim % 2:
        raise ValueError(f"dim must be even for sinusoidal positions, got {dim}")
    frequencies = LONGEST_PERIOD ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(count, dtype=torch.float64).unsqueeze(-1) * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()


class PatchEmbedding(nn.Module):
    """Images (B, C, S, S) -> tokens (B, (S / patch)^2, dim), patch by patch, row by row.

    ``nn.Linear`` of the pixels of a patch, channels first.
    """

    def __init__(self, channels: int, patch: int, dim: int) -> None:
        super().__init__()
        self.patch = patch
        self.linear = nn.Linear(channels * patch**2, dim)

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, size, _ = images.shape
        side = size // self.patch
        parts = images.reshape(batch, channels, side, self.patch, side, self.patch)
        parts = parts.permute(0, 2, 4, 1, 3, 5).reshape(batch, side * side, -1)
        return self.linear(parts)


class _ConvolutionalEmbedding(ConvolutionalStem):
    """The same shapes through a 3x3 convolution with a place per pixel."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).flatten(2).mT


class ImageClassifier(nn.Module):
    """Images -> tokens -> backbone -> logits.

    Args:
        backbone: module with ``dim``, ``iterations`` and ``forward(tokens, *, iterations)``.
        image_size: height = width of an image, a multiple of ``patch``.
        channels: image channels.
        classes: number of classes.
        patch: height = width of a patch in pixels (the paper's "patch 8" on CIFAR-10 is 8 patches
            a side, of 4 pixels each: its parameter count says so).
        positions: "sinusoidal" (added, constant), "learned" (N(0, 0.02^2) at first) or "none".
        readout: "class" reads a class token, "mean" the mean of all tokens, "tokens" all of them.
        stem: "patch" embeds linearly, "conv" through a 3x3 convolution.
        embedding_norm: LayerNorm after the embedding.

    Shapes: images (B, C, S, S) -> logits (B, classes). The class token comes first.

    Source: Dosovitskiy et al. (2021); Hu, Zou, Xu, "Hyper-SET" (arXiv 2502.11646).
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
    ) -> None:
        super().__init__()
        dim = _check_backbone(backbone)
        sizes = {"image_size": image_size, "channels": channels, "classes": classes, "patch": patch}
        for name, size in sizes.items():
            require_count(name, size)
        if image_size % patch:
            raise ValueError(f"patch must divide image_size={image_size}, got {patch}")
        _check_choice("positions", positions, POSITIONS)
        _check_choice("readout", readout, READOUTS)
        _check_choice("stem", stem, STEMS)
        self.readout, self.positions = readout, positions
        self.image_shape = (channels, image_size, image_size)
        if stem == "patch":
            self.embed = PatchEmbedding(channels, patch, dim)
        else:
            self.embed = _ConvolutionalEmbedding(channels, image_size, patch, dim)
        self.embedding_norm = nn.LayerNorm(dim) if embedding_norm else nn.Identity()
        self.class_token = nn.Parameter(torch.randn(dim)) if readout == "class" else None
        patches = (image_size // patch) ** 2
        count = patches + (readout == "class")
        if positions == "learned":
            self.position = nn.Parameter(0.02 * torch.randn(count, dim))
        elif positions == "sinusoidal":
            self.register_buffer("position", sinusoidal_positions(count, dim), persistent=False)
        self.backbone = backbone
        width = patches * dim if readout == "tokens" else dim
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(width, classes)

    def tokens(self, images: Tensor) -> Tensor:
        """Images -> the backbone's input, (B, N, d)."""
        if images.dim() != 4 or tuple(images.shape[1:]) != self.image_shape:
            raise ValueError(
                f"images must have shape (B, {', '.join(map(str, self.image_shape))}), got "
                f"{tuple(images.shape)}"
            )
        x = self.embedding_norm(self.embed(images))
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], 1, -1).to(x.dtype), x], dim=1)
        return x if self.positions == "none" else x + self.position

    def classify(self, z: Tensor) -> Tensor:
        """A state (B, N, d) -> logits (B, classes)."""
        if self.readout == "class":
            return self.head(self.norm(z[:, 0]))
        z = self.norm(z)
        return self.head(z.mean(1) if self.readout == "mean" else z.flatten(1))

    def forward(self, images: Tensor, iterations: int | None = None) -> Tensor:
        return self.classify(self.backbone(self.tokens(images), iterations=iterations))


ViT = ImageClassifier


def _check_backbone(backbone: Any) -> int:
    if not isinstance(backbone, nn.Module):
        raise TypeError(f"backbone must be a module (B, N, d) -> (B, N, d), got {backbone!r}")
    dim = getattr(backbone, "dim", None)
    if not isinstance(dim, int):
        raise TypeError(f"backbone must have an integer attribute dim, got {type(backbone)}")
    return dim


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
