"""One counted token: the log-sum-exp is its own score, to the rounding of that score.

``log(exp(s))`` has the rounding of 1, which for a small s is noise in the energy.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

import solvers
from cases.kernels import needs_cpp
from implicit_attn import DEQ
from implicit_attn.energies import BiSoftmaxAttention, Quadratic
from implicit_attn.kernels import bisoftmax

pytestmark = pytest.mark.defect("D1")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
each_backend = pytest.mark.parametrize(
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


@each_backend
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
