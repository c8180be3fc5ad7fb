"""How well does bare self-attention predict a masked patch of an image from all other patches?

    python examples/bare_attention.py                    # 8 x 8 digits, half a minute
    python examples/bare_attention.py --data cifar10     # photographs

Pixels are points on circles, patches are tokens, and couplings J_ij between patches are the only parameters.
Local rules learn them without back-propagation. The error is below that of the mean patch if the rule
contains the exact normaliser, and above it if the rule lowers the energy alone. Ridge regression and a sum of
pair terms with equally many couplings are better than both.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import matplotlib.pyplot as plt
import torch
from runner import Result, run
from sklearn.linear_model import Ridge
from torch import Tensor, nn

from implicit_attn.data import load
from implicit_attn.energies import BareAttention, Couplings
from implicit_attn.models.images import join_patches, split_patches
from solvers import TorusSite

STRENGTHS = (1e-4, 1e-3, 1e-2, 0.1, 1.0)  # of ridge regression, among which it chooses
Data = Literal["digits", "cifar10"]


# Images (B, C, S, S) in [0, 1] become tokens (B, N, 2p) of points on unit circles: a value v is the angle
# ``pi v``, so that 0 and 1 lie opposite; the p values of a patch make a token of norm ``sqrt p``.


def encode(images: Tensor, patch: int) -> Tensor:
    """(B, C, S, S) -> (B, N, 2p), the patches row by row."""
    return points(math.pi * split_patches(images, patch))


def decode(tokens: Tensor) -> Tensor:
    """(..., 2p) -> values (..., p): those whose points are nearest to the direction of each pair.

    Directions outside the half circle of the values go to its nearer end, a pair (0, 0) to 0.
    """
    cosine, sine = tokens.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.atan2(sine.clamp_min(0.0).abs(), cosine) / math.pi  # -0.0 would give -1


def noisy(tokens: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """``tokens`` (..., 2p) with normal noise of standard deviation ``sigma`` on every angle."""
    cosine, sine = tokens.unflatten(-1, (-1, 2)).unbind(-1)
    noise = torch.randn(cosine.shape, generator=generator, dtype=tokens.dtype)
    return points(torch.atan2(sine, cosine) + sigma * noise)


def points(angles: Tensor) -> Tensor:
    """Angles (..., p) -> points (..., 2p) on unit circles, cosine and sine in turn."""
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(-2)


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


EXACT, PAIRS, SOURCE = "bare, exact normaliser", "pair sum, exact", "bare, energy alone, |J| ≤ {:g}"
# The rule of each model, its rate (None: that of the data set), and a bound on ``|J_ij|``, without
# which the rule "source" has no minimum.
RECIPES: dict[str, tuple[str, float | None, float | None]] = {
    SOURCE.format(2): ("source", 0.02, 2.0),
    SOURCE.format(8): ("source", 0.02, 8.0),
    EXACT: ("exact", None, None),
    PAIRS: ("exact", 0.01, None),
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


@dataclass
class Images:
    """Tokens of training and test images, and the models that learn them."""

    sizes: Sizes
    train: Tensor  # (M, N, 2p) float32
    test: Tensor
    features: Tensor | None
    seed: int

    def fit(self, name: str) -> Any:
        """The model of ``RECIPES``, by Adam on the gradients that it says itself, ``local_gradient``."""
        (rule, rate, cap), sites, features = RECIPES[name], self.train.shape[1], self.features
        dim = self.train.shape[2] if features is None else len(features)
        torch.manual_seed(self.seed)
        if name == PAIRS:
            model: Any = PairSum(sites, dim, features)
        else:
            model = BareAttention(sites, dim, features=features, site=TorusSite())
        generator = torch.Generator().manual_seed(self.seed + 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate or self.sizes.rate)
        for _ in range(self.sizes.steps):
            chosen = torch.randint(len(self.train), (self.sizes.batch,), generator=generator)
            model.assign_gradient(model.local_gradient(self.train[chosen], rule))
            optimizer.step()
            if cap is not None:
                with torch.no_grad():
                    free = model.couplings.free
                    norms = torch.linalg.matrix_norm(free, keepdim=True)
                    free.mul_((cap / norms).clamp(max=1.0))
        return model


def open_images(data: Data, images: int, steps: int, seed: int) -> Images:
    """The data set as tokens; 0 images or steps: the default of the data."""
    sizes, loaded = SIZES[data], load(data)
    sizes = sizes._replace(steps=steps or sizes.steps)
    generator, parts = torch.Generator().manual_seed(seed), []
    for pictures, most in ((loaded.train_images, sizes.train), (loaded.test_images, sizes.test)):
        chosen = torch.randperm(len(pictures), generator=generator)[: images or most]
        parts.append(encode(pictures[chosen], sizes.patch))
    features, flat = None, parts[0].flatten(0, 1).double()
    if sizes.features:
        # Orthonormal directions that hold most of the tokens, by their second moments about 0, so that the
        # mean direction is among them; the largest entry of each row is positive.
        rows = torch.linalg.eigh(flat.mT @ flat)[1].mT.flip(0)[: sizes.features]
        signs = rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()
        features = (rows * signs).float().contiguous()
    return Images(sizes, parts[0], parts[1], features, seed)


def ridge(train: Tensor, test: Tensor, strength: float) -> Tensor:
    """Linear regression of the values of every patch (M, N, p) on those of all others."""
    found = []
    for site in range(train.shape[1]):
        others = torch.arange(train.shape[1]) != site
        known, asked = (each[:, others].flatten(1).double().numpy() for each in (train, test))
        fitted = Ridge(len(train) * strength).fit(known, train[:, site].double().numpy())
        found.append(torch.from_numpy(fitted.predict(asked)))
    return torch.stack(found, 1).clamp(0.0, 1.0).float()


def best_ridge(train: Tensor, test: Tensor) -> Tensor:
    """With the strength that is best on a third of the first 600 training images."""
    values = train[:600]
    cut = 2 * len(values) // 3

    def error(strength: float) -> float:
        return (ridge(values[:cut], values[cut:], strength) - values[cut:]).square().mean().item()

    return ridge(train, test, min(STRENGTHS, key=error))


def bare_attention(
    data: Data = "digits",  # data set: digits (2 x 2 patches) or cifar10 (8 x 8)
    images: int = 0,  # number of training and of test images (0: data set's default)
    steps: int = 0,  # training steps (0: data set's default)
    seed: int = 0,  # random seed of images, couplings and batches
) -> Result:
    setup = open_images(data, images, steps, seed)
    values, truth = decode(setup.train), decode(setup.test)
    guesses = {
        "mean of the site": decode(setup.train.mean(0)).expand_as(truth),
        "ridge regression": best_ridge(values, truth),
    }
    for name in RECIPES:
        model = setup.fit(name)
        law = model.mean if name == PAIRS else lambda part, m=model: m.conditionals(part).mean()
        with torch.no_grad():
            guesses[name] = decode(torch.cat([law(part) for part in setup.test.split(64)]))
    table: list[dict[str, Any]] = [
        {"predictor": name, "error": (guess - truth).square().mean().sqrt().item()}
        for name, guess in guesses.items()
    ]

    figure = plt.figure(figsize=(13, 5), dpi=90)
    figure.suptitle("A patch of a test image, predicted from all others by couplings of positions")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15), squeeze=False).flat
    axes, errors = left.subplots(), [row["error"] for row in table[::-1]]
    colors = ["C0" if "bare" in row["predictor"] else "C4" for row in table[::-1]]
    bars = axes.barh([row["predictor"] for row in table[::-1]], errors, color=colors)
    axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=9)
    axes.axvline(errors[-1], color="C3", linestyle="--", linewidth=1)
    axes.set(xlabel="root mean square error of the pixels (dashed: the mean)")
    axes.set(xlim=(0, 1.2 * max(errors)))
    rows = {"original": truth} | {n: guess for n, guess in guesses.items() if "≤ 2" not in n}
    panels = right.subplots(len(rows), 7, width_ratios=[2.6] + [1] * 6, squeeze=False)
    for axes in panels.flat:
        axes.axis("off")
    for line, (name, pixels) in zip(panels, rows.items(), strict=True):
        line[0].text(1, 0.5, name.replace(", ", ",\n"), ha="right", va="center", fontsize=8)
        for axes, image in zip(line[1:], join_patches(pixels[:6], setup.sizes.patch), strict=False):
            show(axes, image)
    return {"errors": table}, figure


def show(axes: Any, image: Tensor) -> None:
    """An image (C, H, W) in [0, 1], without axes."""
    axes.imshow(image.permute(1, 2, 0).numpy(), cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])


if __name__ == "__main__":
    run(bare_attention)
