"""Bi-softmax by C++ against the dense reference in float64, with both kinds of instructions."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.kernels import COUNTS, difference, needs_cpp
from implicit_attn import DEQ
from implicit_attn.energies import BiSoftmaxAttention, Quadratic
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp, explain
from implicit_attn.kernels.bi_softmax import ops, reference
from implicit_attn.kernels.bi_softmax.cpp import backend as cpp
from implicit_attn.kernels.bi_softmax.strips import backend as strips
from solvers import Implicit, Tolerance
from solvers.native import library, process
from solvers.native.process import THREADS

pytestmark = needs_cpp
PATHS = {"bounded": (None, False), "unbounded": (1e9, False), "causal": (None, True),
         "unbounded, causal": (1e9, True)}  # fmt: skip
each_path = pytest.mark.parametrize(("limit", "causal"), PATHS.values(), ids=PATHS.keys())


@pytest.fixture(params=["AVX512", "AVX2"])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernel as a processor with these instructions gets it."""
    if request.param == "AVX512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no AVX-512")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
        library.forget()
        patch.setattr(cpp, "_PROCESS", cpp._Process())
        yield
    library.forget()


def states(
    batch: int, heads: int, count: int, width: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """z, v (B, H, N, p) and a cotangent of the lse (B, H, N), float32."""
    generator = torch.Generator().manual_seed(count * 1000 + width)
    z = scale * torch.randn(batch, heads, count, width, generator=generator)
    v = torch.randn(batch, heads, count, width, generator=generator)
    return z, v, torch.randn(batch, heads, count, generator=generator)


def masks(batch: int, count: int) -> tuple[Tensor | None, ...]:
    """None; some tokens masked; the same, and all of the first sample."""
    holes = torch.rand(batch, count, generator=torch.Generator().manual_seed(count)) > 0.4
    empty = holes.clone()
    empty[0] = False
    return None, holes, empty


def errors(
    z: Tensor, v: Tensor, a: Tensor, beta: float, limit: float | None, **options: Any
) -> list[float]:
    """Of gradient, lse, and the product with and without the lse given."""
    options = {"mask": None, "causal": False} | options
    point = z.double().requires_grad_()
    exact, exact_lse = reference.bisoftmax(point, beta, **options)
    loss = (exact * v.double()).sum() + (exact_lse * a.double()).sum()
    (pullback,) = torch.autograd.grad(loss, point)
    gradient, lse = cpp.bisoftmax_forward(z, beta, limit=limit, **options)
    products = [
        cpp.bisoftmax_hvp(z, v, beta, limit=limit, lse=given, lse_cotangent=a, **options)
        for given in (None, lse)
    ]
    assert gradient.dtype == products[0].dtype == z.dtype
    assert (lse.double() - exact_lse).abs().max() <= 1e-6 * (1.0 + exact_lse.abs().max())
    found = [(gradient, exact), (lse, exact_lse), *((product, pullback) for product in products)]
    return [difference(ours, theirs.detach()) for ours, theirs in found]


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(("index", "count"), list(enumerate([*COUNTS[:-1], 47, 48, 49, 97, 144])))
def test_every_count(index: int, count: int) -> None:
    """Every mask; over four counts in a row, each on every path."""
    z, v, a = states(2, 2, count, 16)
    for k, mask in enumerate(masks(2, count)):
        limit, causal = list(PATHS.values())[(index + k) % 4]
        found = errors(z, v, a, 0.25, limit, mask=mask, causal=causal)
        assert max(found) <= 5e-6, (count, limit, causal, mask, found)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("width", [1, 7, 8, 9, 16, 20, 24, 33, 64, 100, 127, 128])
def test_every_width(width: int) -> None:
    z, v, a = states(1, 2, 63, width)
    for limit, causal in PATHS.values():
        found = errors(z, v, a, width**-0.5, limit, causal=causal)
        assert max(found) <= 5e-6, (width, limit, causal, found)


@pytest.mark.usefixtures("instructions")
@each_path
def test_more_tiles_than_are_kept(limit: float | None, causal: bool) -> None:
    z, v, a = states(1, 1, 1100, 4)
    assert max(errors(z, v, a, 0.5, limit, causal=causal)) <= 5e-6


def test_many_heads() -> None:
    z, v, a = states(60, 5, 9, 8)
    mask = torch.arange(9) < torch.arange(60)[:, None] % 10
    assert max(errors(z, v, a, 0.3, None, mask=mask)) <= 5e-6


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
        gradient, lse = cpp.bisoftmax_forward(z, 0.3, None, causal, limit)
        product = cpp.bisoftmax_hvp(z, v, 0.3, None, causal, limit, None, a)
        found.append((gradient, lse, product))
    for one, two, again in zip(*found, strict=True):
        assert torch.equal(two, again)
        assert difference(two, one.double()) <= 1e-6


def test_threads_without_openmp(threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    z, _, _ = states(1, 3, 260, 12)
    expected = cpp.bisoftmax_forward(z, 0.3, None, False, None)[0]
    monkeypatch.setattr(THREADS, "_fork", None)
    threads(2)
    assert difference(cpp.bisoftmax_forward(z, 0.3, None, False, None)[0], expected.double()) < 1e-6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_waits_for_no_thread(threads: Any) -> None:
    """The threads of the parent, which a child does not have, are not waited for."""
    threads(2)
    z, _, _ = states(1, 4, 60, 8)
    expected = cpp.bisoftmax_forward(z, 0.3, None, False, None)[0]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            found = cpp.bisoftmax_forward(z, 0.3, None, False, None)[0]
            code = 0 if torch.equal(found, expected) else 2
        finally:
            os._exit(code)
    for _ in range(300):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("scale", [1e-20, 1e-3, 3.0, 30.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_small_and_large_norms(scale: float, causal: bool) -> None:
    """Large scores carry float32's rounding of the scores themselves into any formula."""
    z, v, a = states(1, 2, 150, 16, scale)
    a = torch.zeros_like(a) if scale < 1e-10 else a
    dense = reference.bisoftmax(z, 0.25, causal=causal)
    exact = reference.bisoftmax(z.double(), 0.25, causal=causal)
    product = reference.bisoftmax_hvp(z, v, 0.25, causal=causal)
    exact_product = reference.bisoftmax_hvp(z.double(), v.double(), 0.25, causal=causal)
    gradient, lse, *pullbacks = errors(z, v, a, 0.25, None, causal=causal)
    assert gradient <= max(1e-5, 2 * difference(dense[0], exact[0]))
    assert lse <= max(1e-5, 2 * difference(dense[1], exact[1]))
    assert max(pullbacks) <= max(1e-5, 4 * difference(product, exact_product))


@pytest.mark.usefixtures("instructions")
def test_rows_of_very_different_norms() -> None:
    z, v, a = states(1, 2, 270, 16)
    z = z * torch.logspace(-4, 0.5, 270).unsqueeze(-1)
    for limit, causal in PATHS.values():
        assert max(errors(z, v, a, 0.25, limit, causal=causal)) <= 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_half_precision(dtype: torch.dtype, bound: float) -> None:
    z, v, _ = (t.to(dtype) for t in states(1, 2, 65, 16))
    gradient, lse = bisoftmax(z, 0.25, backend="cpp")
    product = bisoftmax_hvp(z, v, 0.25, lse=lse, backend="cpp")
    exact, exact_lse = reference.bisoftmax(z.double(), 0.25)
    assert gradient.dtype == product.dtype == dtype and lse.dtype == torch.float32
    assert difference(gradient, exact) <= bound and difference(lse, exact_lse) <= 1e-6
    assert difference(product, reference.bisoftmax_hvp(z.double(), v.double(), 0.25)) <= bound


def test_the_default_dtype_has_no_say() -> None:
    z, _, _ = states(1, 2, 20, 8)
    expected = bisoftmax(z, 0.3, backend="cpp")
    torch.set_default_dtype(torch.float64)
    try:
        found = bisoftmax(z, 0.3, backend="cpp")
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_strides_do_not_matter() -> None:
    z, v, _ = states(2, 3, 65, 9)
    mask = masks(2, 65)[1]
    assert mask is not None
    expected = cpp.bisoftmax_forward(z, 0.3, mask, False, None)
    product = cpp.bisoftmax_hvp(z, v, 0.3, mask, False, None)
    ways = (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.mT.contiguous().mT,
        lambda t: torch.stack((t, t), -1)[..., 0],
        lambda t: torch.complex(t, -t).conj().imag,  # stored with the other sign
    )
    hidden = torch.stack((mask, mask), -1)[..., 0]
    for way in ways:
        found = cpp.bisoftmax_forward(way(z), 0.3, hidden, False, None)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.is_contiguous() and torch.equal(ours, theirs)
        assert torch.equal(cpp.bisoftmax_hvp(way(z), way(v), 0.3, hidden, False, None), product)
    repeated = z[:, :1].expand(2, 3, 65, 9)
    found = cpp.bisoftmax_forward(repeated, 0.3, None, False, None)[0]
    assert torch.equal(found, cpp.bisoftmax_forward(repeated.clone(), 0.3, None, False, None)[0])


@pytest.mark.usefixtures("instructions")
@each_path
def test_hidden_tokens_are_never_read(limit: float | None, causal: bool) -> None:
    z, v, a = states(2, 2, 130, 8)
    mask = masks(2, 130)[2]
    assert mask is not None
    hidden = ~mask[:, None, :, None]
    poisoned, poisoned_v = (t.masked_fill(hidden, float("nan")) for t in (z, v))
    poisoned_a = a.masked_fill(hidden[..., 0], float("nan"))
    gradient, lse = cpp.bisoftmax_forward(z, 0.3, mask, causal, limit)
    other, other_lse = cpp.bisoftmax_forward(poisoned, 0.3, mask, causal, limit)
    assert torch.equal(gradient, other) and torch.equal(lse, other_lse)
    assert not gradient.masked_select(hidden).any() and not lse.masked_select(hidden[..., 0]).any()
    product = cpp.bisoftmax_hvp(poisoned, poisoned_v, 0.3, mask, causal, limit, lse, poisoned_a)
    assert torch.isfinite(product).all() and not product.masked_select(hidden).any()


@pytest.mark.usefixtures("instructions")
@each_path
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_passed_on_as_by_strips(
    limit: float | None, causal: bool, value: float
) -> None:
    z, v, _ = states(1, 2, 60, 8)
    z[0, 0, 20, 3] = value
    for ours, theirs in zip(
        (
            *cpp.bisoftmax_forward(z, 0.3, None, causal, limit),
            cpp.bisoftmax_hvp(z, v, 0.3, None, causal, limit),
        ),
        (
            *strips.bisoftmax_forward(z, 0.3, None, causal, limit),
            strips.bisoftmax_hvp(z, v, 0.3, None, causal, limit),
        ),
        strict=True,
    ):
        assert torch.equal(torch.isfinite(ours), torch.isfinite(theirs))
        assert not torch.isfinite(ours[0, 0]).all() and torch.isfinite(ours[0, 1]).all()


def test_nothing_to_attend() -> None:
    for shape in ((0, 2, 30, 4), (2, 0, 30, 4), (2, 2, 0, 4)):
        z = torch.zeros(shape, requires_grad=True)
        value, lse = bisoftmax(z, 0.3, backend="cpp")
        (first,) = torch.autograd.grad((value, lse), z, (value, lse), create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), z)
        assert second.shape == shape


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


def test_registration() -> None:
    z, v, a = states(1, 2, 5, 3)
    lse = bisoftmax(z, 0.3, backend="cpp")[1]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.forward.operator, (z, 0.3, None, True, None, "cpp"), test_utils=tests)
    given = (z, v, 0.3, None, True, None, lse, a, "cpp")
    torch.library.opcheck(ops.hvp.operator, given, test_utils=tests)


@pytest.mark.parametrize("backend", ["cpp", "auto"])
def test_whole_graph_compilation(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ENABLED", True)
    z, _, _ = states(2, 2, 21, 6)
    mask = masks(2, 21)[1]

    def loss(z: Tensor) -> Tensor:
        gradient, lse = bisoftmax(z, 0.4, mask=mask, backend=backend)
        return gradient.square().sum() + lse.sum()

    point = z.requires_grad_()
    expected = torch.autograd.grad(loss(point), point)[0]
    solved = []
    monkeypatch.setattr(cpp, "_solve", lambda *args, own=cpp._solve: solved.append(own(*args)))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(point), point)[0], expected)
    assert len(solved) == 2  # gradient and product, in the compiled graph too


def test_compiled_calls_are_checked() -> None:
    compiled = torch.compile(lambda z: bisoftmax(z, 0.3, backend="cpp")[0], backend="eager")
    with pytest.raises(ValueError, match=r'backend="cpp" does not take this input: .*float64'):
        compiled(torch.zeros(1, 1, 4, 4, dtype=torch.float64))


def test_maps() -> None:
    z, v, _ = states(2, 2, 9, 4)
    stack = torch.stack((z, v, z + v))
    mapped = torch.vmap(lambda z: bisoftmax(z, 0.3, backend="cpp")[0])(stack)
    torch.testing.assert_close(mapped[2], bisoftmax(z + v, 0.3, backend="cpp")[0])
    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad, vjp and jvp do not"):
        torch.func.grad(lambda z: bisoftmax(z, 0.3, backend="cpp")[1].sum())(z)


def test_layers_agree() -> None:
    results = {}
    for backend, dtype in (("cpp", torch.float32), ("reference", torch.float64)):
        torch.manual_seed(0)
        attention = BiSoftmaxAttention(12, heads=2, backend=backend)
        exact = Tolerance(rtol=1e-6 if backend == "cpp" else 1e-11)
        energy = 0.4 * attention + Quadratic()
        layer = DEQ(energy, tolerance=exact, adjoint=Implicit(tolerance=exact)).to(dtype)
        x = torch.randn(2, 30, 12, generator=torch.Generator().manual_seed(4)).to(dtype)
        mask = torch.rand(2, 30, generator=torch.Generator().manual_seed(5)) > 0.3
        z = layer(x, mask)
        results[backend] = [z, *torch.autograd.grad(z.square().mean(), list(layer.parameters()))]
    for ours, theirs in zip(results["cpp"], results["reference"], strict=True):
        assert difference(ours.detach(), theirs.detach()) <= 1e-4


@pytest.mark.parametrize("count", [9, 300])
def test_the_automatic_choice(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z = states(1, 1, count, 4)[0]
    unasked = explain(z, 0.3).backend
    assert unasked in ("reference", "blocks")
    monkeypatch.setattr(process, "ENABLED", True)
    choice = explain(z, 0.3)
    assert choice.backend == "cpp" and "IMPLICIT_ATTN_CPP is 1" in choice.reason
    other = explain(z.double(), 0.3)
    assert other.backend == unasked and "no C++ kernel: it computes in float32" in other.reason


def test_what_it_does_not_take() -> None:
    for z, said in (
        (torch.zeros(1, 1, 4, 4, dtype=torch.float64), "computes in float32, got torch.float64"),
        (torch.zeros(1, 1, 4, 129), "heads of 1 to 128 features, got 129"),
        (torch.zeros(1, 1, 4, 4, device="meta"), "for tensors on the CPU, got one on meta"),
    ):
        for call in (bisoftmax, explain):
            with pytest.raises(ValueError, match=f'backend="cpp" does not take.*{said}'):
                call(z, 0.3, backend="cpp")
