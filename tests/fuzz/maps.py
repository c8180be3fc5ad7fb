"""Maps and energies for random fixed-point problems, each with a bound on its rounding errors.

A map works on vectors z (B, D) with parameters ``s`` (B, 1), ``b`` (B, D) of each sample and a matrix
``w`` (D, D) of all, in any dtype. ``terms`` are the magnitudes that its rounding errors are relative
to: in a dtype of unit ``eps`` an evaluation is off by at most about ``(D + 8) eps terms``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Formula = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (z, s, b, w) -> (B, D)


class Map(NamedTuple):
    """``f`` in the solve's dtype, ``exact`` the same in float64 (None: f), ``terms`` (B, D)."""

    f: Formula
    terms: Formula
    exact: Formula | None = None
    elementwise: bool = False  # the same numbers in whatever batch


def _linear_terms(z: Tensor, s: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return s.abs() * (z.abs() @ w.abs().T) + b.abs()


def _network_terms(z: Tensor, s: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return s.abs() * (z.abs() @ w.abs().T + b.abs() + 1)


def _affine_terms(z: Tensor, s: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return (s * z).abs() + b.abs()


def _root_terms(z: Tensor, s: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """The root enlarges an error of its argument without bound as that goes to zero."""
    size = _affine_terms(z, s, b, w)
    inside = (s * z + b).abs().clamp_min(1e-300)
    return size / (2 * inside.sqrt()) + inside.sqrt()


def _affine_in_place(z: Tensor, s: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return z.mul_(s).add_(b)


MAPS: dict[str, Map] = {
    "linear": Map(lambda z, s, b, w: s * (z @ w.T) + b, _linear_terms),
    "affine": Map(lambda z, s, b, w: s * z + b, _affine_terms, elementwise=True),
    "tanh": Map(lambda z, s, b, w: s * torch.tanh(z @ w.T + b), _network_terms),
    "cos": Map(lambda z, s, b, w: s * torch.cos(z @ w.T + b), _network_terms),
    "relu": Map(lambda z, s, b, w: s * torch.relu(z @ w.T + b), _network_terms),
    "round": Map(lambda z, s, b, w: s * torch.round(z) + b,
        lambda z, s, b, w: (s * torch.round(z)).abs() + b.abs(), elementwise=True),
    "box": Map(lambda z, s, b, w: (z - s * (z @ w.T - b)).clamp(-1.0, 1.0),
        lambda z, s, b, w: z.abs() + s.abs() * (z.abs() @ w.abs().T + b.abs())),
    "sqrt": Map(lambda z, s, b, w: torch.sqrt(s * z + b), _root_terms, elementwise=True),
    "log": Map(lambda z, s, b, w: s * torch.log(z) + b,
        lambda z, s, b, w: s.abs() * (torch.log(z).abs() + 1) + b.abs(), elementwise=True),
    "exp": Map(lambda z, s, b, w: s * torch.exp(z) + b,
        lambda z, s, b, w: s.abs() * torch.exp(z) + b.abs(), elementwise=True),
    "logistic": Map(lambda z, s, b, w: s * z * (1 - z) + b,
        lambda z, s, b, w: (s * z).abs() * (1 + z.abs()) + b.abs(), elementwise=True),
    "cubic": Map(lambda z, s, b, w: z - s * z * z * z + b,
        lambda z, s, b, w: z.abs() + (s * z * z * z).abs() + b.abs(), elementwise=True),
    "constant": Map(lambda z, s, b, w: b.clone(), lambda z, s, b, w: b.abs(), elementwise=True),
    "identity": Map(lambda z, s, b, w: z, lambda z, s, b, w: z.abs(), elementwise=True),
    "zero": Map(lambda z, s, b, w: 0 * z, lambda z, s, b, w: 0 * z, elementwise=True),
    "in place": Map(_affine_in_place, _affine_terms, lambda z, s, b, w: s * z + b, elementwise=True),
    "relu in place": Map(lambda z, s, b, w: z.mul_(s).add_(b).relu_(), _affine_terms,
        lambda z, s, b, w: torch.relu(s * z + b), elementwise=True),
}  # fmt: skip
# Maps of a Lipschitz constant not above |s|, where the spectral norm of w is 1.
LIPSCHITZ = {"linear", "affine", "tanh", "cos", "relu", "in place", "relu in place", "constant"}
IN_PLACE = {"in place", "relu in place"}


class Potential(NamedTuple):
    """A sum of ``density`` over D, and ``map`` is ``z - dE/dz`` in closed form."""

    density: Formula
    map: Map


def _descent(gradient: Formula, terms: Formula) -> Map:
    return Map(
        lambda z, s, b, w: z - gradient(z, s, b, w), lambda z, s, b, w: z.abs() + terms(z, s, b, w)
    )


POTENTIALS: dict[str, Potential] = {
    "quadratic": Potential(
        lambda z, s, b, w: 0.5 * s * (z - b) ** 2,
        _descent(lambda z, s, b, w: s * (z - b), lambda z, s, b, w: s.abs() * (z.abs() + b.abs())),
    ),
    "coupled": Potential(
        lambda z, s, b, w: 0.25 * s * z * (z @ (w + w.T)) + 0.5 * z * z - b * z,
        _descent(
            lambda z, s, b, w: 0.5 * s * (z @ (w + w.T)) + z - b,
            lambda z, s, b, w: s.abs() * (z.abs() @ (w.abs() + w.abs().T)) + z.abs() + b.abs(),
        ),
    ),
    "cosh": Potential(
        lambda z, s, b, w: torch.cosh(z - b) + 0 * s,
        _descent(
            lambda z, s, b, w: torch.sinh(z - b) + 0 * s,
            lambda z, s, b, w: torch.cosh(z - b) * (1 + z.abs() + b.abs()),
        ),
    ),
    "quartic": Potential(
        lambda z, s, b, w: 0.25 * z**4 - 0.5 * z**2 - s * b * z,
        _descent(
            lambda z, s, b, w: z**3 - z - s * b,
            lambda z, s, b, w: z.abs() ** 3 + z.abs() + (s * b).abs(),
        ),
    ),
    "unbounded": Potential(
        lambda z, s, b, w: -0.3 * z**2 - b * z + 0 * s,
        _descent(lambda z, s, b, w: -0.6 * z - b, lambda z, s, b, w: z.abs() + b.abs()),
    ),
}
