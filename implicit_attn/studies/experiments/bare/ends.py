"""How runs of the normalised step end: fixed points, cycles, or neither."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

import solvers
from implicit_attn.energies import BareAttention
from implicit_attn.studies.experiments.bare.pipeline import Setup
from implicit_attn.studies.experiments.bare.transients import Corruption, run
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.tables import Table
from implicit_attn.updates import BareAttentionStep

RETURNED = 1e-9  # a state this near to an earlier one (relative, float64) has come back
LONGEST_CYCLE = 60
LARGEST_SAMPLE = 16  # of fixed points of one model whose derivative is measured
FIXED, CYCLE, OTHER = "fixed point", "cycle", "not settled"


def periods(states: list[Tensor]) -> Tensor:
    """The least p with ``z(T) = z(T - p)`` up to :data:`RETURNED`, (B,) int64; 0 where there is none.

    ``states`` are those of a run, z(0) to z(T), float64; p is at most :data:`LONGEST_CYCLE`. 1 is a
    fixed point.
    """
    last = states[-1].flatten(1)
    found = torch.zeros(len(last), dtype=torch.long)
    for period in range(min(LONGEST_CYCLE, len(states) - 1), 0, -1):
        gap = (last - states[-1 - period].flatten(1)).norm(dim=1)
        found[gap <= RETURNED * last.norm(dim=1)] = period
    return found


class Followed(NamedTuple):
    """A run of the step, without the states that nobody asks for."""

    step: BareAttentionStep
    tail: list[Tensor]  # the last states, one more than LONGEST_CYCLE of them or all
    changes: Tensor  # |z(t) - z(t-1)| / |z(t)|, (steps, B)
    rises: Tensor  # whether E rose in a step, (steps, B) bool


def follow(step: BareAttentionStep, start: Tensor, steps: int) -> Followed:
    """``steps`` steps from ``start`` (B, N, D)."""
    tail, changes, rises = [start], [], []
    with torch.no_grad(), parametrize.cached():
        energy = step.energy(start)
        for _ in range(steps):
            state = step(tail[-1])
            size = state.flatten(1).norm(dim=1)
            changes.append((state - tail[-1]).flatten(1).norm(dim=1) / size)
            before, energy = energy, step.energy(state)
            rises.append(energy > before + 1e-12 * before.abs())
            tail = [*tail[-LONGEST_CYCLE:], state]
    return Followed(step, tail, torch.stack(changes), torch.stack(rises))


class Ends(NamedTuple):
    """What :func:`random_ends` finds."""

    table: Table  # a row for each kind of couplings and gamma
    residuals: Table  # step, residual and its columns


def random_ends(
    *,
    sites: int = 5,
    dim: int = 3,
    models: int = 8,
    starts: int = 16,
    steps: int = 500,
    seed: int = 0,
    advance: Advance = lambda what: None,
) -> Ends:
    """Runs from random states on unit spheres with random couplings ``N(0, 1)``, float64.

    Returns:
        ``table``: ``couplings`` (symmetric, free), ``gamma``; shares of runs that end in a
        ``fixed point`` or in a ``cycle`` of at most :data:`LONGEST_CYCLE` steps, or are
        ``not settled`` after ``steps``; of some of the fixed ends, polished by
        ``solvers.fixed_point``, ``residual`` and ``largest_residual`` and the spectral radius of
        the step there, ``radius`` and ``largest_radius``, medians and maxima; ``rises``, the share of
        steps in which E rises.
        ``residuals``: ``|z(t) - z(t-1)| / |z(t)|`` at some steps, the median of the runs with 10 % and
        90 % quantiles.
    """
    table: Table = []
    residuals: Table = []
    for symmetric in (True, False):
        for gamma in (0.0, 0.5):
            kind = {"couplings": "symmetric" if symmetric else "free", "gamma": gamma}
            advance(f"{kind['couplings']} random couplings, gamma {gamma:g}")
            runs = [
                _random_run(sites, dim, symmetric, gamma, starts, steps, seed + number)
                for number in range(models)
            ]
            table.append(kind | _ends(runs))
            residuals += [kind | row for row in _residuals(runs)]
    return Ends(table, residuals)


def trained_ends(
    setup: Setup, models: dict[str, BareAttention], *, gamma: float, images: int, steps: int
) -> Table:
    """How runs from noisy test images end, float64: a row for each model, columns as for random ones."""
    table: Table = []
    for name, model in models.items():
        double = copy.deepcopy(model).double()
        corruption = Corruption(gamma=gamma, steps=1)
        start = run(setup, double, setup.test[:images].double(), corruption).states[0]
        circles = setup.codec.values
        step = BareAttentionStep(double, gamma=gamma, radius=setup.radius, circles=circles)
        found = _ends([follow(step, start, steps)])
        table.append({"couplings": name, "gamma": gamma} | found)
    return table


def _random_run(
    sites: int, dim: int, symmetric: bool, gamma: float, starts: int, steps: int, seed: int
) -> Followed:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        energy = BareAttention(sites, dim, symmetric_sites=symmetric).double()
        torch.nn.init.normal_(energy.couplings.free)
    start = torch.randn(starts, sites, dim, generator=generator, dtype=torch.float64)
    start = start / start.norm(dim=-1, keepdim=True)
    return follow(BareAttentionStep(energy, gamma=gamma), start, steps)


def _ends(runs: list[Followed]) -> dict[str, float]:
    periodic = torch.cat([periods(each.tail) for each in runs])
    row = {
        FIXED: (periodic == 1).double().mean().item(),
        CYCLE: (periodic > 1).double().mean().item(),
        OTHER: (periodic == 0).double().mean().item(),
    }
    residual, radius = [], []
    for each in runs:
        fixed = each.tail[-1][periods(each.tail) == 1][:LARGEST_SAMPLE]
        if len(fixed):
            found, reached = polish(each.step, fixed)
            residual.append(reached)
            radius.append(solvers.spectral_radius(each.step, found))
    for name, measured in (("residual", residual), ("radius", radius)):
        values = torch.cat(measured) if measured else torch.tensor([float("nan")])
        row[name], row[f"largest_{name}"] = values.median().item(), values.max().item()
    row["rises"] = torch.cat([each.rises for each in runs], 1).double().mean().item()
    return row


def polish(step: BareAttentionStep, near: Tensor) -> tuple[Tensor, Tensor]:
    """Fixed points from states near them, by plain iteration, and their relative residuals (B,)."""
    with torch.no_grad():
        solution = solvers.fixed_point(
            step,
            near,
            solver=solvers.Forward(),
            tolerance=solvers.Tolerance(1e-14),
            max_steps=200,
            adjoint=None,
            on_failure="ignore",
        )
    return solution.value, solution.residual


def _residuals(runs: list[Followed]) -> Table:
    changes = torch.cat([each.changes for each in runs], 1)
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=changes.dtype)
    last = len(changes)
    rows: Table = []
    for step in sorted({*range(1, min(last, 20) + 1), *range(20, last + 1, 20), last}):
        low, middle, high = changes[step - 1].quantile(shares).tolist()
        rows.append({"step": step, "residual": middle, "residual_10": low, "residual_90": high})
    return rows
