"""The Triton backend through the public functions: derivatives, options, compilation, transforms.

Without a CUDA device the kernels run in Triton's interpreter (``tests/conftest.py`` asks for it),
else on the device. ``test_bisoftmax_triton`` has the kernels themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.triton import TOLERANCE, Case, Problem, dense, problem_of, relative
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp, explain

pytest.importorskip("triton", reason="Triton is not installed")
triton_backend = importlib.import_module("implicit_attn.kernels.bi_softmax.triton.backend")
launch = importlib.import_module("implicit_attn.kernels.bi_softmax.triton.launch")
launching = importlib.import_module("implicit_attn.kernels.bi_softmax.triton.arguments")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BRAIN = torch.bfloat16
on_a_card = (pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device"))

SHAPES = [
    Case(17, 8, batch=2, strided=True),
    Case(40, 24, batch=2, mask="rows", normalised=False),
    Case(33, 16, causal=True, strided=True),
    Case(130, 16, batch=2, mask="random", strided=True),
    Case(130, 16, batch=2, mask="padding"),
]
BRAINS = [
    Case(65, 64, batch=2, dtype=BRAIN, strided=True),
    Case(129, 128, batch=2, dtype=BRAIN, mask="random"),
    Case(300, 64, dtype=BRAIN, causal=True, strided=True),
    Case(1024, 64, batch=2, dtype=BRAIN, mask="padding"),
]


def options_of(case: Case, problem: Problem) -> dict[str, Any]:
    backend = {"backend": "triton", "mask": problem.mask}
    return {"causal": case.causal, "limit": case.limit, **backend}


@pytest.mark.parametrize(
    "case", [*SHAPES, *(pytest.param(case, marks=on_a_card) for case in BRAINS)], ids=str
)
def test_values_and_derivatives(case: Case) -> None:
    problem = problem_of(case, DEVICE)
    gradient, lse, curved = dense(case, problem)
    options, tolerance = options_of(case, problem), TOLERANCE[case.dtype]
    z = problem.z.clone(memory_format=torch.preserve_format).requires_grad_()
    ours = bisoftmax(z, case.beta, **options)
    assert relative(ours[0].detach(), gradient) <= tolerance
    assert relative(ours[1].detach(), lse) <= 1e-5
    (pullback,) = torch.autograd.grad(ours, z, (problem.v, problem.cotangent))
    assert relative(pullback, curved) <= tolerance
    curved = dense(case, problem, cotangent=False)[2]
    for given in (None, ours[1].detach()):
        product = bisoftmax_hvp(problem.z, problem.v, case.beta, lse=given, **options)
        assert product.dtype == case.dtype and product.is_contiguous()
        assert relative(product, curved) <= tolerance


def laid_out(tokens: int = 20, width: int = 16, **options: Any) -> Tensor:
    """(2, 2, N, p) as it lies after a projection of (B, N, d)."""
    generator = torch.Generator().manual_seed(tokens)
    z = torch.randn(2, tokens, 2, width, generator=generator).to(DEVICE, **options)
    return z.transpose(1, 2)


def test_the_second_derivative() -> None:
    found = []
    for backend in ("triton", "reference"):
        z = laid_out().requires_grad_()
        gradient, lse = bisoftmax(z, 0.3, backend=backend)
        loss = gradient.pow(3).sum() + lse.square().sum()
        (first,) = torch.autograd.grad(loss, z, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), z)[0])
    assert relative(found[0], found[1].cpu().double()) <= 1e-4


def counted(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """The launches of these names, from now on."""
    calls: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        return wrapper

    for name in names:
        monkeypatch.setattr(launch, name, noted(name, getattr(launch, name)))
    return calls


@pytest.mark.defect("E5")
@pytest.mark.parametrize(("tokens", "most"), [(20, (1, 1)), (130, (2, 2)), (1024, (3, 3))])
def test_the_host_launches_few_kernels(
    tokens: int, most: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's time goes by launches, each of which Triton binds anew."""
    calls: list[Any] = []
    monkeypatch.setattr(launch, "launch", lambda kernel, *_: calls.append(kernel))
    z, numbers = laid_out(tokens), []
    lse = z.new_zeros(z.shape[:3])
    for options in ({"limit": 9.0}, {}, {"causal": True}):
        calls.clear()
        triton_backend.bisoftmax_forward(z, 0.25, **options)
        numbers.append(len(calls))
        calls.clear()
        triton_backend.bisoftmax_hvp(z, z, 0.25, lse=lse, **options)
        numbers.append(len(calls))
    assert max(numbers[::2]) <= most[0] and max(numbers[1::2]) <= most[1]


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


