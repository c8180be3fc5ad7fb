"""Bi-softmax: the dense formula against its definition, the other backends against it, and their choice."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases.kernels import PATHS, Allocations, difference, each_path, masks, needs_cpp, states
from implicit_attn.energies import BiSoftmaxAttention
from implicit_attn.kernels import Choice, bisoftmax, bisoftmax_hvp, explain, reference, strips
from implicit_attn.kernels.bi_softmax import native, ops
from solvers import native as library

BETA = 0.6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
FUSED = [pytest.param("cpp", marks=needs_cpp), pytest.param("triton", marks=needs_triton)]
HOLES = torch.tensor([[True, False, True, True, False], [False, True, True, True, True]])
EMPTY = torch.tensor([[False] * 5, [True, True, False, True, True]])


def small(heads: int = 3, count: int = 5, width: int = 4) -> tuple[Tensor, Tensor]:
    z, v, _ = states(2, heads, count, width)
    return z.double(), v.double()


# --- the formula, its derivatives and transforms --------------------------------------------------


def definition(z: Tensor, beta: float, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Energy (B,) and lse (B, H, N), by a sum of exponentials over the allowed pairs."""
    allowed = torch.ones(1, 1, *[z.shape[2]] * 2, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    if mask is not None:
        allowed = allowed & mask[:, None, :, None] & mask[:, None, None, :]
    scores = beta * torch.einsum("bhip,bhjp->bhij", z, z)
    total = torch.where(allowed, scores.exp(), 0.0).sum(-1)
    lse = torch.where(total > 0, total, 1.0).log()
    return lse.sum((1, 2)) / beta, lse


@pytest.mark.parametrize("mask", [None, HOLES, EMPTY], ids=["none", "holes", "empty"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_formula_is_the_derivative_of_its_definition(mask: Any, causal: bool) -> None:
    z, v = small()
    point = z.clone().requires_grad_()
    energy, lse = definition(point, BETA, mask, causal)
    (gradient,) = torch.autograd.grad(energy.sum(), point, create_graph=True)
    (product,) = torch.autograd.grad(gradient, point, v)
    ours, our_lse = bisoftmax(z, BETA, mask=mask, causal=causal)
    torch.testing.assert_close(our_lse, lse.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(ours, gradient.detach(), rtol=1e-11, atol=1e-12)
    ours = bisoftmax_hvp(z, v, BETA, mask=mask, causal=causal)
    torch.testing.assert_close(ours, product, rtol=1e-10, atol=1e-12)


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "holes, causal": {"mask": HOLES, "causal": True},
    "bounded, empty": {"limit": 40.0, "mask": EMPTY},
}


def recorded(heads: int = 1) -> tuple[Tensor, ...]:
    z, v = small(heads=heads, width=2)
    return tuple(t.requires_grad_() for t in (z, v, v.sum(-1)))


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("backend", ["reference", "blocks"])
def test_gradcheck(backend: str, options: dict[str, Any]) -> None:
    """Of gradient and lse once and twice, so the energy's up to the third order; of the product once."""
    z, v, a = recorded()

    def both(z: Tensor) -> Any:
        return bisoftmax(z, BETA, backend=backend, **options)

    assert gradcheck(both, z) and gradgradcheck(both, z)
    if backend == "reference":
        assert gradcheck(lambda z, v: bisoftmax_hvp(z, v, BETA, backend=backend, **options), (z, v))
    else:  # with a cotangent of the lse
        rest = options.get("mask"), options.get("causal", False), options.get("limit"), None
        assert gradcheck(lambda z, v, a: ops.hvp(z, v, BETA, *rest, a, backend), (z, v, a))


@pytest.mark.parametrize(("limit", "causal", "masked"), [(None, False, False), (1e9, True, True)])
@pytest.mark.parametrize(("name", "own", "count", "room"), [
    pytest.param("cpp", torch.float32, 50, 1e-5, marks=needs_cpp),
    ("blocks", torch.float64, 290, 1e-9),
])  # fmt: skip
def test_derivatives(
    name: str, own: torch.dtype, count: int, room: float, limit: Any, causal: bool, masked: bool
) -> None:
    """Of a function of gradient and lse, once and twice, and of the product by all it depends on."""
    z, v, a = states(2, 2, count, 6)
    mask = masks(2, count)[2] if masked else None
    found = {}
    for backend, dtype in ((name, own), ("reference", torch.float64)):
        point, along, weight = (t.to(dtype).requires_grad_() for t in (z, v, a))
        options: dict[str, Any] = {"mask": mask, "causal": causal, "limit": limit}
        options["backend"] = backend
        gradient, lse = bisoftmax(point, 0.4, **options)
        loss = (gradient * along).sum() + (lse * weight).sum()
        (first,) = torch.autograd.grad(loss, point, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), (point, along, weight))
        # The derivative of the product is total, whether or not a lse is given.
        product = bisoftmax_hvp(point, along, 0.4, lse=lse, **options)
        third = torch.autograd.grad(product.square().sum(), (point, along))
        found[backend] = [first, *second, product, *third]
    for ours, theirs in zip(found[name], found["reference"], strict=True):
        assert difference(ours.detach(), theirs.detach()) <= room


@pytest.mark.parametrize("output", [0, 1])
def test_a_third_derivative_raises_and_the_reference_has_it(output: int) -> None:
    z, _, _ = recorded()
    for backend in ("blocks", "reference"):
        value = bisoftmax(z, BETA, backend=backend)[output]
        for _ in range(2):
            (value,) = torch.autograd.grad(value.square().sum(), z, create_graph=True)
        dense = backend == "reference"
        with nullcontext() if dense else pytest.raises(NotImplementedError, match="backend"):
            assert torch.autograd.grad(value.square().sum(), z)[0].norm() > 0


# opcheck of torch 2.14 reads .grad of tensors that are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_registration() -> None:
    z, v, a = recorded(heads=2)
    torch.library.opcheck(ops.forward.operator, (z, BETA, HOLES, True, None, "blocks"))
    given = (z, v, BETA, HOLES, True, None, a.detach(), a, "blocks")
    torch.library.opcheck(ops.hvp.operator, given)
    detached = (z.detach(), v.detach(), v.detach(), BETA, HOLES, True, a.detach())
    torch.library.opcheck(ops.hvp_pullback.operator, detached)


def test_transforms() -> None:
    z, v, _ = (t.detach() for t in recorded())
    for call in (
        lambda: torch.func.jvp(lambda z: bisoftmax(z, BETA, backend="blocks")[0], (z,), (v,)),
        lambda: torch.func.grad(lambda z: bisoftmax(z, BETA, backend="blocks")[1].sum())(z),
    ):
        with pytest.raises(NotImplementedError, match="backend"):
            call()
    tangent = torch.func.jvp(lambda z: bisoftmax(z, BETA)[0], (z,), (v,))[1]
    torch.testing.assert_close(tangent, bisoftmax_hvp(z, v, BETA))
    stack = torch.stack((z, v, z + v))
    mapped = torch.vmap(lambda z: bisoftmax(z, BETA, mask=HOLES, backend="blocks"))(stack)
    single = [bisoftmax(t, BETA, mask=HOLES, backend="blocks") for t in stack]
    for ours, theirs in zip(mapped, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs))
    product = torch.vmap(lambda v: bisoftmax_hvp(z, v, BETA, backend="blocks"), 1, 1)
    mapped = product(stack.movedim(0, 1))
    torch.testing.assert_close(mapped[:, 1], bisoftmax_hvp(z, v, BETA))


@pytest.mark.parametrize("backend", ["reference", "blocks", "auto"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_result(backend: str, kind: torch.dtype) -> None:
    z, v = (t.to(kind) for t in small(count=33))
    results = []
    for enabled in (True, False):
        point = z.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            gradient, lse = bisoftmax(point, BETA, backend=backend)
            product = bisoftmax_hvp(point, v, BETA, backend=backend)
            constant = point.detach()
            given = bisoftmax_hvp(constant, v, BETA, lse=lse.detach(), backend=backend)
        loss = (gradient * v).sum() + lse.sum()
        (first,) = torch.autograd.grad(loss, point, create_graph=True)
        (second,) = torch.autograd.grad((first * v).sum() + (product * v).sum(), point)
        results.append([lse, gradient, product, given, first, second])
    assert [t.dtype for t in results[0]] == [torch.float32, *[kind] * 5]
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact)


# --- strips and the engine in C++ against the dense formula in float64 ------------------------------


@pytest.fixture(params=["blocks", *(pytest.param(f"AVX{n}", marks=needs_cpp) for n in (512, 2))])
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


@pytest.mark.parametrize(("index", "count", "width"), [
    (0, 1, 16), (1, 2, 16), (2, 16, 7), (3, 17, 1), (4, 48, 33), (5, 97, 127), (6, 129, 16),
    (7, 63, 128), (8, 257, 16), (9, 1000, 8),
])  # fmt: skip
def test_every_size(backend: Any, index: int, count: int, width: int) -> None:
    """Every mask; over four sizes in a row, each on every path."""
    batch, heads = (1, 1) if count == 1000 else (2, 2)
    z, v, a = states(batch, heads, count, width)
    for k, mask in enumerate(masks(batch, count)):
        limit, causal = list(PATHS.values())[(index + k) % 4]
        found = errors(backend, z, v, a, width**-0.5, limit, mask=mask, causal=causal)
        assert max(found) <= 1e-5, (count, limit, causal, mask, found)


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


@pytest.mark.defect("A18")
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
    z, v, _ = (t.to(dtype) for t in states(1, 2, 290, 16))
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
        # Products are computed in float32: no more than the rounding of the result.
        rounding = 0.5 * torch.finfo(dtype).eps
        assert difference(product, exact_product) <= max(rounding, min(bound, 1e-5))


def test_strides_do_not_matter(backend: Any) -> None:
    count = 300
    z, v, _ = states(2, 3, count, 9)
    mask = masks(2, count)[1]
    ways = (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.mT.contiguous().mT,
        lambda t: torch.stack((t, t), -1)[..., 0],
        lambda t: torch.complex(t, -t).conj().imag,  # stored with the other sign
        lambda t: t[:, :1].expand(t.shape),
    )
    hidden = torch.stack((mask, mask), -1)[..., 0]
    for way in ways:
        found = backend.bisoftmax_forward(way(z), 0.3, hidden, False, None)
        assert all(each.is_contiguous() for each in found)
        expected = backend.bisoftmax_forward(way(z).contiguous(), 0.3, mask, False, None)
        torch.testing.assert_close(found, expected)
        found = backend.bisoftmax_hvp(way(z), way(v), 0.3, hidden, False, 1e9)
        given = way(z).contiguous(), way(v).contiguous()
        torch.testing.assert_close(found, backend.bisoftmax_hvp(*given, 0.3, mask, False, 1e9))


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
        rest = (0.3, mask, causal, limit, lse, poisoned_a)
        product = backend.bisoftmax_hvp(poisoned, poisoned_v, *rest)
        assert torch.isfinite(product).all() and not product.masked_select(hidden).any()


@pytest.mark.parametrize("path", PATHS)
def test_no_matrix_of_all_pairs(path: str) -> None:
    count = 1024
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


@needs_cpp
@pytest.mark.parametrize(("limit", "causal", "heads"), [(None, False, 1), (1e9, True, 3)])
def test_threads(limit: float | None, causal: bool, heads: int) -> None:
    """Whole heads for each, and one shared by all; the same bits every time."""
    z, v, a = states(1, heads, 260, 12)
    before, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 2):
            torch.set_num_threads(number)
            gradient, lse = native.bisoftmax_forward(z, 0.3, None, causal, limit)
            product = native.bisoftmax_hvp(z, v, 0.3, None, causal, limit, None, a)
            found.append((gradient, lse, product))
    finally:
        torch.set_num_threads(before)
    for one, two, again in zip(*found, strict=True):
        torch.testing.assert_close(two, again)
        assert difference(two, one.double()) <= 1e-6


# --- through the public functions: all backends -----------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "reference", "blocks", FUSED[0]])
@pytest.mark.parametrize("shape", [(0, 2, 300, 4), (2, 0, 300, 4), (2, 2, 0, 4)])
def test_nothing_to_attend(name: str, shape: tuple[int, ...]) -> None:
    z = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    for causal in (False, True):
        value, lse = bisoftmax(z, 0.3, causal=causal, backend=name)
        (first,) = torch.autograd.grad((value, lse), z, (value, lse), create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), z)
        assert second.shape == shape and second.dtype == z.dtype and lse.dtype == torch.float32


