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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import solvers
import solvers.methods.turns as turns_module
from solvers import Status, Tolerance
from solvers.core.cuda import forced
from solvers.core.rows import RUNNING, STEPS
from solvers.methods.turns import Turns

pytest.importorskip("triton", reason="Triton is not installed")
kernels = importlib.import_module("solvers.methods.triton_kernels")
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
    """A copy of the state after each turn; with ``unit_free``, f returns the residual."""
    free = options.pop("unit_free", False)
    turns = Turns(start, solvers.Anderson(options.pop("memory", 3)), options.pop("max_steps", 9),
                  fused=fused, mask=options.pop("mask", None), unit_free=free)  # fmt: skip
    turns.set_tolerance(options.pop("tolerance", Tolerance(1e-3)))
    turns.start(start)
    seen = []
    while True:
        turns.turn(f(turns.z.clone()))
        if not int(turns.left):
            turns.sharpen()
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


def test_gradient_steps_are_judged_by_their_gradient() -> None:
    """Around 1e6, where float32 would round the gradient away in ``f(z) - z``."""
    offset = 1e6 + torch.arange(12.0, device=DEVICE).reshape(2, 6)
    rates = torch.linspace(0.01, 0.02, 6, device=DEVICE)
    _, solution, _ = same(
        lambda z: rates * (offset - z), offset + 3, unit_free=True, tolerance=Tolerance(0.0, 1e-3)
    )
    exact = (rates * (offset - solution.value)).norm(dim=1)
    torch.testing.assert_close(solution.residual_norm, exact, rtol=1e-6, atol=0)


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
            assert torch.equal(z[ended], after[ended])
            assert torch.equal(before.value[ended], later.value[ended])
        finals.append(solution := seen[-1][1])
        assert solution.status[0] == Status.CONVERGED
        assert (solution.status[[4, 5]] == Status.NONFINITE).all()
        assert solution.status[6] == Status.DIVERGED
        assert (solution.status != RUNNING).all() and solution.value.isfinite().all()
    assert torch.equal(finals[0].status, finals[1].status)
    assert torch.equal(finals[0].evaluations, finals[1].evaluations)


def test_tiny_states() -> None:
    """Squares of such numbers are outside of float32."""
    x = 1e-42 * contraction(2, 30, torch.float32)[0]
    for fused in (False, True):
        _, solution, _ = run(
            lambda z: 0.5 * z.flip(1) + x, torch.zeros_like(x), fused, max_steps=40
        )[-1]
        assert (solution.status == Status.CONVERGED).all()
        exact = (x + 0.5 * x.flip(1)) / 0.75
        error = (solution.value.double() - exact.double()).norm() / exact.double().norm()
        assert error < 2e-2


def test_masked_entries_keep_their_value_and_enter_no_norm() -> None:
    x, f = contraction(2, 33, torch.float32)
    mask = (torch.arange(33, device=DEVICE) % 3 > 0).expand(2, 33)  # without memory of its own
    start = torch.full_like(x, 7.0)
    _, solution, _ = same(lambda z: f(z).where(mask, torch.nan), start, mask=mask)
    assert (solution.value[~mask] == 7.0).all()
    value = f(solution.value)
    residual = (value - solution.value)[mask].view(2, -1).norm(dim=1)
    relative = residual / value[mask].view(2, -1).norm(dim=1)
    torch.testing.assert_close(relative, solution.residual, rtol=1e-3, atol=1e-6)


