"""Images as tokens on circles, and models of bare attention trained on them by local rules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from circles import CircleTokens, principal_features, random_features
from torch import Tensor, nn

from implicit_attn.data import load
from implicit_attn.energies import BareAttention, Couplings
from solvers import TorusSite

Data = Literal["digits", "cifar10"]
Kind = Literal["principal", "random", "none"]


class Sizes(NamedTuple):
    """What an experiment does by default with a data set, within a minute on one core."""

    patch: int
    features: int  # rows of F; 0: no F
    train: int  # images at most
    test: int
    steps: int
    batch: int
    rate: float  # of the rule "exact"
    runs: int  # images whose states are kept


SIZES = {
    "digits": Sizes(2, 0, 1437, 360, 400, 128, 0.03, 300),
    "cifar10": Sizes(8, 16, 1000, 300, 60, 32, 0.1, 30),
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


def open_images(
    data: Data, images: int, steps: int, features: int, kind: Kind, seed: int
) -> Images:
    """The data set as tokens; 0 images, steps or features: the default of the data."""
    sizes, loaded = SIZES[data], load(data)
    _, channels, height, width = loaded.train_images.shape
    codec = CircleTokens(channels, height, width, sizes.patch)
    rows = 0 if kind == "none" else features or sizes.features
    if rows > codec.dim:
        raise ValueError(f"features must be at most {codec.dim} for {data}, got {rows}")
    generator, parts = torch.Generator().manual_seed(seed), []
    for pictures, most in ((loaded.train_images, sizes.train), (loaded.test_images, sizes.test)):
        chosen = torch.randperm(len(pictures), generator=generator)[: images or most]
        parts.append(codec.encode(pictures[chosen]))
    matrix = None
    if rows and kind == "principal":
        matrix = principal_features(rows, parts[0])
    elif rows:
        matrix = random_features(rows, codec.dim, generator)
    train, test = parts
    return Images(data, codec, train, test, matrix, steps or sizes.steps, seed)


def show(axes: Any, image: Tensor) -> None:
    """An image (C, H, W) in [0, 1], without axes."""
    grey = len(image) == 1
    look: dict[str, Any] = {"cmap": "gray_r", "vmin": 0, "vmax": 1} if grey else {}
    axes.imshow((image[0] if grey else image.permute(1, 2, 0)).numpy(), **look)
    axes.set(xticks=[], yticks=[])
