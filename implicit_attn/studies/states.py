"""States: where they end from other starts; energies, ranks and angles of their tokens on the way."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import solvers
from implicit_attn.energies.feedforward import HyperSETEnergy
from implicit_attn.models import HyperSET
from implicit_attn.optional import progress
from implicit_attn.studies import study
from implicit_attn.studies.study import BLUE, GREEN, GREY, ORANGE, Subject, Table

SAME = 1e-2  # relative distance up to which two ends count as one
START = "input"  # the start with whose end the others are compared
SMALLEST = 1e-12  # smaller distances are drawn here: a logarithmic axis has no zero
RTOL, MAX_STEPS = 1e-6, 300  # to which each start is solved
LABELS = {"same": "same end", "agreement": f"prediction as from {START}", "accuracy": "accuracy"}


class Paths(NamedTuple):
    """Result of :func:`paths`.

    Attributes:
        summary: rows with start, distance (median of ``|z - z_input| / |z_input|``), distance_90 (90 %
            quantile), distance_largest, same (share of samples within 1e-2), residual (median) and
            energy (mean) where they are defined, and with targets agreement (share of predictions
            equal to those from the input) and accuracy.
        distances: those of every sample (B,), by start.
    """

    summary: Table
    distances: dict[str, Tensor]

    def plot(self, title: str = "") -> Any:
        """Draw two panels: distances of the ends, and agreement of the predictions."""
        figure = study.new_figure((12, 4.7), title)
        left, right = figure.subplots(1, 2)
        starts = list(self.distances)
        for start in starts[1:]:
            left.ecdf(self.distances[start].clamp_min(SMALLEST), label=f"from {start}")
        left.axvline(SAME, color=GREY, linestyle=":", label="counted as the same point")
        left.set(xlabel=f"relative distance to the end from {START}", xscale="log")
        left.set_ylabel("share of samples up to there")
        left.legend(edgecolor="none", framealpha=1)  # no line runs through its words
        shown = {key: text for key, text in LABELS.items() if key in self.summary[0]}
        for number, (key, text) in enumerate(shown.items()):
            places = [k + 0.25 * number for k in range(len(starts))]
            bars = right.bar(places, [100 * row[key] for row in self.summary], 0.25, label=text)
            right.bar_label(bars, fmt="%.1f", fontsize=7)
        middle = 0.125 * (len(shown) - 1)
        right.set_xticks(
            [k + middle for k in range(len(starts))], [f"from {each}" for each in starts]
        )
        right.set(ylabel="share of samples, %", ylim=(0, 118))
        right.legend(frameon=False, loc="upper right", ncols=3, fontsize=8)
        return figure


@torch.no_grad()
def paths(layer: Any, x: Any = None, targets: Tensor | None = None, *, starts: int = 2) -> Paths:
    """Compare where a layer ends from its input, from zero and from random starts, in float64.

    An equilibrium is solved from each start to 1e-6. An unrolled model is run from each start, its
    input being the same, for as many iterations as in training.

    Args:
        layer, x: as for :func:`convergence`; the state must be one tensor.
        targets: labels (B,) of the model's outputs; None: without predictions.
        starts: number of random starts, Gaussian with the RMS of each sample's usual start.
    """
    subject = study.subject_of(layer, x, targets).exact()
    inputs = subject.inputs
    given, mask = subject.given(inputs)
    if subject.recurrence is not None:
        usual, end_from = given, partial(subject.recurrence, given)
    else:
        solve = partial(subject.layer.solve, given, mask, on_failure="ignore")
        # Whatever its ``init`` and its energy make of the input.
        usual = solve(max_steps=1, solver=solvers.Forward()).value

        def end_from(z0: Tensor) -> Tensor:
            return solve(z0=z0, tolerance=solvers.Tolerance(rtol=RTOL), max_steps=MAX_STEPS).value

    if not isinstance(usual, Tensor):
        raise TypeError(f"layer must have a state of one tensor, got a {type(usual).__name__}")
    every = progress(starts_like(usual, starts).items(), "starts")
    ends = {name: end_from(z0=z0) for name, z0 in every}
    target = ends[START].flatten(1)
    size = target.norm(dim=1).clamp_min(torch.finfo(target.dtype).tiny)
    summary, distances = Table(), dict[str, Tensor]()
    for name, end in ends.items():
        distance = distances[name] = ((end.flatten(1) - target).norm(dim=1) / size).cpu()
        row: dict[str, Any] = {"start": name, **study.median_and_largest("distance", distance)}
        row["same"] = (distance <= SAME).double().mean().item()
        if subject.recurrence is None:
            update = subject.layer.update
            image = update(end, update.prepare(given, mask=mask), mask=mask).flatten(1)
            residual = (image - end.flatten(1)).norm(dim=1) / image.norm(dim=1)
            row["residual"] = residual.median().item()
        energy = subject.energy(end, given, mask)
        if energy is not None:
            row["energy"] = energy.mean().item()
        if subject.targets is not None:
            logits, wanted = (subject.outputs(inputs, each) for each in (end, ends[START]))
            same = (logits.argmax(-1) == wanted.argmax(-1)).double().mean().item()
            row |= {"agreement": same, "accuracy": subject.judge(logits)["accuracy"]}
        summary.append(row)
    return Paths(summary, distances)


def starts_like(z: Tensor, random: int, seed: int = 0) -> dict[str, Tensor]:
    """``z`` (B, ...) itself, zero, and Gaussian starts with each sample's RMS."""
    generator = torch.Generator().manual_seed(seed)
    size = z.flatten(1).square().mean(1).sqrt().reshape(-1, *([1] * (z.dim() - 1)))
    starts = {START: z, "zero": torch.zeros_like(z)}
    for number in range(1, random + 1):
        noise = torch.randn(z.shape, generator=generator, dtype=z.dtype).to(z.device)
        starts[f"random {number}"] = size * noise
    return starts


