"""Load the native C++ engine and solve with it.

Without the engine torch computes everything. The engine decides like :class:`solvers.core.loop.Loop` which
samples have converged, stalled or diverged and which steps are rejected. This module evaluates the map and
removes samples that have ended from the batch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import warnings
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from solvers.core.judge import ROUNDINGS
from solvers.core.loop import DIVERGENCE, DRIFT, PROGRESS, Options
from solvers.core.problem import Problem
from solvers.core.rows import MODERATE_ABOVE, RUNNING, STEPS, Evaluation, should_shrink
from solvers.core.solution import Solution

FOLDER = Path(__file__).parent / "lib"
# Names of torch.backends.cpu.get_cpu_capability(), which ATEN_CPU_CAPABILITY can lower; best first.
LEVELS = {"AVX512": ("avx512", "avx2", "baseline"), "AVX2": ("avx2", "baseline")}


def levels() -> tuple[str, ...]:
    """Return the instruction sets of this processor, the best first."""
    return LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("baseline",))


@cache
def engine() -> ctypes.CDLL | None:
    """Return the library for this processor, or None where there is none, which is warned of once.

    A package that was installed without a compiler has none, and does not warn.
    """
    found, why = load()
    if found is None and why:
        message = f"torch is used instead of the native engine, {why}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return found


def load() -> tuple[ctypes.CDLL | None, str]:
    """Load the best library for this processor; if there is none, return the reason, "" without a compiler.

    A library that is older than its C++ sources in a checkout is not used, since its records may differ.
    """
    if changed := changed_sources():
        older = f"which is older than {', '.join(changed)}"
        return None, f"{older}: rebuild it with `pip install -e .`"
    why = ""
    for level in levels():
        path = FOLDER / f"engine_{level}.so"
        if path.exists():
            try:
                return ctypes.CDLL(str(path)), ""
            except OSError as error:  # such as a mount without the right to execute
                why = f"which cannot be loaded ({error})"
    return None, why


def changed_sources() -> list[str]:
    """Return the files of a checkout that changed since its libraries were built."""
    kept = FOLDER / "sources.txt"  # exists in an editable install only
    lines = [line.split(" ", 1) for line in kept.read_text().splitlines()] if kept.exists() else []
    root = FOLDER.parents[2]
    return [
        name
        for digest, name in lines
        if not (root / name).exists()
        or hashlib.sha256((root / name).read_bytes()).hexdigest() != digest
    ]


def told() -> str:
    """Return a description of the engine in use."""
    found, why = load()
    if found is None:
        return f"none, {why or 'installed without a C++ compiler'}: torch is used instead"
    threads = "torch's threads" if THREADS.fork else "one thread"
    return f"{Path(found._name).stem.removeprefix('engine_')}, {threads}"


class Threads:
    """The threads of the engine, which are torch's OpenMP threads."""

    def __init__(self) -> None:
        # A child inherits OpenMP's memory without its threads, and would wait for them forever.
        self.forked = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: setattr(self, "forked", True))

    @cached_property
    def fork(self) -> int | None:
        """Return the address of OpenMP's fork function, or None without a supported OpenMP."""
        try:
            start = ctypes.CDLL(torch._C.__file__).GOMP_parallel
        except (AttributeError, OSError):
            return None
        return ctypes.cast(start, ctypes.c_void_p).value

    @property
    def number(self) -> int:
        """Return the number of threads."""
        return 1 if self.forked else torch.get_num_threads()


THREADS = Threads()
NAMES = {torch.float32: "float", torch.float64: "double"}


def supports(like: Tensor) -> bool:
    """Return whether the engine supports tensors like this one, which needs autograd to be off."""
    known = like.dtype in NAMES and like.device.type == "cpu" and not torch.is_grad_enabled()
    return known and engine() is not None


@cache
def function(of: ctypes.CDLL | None, name: str, dtype: torch.dtype) -> Callable[[int], int]:
    """Return a function of the engine, whose argument is the address of a record."""
    found = getattr(of, f"{name}_{NAMES[dtype]}")
    found.argtypes, found.restype = (ctypes.c_void_p,), ctypes.c_int64
    return found


