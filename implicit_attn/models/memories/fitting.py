"""Patterns of a continuous memory by maximum likelihood."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import wrightomega
from torch import Tensor

from implicit_attn.energies import Hopfield
from solvers.core.checks import require_count, require_nonnegative, require_positive

_root: Any = brentq  # whose annotations allow for a second result


class Fit(NamedTuple):
    """What :func:`fit_patterns` found.

    Attributes:
        memory: with the fitted patterns, in the dtype of the data.
        log_likelihood: the mean of ``log p`` over the data before each step; never falls.
        converged: whether the last step raised it by less than the tolerance.
    """

    memory: Hopfield
    log_likelihood: list[float]
    converged: bool


@torch.no_grad()
def fit_patterns(
    data: Tensor,
    count: int,
    beta: float,
    *,
    start: Tensor | None = None,
    steps: int = 1000,
    tolerance: float = 1e-10,
    generator: torch.Generator | None = None,
) -> Fit:
    r"""Maximum likelihood of the patterns of ``Hopfield(patterns, beta)`` as a density.

    Expectation maximisation. With the attention ``p_mu(z) = softmax_mu(beta x_mu.z)`` and its averages
    over the data ``s_mu = <p_mu(z) z>``, a step solves ``w_mu x_mu = s_mu`` for all patterns at once,
    ``w = softmax_mu(beta |x_mu|^2 / 2)`` being theirs. The gradient of the log-likelihood,
    ``beta (<p_mu(z) z> - w_mu x_mu)``, vanishes where such steps end. Every third step starts from a
    point ahead, on the line through the last two, where the likelihood is higher there. No step
    lowers it.

    The weights of the Gaussians belong to the norms of their centres and the origin is a special
    point: data of very unequal norm want to be scaled or shifted before.

    Args:
        data: (n, d) floating.
        count: number of patterns M <= n.
        beta: inverse temperature, > 0; the Gaussians have the variance 1 / beta.
        start: (M, d) first patterns; None: M different rows of the data, drawn by ``generator``.
        steps: at most so many.
        tolerance: stop where a step raises the mean log-likelihood by less.
        generator: None: PyTorch's own.

    Returns:
        :class:`Fit`; the likelihood has local maxima, of which it finds one. Rows of ``start`` that are
        equal stay equal: such a start converges to a saddle.

    Raises:
        TypeError, ValueError: for other shapes, dtypes or numbers, or data that are not finite.

    Example:
        >>> memory = Hopfield(torch.tensor([[3.0, 0.0], [0.0, 3.0]]), beta=4.0)
        >>> data = memory.sample(2000, torch.Generator().manual_seed(0))
        >>> found = fit_patterns(data, 2, 4.0, start=torch.eye(2)).memory.patterns
        >>> bool((found - memory.patterns).abs().max() < 0.1)
        True

    Source: Dempster, Laird, Rubin (1977), https://doi.org/10.1111/j.2517-6161.1977.tb01600.x; Varadhan
    and Roland (2008), https://doi.org/10.1111/j.1467-9469.2007.00585.x, for the jumps.
    """
    _check(data, count, start)
    require_positive("beta", beta)
    require_count("steps", steps)
    require_nonnegative("tolerance", tolerance)
    if start is None:
        device = "cpu" if generator is None else generator.device
        order = torch.randperm(len(data), generator=generator, device=device)[:count]
        start = data[order.to(data.device)]
    wide = data.detach().double()  # differences of 1e-10 decide when to stop
    patterns, values, converged = start.detach().to(wide), list[float](), False
    behind: list[Tensor] = []  # the patterns of the last steps
    while len(values) < steps and not converged:
        after, value = _step(wide, patterns, beta)
        if len(behind) == 2:
            ahead = _jump(*behind, patterns)
            after_ahead, value_ahead = _step(wide, ahead, beta)
            if value_ahead > value:
                after, value = after_ahead, value_ahead
            behind = []
        else:
            behind.append(patterns)
        converged = bool(values) and value - values[-1] < tolerance
        values.append(value)
        patterns = after
    return Fit(Hopfield(patterns.to(data.dtype), beta=beta), values, converged)


def _step(data: Tensor, patterns: Tensor, beta: float) -> tuple[Tensor, float]:
    """The patterns after one step, and the mean log-likelihood before it."""
    logits = beta * data @ patterns.mT
    value = logits.logsumexp(1).mean() - 0.5 * beta * data.square().sum(1).mean()
    value = value - Hopfield(patterns, beta=beta).log_partition()
    return _maximise(logits.softmax(1).mT @ data / len(data), beta), value.item()


def _maximise(shares: Tensor, beta: float) -> Tensor:
    """The patterns with ``w_mu x_mu = s_mu``, ``w = softmax_mu(beta |x_mu|^2 / 2)``, for ``s`` (M, d).

    They maximise ``beta sum_mu s_mu.x_mu - lse_mu(beta |x_mu|^2 / 2)``, which is concave. As
    ``log w - c / w^2 = level`` with ``c = beta |s|^2 / 2`` and one level for all patterns, each w is a
    Lambert function of the level, and one number remains to be found: that for which w sums to 1.
    """
    strength = (beta * shares.square().sum(1)).clamp_min(torch.finfo(torch.float64).tiny)  # 2 c
    double = strength.cpu().numpy()
    logarithm = np.log(double)

    def log_weight(level: float) -> np.ndarray:
        return 0.5 * (logarithm - np.log(wrightomega(logarithm - 2 * level)))

    def log_total(level: float) -> float:
        return float(np.logaddexp.reduce(log_weight(level)))

    count = len(double)
    ends = -math.log(count) - 0.5 * double * count**2  # the levels at which each w is 1 / M
    low, high = float(ends.min()) - 1e-6, float(ends.max()) + 1e-6
    level = _root(log_total, low, high, xtol=1e-14)
    weight = torch.from_numpy(np.exp(log_weight(level))).to(shares)
    return shares / weight.unsqueeze(1)


def _jump(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """Extrapolation of three patterns of which each is the step of the one before (SQUAREM, S3)."""
    change = second - first
    bend = third - second - change
    length = -change.norm() / bend.norm().clamp_min(1e-300)
    length = length.clamp(-1e3, -1.0)
    return first - 2 * length * change + length**2 * bend


def _check(data: object, count: int, start: object) -> None:
    if not isinstance(data, Tensor) or not data.is_floating_point():
        kind = data.dtype if isinstance(data, Tensor) else type(data).__name__
        raise TypeError(f"data must be a floating tensor (n, d), got {kind}")
    if data.dim() != 2 or data.numel() == 0:
        raise ValueError(f"data must have the shape (n, d), got {tuple(data.shape)}")
    if not bool(data.isfinite().all()):
        raise ValueError("data must be finite, got NaN or infinity")
    if require_count("count", count) > len(data):
        raise ValueError(f"count must be at most the {len(data)} rows of data, got {count}")
    if start is None:
        return
    shape = (count, data.shape[1])
    if not isinstance(start, Tensor) or tuple(start.shape) != shape:
        got = tuple(start.shape) if isinstance(start, Tensor) else type(start).__name__
        raise ValueError(f"start must be a tensor of shape {shape}, got {got}")
    if not bool(start.isfinite().all()):
        raise ValueError("start must be finite, got NaN or infinity")
