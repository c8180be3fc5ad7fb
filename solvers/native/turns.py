"""Solves of ``z = f(z)`` by Anderson's method or plain steps in the engine; see ``turns.h``.

The engine decides as :class:`solvers.core.loop.Loop` does: what has converged, stalled, diverged, which steps
are rejected. Here the map is evaluated, and samples that have ended leave the batch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from solvers.core.loop import DIVERGENCE, PATIENCE
from solvers.core.problem import Problem
from solvers.core.rows import MODERATE_ABOVE, RUNNING, Point, shrinks
from solvers.core.solution import Solution
from solvers.core.tolerance import Tolerance
from solvers.native.library import THREADS, alike, engine, fields, function, pieces

MOST = 64  # differences that are kept of a sample, as ``turns.h`` knows


class _Record(ctypes.Structure):
    """``Turns`` of ``turns.h``."""

    _fields_ = fields(
        "trial value next index mask z residual steps changes gram best relative norm limit milestone scale "
        "status evaluations rejected rejections count fork",
        "threads rows size kept evaluation max_steps patience",
        "rtol atol damping ridge tiny divergence moderate",
    )


def solve_in_turns(
    problem: Problem,
    first: Point,
    memory: int,
    numbers: tuple[float, float, float],
    tolerance: Tolerance,
    max_steps: int,
) -> Solution:
    """The solution after a ``first`` evaluation, at the start (B, D); its residual is given up.

    Args:
        memory: differences that are kept of a sample; 0: plain steps.
        numbers: damping, the ridge's factor of the Gram matrix' diagonal, and what is added to it.
    """
    start = trial = first.z.contiguous()
    value, first.residual = first.z + first.residual, first.z
    batch, size = start.shape
    kept, dtype = min(memory, size), start.dtype
    state, history = batch * size, batch * kept * size
    sizes = [state, state, history, history, batch * kept * kept, batch, batch, batch]
    own, (z, residual, steps, changes, gram, limit, milestone, scale) = pieces(start, dtype, sizes)
    best, relative, norm = torch.empty_like(start), start.new_empty(batch), start.new_empty(batch)
    counts = start.new_empty(5, batch, dtype=torch.int64)
    status, evaluations, rejected = counts[:3].unbind()
    index = torch.arange(batch, device=start.device)  # whatever torch.set_default_device says
    mask = None if problem.mask is None else problem.mask.contiguous()
    record = _Record(
        None, None, None, index.data_ptr(), None if mask is None else mask.data_ptr(),
        z, residual, steps, changes, gram, best.data_ptr(), relative.data_ptr(), norm.data_ptr(),
        limit, milestone, scale, *map(Tensor.data_ptr, counts), THREADS.fork,
        THREADS.number, batch, size, kept, 0, max_steps, PATIENCE, tolerance.rtol, tolerance.atol,
        *numbers, DIVERGENCE, MODERATE_ABOVE[dtype],
    )  # fmt: skip
    turn, at, part = function(engine(), "turn", dtype), ctypes.addressof(record), problem
    while True:
        value, following = alike(value, trial, "f(z)", "z"), torch.empty_like(trial)
        record.trial, record.value, record.next = (
            trial.data_ptr(), value.data_ptr(), following.data_ptr(),
        )  # fmt: skip
        record.evaluation += 1
        running = turn(at)
        trial = following
        del value, following  # which need not be there while f makes the next one
        if running == 0:
            break
        if running < len(index) and problem.compact and shrinks(known := status[index], trial):
            stay = torch.nonzero(known == RUNNING).flatten()
            index, trial = index[stay], trial[stay]
            record.index, record.rows = index.data_ptr(), len(index)
            part = problem.rows(index, batch)
        value = part.image(trial)
    del own  # the engine had its addresses alone
    return Solution(
        value=best,
        status=status.clone(),
        residual=relative,
        residual_norm=norm,
        steps=evaluations - rejected,
        evaluations=evaluations.clone(),
    )
