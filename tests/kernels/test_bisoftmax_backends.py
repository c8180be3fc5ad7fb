"""Bi-softmax by strips and by the engine in C++ against the dense formula, and which backend computes it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.kernels import PATHS, Allocations, difference, each_path, masks, needs_cpp, states
from implicit_attn.energies import BiSoftmaxAttention
from implicit_attn.kernels import Choice, bisoftmax, bisoftmax_hvp, explain, reference, strips
from implicit_attn.kernels.bi_softmax import native
from solvers import native as library


@pytest.fixture(
    params=[
        "blocks",
        pytest.param("AVX512", marks=needs_cpp),
        pytest.param("AVX2", marks=needs_cpp),
    ]
)
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The strips, and the native kernel as a processor with these instructions gets it."""
    if request.param == "blocks":
        yield strips
        return
    if request.param == "AVX512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no AVX-512")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
        forget()
        yield native
    forget()


def forget() -> None:
    """What was found of the engine."""
    library.engine.cache_clear()
    native._kernel.cache_clear()


def errors(
    backend: Any, z: Tensor, v: Tensor, a: Tensor, beta: float, limit: float | None, **options: Any
) -> list[float]:
    """Of gradient, lse, and the product with and without the lse given."""
    options = {"mask": None, "causal": False} | options
    point = z.double().requires_grad_()
    exact, exact_lse = reference.bisoftmax(point, beta, **options)
    loss = (exact * v.double()).sum() + (exact_lse * a.double()).sum()
    (pullback,) = torch.autograd.grad(loss, point)
    gradient, lse = backend.bisoftmax_forward(z, beta, limit=limit, **options)
    products = [
        backend.bisoftmax_hvp(z, v, beta, limit=limit, lse=given, lse_cotangent=a, **options)
        for given in (None, lse)
    ]
    assert gradient.dtype == products[0].dtype == z.dtype
    assert (lse.double() - exact_lse).abs().max() <= 1e-6 * (1.0 + exact_lse.abs().max())
    found = [(gradient, exact), (lse, exact_lse), *((product, pullback) for product in products)]
    return [difference(ours, theirs.detach()) for ours, theirs in found]


@pytest.mark.parametrize(
    ("index", "count"), list(enumerate([1, 2, 16, 17, 48, 97, 129, 257, 1000]))
)
def test_every_count(backend: Any, index: int, count: int) -> None:
    """Every mask; over four counts in a row, each on every path."""
    batch, heads, width = (1, 1, 8) if count == 1000 else (2, 2, 16)
    z, v, a = states(batch, heads, count, width)
    for k, mask in enumerate(masks(batch, count)):
        limit, causal = list(PATHS.values())[(index + k) % 4]
        found = errors(backend, z, v, a, width**-0.5, limit, mask=mask, causal=causal)
        assert max(found) <= 1e-5, (count, limit, causal, mask, found)


@pytest.mark.parametrize("width", [1, 7, 16, 33, 127, 128])
def test_every_width(backend: Any, width: int) -> None:
    z, v, a = states(1, 2, 63, width)
    for limit, causal in PATHS.values():
        found = errors(backend, z, v, a, width**-0.5, limit, causal=causal)
        assert max(found) <= 1e-5, (width, limit, causal, found)


@pytest.mark.parametrize(("scale", "causal"), [(1e-20, False), (3.0, True), (30.0, False)])
def test_small_and_large_norms(backend: Any, scale: float, causal: bool) -> None:
    """Large scores carry float32's rounding of the scores themselves into any formula."""
    z, v, a = states(1, 2, 150, 16, scale)
    a = torch.zeros_like(a) if scale < 1e-10 else a
    dense = reference.bisoftmax(z, 0.25, causal=causal)
    exact = reference.bisoftmax(z.double(), 0.25, causal=causal)
    product = reference.bisoftmax_hvp(z, v, 0.25, causal=causal)
    exact_product = reference.bisoftmax_hvp(z.double(), v.double(), 0.25, causal=causal)
    gradient, lse, *pullbacks = errors(backend, z, v, a, 0.25, None, causal=causal)
    assert gradient <= max(1e-5, 2 * difference(dense[0], exact[0]))
    assert lse <= max(1e-5, 2 * difference(dense[1], exact[1]))
    assert max(pullbacks) <= max(1e-5, 4 * difference(product, exact_product))


