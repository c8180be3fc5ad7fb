"""Images as tokens on circles, and models of bare attention trained on them by local rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from implicit_attn.data import load
from implicit_attn.energies import BareAttention, Couplings
from solvers import TorusSite

Data = Literal["digits", "cifar10"]
Kind = Literal["principal", "random"]


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


class Sizes(NamedTuple):
    """What an experiment does by default with a data set, within a minute on one core."""

    patch: int
    features: int  # rows of F; 0: no F
    train: int  # images at most
    test: int
    steps: int
    batch: int
    rate: float  # of the rule "exact"


SIZES = {
    "digits": Sizes(2, 0, 1437, 360, 400, 128, 0.03),
    "cifar10": Sizes(8, 16, 1000, 300, 60, 32, 0.1),
}


class Recipe(NamedTuple):
    """How a model is trained: by which rule, at which rate, with which bound on ``|J_ij|``."""

    rule: Literal["exact", "source"]
    rate: float | None = None  # None: that of the data set
    cap: float | None = None


EXACT, PAIRS, SOURCE = "bare, exact normaliser", "pair sum, exact", "bare, energy alone, |J| ≤ {:g}"
RECIPES = {
    SOURCE.format(2): Recipe("source", 0.02, 2.0),
    SOURCE.format(8): Recipe("source", 0.02, 8.0),
    EXACT: Recipe("exact"),
    PAIRS: Recipe("exact", 0.01),
}


class PairSum(nn.Module):
    """``p(z_i | rest) ~ rho(z_i) exp(z_i.h_i)``, ``h_i = F^T sum_{j != i} J_ij F z_j``, circles as rho.

    The neighbours' evidence is added, where bare attention lets one of them speak.
    """

    def __init__(self, sites: int, dim: int, features: Tensor | None) -> None:
        super().__init__()
        self.couplings = Couplings(sites, dim, symmetric_sites=False)
        self.features, self.site = features, TorusSite()
        with torch.no_grad():
            self.couplings.free.zero_()

    def fields(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """``h`` (B, N, D), and a cavity variance of 0."""
        F = self.features
        h = self.couplings(z) if F is None else self.couplings(z @ F.mT) @ F
        return h, h.new_zeros(()).expand(*h.shape, h.shape[-1])

    def mean(self, z: Tensor) -> Tensor:
        """The means of the conditional laws, (B, N, D)."""
        return self.site.mean(*self.fields(z))

    def log_prob(self, z: Tensor) -> Tensor:
        """``log p(z_i | rest)``, (B, N)."""
        field, none = self.fields(z)
        return (field * z).sum(-1) - self.site.log_partition(field, none)

    @torch.no_grad()
    def local_gradient(self, z: Tensor, rule: str = "exact") -> Tensor:
        """``-(z_i - mean_i) z_j^T`` averaged over the samples, (N, N, d, d), zero blocks for i = j."""
        error, F = z - self.mean(z), self.features
        if F is not None:
            error, z = error @ F.mT, z @ F.mT
        gradient = torch.einsum("nia,njb->ijab", error, z) / -len(z)
        own = torch.eye(z.shape[1], dtype=torch.bool)
        return gradient.masked_fill(own[..., None, None], 0.0)

    def assign_gradient(self, gradient: Tensor) -> None:
        """Set ``grad`` of the free couplings."""
        chains: Any = self.couplings.parametrizations
        self.couplings.free.grad = chains["weight"][0].right_inverse(gradient)


def learn(
    model: Any, tokens: Tensor, recipe: Recipe, steps: int, batch: int, rate: float, seed: int
) -> None:
    """Adam on the gradients that the model itself says, ``local_gradient``; no graph is recorded.

    Each step draws a batch with replacement. Without ``cap`` the rule "source" has no minimum.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.rate or rate)
    for _ in range(steps):
        chosen = torch.randint(len(tokens), (batch,), generator=generator)
        model.assign_gradient(model.local_gradient(tokens[chosen], recipe.rule))
        optimizer.step()
        if recipe.cap is not None:
            with torch.no_grad():
                free = model.couplings.free
                norms = torch.linalg.matrix_norm(free, keepdim=True)
                free.mul_((recipe.cap / norms).clamp(max=1.0))
    if not bool(model.couplings.weight.isfinite().all()):
        raise FloatingPointError("the couplings are not finite: lower the learning rate")


@dataclass
class Images:
    """Tokens of training and test images, and how models on them are made and trained."""

    data: str
    codec: CircleTokens
    train: Tensor  # (M, N, 2p) float32
    test: Tensor
    features: Tensor | None
    steps: int
    seed: int

    @cached_property
    def test_values(self) -> Tensor:
        """Pixel values of the test patches, (M', N, p)."""
        return self.codec.decode_patches(self.test)

    def fit(self, name: str) -> Any:
        """The trained model of ``RECIPES``."""
        recipe, sizes, sites = RECIPES[name], SIZES[self.data], self.codec.sites
        dim = self.codec.dim if self.features is None else len(self.features)
        torch.manual_seed(self.seed)
        if name == PAIRS:
            model: BareAttention | PairSum = PairSum(sites, dim, self.features)
        else:
            model = BareAttention(sites, dim, features=self.features, site=TorusSite())
        learn(model, self.train, recipe, self.steps, sizes.batch, sizes.rate, self.seed + 1)
        return model


def open_images(data: Data, images: int, steps: int, kind: Kind, seed: int) -> Images:
    """The data set as tokens; 0 images or steps: the default of the data."""
    sizes, loaded = SIZES[data], load(data)
    _, channels, height, width = loaded.train_images.shape
    codec = CircleTokens(channels, height, width, sizes.patch)
    generator, parts = torch.Generator().manual_seed(seed), []
    for pictures, most in ((loaded.train_images, sizes.train), (loaded.test_images, sizes.test)):
        chosen = torch.randperm(len(pictures), generator=generator)[: images or most]
        parts.append(codec.encode(pictures[chosen]))
    train, test = parts
    features = None
    if sizes.features and kind == "principal":
        features = principal_features(sizes.features, train)
    elif sizes.features:
        features = random_features(sizes.features, codec.dim, generator)
    return Images(data, codec, train, test, features, steps or sizes.steps, seed)


def show(axes: Any, image: Tensor) -> None:
    """An image (C, H, W) in [0, 1], without axes."""
    grey = len(image) == 1
    look: dict[str, Any] = {"cmap": "gray_r", "vmin": 0, "vmax": 1} if grey else {}
    axes.imshow((image[0] if grey else image.permute(1, 2, 0)).numpy(), **look)
    axes.set(xticks=[], yticks=[])
