"""Images as tokens, and models of bare attention trained on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_attn.data import CircleTokens, load, principal_features, random_features
from implicit_attn.energies import BareAttention
from implicit_attn.studies.experiments.bare.predictors import PairSum, best_strength, ridge
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.tables import Table
from implicit_attn.training import fit_locally
from solvers import TorusSite
from solvers.core.checks import require_choice, require_count


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
KINDS = ("principal", "random")


@dataclass(frozen=True)
class Setup:
    """Tokens of training and test images, and how models on them are made and trained."""

    data: str
    codec: CircleTokens
    train: Tensor  # (M, N, 2p) float32
    test: Tensor
    features: Tensor | None
    steps: int
    batch: int
    seed: int

    @property
    def dim(self) -> int:
        """d of the couplings."""
        return self.codec.dim if self.features is None else len(self.features)

    @property
    def radius(self) -> float:
        """Norm of a token."""
        return self.codec.values**0.5

    @cached_property
    def test_values(self) -> Tensor:
        """Pixel values of the test patches, (M', N, p)."""
        return self.codec.decode_patches(self.test)

    def bare(self) -> BareAttention:
        """With random couplings, the same for every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return BareAttention(
                self.codec.sites, self.dim, features=self.features, site=TorusSite()
            )

    def pair_sum(self) -> PairSum:
        """Without couplings."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model = PairSum(self.codec.sites, self.dim, features=self.features)
            model.couplings.free.zero_()
        return model

    def fit(self, recipe: Recipe) -> BareAttention | PairSum:
        """A trained model."""
        model = self.pair_sum() if recipe.pairs else self.bare()
        fit_locally(
            model,
            self.train,
            rule=recipe.rule,
            steps=self.steps,
            batch=self.batch,
            rate=SIZES[self.data].rate if recipe.rate is None else recipe.rate,
            cap=recipe.cap,
            generator=torch.Generator().manual_seed(self.seed + 1),
        )
        return model


class Recipe(NamedTuple):
    """How a model is trained: by which rule, at which rate, with which bound on ``|J_ij|``."""

    rule: str
    rate: float | None = None  # None: that of the data set
    cap: float | None = None
    pairs: bool = False  # a PairSum in place of bare attention


EXACT, PAIRS = "bare, exact normaliser", "pair sum, exact"
SOURCE = "bare, energy alone, |J| ≤ {:g}"
RECIPES = {
    SOURCE.format(2): Recipe("source", 0.02, 2.0),
    SOURCE.format(8): Recipe("source", 0.02, 8.0),
    EXACT: Recipe("exact"),
    PAIRS: Recipe("exact", 0.01, pairs=True),
}


def open_setup(
    data: str,
    *,
    images: int | None = None,
    steps: int | None = None,
    features: int | None = None,
    kind: str | None = None,
    seed: int = 0,
) -> Setup:
    """The data set ``data`` of :data:`SIZES` as tokens; None: its default, "principal" for ``kind``.

    Raises:
        TypeError, ValueError: unknown ``data`` or ``kind``; a ``kind`` without features; more features
            than components of a token; ``images`` or ``steps`` below 1, ``features`` below 0.
    """
    sizes = SIZES[require_choice("data", data, SIZES)]
    rows = sizes.features if features is None else require_count("features", features, low=0)
    if kind is not None and not rows:
        raise ValueError(f"kind needs features, which are off for {data} here, got {kind!r}")
    kind = "principal" if kind is None else require_choice("kind", kind, KINDS)
    steps = sizes.steps if steps is None else require_count("steps", steps)
    if images is not None:
        require_count("images", images)
    loaded = load(data)
    _, channels, height, width = loaded.train_images.shape
    codec = CircleTokens(channels, height, width, sizes.patch)
    generator = torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    for pictures, most in ((loaded.train_images, sizes.train), (loaded.test_images, sizes.test)):
        count = min(len(pictures), most if images is None else images)
        chosen = torch.randperm(len(pictures), generator=generator)[:count]
        parts.append(codec.encode(pictures[chosen]))
    if rows > codec.dim:
        raise ValueError(f"features must be at most {codec.dim} for {data}, got {rows}")
    matrix = None
    if rows and kind == "principal":
        matrix = principal_features(rows, parts[0])
    elif rows:
        matrix = random_features(rows, codec.dim, generator)
    train, test = parts
    return Setup(data, codec, train, test, matrix, steps, sizes.batch, seed)


def predict(model: BareAttention | PairSum, tokens: Tensor, batch: int = 64) -> Tensor:
    """The mean of every token given all others, (M, N, 2p)."""
    with torch.no_grad():
        if isinstance(model, PairSum):
            return model.mean(tokens)
        return torch.cat([model.conditionals(part).mean() for part in tokens.split(batch)])


def pseudo_likelihood(model: BareAttention | PairSum, tokens: Tensor, batch: int = 64) -> float:
    """``-sum_i log p(z_i | rest)`` of an image, the mean over the images (M, N, 2p)."""
    with torch.no_grad():
        terms = [-model.log_prob(part).sum(1) for part in tokens.split(batch)]
    return torch.cat(terms).mean().item()


class Comparison(NamedTuple):
    """What :func:`compare` finds."""

    table: Table
    models: dict[str, BareAttention | PairSum]
    predictions: dict[str, Tensor]  # values of the test patches, (M', N, p), each from all others


def compare(setup: Setup, advance: Advance) -> Comparison:
    """Every patch of the test images from all others: error of each predictor, likelihood if it has one.

    The table has a row for each predictor: ``predictor``, ``error`` (root mean square of the pixels in
    [0, 1]), ``npl`` (``-sum_i log p`` of an image, densities against uniform angles; NaN where the
    predictor has none).
    """
    codec, models = setup.codec, {}
    middle = codec.decode_patches(setup.train.mean(0)).expand_as(setup.test_values)
    predictions = {"mean of the site": middle}
    advance("ridge regression")
    values = codec.decode_patches(setup.train)
    predictions["ridge regression"] = ridge(values, setup.test_values, best_strength(values))
    for name, recipe in RECIPES.items():
        advance(name)
        models[name] = setup.fit(recipe)
        predictions[name] = codec.decode_patches(predict(models[name], setup.test))
    table: Table = []
    for name, values in predictions.items():
        error = (values - setup.test_values).square().mean().sqrt().item()
        known = name in models
        npl = pseudo_likelihood(models[name], setup.test) if known else float("nan")
        table.append({"predictor": name, "error": error, "npl": npl})
    return Comparison(table, models, predictions)
