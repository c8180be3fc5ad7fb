"""How pair couplings are made from patterns: Hebb, pseudo-inverse, pseudo-likelihood."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

STEPS, RATE = 200, 0.01  # of Adam; separable patterns have no largest likelihood, so it must end


def hebb(patterns: Tensor) -> Tensor:
    """``J = X^T X / N`` without its diagonal, (N, N) for patterns X (P, N)."""
    return _without_diagonal(patterns.mT @ patterns / patterns.shape[1])


def pseudo_inverse(patterns: Tensor) -> Tensor:
    """``J = X^+ X``, the projection onto the span of the patterns, without its diagonal, (N, N).

    From N independent patterns on it is the identity: J = 0 then, and no spin ever changes.

    Source: Personnaz, Guyon, Dreyfus (1985), https://doi.org/10.1051/jphyslet:01985004608035900.
    """
    _, values, basis = torch.linalg.svd(patterns.double(), full_matrices=False)
    rounding = max(patterns.shape) * torch.finfo(values.dtype).eps
    basis = basis[values > values[0] * rounding]
    couplings = _without_diagonal(basis.mT @ basis)
    # The diagonal was of order 1; what is left of a row that should be empty would set signs.
    return couplings.masked_fill(couplings.abs() <= 4 * rounding, 0.0).to(patterns.dtype)


def pseudo_likelihood(patterns: Tensor, steps: int = STEPS, rate: float = RATE) -> Tensor:
    """Symmetric J, zero on the diagonal, that raises the pseudo-likelihood of the patterns::

        sum_mu sum_i log sigma(2 x_i^mu (J x^mu)_i)

    ``steps`` steps of Adam from J = 0, of size ``rate``. The first one follows Hebb's rule, the
    gradient at J = 0. Where a J exists that keeps every pattern, the likelihood has no maximum, and
    the number of steps decides about the size of J, to which the signs of its fields are blind.

    Source: Besag (1975), https://doi.org/10.2307/2987782; D'Amico and Negri (2024),
    https://arxiv.org/abs/2409.16112, for memories.
    """
    couplings = torch.zeros_like(patterns[0]).diag()
    first, second = torch.zeros_like(couplings), torch.zeros_like(couplings)
    for step in range(1, steps + 1):
        # By hand: the gradient is a product of matrices, and no graph is recorded.
        doubt = torch.sigmoid(-2 * patterns * (patterns @ couplings)) * patterns
        slope = doubt.mT @ patterns
        slope = _without_diagonal((slope + slope.mT) / len(patterns))
        first = torch.lerp(slope, first, 0.9)
        second = torch.lerp(slope.square(), second, 0.999)
        root = (second / (1 - 0.999**step)).sqrt() + 1e-8
        couplings = couplings + rate / (1 - 0.9**step) * first / root
    return couplings


def log_pseudo_likelihood(patterns: Tensor, couplings: Tensor) -> Tensor:
    """``mean_mu sum_i log sigma(2 x_i (J x)_i)``, a scalar, for patterns (P, N) and J (N, N)."""
    return F.logsigmoid(2 * patterns * (patterns @ couplings.mT)).sum(1).mean()


def _without_diagonal(matrix: Tensor) -> Tensor:
    return matrix - matrix.diagonal().diag()


PAIR_RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "hebb": hebb,
    "pseudo-inverse": pseudo_inverse,
    "pseudo-likelihood": pseudo_likelihood,
}