COLORS = {"attention": ORANGE, "feedforward": BLUE, "whole": GREEN}


class Geometry(NamedTuple):
    """Result of :func:`geometry`, with a row for each iteration from 0.

    Attributes:
        energies: by name, (1 + T, B): attention and feedforward of Hyper-SET, whole of another energy.
        rank, angle: (1 + T, heads), effective rank and average angle (degrees), means over the samples.
        trained: iterations in training.
    """

    energies: dict[str, Tensor]
    rank: Tensor
    angle: Tensor
    trained: int

    def plot(self, title: str = "") -> Any:
        """Draw four panels: two energies, effective rank and angle per head."""
        figure = study.new_figure((12, 8.5), title)
        panels = list(figure.subplots(2, 2).flat)
        for panel, (name, energy) in zip(panels, self.energies.items(), strict=False):
            label = f"{name} energy: median (band: 10 % to 90 %)"
            study.draw_band(panel, range(len(energy)), energy.mT, COLORS[name], label)
        panels[2].plot(self.rank, "o-", markersize=3)
        panels[2].set_title("Effective rank of a head's tokens")
        heads = [f"head {number + 1}" for number in range(self.angle.shape[1])]
        panels[3].plot(self.angle, "o-", markersize=3, label=heads)
        panels[3].set_title("Average angle of a head's tokens, degrees")
        for number, panel in enumerate(panels):
            if len(self.energies) <= number < 2:
                study.leave_empty(panel, "this layer has no further energy")
                continue
            panel.axvline(self.trained, color=GREY, linestyle=":", label="as in training")
            panel.set_xlabel("iteration")
            panel.legend(frameon=False, fontsize=8)
        return figure


