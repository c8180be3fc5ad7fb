"""O(d) spins: the saddle point against adaptive TAP: python benchmarks/saddle.py [--rounds 5]

Both find the means of N spins of d components with couplings ``K_ij I``, with gradients recorded;
adaptive TAP with the large-d site, so that both solve for the same limit.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import solvers
from benchmarks.measure import interleaved, table

STRENGTH = 0.5  # couplings N(0, STRENGTH^2 / N), fields N(0, 1)


def compare(sites: int, dim: int, batch: int, rounds: int) -> dict[str, Any]:
    """A row: median seconds of both, their ratio, the relative difference of the means."""
    generator = torch.Generator().manual_seed(0)
    options: Any = {"generator": generator, "dtype": torch.float64}
    upper = torch.randn(sites, sites, **options).triu(1) * STRENGTH / sites**0.5
    scalar = upper + upper.T
    full = scalar[..., None, None] * torch.eye(dim, dtype=torch.float64)
    field = torch.randn(batch, sites, dim, **options).requires_grad_()
    site = solvers.SphericalSite(large_dimension=True)
    saddle = partial(solvers.spherical_saddle, scalar, field)
    tap = partial(solvers.adaptive_tap, full, field, site=site)
    first, second = saddle().mean.detach(), tap().value.mean.detach()
    seconds = interleaved({"saddle": saddle, "tap": tap}, rounds)
    return {
        "N": sites,
        "d": dim,
        "B": batch,
        "saddle point, ms": 1e3 * seconds["saddle"],
        "adaptive TAP, ms": 1e3 * seconds["tap"],
        "ratio": seconds["saddle"] / seconds["tap"],
        "difference of the means": ((first - second).norm() / second.norm()).item(),
    }


def main(rounds: int = 5, threads: int = 2) -> None:
    """Free energy and gradient of O(d) spins: steepest descent beside adaptive TAP."""
    torch.set_num_threads(threads)
    cases = ((6, 40, 1), (16, 32, 1), (16, 32, 8))
    print(table([compare(*case, rounds) for case in cases]))


if __name__ == "__main__":
    tyro.cli(main)
