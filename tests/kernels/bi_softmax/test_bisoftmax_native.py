"""The native kernel: threads, derivatives, compilation, what it takes.

Its values are in ``test_bisoftmax_backends``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.kernels import difference, each_path, masks, needs_cpp, states
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp, explain
from implicit_attn.kernels.bi_softmax import native
from solvers.native import library

pytestmark = needs_cpp


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@each_path
@pytest.mark.parametrize("heads", [1, 3])
def test_threads(limit: float | None, causal: bool, heads: int, threads: Any) -> None:
    """Whole heads for each, and one shared by all; the same bits every time."""
    z, v, a = states(1, heads, 260, 12)
    found = []
    for number in (1, 2, 2):
        threads(number)
        gradient, lse = native.bisoftmax_forward(z, 0.3, None, causal, limit)
        product = native.bisoftmax_hvp(z, v, 0.3, None, causal, limit, None, a)
        found.append((gradient, lse, product))
    for one, two, again in zip(*found, strict=True):
        torch.testing.assert_close(two, again)
        assert difference(two, one.double()) <= 1e-6


def test_threads_without_openmp(threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    z, _, _ = states(1, 3, 260, 12)
    expected = native.bisoftmax_forward(z, 0.3, None, False, None)[0]
    monkeypatch.setattr(library, "_openmp", lambda: None)
    threads(2)
    found = native.bisoftmax_forward(z, 0.3, None, False, None)[0]
    assert difference(found, expected.double()) < 1e-6


def test_the_default_dtype_has_no_say() -> None:
    z, _, _ = states(1, 2, 20, 8)
    expected = bisoftmax(z, 0.3, backend="cpp")
    torch.set_default_dtype(torch.float64)
    try:
        found = bisoftmax(z, 0.3, backend="cpp")
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@each_path
@pytest.mark.parametrize("masked", [False, True])
def test_derivatives(limit: float | None, causal: bool, masked: bool) -> None:
    """Of a function of gradient and lse, once and twice, and of the product by all it depends on."""
    z, v, a = states(2, 2, 50, 6)
    mask = masks(2, 50)[2] if masked else None
    found = {}
    for backend, dtype in (("cpp", torch.float32), ("reference", torch.float64)):
        point, along, weight = (t.to(dtype).requires_grad_() for t in (z, v, a))
        options: dict[str, Any] = {"mask": mask, "causal": causal, "backend": backend}
        gradient, lse = bisoftmax(point, 0.4, limit=limit, **options)
        loss = (gradient * along).sum() + (lse * weight).sum()
        (first,) = torch.autograd.grad(loss, point, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), (point, along, weight))
        product = bisoftmax_hvp(point, along, 0.4, limit=limit, **options)
        third = torch.autograd.grad(product.square().sum(), (point, along))
        found[backend] = [first, *second, product, *third]
    for ours, theirs in zip(found["cpp"], found["reference"], strict=True):
        assert difference(ours.detach(), theirs.detach()) <= 1e-5


@pytest.mark.parametrize("backend", ["cpp", "auto"])
def test_whole_graph_compilation(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    z, _, _ = states(2, 2, 21, 6)
    mask = masks(2, 21)[1]

    def loss(z: Tensor) -> Tensor:
        gradient, lse = bisoftmax(z, 0.4, mask=mask, backend=backend)
        return gradient.square().sum() + lse.sum()

    point = z.requires_grad_()
    expected = torch.autograd.grad(loss(point), point)[0]
    solved = []
    monkeypatch.setattr(
        native, "_solve", lambda *args, own=native._solve: solved.append(own(*args))
    )
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(point), point)[0], expected)
    assert len(solved) == 2  # gradient and product, in the compiled graph too


def test_compiled_calls_are_checked() -> None:
    compiled = torch.compile(lambda z: bisoftmax(z, 0.3, backend="cpp")[0], backend="eager")
    with pytest.raises(ValueError, match=r'backend="cpp" does not take this input: .*float64'):
        compiled(torch.zeros(1, 1, 4, 4, dtype=torch.float64))


@pytest.mark.parametrize("count", [9, 300])
def test_the_automatic_choice(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z = states(1, 1, count, 4)[0]
    unserved = "reference" if count < 10 else "blocks"
    choice, other = explain(z, 0.3), explain(z.double(), 0.3)
    assert choice.backend == "cpp" and "the native engine" in choice.reason
    assert other.backend == unserved and "no C++ kernel: it computes in float32" in other.reason
    monkeypatch.setattr(native, "_kernel", lambda: None)
    without = explain(z, 0.3)
    assert without.backend == unserved and "no C++ kernel: the engine" in without.reason
    assert torch.isfinite(bisoftmax(z, 0.3)[0]).all()
    with pytest.raises(RuntimeError, match=r'backend="cpp" cannot be used here: the engine'):
        bisoftmax(z, 0.3, backend="cpp")


def test_what_it_does_not_take() -> None:
    for z, said in (
        (torch.zeros(1, 1, 4, 4, dtype=torch.float64), "computes in float32, got torch.float64"),
        (torch.zeros(1, 1, 4, 129), "heads of 1 to 128 features, got 129"),
        (torch.zeros(1, 1, 4, 4, device="meta"), "for tensors on the CPU, got one on meta"),
    ):
        for call in (bisoftmax, explain):
            with pytest.raises(ValueError, match=f'backend="cpp" does not take.*{said}'):
                call(z, 0.3, backend="cpp")
