"""The Triton kernels against the dense formula in float64, through the public functions, and compiled.

Without a CUDA device they run in Triton's interpreter (``tests/conftest.py`` asks for it), else on
the device. Every buffer that the kernels fill is full of NaN before they do. The last tests see what the
interpreter cannot tell: that the kernels compile and fit on a GPU, ahead of time, so none is needed.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.kernels import TOLERANCE, Case, Problem, dense, difference, problem_of
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp

pytest.importorskip("triton", reason="Triton is not installed")
backend = importlib.import_module("implicit_attn.kernels.bi_softmax.triton_backend")

pytestmark = pytest.mark.slow  # the interpreter runs a program of a kernel at a time
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, BRAIN = torch.float16, torch.bfloat16
on_a_card = (pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device"))

SMALL = [
    Case(1, 8, batch=2, on_chip=True),
    Case(15, 24, batch=2, mask="random", normalised=False, on_chip=True),
    Case(17, 64, batch=3, mask="rows", on_chip=True),
    Case(65, 24, batch=2, strided=True, mask="padding", on_chip=True),
    Case(81, 128, batch=2, mask="rows", normalised=False, on_chip=True),
    Case(81, 16, causal=True, dtype=HALF, normalised=False, on_chip=True),
    Case(127, 64, causal=True, strided=True, on_chip=True),
    Case(15, 64, dtype=HALF, batch=2, mask="random", causal=True, on_chip=True),
]
LARGE = [
    Case(1, 8, on_chip=False),
    Case(16, 16, causal=True, on_chip=False),
    Case(127, 24, dtype=HALF, batch=2, mask="rows", causal=True, on_chip=False),
    Case(129, 64, batch=2, strided=True),
    Case(129, 24, batch=2, mask="random", causal=True),
    Case(130, 16, batch=2, mask="padding", causal=True, normalised=False, dtype=HALF),
    Case(256, 128, heads=1, dtype=HALF),
    Case(257, 128, heads=1, causal=True, normalised=False, strided=True),
    Case(1000, 64, heads=1, dtype=HALF, mask="random", normalised=False),
    Case(140, 72, batch=2, mask="random"),
]
# Norms from tiny to where P is a permutation: one shift a head up to a peak of 150, then two
# exponentials. What float32 can say about such scores is what the dense formula has in float32.
NORMS = [
    Case(tokens, 16, normalised=False, scale=scale, causal=causal)
    for tokens, scale, causal in (
        (90, 1e-4, False),
        (129, 3.0, False),
        (129, 6.0, True),
        (90, 1e2, False),
    )
]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What torch allocates without filling it holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2, device=DEVICE).isnan().all()
    assert torch.empty_like(torch.ones(2, dtype=HALF, device=DEVICE)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def forward(case: Case, problem: Problem) -> tuple[Tensor, Tensor]:
    with layout_of(case):
        given = problem.z, case.beta, problem.mask, case.causal, case.limit
        return backend.bisoftmax_forward(*given)


def product(case: Case, problem: Problem, cotangent: Tensor | None = None) -> Tensor:
    with layout_of(case):
        given = problem.z, problem.v, case.beta, problem.mask, case.causal, case.limit
        return backend.bisoftmax_hvp(*given, None, cotangent)


@contextmanager
def layout_of(case: Case) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if case.on_chip is not None:
            patch.setattr(backend, "fits_on_chip", lambda call: case.on_chip)
        yield


def check(value: Tensor, expected: Tensor, tolerance: float) -> None:
    """In norm, and for the worst row against the largest; a NaN anywhere fails both."""
    assert value.shape == expected.shape
    assert difference(value, expected) <= tolerance
    off = (value.cpu().double() - expected).norm(dim=-1).max()
    assert off <= 10 * tolerance * expected.norm(dim=-1).max().clamp(min=1e-30)


def check_case(case: Case) -> None:
    problem = problem_of(case, DEVICE)
    gradient, lse, curved = dense(case, problem)
    tolerance = TOLERANCE[case.dtype]
    value, ours = forward(case, problem)
    assert value.dtype == case.dtype and ours.dtype == torch.float32
    check(value, gradient, tolerance)
    check(ours[..., None], lse[..., None], 1e-5)
    check(product(case, problem, problem.cotangent), curved, tolerance)
    if problem.mask is not None:
        assert not value.masked_select(~problem.mask[:, None, :, None]).any()
        assert not ours.masked_select(~problem.mask[:, None]).any()


@pytest.mark.parametrize("case", SMALL + LARGE, ids=str)
def test_against_float64(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("case", NORMS, ids=str)
def test_any_norm_is_as_good_as_the_dense_formula_in_float32(case: Case) -> None:
    problem = problem_of(case, DEVICE)
    expected = dense(case, problem, cotangent=False)
    in_single = dense(case, problem, torch.float32, cotangent=False)
    value, lse = forward(case, problem)
    curved = product(case, problem)
    for ours, single, exact in zip((value, lse, curved), in_single, expected, strict=True):
        assert difference(ours, exact) <= max(
            1e-5, 2 * difference(single, exact), rounding(expected[1])
        )


def rounding(lse: Tensor) -> float:
    """A score S is rounded by eps |S|, which is the relative error of its exponential."""
    return torch.finfo(torch.float32).eps * lse.abs().max().item()


@pytest.mark.defect("A16")
@pytest.mark.parametrize(("tokens", "causal"), [(20, True), (150, False)])
def test_half_precision_takes_scores_that_absorb_a_small_number(tokens: int, causal: bool) -> None:
    """Above 3e7 a score plus 14 is the score: the weights' boost must not be added to it."""
    case = Case(tokens, 64, normalised=False, dtype=HALF, scale=2000.0, causal=causal)
    problem = problem_of(case, DEVICE)
    assert problem.z.double().square().sum(-1).max() * case.beta > 3e7
    gradient, lse, _ = dense(case, problem, cotangent=False)
    value, ours = forward(case, problem)
    check(value, gradient, 1e-3)
    check(ours[..., None], lse[..., None], 1e-5)
    assert product(case, problem).isfinite().all()