def on_both(f: Any, start: Tensor, *args: Tensor, **options: Any) -> list[solvers.Solution]:
    """Solve by the ordinary loop of a CPU, and as on a CUDA device."""
    plain = solvers.fixed_point(f, start.cpu(), args, on_failure="ignore", **options)
    with forced():
        return [plain, solvers.fixed_point(f, start, args, on_failure="ignore", **options)]


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/deq/test_cuda.py solves on the card")
@pytest.mark.parametrize("case", ["plain", "mask", "half", "few steps"])
def test_solves_in_turns(case: str) -> None:
    dtype = torch.bfloat16 if case == "half" else torch.float32
    x, _ = contraction(4, 30, dtype)
    rates = torch.linspace(-0.9, 0.9, 30, dtype=dtype)
    options: dict[str, Any] = {"max_steps": 3 if case == "few steps" else 50}
    if case == "mask":
        options["mask"] = torch.arange(30).expand(4, 30) % 3 > 0
    x.requires_grad_()
    found = on_both(
        lambda z, x: rates * torch.sin(z.flip(1)) + x, torch.zeros_like(x), x, **options
    )
    losses = [solution.value.float().square().sum() for solution in found]
    gradients = [torch.autograd.grad(loss, x)[0] for loss in losses]
    assert (found[0].status == found[1].status).all()
    assert (found[0].evaluations - found[1].evaluations).abs().max() <= 1
    close = 3e-2 if case == "half" else 1e-3
    assert (found[0].value - found[1].value).norm() <= close * found[0].value.norm()
    assert found[1].value.dtype == dtype
    if case != "few steps":
        assert (gradients[0] - gradients[1]).norm() <= 2 * close * gradients[0].norm()


def convex(z: Tensor, x: Tensor) -> Tensor:
    return (0.1 * z**4 / 4 + z**2 / 2 - 0.3 * x * z).sum(1)


def two_wells(z: Tensor, x: Tensor) -> Tensor:
    return (z**4 / 4 - z**2 / 2 - 0.3 * x * z).sum(1)


@pytest.mark.skipif(DEVICE == "cuda", reason="rounding on a card differs")
@pytest.mark.parametrize("energy", [convex, two_wells])
def test_the_algorithm_for_energies_does_not_depend_on_the_device(
    energy: Callable[..., Tensor],
) -> None:
    x, _ = contraction(3, 8, torch.float32)
    descent = solvers.Descent(energy, step_size=0.3)
    plain, found = on_both(descent, 0.1 * x, x, tolerance=1e-5, max_steps=200)
    assert found.converged.all() and torch.equal(plain.evaluations, found.evaluations)
    torch.testing.assert_close(found.value, plain.value)


def test_a_failing_sample_is_left_to_the_ordinary_loop() -> None:
    def f(z: Tensor, x: Tensor) -> Tensor:
        return z * (1 + x) / 2 + 1 + 0 * x / (2 - x)  # no fixed point for x = 1, NaN for x = 2

    x = torch.tensor([[0.0], [2.0], [1.0], [0.0]])
    plain, found = on_both(f, torch.zeros_like(x), x, max_steps=300)
    assert (plain.status == found.status).all()


class Counted(TorchDispatchMode):
    """Counts operations that launch a kernel, and reads of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.reads = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        view = func.is_view or "empty" in func.name() or "_unsafe_view" in func.name()
        read = "_local_scalar_dense" in func.name()
        self.reads += read
        self.kernels += not (view or read)
        return result


def test_what_a_turn_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside f and the three kernels an evaluation costs one copy, and the host reads one number."""
    plain, counts = turns_module.turn, []
    monkeypatch.setattr(turns_module, "turn", lambda s, value: quiet(plain, s, value))

    def quiet(turn: Any, s: Turns, value: Tensor) -> None:
        with _disable_current_modes():
            turn(s, value)

    for rtol in (1e-2, 1e-3):
        x, f = contraction(4, 30, torch.float32)
        with Counted() as alone:
            f(x)
        with forced(), torch.no_grad(), Counted() as seen:
            found = solvers.fixed_point(f, x, tolerance=rtol, verify=False, compact=False)
        counts.append((int(found.evaluations.max()), seen.kernels, seen.reads))
    (few, kernels, reads), (many, more_kernels, more_reads) = counts
    assert few < many <= STEPS  # later, samples that have converged are examined again
    assert more_kernels - kernels <= (many - few) * (alone.kernels + 1)
    assert more_reads - reads == many - few


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