@pytest.mark.defect("A14")
@pytest.mark.parametrize("name", ["reference", "blocks", *FUSED])
@pytest.mark.parametrize(
    ("tokens", "options"), [(9, {}), (130, {"limit": 60.0}), (9, {"causal": True})]
)
def test_cotangents_of_masked_tokens_are_ignored(
    name: str, tokens: int, options: dict[str, Any]
) -> None:
    device = DEVICE if name == "triton" else "cpu"
    z, v, a = (t.to(device) for t in states(2, 1, tokens, 4, 0.3))
    mask = torch.ones(2, tokens, dtype=torch.bool, device=device)
    mask[0, 5:8] = False
    z.requires_grad_()
    outputs = bisoftmax(z, 1.0, mask=mask, backend=name, **options)
    expected = torch.autograd.grad(outputs, z, (v, a), retain_graph=True)[0]
    spoiled = [(v.masked_fill(~mask[:, None, :, None], torch.nan), a)]
    spoiled.append((v, a.masked_fill(~mask[:, None], torch.nan)))
    for cotangents in spoiled:
        found = torch.autograd.grad(outputs, z, cotangents, retain_graph=True)[0]
        torch.testing.assert_close(found, expected)


# tokens, which of them is counted (None: no mask)
ALONE = [(1, None), (3, 1), (130, 129), (300, 0)]