MOST = 64  # largest memory and number of parts, as in ``turns.h``
NUMBERS = "score relative norm error limit bound scale milestone path"  # one a sample
FIELDS = (  # of ``Turns`` of ``turns.h``, in its order
    (
        f"trial value next index sizes mask z residual steps changes gram best {NUMBERS} norms caps gains "
        "anchor status evaluations rejected rejections count fork",
        ctypes.c_void_p,
    ),
    ("threads rows size kept max_steps patience parts remembered", ctypes.c_int64),
    (
        "rtol atol damping ridge tiny divergence moderate eps fallen roundings progress drift",
        ctypes.c_double,
    ),
)


class _Turns(ctypes.Structure):
    _fields_ = tuple((name, kind) for names, kind in FIELDS for name in names.split())


class Turns:
    """A solve whose rows the engine moves: evaluate the map with :meth:`evaluate`, then :meth:`move`.

    Attributes:
        problem: of the rows (n, D) that are in the batch; ``index`` (n,) are their places among all samples.
        trial: the points to evaluate next. Rows that have ended wait at their best iterates.
        seen: the points that were evaluated last, with the ``value`` there.

    Args:
        first: evaluation at the start (B, D), whose residual is overwritten.
        memory: number of stored differences; 0 for plain steps.
        numbers: damping, the weight of the regularization, and a number to add to the Gram matrix's diagonal.
    """

    def __init__(
        self, problem: Problem, first: Evaluation, memory: int, numbers: tuple[float, float, float],
        options: Options,
    ) -> None:  # fmt: skip
        rule, tolerance = options.rule(problem, first), options.tolerance
        self.problem, self.seen, self.trial = problem, first.z, first.z.contiguous()
        self.value, first.residual = first.z + first.residual, first.z
        (batch, size), dtype, start = self.trial.shape, self.trial.dtype, self.trial
        kept = min(memory, size)
        lengths = torch.tensor(first.sizes or (size,), device=start.device)
        parts = len(lengths)
        self.best, (z, residual) = torch.empty_like(start), start.new_empty(2, batch, size)
        steps, changes = start.new_empty(2, batch, kept, size).unbind()
        names = NUMBERS.split()
        self.numbers = start.new_empty(len(names), batch)
        singles = dict(zip(names, self.numbers.unbind(), strict=True))
        self.counts = start.new_zeros(5, batch, dtype=torch.int64)
        self.counts[0] = RUNNING
        status, evaluations, rejected, rejections, count = self.counts.unbind()
        self.index = torch.arange(batch, device=start.device)  # whatever the default device is
        self.arrays = {
            "index": self.index, "sizes": lengths, "z": z, "residual": residual, "steps": steps,
            "changes": changes, "gram": start.new_empty(batch, kept, kept), "best": self.best,
            **singles, "norms": start.new_empty(batch, parts), "caps": start.new_empty(batch, parts),
            "gains": start.new_empty(batch, parts, STEPS), "status": status,
            "evaluations": evaluations, "rejected": rejected, "rejections": rejections, "count": count,
        }  # fmt: skip
        if problem.mask is not None:
            self.arrays["mask"] = problem.mask.contiguous()
        if options.max_steps >= 2 * options.patience:  # before that no sample stalls
            self.arrays["anchor"] = torch.empty_like(start)
        damping, ridge, tiny = numbers
        self.record = _Turns(
            **{name: array.data_ptr() for name, array in self.arrays.items()}, fork=THREADS.fork,
            threads=THREADS.number, rows=batch, size=size, kept=kept, max_steps=options.max_steps,
            patience=options.patience, parts=parts, remembered=STEPS, rtol=tolerance.rtol,
            atol=tolerance.atol, damping=damping, ridge=ridge, tiny=tiny, divergence=DIVERGENCE,
            moderate=MODERATE_ABOVE[dtype], eps=rule.eps, fallen=rule.fallen, roundings=ROUNDINGS,
            progress=PROGRESS, drift=DRIFT,
        )  # fmt: skip
        self.turn, self.at = function(engine(), "turn", dtype), ctypes.addressof(self.record)

    def evaluate(self) -> None:
        """Evaluate the map at the points ``trial``."""
        self.value = None  # freed before f allocates the next value
        self.value, self.seen = self.problem.joint(self.trial, energies=False)[0], self.trial

    def move(self) -> int:
        """Judge the rows, and find the next point of each; return how many go on."""
        assert self.value is not None
        # C++ knows neither strides nor a sign yet to be flipped, and checks nothing.
        trial, value = self.trial, self.value.contiguous().resolve_neg()
        assert value.shape == trial.shape and value.dtype == trial.dtype
        following = torch.empty_like(trial)
        record = self.record
        record.trial, record.value = trial.data_ptr(), value.data_ptr()
        record.next = following.data_ptr()
        running = self.turn(self.at)
        self.trial = following
        return running

    def wait(self) -> int:
        """No row that has ended goes on: a move examines those that would converge."""
        return 0

    def put(self, places: Tensor, z: Tensor) -> None:
        """Replace the samples in the rows ``places`` (n,) by new ones that start at ``z`` (n, D)."""
        self.trial.index_copy_(0, places, z)
        samples = self._samples(places)
        self.arrays["status"].index_fill_(0, samples, RUNNING)
        self.arrays["evaluations"].index_fill_(0, samples, 0)

    def keep(self, stay: Tensor) -> bool:
        """Let only the rows ``stay`` go on."""
        rows, record = len(self.index), self.record
        self.index, self.trial = self.index[stay], self.trial[stay]
        self.value = None
        record.index, record.rows = self.index.data_ptr(), len(self.index)
        self.problem = self.problem.rows(stay, rows)
        return True

    @property
    def status(self) -> Tensor:
        """(n,) statuses of the rows."""
        status = self.arrays["status"]
        return status if len(self.index) == len(status) else status.index_select(0, self.index)

    def record_of(self, places: Tensor) -> tuple[Tensor, ...]:
        """What is known of the rows ``places``, and f at their latest evaluation."""
        samples = self._samples(places)
        parts = [table.index_select(1, samples).T for table in (self.counts, self.numbers)]
        image = cast(Tensor, self.value).index_select(0, places)
        return image, self.best.index_select(0, samples), *parts

    def read(self, record: tuple[Tensor, ...]) -> tuple[Solution, Tensor]:
        """The solution of rows, and f at their latest evaluation."""
        image, best, counts, numbers = record
        return self._solution(best, counts.T, numbers.T), image

    def _samples(self, places: Tensor) -> Tensor:
        whole = len(self.index) == len(self.best)
        return places if whole else self.index.index_select(0, places)

    def solution(self) -> Solution:
        """The solution of all samples, with a value (B, D)."""
        return self._solution(self.best, self.counts.clone(), self.numbers)

    def _solution(self, best: Tensor, counts: Tensor, numbers: Tensor) -> Solution:
        status, evaluations, rejected, *_ = counts.unbind()
        _, relative, norm, error, *_ = numbers.unbind()
        steps = evaluations - rejected
        return Solution(best, status, relative, norm, steps, evaluations, error=error)


def solve_native(
    problem: Problem, first: Evaluation, memory: int, numbers: tuple[float, float, float],
    options: Options,
) -> tuple[Solution, Callable[[], Evaluation] | None]:  # fmt: skip
    """Solve by :class:`Turns`, whose arguments these are.

    Returns:
        The solution and a function that gives the last evaluation, or None if samples have left the batch.
        It evaluates the samples that had ended before at their best iterates.
    """
    turns = Turns(problem, first, memory, numbers, options)
    batch = len(turns.index)
    while running := turns.move():
        if running < len(turns.index) and problem.compact:
            status = turns.status
            if should_shrink(status, turns.trial):
                turns.keep(torch.nonzero(status == RUNNING).flatten())
        turns.evaluate()
    last: Any = None
    if len(turns.index) == batch:
        seen, value = turns.seen, cast(Tensor, turns.value)
        last = lambda: problem.point(seen, value)  # noqa: E731
    return turns.solution(), last
