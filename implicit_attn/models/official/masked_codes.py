"""Masked image modelling: the codes of an image's patches as tokens around any backbone."""

from __future__ import annotations

from torch import Tensor, nn

from implicit_attn.models.image_classifier import grid_positions
from implicit_attn.models.patches import token_width
from solvers.core.checks import require_count


class MaskedCodes(nn.Module):
    """The codes of a square grid of patches as tokens of a backbone; logits of the codes everywhere.

    A quantiser makes one of so many codes of each patch. A token is the embedding of the code, or of
    "masked", plus the position in the grid (``grid_positions``). An RMS norm and a linear readout give
    the logits.

    Args:
        backbone: module with ``dim`` and ``forward(tokens (B, N, d), *, iterations=None)``.
        codes: number of codes; the integer ``codes`` itself stands for "masked".
        side: of the grid, N = side^2 tokens.

    Shapes: integers (B, N) or (B, side, side) from 0 to ``codes`` -> logits (B, N, codes).

    Source: the masked image modelling of Hu, Zou, Xu, "Hyper-SET"
    (https://arxiv.org/abs/2502.11646, appendix), after Chang et al., "MaskGIT"
    (https://arxiv.org/abs/2202.04200).
    """

    position: Tensor

    def __init__(self, backbone: nn.Module, *, codes: int = 1024, side: int = 16) -> None:
        super().__init__()
        dim = token_width(backbone)
        self.codes, self.side = require_count("codes", codes), require_count("side", side)
        self.embed = nn.Embedding(codes + 1, dim)
        self.register_buffer("position", grid_positions(side, dim), persistent=False)
        self.backbone = backbone
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, codes)

    def tokens(self, codes: Tensor) -> Tensor:
        """Codes -> the backbone's input, (B, N, d)."""
        shapes = ((self.side**2,), (self.side, self.side))
        if codes.is_floating_point() or tuple(codes.shape[1:]) not in shapes:
            raise ValueError(
                f"codes must be integers (B, {self.side**2}) or (B, {self.side}, {self.side}), got "
                f"{codes.dtype} {tuple(codes.shape)}"
            )
        return self.embed(codes.flatten(1)) + self.position

    def classify(self, z: Tensor) -> Tensor:
        """States of the tokens (B, N, d) -> logits (B, N, codes)."""
        return self.head(self.norm(z))

    def forward(self, codes: Tensor, iterations: int | None = None) -> Tensor:
        return self.classify(self.backbone(self.tokens(codes), iterations=iterations))
