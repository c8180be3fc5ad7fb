"""How well do trained models fill in masked patches, with fewer and with more iterations than in training?

    python examples/train_images.py --task masked --model transformer    # a minute or two each
    python examples/train_images.py --task masked --model hyperset
    python examples/masked_images.py --runs runs/masked-digits-*

Left: images that the model of the first run fills in. Right: the error of masked pixels with 1/4 to 4 times
the iterations of training. That of a model which is trained to a fixed point stays low; that of an ordinary
repeated layer rises again. Runs must use the same data and masked patches; runs of one model may differ in
the seed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from image_tasks import MaskedImages
from runner import Result, Table, columns, run
from sklearn.metrics.pairwise import nan_euclidean_distances
from torch import Tensor

from implicit_attn.data import load
from implicit_attn.models import load_model

MULTIPLES = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)  # of the iterations of training
SHOWN = (1, 2, 4, 8, 12, 24)  # iterations of the pictures
HIDDEN = (0.62, 0.74, 0.90)  # a colour that no grey image holds
GAUSSIAN = "Gaussian, linear"
KEPT = ("data", "masked", "limit", "test")  # settings that tell what is measured


def fill_nearest_image(train: Tensor, images: Tensor) -> Tensor:
    """Hidden pixels are those of the training image whose visible pixels are nearest."""
    apart = nan_euclidean_distances(images.flatten(1).numpy(), train.flatten(1).numpy())
    return train[torch.from_numpy(apart).argmin(1)]


def fill_gaussian(train: Tensor, images: Tensor, ridge: float = 0.01) -> Tensor:
    r"""Hidden pixels h are ``E[h | visible]`` of a Gaussian with the training images' moments ::

        mean_h - K_hh^-1 K_hv (x_v - mean_v),    K = (covariance + ridge v I)^-1

    v the mean variance of a pixel. It is the best linear reconstruction, of every mask at once.
    """
    flat = train.flatten(1).double()
    mean, covariance = flat.mean(0), torch.cov(flat.T)
    # A constant training set has no variance; any shift then gives its mean.
    shift = (ridge * covariance.diagonal().mean()).clamp_min(1e-12)
    precision = torch.linalg.inv(covariance + shift * torch.eye(len(mean)).double())
    filled = images.flatten(1).double()
    for pixels in filled:
        hidden = pixels.isnan()
        rows = precision[hidden]
        field = rows[:, ~hidden] @ (pixels[~hidden] - mean[~hidden])
        pixels[hidden] = mean[hidden] - torch.linalg.solve(rows[:, hidden], field)
    return filled.to(images.dtype).view_as(images)


# Training images (M, C, S, S) and images (B, C, S, S) with NaN in hidden patches -> images.
FILLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nearest training image": fill_nearest_image,
    GAUSSIAN: fill_gaussian,
}


def fill(name: str, train: Tensor, images: Tensor) -> Tensor:
    """``images`` with their hidden pixels guessed by a row of ``FILLINGS``."""
    return torch.where(images.isnan(), FILLINGS[name](train, images), images)


def means(sums: dict[str, tuple[float, int]]) -> dict[str, float]:
    return {name: total / number for name, (total, number) in sums.items()}


@torch.no_grad()
def measured(model: Any, task: MaskedImages, iterations: int) -> dict[str, float]:
    inputs, targets = task.tests
    outputs = [model(part, iterations=iterations) for part in inputs.split(task.size)]
    return means(task.measures(torch.cat(outputs), inputs, targets))


def masked_images(
    runs: tuple[Path, ...],  # folders of ``train_images.py --task masked``
    images: int = 8,  # number of images in the figure
) -> Result:
    found = [load_model(folder / "weights.safetensors") for folder in runs]
    settings = [each for _, each in found]
    kept = [{name: each[name] for name in KEPT} for each in settings]
    assert all(each == kept[0] for each in kept), "runs of other hidden patches"
    known, patch = kept[0], settings[0]["model"]["patch"]
    data = load(known["data"]).first(known["limit"])
    task = MaskedImages(data, patch, known["masked"], known["test"])
    errors: Table = []
    for (model, _), each in zip(found, settings, strict=True):
        backbone, size = each["model"]["backbone"], sum(p.numel() for p in model.parameters())
        for multiple in MULTIPLES:
            number = max(1, round(multiple * backbone["iterations"]))
            row = {"model": backbone["name"], "seed": each["seed"], "parameters": size}
            row |= {"multiple": multiple, "iterations": number}
            errors.append(row | measured(model, task, number))
    inputs, targets = task.tests
    train = data.train_images
    fillings: Table = [
        {"filling": name, **means(task.measures(fill(name, train, inputs), inputs, targets))}
        for name in FILLINGS
    ]
    inputs, targets = inputs[:images], targets[:images]
    rows = {"image": targets, "visible": inputs}
    for number in SHOWN:
        with torch.no_grad():
            pixels = found[0][0](inputs, iterations=number)
        error = measured(found[0][0], task, number)["test_loss"]
        name = f"{number} iteration{'s' if number > 1 else ''}\nerror {error:.4f}"
        rows[name] = torch.where(inputs.isnan(), pixels, inputs)
    rows[f"{GAUSSIAN}\nerror {fillings[-1]['test_loss']:.4f}"] = fill(GAUSSIAN, train, inputs)
    figure = plt.figure(figsize=(14, 0.8 * len(rows) + 0.6))
    figure.suptitle(f"{data.name}: {task.most} of {task.patches} patches hidden")
    parts: Any = figure.subfigures(1, 2, width_ratios=(1, 1.2))
    axes, side, lines = parts[0].subplots(), inputs.shape[-1], []
    gap = max(1, side // 8)
    for shown in rows.values():
        colours = shown.expand(-1, 3, -1, -1).clamp(0, 1)
        hidden = shown.isnan().any(1, keepdim=True)
        painted = torch.where(hidden, torch.tensor(HIDDEN).view(3, 1, 1), colours)
        lines.append(torch.nn.functional.pad(painted, (0, gap, 0, gap), value=1.0))
    sheet = torch.cat([torch.cat([*line], 2) for line in lines], 1)
    axes.imshow(sheet.permute(1, 2, 0).numpy(), interpolation="nearest")
    axes.set_yticks([k * (side + gap) + side / 2 for k in range(len(rows))], list(rows))
    axes.set_title(f"model: {errors[0]['model']}")
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes, top = parts[1].subplots(), 0.0
    for name in dict.fromkeys(row["model"] for row in errors):  # mean and range over its runs
        every = [columns(errors, "test_loss", model=name, multiple=m)[0] for m in MULTIPLES]
        axes.plot(MULTIPLES, [sum(each) / len(each) for each in every], "o-", label=name)
        axes.fill_between(MULTIPLES, [*map(min, every)], [*map(max, every)], alpha=0.2)
        top = max(top, *(max(each) for each in every[1:]))
    for row, style in zip(fillings, (":", "--"), strict=True):
        axes.axhline(row["test_loss"], color="C4", linestyle=style, label=row["filling"])
    axes.set_xscale("log", base=2)
    axes.set_xticks(MULTIPLES, [f"{each:g}" for each in MULTIPLES])
    axes.minorticks_off()
    axes.set(xlabel="iterations at test time, as a multiple of those in training")
    axes.set(ylabel="mean squared error of hidden pixels", ylim=(None, 1.7 * top))
    axes.legend(frameon=False)
    return {"errors": errors, "fillings": fillings}, figure


if __name__ == "__main__":
    run(masked_images)
