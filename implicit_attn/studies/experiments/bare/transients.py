"""Where the step of bare attention takes corrupted images, and what it passes on the way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from implicit_attn.energies import BareAttention
from implicit_attn.studies.experiments.bare.pipeline import Setup
from implicit_attn.studies.tables import Table
from implicit_attn.updates import BareAttentionStep
from solvers.core.checks import require_count, require_nonnegative, require_number

FOLDED, MEAN = "noise folded, no model", "mean direction of each pixel"


@dataclass(frozen=True)
class Corruption:
    """How a run starts.

    Attributes:
        sigma: of the normal noise on the angles (denoising).
        masked: so many patches start at random angles; where it is not 0 the others are right and
            held, and there is no noise (masked patches).
        gamma: of the step.
        steps: of a run.

    Raises:
        TypeError, ValueError: a value out of range.
    """

    sigma: float = 0.8
    masked: int = 0
    gamma: float = 0.5
    steps: int = 100

    def __post_init__(self) -> None:
        require_nonnegative("sigma", self.sigma)
        require_count("masked", self.masked, low=0)
        require_number("gamma", self.gamma, low=0.0, high=1.0)
        require_count("steps", self.steps)


@dataclass(frozen=True)
class Run:
    """The states of one set of images along the steps."""

    originals: Tensor  # (M, N, 2p)
    states: list[Tensor]
    free: Tensor  # (M, N) bool, the patches that move


def run(setup: Setup, model: BareAttention, originals: Tensor, how: Corruption) -> Run:
    """The normalised step, pixels on their circles, from corrupted ``originals`` (M, N, 2p).

    Raises:
        ValueError: more masked patches than there are.
    """
    check_masked(setup, how.masked)
    generator = torch.Generator().manual_seed(setup.seed + 2)
    codec = setup.codec
    step = BareAttentionStep(model, gamma=how.gamma, radius=setup.radius, circles=codec.values)
    if not how.masked:
        start = codec.noisy(originals, how.sigma, generator)
        free = torch.ones(originals.shape[:2], dtype=torch.bool)
        return Run(originals, step.trajectory(start, how.steps), free)
    order = torch.rand(originals.shape[:2], generator=generator).argsort(1)
    free = order < how.masked
    start = torch.where(free.unsqueeze(-1), codec.random(len(originals), generator), originals)
    return Run(originals, step.trajectory(start, how.steps, clamped=~free), free)


def check_masked(setup: Setup, masked: int) -> None:
    """ValueError where ``masked`` is more than the patches of an image."""
    if masked > setup.codec.sites:
        raise ValueError(
            f"masked must be at most the {setup.codec.sites} patches of an image, got {masked}"
        )


def baselines(setup: Setup, noisy: Run) -> Table:
    """Overlap with the originals that needs no couplings: ``predictor``, ``overlap``.

    Angles folded into the half circle of the values, which undoes a part of the noise by itself, and
    the mean direction of every pixel of the training images.
    """
    codec = setup.codec
    mean = setup.train.mean(0).unflatten(-1, (-1, 2))
    mean = (mean / mean.norm(dim=-1, keepdim=True).clamp_min(1e-12)).flatten(-2)
    guesses = {
        FOLDED: codec.encode(codec.decode(noisy.states[0]).clamp(0.0, 1.0)),
        MEAN: mean.expand_as(noisy.originals),
    }
    return [
        {
            "predictor": name,
            "overlap": (guess * noisy.originals).sum(-1).mean().item() / codec.values,
        }
        for name, guess in guesses.items()
    ]


def iterate_mean(setup: Setup, model: BareAttention, begun: Run, steps: int) -> Run:
    """The conditional means of the free patches in place of the step, from the start of ``begun``."""
    states, free = [begun.states[0]], begun.free.unsqueeze(-1)
    with torch.no_grad():
        for _ in range(steps):
            states.append(torch.where(free, model.conditionals(states[-1]).mean(), states[-1]))
    return Run(begun.originals, states, begun.free)


def measure(setup: Setup, model: BareAttention, found: Run, steps: Iterable[int]) -> Table:
    """At each of ``steps``: overlap, pixel error, energy, residual; means over images and free patches.

    ``overlap`` is ``z_i.z_i* / p`` with the original z*, 1 where they agree, 0 for random angles;
    ``error`` the root mean square of pixel values; ``energy`` E of an image; ``residual`` the relative
    change of the state in the step that led there (NaN at the start), the median of the images.
    """
    codec, free = setup.codec, found.free
    wanted = codec.decode_patches(found.originals)[free]
    table: Table = []
    for step in steps:
        state = found.states[step]
        overlap = (state * found.originals).sum(-1)[free] / codec.values
        error = (codec.decode_patches(state)[free] - wanted).square().mean().sqrt()
        with torch.no_grad():
            energy = model(state).mean()
        residual = float("nan")
        if step:
            residual = _relative_change(found.states[step - 1], state).median().item()
        table.append(
            {
                "step": step,
                "overlap": overlap.mean().item(),
                "error": error.item(),
                "energy": energy.item(),
                "residual": residual,
            }
        )
    return table


def transients(
    setup: Setup, models: dict[str, BareAttention], how: Corruption, images: int
) -> tuple[Table, dict[str, Run]]:
    """:func:`measure` for each model on training and test images, and the runs on test images.

    Columns ``model`` and ``part`` (train, test) come first.
    """
    steps = [step for step in _shown(how.steps) if step <= how.steps]
    table: Table = []
    runs: dict[str, Run] = {}
    for name, model in models.items():
        for part in ("train", "test"):
            found = run(setup, model, getattr(setup, part)[:images], how)
            rows = measure(setup, model, found, steps)
            table += [{"model": name, "part": part} | row for row in rows]
            runs[name] = found
    return table, runs


def _shown(last: int) -> list[int]:
    """Every step at first, then fewer: 0, 1, ..., 10, 12, 15, 20, 25, ..., and the last."""
    steps, step = list(range(min(last, 10) + 1)), 10
    while step < last:
        step = min(last, step + max(2, step // 4))
        steps.append(step)
    return steps


def _relative_change(before: Tensor, after: Tensor) -> Tensor:
    """``|after - before| / |after|`` of each sample."""
    return (after - before).flatten(1).norm(dim=1) / after.flatten(1).norm(dim=1)
