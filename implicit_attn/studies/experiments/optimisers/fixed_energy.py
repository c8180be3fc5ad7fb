"""The attention forms as optimisers of one query's energy among keys that stay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_attn.kernels import covariance_product
from implicit_attn.models.attention.newton import covariances
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.tables import Table
from solvers.core.checks import require_count, require_positive

Number = float | Tensor


class Method(NamedTuple):
    r"""A method of descent: ``p <- beta p + g(at)``, ``q <- q - eta p``, with a direction g.

    Attributes:
        name: what it is called.
        order: g is the gradient (0), the truncated Newton direction ``sum_(r<=order) (C/T)^r w``, or
            the exact one ``(I - C/T)^-1 w`` (None).
        momentum: beta, 0 for none.
        nesterov: ``at = q - eta beta p``, else ``at = q``.
        tuned: eta and beta come from the curvatures at the minimum in place of ``1`` and ``momentum``.
    """

    name: str
    order: int | None = 0
    momentum: float = 0.0
    nesterov: bool = False
    tuned: str = ""


METHODS = (
    Method("Newton", order=None),
    Method("Newton, order 4", order=4),
    Method("Newton, order 2", order=2),
    Method("Newton, order 1", order=1),
    Method("plain"),
    Method("Nesterov 0.5", momentum=0.5, nesterov=True),
    Method("Nesterov 0.9", momentum=0.9, nesterov=True),
    Method("momentum 0.5", momentum=0.5),
    Method("momentum 0.9", momentum=0.9),
    Method("plain, tuned", tuned="plain"),
    Method("Nesterov, tuned", nesterov=True, tuned="nesterov"),
    Method("momentum, tuned", tuned="momentum"),
)


class Elastic(NamedTuple):
    r"""``F(q) = -T log sum_j exp(-|q - k_j|^2 / (2T))`` of queries (B, 1, N, p), keys (B, 1, M, p).

    Its gradient is ``w = q - m``, the distance to the mean m of the keys under the attention weights
    P, and its Hessian ``I - C/T`` with their covariance C.
    """

    keys: Tensor
    temperature: float

    def weights(self, query: Tensor) -> Tensor:
        """P, (B, 1, N, M)."""
        scores = query @ self.keys.mT - 0.5 * self.keys.square().sum(-1).unsqueeze(-2)
        return torch.softmax(scores / self.temperature, dim=-1)

    def direction(self, query: Tensor, order: int | None = 0) -> Tensor:
        """The gradient, or a Newton direction as of :class:`Method`, (B, 1, N, p)."""
        weights = self.weights(query)
        mean = weights @ self.keys
        total = term = query - mean
        if order is None:
            return torch.linalg.solve(self._hessian(weights), total)
        for _ in range(order):
            term = covariance_product(weights, self.keys, term, mean=mean) / self.temperature
            total = total + term
        return total

    def curvatures(self, query: Tensor) -> Tensor:
        """Eigenvalues of the Hessian, ascending, (B, 1, N, p)."""
        return torch.linalg.eigvalsh(self._hessian(self.weights(query)))

    def _hessian(self, weights: Tensor) -> Tensor:
        eye = torch.eye(self.keys.shape[-1], dtype=weights.dtype, device=weights.device)
        return eye - covariances(weights, self.keys) / self.temperature


def tuned_constants(method: str, low: Tensor, high: Tensor) -> tuple[Number, Number]:
    r"""The eta and beta that are best for a quadratic whose curvatures lie in [low, high] ::

        plain       eta = 2 / (high + low),                      rate (k - 1) / (k + 1)
        momentum    eta = 4 / (sqrt high + sqrt low)^2,
                    beta = ((sqrt k - 1) / (sqrt k + 1))^2,      rate sqrt beta
        nesterov    eta = 1 / high,  beta = (sqrt k - 1) / (sqrt k + 1),   rate 1 - 1 / sqrt k

    with ``k = high / low``; ``nesterov`` is the usual choice, not quite the best.

    Source: Lessard, Recht, Packard (2016), https://arxiv.org/abs/1408.3595, section 4; Polyak (1964).
    """
    root_low, root_high = low.sqrt(), high.sqrt()
    ratio = (root_high - root_low) / (root_high + root_low)
    if method == "plain":
        return 2 / (high + low), 0.0
    if method == "momentum":
        return 4 / (root_high + root_low).square(), ratio.square()
    return 1 / high, ratio


def descend(
    energy: Elastic,
    query: Tensor,
    method: Method,
    *,
    steps: int,
    curvatures: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a method from ``query`` (B, 1, N, p).

    Args:
        energy: F.
        query: where it starts.
        method: with ``tuned`` it needs ``curvatures``.
        steps: how many.
        curvatures: the least and the largest at the minimum, (B, 1, 1, 1) each.

    Returns:
        The norm of the gradient at the start and after each step, (steps + 1, B, N), and the end.
    """
    eta: Number = 1.0
    beta: Number = method.momentum
    if method.tuned:
        if curvatures is None:
            raise ValueError(f"curvatures must be given for the method {method.name!r}, got None")
        eta, beta = tuned_constants(method.tuned, *curvatures)
    momentum, norms = torch.zeros_like(query), [gradient_norms(energy, query)]
    for _ in range(steps):
        at = query - eta * beta * momentum if method.nesterov else query
        momentum = beta * momentum + energy.direction(at, method.order)
        query = query - eta * momentum
        norms.append(gradient_norms(energy, query))
    return torch.stack(norms), query


