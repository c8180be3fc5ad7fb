"""The native engine and the loop in torch side by side: equal statuses, counts, values and residuals.

The two compute alike but for rounding: a count may differ by one where a residual stands at the tolerance.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases.kernels import needs_engine, without_engine
from solvers import Anderson, Forward, Solution, Status, Tolerance, fixed_point, native

pytestmark = needs_engine
F32, F64 = torch.float32, torch.float64
SOLVERS = (
    Forward(),
    Forward(damping=0.6),
    Anderson(),
    Anderson(memory=3),
    Anderson(memory=1, damping=0.5),
)


def both(run: Callable[[], Any]) -> tuple[Any, Any]:
    """By the engine, and by the loop."""
    found = run()
    with pytest.MonkeyPatch.context() as patch:
        without_engine(patch)
        return found, run()


def assert_alike(one: Solution, other: Solution, amplification: float, rtol: float) -> None:
    """``amplification``: how much of a residual may be an error of the value."""
    assert one.status.tolist() == other.status.tolist()
    assert (one.evaluations - other.evaluations).abs().max() <= 1
    assert torch.equal(one.steps - one.evaluations, other.steps - other.evaluations)
    solved = one.converged
    scale = other.value.flatten(1).norm(dim=1)
    apart = (one.value - other.value).flatten(1).norm(dim=1)
    assert (apart[solved] <= (2 * amplification * rtol * scale + 1e-30)[solved]).all()


def contraction(seed: int, size: int, norm: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=generator, dtype=F64)
    return (norm * matrix / torch.linalg.matrix_norm(matrix, 2)).to(dtype), torch.randn(
        7, size, generator=generator, dtype=F64
    ).to(dtype)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 40),
    batch=st.integers(1, 7),
    norm=st.sampled_from([0.3, 0.9]),
    scale=st.sampled_from([1.0, 1e-12, 1e12]),
    solver=st.sampled_from(SOLVERS),
    dtype=st.sampled_from([F32, F64]),
    masked=st.booleans(),
    max_steps=st.sampled_from([1, 2, 5, 300]),
)
def test_the_engine_decides_as_the_loop(
    seed: int, size: int, batch: int, norm: float, scale: float, solver: Any, dtype: torch.dtype,
    masked: bool, max_steps: int,
) -> None:  # fmt: skip
    matrix, shift = contraction(seed, size, norm, dtype)
    shift = scale * shift[:batch]
    drawn = torch.rand(batch, size, generator=torch.Generator().manual_seed(seed))
    mask = drawn > 0.3 if masked else None
    rtol = 1e-4 if dtype == F32 else 1e-9
    calls = 0

    def f(z: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return scale * torch.sin(z / scale) @ matrix.mT + x

    def run() -> Solution:
        nonlocal calls
        calls = 0
        found = fixed_point(
            f, torch.zeros_like(shift), (shift,), solver=solver, tolerance=Tolerance(rtol),
            max_steps=max_steps, mask=mask, on_failure="ignore", adjoint=None, verify=False,
        )  # fmt: skip
        assert calls == found.evaluations.max() <= max_steps
        return found

    assert_alike(*both(run), 1 / (1 - norm), rtol)


DIFFICULT: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "diverges": (lambda z: 3 * z + 1, Forward()),
    "runs off": (lambda z: z * z + 1, Forward()),
    "overflows": (lambda z: torch.exp(9 * z), Forward()),
    "not finite at the start": (lambda z: z / 0.0, Anderson()),
    "turns": (lambda z: -z + 2, Forward()),
    "no fixed point": (lambda z: torch.floor(z) + 1.5 - torch.floor(z / 2), Forward()),
    "a pole": (lambda z: 1 / (z - 1.7), Anderson(memory=2)),
    "zero": (lambda z: 0.5 * z, Forward()),
    "all zero": (lambda z: 0 * z, Anderson()),
    "tiny": (lambda z: 0.5 * z + 1e-30, Anderson()),
    "huge": (lambda z: 0.5 * z + 1e30, Anderson()),
}


@pytest.mark.parametrize("kind", DIFFICULT)
@pytest.mark.parametrize(("dtype", "named"), [(F64, True), (F32, False)])
def test_difficult_samples_keep_their_status_and_budget(
    kind: str, dtype: torch.dtype, named: bool
) -> None:
    """Every call of ``f`` is told, and there are no more than asked for, also in second attempts."""
    g, solver = DIFFICULT[kind]
    start = torch.tensor([[0.0, 0.3], [1.0, -0.5], [2.0, 4.0], [-3.0, 0.1]], dtype=dtype)
    seen = torch.zeros(4, dtype=torch.int64)

    def f(z: Tensor, number: Tensor) -> Tensor:
        seen.index_add_(0, number, torch.ones_like(number))
        easy = number == 0  # the first sample is solved whatever happens to the others
        return torch.where(easy[:, None], 0.25 * z + 1, g(z))

    def run() -> Solution:
        seen.zero_()
        found = fixed_point(
            f, start, (torch.arange(4),), solver=solver if named else None, max_steps=250,
            on_failure="ignore", adjoint=None, tolerance=Tolerance(1e-4, 1e-9), verify=False,
        )  # fmt: skip
        assert (found.evaluations <= 250).all() and found.status[0] == Status.CONVERGED
        assert (found.evaluations <= seen).all() and seen.max() <= 250
        return found

    one, other = both(run)
    assert torch.equal(one.converged, other.converged)
    if named:  # where second attempts fail, how they do is a matter of rounding
        assert one.status.tolist() == other.status.tolist()
        assert (one.evaluations - other.evaluations).abs().max() <= 1
        torch.testing.assert_close(
            one.residual, other.residual, rtol=0.1, atol=1e-3, equal_nan=True
        )


def test_the_native_engine_is_used_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    own = native.function
    monkeypatch.setattr(native, "function", lambda *given: taken.append(given[1]) or own(*given))
    z, half = torch.zeros(1, 4), torch.zeros(2, 4, dtype=torch.bfloat16)
    mask = torch.tensor([[True, False, True, True]])

    def solve(start: Tensor, **options: Any) -> int:
        taken.clear()
        fixed_point(lambda z: 0.5 * z + 1, start, adjoint=None, **options)
        return len(taken)

    assert solve(z) == solve(z, solver=Forward(), mask=mask) == 1
    assert solve(z, record=True) == solve(half) == solve(z, solver=Anderson(memory=65)) == 0


def test_every_instruction_set_of_the_engine_gives_the_same_result() -> None:
    """Each library that this processor can run does the same; the best one is loaded."""
    best = native.engine()
    assert best is not None and f"engine_{native.levels()[0]}" in best._name
    assert native.levels()[0] in native.told()
    found = []
    for level in native.levels():
        assert (native.FOLDER / f"engine_{level}.so").exists()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "levels", lambda level=level: (level,))
            native.engine.cache_clear()
            found.append(fixed_point(torch.cos, torch.zeros(3, 2, dtype=F64), adjoint=None))
    native.engine.cache_clear()
    for other in found[1:]:
        torch.testing.assert_close(other.value, found[0].value)
        assert torch.equal(other.evaluations, found[0].evaluations)


@pytest.mark.parametrize("content", [None, b"", b"no library"])
def test_torch_computes_where_the_engine_cannot_be_loaded(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It warns once, and not where there is no library at all."""
    start = torch.zeros(3, 2, dtype=F64)
    expected = fixed_point(torch.cos, start, adjoint=None)
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    for level in native.levels() if content is not None else ():
        (tmp_path / f"engine_{level}.so").write_bytes(content or b"")
    native.engine.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [fixed_point(torch.cos, start, adjoint=None) for _ in range(2)]
        assert native.told().startswith("none")
    finally:
        native.engine.cache_clear()
    assert len(caught) == (content is not None)
    assert all("cannot be loaded" in str(each.message) for each in caught)
    for each in found:
        torch.testing.assert_close(each.value, expected.value)
        assert torch.equal(each.evaluations, expected.evaluations)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_threads_and_forks() -> None:
    """The same bits by one thread and two; a child waits for no thread of its parent."""
    large = contraction(1, 40, 0.9, F64)[1].repeat(200, 20)

    def solve() -> Tensor:
        return fixed_point(
            lambda z, x: 0.5 * torch.cos(z) + x, 0 * large, (large,), adjoint=None
        ).value

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = solve()
        torch.set_num_threads(2)
        assert torch.equal(solve(), one)
        child = os.fork()
        if child == 0:
            os._exit(0 if native.THREADS.number == 1 and torch.isfinite(one[0, 0]) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)
