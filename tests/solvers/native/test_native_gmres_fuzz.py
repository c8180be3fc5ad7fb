"""Random linear systems by GMRES in C++ beside NumPy: counts, verdicts, and honest residuals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases.kernels import needs_cpp
from solvers import GMRES, Solution, Tolerance, solve_linear
from solvers.native import process

pytestmark = needs_cpp
PLAIN, SINGULAR, ZERO, SCALED = range(4)
FINE, NOTHING, NAN, HUGE, INFINITE = range(5)


@st.composite
def systems(draw: st.DrawFn) -> dict[str, Any]:
    batch, size = draw(st.integers(1, 40)), draw(st.integers(1, 24))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def among(*values: int) -> Tensor:
        index = torch.randint(len(values), (batch,), generator=generator)
        return torch.tensor(values)[index]

    matrix = 0.3 * normal(batch, size, size) / size**0.5 + 0.9 * torch.eye(
        size, dtype=torch.float64
    )
    kind = among(*[PLAIN] * 5, SINGULAR, ZERO, SCALED)
    matrix[kind == SINGULAR, :, : (size + 2) // 3] = 0
    matrix[kind == ZERO] = 0
    matrix[kind == SCALED] *= 1e-5
    right = normal(batch, size)
    sides = among(*[FINE] * 6, NOTHING, NAN, HUGE, INFINITE)
    right[sides == NOTHING] = 0
    right[sides == NAN, 0] = torch.nan
    right[sides == HUGE] *= 1e9
    right[sides == INFINITE, 0] = torch.inf
    return {
        "b": right if draw(st.booleans()) else right.mT.contiguous().mT,
        "args": (matrix, among(0, 0, 0, 0, 0, 1).bool() & draw(st.booleans())),
        "regular": (kind == PLAIN) | (kind == SCALED),
        "spoilt": draw(st.integers(1, 6)),
        "solver": GMRES(draw(st.integers(1, 30))),
        "tolerance": Tolerance(draw(st.sampled_from([1e-2, 1e-6, 1e-10]))),
        "max_steps": draw(st.integers(1, 50)),
        "compact": draw(st.booleans()),
        "record": draw(st.booleans()),
        "x0": torch.ones_like(right) if draw(st.booleans()) else None,
    }


def solved(options: dict[str, Any], *, native: bool) -> Solution:
    own = {name: value for name, value in options.items() if name not in ("regular", "spoilt")}
    calls = []

    def times(v: Tensor, matrix: Tensor, spoils: Tensor) -> Tensor:
        calls.append(len(v))
        lost = spoils & (len(calls) == options["spoilt"])
        return torch.where(lost[:, None], torch.nan, (matrix @ v[:, :, None])[:, :, 0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "ENABLED", native)
        return solve_linear(times, on_failure="ignore", **own)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(systems())
def test_systems_of_every_kind(options: dict[str, Any]) -> None:
    native, ordinary = (solved(options, native=each) for each in (True, False))
    rows, (matrix, spoils), right = options["regular"], options["args"], options["b"]
    for name in ("status", "evaluations", "steps"):
        assert torch.equal(getattr(native, name)[rows], getattr(ordinary, name)[rows]), name
    torch.testing.assert_close(native.value[rows], ordinary.value[rows], rtol=1e-7, atol=1e-7)
    if native.trace is not None and ordinary.trace is not None:
        seen = [each.trace.residual[rows] for each in (native, ordinary) if each.trace is not None]
        width = min(part.shape[1] for part in seen)
        torch.testing.assert_close(
            seen[0][:, :width], seen[1][:, :width], rtol=1e-3, atol=1e-9, equal_nan=True
        )
    assert torch.isfinite(native.value).all()
    left = (right - (matrix @ native.value[:, :, None])[:, :, 0]).norm(dim=1) / right.norm(dim=1)
    honest = torch.isfinite(native.residual) & (right.norm(dim=1) > 0) & ~spoils
    gap = (left - native.residual)[honest].abs()
    assert (gap <= 0.2 * native.residual[honest] + 1e-11).all()