@pytest.mark.parametrize(("name", "dtype", "bound"), [
    ("reference", torch.float32, 1e-5),
    ("reference", torch.float16, 1e-3),
    ("reference", torch.bfloat16, 8e-3),
    ("blocks", torch.float64, 1e-12),
    ("blocks", torch.float16, 1e-3),
    ("blocks", torch.bfloat16, 8e-3),
    pytest.param("cpp", torch.float16, 1e-3, marks=needs_cpp),
    pytest.param("cpp", torch.bfloat16, 8e-3, marks=needs_cpp),
])  # fmt: skip
def test_dtypes(name: str, dtype: torch.dtype, bound: float) -> None:
    count = 290
    z, v, _ = (t.to(dtype) for t in states(1, 2, count, 16))
    for limit, causal in PATHS.values():
        exact, exact_lse = reference.bisoftmax(z.double(), 0.25, causal=causal)
        exact_product = reference.bisoftmax_hvp(z.double(), v.double(), 0.25, causal=causal)
        options: dict[str, Any] = {"limit": limit, "causal": causal, "backend": name}
        gradient, lse = bisoftmax(z, 0.25, **options)
        product = bisoftmax_hvp(z, v, 0.25, lse=lse, **options)
        assert gradient.dtype == product.dtype == dtype
        assert lse.dtype == torch.promote_types(dtype, torch.float32)
        assert difference(gradient, exact) <= bound
        assert difference(lse, exact_lse) <= min(bound, 1e-6)
        assert difference(product, exact_product) <= bound


@pytest.mark.parametrize("count", [300])
def test_strides_do_not_matter(backend: Any, count: int) -> None:
    z, v, _ = states(2, 3, count, 9)
    mask = masks(2, count)[1]
    ways = (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.mT.contiguous().mT,
        lambda t: torch.stack((t, t), -1)[..., 0],
        lambda t: torch.complex(t, -t).conj().imag,  # stored with the other sign
    )
    hidden = torch.stack((mask, mask), -1)[..., 0]
    for limit in (None, 1e9):
        expected = backend.bisoftmax_forward(z, 0.3, mask, False, limit)
        product = backend.bisoftmax_hvp(z, v, 0.3, mask, False, limit)
        for way in ways:
            found = backend.bisoftmax_forward(way(z), 0.3, hidden, False, limit)
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.is_contiguous()
                torch.testing.assert_close(ours, theirs)
            curved = backend.bisoftmax_hvp(way(z), way(v), 0.3, hidden, False, limit)
            torch.testing.assert_close(curved, product)
    repeated = z[:, :1].expand(2, 3, count, 9)
    found = backend.bisoftmax_forward(repeated, 0.3, None, False, None)
    copied = backend.bisoftmax_forward(repeated.clone(), 0.3, None, False, None)
    torch.testing.assert_close(found, copied)


@each_path
def test_hidden_tokens_are_never_read(backend: Any, limit: float | None, causal: bool) -> None:
    for count in (130, 290):
        z, v, a = states(2, 2, count, 8)
        mask = masks(2, count)[2]
        hidden = ~mask[:, None, :, None]
        poisoned, poisoned_v = (t.masked_fill(hidden, float("nan")) for t in (z, v))
        poisoned_a = a.masked_fill(hidden[..., 0], float("nan"))
        gradient, lse = backend.bisoftmax_forward(z, 0.3, mask, causal, limit)
        other, other_lse = backend.bisoftmax_forward(poisoned, 0.3, mask, causal, limit)
        assert torch.equal(gradient, other) and torch.equal(lse, other_lse)
        assert not gradient.masked_select(hidden).any()
        assert not lse.masked_select(hidden[..., 0]).any()
        product = backend.bisoftmax_hvp(
            poisoned, poisoned_v, 0.3, mask, causal, limit, lse, poisoned_a
        )
        assert torch.isfinite(product).all() and not product.masked_select(hidden).any()


@pytest.mark.parametrize(
    "name", ["auto", "reference", "blocks", pytest.param("cpp", marks=needs_cpp)]
)
@pytest.mark.parametrize("shape", [(0, 2, 300, 4), (2, 0, 300, 4), (2, 2, 0, 4)])
def test_nothing_to_attend(name: str, shape: tuple[int, ...]) -> None:
    z = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    for causal in (False, True):
        value, lse = bisoftmax(z, 0.3, causal=causal, backend=name)
        (first,) = torch.autograd.grad((value, lse), z, (value, lse), create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), z)
        assert second.shape == shape and second.dtype == z.dtype and lse.dtype == torch.float32


@pytest.mark.parametrize("count", [1024])
@pytest.mark.parametrize("path", PATHS)
def test_no_matrix_of_all_pairs(path: str, count: int) -> None:
    z, v, a = states(1, 1, count, 8)
    limit, causal = PATHS[path]
    with Allocations() as seen:
        _, lse = strips.bisoftmax_forward(z, 0.3, None, causal, limit)
        strips.bisoftmax_hvp(z, v, 0.3, None, causal, limit, lse, a)
        strips.hvp_pullback(z, v, v, 0.3, None, causal, a)
    assert seen.largest <= 128 * count * max(1, torch.get_num_threads())
    assert seen.largest < count * count
    with Allocations() as dense:
        reference.bisoftmax(z, 0.3, causal=causal)
    assert dense.largest >= count * count


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_cpp
@pytest.mark.parametrize(("limit", "causal", "heads"), [(None, False, 1), (1e9, True, 3)])
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


