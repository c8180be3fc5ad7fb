"""Bare self-attention predicts masked patches of images with couplings between positions only.

Pixels are points on circles, patches are tokens, and couplings J_ij between patches are the only parameters.
Local rules learn them without back-propagation. The table compares them with baselines.
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
Kind = Literal["principal", "random"]


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


def open_images(data: Data, images: int, steps: int, kind: Kind, seed: int) -> Images:
    """The data set as tokens; 0 images or steps: the default of the data."""
    sizes, loaded = SIZES[data], load(data)
    sizes = sizes._replace(steps=steps or sizes.steps)
    generator, parts = torch.Generator().manual_seed(seed), []
    for pictures, most in ((loaded.train_images, sizes.train), (loaded.test_images, sizes.test)):
        chosen = torch.randperm(len(pictures), generator=generator)[: images or most]
        parts.append(encode(pictures[chosen], sizes.patch))
    features, flat = None, parts[0].flatten(0, 1).double()
    if sizes.features and kind == "principal":
        # Orthonormal directions that hold most of the tokens, by their second moments about 0, so that the
        # mean direction is among them; the largest entry of each row is positive.
        rows = torch.linalg.eigh(flat.mT @ flat)[1].mT.flip(0)[: sizes.features]
        signs = rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()
        features = (rows * signs).float().contiguous()
    elif sizes.features:  # orthonormal directions at random
        shape = flat.shape[1], sizes.features
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        features = torch.linalg.qr(drawn)[0].mT.float().contiguous()
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
    kind: Kind = "principal",  # rows of F: principal directions or random
    seed: int = 0,  # random seed of images, couplings and batches
) -> Result:
    setup = open_images(data, images, steps, kind, seed)
    values, truth = decode(setup.train), decode(setup.test)
    guesses = {
        "mean of the site": decode(setup.train.mean(0)).expand_as(truth),
        "ridge regression": best_ridge(values, truth),
    }
    models, losses = {}, {}
    for name in RECIPES:
        models[name] = model = setup.fit(name)
        parts = setup.test.split(64)
        with torch.no_grad():  # the mean -sum_i log p(z_i | rest), and the means given all others
            log_prob = torch.cat([-model.log_prob(part).sum(1) for part in parts])
            law = model.mean if name == PAIRS else lambda part, m=model: m.conditionals(part).mean()
            guesses[name] = decode(torch.cat([law(part) for part in parts]))
        losses[name] = log_prob.mean().item()
    table: list[dict[str, Any]] = []
    for name, guess in guesses.items():
        row = {"predictor": name, "error": (guess - truth).square().mean().sqrt().item()}
        table.append(row | {"npl": losses.get(name, float("nan"))})

    figure = plt.figure(figsize=(13, 9), dpi=90)
    figure.suptitle("Bare self-attention: masked patches by couplings between positions alone")
    above, below = figure.subfigures(2, 1, height_ratios=(1.25, 0.8), squeeze=False).flat
    left, right = above.subfigures(1, 2, width_ratios=(1, 1.15), squeeze=False).flat
    axes, errors = left.subplots(), [row["error"] for row in table[::-1]]
    colors = ["C0" if "bare" in row["predictor"] else "C4" for row in table[::-1]]
    bars = axes.barh([row["predictor"] for row in table[::-1]], errors, color=colors)
    axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=9)
    axes.axvline(errors[-1], color="C3", linestyle="--", linewidth=1)
    axes.set(title="A test patch from all others", xlim=(0, 1.2 * max(errors)))
    axes.set_xlabel("root mean square error of the pixels (dashed: the mean)")
    shown = {name: guess for name, guess in guesses.items() if "≤ 2" not in name}
    rows = {"original": truth} | shown
    right.suptitle("Test images, each patch predicted from the true others", fontsize=10)
    panels = right.subplots(len(rows), 7, width_ratios=[2.6] + [1] * 6, squeeze=False)
    for axes in panels.flat:
        axes.axis("off")
    for line, (name, pixels) in zip(panels, rows.items(), strict=True):
        line[0].text(1, 0.5, name.replace(", ", ",\n"), ha="right", va="center", fontsize=8)
        for axes, image in zip(line[1:], join_patches(pixels[:6], setup.sizes.patch), strict=False):
            show(axes, image)
    left, right = below.subfigures(1, 2, width_ratios=(1.2, 1), squeeze=False).flat
    drawn = {name: model for name, model in models.items() if name in shown}
    title = "Strength of the couplings between patches, |J_ij|, each on a scale of its own"
    left.suptitle(title, fontsize=10)
    for axes, (name, model) in zip(left.subplots(1, len(drawn)), drawn.items(), strict=True):
        image = axes.imshow(model.couplings.site_norms().detach().numpy(), cmap="magma")
        axes.set_title(name.replace(", ", ",\n"), fontsize=8)
        axes.set(xlabel="neighbour j", ylabel="patch i")
        left.colorbar(image, ax=axes, shrink=0.6)
    draw_blocks(right, setup, models[EXACT])
    return {"errors": table}, figure


def show(axes: Any, image: Tensor) -> None:
    """An image (C, H, W) in [0, 1], without axes."""
    axes.imshow(image.permute(1, 2, 0).numpy(), cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])


def draw_blocks(figure: Any, setup: Images, model: Any) -> None:
    """The strongest blocks of J, and rows of F where there is one: six pictures."""
    weight, rows = model.couplings.weight.detach(), setup.features
    rows = weight.new_zeros(0, 2) if rows is None else rows[:3]
    note = "; below, rows of F" if len(rows) else ""
    figure.suptitle(f"Strongest blocks J_ij, {EXACT}{note}", fontsize=10)
    order = weight.flatten(2).norm(dim=2).flatten().argsort(descending=True)
    panels, count = figure.subplots(2, 3).ravel(), 6 - len(rows)
    for axes, index in zip(panels, order[:count].tolist(), strict=False):
        i, j = divmod(index, len(weight))
        top = weight[i, j].abs().max().item()
        axes.imshow(weight[i, j].numpy(), cmap="RdBu_r", vmin=-top, vmax=top)
        axes.set_title(f"J of patches {i}, {j}; ±{top:.1f}", fontsize=8)
        axes.set(xticks=[], yticks=[])
    for number, (axes, row) in enumerate(zip(panels[count:], rows, strict=True)):
        cosines = row[::2].view(-1, setup.sizes.patch, setup.sizes.patch)
        show(axes, 0.5 + 0.5 * cosines / cosines.abs().max())
        axes.set_title(f"F, row {number}, its cosines", fontsize=8)


if __name__ == "__main__":
    run(bare_attention)
