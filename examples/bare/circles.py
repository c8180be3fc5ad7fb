"""Images as tokens on circles: each pixel an angle, each patch a token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CircleTokens:
    r"""Images (B, C, H, W) in [0, 1] as tokens (B, N, 2p) of points on unit circles, and back.

    A value v becomes the angle ``pi v`` and the point ``(cos pi v, sin pi v)``, so 0 and 1 lie
    opposite; the p values of a patch, all channels, make a token of norm ``sqrt p``. Patches are
    counted row by row; ``patch`` is the side of one and divides H and W.
    """

    channels: int
    height: int
    width: int
    patch: int

    @property
    def sites(self) -> int:
        """N, the patches of an image."""
        return (self.height // self.patch) * (self.width // self.patch)

    @property
    def values(self) -> int:
        """p, the values of a patch."""
        return self.channels * self.patch**2

    @property
    def dim(self) -> int:
        """2p, the components of a token."""
        return 2 * self.values

    def encode(self, images: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] -> (B, N, 2p)."""
        return points(math.pi * self.patches(images))

    def decode(self, tokens: Tensor) -> Tensor:
        """(B, N, 2p) -> (B, C, H, W), see :meth:`decode_patches`."""
        return self.images(self.decode_patches(tokens))

    def decode_patches(self, tokens: Tensor) -> Tensor:
        """(..., 2p) -> values (..., p): those whose points are nearest to the direction of each pair.

        Directions outside the half circle of the values go to its nearer end, a pair (0, 0) to 0.
        """
        cosine, sine = tokens.unflatten(-1, (self.values, 2)).unbind(-1)
        return torch.atan2(sine.clamp_min(0.0).abs(), cosine) / math.pi  # -0.0 would give -1

    def patches(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, p), any values."""
        size = self.patch
        # (B, C, rows, s, columns, s)
        tiles = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))
        return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def images(self, patches: Tensor) -> Tensor:
        """(B, N, p) -> (B, C, H, W), the inverse of :meth:`patches`."""
        size = self.patch
        rows, columns = self.height // size, self.width // size
        tiles = patches.reshape(len(patches), rows, columns, self.channels, size, size)
        return tiles.permute(0, 3, 1, 4, 2, 5).reshape(-1, self.channels, self.height, self.width)

    def noisy(self, tokens: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
        """``tokens`` (..., 2p) with normal noise of standard deviation ``sigma`` on every angle."""
        cosine, sine = tokens.unflatten(-1, (self.values, 2)).unbind(-1)
        noise = torch.randn(cosine.shape, generator=generator, dtype=tokens.dtype)
        return points(torch.atan2(sine, cosine) + sigma * noise)

    def random(self, count: int, generator: torch.Generator) -> Tensor:
        """``count`` images of independent uniform angles as tokens (count, N, 2p), float32."""
        shape = (count, self.sites, self.values)
        return points(2 * math.pi * torch.rand(shape, generator=generator))


def points(angles: Tensor) -> Tensor:
    """Angles (..., p) -> points (..., 2p) on unit circles, cosine and sine in turn."""
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(-2)


def principal_features(dim: int, tokens: Tensor) -> Tensor:
    """The ``dim`` orthonormal directions (dim, D) that hold most of the tokens (B, N, D), float32.

    Of the second moments about 0, so the mean direction is among them. The largest entry of each row
    is positive.
    """
    flat = tokens.flatten(0, -2).double()
    rows = torch.linalg.eigh(flat.mT @ flat)[1].mT.flip(0)[:dim]
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return (rows * largest.sign()).float().contiguous()


def random_features(dim: int, width: int, generator: torch.Generator) -> Tensor:
    """A random ``F`` (dim, width) with orthonormal rows, float32: fixed features of tokens."""
    drawn = torch.randn(width, dim, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(drawn)[0].mT.float().contiguous()
