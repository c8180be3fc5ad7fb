"""A small image classifier around one energy-defined equilibrium layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.deq import DEQ
from implicit_attn.energies import BiSoftmaxAttention, Energy, Quadratic, ReLUFeedForward

READOUTS = ("tokens", "class")


class ConvolutionalStem(nn.Module):
    """Images (B, C, S, S) -> features (B, dim, S / patch, S / patch).

    A 3x3 convolution, a learned offset per pixel, GELU, and the patch embedding: pixels meet their
    position before the nonlinearity, so that what a token says depends on where it says it.
    """

    def __init__(self, channels: int, image_size: int, patch: int, dim: int) -> None:
        super().__init__()
        width = max(dim // 2, 8)
        self.local = nn.Conv2d(channels, width, 3, padding=1)
        self.position = nn.Parameter(0.5 * torch.randn(width, image_size, image_size))
        self.embed = nn.Conv2d(width, dim, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.embed(nn.functional.gelu(self.local(images) + self.position))


def build_stem(stem: str, channels: int, image_size: int, patch: int, dim: int) -> nn.Module:
    """The part that turns images into features (B, dim, H / patch, W / patch)."""
    if stem == "patch":
        return nn.Conv2d(channels, dim, patch, stride=patch)
    if stem == "conv":
        return ConvolutionalStem(channels, image_size, patch, dim)
    raise ValueError(f'stem must be "patch" or "conv", got {stem!r}')


class PatchClassifier(nn.Module):
    r"""Patches -> tokens x -> minimiser z* of an energy -> linear readout.

    The energy of the tokens z for the embedded image x is ::

        E(z, x) = a E_bisoftmax(z) + b E_relu(z) + 1/2 |z - x|^2

    with learned weights 0 < a, b < ``maximum`` and projections whose spectral norms are bounded, so
    that training cannot walk to where the equilibrium is lost.

    Args:
        image_size: height = width of an image, a multiple of ``patch``.
        channels: image channels.
        classes: number of classes.
        patch: height = width of a patch.
        stem: "patch" embeds each patch linearly, "conv" through a small convolution.
        dim: features d of a token.
        heads: attention heads.
        memories: rows M of the feed-forward energy.
        readout: "tokens" reads out all tokens, "class" an additional class token.
        bound: bound on the spectral norms.
        weight: a and b at the start.
        maximum: bound on a and b.
        layer: options of :class:`DEQ` (solver, tolerance, max_steps, ...).

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).

    Source: the energy is Hyper-SET's (Hu, Zou, Xu, arXiv 2502.11646, eqs. 3-8) with a soft norm.
    """

    def __init__(
        self,
        image_size: int,
        channels: int,
        classes: int,
        *,
        patch: int = 2,
        stem: str = "conv",
        dim: int = 64,
        heads: int = 4,
        memories: int = 128,
        readout: str = "tokens",
        bound: float = 2.0,
        weight: float = 0.5,
        maximum: float = 2.0,
        layer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        sizes = {"image_size": image_size, "channels": channels, "classes": classes, "patch": patch}
        for name, size in (sizes | {"dim": dim}).items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        if image_size % patch:
            raise ValueError(f"patch must divide image_size={image_size}, got {patch}")
        if readout not in READOUTS:
            raise ValueError(f"readout must be one of {READOUTS}, got {readout!r}")
        self.readout = readout
        self.image_shape = (channels, image_size, image_size)
        tokens = (image_size // patch) ** 2
        self.embed = build_stem(stem, channels, image_size, patch, dim)
        self.position = nn.Parameter(0.5 * torch.randn(tokens, dim))
        self.class_token = nn.Parameter(torch.randn(dim)) if readout == "class" else None
        energy: Energy = (
            BiSoftmaxAttention(dim, heads, bound=bound).weighted(weight, maximum)
            + ReLUFeedForward(dim, memories, bound=bound).weighted(weight, maximum)
            + Quadratic()
        )
        self.layer = DEQ(energy, **(layer or {}))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim if readout == "class" else tokens * dim, classes)

    def tokens(self, images: Tensor) -> Tensor:
        """Images -> the layer's input x, (B, N, d)."""
        if images.dim() != 4 or tuple(images.shape[1:]) != self.image_shape:
            raise ValueError(
                f"images must have shape (B, {', '.join(map(str, self.image_shape))}), got "
                f"{tuple(images.shape)}"
            )
        x = self.embed(images).flatten(2).mT + self.position
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], 1, -1), x], dim=1)
        return x

    def classify(self, z: Tensor) -> Tensor:
        """Equilibrium z (B, N, d) -> logits (B, classes)."""
        z = self.norm(z)
        return self.head(z[:, 0] if self.class_token is not None else z.flatten(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.layer(self.tokens(images)))
