"""Is a value that is called CONVERGED right? Families with known answers, in one table.

    python benchmarks/truth.py [--seeds 30] [--families lasso energy] [--out FILE.md] [--json-file FILE]

The error of a value is |z - z*| / |z*| in units of the tolerance 1e-4. A sample is solved if it is CONVERGED
and its error is at most ten tolerances. The columns "false" and "beyond 1,000" are the shares of CONVERGED
samples with an error above ten and a thousand tolerances. Every solver has a budget of 1,000 evaluations;
scipy solves the first ten samples of a family. ``tests/problems/families.py`` computes the answers in float64
without the package.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import torch
import tyro
from torch import Generator, Tensor
from torchdeq.solver import get_solver

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the problems live with the tests

import solvers
from benchmarks.measure import table
from problems.families import FAMILIES, Family, relative

TOLERANCE, SLACK, BUDGET = 1e-4, 10.0, 1000


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
    errors: list[Any] = [getattr(each, "error", None) for each in found]
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
        "false": (told & ~right).sum().item() / max(1, int(told.sum())),
        "beyond 1,000": (told & (error > 1000 * TOLERANCE)).sum().item() / max(1, int(told.sum())),
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
    """What the package aims at, the worst row of its own solvers, and how many rows miss it."""
    own = [r for r in rows if not r["solver"].startswith(("scipy", "torchdeq", "plain"))]
    default = {r["family"]: r for r in own if r["solver"] == "default"}
    plain = {r["family"]: r["solved"] for r in rows if r["solver"].startswith("plain")}
    found: list[dict[str, Any]] = []

    def add(
        text: str, values: list[tuple[float, str]], limit: float, *, least: bool = False
    ) -> None:
        if values:
            misses = [v for v in values if (v[0] < limit if least else not v[0] <= limit)]
            value, where = (min if least else max)(misses or values)
            found.append({
                "target": f"{text} {'>=' if least else '<='} {limit:.3g}", "worst": f"{value:.3g} ({where})",
                "missed": f"{len(misses)} of {len(values)}",
            })  # fmt: skip

    def false(chosen: Callable[[str], bool]) -> list[tuple[float, str]]:
        label = "{family}, {solver}"
        return [(r["false"], label.format(**r)) for r in own if chosen(r["family"])]

    def runaway(name: str) -> bool:
        return name in plain or name.startswith("root")

    groups = ("energy", "contraction")
    add("false of CONVERGED, families that run away", false(runaway), 0.0)
    add(
        "false of CONVERGED, energies and contractions", false(lambda n: n.startswith(groups)), 0.05
    )
    add(
        "false of CONVERGED, others",
        false(lambda n: not (runaway(n) or n.startswith(groups))),
        0.05,
    )
    for names, least in ((("douglas", "log-cosh", "arctan", "tanh from"), 0.95), (("huber",), 0.8)):
        solved = [(r["solved"], n) for n, r in default.items() if n.startswith(names)]
        add(f"solved by default, {', '.join(names)}", solved, least, least=True)
    for name, limit in plain.items():
        if name.startswith("lasso") and name in default:
            mine = default[name]["solved"]
            add("solved by default, as by plain iteration", [(mine, name)], limit, least=True)
    counts = [r["evaluations, median"] for n, r in default.items() if n.startswith("energy x")]
    if counts:
        spread = max(counts) - min(counts) if all(map(math.isfinite, counts)) else math.inf
        add("evaluations of energies at all scales, spread", [(spread, f"{counts}")], 1.0)
    return found


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
