"""Attention to keys that stay by one fused call, as on CUDA devices, against the dense formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases.kernels import Allocations, difference
from implicit_attn.energies import AttentionInput, ConditionalAttention
from implicit_attn.kernels import explain_frozen_keys, frozen_key_attention, fused
from solvers.core.cuda import forced

BETA = 0.4


def problem(
    queries: int, keys: int, given: str, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], dict[str, Any]]:
    """Queries, keys and the cotangents of both results; masks with a row that has no key."""
    generator = torch.Generator().manual_seed(queries + 10 * keys)
    shapes = [(2, 3, n, 8) for n in (queries, keys, queries)] + [(2, 3, queries)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    options: dict[str, Any] = {}
    if "mask" in given:
        options["mask"] = torch.rand(2, keys, generator=generator) < 0.6
        options["mask"][0] = False
    if "pairs" in given:
        options["pairs"] = torch.rand(2, 3, queries, keys, generator=generator) < 0.6
        options["pairs"][1, :, 0] = False
    if "bias" in given:
        bias = torch.randn(queries, keys, generator=generator, dtype=torch.float64)
        options["bias"] = bias.to(dtype)
    if "causal" in given:
        options["causal"] = True
    return tensors, options


GIVEN = ["nothing", "mask", "pairs", "bias", "causal", "mask pairs bias", "mask causal bias"]


@pytest.mark.parametrize(
    ("given", "queries", "keys"), [*((given, 7, 5) for given in GIVEN), (GIVEN[-1], 33, 33)]
)
def test_value_and_derivatives(given: str, queries: int, keys: int) -> None:
    if "causal" in given:
        keys = queries
    (query, key, by_mean, by_lse), options = problem(queries, keys, given)
    inputs = [query.requires_grad_(), key.requires_grad_()]
    inputs += [options["bias"].requires_grad_()] if "bias" in options else []

    def run() -> tuple[Tensor, Tensor]:
        return frozen_key_attention(query, key, BETA, **options)

    results = []
    for cuda in (False, True):
        if cuda:
            with forced():
                assert explain_frozen_keys(query, key, BETA, **options).backend == "flash"
                mean, lse = run()
        else:
            mean, lse = frozen_key_attention(query, key, BETA, **options, backend="reference")
        loss = (mean * by_mean).sum()
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        again = torch.autograd.grad(loss + (lse * by_lse).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(again[0], inputs, by_mean)
        results.append([mean, lse, *first, *again, *second])
    for exact, found in zip(*results, strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)


def test_gradcheck() -> None:
    (query, key, *_), options = problem(3, 4, "mask bias")
    inputs = [t[:, :1, :, :2].clone().requires_grad_() for t in (query, key)]

    def both(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return frozen_key_attention(query, key, BETA, **options)

    with forced():
        assert gradcheck(both, inputs) and gradgradcheck(both, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reduced_precision(dtype: torch.dtype) -> None:
    (query, key, g, _), options = problem(40, 40, "bias", dtype)
    try:
        torch.nn.functional.scaled_dot_product_attention(query, key, key)
    except RuntimeError as error:
        pytest.skip(f"torch's own attention: {error}")
    exact = frozen_key_attention(
        query.double().requires_grad_(), key.double(), BETA, bias=options["bias"].double()
    )
    query.requires_grad_()
    with forced(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        mean, lse = frozen_key_attention(query, key, BETA, **options)
    assert mean.dtype == dtype and lse.dtype == torch.float32
    assert difference(mean.detach(), exact[0].detach()) <= 4 * torch.finfo(dtype).eps
    assert difference(lse.detach(), exact[1].detach()) <= 1e-5
    (found,) = torch.autograd.grad(mean, query, g)
    assert found.dtype == dtype and found.isfinite().all()


def test_no_matrix_of_all_pairs_without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SCORES", 2 * 3 * 16 * 512)
    (query, key, g, _), _ = problem(512, 512, "nothing", torch.float32)
    query.requires_grad_()
    key.requires_grad_()
    for need_lse, most in ((False, 2 * 3 * 512 * 8), (True, 2 * 3 * 16 * 512)):
        with forced(), Allocations() as seen:
            mean, lse = frozen_key_attention(query, key, BETA, need_lse=need_lse)
            torch.autograd.grad(mean, (query, key), g)
        assert (lse is not None) == need_lse
        assert seen.largest <= most


@pytest.mark.parametrize(("options", "given"), [
    ({}, "mask"), ({"causal": True}, "mask pairs bias"), ({"exclude_self": True}, "nothing"),
    ({"memory_dim": 5}, "mask pairs bias"),
])  # fmt: skip
def test_conditional_attention(options: dict[str, Any], given: str) -> None:
    torch.manual_seed(0)
    energy = ConditionalAttention(6, 2, **options).double()
    (query, _, _, _), masks = problem(4, 4, given)
    z, x, v = (query[:, i, :, :6].clone() for i in range(3))
    mask = masks.get("mask")
    pairs = masks.get("pairs")
    pairs = None if pairs is None else pairs[:, 0]
    memory = query[:, 0, :, :5] if "memory_dim" in options else None
    given_input = AttentionInput(
        x, pairs, masks.get("bias"), memory, mask if memory is not None else None
    )

    def run() -> list[Tensor]:
        state = z.clone().requires_grad_()
        prepared = energy.prepare(given_input, mask=mask)
        value, gradient = energy.value_and_grad(state, prepared, mask=mask)
        alone = energy.grad(state, prepared, mask=mask)
        product = torch.autograd.grad(alone, state, v, retain_graph=True)[0]
        weights = torch.autograd.grad((gradient * v).sum() + value.sum(), [*energy.parameters()])
        return [value, gradient, alone, product, *weights]

    results = [run()]
    with forced():
        results.append(run())
    for exact, found in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11)
