"""The native engine in C++, built with the package: its library, and the solves that it makes.

Without it everything is computed by torch. The engine decides as :class:`solvers.core.loop.Loop` and
:class:`solvers.linear.LinearLoop` do: what has converged, stalled, diverged, which steps are rejected. Here
maps are evaluated, matrices multiplied, and samples that have ended leave the batch.
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
from solvers.core.rows import MODERATE_ABOVE, RUNNING, Point, row_norm, shrinks
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
            f"the native engine is older than {', '.join(changed)} and is not used: install the "
            "checkout again, pip install -e .",
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
        return f"none ({why}): torch computes instead"
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
        raise ValueError(f"{name} must be like {of}, {wanted}, got {got}")
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
) -> tuple[Solution, Tensor | None]:
    """The solution after a ``first`` evaluation, at the start (B, D); its residual is given up.

    Also the residual norms (B,) of the last evaluation, None where samples have left the batch. Samples that
    had ended before were in it with their best iterates, so that for them it is a second look.

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
    last = None
    if len(index) == batch:
        residual = value - trial
        last = row_norm(residual if mask is None else torch.where(mask, residual, 0))
    solution = Solution(
        value=best,
        status=status.clone(),
        residual=relative,
        residual_norm=norm,
        steps=evaluations - rejected,
        evaluations=evaluations.clone(),
    )
    return solution, last


# Right-hand sides of norms between 1 / MODERATE and MODERATE are taken: the square of a residual that is
# smaller by all digits of the dtype is still a number.
MODERATE = {torch.float32: 1e10, torch.float64: 1e100}
LARGEST = 1 << 24  # numbers
FLOOR = 16  # times the machine precision and |H|: a smaller column ends a Krylov space
# Rounding moves the residual of a recurrence away from the true one by at most about
# GAP eps (|A| |x| + |b|), ten times the largest gap that was measured.
GAP = 40.0
RESERVE = 1e-3  # a step is expected to leave more than this of the residual
# A cycle that converged by its recurrence but did not halve the true residual: rounding limits it.
HALVED = 0.5


class _Systems(ctypes.Structure):
    """``Systems`` of ``systems.h``."""

    _fields_ = fields(
        "right product direction u residual correction reference norm target left matrix_norm "
        "basis hessenberg rotation null beta iterate square best_square curvature "
        "status steps products used columns verdict running broken fork",
        "threads rows size capacity step max_steps one_minus",
        "rtol atol moderate gap halved less reserve floor tiny",
    )


def fits(right: Tensor, restart: int | None) -> bool:
    """Whether the arrays of a whole cycle may be asked for at once; what no step uses of them costs nothing.

    Beside the vectors there are two tables of numbers a sample, which count where samples are short.
    """
    if restart is None:
        return True
    rows, size = right.shape
    capacity = restart + 1
    return restart < MOST and rows * capacity * (size + 2 * (capacity + 1)) <= LARGEST


def solve_systems(
    matvec: Callable[[Tensor], Tensor],
    right: Tensor,
    restart: int | None,
    tolerance: Tolerance,
    max_steps: int,
    *,
    one_minus: bool,
) -> Solution | None:
    """``A u = right`` for all samples (B, D); None where a norm of ``right`` is not moderate.

    Args:
        matvec: of vectors (B, D): products with A, or with M of A = I - M where ``one_minus``.
        restart: steps of a cycle of GMRES; None: conjugate gradients.
    """
    right = alike(right, right, "b", "b")
    rows, size = right.shape
    capacity, state, dtype = 0 if restart is None else restart + 1, right.numel(), right.dtype
    table = rows * capacity * (capacity + 1)
    cycle = [state, rows, rows, rows] if restart is None else [
        state * capacity, table, table, rows * (capacity + 1), rows
    ]  # fmt: skip
    own, places = pieces(right, dtype, [state, state, *[rows] * 3, *cycle])
    residual, correction, target, left, matrix_norm, *method = places
    method = [None] * 5 + method if restart is None else [*method, *[None] * 4]
    direction, u = torch.empty_like(right), torch.empty_like(right)
    reference, norm = right.new_empty(2, rows).unbind()
    counts = right.new_empty(6, rows, dtype=torch.int64)
    status, steps, products = counts[:3].unbind()
    flags = right.new_empty(2, rows, dtype=torch.bool)
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    record = _Systems(
        right.data_ptr(), None, direction.data_ptr(), u.data_ptr(), residual, correction,
        reference.data_ptr(), norm.data_ptr(), target, left, matrix_norm, *method,
        *map(Tensor.data_ptr, (*counts, *flags)), THREADS.fork,
        THREADS.number, rows, size, capacity, 0, max_steps, one_minus,
        tolerance.rtol, tolerance.atol, MODERATE[dtype], GAP * eps, HALVED, 1 - eps**0.5, RESERVE,
        FLOOR * eps, tiny,
    )  # fmt: skip
    of, names = engine(), ("begin", "advance", "settle", "verify")
    begin, advance, settle, verify = [function(of, name, dtype) for name in names]
    at = ctypes.addressof(record)

    def multiply() -> Tensor:
        # A hook in the user's map may keep what it is given, and the next direction comes in its place.
        image = alike(matvec(direction.clone()), right, "a product", "its vector")
        record.product = image.data_ptr()
        return image

    running = begin(at)
    if running < 0:
        return None
    while running:
        record.step = 0
        while running and record.step != restart:
            image = multiply()
            running = advance(at)
            record.step += 1
        if not settle(at):
            break
        image = multiply()
        running = verify(at)
        del image
    del own, flags  # the engine had their addresses alone
    return Solution(
        value=u,
        status=status.clone(),
        residual=torch.where(norm == 0, norm, norm / reference),
        residual_norm=norm,
        steps=steps.clone(),
        evaluations=products.clone(),
    )
