"""The geometry study: energies of a layer, rank and angle of its tokens, iteration by iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import solvers
from implicit_attn.energies.feedforward import HyperSETEnergy
from implicit_attn.models import HyperSET
from implicit_attn.studies.subjects import Subject, subject_of
from implicit_attn.studies.tables import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Study,
    Table,
    draw_band,
    leave_empty,
)

COLORS = {"attention": ORANGE, "feedforward": BLUE, "whole": GREEN}
TITLES = {"attention": "Attention energy", "feedforward": "Feed-forward energy", "whole": "Energy"}


@dataclass(frozen=True)
class Geometry(Study):
    """What :func:`geometry` finds.

    Attributes:
        energies: rows with iteration, and for each energy its mean over the samples (a column
            ``NAME_energy``) and its 10 % and 90 % quantiles; NAME is attention and feedforward of
            Hyper-SET, whole of another energy.
        heads: rows with iteration, head, effective_rank and angle (degrees), means over the samples.
        trained: iterations in training.
    """

    energies: Table
    heads: Table
    trained: int
    printed = ("energies",)
    size = (12, 8.5)

    def draw(self, figure: Any) -> None:
        """Four panels: two energies, effective rank and angle per head."""
        axes = figure.subplots(2, 2)
        kinds = [key.removesuffix("_energy") for key in self.energies[0] if key.endswith("_energy")]
        for panel in axes[0]:
            panel.set(xlabel="iteration", ylabel="energy")
        for panel, kind in zip(axes[0], kinds, strict=False):
            look = {"marker": "o", "markersize": 3.5}
            key, color = f"{kind}_energy", COLORS[kind]
            draw_band(
                panel, self.energies, "iteration", key, color, "mean (band: 10 % to 90 %)", **look
            )
            panel.set_title(TITLES[kind])
        for panel in axes[0, len(kinds) :]:
            leave_empty(panel, "this layer has no further energy")
        for panel, key, label, name in (
            (axes[1, 0], "effective_rank", "effective rank", "Effective rank of a head's tokens"),
            (axes[1, 1], "angle", "average angle, degrees", "Average angle of a head's tokens"),
        ):
            for head in sorted({row["head"] for row in self.heads}):
                rows = [row for row in self.heads if row["head"] == head]
                steps, values = [row["iteration"] for row in rows], [row[key] for row in rows]
                panel.plot(steps, values, marker="o", markersize=3, label=f"head {head + 1}")
            panel.set(xlabel="iteration", ylabel=label, title=name)
        for panel in (*axes[0, : len(kinds)], *axes[1]):
            if self.heads[-1]["iteration"] > self.trained:
                panel.axvline(self.trained, color=GREY, linestyle=":", label="as in training")
            panel.xaxis.get_major_locator().set_params(integer=True)
            panel.legend(frameon=False, fontsize=8)


def geometry(
    layer: Any,
    x: Any = None,
    *,
    iterations: int | None = None,
) -> Geometry:
    """Energies, effective ranks and angles of tokens along the iterations of a layer.

    Ranks and angles are those of the heads of a Hyper-SET energy, else of the tokens as they are.
    Of an equilibrium the states are those that the layer returns after 1, 2, ... evaluations; the
    first one is its start, iteration 0.

    Args:
        layer, x: as for :func:`convergence`, or a Hyper-SET model.
        iterations: how many; None: as many as in training.

    Raises:
        TypeError: the layer's state has no tokens, or an unrolled model is not Hyper-SET.
    """
    subject = subject_of(layer, x)
    number = iterations or subject.trained
    kinds: dict[str, list[Tensor]] = {}
    spaces: list[Tensor] = []
    with torch.no_grad():
        for inputs, _ in subject.parts():
            energies, seen = _observe(subject, inputs, number)
            for name, values in energies.items():
                kinds.setdefault(name, []).append(values.double())
            spaces.append(torch.stack([effective_rank(seen), average_angle(seen)]))
    shape = torch.cat(spaces, dim=2).mean(2)  # (2, 1 + T, heads)
    table: Table = [{"iteration": step} for step in range(number + 1)]
    for name, parts in kinds.items():
        for row, values in zip(table, torch.cat(parts, dim=-1), strict=True):
            row[f"{name}_energy"] = values.mean().item()
            row[f"{name}_energy_10"] = values.quantile(0.1).item()
            row[f"{name}_energy_90"] = values.quantile(0.9).item()
    heads: Table = [
        {"iteration": step, "head": head, "effective_rank": rank, "angle": angle}
        for step in range(number + 1)
        for head, (rank, angle) in enumerate(shape[:, step].T.tolist())
    ]
    return Geometry(table, heads, subject.trained)


def _observe(subject: Subject, inputs: Any, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """Energies by name, (1 + T, B) each, and features (1 + T, B, heads, N, p)."""
    x, mask = subject.given(inputs)
    if subject.recurrence is not None:
        if not isinstance(subject.recurrence, HyperSET):
            kind = type(subject.recurrence).__name__
            raise TypeError(
                f"layer must be a DEQ or Hyper-SET, whose energies are known; got {kind}"
            )
        found = subject.recurrence.trajectory(x, iterations=number)
        pair = {"attention": found.attention_energy, "feedforward": found.feedforward_energy}
        return pair, found.features
    layer = subject.layer
    options: Any = {"tolerance": solvers.Tolerance(rtol=0.0), "on_failure": "ignore"}
    states = [layer.solve(x, mask, max_steps=k + 1, **options).value for k in range(number + 1)]
    energy: Any = getattr(layer.update, "energy", None)
    features: Callable[[Any], Tensor] = _tokens
    if isinstance(energy, HyperSETEnergy):
        attention: Any = energy.attention
        features = attention.energy.features
        parts: Any = {"attention": energy.attention, "feedforward": energy.feedforward}
        energies = {name: torch.stack([part(z) for z in states]) for name, part in parts.items()}
    else:
        whole = [each for z in states if (each := subject.energy(z, x, mask)) is not None]
        energies = {"whole": torch.stack(whole)} if whole else {}
    return energies, torch.stack([features(z) for z in states])


def _tokens(z: Any) -> Tensor:
    if not isinstance(z, Tensor) or z.dim() != 3:
        raise TypeError(f"layer must have states (B, N, d), got {type(z).__name__}")
    return z.unsqueeze(1)


def effective_rank(tokens: Tensor) -> Tensor:
    """Effective rank of sets of tokens: ``exp(-sum_i p_i log p_i)``, ``p = sigma / sum sigma``.

    ``sigma`` are the singular values. The rank is between 1 (all tokens on one line) and
    ``min(N, p)`` (all singular values equal); it is 0 where all tokens are zero.

    Args:
        tokens: (..., N, p), rows are tokens.

    Returns:
        (...), float64.

    Raises:
        ValueError: the tokens are not floating point of at least two dimensions.

    Source: O. Roy, M. Vetterli, "The effective rank" (EUSIPCO 2007); Hyper-SET, appendix D.5
    (https://arxiv.org/abs/2502.11646).
    """
    _check_tokens(tokens)
    singular = torch.linalg.svdvals(tokens.double())
    total = singular.sum(-1, keepdim=True)
    share = singular / torch.where(total > 0, total, 1.0)
    rank = torch.special.entr(share).sum(-1).exp()
    return torch.where(total.squeeze(-1) > 0, rank, 0.0)


def average_angle(tokens: Tensor) -> Tensor:
    """``arccos`` of the mean cosine over all pairs of different tokens, in degrees.

    0 where all tokens point the same way, 90 where they are orthogonal; at most
    ``arccos(-1 / (N - 1))``. A zero token counts as orthogonal to every other.

    Args:
        tokens: (..., N, p), N >= 2.

    Returns:
        (...), float64.

    Raises:
        ValueError: there are fewer than two tokens, or they are not floating point.

    Source: Hyper-SET, appendix D.5 (https://arxiv.org/abs/2502.11646).
    """
    _check_tokens(tokens)
    number = tokens.shape[-2]
    if number < 2:
        raise ValueError(f"tokens must be at least two, got shape {tuple(tokens.shape)}")
    unit = F.normalize(tokens.double(), dim=-1)
    # The square of the sum of unit vectors sums the cosines of all pairs, and each with itself.
    pairs = unit.sum(-2).square().sum(-1) - unit.square().sum((-2, -1))
    cosine = pairs / (number * (number - 1))
    return torch.rad2deg(torch.arccos(cosine.clamp(-1.0, 1.0)))


def _check_tokens(tokens: Tensor) -> None:
    if tokens.dim() < 2 or not tokens.is_floating_point():
        raise ValueError(
            f"tokens must be floating point (..., N, p), got {tokens.dtype} {tuple(tokens.shape)}"
        )
