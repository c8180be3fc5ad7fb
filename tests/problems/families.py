"""Families of random fixed points, minimisers and roots whose answers are known, one problem a row.

Their answers come from closed forms, scikit-learn, or plain iteration polished by semi-smooth Newton steps
with dense Jacobians; none of the package's solvers is involved.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import Lasso
from torch import Generator, Tensor

from problems import matvec, normal, orthogonal

Map = Callable[..., Tensor]


@dataclass
class Family:
    """Problems ``z = f(z, *args)``, one a row of ``z0``; with ``energy`` minimisers, with ``F`` roots.

    ``exact`` is the answer where it is known, to be polished by :meth:`reference`. ``runaway``: long steps
    do not raise the residual. ``coupled``: so many rows at a time influence each other and are one call.
    """

    f: Map
    z0: Tensor
    args: tuple[Tensor, ...]
    exact: Tensor | None = None
    energy: Map | None = None
    F: Map | None = None
    runaway: bool = False
    coupled: int = 0

    def reference(self, steps: int = 20_000) -> Tensor:
        """The answer from plain iteration and semi-smooth Newton steps with dense Jacobians."""
        z = self.z0 if self.exact is None else self.exact
        for step in range(steps):
            image = self.f(z, *self.args)
            if step % 100 == 0 and bool((relative(image, z) < 1e-14).all()):
                break
            z = image
        for _ in range(30):
            if self.coupled or bool((relative(self.f(z, *self.args), z) < 1e-13).all()):
                break
            J: Any = torch.func.vmap(torch.func.jacrev(self._row))(z, *self.args)
            n = z[0].numel()
            system = torch.eye(n).to(z) - J.reshape(-1, n, n)
            residual = (self.f(z, *self.args) - z).reshape(-1, n)
            trial = z + torch.linalg.lstsq(system, residual[..., None]).solution.reshape(z.shape)
            worse = relative(self.f(trial, *self.args), trial) > relative(self.f(z, *self.args), z)
            z = torch.where(worse.view(-1, *[1] * (z.ndim - 1)), self.f(z, *self.args), trial)
        far = relative(self.f(z, *self.args), z)
        if not bool((far < 1e-10).all()):
            raise RuntimeError(f"no reference: relative residuals {far.tolist()}")
        return z

    def first(self, count: int) -> Family:
        """The first samples."""
        args = tuple(each[:count] for each in self.args)
        exact = None if self.exact is None else self.exact[:count]
        return replace(self, z0=self.z0[:count], args=args, exact=exact)

    def _row(self, z: Tensor, *args: Tensor) -> Tensor:
        return self.f(z[None], *(each[None] for each in args))[0]


def relative(value: Tensor, exact: Tensor) -> Tensor:
    """``|value - exact| / |exact|`` per sample."""
    return (value - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)


def energy(g: Generator, S: int, scale: float) -> Family:
    """``scale`` times a quadratic (condition number 32) and log-cosh terms, 40 unknowns."""
    Q, W, b = orthogonal(g, S, 40), normal(g, S, 40, 40) / 40**0.5, normal(g, S, 40)
    H = Q @ torch.diag(torch.logspace(-1.5, 0, 40).to(Q)) @ Q.mT

    def E(z: Tensor, H: Tensor, W: Tensor, b: Tensor) -> Tensor:
        d, h = z - b, matvec(W, z).abs()
        logcosh = h + torch.log1p(torch.exp(-2 * h)) - math.log(2)
        return scale * (0.5 * (d * matvec(H, d)).sum(1) + 0.1 * logcosh.sum(1))

    def f(z: Tensor, H: Tensor, W: Tensor, b: Tensor) -> Tensor:
        return z - matvec(H, z - b) - 0.1 * matvec(W.mT, torch.tanh(matvec(W, z)))

    return Family(f, 0.5 * b, (H, W, b), energy=E)


def ill_conditioned(g: Generator, S: int, condition: float) -> Family:
    """A quadratic of this condition number, 40 unknowns."""
    Q, b = orthogonal(g, S, 40), normal(g, S, 40)
    H = Q @ torch.diag(torch.logspace(-math.log10(condition), 0, 40).to(Q)) @ Q.mT

    def E(z: Tensor, H: Tensor, b: Tensor) -> Tensor:
        return 0.5 * ((z - b) * matvec(H, z - b)).sum(1)

    return Family(
        lambda z, H, b: z - matvec(H, z - b), 0 * b, (H, b), exact=b.clone(), energy=E
    )  # fmt: skip


def contraction(g: Generator, S: int, rate: float, kind: str) -> Family:
    """``A z + b`` or ``A (0.7 z + 0.3 tanh z) + b``, A symmetric of norm ``rate`` or random."""
    if "symmetric" in kind:
        Q = orthogonal(g, S, 40)
        A = Q @ torch.diag(torch.linspace(-rate, rate, 40).to(Q)) @ Q.mT
    else:
        W = normal(g, S, 40, 40)
        A = rate * W / torch.linalg.eigvals(W).abs().amax(1)[:, None, None]
    bend = 0.3 if "tanh" in kind else 0.0

    def f(z: Tensor, A: Tensor, b: Tensor) -> Tensor:
        return matvec(A, (1 - bend) * z + bend * torch.tanh(z)) + b

    return Family(f, torch.zeros(S, 40).to(A), (A, normal(g, S, 40)))


def network(g: Generator, S: int) -> Family:
    W, b = 0.9 * normal(g, S, 40, 40) / 40**0.5, normal(g, S, 40)
    return Family(lambda z, W, b: torch.tanh(matvec(W, z) + b), 0 * b, (W, b))


def soft(z: Tensor, threshold: Tensor | float) -> Tensor:
    return z.sign() * (z.abs() - threshold).clamp_min(0)


def lasso(g: Generator, S: int, m: int, n: int, splitting: bool = False) -> Family:
    """``|A z - y|^2 / 2 + |z|_1 / 10`` by ISTA or, with ``splitting``, Douglas-Rachford steps."""
    A, y = normal(g, S, m, n) / m**0.5, normal(g, S, m)
    peer = Lasso(0.1 / m, fit_intercept=False, tol=1e-14, max_iter=1_000_000)
    pairs = zip(A.numpy(), y.numpy(), strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # coordinate descent may stop early; the reference is polished
        x = torch.from_numpy(np.stack([peer.fit(each, target).coef_ for each, target in pairs]))

    def ista(z: Tensor, A: Tensor, y: Tensor, t: Tensor) -> Tensor:
        return soft(z - t * matvec(A.mT, matvec(A, z) - y), 0.1 * t)

    def douglas_rachford(z: Tensor, A: Tensor, y: Tensor, M: Tensor) -> Tensor:
        x = soft(z, 0.1)
        return z + matvec(M, 2 * x - z + matvec(A.mT, y)) - x

    if splitting:
        M = torch.linalg.inv(torch.eye(n).to(A) + A.mT @ A)
        exact = x + matvec(A.mT, y - matvec(A, x))
        return Family(douglas_rachford, 0 * x, (A, y, M), exact, runaway=True)
    t = torch.linalg.matrix_norm(A, 2)[:, None] ** -2
    return Family(ista, 0 * x, (A, y, t), x, runaway=True)


def regression(g: Generator, S: int, kind: str) -> Family:
    """Robust regression, 30 data and 10 unknowns, by gradient steps: bounded residuals."""
    A = normal(g, S, 30, 10)
    y = matvec(A, 3 * normal(g, S, 10)) + (10 if kind == "log-cosh" else 3) * normal(g, S, 30)
    t = torch.linalg.matrix_norm(A, 2)[:, None] ** -2
    slope = {"log-cosh": torch.tanh, "huber": lambda r: r.clamp(-1, 1)}[kind]
    f = lambda z, A, y, t: z - t * matvec(A.mT, slope(matvec(A, z) - y))  # noqa: E731
    return Family(f, torch.zeros(S, 10).to(A), (A, y, t), runaway=True)


def saturating(g: Generator, S: int, slope: Map, start: float, dim: int) -> Family:
    """``z - 0.1 slope(z - c)`` from ``c + start`` and noise."""
    c = 1 + 0.1 * normal(g, S, dim)
    z0 = start - 1 + c + 0.1 * normal(g, S, dim)
    return Family(lambda z, c: z - 0.1 * slope(z - c), z0, (c,), c.clone(), runaway=True)


def roots(g: Generator, S: int, start: float) -> Family:
    """``atan(z - c) = 0``, from ``c + start``."""
    family = saturating(g, S, torch.atan, start, 1)
    F = lambda z, c: torch.atan(z - c)  # noqa: E731
    return Family(lambda z, c: z - F(z, c), family.z0, family.args, family.exact, F=F, runaway=True)


def labels(g: Generator, S: int) -> Family:
    """Label propagation with four classes on a path of 40 nodes, a sample a graph."""
    A = torch.diag(torch.ones(39, dtype=torch.float64), 1)
    P = (A + A.T) / (A + A.T).sum(1, keepdim=True)
    x = normal(g, S, 40, 4)
    return Family(lambda z, x: 0.95 * P @ z + 0.05 * x, x, (x,))


def coupled(g: Generator, S: int) -> Family:
    """Batches of eight rows of unlike sizes, each of which depends on the mean of its batch."""
    W = normal(g, 4, 4)
    W, x = 0.5 * W / torch.linalg.matrix_norm(W, 2), normal(g, 8 * S, 4)
    x = x * torch.logspace(-2, 0, 8).to(x).repeat(S)[:, None]

    def f(z: Tensor, x: Tensor) -> Tensor:
        batches = z.view(-1, 8 if len(z) == 8 * S else len(z), 4)
        mean = batches.mean(1, keepdim=True).expand_as(batches).reshape(z.shape)
        return torch.tanh((z + 0.5 * mean) @ W) + x

    return Family(f, 0 * x, (x,), coupled=8)


FAMILIES: dict[str, Callable[[Generator, int], Family]] = {
    **{f"energy x {name}": lambda g, S, c=c: energy(g, S, c)
       for name, c in {"1/4096": 1 / 4096, "1/64": 1 / 64, "1": 1.0, "64": 64.0}.items()},
    **{f"energy of condition {c:g}": lambda g, S, c=c: ill_conditioned(g, S, c) for c in (1e3, 1e4)},
    **{f"contraction {r} {k}": lambda g, S, r=r, k=k: contraction(g, S, r, k)
       for r in (0.5, 0.9, 0.97) for k in ("symmetric", "random", "symmetric tanh", "random tanh")},
    "tanh network": network,
    **{f"lasso {m}x{n}": lambda g, S, m=m, n=n: lasso(g, S, m, n)
       for m, n in ((6, 10), (20, 50), (5, 12))},
    "douglas-rachford": lambda g, S: lasso(g, S, 6, 10, splitting=True),
    "huber": lambda g, S: regression(g, S, "huber"),
    "log-cosh": lambda g, S: regression(g, S, "log-cosh"),
    **{f"{name} from {start}": lambda g, S, s=s, start=start, d=d: saturating(g, S, s, start, d)
       for name, s, d in (("tanh", torch.tanh, 1), ("arctan", torch.atan, 4)) for start in (3, 8)},
    "root of atan from 2": lambda g, S: roots(g, S, 2.0),
    "root of atan from 4": lambda g, S: roots(g, S, 4.0),
    "label propagation": labels,
    "coupled rows": coupled,
}  # fmt: skip
