"""Who computes the bi-softmax, and that the layer above never notices but in time and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn import DEQ
from implicit_attn.energies import BiSoftmaxAttention, Energy, Quadratic
from implicit_attn.kernels import Choice, bisoftmax, bisoftmax_hvp, explain
from implicit_attn.kernels.bisoftmax import blocks, dispatch, ops, reference
from solvers import Implicit, Tolerance


def state(count: int, width: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(2, 2, count, width, generator=generator).to(dtype)


@pytest.mark.parametrize(
    ("heads", "count", "backend"),
    [
        (4, 1, "reference"),
        (4, 256, "reference"),
        (4, 257, "blocks"),
        (12, 256, "blocks"),
        (400, 65, "blocks"),
        (1, 2000, "blocks"),
    ],
)
def test_automatic_choice(heads: int, count: int, backend: str) -> None:
    choice = explain(torch.empty(1, heads, count, 4), 0.3)
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

    for module, name in ((blocks, "blocks"), (reference, "reference")):
        names = ("bisoftmax", "bisoftmax_forward", "bisoftmax_hvp")
        for function in (n for n in names if hasattr(module, n)):
            monkeypatch.setattr(module, function, noted(name, getattr(module, function)))
    for count in (20, 260):
        z = state(count)
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


@pytest.mark.parametrize("backend", ["auto", "reference", "blocks"])
def test_every_backend_checks_its_input(backend: str) -> None:
    z = state(5)
    with pytest.raises(ValueError, match=r"z must have the shape \(B, H, N, p\)"):
        bisoftmax(z[0], 0.3, backend=backend)
    with pytest.raises(ValueError, match=r"beta must be > 0, got -1"):
        bisoftmax(z, -1, backend=backend)
    with pytest.raises(TypeError, match="mask must be of dtype bool"):
        bisoftmax(z, 0.3, mask=torch.ones(2, 5), backend=backend)
    with pytest.raises(ValueError, match="v must be like z"):
        bisoftmax_hvp(z, z[:1], 0.3, backend=backend)
    with pytest.raises(ValueError, match=r"lse must have the shape \(B, H, N\) = \(2, 2, 5\)"):
        bisoftmax_hvp(z, z, 0.3, lse=z[..., 0, 0], backend=backend)


class FakeKernels:
    """Stands for the Triton kernels: takes float32 only."""

    bisoftmax_forward = staticmethod(blocks.bisoftmax_forward)

    @staticmethod
    def supports(z: Tensor, mask: Tensor | None, causal: bool) -> str | None:
        return None if z.dtype == torch.float32 else f"no {z.dtype}"


def test_kernels_are_asked_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "triton_backend", lambda: FakeKernels)
    z = state(20)
    gradient, _ = bisoftmax(z, 0.3, backend="triton")
    torch.testing.assert_close(gradient, bisoftmax(z, 0.3)[0])
    with pytest.raises(ValueError, match=r'backend="triton" does not take .* no torch\.float64'):
        bisoftmax(z.double(), 0.3, backend="triton")


def test_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("triton could not be imported")

    monkeypatch.setattr(ops, "triton_backend", missing)
    with pytest.raises(ImportError, match="triton could not be imported"):
        bisoftmax(state(20), 0.3, backend="triton")
    assert "triton could not be imported" in str(ops.triton_lacks(state(20), None, False))


def test_empty_batches() -> None:
    for count, batch in ((0, 2), (300, 0)):
        z = torch.zeros(batch, 2, count, 4)
        gradient, lse = bisoftmax(z, 0.3, backend="blocks")
        assert gradient.shape == z.shape and lse.shape == z.shape[:3]
        assert bisoftmax_hvp(z, z, 0.3, backend="blocks").shape == z.shape


def energy(backend: str, dtype: torch.dtype = torch.float64, **options: Any) -> Energy:
    torch.manual_seed(0)
    attention = BiSoftmaxAttention(12, heads=2, backend=backend, **options)
    return (0.4 * attention + Quadratic()).to(dtype)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"norm": None, "bound": 1.0}])
@pytest.mark.parametrize("masked", [False, True])
def test_energies_agree(options: dict[str, Any], masked: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x, z, v = (torch.randn(2, 140, 12, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(2, 140, generator=generator) > 0.3 if masked else None
    found = {}
    for backend in ("blocks", "reference"):
        model = energy(backend, **options)
        value, gradient = model.value_and_grad(z, x, mask=mask)
        product = model.hvp(z, v, x, mask=mask)
        loss = (gradient * v).sum() + value.sum() + product.square().sum()
        found[backend] = [value, gradient, product]
        found[backend] += torch.autograd.grad(loss, list(model.parameters()))
    for ours, theirs in zip(found["blocks"], found["reference"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("masked", [False, True])
def test_layers_agree(masked: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(1, 260, 12, generator=generator, dtype=torch.float64)
    mask = torch.rand(1, 260, generator=generator) > 0.3 if masked else None
    results = {}
    for backend in ("auto", "reference"):
        exact = Tolerance(rtol=1e-11)
        layer = DEQ(energy(backend), tolerance=exact, adjoint=Implicit(tolerance=exact))
        point = x.clone().requires_grad_()
        z = layer(point, mask)
        inputs = [point, *layer.parameters()]
        first = torch.autograd.grad(z.square().mean(), inputs, create_graph=True)
        second = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), inputs)
        results[backend] = [z, *first, *second]
    for ours, theirs in zip(results["auto"], results["reference"], strict=True):
        assert (ours - theirs).norm() <= 1e-7 * theirs.norm()


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


def test_the_dense_formula_is_for_few_tokens() -> None:
    assert dispatch.DENSE_TOKENS <= 256