def gradient_norms(energy: Elastic, query: Tensor) -> Tensor:
    """(B, N) of the queries."""
    return energy.direction(query).norm(dim=-1).squeeze(1)


def first_below(norms: Tensor, bound: float) -> Tensor:
    """The first step (B, N) from which on all norms (steps + 1, B, N) are <= bound, else inf."""
    # Up to the last norm above it: heavy-ball oscillates, and may pass below only for a moment.
    beyond = ~(norms <= bound)
    last = (torch.arange(1, len(norms) + 1).view(-1, 1, 1) * beyond).amax(0).double()
    return last.masked_fill(last == len(norms), math.inf)


def compare_methods(
    *,
    keys: int = 9,
    dim: int = 4,
    temperature: float = 1.6,
    starts: int = 5,
    draws: int = 20,
    steps: int = 600,
    bound: float = 1e-10,
    seed: int = 0,
    methods: Sequence[Method] = METHODS,
    advance: Advance = lambda what: None,
) -> tuple[Table, Table]:
    """Steps that each method takes to a gradient of norm ``bound``, for random keys and starts.

    Args:
        keys, dim: of the keys from N(0, I), drawn ``draws`` times.
        temperature: T.
        starts: from N(0, I) for each draw of the keys.
        draws: independent sets of keys; the first one is drawn as curves.
        steps: at most.
        bound: > 0.
        seed: of keys and starts.
        methods: what is compared.
        advance: called with the name of each method.

    Returns:
        A table with a row for each method: ``steps`` (the median of the starts for the first keys,
        inf where it is not reached), ``most``, the median, least and largest over all draws and
        starts, ``reached`` (the share of starts that come below the bound) and ``minima`` (the share of
        these that end at a minimum, not at a saddle); and a table of the norms after each step, the
        median of the first draw's starts. The least and largest curvature at the minima of the first
        draw stand in both columns ``curvature``.

    Raises:
        ValueError: for a number below its bound.
    """
    counts = {"keys": keys, "dim": dim, "starts": starts, "draws": draws, "steps": steps}
    for name, value in counts.items():
        require_count(name, value)
    require_positive("temperature", temperature)
    require_positive("bound", bound)
    generator = torch.Generator().manual_seed(seed)
    held, first = (
        torch.randn(draws, 1, count, dim, generator=generator, dtype=torch.float64)
        for count in (keys, starts)
    )
    energy = Elastic(held, temperature)
    curvatures = curvatures_at_minima(energy, first)
    table: Table = []
    curves: Table = []
    for method in methods:
        advance(method.name)
        norms, end = descend(energy, first, method, steps=steps, curvatures=curvatures)
        taken = first_below(norms, bound)
        row = _summary(method, taken, energy.curvatures(end)[..., 0].squeeze(1))
        low, high = (each.flatten()[0].item() for each in curvatures)
        table.append(row | {"least_curvature": low, "largest_curvature": high})
        middle = norms[:, 0].median(dim=-1).values.tolist()
        curves += [
            {"method": method.name, "step": step, "norm": norm} for step, norm in enumerate(middle)
        ]
    return table, curves


def curvatures_at_minima(energy: Elastic, query: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest curvature at the minima that the queries run to, (B, 1, 1, 1) each."""
    for _ in range(500):  # mean shift, which always descends
        query = query - energy.direction(query)
    found = energy.curvatures(query)
    low, high = found.amin((-2, -1), keepdim=True), found.amax((-2, -1), keepdim=True)
    # Where mean shift is still on its way the least one may lie below zero, which has no root.
    return low.clamp_min(1e-6), high


def _summary(method: Method, taken: Tensor, least: Tensor) -> dict[str, float | str]:
    reached = taken.isfinite()
    minima = (least > 0) & reached
    return {
        "method": method.name,
        "steps": taken[0].median().item(),
        "most": taken[0].max().item(),
        "all_median": taken.flatten().median().item(),
        "all_least": taken.min().item(),
        "all_most": taken.max().item(),
        "reached": reached.double().mean().item(),
        "minima": (minima.sum() / reached.sum()).item(),
    }