@pytest.mark.parametrize(("limit", "causal", "masked"), [
    (None, False, False), (None, True, True), (1e9, False, True), (1e9, True, False),
])  # fmt: skip
@pytest.mark.parametrize(("name", "own", "count", "room"), [
    pytest.param("cpp", torch.float32, 50, 1e-5, marks=needs_cpp),
    ("blocks", torch.float64, 290, 1e-9),
])  # fmt: skip
def test_derivatives(
    name: str,
    own: torch.dtype,
    count: int,
    room: float,
    limit: float | None,
    causal: bool,
    masked: bool,
) -> None:
    """Of a function of gradient and lse, once and twice, and of the product by all it depends on."""
    z, v, a = states(2, 2, count, 6)
    mask = masks(2, count)[2] if masked else None
    found = {}
    for backend, dtype in ((name, own), ("reference", torch.float64)):
        point, along, weight = (t.to(dtype).requires_grad_() for t in (z, v, a))
        options: dict[str, Any] = {"mask": mask, "causal": causal, "backend": backend}
        gradient, lse = bisoftmax(point, 0.4, limit=limit, **options)
        loss = (gradient * along).sum() + (lse * weight).sum()
        (first,) = torch.autograd.grad(loss, point, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), (point, along, weight))
        product = bisoftmax_hvp(point, along, 0.4, limit=limit, **options)
        third = torch.autograd.grad(product.square().sum(), (point, along))
        found[backend] = [first, *second, product, *third]
    for ours, theirs in zip(found[name], found["reference"], strict=True):
        assert difference(ours.detach(), theirs.detach()) <= room


@pytest.mark.parametrize(
    "backend", ["blocks", *(pytest.param(name, marks=needs_cpp) for name in ("cpp", "auto"))]
)
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
        native, "_solve", lambda *args, own=native._solve: solved.append(args) or own(*args)
    )
    dynamic = backend == "blocks" or None
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(torch.autograd.grad(compiled(point), point)[0], expected)
    by_engine = 0 if backend == "blocks" else 2  # gradient and product, in the compiled graph too
    assert len(solved) == by_engine


@needs_cpp
@pytest.mark.parametrize("count", [9, 300])
def test_the_automatic_choice(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z = states(1, 1, count, 4)[0]
    unserved = "reference" if count < 10 else "blocks"
    choice, other = explain(z, 0.3), explain(z.double(), 0.3)
    assert choice.backend == "cpp"
    assert other.backend == unserved
    monkeypatch.setattr(native, "_kernel", lambda: None)
    without = explain(z, 0.3)
    assert without.backend == unserved
    assert torch.isfinite(bisoftmax(z, 0.3)[0]).all()
    with pytest.raises(RuntimeError, match="backend"):
        bisoftmax(z, 0.3, backend="cpp")


@needs_cpp
def test_the_native_kernel_refuses_unsupported_inputs() -> None:
    wide = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    for z in (wide, torch.zeros(1, 1, 4, 129), torch.zeros(1, 1, 4, 4, device="meta")):
        for call in (bisoftmax, explain):
            with pytest.raises(ValueError, match="backend"):
                call(z, 0.3, backend="cpp")


def state(count: int) -> Tensor:
    return states(2, 2, count, 8)[0]


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
        with pytest.raises(ValueError, match="backend"):
            call()


def test_arguments_are_checked() -> None:
    """Before a backend is asked, whichever it is."""
    z = state(5)
    with pytest.raises(ValueError, match=r"\bz\b"):
        bisoftmax(z[0], 0.3)
    with pytest.raises(TypeError, match=r"\bz\b"):
        bisoftmax(z.int(), 0.3)
    for beta in (-1, 0.0):
        with pytest.raises(ValueError, match="beta"):
            bisoftmax(z, beta)
    with pytest.raises(ValueError, match="mask"):
        bisoftmax_hvp(z, z, 0.3, mask=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask"):
        bisoftmax(z, 0.3, mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"\bv\b"):
        bisoftmax_hvp(z, z[:1], 0.3)
    with pytest.raises(ValueError, match="lse"):
        bisoftmax_hvp(z, z, 0.3, lse=z[..., 0, 0])


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
@pytest.mark.parametrize(("limit", "causal"), [(None, False), (LIMIT, False), (None, True)])
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
