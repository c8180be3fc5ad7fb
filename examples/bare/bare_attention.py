"""Bare self-attention: masked patches of images by couplings between positions alone, beside baselines.

Pixels are points on circles, patches are tokens, and couplings J_ij between patches are the only parameters.
They are learned by local rules: no graph is recorded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from images import EXACT, PAIRS, RECIPES, Data, Images, Kind, open_images, show
from torch import Tensor

STRENGTHS = (1e-4, 1e-3, 1e-2, 0.1, 1.0)  # of ridge regression, among which it chooses


def ridge(train: Tensor, test: Tensor, strength: float) -> Tensor:
    """Linear regression of the values of every patch (M, N, p) on those of all others, with intercept.

    Minimises ``|Y - X W|^2 / M + strength |W|^2`` about the means, by its dual problem in M unknowns.
    """
    train, test = train.double(), test.double()
    middle = train.mean(0)
    x, new = train - middle, test - middle
    gram, crossed = x.flatten(1) @ x.flatten(1).mT, new.flatten(1) @ x.flatten(1).mT
    unit = len(x) * strength * torch.eye(len(x), dtype=x.dtype)
    predicted = []
    for i in range(x.shape[1]):  # the products without those of the patch itself
        factor = torch.linalg.cholesky(gram - x[:, i] @ x[:, i].mT + unit)
        dual = torch.cholesky_solve(x[:, i], factor)
        predicted.append((crossed - new[:, i] @ x[:, i].mT) @ dual)
    return (torch.stack(predicted, 1) + middle).clamp(0.0, 1.0).float()


def best_ridge(train: Tensor, test: Tensor) -> Tensor:
    """With the strength that is best on a third of the first 600 training images."""
    values = train[:600]
    cut = max(1, 2 * len(values) // 3)

    def error(strength: float) -> float:
        return (ridge(values[:cut], values[cut:], strength) - values[cut:]).square().mean().item()

    return ridge(train, test, min(STRENGTHS, key=error))


@torch.no_grad()
def predict(name: str, model: Any, tokens: Tensor) -> tuple[Tensor, float]:
    """The mean of every token given all others, and the mean ``-sum_i log p(z_i | rest)`` of an image."""
    parts = tokens.split(64)
    loss = torch.cat([-model.log_prob(part).sum(1) for part in parts]).mean().item()
    if name == PAIRS:
        return model.mean(tokens), loss
    return torch.cat([model.conditionals(part).mean() for part in parts]), loss


def bare_attention(
    data: Data = "digits", images: int = 0, steps: int = 0, kind: Kind = "principal", seed: int = 0
):
    """Masked patches of images by bare self-attention, with the errors of simpler predictors.

    Args:
        data: digits (2 x 2 patches) or cifar10 (8 x 8).
        images: training and test images each; 0: by the data.
        steps: of training; 0: by the data.
        kind: of the rows of F, directions of the tokens or random.
        seed: of images, couplings and batches.
    """
    setup = open_images(data, images, steps, kind, seed)
    codec, truth = setup.codec, setup.test_values
    values = codec.decode_patches(setup.train)
    guesses = {
        "mean of the site": codec.decode_patches(setup.train.mean(0)).expand_as(truth),
        "ridge regression": best_ridge(values, truth),
    }
    models, losses = {}, {}
    for name in RECIPES:
        models[name] = setup.fit(name)
        tokens, losses[name] = predict(name, models[name], setup.test)
        guesses[name] = codec.decode_patches(tokens)
    table: list[dict[str, Any]] = []
    for name, guess in guesses.items():
        row = {"predictor": name, "error": (guess - truth).square().mean().sqrt().item()}
        table.append(row | {"npl": losses.get(name, float("nan"))})
    return {"errors": table}, draw(setup, models, guesses, table)


def draw(setup: Images, models: dict[str, Any], guesses: dict[str, Tensor], table: list):
    """Errors of all predictors, what they make of a few images, and the learned couplings."""
    figure = plt.figure(figsize=(13, 9), dpi=90)
    figure.suptitle("Bare self-attention: masked patches by couplings between positions alone")
    above, below = figure.subfigures(2, 1, height_ratios=(1.25, 0.8), squeeze=False).flat
    left, right = above.subfigures(1, 2, width_ratios=(1, 1.15), squeeze=False).flat
    draw_errors(left.subplots(), table[::-1])
    shown = {name: guess for name, guess in guesses.items() if "≤ 2" not in name}
    draw_predictions(right, setup, {"original": setup.test_values} | shown)
    left, right = below.subfigures(1, 2, width_ratios=(1.2, 1), squeeze=False).flat
    draw_norms(left, {name: model for name, model in models.items() if name in shown})
    draw_blocks(right, setup, models[EXACT])
    return figure


def draw_errors(axes: Any, rows: list) -> None:
    """A bar for each predictor."""
    names, errors = [row["predictor"] for row in rows], [row["error"] for row in rows]
    bars = axes.barh(names, errors, color=["C0" if "bare" in name else "C4" for name in names])
    axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=9)
    axes.axvline(errors[-1], color="C3", linestyle="--", linewidth=1)
    axes.set(title="A test patch from all others", xlim=(0, 1.2 * max(errors)))
    axes.set_xlabel("root mean square error of the pixels (dashed: the mean)")


def draw_predictions(figure: Any, setup: Images, rows: dict[str, Tensor]) -> None:
    """Six images composed of their patches, every one predicted from the original others."""
    figure.suptitle("Test images, each patch predicted from the true others", fontsize=10)
    panels = figure.subplots(len(rows), 7, width_ratios=[2.6] + [1] * 6, squeeze=False)
    for axes in panels.flat:
        axes.axis("off")
    for line, (name, values) in zip(panels, rows.items(), strict=True):
        line[0].text(1, 0.5, name.replace(", ", ",\n"), ha="right", va="center", fontsize=8)
        for axes, image in zip(line[1:], setup.codec.images(values[:6]), strict=False):
            show(axes, image)


def draw_norms(figure: Any, models: dict[str, Any]) -> None:
    """The norms of the blocks of J of each model."""
    title = "Strength of the couplings between patches, |J_ij|, each on a scale of its own"
    figure.suptitle(title, fontsize=10)
    for axes, (name, model) in zip(figure.subplots(1, len(models)), models.items(), strict=True):
        image = axes.imshow(model.couplings.site_norms().detach().numpy(), cmap="magma")
        axes.set_title(name.replace(", ", ",\n"), fontsize=8)
        axes.set(xlabel="neighbour j", ylabel="patch i")
        figure.colorbar(image, ax=axes, shrink=0.6)


def draw_blocks(figure: Any, setup: Images, model: Any) -> None:
    """The strongest blocks of J, and rows of F where there is one."""
    weight, F = model.couplings.weight.detach(), setup.features
    count = 6 if F is None else 3
    rows = "" if F is None else "; below, rows of F"
    figure.suptitle(f"Strongest blocks J_ij, {EXACT}{rows}", fontsize=10)
    panels = figure.subplots(2, 3).ravel()
    order = weight.flatten(2).norm(dim=2).flatten().argsort(descending=True)[:count]
    for axes, index in zip(panels, order.tolist(), strict=False):
        i, j = divmod(index, len(weight))
        top = weight[i, j].abs().max().item()
        axes.imshow(weight[i, j].detach().numpy(), cmap="RdBu_r", vmin=-top, vmax=top)
        axes.set_title(f"J of patches {i}, {j}; ±{top:.1f}", fontsize=8)
        axes.set(xticks=[], yticks=[])
    for number, axes in enumerate(panels[count:]):
        assert F is not None
        row = F[number].unflatten(0, (-1, 2))[:, 0]  # what multiplies the cosines
        picture = row.view(setup.codec.channels, setup.codec.patch, setup.codec.patch)
        show(axes, 0.5 + 0.5 * picture / picture.abs().max())
        axes.set_title(f"F, row {number}, its cosines", fontsize=8)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    from runner import run

    run(bare_attention)
