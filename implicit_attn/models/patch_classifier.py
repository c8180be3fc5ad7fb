"""An image classifier around one equilibrium layer that an energy defines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.deq import DEQ
from implicit_attn.energies import BiSoftmaxAttention, Energy, Quadratic, ReLUFeedForward
from implicit_attn.models.patches import (
    PatchConvolution,
    TokenClassifier,
    build_stem,
    count_patches,
)
from solvers.core.checks import require_choice, require_count

READOUTS = ("tokens", "class")


class PatchClassifier(TokenClassifier):
    r"""Patch tokens x of an image, the minimiser z* of an energy, and a linear readout of z*.

    The energy of the tokens z for the tokens x of the image is ::

        E(z, x) = a E_bisoftmax(z) + b E_relu(z) + 1/2 |z - x|^2

    with learned weights 0 < a, b < ``maximum``. The spectral norms of the projections are bounded,
    so that training keeps to weights for which the solver converges.

    Args:
        image_size: height = width of an image, a multiple of ``patch``.
        channels, classes: image channels, number of classes.
        patch: height = width of a patch.
        stem: "patch" embeds each patch linearly, "conv" through a 3x3 convolution.
        dim, heads: features d of a token, attention heads.
        memories: rows M of the feed-forward energy.
        readout: "tokens" reads out all tokens, "class" an additional class token.
        bound: bound on the spectral norms.
        weight: initial value of a and b.
        maximum: bound on a and b.
        layer: options of :class:`DEQ` (solver, tolerance, max_steps, ...).

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).

    Source: the energy is that of Hu, Zou, Xu, "Hyper-SET" (https://arxiv.org/abs/2502.11646,
    equations 3 to 8), with a soft norm.
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
        super().__init__(channels, image_size, require_choice("readout", readout, READOUTS))
        tokens, dim = count_patches(image_size, patch), require_count("dim", dim)
        self.embed = build_stem(stem, PatchConvolution, channels, image_size, patch, dim)
        self.position = nn.Parameter(0.5 * torch.randn(tokens, dim))
        self.class_token = nn.Parameter(torch.randn(dim)) if readout == "class" else None
        energy: Energy = (
            BiSoftmaxAttention(dim, heads, bound=bound).weighted(weight, maximum)
            + ReLUFeedForward(dim, memories, bound=bound).weighted(weight, maximum)
            + Quadratic()
        )
        self.layer = DEQ(energy, **(layer or {}))
        self.norm = nn.LayerNorm(dim)
        width = dim if readout == "class" else tokens * dim
        self.head = nn.Linear(width, require_count("classes", classes))

    def tokens(self, images: Tensor) -> Tensor:
        """Images -> the layer's input x, (B, N, d)."""
        return self.with_class_token(self.embed(self.check_images(images)) + self.position)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.layer(self.tokens(images)))
