"""Is a value that is called CONVERGED right? Families with known answers, in one table.

    python benchmarks/truth.py [--seeds 30] [--families lasso energy] [--out FILE.md] [--json-file FILE]

The error of a value is |z - z*| / |z*| in units of the tolerance 1e-4. A sample is solved if it is CONVERGED
and its error is at most ten tolerances; it is false if it is CONVERGED with a larger error. Every solver has
a budget of 1,000 evaluations; scipy solves the first ten samples of a family. The references are computed
in float64 without the package.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import torch
import tyro
from sklearn.linear_model import Lasso
from torch import Generator, Tensor
from torchdeq.solver import get_solver

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the problems live with the tests

import solvers
from benchmarks.measure import table
from problems import matvec, normal, orthogonal

TOLERANCE, SLACK, BUDGET = 1e-4, 10.0, 1000
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


@dataclass
class Outcome:
    """Values like ``z0``, and per sample whether it is CONVERGED, its evaluations and estimated error."""

    value: Tensor
    converged: Tensor
    evaluations: Tensor
    error: Tensor | None = None


def ours(solver: Any, family: Family) -> Outcome:
    """The package on a family: one call, or one for each batch of coupled rows."""
    options: Any = {"max_steps": BUDGET, "adjoint": None, "on_failure": "ignore", "solver": solver}
    if family.F is not None:
        if solver is None:
            del options["solver"]
        found = [solvers.root(family.F, family.z0, family.args, **options)]
    else:
        f: Any = family.f if family.energy is None else solvers.Descent(family.energy)
        size = family.coupled or len(family.z0)
        batches = [t.split(size) for t in (family.z0, *family.args)]
        found = [
            solvers.fixed_point(f, z, tuple(args), **options)
            for z, *args in zip(*batches, strict=True)
        ]
    errors = [getattr(each, "error", None) for each in found]
    join = lambda name: torch.cat([getattr(each, name) for each in found])  # noqa: E731
    error = None if errors[0] is None else torch.cat(errors)
    return Outcome(join("value").detach(), join("converged"), join("evaluations").double(), error)


def plain(family: Family) -> Outcome:
    """Plain iteration, stopped by an oracle: CONVERGED at the first error within ten tolerances."""
    z, exact, count = family.z0, family.reference(), torch.full((len(family.z0),), math.inf)
    for step in range(1, BUDGET + 1):
        z = family.f(z, *family.args)
        hit = relative(z, exact) <= SLACK * TOLERANCE
        count = torch.where(hit, count.clamp_max(step), math.inf)
    return Outcome(z, torch.isfinite(count), count)


def torchdeq(name: str, family: Family) -> Outcome:
    """A solver of torchdeq; a sample is CONVERGED if its lowest relative residual meets the tolerance."""
    options: Any = {"max_iter": BUDGET, "tol": TOLERANCE, "stop_mode": "rel"}
    count = torch.zeros(len(family.z0))

    def f(z: Tensor) -> Tensor:
        count.add_(1)
        return family.f(z, *family.args) if family.energy is None else z - slope(family, z)[1]

    value, _, info = get_solver(name)(f, family.z0, **options)
    return Outcome(value, info["rel_lowest"].flatten() <= TOLERANCE, count.double())


def slope(family: Family, z: Tensor, args: Any = None) -> tuple[Tensor, Tensor]:
    """Energies (B,) and gradients like z."""
    assert family.energy is not None
    with torch.enable_grad():
        point = z.detach().requires_grad_()
        value = family.energy(point, *(family.args if args is None else args))
        return value.detach(), torch.autograd.grad(value.sum(), point)[0]


def scipy_solver(method: str, family: Family) -> Outcome:
    """A method of scipy, sample by sample, with its tolerances at 1e-4 relative to the start."""
    value, converged, counts = [], [], []
    inf, rel = math.inf, TOLERANCE
    simple = {"maxiter": BUDGET, "fatol": inf, "xatol": inf, "ftol": rel, "xtol": rel}
    for index in range(len(family.z0)):
        row = slice(index, index + 1)
        z0, args, count = family.z0[row], [t[row] for t in family.args], 0

        def point(x: np.ndarray, z0: Tensor = z0) -> Tensor:
            nonlocal count
            count += 1
            return torch.from_numpy(np.array(x)).view_as(z0)

        def F(x: np.ndarray, args: Any = args) -> np.ndarray:
            z = point(x)
            return (z - family.f(z, *args)).numpy().ravel()

        def E(x: np.ndarray, args: Any = args) -> tuple[float, np.ndarray]:
            energies, gradients = slope(family, point(x), args)
            return float(energies), gradients.numpy().ravel()

        x = z0.numpy().ravel()
        try:
            if method == "L-BFGS-B":
                options: Any = {"maxfun": BUDGET, "ftol": 0, "gtol": rel * np.abs(E(x)[1]).max()}
                found = scipy.optimize.minimize(E, x, jac=True, method=method, options=options)
            else:
                options = {"maxfev": BUDGET, "xtol": rel} if method == "hybr" else simple
                known: Any = {"method": method, "options": options}
                found = scipy.optimize.root(F, x, **known)
            value.append(torch.from_numpy(found.x).view_as(z0))
            converged.append(bool(found.success) and count <= BUDGET)
        except Exception:  # a peer's own failure counts as not solved
            value.append(z0)
            converged.append(False)
        counts.append(count)
    return Outcome(torch.cat(value), torch.tensor(converged), torch.tensor(counts).double())


def contestants(family: Family, peers: bool) -> dict[str, Callable[[], Outcome]]:
    """The solvers that apply to a family, by name."""
    own: dict[str, Any] = {"default": None, "anderson": "anderson"}
    if family.energy is not None:
        own |= {"gradient descent": solvers.GradientDescent("auto"), "newton": "newton"}
        others = ["L-BFGS-B"]
    else:
        own |= {"broyden": "broyden"}
        own |= {"newton": "newton", "forward": "forward"} if family.F is None else {}
        others = ["hybr", "anderson", "broyden1"]
    runs: dict[str, Any] = {n: lambda s=s: ours(s, family) for n, s in own.items()}
    if peers and not family.coupled:
        few = family.first(10)
        runs |= {f"scipy {n}": lambda n=n: scipy_solver(n, few) for n in others}
        runs |= {f"torchdeq {n}": lambda n=n: torchdeq(n, family) for n in ("anderson", "broyden")}
    if family.runaway and family.F is None:
        runs["plain, by an oracle"] = lambda: plain(family)
    return runs


def measure(name: str, solver: str, outcome: Outcome, exact: Tensor) -> dict[str, Any]:
    """A row of the table; see the column names."""
    error = relative(outcome.value, exact[: len(outcome.value)]).nan_to_num(nan=math.inf)
    right, told = error <= SLACK * TOLERANCE, outcome.converged
    row: dict[str, Any] = {
        "family": name, "solver": solver, "samples": len(error),
        "solved": (told & right).double().mean().item(),
        "false of CONVERGED": (told & ~right).sum().item() / max(1, int(told.sum())),
    }  # fmt: skip
    for quantile, column in ((0.5, "error / tolerance, median"), (0.95, "95 %")):
        row[column] = _quantile(error[told] / TOLERANCE, quantile)
    row["evaluations, median"] = _quantile(outcome.evaluations[told & right], 0.5)
    if outcome.error is not None:
        ratio = outcome.error.double()[told] / error[told].clamp_min(1e-15)
        shown = [f"{_quantile(ratio, q):.2g}" for q in (0.5, 0.05, 0.95)]
        row["estimate / error: median, 5 %, 95 %"] = ", ".join(shown)
    return row


def _quantile(values: Tensor, share: float) -> float:
    return values.quantile(share, interpolation="nearest").item() if len(values) else math.nan


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the package aims at, and whether the rows of its own solvers meet it."""
    own = [r for r in rows if not r["solver"].startswith(("scipy", "torchdeq", "plain"))]
    default = {r["family"]: r for r in own if r["solver"] == "default"}
    runaway = {r["family"] for r in rows if r["solver"].startswith("plain")} | {
        name for name in default if name.startswith("root")
    }
    found: list[tuple[str, str, bool]] = []

    def add(text: str, worst: list[tuple[float, str]], limit: float, least: bool) -> None:
        if worst:
            value, where = min(worst) if least else max(worst)
            met = value >= limit if least else value <= limit
            found.append(
                (f"{text} {'>=' if least else '<='} {limit:.3g}", f"{value:.3g} ({where})", met)
            )

    label = lambda r: f"{r['family']}, {r['solver']}"  # noqa: E731
    wrong = [(r["false of CONVERGED"], label(r)) for r in own]
    add(
        "false on runaway families, every solver",
        [w for w, r in zip(wrong, own, strict=True) if r["family"] in runaway],
        0.0,
        False,
    )
    add(
        "false for energies and contractions, every solver",
        [
            w
            for w, r in zip(wrong, own, strict=True)
            if r["family"].startswith(("energy", "contraction"))
        ],
        0.05,
        False,
    )
    add("false elsewhere, every solver", wrong, 0.05, False)
    for names, share in ((("douglas", "log-cosh", "arctan", "tanh from"), 0.95), (("huber",), 0.8)):
        add(
            f"solved by default, {', '.join(names)}",
            [(r["solved"], n) for n, r in default.items() if n.startswith(names)],
            share,
            True,
        )
    for r in rows:
        if r["solver"].startswith("plain") and r["family"].startswith("lasso"):
            mine = default[r["family"]]["solved"]
            add(
                f"solved by default, {r['family']}", [(mine, "plain: the limit")], r["solved"], True
            )
    counts = [r["evaluations, median"] for n, r in default.items() if n.startswith("energy")]
    if counts:
        spread = max(counts) - min(counts)
        add("evaluations of energies at all scales, spread", [(spread, f"{counts}")], 1.0, False)
    return [
        {"target": text, "worst": value, "met": "yes" if met else "NO"}
        for text, value, met in found
    ]


def main(
    seeds: int = 30, families: tuple[str, ...] = (), peers: bool = True, seed: int = 0,
    json_file: Path | None = None, out: Path | None = None,
) -> None:  # fmt: skip
    """Print the table.

    ``seeds``: problems of each family; ``families``: beginnings of names, all by default; ``seed``: of the
    numbers drawn; ``json_file`` and ``out``: where the rows are written, as JSON and as Markdown.
    """
    warnings.simplefilter("ignore")  # of peers that run into numbers they cannot take
    torch.set_num_threads(1)
    start, rows = time.perf_counter(), []
    for name, make in FAMILIES.items():
        if families and not name.startswith(families):
            continue
        family = make(Generator().manual_seed(seed), seeds)
        exact = family.reference()
        for solver, run in contestants(family, peers).items():
            with torch.no_grad():
                rows.append(measure(name, solver, run(), exact))
        print(f"{time.perf_counter() - start:5.0f} s {name}", file=sys.stderr, flush=True)
    text = f"{table(rows)}\n\n{table(targets(rows))}"
    print(text)
    if out is not None:
        out.write_text(f"{text}\n")
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    tyro.cli(main)