def test_vmap() -> None:
    stack = torch.stack([laid_out(seed)[:, :, :17] for seed in (17, 18, 19)], 1)
    mask = torch.arange(17, device=DEVICE) < torch.tensor([0, 15], device=DEVICE)[:, None]

    def both(z: Tensor) -> tuple[Tensor, Tensor]:
        return bisoftmax(z, 0.25, mask=mask, backend="triton")

    def product(z: Tensor) -> Tensor:
        return bisoftmax_hvp(z, z, 0.25, mask=mask, backend="triton")

    ours = (*torch.vmap(both, 1)(stack), torch.vmap(product, 1)(stack))
    singly = [(*both(z), product(z)) for z in stack.unbind(1)]
    for mapped, single in zip(ours, zip(*singly, strict=True), strict=True):
        torch.testing.assert_close(mapped, torch.stack(single))


@pytest.mark.defect("E7")
def test_tiles_fit_the_chip() -> None:
    """Data centre cards have tables of their own; consumer cards of two generations share one."""
    for kernel in ("lse", "triangle", "gradient", "curvature", "causal", "mean"):
        chosen = {device: launching.tiles(kernel, 256, 2, device) for device in (86, 89, 90, 120)}
        assert chosen[86] == chosen[89] == chosen[120] != chosen[90]
        for device in (80, 86, 90, 100, 120):
            for width in (16, 64, 128, 256):
                shape = launching.tiles(kernel, width, 2, device)
                # Its own rows of z and v, and the columns in flight.
                held = 4 * width * (shape.rows + shape.columns * shape.stages)
                assert held <= (100 if device in (86, 89, 120) else 163) * 1024 * 1.6
    assert launching.tiles("tangents", 64, 2, 80) != launching.tiles("tangents", 64, 2, 90)
    assert launching.tiles("lse", 64, 2, 80) != launching.tiles("lse", 64, 2, 86)


@pytest.mark.defect("E4")
@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 16, 33, 64, 65, 100])
def test_slices_have_about_equally_many_tiles(blocks: int) -> None:
    """Of the triangle: block b has b + 1 tiles, and no slice many more than its share."""
    triangle = importlib.import_module("implicit_attn.kernels.bi_softmax.triton.triangle")
    count_of, block_of = triangle.owned_blocks.fn, triangle.owned_block.fn
    for heads in (1, 32, 200):
        slices = launch.slices_of(heads, blocks)
        owned = [
            [block_of(s, slices, blocks, step) for step in range(count_of(s, slices, blocks))]
            for s in range(slices)
        ]
        assert sorted(block for mine in owned for block in mine) == list(range(blocks))
        assert all(mine == sorted(mine, reverse=True) for mine in owned)
        tiles = [sum(block + 1 for block in mine) for mine in owned]
        # What one round is worth, at most, beyond what the others have.
        assert max(tiles) - min(tiles) <= slices
        assert max(tiles) <= max(blocks, -(-sum(tiles) // slices) + slices // 2 + 1)


@pytest.mark.defect("E4")
@pytest.mark.skipif(not launching.INTERPRETED, reason="counts what the interpreter did")
def test_programs_of_the_triangle_do_about_equally_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of zero tokens each entry of a tile is 1: a slot sums to its tiles, those off the diagonal twice."""
    monkeypatch.setattr(launch, "MOST_SLICES", 4)
    monkeypatch.setattr(torch, "empty", torch.zeros)  # rows that no tile of a slot has
    block = launching.INTERPRETER.rows
    z = torch.zeros(1, 1, 16 * block, 16)
    given = launching.LaunchArguments(z, 1.0, None, None, False, True)
    slots, slices, rows = launch._triangle(given, None)
    assert (slices, rows) == (4, block)
    entries = slots.double().sum(1) / block**2  # twice the tiles, less those on the diagonal
    assert float(entries.sum()) == 16**2
    assert float(entries.max() - entries.min()) <= 2 * slices


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 65, 1024])
def test_automatic_choice_on_a_card(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z = laid_out(tokens, 64, dtype=BRAIN)
    assert explain(z, 0.125).backend == "triton"
    assert explain(z.double(), 0.125).backend != "triton"
    calls = counted(monkeypatch, "single_tile_gradient", "gradient")
    gradient, lse = bisoftmax(z, 0.125)
    assert len(calls) == 1
    compiled = torch.compile(lambda z: bisoftmax(z, 0.125), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(z)[0], gradient) and torch.equal(compiled(z)[1], lse)