@torch.no_grad()
def geometry(layer: Any, x: Any = None, *, iterations: int | None = None) -> Geometry:
    """Measure energies, effective ranks and angles of tokens along the iterations of a layer.

    Ranks and angles are those of the heads of a Hyper-SET energy, else of the tokens as they are.
    Of an equilibrium the states are those that the layer returns after 1, 2, ... evaluations; the
    first one is its start, iteration 0.

    Args:
        layer, x: as for :func:`convergence`, or a Hyper-SET model.
        iterations: how many; None: as many as in training.

    Raises:
        TypeError: an unrolled model is not Hyper-SET.
    """
    subject = study.subject_of(layer, x)
    number = iterations or subject.trained
    energies: dict[str, list[Tensor]] = {}
    ranks, angles = [], []
    for inputs in progress(list(subject.parts()), "batches"):
        found, features = _observe(subject, inputs, number)
        for name, values in found.items():
            energies.setdefault(name, []).append(values)
        ranks.append(effective_rank(features))
        angles.append(average_angle(features))
    joined = {name: torch.cat(parts, dim=1).cpu() for name, parts in energies.items()}
    rank, angle = (torch.cat(parts, dim=1).mean(1).cpu() for parts in (ranks, angles))
    return Geometry(joined, rank, angle, subject.trained)


def _observe(subject: Subject, inputs: Any, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return energies by name, (1 + T, B) each, and features (1 + T, B, heads, N, p)."""
    x, mask = subject.given(inputs)
    if subject.recurrence is not None:
        if not isinstance(subject.recurrence, HyperSET):
            kind = type(subject.recurrence).__name__
            raise TypeError(f"layer must be a DEQ or Hyper-SET, got {kind}")
        found = subject.recurrence.trajectory(x, iterations=number)
        pair = {"attention": found.attention_energy, "feedforward": found.feedforward_energy}
        return pair, found.features
    layer = subject.layer
    options: Any = {"tolerance": solvers.Tolerance(rtol=0.0), "on_failure": "ignore"}
    states = [layer.solve(x, mask, max_steps=k + 1, **options).value for k in range(number + 1)]
    energy: Any = getattr(layer.update, "energy", None)
    if isinstance(energy, HyperSETEnergy):
        attention: Any = energy.attention
        parts: Any = {"attention": attention, "feedforward": energy.feedforward}
        energies = {name: torch.stack([part(z) for z in states]) for name, part in parts.items()}
        return energies, torch.stack([attention.energy.features(z) for z in states])
    whole = [each for z in states if (each := subject.energy(z, x, mask)) is not None]
    return {"whole": torch.stack(whole)} if whole else {}, torch.stack(states).unsqueeze(2)


def effective_rank(tokens: Tensor) -> Tensor:
    """Effective rank of sets of tokens (..., N, p): ``exp(-sum_i p_i log p_i)``, ``p = sigma / sum sigma``.

    ``sigma`` are the singular values. The rank is between 1 (all tokens on one line) and
    ``min(N, p)`` (all singular values equal); it is 0 where all tokens are zero. (...), float64.

    Source: O. Roy, M. Vetterli, "The effective rank" (EUSIPCO 2007); Hyper-SET, appendix D.5
    (https://arxiv.org/abs/2502.11646).
    """
    singular = torch.linalg.svdvals(tokens.double())
    total = singular.sum(-1, keepdim=True)
    share = singular / torch.where(total > 0, total, 1.0)
    rank = torch.special.entr(share).sum(-1).exp()
    return torch.where(total.squeeze(-1) > 0, rank, 0.0)


def average_angle(tokens: Tensor) -> Tensor:
    """``arccos`` of the mean cosine over all pairs of different tokens (..., N, p), N >= 2, in degrees.

    0 where all tokens point the same way, 90 where they are orthogonal; at most
    ``arccos(-1 / (N - 1))``. A zero token counts as orthogonal to every other. (...), float64.

    Source: Hyper-SET, appendix D.5 (https://arxiv.org/abs/2502.11646).
    """
    number = tokens.shape[-2]
    if number < 2:
        raise ValueError(f"tokens must be at least two, got shape {tuple(tokens.shape)}")
    unit = F.normalize(tokens.double(), dim=-1)
    # The square of the sum of unit vectors sums the cosines of all pairs, and each with itself.
    pairs = unit.sum(-2).square().sum(-1) - unit.square().sum((-2, -1))
    return torch.rad2deg(torch.arccos((pairs / (number * (number - 1))).clamp(-1.0, 1.0)))