ONES = torch.ones(2, 3, 130, 8, device=DEVICE)
EVERY = torch.ones(2, 130, dtype=torch.bool, device=DEVICE)


@pytest.mark.parametrize(("change", "name"), [
    ({"z": ONES.double()}, "backend"), ({"z": ONES.new_ones(1, 1, 2, 257)}, "backend"),
    ({"mask": EVERY.to("meta")}, "mask"), ({"v": ONES.to("meta")}, r"\bv\b"),
    ({"lse": ONES[..., 0].to("meta")}, "lse"),
])  # fmt: skip
def test_unsupported_arguments_are_named(change: dict[str, Any], name: str) -> None:
    z = change.get("z", ONES)
    with pytest.raises(ValueError, match=name):
        bisoftmax_hvp(**{"z": z, "v": z, "beta": 1.0, "backend": "triton", **change})


@pytest.mark.defect("C8")
def test_a_triton_that_cannot_compile_the_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.lacks(ONES, EVERY) is None
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr("triton.__version__", "3.2.0")  # aborts the process on Hopper
    assert "3.2.0" in (backend.lacks(ONES, None) or "")
    monkeypatch.setattr("triton.__version__", "3.10.1+git1")
    assert "3.10.1" not in (backend.lacks(ONES, None) or "")
    assert "CUDA" in backend.lacks(ONES.cpu(), None)


# --- on a device only ----------------------------------------------------------------------------

ON_DEVICE = [
    Case(tokens, width, batch=2, heads=3, dtype=dtype, mask=mask, causal=causal, strided=strided,
         normalised=normalised)
    for dtype in (BRAIN, HALF, torch.float32)
    for tokens, width, mask, causal, strided, normalised in (
        (1, 8, "none", False, False, True),
        (17, 24, "random", True, True, False),
        (65, 64, "none", False, False, True),
        (81, 128, "padding", False, True, True),
        (128, 256, "random", False, False, False),
        (129, 16, "rows", True, False, True),
        (257, 64, "none", False, True, True),
        (1000, 64, "none", True, False, True),
        (1000, 128, "padding", False, True, False),
        (1031, 128, "random", False, False, True),
        (2048, 256, "none", False, False, True),
        (2048, 128, "none", False, False, False),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=on_a_card) for case in ON_DEVICE], ids=str
)
def test_on_the_device(case: Case) -> None:
    """Also: never more than twice the error of the dense formula in the same precision."""
    check_case(case)
    problem = problem_of(case, DEVICE, seed=1)
    expected, rounded = dense(case, problem), dense(case, problem, case.dtype)
    ours = forward(case, problem)[0], product(case, problem, problem.cotangent)
    # No formula is better than the rounding of its result.
    floor = 1e-5 if case.dtype == torch.float32 else torch.finfo(case.dtype).eps
    for value, other, exact in zip(ours, rounded[::2], expected[::2], strict=True):
        assert difference(value, exact) <= max(floor, 2 * difference(other, exact))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_memory_on_the_device_is_linear_in_the_tokens() -> None:
    """At 32768 tokens one N x N matrix in bfloat16 takes 2 GiB."""
    z = torch.randn(1, 1, 32768, 64, device=DEVICE, dtype=BRAIN)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for limit in (None, 50.0):
        backend.bisoftmax_forward(z, 0.01, limit=limit)
        backend.bisoftmax_hvp(z, z, 0.01, limit=limit)
    assert torch.cuda.max_memory_allocated() - before < 12 * z.numel() * z.element_size()