@pytest.mark.defect("D1")
@pytest.mark.parametrize("name", ["reference", "blocks", *FUSED])
@pytest.mark.parametrize("tokens, counted", ALONE)
@pytest.mark.parametrize(("limit", "causal"), [(None, False), (4.0, False), (None, True)])
def test_the_log_sum_exp_of_a_token_alone_is_its_score(
    tokens: int, counted: int | None, limit: float | None, causal: bool, name: str
) -> None:
    """``log exp S`` would have the rounding of 1."""
    device = DEVICE if name == "triton" else "cpu"
    if name == "triton":
        tokens, counted = min(tokens, 130), None if counted is None else min(counted, tokens - 1)
    z, mask = states(2, 2, tokens, 4, 0.005)[0].to(device), None
    if counted is not None:
        mask = torch.ones(2, tokens, dtype=torch.bool, device=device)
        mask[0] = torch.arange(tokens) == counted
    _, lse = bisoftmax(z, 0.5, mask=mask, limit=limit, causal=causal, backend=name)
    score = 0.5 * z.double().square().sum(-1)
    sample, token = (slice(0, 1), counted) if counted is not None else (slice(None), 0)
    error = (lse[sample, :, token].double() - score[sample, :, token]).abs()
    assert (error <= 1e-6 * score[sample, :, token]).all()
    if counted is not None:
        assert (lse[0] != 0).sum() == 2  # masked tokens: zero


