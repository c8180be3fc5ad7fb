"""Which backend computes the bi-softmax, what it refuses, and tokens that are alone."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from cases.kernels import needs_cpp
from implicit_attn import DEQ
from implicit_attn.energies import BiSoftmaxAttention, Energy, Quadratic
from implicit_attn.kernels import Choice, bisoftmax, bisoftmax_hvp, explain
from implicit_attn.kernels.bi_softmax import ops, reference, strips
from solvers import Tolerance

each_backend = pytest.mark.parametrize(
    "backend", ["auto", "reference", "blocks", pytest.param("cpp", marks=needs_cpp)]
)


def state(count: int, width: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(2, 2, count, width, generator=generator).to(dtype)


@pytest.mark.parametrize(("heads", "count", "backend"), [
    (4, 1, "reference"),
    (4, 256, "reference"),
    (4, 257, "blocks"),
    (12, 256, "blocks"),
    (400, 65, "blocks"),
    (1, 2000, "blocks"),
])  # fmt: skip
def test_automatic_choice(heads: int, count: int, backend: str) -> None:
    """Of what the engine does not take."""
    choice = explain(torch.empty(1, heads, count, 4, dtype=torch.float64), 0.3)
    assert isinstance(choice, Choice)
    assert choice.backend == backend
    assert f"{heads} matrices of {count} x {count} pairs" in choice.reason


def test_automatic_choice_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def noted(name: str, function: Any) -> Any:
        def wrapper(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*args, **options)

        return wrapper

    for module, name in ((strips, "blocks"), (reference, "reference")):
        names = ("bisoftmax", "bisoftmax_forward", "bisoftmax_hvp")
        for function in (n for n in names if hasattr(module, n)):
            monkeypatch.setattr(module, function, noted(name, getattr(module, function)))
    for count in (20, 260):
        z = state(count).double()
        for backend in ("auto", "reference", "blocks"):
            calls.clear()
            bisoftmax(z, 0.3, backend=backend)
            bisoftmax_hvp(z, z, 0.3, backend=backend)
            assert set(calls) == {explain(z, 0.3, backend=backend).backend}


def test_a_named_backend_is_taken_or_refused() -> None:
    z = state(20)
    assert explain(z, 0.3, backend="blocks") == Choice("blocks", "asked for")
    assert explain(state(900), 0.3, backend="reference").backend == "reference"
    for call in (
        lambda: explain(z, 0.3, backend="dense"),
        lambda: bisoftmax(z, 0.3, backend="dense"),
        lambda: bisoftmax_hvp(z, z, 0.3, backend="dense"),
        lambda: BiSoftmaxAttention(8, heads=2, backend="dense"),
    ):
        with pytest.raises(ValueError, match=r"backend must be one of \('auto', .*, got 'dense'"):
            call()


@each_backend
def test_every_backend_checks_its_input(backend: str) -> None:
    z = state(5)
    with pytest.raises(ValueError, match=r"z must have the shape \(B, H, N, p\)"):
        bisoftmax(z[0], 0.3, backend=backend)
    with pytest.raises(TypeError, match="z must be of a floating dtype"):
        bisoftmax(z.int(), 0.3, backend=backend)
    for beta in (-1, 0.0):
        with pytest.raises(ValueError, match=f"beta must be > 0, got {beta}"):
            bisoftmax(z, beta, backend=backend)
    with pytest.raises(ValueError, match=r"mask must have the shape \(B, N\) = \(2, 5\)"):
        bisoftmax_hvp(z, z, 0.3, mask=torch.ones(2, 4, dtype=torch.bool), backend=backend)
    with pytest.raises(TypeError, match="mask must be of dtype bool"):
        bisoftmax(z, 0.3, mask=torch.ones(2, 5), backend=backend)
    with pytest.raises(ValueError, match="v must be like z"):
        bisoftmax_hvp(z, z[:1], 0.3, backend=backend)
    with pytest.raises(ValueError, match=r"lse must have the shape \(B, H, N\) = \(2, 2, 5\)"):
        bisoftmax_hvp(z, z, 0.3, lse=z[..., 0, 0], backend=backend)


def test_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("triton could not be imported")

    monkeypatch.setattr(ops, "triton_backend", missing)
    with pytest.raises(ImportError, match="triton could not be imported"):
        bisoftmax(state(20), 0.3, backend="triton")
    assert "triton could not be imported" in str(ops.triton_lacks(state(20), None))


def energy(backend: str, dtype: torch.dtype = torch.float64, **options: Any) -> Energy:
    torch.manual_seed(0)
    attention = BiSoftmaxAttention(12, heads=2, backend=backend, **options)
    return (0.4 * attention + Quadratic()).to(dtype)


def test_a_layer_holds_no_matrix_of_all_pairs() -> None:
    """Allocations of forward solve and backward pass, inside operators too, by the profiler."""
    count = 320
    layer = DEQ(energy("auto", torch.float32), tolerance=Tolerance(rtol=1e-3))
    x = torch.randn(1, count, 12, generator=torch.Generator().manual_seed(5))
    largest = {}
    for backend in ("auto", "reference"):
        layer.update.energy.terms[0].energy.backend = backend  # type: ignore[union-attr]
        with torch.profiler.profile(profile_memory=True) as profile:
            layer(x).square().mean().backward()
        events = profile.events()
        assert events is not None
        largest[backend] = max(
            event.self_cpu_memory_usage for event in events if event.name != "[memory]"
        )
    assert largest["auto"] < 4 * 2 * count * count <= largest["reference"]


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
each_of_four = pytest.mark.parametrize(
    "backend",
    [
        "reference",
        "blocks",
        pytest.param("cpp", marks=needs_cpp),
        pytest.param("triton", marks=needs_triton),
    ],
)
BETA, LIMIT = 0.5, 4.0
# tokens, which of them is counted (None: no mask)
ALONE = [(1, None), (3, 1), (130, 129), (300, 0)]


def alone(tokens: int, counted: int | None) -> tuple[Tensor, Tensor | None]:
    """States (2, 2, N, 4) of length 0.01, and a mask with one counted token in the first sample."""
    generator = torch.Generator().manual_seed(0)
    z = 0.005 * torch.randn(2, 2, tokens, 4, generator=generator)
    if counted is None:
        return z, None
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[0] = False
    mask[0, counted] = True
    return z, mask


@pytest.mark.defect("D1")
@each_of_four
@pytest.mark.parametrize("tokens, counted", ALONE)
@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize("causal", [False, True])
def test_its_log_sum_exp_is_its_score(
    tokens: int, counted: int | None, limit: float | None, causal: bool, backend: str
) -> None:
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    if backend == "triton":
        tokens, counted = min(tokens, 130), None if counted is None else min(counted, tokens - 1)
    z, mask = alone(tokens, counted)
    z, mask = z.to(device), None if mask is None else mask.to(device)
    _, lse = bisoftmax(z, BETA, mask=mask, limit=limit, causal=causal, backend=backend)
    score = BETA * z.double().square().sum(-1)
    sample, token = (slice(0, 1), counted) if counted is not None else (slice(None), 0)
    error = (lse[sample, :, token].double() - score[sample, :, token]).abs()
    assert (error <= 1e-6 * score[sample, :, token]).all()
    if counted is not None:
        assert (lse[0] != 0).sum() == 2  # masked tokens: zero


@pytest.mark.defect("D1")
@pytest.mark.parametrize("backend", ["reference", "blocks", pytest.param("cpp", marks=needs_cpp)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_layers_converge_on_it(tokens: int, backend: str) -> None:
    torch.manual_seed(0)
    energy = BiSoftmaxAttention(8, 1, backend=backend) + Quadratic()
    x = torch.randn(64, tokens, 8)
    x = 0.01 * x / x.norm(dim=(1, 2), keepdim=True)
    mask = None
    if tokens > 1:
        mask = torch.zeros(64, tokens, dtype=torch.bool)
        mask[:, 0] = True
    solution = DEQ(energy).solve(x, mask, on_failure="ignore")
    assert (solution.status == solvers.Status.CONVERGED).all()
