"""Arguments of all kernels, the buffers of strips, and layers on top of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn.kernels import bisoftmax, bisoftmax_hvp, explain, frozen_key_attention
from implicit_attn.kernels.bi_softmax import native
from implicit_attn.optional import require

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = torch.float64
BETA = 0.4


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=WIDE)


def backends() -> list[str]:
    try:
        require("triton", extra="gpu")
    except ImportError:
        return ["reference", "blocks"]
    return ["reference", "blocks", "triton"]


V, KEY = randn(2, 2, 9, 4, seed=1), randn(2, 2, 7, 4, seed=2)
ENTRIES: dict[str, Callable[..., Any]] = {
    "bisoftmax reference": lambda z, beta: bisoftmax(z, beta, backend="reference"),
    "bisoftmax blocks": lambda z, beta: bisoftmax(z, beta, backend="blocks"),
    "bisoftmax causal": lambda z, beta: bisoftmax(z, beta, causal=True, backend="blocks"),
    "hvp reference": lambda z, beta: bisoftmax_hvp(z, V, beta, backend="reference"),
    "hvp blocks": lambda z, beta: bisoftmax_hvp(z, V, beta, backend="blocks"),
    "frozen reference": lambda z, beta: frozen_key_attention(z, KEY, beta, backend="reference"),
    "frozen flash": lambda z, beta: frozen_key_attention(z, KEY, beta, backend="flash"),
}


@pytest.mark.defect("A15")
@pytest.mark.parametrize("name", ENTRIES)
def test_a_tensor_beta_gets_its_gradient(name: str) -> None:
    z = randn(2, 2, 9, 4).requires_grad_()
    beta = torch.tensor(BETA, dtype=WIDE, requires_grad=True)
    assert torch.autograd.gradcheck(ENTRIES[name], (z, beta))
    outputs = ENTRIES[name](z.detach(), beta)
    for ours, plain in zip(_flat(outputs), _flat(ENTRIES[name](z.detach(), BETA)), strict=True):
        torch.testing.assert_close(ours.detach(), plain)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_beta_for_each_head(name: str) -> None:
    z = randn(2, 2, 9, 4).requires_grad_()
    beta = torch.tensor([[[0.4]], [[0.9]]], dtype=WIDE, requires_grad=True)
    assert torch.autograd.gradcheck(ENTRIES[name], (z, beta))
    with torch.no_grad():
        outputs = _flat(ENTRIES[name](z, beta))
        for head, number in enumerate(beta.flatten().tolist()):
            for ours, plain in zip(outputs, _flat(ENTRIES[name](z, number)), strict=True):
                torch.testing.assert_close(ours[:, head], plain[:, head])
    for heads in (1, 3):
        with pytest.raises(ValueError, match="beta"):
            bisoftmax(z.detach()[:, :1].expand(-1, heads, -1, -1), beta)


def _flat(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


@pytest.mark.defect("A15")
def test_a_tensor_beta_keeps_the_dtype_and_may_have_one_element_only() -> None:
    z = randn(1, 2, 9, 4).bfloat16()
    beta = torch.tensor([BETA], requires_grad=True)
    gradient, lse = bisoftmax(z, beta)
    assert gradient.dtype == z.dtype and lse.requires_grad
    assert torch.equal(bisoftmax(z, torch.tensor(0.5))[0], bisoftmax(z, 0.5)[0])
    with pytest.raises(ValueError, match="beta"):
        bisoftmax(z, torch.ones(2))
    with pytest.raises(ValueError, match="beta"):
        bisoftmax(z, torch.tensor(-1.0, requires_grad=True))


@pytest.mark.defect("A14")
@pytest.mark.parametrize("of", ["gradient", "lse"])
@pytest.mark.parametrize(
    ("backend", "tokens", "options"),
    [
        (backend, tokens, options)
        for backend in backends()
        for tokens, options in ((9, {}), (130, {"limit": 60.0}), (9, {"causal": True}))
    ],
)
def test_cotangents_of_masked_tokens_are_ignored(
    backend: str, tokens: int, options: dict[str, Any], of: str
) -> None:
    z = (0.3 * randn(2, 1, tokens, 4)).float().to(DEVICE).requires_grad_()
    mask = torch.ones(2, tokens, dtype=torch.bool, device=DEVICE)
    mask[0, 5:8] = False
    outputs = bisoftmax(z, 1.0, mask=mask, backend=backend, **options)
    clean = [randn(*t.shape).float().to(DEVICE) for t in outputs]
    hidden = ~mask[:, None] if of == "lse" else ~mask[:, None, :, None]
    spoiled = [
        t if (t.dim() == 3) != (of == "lse") else t.masked_fill(hidden, torch.nan) for t in clean
    ]
    expected = torch.autograd.grad(outputs, z, clean, retain_graph=True)[0]
    found = torch.autograd.grad(outputs, z, spoiled)[0]
    torch.testing.assert_close(found, expected)
    assert not found.isnan().any()


@pytest.mark.defect("A18")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_reference_multiplies_half_precision_in_float32(dtype: torch.dtype) -> None:
    z, v = randn(1, 2, 64, 32).to(dtype), randn(1, 2, 64, 32, seed=1).to(dtype)
    found = bisoftmax_hvp(z, v, 0.5, backend="reference")
    exact = bisoftmax_hvp(z.double(), v.double(), 0.5, backend="reference")
    assert found.dtype == dtype
    # No more than the rounding of the result.
    assert (found.double() - exact).norm() <= 0.5 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.defect("E6")
def test_vmap_leaves_the_choice_to_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_kernel", lambda: None)  # it takes all sizes
    found = []
    for count in (5, 600):
        stack = (0.1 * randn(3, 1, 1, count, 4)).float()

        def chosen(z: Tensor) -> Tensor:
            found.append(explain(z, BETA).backend)
            return bisoftmax(z, BETA)[0] + bisoftmax_hvp(z, z, BETA)

        torch.testing.assert_close(
            torch.vmap(chosen)(stack), torch.stack([chosen(z) for z in stack])
        )
    assert found == ["reference"] * 4 + ["blocks"] * 4
