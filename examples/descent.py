"""How many steps do attention forms need to minimise the energy of one query?

    python examples/descent.py        # a few seconds

A query among fixed keys has the energy ``F(q) = -T log sum_j exp(-|q - k_j|^2 / (2T))``. Its gradient
is ``q - m``, where m is the mean of the keys under the attention weights; its Hessian is ``I - C/T`` with
their covariance C. A plain step of length 1 is softmax attention with the keys as values; momentum,
Nesterov's and Newton's method give other attention forms. To a gradient of 1e-10, Newton's method takes 5
steps, the plain step 43 and untuned momentum 441.
"""

import math
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, run
from torch import Tensor

from implicit_attn.kernels import covariance_product
from implicit_attn.models.attention import covariances

KEYS, STARTS, DIM, TEMPERATURE = 9, 5, 4, 1.6  # keys and starts are drawn from N(0, I)
BOUND = 1e-10  # norm of the gradient that is to be reached
FAMILIES = {"Newton": "C0", "plain": "black", "Nesterov": "C2", "momentum": "C3"}


class Method(NamedTuple):
    r"""``p <- beta p + g(at)``, ``q <- q - eta p`` with ``at = q - eta beta p`` (Nesterov) or q.

    The direction g is the gradient (order 0), ``sum_(r<=order) (C/T)^r w``, or ``(I - C/T)^-1 w`` (None).
    The eta and beta of a tuned method come from the curvatures at the minimum.
    """

    name: str
    order: int | None = 0
    beta: float = 0.0
    tuned: bool = False

    @property
    def family(self) -> str:
        return next(family for family in FAMILIES if self.name.startswith(family))


METHODS = (
    Method("Newton", None),
    *(Method(f"Newton, order {order}", order) for order in (4, 2, 1)),
    Method("plain"),
    *(Method(f"Nesterov {beta}", 0, beta) for beta in (0.5, 0.9)),
    *(Method(f"momentum {beta}", 0, beta) for beta in (0.5, 0.9)),
    *(Method(f"{name}, tuned", tuned=True) for name in ("plain", "Nesterov", "momentum")),
)


class Energy(NamedTuple):
    """F of queries (B, 1, N, p) among keys (B, 1, M, p)."""

    keys: Tensor

    def weights(self, query: Tensor) -> Tensor:
        scores = query @ self.keys.mT - 0.5 * self.keys.square().sum(-1).unsqueeze(-2)
        return torch.softmax(scores / TEMPERATURE, dim=-1)

    def hessian(self, query: Tensor) -> Tensor:
        eye = torch.eye(self.keys.shape[-1], dtype=query.dtype)
        return eye - covariances(self.weights(query), self.keys) / TEMPERATURE

    def direction(self, query: Tensor, order: int | None = 0) -> Tensor:
        weights = self.weights(query)
        mean = weights @ self.keys
        total = term = query - mean
        if order is None:
            return torch.linalg.solve(self.hessian(query), total)
        for _ in range(order):
            term = covariance_product(weights, self.keys, term, mean=mean) / TEMPERATURE
            total = total + term
        return total


def tuned_constants(family: str, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    r"""The eta and beta that suit a quadratic whose curvatures lie in [low, high] ::

        plain       eta = 2 / (high + low),                      rate (k - 1) / (k + 1)
        momentum    eta = 4 / (sqrt high + sqrt low)^2,
                    beta = ((sqrt k - 1) / (sqrt k + 1))^2,      rate sqrt beta
        Nesterov    eta = 1 / high,  beta = (sqrt k - 1) / (sqrt k + 1),   rate 1 - 1 / sqrt k

    with ``k = high / low``. Source: Lessard, Recht, Packard (2016), https://arxiv.org/abs/1408.3595.
    """
    ratio = (high.sqrt() - low.sqrt()) / (high.sqrt() + low.sqrt())
    if family == "plain":
        return 2 / (high + low), torch.zeros_like(low)
    if family == "momentum":
        return 4 / (high.sqrt() + low.sqrt()).square(), ratio.square()
    return 1 / high, ratio


def descend(
    energy: Energy, query: Tensor, method: Method, steps: int, eta: Any, beta: Any
) -> Tensor:
    """Norms of the gradient at the start and after each step, (steps + 1, B, N)."""
    momentum, norms = torch.zeros_like(query), []
    for step in range(steps + 1):
        norms.append(energy.direction(query).norm(dim=-1).squeeze(1))
        if step < steps:
            at = query - eta * beta * momentum if method.family == "Nesterov" else query
            momentum = beta * momentum + energy.direction(at, method.order)
            query = query - eta * momentum
    return torch.stack(norms)


def descent(
    draws: int = 20,  # number of sets of keys and starts
    steps: int = 600,  # maximum number of steps
    seed: int = 0,  # random seed of keys and starts
) -> Result:
    g = torch.Generator().manual_seed(seed)
    held = torch.randn(draws, 1, KEYS, DIM, generator=g, dtype=torch.float64)
    first = torch.randn(draws, 1, STARTS, DIM, generator=g, dtype=torch.float64)
    energy = Energy(held)
    minima = first
    for _ in range(500):  # mean shift, which always descends
        minima = minima - energy.direction(minima)
    found = torch.linalg.eigvalsh(energy.hessian(minima))
    # Where mean shift is still on its way the least one may lie below zero, which has no root.
    low, high = found.amin((-2, -1), True).clamp_min(1e-6), found.amax((-2, -1), True)
    methods: Table = []
    for method in METHODS:
        tuned = tuned_constants(method.family, low, high) if method.tuned else (1.0, method.beta)
        norms = descend(energy, first, method, steps, *tuned)
        # The first step from which on all norms are at most BOUND, else inf: up to the last norm above it,
        # since heavy-ball oscillates, and may pass below only for a moment.
        above = torch.arange(1, steps + 2).view(-1, 1, 1) * ~(norms <= BOUND)
        taken = above.amax(0).double()
        taken[taken == steps + 1] = math.inf
        row = {"method": method.name, "steps": taken.median().item()}
        methods.append(row | {"least": taken.min().item(), "most": taken.max().item()})

    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    axes.set_title("Attention forms as optimisers of one query's energy")
    for method, row in zip(METHODS, methods, strict=True):
        color, ends = FAMILIES[method.family], [row["least"], row["most"]]
        axes.plot(ends, 2 * [method.name], color=color, linewidth=6, alpha=0.3)
        axes.plot(row["steps"], method.name, "|", color=color, markersize=14, markeredgewidth=2)
        axes.annotate(
            f"{row['steps']:.0f}", (ends[1], method.name), (6, -3), textcoords="offset points"
        )
    axes.invert_yaxis()
    axes.set(
        xscale="log", xlim=(2, 800), xlabel=f"steps to a gradient of {BOUND:g}: median and range"
    )
    axes.grid(axis="x", alpha=0.3)
    return {"methods": methods}, figure


if __name__ == "__main__":
    run(descent)
