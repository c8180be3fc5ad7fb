"""The geometry study: energies of Hyper-SET, rank and angle of its tokens, per iteration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.hyperset_energy import HyperSETEnergy
from implicit_attn.models import HyperSET, HyperSETEquilibrium
from implicit_attn.studies.evaluations import returned_within
from implicit_attn.studies.subjects import Subject
from implicit_attn.studies.tables import Table
from implicit_attn.updates import GradientStep


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


def geometry(subject: Subject, iterations: int) -> tuple[Table, Table]:
    """Energies, effective ranks and angles of a Hyper-SET model along its iterations.

    For the equilibrium the states are those that the layer returns after 1, 2, ... evaluations;
    the first one is its input.

    Args:
        subject: whose backbone is ``HyperSET`` or ``HyperSETEquilibrium``.
        iterations: of each layer; for the equilibrium, evaluations after the first.

    Returns:
        Rows with iteration, attention_energy and feedforward_energy (means over the samples) and
        their 10 % and 90 % quantiles ``_10`` and ``_90``; and rows with iteration, head,
        effective_rank and angle (degrees), means over the samples.

    Raises:
        TypeError: for another backbone, which has no such energies.
    """
    energies: list[Tensor] = []
    spaces: list[Tensor] = []
    with torch.no_grad():
        for inputs, _ in subject.parts():
            pair, features = _observe(subject, subject.tokens(inputs), iterations)
            energies.append(pair.double())
            spaces.append(torch.stack([effective_rank(features), average_angle(features)]))
    both, shape = torch.cat(energies, dim=-1), torch.cat(spaces, dim=2).mean(2)
    table: Table = []
    for step in range(both.shape[1]):
        row: dict[str, Any] = {"iteration": step}
        for name, values in zip(("attention", "feedforward"), both[:, step], strict=True):
            row[f"{name}_energy"] = values.mean().item()
            row[f"{name}_energy_10"] = values.quantile(0.1).item()
            row[f"{name}_energy_90"] = values.quantile(0.9).item()
        table.append(row)
    heads: Table = [
        {"iteration": step, "head": head, "effective_rank": rank, "angle": angle}
        for step in range(shape.shape[1])
        for head, (rank, angle) in enumerate(shape[:, step].T.tolist())
    ]
    return table, heads


def check_observed(subject: Subject) -> Any:
    """The backbone, which must be one whose energies can be told apart; TypeError for another."""
    backbone = getattr(subject.model, "backbone", None)
    if not isinstance(backbone, (HyperSET, HyperSETEquilibrium)):
        raise TypeError(
            f"the backbone must be HyperSET or HyperSETEquilibrium, got {type(backbone).__name__}"
        )
    return backbone


def _observe(subject: Subject, x: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Both energies (2, 1 + T, B) and features (1 + T, B, heads, N, p)."""
    backbone = check_observed(subject)
    if isinstance(backbone, HyperSET):
        found = backbone.trajectory(x, iterations=iterations)
        return torch.stack([found.attention_energy, found.feedforward_energy]), found.features
    update = backbone.layer.update
    assert isinstance(update, GradientStep) and isinstance(update.energy, HyperSETEnergy)
    energy: Any = update.energy
    budgets = range(1, iterations + 2)
    states = [each.value for each in returned_within(backbone.layer, x, budgets)]
    pair = torch.stack(
        [torch.stack([energy.attention(z), energy.feedforward(z)]) for z in states], dim=1
    )
    return pair, torch.stack([energy.attention.energy.features(z) for z in states])


def _check_tokens(tokens: Tensor) -> None:
    if tokens.dim() < 2 or not tokens.is_floating_point():
        raise ValueError(
            f"tokens must be floating point (..., N, p), got {tokens.dtype} {tuple(tokens.shape)}"
        )
