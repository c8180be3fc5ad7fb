"""Layers do not notice who computes their attention: solve, first and second derivatives, products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from implicit_attn import DEQ
from implicit_attn.energies import (
    BiSoftmaxAttention,
    Energy,
    Quadratic,
    ScoreAttention,
    SoftmaxAttention,
)
from solvers import Implicit, Tolerance

# The energy of a backend, which backend is compared with the reference, and (batch, tokens, dim).
LAYERS: dict[str, tuple[Callable[[str], Energy], str, tuple[int, int, int]]] = {
    "bi-softmax": (lambda b: 0.4 * BiSoftmaxAttention(12, 2, backend=b), "auto", (1, 260, 12)),
    "sigmoid": (lambda b: 0.05 * ScoreAttention(8, 2, backend=b), "auto", (2, 260, 8)),
    "inner": (
        lambda b: 0.3 * SoftmaxAttention(8, 2, energy="inner", cross=True, backend=b),
        "flash",
        (2, 70, 8),
    ),
    "elastic": (
        lambda b: 0.3 * SoftmaxAttention(8, 2, energy="elastic", cross=True, backend=b),
        "flash",
        (2, 70, 8),
    ),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("attention", "ours", "shape"), LAYERS.values(), ids=LAYERS.keys())
def test_layers_agree(
    attention: Callable[[str], Energy], ours: str, shape: tuple[int, int, int], masked: bool
) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape[:2], generator=generator) > 0.3 if masked else None
    exact, results = Tolerance(rtol=1e-11), {}
    for backend in (ours, "reference"):
        torch.manual_seed(0)
        model = (attention(backend) + Quadratic()).double()
        layer = DEQ(model, tolerance=exact, adjoint=Implicit(tolerance=exact))
        point = x.clone().requires_grad_()
        inputs = [point, *layer.parameters()]
        z = layer(point, mask)
        first = torch.autograd.grad(z.square().mean(), inputs, create_graph=True)
        second = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), inputs)
        product = model.hvp(z.detach(), x, x, mask=mask).detach()
        results[backend] = [z, product, *first, *second]
    for found, theirs in zip(results[ours], results["reference"], strict=True):
        assert (found - theirs).norm() <= 1e-7 * theirs.norm()