@pytest.mark.parametrize("name", ["blocks", FUSED[0], pytest.param("auto", marks=needs_cpp)])
def test_whole_graph_compilation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    z, _, _ = states(2, 2, 21, 6)
    mask = masks(2, 21)[1]

    def loss(z: Tensor) -> Tensor:
        gradient, lse = bisoftmax(z, 0.4, mask=mask, backend=name)
        return gradient.square().sum() + lse.sum()

    point, solved, own = z.requires_grad_(), [], native._solve
    expected = torch.autograd.grad(loss(point), point)[0]
    monkeypatch.setattr(native, "_solve", lambda *args: solved.append(args) or own(*args))
    dynamic = name == "blocks" or None
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(torch.autograd.grad(compiled(point), point)[0], expected)
    by_engine = 0 if name == "blocks" else 2  # gradient and product, in the compiled graph too
    assert len(solved) == by_engine


# --- the choice of a backend, and errors ------------------------------------------------------------


@needs_cpp
@pytest.mark.parametrize("count", [9, 300])
def test_the_automatic_choice(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z = states(1, 1, count, 4)[0]
    unserved = "reference" if count < 10 else "blocks"
    assert explain(z, 0.3).backend == "cpp"
    assert explain(z.double(), 0.3).backend == unserved
    monkeypatch.setattr(native, "_kernel", lambda: None)
    assert explain(z, 0.3).backend == unserved
    assert torch.isfinite(bisoftmax(z, 0.3)[0]).all()
    with pytest.raises(RuntimeError, match="backend"):
        bisoftmax(z, 0.3, backend="cpp")


@pytest.mark.defect("E6")
def test_vmap_leaves_the_choice_to_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_kernel", lambda: None)  # it takes all sizes
    found = []
    for count in (5, 600):
        stack = states(3, 1, count, 4, 0.1)[0].unsqueeze(1)

        def chosen(z: Tensor) -> Tensor:
            found.append(explain(z, BETA).backend)
            return bisoftmax(z, BETA)[0] + bisoftmax_hvp(z, z, BETA)

        expected = torch.stack([chosen(z) for z in stack])
        torch.testing.assert_close(torch.vmap(chosen)(stack), expected)
        torch.func.grad(lambda z, chosen=chosen: chosen(z).sum())(stack[0])
    assert found == ["reference"] * 5 + ["blocks"] * 4 + ["reference"]


def test_arguments_are_checked() -> None:
    z = states(2, 2, 5, 8)[0]
    assert explain(z, 0.3, backend="blocks") == Choice("blocks", "asked for")
    mistakes: list[tuple[Any, type[Exception], str]] = [
        (lambda: explain(z, 0.3, backend="dense"), ValueError, "backend"),
        (lambda: bisoftmax_hvp(z, z, 0.3, backend="dense"), ValueError, "backend"),
        (lambda: BiSoftmaxAttention(8, heads=2, backend="dense"), ValueError, "backend"),
        (lambda: bisoftmax(z.double(), 0.3, backend="cpp"), ValueError, "backend"),
        (lambda: explain(torch.zeros(1, 1, 4, 129), 0.3, backend="cpp"), ValueError, "backend"),
        (lambda: bisoftmax(z.to("meta"), 0.3, backend="cpp"), ValueError, "backend"),
        (lambda: bisoftmax(z[0], 0.3), ValueError, r"\bz\b"),
        (lambda: bisoftmax(z.int(), 0.3), TypeError, r"\bz\b"),
        (lambda: bisoftmax(z, -1), ValueError, "beta"),
        (lambda: bisoftmax(z, 0.0), ValueError, "beta"),
        (lambda: bisoftmax(z, torch.ones(3)), ValueError, "beta"),
        (lambda: bisoftmax(z, torch.ones(3, 1, 1)), ValueError, "beta"),
        (lambda: bisoftmax(z, torch.tensor(-1.0, requires_grad=True)), ValueError, "beta"),
        (lambda: bisoftmax_hvp(z, z, 0.3, mask=torch.ones(2, 4) > 0), ValueError, "mask"),
        (lambda: bisoftmax(z, 0.3, mask=torch.ones(2, 5)), TypeError, "mask"),
        (lambda: bisoftmax_hvp(z, z[:1], 0.3), ValueError, r"\bv\b"),
        (lambda: bisoftmax_hvp(z, z, 0.3, lse=z[..., 0, 0]), ValueError, "lse"),
    ]
    for call, error, name in mistakes:
        with pytest.raises(error, match=name):
            call()
