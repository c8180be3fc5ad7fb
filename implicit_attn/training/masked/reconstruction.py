"""Masked image modelling: some patches are hidden and their pixels predicted from the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from implicit_attn.data import ImageData
from implicit_attn.data.masked.patchwork import (
    hidden_patches,
    hide_patches,
    join_patches,
    split_patches,
)
from implicit_attn.training.tasks import Augment, Measures
from solvers.core.checks import require_count

LEAST_ERROR = (
    1e-10  # of an image, where its PSNR is 100 dB: one without any error would be infinite
)
FLAT = 1e-6  # added to the variance of a patch before it is divided by


@dataclass(frozen=True)
class MaskedImages:
    r"""Reconstruction of hidden patches, by the mean squared error of their pixels.

    The model maps images (B, C, S, S), NaN in hidden patches, to predicted images (B, C, S, S). The
    loss is the mean over hidden patches i, of all images, of ``|predicted_i - p_i|^2 / P``, P pixels
    a patch; visible patches do not count. Every batch hides other patches. How many of an image's N
    patches is drawn uniformly from 1 .. ``round(masked N)``, as in the paper, or is always the latter.

    Measures, on masks of ``round(masked N)`` patches that depend on ``seed`` alone: ``test_loss``, and
    ``test_psnr``, the mean over the images of ``-10 log10`` of the error of their hidden pixels in dB.

    Attributes:
        data: images; their labels are not used.
        patch: height = width of a patch.
        masked: share of the patches that is hidden, in (0, 1); at least one is and one is not.
        vary: draw the number of hidden patches of training images.
        normalise: predict pixels less their patch's mean, divided by its standard deviation. Such
            pixels have no PSNR, so ``test_loss`` is the only measure.
        augment: ``augment(images, generator) -> images`` for training batches, before patches are
            hidden; None: none.
        test: number of test images; None: all.
        seed: of the masks of the test images.
        batch: images at once in the evaluation.

    Raises:
        ValueError: a size or share is out of range, or the patch does not divide the image.

    Source: Hu, Zou, Xu, "Hyper-SET" (https://arxiv.org/abs/2502.11646), whose shares these are; He et
    al., "Masked Autoencoders" (https://arxiv.org/abs/2111.06377), for the error on hidden patches and
    ``normalise``.
    """

    data: ImageData
    patch: int
    masked: float = 0.4
    vary: bool = True
    normalise: bool = False
    augment: Augment | None = None
    test: int | None = None
    seed: int = 0
    batch: int = 256

    def __post_init__(self) -> None:
        for name in ("patch", "batch") if self.test is None else ("patch", "batch", "test"):
            require_count(name, getattr(self, name))
        if not 0 < self.masked < 1:
            raise ValueError(f"masked must lie in (0, 1), got {self.masked!r}")
        if self.patches < 2:
            raise ValueError(
                f"patch must leave 2 patches at least in an image, got {self.patch} for "
                f"{tuple(self.data.train_images.shape[1:])}"
            )

    @property
    def patches(self) -> int:
        """N, patches of an image."""
        return split_patches(self.data.train_images[:1], self.patch).shape[1]

    @property
    def most(self) -> int:
        """Hidden patches of a test image, the most of a training image."""
        return min(max(1, round(self.masked * self.patches)), self.patches - 1)

    @property
    def inputs(self) -> Tensor:
        """The whole images; :meth:`augmented` hides patches."""
        return self.data.train_images

    @property
    def targets(self) -> Tensor:
        """The same images."""
        return self.data.train_images

    def to(self, device: torch.device) -> MaskedImages:
        return replace(self, data=self.data.to(device))

    def augmented(
        self, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Images with NaN in hidden patches, and the same images whole."""
        images = inputs if self.augment is None else self.augment(inputs, generator)
        counts = torch.full((len(images),), self.most)
        if self.vary:
            counts = torch.randint(1, self.most + 1, (len(images),), generator=generator)
        hidden = draw_masks(counts, self.patches, generator).to(images.device)
        return hide_patches(images, hidden, self.patch), images

    def terms(self, inputs: Tensor, targets: Tensor) -> int:
        return int(hidden_patches(inputs, self.patch).sum())

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.errors(outputs, inputs, targets).sum()

    def errors(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """(B, N) mean squared errors of the hidden patches of ``inputs``, 0 for visible ones."""
        wanted = split_patches(targets, self.patch)
        if self.normalise:
            mean, deviation = _moments(wanted)
            wanted = (wanted - mean) / deviation
        error = (split_patches(outputs.to(wanted.dtype), self.patch) - wanted).square().mean(-1)
        return error.masked_fill(~hidden_patches(inputs, self.patch), 0.0)

    def to_pixels(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Predicted images as pixels. With ``normalise`` only the true patches say their scale."""
        if not self.normalise:
            return outputs
        mean, deviation = _moments(split_patches(targets, self.patch))
        return join_patches(split_patches(outputs, self.patch) * deviation + mean, self.patch)

    def test_images(self) -> tuple[Tensor, Tensor]:
        """The test images with their hidden patches NaN, and whole."""
        images, _ = self.data.some_test(self.test)
        generator = torch.Generator().manual_seed(self.seed)
        counts = torch.full((len(images),), self.most)
        hidden = draw_masks(counts, self.patches, generator).to(images.device)
        return hide_patches(images, hidden, self.patch), images

    def measures(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Measures:
        """Sums and numbers of the measures of predicted images, of a model or a baseline."""
        errors = self.errors(outputs, inputs, targets).double()
        found = {"test_loss": (errors.sum().item(), float(self.terms(inputs, targets)))}
        if not self.normalise:  # every image has as many hidden patches as any other
            each = errors.sum(1) / self.most
            decibels = -10 * each.clamp_min(LEAST_ERROR).log10()
            found["test_psnr"] = (decibels.sum().item(), float(len(inputs)))
        return found

    def evaluate(
        self, model: nn.Module, rank: int, world: int, iterations: int | None = None
    ) -> Measures:
        inputs, targets = (part[rank::world] for part in self.test_images())
        options = {} if iterations is None else {"iterations": iterations}
        names = ("test_loss",) if self.normalise else ("test_loss", "test_psnr")
        sums: Measures = {name: (0.0, 0.0) for name in names}
        model.eval()
        for part, whole in zip(inputs.split(self.batch), targets.split(self.batch), strict=True):
            if len(part):  # a process may have no test images
                with torch.no_grad():
                    outputs = model(part, **options)
                for name, (total, number) in self.measures(outputs, part, whole).items():
                    sums[name] = (sums[name][0] + total, sums[name][1] + number)
        return sums


def draw_masks(counts: Tensor, patches: int, generator: torch.Generator) -> Tensor:
    """Uniform masks (B, N) bool with ``counts`` (B,) patches hidden of each image's N."""
    order = torch.rand(len(counts), patches, generator=generator).argsort(1)
    return order.argsort(1) < counts.unsqueeze(1)


def _moments(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the pixels of patches (B, N, P), (B, N, 1) each."""
    variance, mean = torch.var_mean(patches, -1, correction=0, keepdim=True)
    return mean, (variance + FLAT).sqrt()
