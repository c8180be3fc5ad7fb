"""Steps of Anderson's method and of GMRES in C++, for tensors on the CPU; see ``steps.cpp``.

They compute what the steps in NumPy and torch compute, to rounding, in one call a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solvers.native import process
from solvers.native.library import library
from solvers.native.process import THREADS

SOURCE = Path(__file__).parent / "steps.cpp"
MOST = 64  # vectors of a sample that a step takes, as ``steps.cpp`` knows
NAMES = {torch.float32: "float", torch.float64: "double"}


def _fields(pointers: str, integers: str, numbers: str = "") -> tuple[tuple[str, Any], ...]:
    """Fields of a structure, in the order of ``steps.cpp``."""
    kinds = (
        (pointers, ctypes.c_void_p),
        (integers, ctypes.c_int64),
        (numbers, ctypes.c_double),
    )
    return tuple((name, kind) for names, kind in kinds for name in names.split())


class Ring(ctypes.Structure):
    """Differences of the last steps of Anderson's method."""

    _fields_ = _fields("steps changes gram z residual", "kept count keeps", "damping ridge tiny")


class Turn(ctypes.Structure):
    """An evaluation of all samples, to be judged."""

    _fields_ = (
        ("ring", Ring),
        *_fields(
            "trial next value mask residual best best_relative best_norm limit milestone "
            "rtol atol status evaluations fork",
            "threads batch size count max_steps patience each_rtol each_atol",
            "moderate divergence",
        ),
    )


class Step(ctypes.Structure):
    """A step of Anderson's method."""

    _fields_ = (("ring", Ring), *_fields("z residual next fork", "threads batch size first"))


class Move(ctypes.Structure):
    """An evaluation, and the step after it; see :class:`solvers.native.moves.Moves`."""

    _fields_ = (
        ("ring", Ring),
        *_fields(
            "z value residual next norm reference relative best_relative limit rtol atol status fork",
            "threads batch size wanted each_rtol each_atol",
            "moderate",
        ),
    )


class Cycle(ctypes.Structure):
    """A cycle of GMRES."""

    _fields_ = _fields(
        "product direction next basis hessenberg rotation null residual_norm matrix_norm limit beta "
        "running broken columns used fork",
        "threads rows size capacity step of_one_minus",
        "floor tiny",
    )


class Conjugate(ctypes.Structure):
    """What conjugate gradients keep beside a cycle's arrays."""

    _fields_ = _fields("iterate best square best_square curvature rounding", "")


class SystemsRecord(ctypes.Structure):
    """Linear systems from cycle to cycle; see :class:`solvers.native.systems.Systems`."""

    _fields_ = (
        ("cycle", Cycle),
        ("conjugate", Conjugate),
        *_fields(
            "right u residual target beta reference size relative left before rtol atol steps products open",
            "each_rtol each_atol trusting",
            "moderate gap halved less",
        ),
    )


@dataclass(frozen=True)
class Steps:
    """The compiled functions for one dtype; the first four return how many samples go on.

    ``move`` returns whether the step was made, ``settled`` whether all is done, ``verify`` a cycle's outcome.
    """

    turn: Callable[..., int]
    absorb: Callable[..., int]
    begin: Callable[..., int]
    advance: Callable[..., int]
    move: Callable[..., int]
    settled: Callable[..., int]
    verify: Callable[..., int]
    step: Callable[..., None]
    finish: Callable[..., None]
    correct: Callable[..., None]


def steps_for(like: Tensor, *, asked: bool = False) -> Steps | None:
    """The steps for tensors like this one; None where there are none, or nobody wants them.

    Wanted they are where ``asked``, or where the environment variable ``IMPLICIT_ATTN_CPP`` is 1.
    """
    if not (asked or process.ENABLED) or like.device.type != "cpu" or like.dtype not in NAMES:
        return None
    found = library(SOURCE)
    return None if isinstance(found, str) else _steps(found, NAMES[like.dtype])


def missing() -> str | None:
    """What the user is told who wants steps that are not there."""
    if not process.ENABLED or not isinstance(found := library(SOURCE), str):
        return None
    return f"{process.VARIABLE} is 1, but there are no steps in C++: {found}"


@cache
def _steps(found: ctypes.CDLL, name: str) -> Steps:
    def function(of: str, returns: Any = None, pointers: int = 1) -> Any:
        made = getattr(found, f"{of}_{name}")
        made.argtypes, made.restype = (ctypes.c_void_p,) * pointers, returns
        return made

    count = ctypes.c_int64
    return Steps(
        turn=function("turn", count),
        absorb=function("absorb", count),
        begin=function("begin", count),
        advance=function("advance", count),
        move=function("move", count),
        settled=function("settled", count),
        verify=function("verify", count, pointers=2),
        step=function("step"),
        finish=function("finish", pointers=3),
        correct=function("correct"),
    )


def number(value: float | Tensor, like: Tensor) -> Tensor:
    """A number () or numbers (B,) in the dtype and on the device of ``like``, contiguous."""
    if isinstance(value, Tensor):
        return value.to(like.device, like.dtype).contiguous().resolve_neg()
    return _number(value, like.dtype)


@lru_cache(64)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")  # whatever torch.set_default_device says


def address(array: Any) -> int | None:
    """Where a tensor or a NumPy array begins; None of None."""
    if array is None:
        return None
    return (array if isinstance(array, Tensor) else torch.from_numpy(array)).data_ptr()


def anderson_step(steps: Steps, ring: Ring, z: Tensor, residual: Tensor, *, first: bool) -> Tensor:
    """The next point (B, D) after ``z`` with this ``residual``; the ring takes their difference in."""
    z, residual = z.contiguous(), residual.contiguous()
    candidate = torch.empty_like(z)
    given = Step(
        ring, z.data_ptr(), residual.data_ptr(), candidate.data_ptr(),
        THREADS.fork, THREADS.number, *z.shape, first,
    )  # fmt: skip
    steps.step(ctypes.byref(given))
    return candidate
