"""The native engine in C++, built with the package: its library, and the solves that it makes.

Without it everything is computed by torch. The engine decides as :class:`solvers.core.loop.Loop` does: what
has converged, stalled, diverged, which steps are rejected. Here maps are evaluated, and samples that have
ended leave the batch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solvers.core.loop import DIVERGENCE, PATIENCE
from solvers.core.problem import Problem
from solvers.core.rows import MODERATE_ABOVE, RUNNING, Point, shrinks
from solvers.core.solution import Solution, Tolerance

FOLDER = Path(__file__).parent / "lib"  # no package: what is in it is no module
# By what torch says of the processor, which its variable ATEN_CPU_CAPABILITY can lower; best first.
LEVELS = {"AVX512": ("avx512", "avx2", "baseline"), "AVX2": ("avx2", "baseline")}


def levels() -> tuple[str, ...]:
    """The names of what this processor can run, the best first."""
    return LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("baseline",))


@cache
def engine() -> ctypes.CDLL | None:
    """The library of the best level there is; None where the package was installed without a compiler.

    In a checkout whose C++ has changed since, it would read other records than it is given: torch computes.
    """
    if changed := changed_sources():
        warnings.warn(
            f"the native engine is not used because it is older than {', '.join(changed)}: rebuild it "
            "with `pip install -e .`",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    for level in levels():
        path = FOLDER / f"engine_{level}.so"
        if path.exists():
            return ctypes.CDLL(str(path))
    return None


def changed_sources() -> list[str]:
    """Files of a checkout that differ from those of which its libraries were built."""
    kept = FOLDER / "sources.txt"  # of an editable install alone
    lines = [line.split(" ", 1) for line in kept.read_text().splitlines()] if kept.exists() else []
    root = FOLDER.parents[2]
    return [
        name
        for digest, name in lines
        if not (root / name).exists()
        or hashlib.sha256((root / name).read_bytes()).hexdigest() != digest
    ]


def told() -> str:
    """Which engine runs, in words."""
    found = engine()
    if found is None:
        why = (
            "its sources have changed" if changed_sources() else "installed without a C++ compiler"
        )
        return f"none ({why}): torch is used instead"
    threads = "torch's threads" if THREADS.fork else "one thread"
    return f"{Path(found._name).stem.removeprefix('engine_')}, {threads}"


class Threads:
    """The threads that the engine may use: those of the OpenMP that torch uses, awake already."""

    def __init__(self) -> None:
        # A child inherits OpenMP's memory without its threads, and would wait for them forever.
        self.forked = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: setattr(self, "forked", True))

    @property
    def fork(self) -> int | None:
        """Where OpenMP starts its threads; None without one, or with another kind."""
        return _openmp()

    @property
    def number(self) -> int:
        """How many to use."""
        return 1 if self.forked else torch.get_num_threads()


@cache
def _openmp() -> int | None:
    try:
        start = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    return ctypes.cast(start, ctypes.c_void_p).value


THREADS = Threads()


NAMES = {torch.float32: "float", torch.float64: "double"}


def fields(pointers: str, integers: str, numbers: str) -> tuple[tuple[str, Any], ...]:
    """Fields of a structure, in the order of the header."""
    kinds = (pointers, ctypes.c_void_p), (integers, ctypes.c_int64), (numbers, ctypes.c_double)
    return tuple((name, kind) for names, kind in kinds for name in names.split())


def serves(like: Tensor) -> bool:
    """Whether the engine computes with such tensors now: outside of autograd's recordings."""
    known = like.dtype in NAMES and like.device.type == "cpu" and not torch.is_grad_enabled()
    return known and engine() is not None


@cache
def function(of: ctypes.CDLL | None, name: str, dtype: torch.dtype) -> Callable[[int], int]:
    """A function of the engine, of a record's address."""
    found = getattr(of, f"{name}_{NAMES[dtype]}")
    found.argtypes, found.restype = (ctypes.c_void_p,), ctypes.c_int64
    return found


def pieces(like: Tensor, dtype: torch.dtype, sizes: list[int]) -> tuple[Tensor, list[int]]:
    """Memory for so many numbers each, not set to anything, and where each piece begins."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // 16) * 16  # on cache lines
    memory = like.new_empty(total, dtype=dtype)
    first, width = memory.data_ptr(), memory.element_size()
    return memory, [first + width * start for start in starts]


def alike(image: Tensor, vector: Tensor, name: str, of: str) -> Tensor:
    """``image`` as the engine reads it: contiguous, no sign yet to be flipped, like ``vector``."""
    image = image.detach().contiguous().resolve_neg()
    if image.shape != vector.shape or image.dtype != vector.dtype:  # C++ would not ask
        wanted, got = (f"{tuple(t.shape)} {t.dtype}" for t in (vector, image))
        raise ValueError(f"{name} must have the shape and dtype of {of}, {wanted}, got {got}")
    return image


MOST = 64  # differences that are kept of a sample, as ``turns.h`` knows


class _Turns(ctypes.Structure):
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
) -> tuple[Solution, Point | None]:
    """The solution after a ``first`` evaluation, at the start (B, D); its residual is given up.

    Also the last evaluation, or None where samples have left the batch. Samples that had ended before were in
    it with their best iterates, so that for them it is a second look.

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
    record = _Turns(
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
        if running == 0:
            break
        trial = following
        del value, following  # which need not be there while f makes the next one
        if running < len(index) and problem.compact and shrinks(known := status[index], trial):
            stay = torch.nonzero(known == RUNNING).flatten()
            index, trial = index[stay], trial[stay]
            record.index, record.rows = index.data_ptr(), len(index)
            part = problem.rows(index, batch)
        value = part.image(trial)
    del own  # the engine had its addresses alone
    del following
    last = problem.exact(problem.point(trial, value)) if len(index) == batch else None
    solution = Solution(
        value=best,
        status=status.clone(),
        residual=relative,
        residual_norm=norm,
        steps=evaluations - rejected,
        evaluations=evaluations.clone(),
    )
    return solution, last