# --- launches, and graphs of compilers ---------------------------------------------------------------


def laid_out(tokens: int) -> Tensor:
    """(2, 2, N, 16) as it lies after a projection of (B, N, 32)."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(2, tokens, 2, 16, generator=generator).to(DEVICE).transpose(1, 2)


@pytest.mark.defect("E5")
@pytest.mark.parametrize(("tokens", "most"), [(20, 1), (130, 2)])
def test_the_host_launches_few_kernels(
    tokens: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's time goes by launches, each of which Triton binds anew."""
    calls: list[Any] = []
    monkeypatch.setattr(backend, "launch", lambda kernel, *_: calls.append(kernel))
    z = laid_out(tokens)
    for options in ({"limit": 9.0}, {}, {"causal": True}):
        for call in (
            backend.bisoftmax_forward,
            lambda z, *a, **o: backend.bisoftmax_hvp(z, z, *a, **o),
        ):
            calls.clear()
            call(z, 0.25, **options)
            assert len(calls) <= most


@pytest.mark.parametrize(("compiler", "tokens"), [
    ("aot_eager", 20),
    pytest.param("inductor", 20, marks=on_a_card),
    pytest.param("inductor", 130, marks=on_a_card),
])  # fmt: skip
def test_whole_graph_compilation(compiler: str, tokens: int) -> None:
    """A compiler takes the results for contiguous, whatever the strides of ``z``."""

    def loss(z: Tensor, v: Tensor) -> Tensor:
        gradient, lse = bisoftmax(z, 0.25, backend="triton")
        product = bisoftmax_hvp(z, v, 0.25, lse=lse, backend="triton")
        flat = gradient.view(2, -1) + product.view(2, -1)
        return flat.square().sum() + lse.sum()

    z, v = laid_out(tokens).requires_grad_(), laid_out(tokens) + 1.0
    expected = loss(z, v)
    compiled = torch.compile(loss, fullgraph=True, backend=compiler)
    value = compiled(z, v)
    torch.testing.assert_close(value, expected)
    ours, theirs = (torch.autograd.grad(each, z)[0] for each in (value, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.defect("E9")
def test_tiles_fit_the_chip() -> None:
    """The tables are for Hopper, with 227 KiB for a program, and for every other card, with 99 KiB."""
    for kernel in ("lse", "gradient", "curvature", "free curvature", "causal", "mean"):
        for capability, room in ((80, 99), (90, 227), (120, 99)):
            for width, size in itertools.product((16, 64, 128, 256), (2, 4)):
                shape = backend.tiles(kernel, width, size, capability)
                # Its own rows of z and v, and the columns in flight.
                held = 2 * size * width * (shape.rows + shape.columns * shape.stages)
                assert held <= room * 1024 * 1.6
                assert size == 2 or shape.columns > 16 or shape.warps <= 4


# --- compiled for a GPU that need not be there ---------------------------------------------------

# Where Triton brings its disassembler along, the machine code is looked at as well: what the tile tables and
# the shape of the loops are for.
ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "workers" / "triton_compile.py"
KERNELS = {
    "causal_rows_kernel", "causal_columns_kernel",
    "small_gradient_kernel", "small_hvp_kernel", "lse_kernel", "gradient_kernel", "mean_kernel",
    "curvature_kernel",
}  # fmt: skip
on_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="Triton's ptxas is looked for on x86-64"
)


def compiled(capability: int, folder: Path) -> Any:
    """What the worker reports, in a process of its own: here Triton may be set to interpret."""
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(WORKER), str(capability)]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@on_x86
@pytest.mark.defect("E1")
@pytest.mark.defect("E2")
@pytest.mark.defect("E3")
@pytest.mark.defect("E7")
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_every_kernel_compiles_to_what_a_card_wants(capability: int, tmp_path: Path) -> None:
    reports = compiled(capability, tmp_path)
    assert {report["kernel"] for report in reports} == KERNELS
    for report in reports:
        counts = report["counts"]
        if counts is None:
            continue
        # A kernel that cannot be lowered may come out empty, and without an error.
        assert counts["all"] > 100, report
        assert counts["tensor-core product"] > 0, report
        # Where ptxas serialises the products of Hopper it waits before and after each of them.
        assert counts["wait between products"] <= counts["tensor-core product"], report
        assert counts["load of 2 bytes"] == 0, report
        if report["width"] <= 128 and report["bytes"] == 2:
            spilled = counts["store to the stack"] + counts["load from the stack"]
            assert spilled <= (0 if capability == 90 else 8), report
        if capability != 90:
            continue
        if report["width"] % 16 and report["tokens"] > 128:
            assert counts["copy of 16 bytes"] > 0, report
        # Two stages would leave the loads of a loop uncovered.
        if report["width"] == 64 and report["tokens"] == 2048:
            assert report["stages"] >= 3, report
