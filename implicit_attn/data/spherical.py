"""Images as tokens on circles: each pixel an angle, each patch a token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.checks import require_count, require_nonnegative


@dataclass(frozen=True)
class CircleTokens:
    r"""Images (B, C, H, W) in [0, 1] as tokens (B, N, 2p) of points on unit circles, and back.

    A value v becomes the angle ``pi v`` and the point ``(cos pi v, sin pi v)``, so 0 and 1 lie
    opposite; the p values of a patch, all channels, make a token of norm ``sqrt p``. Patches are
    counted row by row.

    Args:
        channels, height, width: C, H, W of the images.
        patch: side of a square patch; it divides H and W.

    Raises:
        ValueError: a size below 1, or a patch that does not divide the image.
    """

    channels: int
    height: int
    width: int
    patch: int

    def __post_init__(self) -> None:
        for name in ("channels", "height", "width", "patch"):
            require_count(name, getattr(self, name))
        if self.height % self.patch or self.width % self.patch:
            raise ValueError(
                f"patch must divide the image of {self.height} x {self.width}, got {self.patch}"
            )

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
        """(B, C, H, W) in [0, 1] -> (B, N, 2p).

        Raises:
            TypeError, ValueError: no floating tensor, another shape, or values outside [0, 1].
        """
        self._check_images(images)
        if images.numel() and not (images.min() >= 0 and images.max() <= 1):
            low, high = images.min().item(), images.max().item()
            raise ValueError(f"images must lie in [0, 1], got values in [{low}, {high}]")
        return points(math.pi * self.patches(images))

    def decode(self, tokens: Tensor) -> Tensor:
        """(B, N, 2p) -> (B, C, H, W): the value whose point is nearest to the direction of each pair.

        Directions outside the half circle of the values go to its nearer end, a pair (0, 0) to 0.

        Raises:
            TypeError, ValueError: no floating tensor, or another shape.
        """
        self._check_tokens(tokens)
        if tokens.dim() != 3 or tokens.shape[1] != self.sites:
            raise ValueError(
                f"tokens must have the shape (B, {self.sites}, {self.dim}), got {tuple(tokens.shape)}"
            )
        return self.images(self.decode_patches(tokens))

    def decode_patches(self, tokens: Tensor) -> Tensor:
        """(..., 2p) -> values (..., p) in [0, 1], as for :meth:`decode`."""
        self._check_tokens(tokens)
        cosine, sine = tokens.unflatten(-1, (self.values, 2)).unbind(-1)
        return torch.atan2(sine.clamp_min(0.0).abs(), cosine) / math.pi  # -0.0 would give -1

    def patches(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, p), any values.

        Raises:
            TypeError, ValueError: no floating tensor, or another shape.
        """
        self._check_images(images)
        size = self.patch
        # (B, C, rows, s, columns, s)
        tiles = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))
        return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def images(self, patches: Tensor) -> Tensor:
        """(B, N, p) -> (B, C, H, W), the inverse of :meth:`patches`.

        Raises:
            TypeError, ValueError: no floating tensor, or another shape.
        """
        _check_floating("patches", patches)
        if patches.dim() != 3 or tuple(patches.shape[1:]) != (self.sites, self.values):
            raise ValueError(
                f"patches must have the shape (B, {self.sites}, {self.values}), "
                f"got {tuple(patches.shape)}"
            )
        size = self.patch
        rows, columns = self.height // size, self.width // size
        tiles = patches.reshape(len(patches), rows, columns, self.channels, size, size)
        return tiles.permute(0, 3, 1, 4, 2, 5).reshape(-1, self.channels, self.height, self.width)

    def noisy(self, tokens: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
        """``tokens`` (..., 2p) with normal noise of standard deviation ``sigma`` on every angle.

        The noise is drawn on the CPU, where ``generator`` must be, and taken to ``tokens.device``.

        Raises:
            TypeError, ValueError: no floating tensor, another shape; a ``sigma`` that is negative or
                not finite.
        """
        self._check_tokens(tokens)
        require_nonnegative("sigma", sigma)
        cosine, sine = tokens.unflatten(-1, (self.values, 2)).unbind(-1)
        noise = torch.randn(cosine.shape, generator=generator, dtype=tokens.dtype).to(tokens.device)
        return points(torch.atan2(sine, cosine) + sigma * noise)

    def random(self, count: int, generator: torch.Generator) -> Tensor:
        """``count`` images of independent uniform angles as tokens (count, N, 2p), float32, on the CPU."""
        shape = (require_count("count", count), self.sites, self.values)
        return points(2 * math.pi * torch.rand(shape, generator=generator))

    def _check_images(self, images: object) -> None:
        shape = (self.channels, self.height, self.width)
        _check_floating("images", images)
        assert isinstance(images, Tensor)
        if images.dim() != 4 or tuple(images.shape[1:]) != shape:
            raise ValueError(f"images must have the shape (B, *{shape}), got {tuple(images.shape)}")

    def _check_tokens(self, tokens: object) -> None:
        _check_floating("tokens", tokens)
        assert isinstance(tokens, Tensor)
        if tokens.dim() == 0 or tokens.shape[-1] != self.dim:
            raise ValueError(f"tokens must have {self.dim} components, got {tuple(tokens.shape)}")


def _check_floating(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        came = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a floating tensor, got {came}")


def points(angles: Tensor) -> Tensor:
    """Angles (..., p) -> points (..., 2p) on unit circles, cosine and sine in turn."""
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(-2)


def principal_features(dim: int, tokens: Tensor) -> Tensor:
    """The ``dim`` orthonormal directions (dim, D) that hold most of the tokens (B, N, D), float32.

    Of the second moments about 0, so the mean direction is among them. The largest entry of each row
    is positive.

    Raises:
        ValueError: ``dim`` is not between 1 and D.
    """
    if require_count("dim", dim) > tokens.shape[-1]:
        raise ValueError(f"dim must be at most the {tokens.shape[-1]} components, got {dim}")
    flat = tokens.flatten(0, -2).double()
    rows = torch.linalg.eigh(flat.mT @ flat)[1].mT.flip(0)[:dim]
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return (rows * largest.sign()).float().contiguous()


def random_features(dim: int, width: int, generator: torch.Generator) -> Tensor:
    """A random ``F`` (dim, width) with orthonormal rows, float32: fixed features of tokens.

    Raises:
        ValueError: ``dim`` is not between 1 and ``width``.
    """
    if require_count("dim", dim) > require_count("width", width):
        raise ValueError(f"dim must be at most width={width} for orthonormal rows, got {dim}")
    drawn = torch.randn(width, dim, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(drawn)[0].mT.float().contiguous()
