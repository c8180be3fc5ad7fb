"""The problem zoo: fixed-point problems with known answers, by name.

>>> problem = make("kepler")
>>> residual = problem.f(problem.z0, *problem.args) - problem.z0

Every factory in ``PROBLEMS`` takes ``dtype``, ``device`` and ``seed`` and returns a
:class:`ZooProblem`; the numbers are drawn in float64 on the CPU, so one seed gives the same problem
everywhere. Adding a problem is one builder and one entry in the ``BUILDS`` of its family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch

from problems import energies, linear, maps, pathological, systems
from problems.problem import Build, ZooProblem, cast, residual_norms, rows, scaled

__all__ = ["ENERGY", "LINEAR", "NONLINEAR", "PATHOLOGICAL", "PROBLEMS", "SOLVABLE", "ZooProblem",
           "make", "residual_norms", "rows", "scaled"]  # fmt: skip

LINEAR = list(linear.BUILDS)
ENERGY = [name for name in energies.BUILDS if name.startswith("energy_")]
NONLINEAR = [
    *maps.BUILDS,
    *systems.BUILDS,
    *(name for name in energies.BUILDS if name not in ENERGY),
]
PATHOLOGICAL = list(pathological.BUILDS)

_BUILDS: dict[str, Build] = {}
for _family in (linear, maps, systems, energies, pathological):
    _BUILDS |= _family.BUILDS


@cache
def _original(name: str, seed: int) -> ZooProblem:
    generator = torch.Generator().manual_seed(seed)
    problem = replace(_BUILDS[name](generator), name=name)
    if problem.reference is None:
        return problem
    # solved at most once for all copies in other dtypes
    return replace(problem, reference=cache(problem.reference))


def make(
    name: str, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", seed: int = 0
) -> ZooProblem:
    """The problem ``name`` in tensors of its own, safe to overwrite.

    Raises:
        ValueError: if there is no such problem.
    """
    if name not in _BUILDS:
        raise ValueError(f"name must be one of {sorted(_BUILDS)}, got {name!r}")
    return cast(_original(name, seed), dtype, device)


PROBLEMS: dict[str, Callable[..., ZooProblem]] = {name: partial(make, name) for name in _BUILDS}
SOLVABLE = [name for name in PROBLEMS if _original(name, 0).expect == "converges"]
