"""Images to be classified, or with hidden patches to be filled in: what train_images.py learns."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from training import Pair, Sums, Task

from implicit_attn.data import ImageData, some_samples
from implicit_attn.models.images import hidden_patches, hide_patches, split_patches


def affine(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images turned, scaled, sheared and shifted at random by up to 10 degrees, 10 %, 0.1 and 2 pixels."""
    height, width = images.shape[2:]
    draws = torch.rand(5, len(images), generator=generator, device=generator.device)
    draws = draws.mul_(2).sub_(1).to(images)
    angle, size = draws[0] * math.radians(10), 1 + 0.1 * draws[1]
    cosine, sine = angle.cos() * size, angle.sin() * size
    # affine_grid maps the output to the input, in units of half the image.
    first = torch.stack([cosine, 0.1 * draws[2] - sine, draws[3] * (4 / width)], dim=1)
    second = torch.stack([sine, cosine, draws[4] * (4 / height)], dim=1)
    grid = F.affine_grid(torch.stack([first, second], dim=1), list(images.shape), False)
    return F.grid_sample(images, grid, align_corners=False)


def crop_and_flip(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Images shifted by up to ``padding`` pixels, and mirrored with probability 1/2."""
    number, channels, height, width = images.shape
    device = generator.device
    places = torch.randint(2 * padding + 1, (2, number, 1), generator=generator, device=device)
    rows, columns = (
        p + torch.arange(n, device=p.device)
        for p, n in zip(places.to(images.device), (height, width), strict=True)
    )
    padded = F.pad(images, 4 * [padding])
    padded = padded.gather(2, rows[:, None, :, None].expand(-1, channels, -1, padded.shape[3]))
    cut = padded.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1))
    mirrored = torch.rand(number, 1, 1, 1, generator=generator, device=device) < 0.5
    return torch.where(mirrored.to(images.device), cut.flip(3), cut)


class Classification(Task):
    """Cross-entropy; the share of test images that are classified right."""

    def __init__(self, data: ImageData, test: int, augment: bool) -> None:
        chosen = some_samples(data.test_labels, test)
        self.inputs, self.targets = data.train_images, data.train_labels
        self.tests = data.test_images[chosen], data.test_labels[chosen]
        self.name = data.name if augment else ""

    def augmented(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Pair:
        if self.name == "mnist":
            inputs = affine(inputs, generator)
        elif self.name not in ("", "digits"):  # 8 x 8 pixels are too few for shifts
            inputs = crop_and_flip(inputs, 2 if self.name == "fashion-mnist" else 4, generator)
        return inputs, targets

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        return F.cross_entropy(outputs, targets, reduction="sum"), len(inputs)

    def measures(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Sums:
        return {"test_accuracy": (float((outputs.argmax(1) == targets).sum()), len(inputs))}


class MaskedImages(Task):
    """Squared error of the pixels in hidden patches, from 1 up to a share of them, drawn for each image.

    Of a test image that share is hidden, always the same patches. The PSNR is ``-10 log10`` of the error.
    """

    def __init__(self, data: ImageData, patch: int, share: float, test: int) -> None:
        self.inputs = self.targets = data.train_images
        self.patch, self.patches = patch, (data.train_images.shape[-1] // patch) ** 2
        self.most = min(max(1, round(share * self.patches)), self.patches - 1)
        images = data.test_images[some_samples(data.test_labels, test)]
        counts, generator = torch.full((len(images),), self.most), torch.Generator().manual_seed(0)
        self.tests = self.hide(images, counts, generator), images

    def hide(self, images: Tensor, counts: Tensor, generator: torch.Generator) -> Tensor:
        """NaN in ``counts`` (B,) patches of each image."""
        size, device = (len(counts), self.patches), generator.device
        order = torch.rand(size, generator=generator, device=device).argsort(1)
        hidden = order.argsort(1) < counts.unsqueeze(1)
        return hide_patches(images, hidden.to(images.device), self.patch)

    def augmented(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Pair:
        size, device = (len(inputs),), generator.device
        counts = torch.randint(1, self.most + 1, size, generator=generator, device=device)
        return self.hide(inputs, counts, generator), inputs

    def errors(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """(B, patches): the mean squared error of each hidden patch, 0 for visible ones."""
        wanted = split_patches(targets, self.patch)
        error = (split_patches(outputs.to(wanted.dtype), self.patch) - wanted).square().mean(-1)
        return error.masked_fill(~hidden_patches(inputs, self.patch), 0.0)

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        number = hidden_patches(inputs, self.patch).sum()
        return self.errors(outputs, inputs, targets).sum(), number

    def measures(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Sums:
        errors = self.errors(outputs, inputs, targets).double().sum(1) / self.most
        psnr = -10 * errors.clamp_min(1e-10).log10()
        found = {"test_loss": errors, "test_psnr": psnr}
        return {name: (float(each.sum()), len(each)) for name, each in found.items()}
