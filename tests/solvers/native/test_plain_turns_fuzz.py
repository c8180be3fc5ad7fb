"""Random small solves: the loop's short account and its turns in C++ beside its account in full."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases.kernels import needs_cpp
from solvers import Anderson, Forward, Solution, Solver, Tolerance, fixed_point
from solvers.core import loop
from solvers.methods import turns
from solvers.native import process, spare

SETTINGS = settings(max_examples=70, deadline=None, derandomize=True)
# Contracting a little or much, constant, turning for ever, expanding within bounds and without.
SLOPES = torch.tensor([0.0, 0.3, 0.6, 0.9, -0.8, 1.0, 1.6, 3.0], dtype=torch.float64)
LOSSES = torch.tensor([torch.nan, torch.inf, 0.0, 1e9, 1e30], dtype=torch.float64)


class Map:
    """``z -> slope * g(z, rolled) + offset`` of every sample, which may fail at its own evaluation.

    A solve begins, and evaluations are counted anew, where all samples are at their ``origin``.
    """

    def __init__(self, bounded: bool) -> None:
        self.bounded, self.calls = bounded, 0

    def __call__(
        self, state: Any, slope: Tensor, offset: Tensor, fails: Tensor, loss: Tensor, origin: Any
    ) -> Any:
        z = flat(state)
        self.calls = 1 if torch.equal(z, flat(origin)) else self.calls + 1
        z = z.roll(1, 1)
        value = slope[:, None] * (torch.sin(z) if self.bounded else z) + offset
        lost = LOSSES.to(value.dtype)[loss][:, None]
        value = torch.where((fails == self.calls)[:, None], lost, value)
        if isinstance(state, Tensor):
            return value.reshape(state.shape)
        sizes = [part[0].numel() for part in state]
        parts = zip(value.split(sizes, 1), state, strict=True)
        return tuple(new.reshape(old.shape) for new, old in parts)


@st.composite
def solves(draw: st.DrawFn) -> dict[str, Any]:
    """One call, drawn from its seed but for what a failure is made smaller by."""
    batch, size = draw(st.integers(1, 70)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def among(values: Tensor) -> Tensor:
        return values[torch.randint(len(values), (batch,), generator=generator)].to(dtype)

    offset = normal(batch, size) * among(torch.tensor([0.0, 1.0, 1.0, 1.0, 30.0]))[:, None]
    fails = among(torch.tensor([0.0] * 30 + [1.0, 2.0, 3.0, 5.0])) * draw(st.booleans())
    loss = torch.randint(len(LOSSES), (batch,), generator=generator)
    kind = draw(st.sampled_from(["plain", "plain", "plain", "strided", "pytree", "mask", "cube"]))
    start: Any = normal(size, batch).T if kind == "strided" else normal(batch, size)
    mask = None
    if kind == "pytree":
        start = (start[:, : size // 2], start[:, size // 2 :, None]) if size > 1 else (start,)
    if kind == "mask":
        mask = torch.rand(batch, size, generator=generator) < 0.7
    if kind == "cube":
        start = start[:, :, None]
    each = among(torch.tensor([0.0, 1e-2, 1e-3, 1e-4])), among(torch.tensor([0.0, 1e-2, 1e-3]))
    rtol = each[0] if draw(st.booleans()) else draw(st.sampled_from([1e-3, 1e-4, 1e-2, 0.0]))
    atol = each[1] if draw(st.booleans()) else draw(st.sampled_from([0.0, 0.0, 1e-3]))
    return {
        "bounded": draw(st.booleans()),
        "z0": start,
        "args": (among(SLOPES), offset, fails, loss, start),
        "mask": mask,
        "tolerance": Tolerance(rtol, atol),
        "max_steps": draw(st.integers(1, 30)),
        "compact": draw(st.booleans()),
        "damping": draw(st.sampled_from([1.0, 1.0, 0.6])),
        "memory": draw(st.integers(1, 12)),
    }


def solved(
    options: dict[str, Any],
    solver: Solver,
    *,
    native: bool,
    full: bool = False,
    small: int = turns.SMALL,
) -> Solution:
    """The solution.

    ``full``: with a trace, for which every turn is accounted for in full. ``small``: batches of so many
    numbers are solved by C++ alone.
    """
    own = {k: v for k, v in options.items() if k not in ("bounded", "damping", "memory")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "ENABLED", native)
        for module in (loop, turns):  # so that samples stall within thirty evaluations
            patch.setattr(module, "PATIENCE", 7)
        patch.setattr(turns, "SMALL", small)
        patch.setattr(spare, "SMALL", 0)  # what is kept knows the patience
        return fixed_point(
            Map(options["bounded"]), solver=solver, adjoint=None, on_failure="ignore", record=full, **own
        )  # fmt: skip


def flat(state: Any) -> Tensor:
    """(B, D)."""
    parts = state if isinstance(state, tuple) else (state,)
    return torch.cat([part.flatten(1) for part in parts], 1)


COUNTS = ("status", "evaluations", "steps")


@SETTINGS
@given(solves())
def test_the_short_account_is_the_full_one(options: dict[str, Any]) -> None:
    """To the last digit, whatever the samples do."""
    for solver in (
        Forward(options["damping"]),
        Anderson(options["memory"], damping=options["damping"]),
    ):
        full, short = (solved(options, solver, native=False, full=each) for each in (True, False))
        for name in (*COUNTS, "residual", "residual_norm"):
            assert torch.equal(getattr(full, name), getattr(short, name)), name
        assert torch.equal(flat(full.value), flat(short.value))


def regular(options: dict[str, Any]) -> Tensor:
    """(B,) bool: samples whose solve does not hang on a rounding.

    They contract, to a point other than zero, and do not lose their digits to a huge value.
    """
    slope, offset, fails, loss, _ = options["args"]
    contracts = (slope.abs() < 0.95) & (offset.abs().sum(1) > 0)
    zero, tolerance = torch.zeros(len(slope)), options["tolerance"]
    reachable = (zero + tolerance.rtol > 0) | (zero + tolerance.atol > 0)
    return contracts & reachable & ((fails == 0) | (loss < 2))


@needs_cpp
@SETTINGS
@given(solves(), st.sampled_from([0, turns.SMALL]))
def test_turns_in_native_steps_are_those_of_numpy(options: dict[str, Any], small: int) -> None:
    """Plain steps in every sample, Anderson's (with a ridge that tames them) in the regular ones."""
    damping = options["damping"]
    for solver in (
        Forward(damping),
        Anderson(options["memory"], damping=damping, regularization=1e-2),
    ):
        native, plain = (
            solved(options, solver, native=each, small=small) for each in (True, False)
        )
        tame = regular(options)
        rows = tame if isinstance(solver, Anderson) else torch.ones_like(tame)
        for name in COUNTS:
            assert torch.equal(getattr(native, name)[rows], getattr(plain, name)[rows]), name
        value, expected = flat(native.value)[tame], flat(plain.value)[tame]
        close = 1e-9 if value.dtype == torch.float64 else 2e-3
        assert ((value - expected).norm(dim=1) <= close * expected.norm(dim=1)).all()
        finite = torch.isfinite(plain.residual_norm)
        assert torch.equal(torch.isfinite(native.residual_norm), finite)
        gap = (native.residual_norm - plain.residual_norm)[tame & finite]
        assert (gap.abs() <= close * (flat(plain.value)[tame & finite].norm(dim=1) + 1)).all()
