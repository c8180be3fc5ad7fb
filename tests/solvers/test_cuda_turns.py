"""A turn of Anderson's method by Triton's kernels and in torch, and both against ``solvers.Anderson``."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from solvers import Status, Tolerance
from solvers.core.rows import RUNNING
from solvers.cuda.turns import Turns

pytest.importorskip("triton", reason="Triton is not installed")
kernels = importlib.import_module("solvers.cuda.triton_kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    # Of numpy, in which the interpreter computes.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]
ROOT = Path(__file__).resolve().parents[2]
# What the two forms may differ by after a few turns, whose small systems amplify rounding.
CLOSE = {torch.float32: 2e-3, torch.float64: 1e-9}


def contraction(batch: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Callable[..., Tensor]]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(batch, size, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    rates = torch.linspace(-0.9, 0.9, size, dtype=torch.float64).to(DEVICE, dtype)
    return x, lambda z: rates * torch.sin(z.flip(1)) + x


def run(f: Callable[..., Tensor], start: Tensor, fused: bool, **options: Any) -> list[Any]:
    """A copy of the state after each turn."""
    turns = Turns(start, solvers.Anderson(options.pop("memory", 3)), options.pop("max_steps", 9),
                  fused=fused, mask=options.pop("mask", None))  # fmt: skip
    turns.set_tolerance(options.pop("tolerance", Tolerance(1e-3)))
    turns.start(start)
    seen = []
    while True:
        turns.turn(f(turns.z.clone()))
        solution = turns.solution()
        seen.append((turns.z.clone(), solution, int(turns.left)))
        if not int(turns.left):
            return seen


def same(f: Callable[..., Tensor], start: Tensor, **options: Any) -> list[Any]:
    """Run both forms and compare every turn; what the fused form returned last."""
    torch_form, fused = (run(f, start, each, **options) for each in (False, True))
    assert len(torch_form) == len(fused)
    close = CLOSE[start.dtype]
    for (z, expected, left), (other, found, number) in zip(torch_form, fused, strict=True):
        assert left == number
        assert (found.status == expected.status).all()
        assert (found.evaluations == expected.evaluations).all()
        torch.testing.assert_close(
            found.value, expected.value, rtol=close, atol=close, equal_nan=True
        )
        torch.testing.assert_close(other, z, rtol=close, atol=close, equal_nan=True)
        large = expected.residual > 10 * close  # below this a residual is rounding of the iterates
        torch.testing.assert_close(
            found.residual[large], expected.residual[large], rtol=0.1, atol=0
        )
    return fused[-1]


@pytest.mark.parametrize(
    ("batch", "size", "memory", "dtype"),
    [(1, 1, 3, torch.float32), (3, 65, 1, torch.float64), (2, 1025, 3, torch.float32)],
)
def test_the_kernels_and_torch_agree(
    batch: int, size: int, memory: int, dtype: torch.dtype
) -> None:
    x, f = contraction(batch, size, dtype)
    _, solution, left = same(f, torch.zeros_like(x), memory=memory)
    assert left == 0
    assert (solution.residual > 0).all()


def test_the_method_is_anderson() -> None:
    """The recorded method takes the steps of the package's own."""
    x, f = contraction(3, 40, torch.float64)
    options: dict[str, Any] = {"max_steps": 30, "tolerance": Tolerance(1e-8)}
    expected = solvers.fixed_point(
        f, torch.zeros_like(x), solver=solvers.Anderson(4), compact=False, **options
    )
    _, found, _ = run(f, torch.zeros_like(x), DEVICE == "cuda", memory=4, **options)[-1]
    assert (found.evaluations == expected.evaluations).all()
    torch.testing.assert_close(found.value, expected.value, rtol=1e-9, atol=1e-9)


def test_rows_of_a_recorded_solve_end_one_by_one() -> None:
    """Rows converge, diverge, meet NaN and infinity, and run out of steps, each on its own."""
    rates = torch.tensor([0.0, 0.3, 0.9, 1.0, 0.5, 0.5, 0.5], device=DEVICE)[:, None]
    x = torch.linspace(1, 2, 20, device=DEVICE).expand(7, 20).clone()
    calls = [0]

    def f(z: Tensor) -> Tensor:
        calls[0] += 1
        value = rates * z.abs().sqrt() + x
        value[3] = z[3] * 1e4 + 1.0
        value[4] = torch.nan
        value[5, 3] = torch.inf
        value[6] = z[6].flip(0).cos() * (1 if calls[0] < 3 else 1e9)
        return value

    finals = []
    for fused in (False, True):
        calls[0] = 0
        seen = run(f, torch.zeros_like(x), fused, tolerance=Tolerance(1e-6), max_steps=5)
        for (z, before, _), (after, later, _) in pairwise(seen):
            ended = before.status != RUNNING
            assert torch.equal(z[ended], after[ended]) and torch.equal(
                before.value[ended], later.value[ended]
            )
        finals.append(seen[-1][1])
    for solution in finals:
        assert solution.status[0] == Status.CONVERGED
        assert (solution.status[[4, 5]] == Status.NONFINITE).all()
        assert solution.status[6] == Status.DIVERGED
        assert (solution.status != RUNNING).all()
        assert solution.value.isfinite().all()
    for name in ("status", "evaluations"):
        assert torch.equal(getattr(finals[0], name), getattr(finals[1], name))


@pytest.mark.parametrize("size", [1e-42])
def test_tiny_and_huge_states(size: float) -> None:
    """Squares of such numbers are outside of float32."""
    x, _ = contraction(2, 30, torch.float32)
    x = x * size

    def f(z: Tensor) -> Tensor:
        return 0.5 * z.flip(1) + x

    for fused in (False, True):
        _, solution, _ = run(f, torch.zeros_like(x), fused, max_steps=40)[-1]
        assert (solution.status == Status.CONVERGED).all()
        exact = (x + 0.5 * x.flip(1)) / 0.75
        error = (solution.value.double() - exact.double()).norm() / exact.double().norm()
        assert error < 2e-2


def test_masked_entries_keep_their_value_and_enter_no_norm() -> None:
    x, f = contraction(2, 33, torch.float32)
    mask = torch.arange(33, device=DEVICE).expand(2, 33) % 3 > 0
    start = torch.full_like(x, 7.0)
    _, solution, _ = same(lambda z: f(z).where(mask, torch.nan), start, mask=mask)
    assert (solution.value[~mask] == 7.0).all()
    value = f(solution.value)
    residual = (value - solution.value)[mask].view(2, -1).norm(dim=1)
    relative = residual / value[mask].view(2, -1).norm(dim=1)
    torch.testing.assert_close(relative, solution.residual, rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's ptxas is looked for on x86-64")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_a_card(capability: int, tmp_path: Path) -> None:
    """They are compiled in a process in which Triton does not interpret."""
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/workers/triton_turns.py"), str(capability)]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    sizes = [int(line.split()[-1]) for line in result.stdout.splitlines()]
    assert len(sizes) == 6
    assert min(sizes) > 1000
