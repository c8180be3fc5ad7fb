"""Binary associative memories, and fitting a continuous one to data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from implicit_attn.energies import Hopfield
from implicit_attn.energies.tokens import accumulation_dtype, check_tensor
from solvers.core.checks import require_count, require_nonnegative, require_positive

__all__ = ["BinaryMemory", "Fit", "fit_patterns"]

STEPS, RATE = 200, 0.01  # Adam; separable patterns have no maximum likelihood, so steps are limited


def hebb(patterns: Tensor) -> Tensor:
    """Return ``J = X^T X / N`` without its diagonal, (N, N) for patterns X (P, N)."""
    return _without_diagonal(patterns.mT @ patterns / patterns.shape[1])


def pseudo_inverse(patterns: Tensor) -> Tensor:
    """Return ``J = X^+ X``, the projection onto the span of the patterns, without its diagonal, (N, N).

    With N independent patterns the projection is the identity, so J = 0 and no spin ever changes.

    Source: Personnaz, Guyon, Dreyfus (1985), https://doi.org/10.1051/jphyslet:01985004608035900.
    """
    _, values, basis = torch.linalg.svd(patterns.double(), full_matrices=False)
    rounding = max(patterns.shape) * torch.finfo(values.dtype).eps
    basis = basis[values > values[0] * rounding]
    couplings = _without_diagonal(basis.mT @ basis)
    # The diagonal was of order 1, so rounding of rows that should vanish is set to zero.
    return couplings.masked_fill(couplings.abs() <= 4 * rounding, 0.0).to(patterns.dtype)


def pseudo_likelihood(patterns: Tensor, steps: int = STEPS, rate: float = RATE) -> Tensor:
    """Return a symmetric J with zero diagonal that increases the pseudo-likelihood of the patterns::

        sum_mu sum_i log sigma(2 x_i^mu (J x^mu)_i)

    It makes ``steps`` Adam steps of size ``rate`` from J = 0, where the gradient is Hebb's rule. If a J
    exists that stores every pattern, the likelihood has no maximum, and the number of steps determines the
    size of J, which does not change the signs of its fields.

    Source: Besag (1975), https://doi.org/10.2307/2987782; D'Amico and Negri (2024),
    https://arxiv.org/abs/2409.16112, for memories.
    """
    couplings = nn.Parameter(torch.zeros_like(patterns[0]).diag())
    optimizer = torch.optim.Adam([couplings], rate, maximize=True)
    with torch.no_grad():  # the gradient is computed in closed form
        for _ in range(steps):
            doubt = torch.sigmoid(-2 * patterns * (patterns @ couplings)) * patterns
            slope = doubt.mT @ patterns
            couplings.grad = _without_diagonal((slope + slope.mT) / len(patterns))
            optimizer.step()
    return couplings.detach()


def _without_diagonal(matrix: Tensor) -> Tensor:
    return matrix - matrix.diagonal().diag()


PAIR_RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "hebb": hebb,
    "pseudo-inverse": pseudo_inverse,
    "pseudo-likelihood": pseudo_likelihood,
}


NOISE = 16  # rounding errors of a sum within which two energies are equal


class BinaryMemory(nn.Module):
    r"""Binary associative memory that retrieves P patterns of N spins from corrupted copies.

    Pair rules have symmetric couplings J with zero diagonal::

        E(s) = -1/2 sum_ij J_ij s_i s_j,     s_i <- sign(sum_j J_ij s_j)

    Dense rules have a function F of the overlaps ``y_mu = x_mu.s``::

        E(s) = -sum_mu F(y_mu),              s_i <- the sign with the lower energy

    If both energies are equal, the spin does not change. A sequential sweep never increases the energy.

    Args:
        patterns: (P, N) floating-point, entries +1 and -1; copied. Half precision is used for storage only.
        rule: ``"hebb"``, ``J = X^T X / N``, with a capacity of about 0.138 N random patterns;
            ``"pseudo-inverse"``, ``J = X^+ X``, the projection onto them, with a capacity below N;
            ``"pseudo-likelihood"``, J from 200 ascent steps on ``sum_i log p(s_i | others)``;
            an integer n >= 2, ``F(y) = max(y, 0)^n``, with a capacity of order N^(n - 1);
            ``"exp"``, ``F(y) = exp(y - N)``, with a capacity of order 2^(N / 2).

    Attributes:
        patterns: (P, N).
        couplings: (N, N) for pair rules, in float32 or wider, else None.

    Example:
        >>> patterns = (
        ...     torch.randint(2, (3, 50), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
        ... )
        >>> damaged = patterns.clone()
        >>> damaged[:, :5] *= -1
        >>> bool((BinaryMemory(patterns).retrieve(damaged) == patterns).all())
        True

    Source: Hopfield (1982), https://doi.org/10.1073/pnas.79.8.2554; Krotov and Hopfield (2016),
    https://arxiv.org/abs/1606.01164, for powers; Demircigil et al. (2017),
    https://arxiv.org/abs/1702.01929, for the exponential.
    """

    patterns: Tensor
    couplings: Tensor | None

    def __init__(self, patterns: Tensor, rule: str | int = "hebb") -> None:
        super().__init__()
        check_spins("patterns", patterns, "P N")
        self.rule = check_rule(rule)
        self.register_buffer("patterns", patterns.detach().contiguous().clone())
        learn = PAIR_RULES.get(rule) if isinstance(rule, str) else None
        self.register_buffer(
            "couplings", None if learn is None else learn(self._wide()).contiguous()
        )

    @property
    def sites(self) -> int:
        """Number of spins N."""
        return self.patterns.shape[1]

    def energy(self, s: Tensor) -> Tensor:
        """Return ``E(s)``, (B,), for spins (B, N), in float32 or wider, for dense rules in float64.

        Their values exceed the range of float32, for example ``300^20`` and ``exp(-110)``.
        """
        self._check(s)
        if self.couplings is not None:
            couplings = self.couplings.to(accumulation_dtype(self.couplings.dtype))
            s = s.to(couplings.dtype)
            return -0.5 * (s @ couplings * s).sum(-1)
        y = s.double() @ self.patterns.double().mT
        if self.rule == "exp":
            return -(y - self.sites).exp().sum(-1)
        return -self._power(y).sum(-1)

    def retrieve(self, s: Tensor, sweeps: int = 20) -> Tensor:
        """Return the states after at most ``sweeps`` sequential updates of every spin.

        Args:
            s: (B, N), +1 and -1.
            sweeps: maximum number of sweeps, >= 1. On a CPU a sample ends after a sweep without changes.

        Returns:
            (B, N) in the dtype of the patterns; :meth:`is_fixed_point` tests for convergence.
        """
        self._check(s)
        require_count("sweeps", sweeps)
        dtype, moving = s.dtype, s.to(accumulation_dtype(s.dtype))
        found, rows = moving.clone(), torch.arange(len(s), device=s.device)
        for _ in range(sweeps):
            found[rows] = after = self._sweep(moving)
            if s.device.type == "cpu":  # avoid waiting for a GPU
                changed = (after != moving).any(-1)
                rows, after = rows[changed], after[changed]
                if len(rows) == 0:
                    break
            moving = after
        return found.to(dtype)

    def is_fixed_point(self, s: Tensor) -> Tensor:
        """Return whether no spin would change, (B,) bool, for spins (B, N)."""
        self._check(s)
        wide = s.to(accumulation_dtype(s.dtype))
        return (self._sweep(wide) == wide).all(-1)

    def _wide(self) -> Tensor:
        """Return the patterns in the dtype of computations."""
        return self.patterns.to(accumulation_dtype(self.patterns.dtype))

    def _sweep(self, s: Tensor) -> Tensor:
        """Return the states (B, N) after one update of every spin in turn."""
        s, patterns = s.clone(), self._wide()
        y, eps = s @ patterns.mT, NOISE * torch.finfo(s.dtype).eps  # overlaps (B, P)
        couplings = None if self.couplings is None else self.couplings.to(s.dtype)
        largest = None if couplings is None else couplings.abs().sum(-1).amax()
        for i, column in enumerate(patterns.mT):
            old = s[:, i].clone()
            if couplings is not None and largest is not None:
                field, size = s @ couplings[i], largest
            else:
                rest = y - torch.outer(old, column)
                if self.rule == "exp":  # exp(rest + 1) - exp(rest - 1) is a multiple of exp(rest)
                    weight = rest.softmax(-1)
                else:
                    above, below = (self._power((rest + e) / self.sites) for e in (1, -1))
                    weight = above - below
                field, size = weight @ column, weight.abs().sum(-1)
            # If the field is zero up to rounding, the spin does not change.
            s[:, i] = torch.where(field.abs() <= eps * size, old, field.sign())
            y += torch.outer(s[:, i] - old, column)
        return s

    def _power(self, y: Tensor) -> Tensor:
        """Return ``max(y, 0)^n`` by squares: pow is ten times as slow for exponents above 3."""
        found = y = y.clamp_min(0)
        for bit in bin(int(self.rule))[3:]:
            found = found * found * y if bit == "1" else found * found
        return found

    def _check(self, s: Tensor) -> None:
        check_spins("s", s, "B N", dtype=self.patterns.dtype, N=self.sites)

    def extra_repr(self) -> str:
        return f"patterns={tuple(self.patterns.shape)}, rule={self.rule!r}"


def check_rule(rule: object) -> str | int:
    """Check for a pair rule, ``"exp"``, or an integer >= 2."""
    if isinstance(rule, int) and not isinstance(rule, bool) and rule >= 2:
        return rule
    if isinstance(rule, str) and rule in (*PAIR_RULES, "exp"):
        return rule
    raise ValueError(f"rule must be one of {(*PAIR_RULES, 'exp')} or an integer >= 2, got {rule!r}")


def check_spins(name: str, spins: Any, shape: str, **wanted: Any) -> None:
    """Check for a matrix of +1 and -1; ``wanted`` are options of ``check_tensor``."""
    if not bool((check_tensor(name, spins, shape, **wanted).abs() == 1).all()):
        raise ValueError(f"{name} must contain only +1 and -1")


class Fit(NamedTuple):
    """Result of :func:`fit_patterns`.

    Attributes:
        memory: memory with the fitted patterns, in the dtype of the data.
        log_likelihood: mean of ``log p`` over the data before each step, which never decreases.
        converged: whether the last step increased it by less than the tolerance.
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
    r"""Fit the patterns of ``Hopfield(patterns, beta)`` as a density by maximum likelihood.

    The method is expectation maximisation. With the attention ``p_mu(z) = softmax_mu(beta x_mu.z)`` and its
    averages over the data ``s_mu = <p_mu(z) z>``, a step solves ``w_mu x_mu = s_mu`` for all patterns with
    their weights ``w = softmax_mu(beta |x_mu|^2 / 2)``. Every third step starts from an extrapolation of the
    last two, if the likelihood is higher there. The weights of the Gaussians depend on the norms of their
    centres: scale or shift data with very unequal norms.

    Args:
        data: (n, d) floating-point.
        count: number of patterns M <= n.
        beta: inverse temperature > 0; the Gaussians have variance 1 / beta.
        start: (M, d) initial patterns; None for M different rows of the data, drawn by ``generator``.
        steps: maximum number of steps.
        tolerance: increase of the mean log-likelihood below which the fit stops.
        generator: random generator; None for PyTorch's default.

    Returns:
        A :class:`Fit` at a local maximum of the likelihood. Equal rows of ``start`` remain equal, so
        such a start converges to a saddle.

    Example:
        >>> memory = Hopfield(torch.tensor([[3.0, 0.0], [0.0, 3.0]]), beta=4.0)
        >>> data = memory.sample(2000, torch.Generator().manual_seed(0))
        >>> found = fit_patterns(data, 2, 4.0, start=torch.eye(2)).memory.patterns
        >>> bool((found - memory.patterns).abs().max() < 0.1)
        True

    Source: Dempster, Laird, Rubin (1977), https://doi.org/10.1111/j.2517-6161.1977.tb01600.x; Varadhan
    and Roland (2008), https://doi.org/10.1111/j.1467-9469.2007.00585.x, for the extrapolation.
    """
    check_tensor("data", data, "n d")
    if require_count("count", count) > len(data):
        raise ValueError(f"count must be at most the {len(data)} rows of data, got {count}")
    if start is not None:
        check_tensor("start", start, "M d", M=count, d=data.shape[1])
    require_positive("beta", beta)
    require_count("steps", steps)
    require_nonnegative("tolerance", tolerance)
    if start is None:
        device = "cpu" if generator is None else generator.device
        order = torch.randperm(len(data), generator=generator, device=device)[:count]
        start = data[order.to(data.device)]
    wide = data.detach().double()  # the stopping rule compares differences of 1e-10
    patterns, values, converged = start.detach().to(wide), list[float](), False
    behind: list[Tensor] = []  # patterns of the last steps
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
    """Return the patterns after one step, and the mean log-likelihood before it."""
    logits = beta * data @ patterns.mT
    value = logits.logsumexp(1).mean() - 0.5 * beta * data.square().sum(1).mean()
    value = value - Hopfield(patterns, beta=beta).log_partition()
    return _maximise(logits.softmax(1).mT @ data / len(data), beta), value.item()


def _maximise(shares: Tensor, beta: float) -> Tensor:
    """Return patterns with ``w_mu x_mu = s_mu``, ``w = softmax_mu(beta |x_mu|^2 / 2)``, for ``s`` (M, d).

    They maximise the concave function ``beta sum_mu s_mu.x_mu - lse_mu(beta |x_mu|^2 / 2)``. Because
    ``log w - c / w^2 = level`` with ``c = beta |s|^2 / 2`` and one level for all patterns, each w is a
    Lambert function of the level, and the only unknown is the level for which w sums to 1.
    """
    from scipy.optimize import brentq  # loads hundreds of modules
    from scipy.special import wrightomega

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
    root: Any = brentq  # its annotations include a second result
    level = root(log_total, low, high, xtol=1e-14)
    weight = torch.from_numpy(np.exp(log_weight(level))).to(shares)
    return shares / weight.unsqueeze(1)


def _jump(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """Extrapolate three successive iterates (SQUAREM, S3)."""
    change = second - first
    bend = third - second - change
    length = -change.norm() / bend.norm().clamp_min(1e-300)
    length = length.clamp(-1e3, -1.0)
    return first - 2 * length * change + length**2 * bend
