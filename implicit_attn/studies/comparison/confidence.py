"""What tells a model's mistakes and foreign images from the others: AUROC of several signals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies import EquilibriumEnergy
from implicit_attn.studies.comparison.robustness import BATCH, add_noise, predictions
from implicit_attn.studies.comparison.solves import (
    Solve,
    equilibria,
    latest_energy,
    latest_residual,
    limited,
    watched,
)
from implicit_attn.studies.tables import Table
from implicit_attn.updates import GradientStep

EARLY = 2  # evaluations after which the residual is taken as a signal
NOISE = 0.3  # deviation of the noise under which a model makes enough mistakes to be counted
POWER = 12  # Hessian products of a curvature
RIDGE = 1e-6  # of a covariance, relative to its mean variance
SOFTMAX = "softmax"
Signals = dict[str, Tensor]


def auroc(positive: Tensor, negative: Tensor) -> float:
    """The probability that a positive score is above a negative one, ties counted half; NaN if none.

    Args:
        positive, negative: (P,) and (N,), finite.
    """
    if len(positive) == 0 or len(negative) == 0:
        return float("nan")
    ordered = negative.double().sort().values
    wanted = positive.double()
    below = torch.searchsorted(ordered, wanted).double()
    upto = torch.searchsorted(ordered, wanted, right=True).double()
    return ((below + upto) / (2 * len(negative))).mean().item()


def smallest_curvature(solve: Solve, products: int = POWER) -> Tensor | None:
    """(B,): about the smallest eigenvalue of the energy's Hessian at the state of a solve.

    A power iteration on ``I - Hess`` that starts at the state. Other energies than
    ``EquilibriumEnergy``, whose eigenvalues are at most 1, would need another shift: None for them.
    """
    update = solve.layer.update
    energy = getattr(update, "energy", None)
    if not isinstance(update, GradientStep) or not isinstance(energy, EquilibriumEnergy):
        return None
    prepared = update.prepare(solve.x, mask=solve.mask)
    v = solve.z / solve.z.flatten(1).norm(dim=1).clamp_min(1e-12)[:, None, None]
    found = v.new_zeros(len(v))
    for _ in range(products):
        curved = energy.hvp(solve.z, v, prepared, mask=solve.mask)
        found = (v * curved).flatten(1).sum(1)
        v = v - curved
        v = v / v.flatten(1).norm(dim=1).clamp_min(1e-12)[:, None, None]
    return found


class Reference(NamedTuple):
    """Mean (K,) and inverse covariance (K, K) of rows of K numbers, float64."""

    mean: Tensor
    precision: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Reference:
        """Of ``rows`` (N, K), N >= 2; directions in which they do not differ get a small variance."""
        covariance = torch.atleast_2d(torch.cov(rows.T))
        size = covariance.diagonal().mean().clamp_min(1e-12)
        ridge = RIDGE * size * torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        return cls(rows.mean(0), torch.linalg.inv(covariance + ridge))

    def distance(self, rows: Tensor) -> Tensor:
        """Squared Mahalanobis distance of ``rows`` (N, K) from the mean, (N,)."""
        away = rows - self.mean
        return ((away @ self.precision) * away).sum(1)


def signals(model: nn.Module, images: Tensor, known: Tensor | None = None) -> Signals:
    """Scores of images (N, ...) that are to be high where a model is out of its depth, each (N,).

    "softmax" is one minus the largest probability, the usual baseline. Of equilibria also "energy"
    (at the equilibrium, summed over the layers), "residual" (relative, after ``EARLY`` evaluations)
    and "flatness" (minus the smallest eigenvalue of the Hessian of the first layer's energy).

    With ``known`` images, of training, there are Mahalanobis distances from them: "profile", of the
    numbers of an equilibrium, and "features", of what the model's ``norm`` gives, averaged over the
    tokens. The latter, which needs no equilibrium, is that of Lee et al.
    (https://arxiv.org/abs/1807.03888) with one mean for all classes.
    """
    found, features = _measure(model, images)
    if known is None:
        return found
    usual, usual_features = _measure(model, known)
    own = [name for name in found if name != SOFTMAX]
    if own:
        rows, usual_rows = (
            torch.stack([each[name] for name in own], dim=1) for each in (found, usual)
        )
        # Units differ by orders of magnitude, which the ridge must not see.
        scale = usual_rows.std(0).clamp_min(1e-12)
        found["profile"] = Reference.of(usual_rows / scale).distance(rows / scale)
    if features is not None and usual_features is not None:
        found["features"] = Reference.of(usual_features).distance(features)
    return found


def _measure(model: nn.Module, images: Tensor) -> tuple[Signals, Tensor | None]:
    """The signals that need no reference, and the features (N, d), if the model has a ``norm``."""
    model.eval()
    parts: list[Signals] = []
    features: list[Tensor] = []
    norm = getattr(model, "norm", None)

    def keep(module: nn.Module, given: Any, made: Tensor) -> None:
        features.append(made.flatten(1, -2).mean(1) if made.dim() > 2 else made)

    with torch.no_grad():
        for part in images.split(BATCH):
            handle = norm.register_forward_hook(keep) if isinstance(norm, nn.Module) else None
            with watched(model) as solves:
                found = {SOFTMAX: 1 - F.softmax(model(part).double(), dim=1).amax(1)}
            if handle is not None:
                handle.remove()
            energy = latest_energy(model)
            if energy is not None:
                found["energy"] = energy.double()
            curvature = smallest_curvature(solves[0]) if solves else None
            if curvature is not None:
                found["flatness"] = -curvature.double()
            if equilibria(model):
                with limited(model, EARLY):
                    model(part)
                residual = latest_residual(model)
                assert residual is not None  # the layers have just solved
                found["residual"] = residual.double()
            parts.append(found)
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return joined, torch.cat(features).double() if features else None


def foreign_images(images: Tensor, labels: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Images like ``images`` (N, C, H, W) that show none of their classes, by name.

    "pixels drawn": every pixel drawn from all pixels of all images; "pixels shuffled": the pixels of
    an image in another order; "inverted": one minus the image; "two blended": the mean of two images
    of different classes, as many as there are such pairs.
    """
    generator = torch.Generator().manual_seed(seed)
    number, flat = len(images), images.flatten(1)
    drawn = flat.flatten()[torch.randint(flat.numel(), flat.shape, generator=generator)]
    order = torch.rand(flat.shape, generator=generator).argsort(1).to(images.device)
    other = torch.randperm(number, generator=generator).to(images.device)
    differ = labels != labels[other]
    return {
        "pixels drawn": drawn.view_as(images),
        "pixels shuffled": flat.gather(1, order).view_as(images),
        "inverted": 1 - images,
        "two blended": ((images + images[other]) / 2)[differ],
    }


def confidence(
    models: Mapping[str, nn.Module],
    images: Tensor,
    labels: Tensor,
    *,
    known: Tensor | None = None,
    foreign: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> Table:
    """How well the signals of each model tell its mistakes, and foreign images, from the others.

    Args:
        models: by name; images (B, C, H, W) -> logits (B, classes), put into evaluation mode.
        images, labels: of the kind that the models know, in [0, 1], none of them seen in training.
        known: images of training, for the signals that are distances; None: without these.
        foreign: images of other kinds by name; None: :func:`foreign_images`.
        seed: of the noise, and of these images.

    Returns:
        Rows with task, model, signal, auroc (0.5 is chance), positives and negatives. The tasks are
        "mistakes", "mistakes under noise" (Gaussian, of deviation ``NOISE``) and the foreign kinds.
    """
    kinds = foreign_images(images, labels, seed) if foreign is None else dict(foreign)
    noisy = add_noise(images, NOISE, torch.Generator().manual_seed(seed))
    shown = {"": images, "mistakes under noise": noisy, **kinds}
    lengths = [len(each) for each in shown.values()]
    table: Table = []
    for name, model in models.items():
        # All at once, so that the reference is made once.
        together = signals(model, torch.cat(list(shown.values())), known)
        columns = {key: score.split(lengths) for key, score in together.items()}
        scores = {
            task: {key: column[place] for key, column in columns.items()}
            for place, task in enumerate(shown)
        }
        for task, source in (("mistakes", ""), ("mistakes under noise", "mistakes under noise")):
            wrong = predictions(model, shown[source]) != labels
            pairs = {key: (score[wrong], score[~wrong]) for key, score in scores[source].items()}
            table += _rows(task, name, pairs)
        for task in kinds:
            pairs = {key: (scores[task][key], scores[""][key]) for key in columns}
            table += _rows(task, name, pairs)
    return table


def _rows(task: str, model: str, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> Table:
    return [
        {
            "task": task,
            "model": model,
            "signal": signal,
            "auroc": auroc(positive, negative),
            "positives": len(positive),
            "negatives": len(negative),
        }
        for signal, (positive, negative) in pairs.items()
    ]
