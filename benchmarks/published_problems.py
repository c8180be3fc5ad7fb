"""Systems and minimisers of the literature, next to scipy: python benchmarks/published_problems.py

``tests/problems/published.py`` lists them. Each is started at its published start and near it, with a budget
of 2,000 evaluations. A start is solved if the returned value meets |F| <= 1e-8 or, for a minimiser,
|E'| <= 1e-5 max(1, |E|), recomputed here; it is false if it is CONVERGED above twice that.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import torch
import tyro
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the problems live with the tests

from benchmarks.measure import table
from problems import published
from problems.collected import Collected
from problems.published import BUDGET, MINIMISERS, SYSTEMS

Result = tuple[Tensor, Tensor, Tensor]  # values (B, n), CONVERGED (B,), evaluations (B,)


def ours(problem: Collected, default: bool = False) -> Result:
    """The package: all starts in one call."""
    found = published.solve(problem, default=default)
    return found.value.detach(), found.converged, found.evaluations


def theirs(problem: Collected) -> Result:
    """scipy's hybr (differences for Jacobians count) or L-BFGS-B, start by start."""
    values, converged, counts = [], [], []
    for start in published.starts(problem):
        count = 0

        def point(x: np.ndarray) -> Tensor:
            nonlocal count
            count += 1
            return torch.from_numpy(np.array(x))[None]

        def system(x: np.ndarray) -> np.ndarray:
            return problem.function(point(x))[0].numpy()

        def energy(x: np.ndarray) -> tuple[float, np.ndarray]:
            z = point(x)
            return float(problem.function(z)), (z - problem.f(z))[0].numpy()

        if problem.kind == "system":
            found = scipy.optimize.root(system, start, options={"maxfev": BUDGET, "xtol": 1e-12})
        else:
            options: Any = {"maxfun": BUDGET, "maxiter": BUDGET, "ftol": 0.0, "gtol": 1e-6}
            found = scipy.optimize.minimize(
                energy, start, jac=True, method="L-BFGS-B", options=options
            )
        values.append(torch.from_numpy(found.x))
        converged.append(bool(found.success))
        counts.append(count)
    return torch.stack(values), torch.tensor(converged), torch.tensor(counts)


METHODS: dict[str, Any] = {
    "root": (SYSTEMS, ours),
    "fixed_point on z - F, default": (SYSTEMS, lambda problem: ours(problem, default=True)),
    "scipy hybr": (SYSTEMS, theirs),
    "L-BFGS": (MINIMISERS, ours),
    "scipy L-BFGS-B": (MINIMISERS, theirs),
}


def main(each: bool = False) -> None:
    """Print a row for each method; with ``each`` also a row for each problem."""
    warnings.simplefilter("ignore")  # of peers that run into numbers they cannot take
    torch.set_num_threads(1)
    totals, rows = [], {}
    for method, (problems, run) in METHODS.items():
        starts = right = false = 0
        spent: list[Tensor] = []
        for problem in problems:
            value, converged, evaluations = run(problem)
            good = published.solved(problem, value)
            wrong = converged & ~published.solved(problem, value, slack=2.0)
            starts, right, false = (
                starts + len(good),
                right + int(good.sum()),
                false + int(wrong.sum()),
            )
            spent.append(evaluations[good].double())
            row = rows.setdefault(problem.kind + " " + problem.name, {"problem": problem.name})
            row[method] = f"{int(good.sum())}" + (
                f" ({int(wrong.sum())} false)" if wrong.any() else ""
            )
        middle = torch.cat(spent).median().item()
        totals.append({"method": method, "starts": starts, "solved": right, "falsely CONVERGED": false,
            "evaluations, median": middle})  # fmt: skip
    print(table(totals))
    root, default, hybr, lbfgs, peer = (row["solved"] for row in totals)
    goals = {
        "root or default solves 90 % of the starts": max(root, default)
        >= 0.9 * totals[0]["starts"],
        "root solves as many as scipy's hybr": root >= hybr,
        "L-BFGS solves as many as scipy's L-BFGS-B": lbfgs >= peer,
        "ours: none falsely CONVERGED": not any(totals[k]["falsely CONVERGED"] for k in (0, 1, 3)),
    }
    print(
        "\n"
        + table([{"target": text, "met": "yes" if met else "NO"} for text, met in goals.items()])
    )
    if each:
        print(f"\n{table(list(rows.values()))}")


if __name__ == "__main__":
    tyro.cli(main)
