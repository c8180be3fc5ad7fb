"""The code for CUDA devices, on a CPU: the default tolerance in TF32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import solvers
from implicit_attn import EquilibriumBlock
from solvers.core.cuda import forced, on_cuda
from solvers.core.tolerance import Goal

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(params=["allow_tf32", "fp32_precision"])
def tf32(request: pytest.FixtureRequest) -> Iterator[None]:
    """CUDA devices use TF32, as told by the older or the newer setting of torch."""
    settings, name = torch.backends.cuda.matmul, request.param
    if name == "fp32_precision" and not hasattr(settings, name):
        pytest.skip("torch has no such setting")
    before = getattr(settings, name)
    setattr(settings, name, True if name == "allow_tf32" else "tf32")
    yield
    setattr(settings, name, before)


@pytest.mark.usefixtures("tf32")
def test_a_solve_in_tf32() -> None:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    z0 = torch.zeros_like(x)
    torch.manual_seed(0)
    block = EquilibriumBlock(8, 2)
    assert Goal(block.deq.tolerance, x.dtype, None, x.device).tolerance.rtol == 1e-3
    fine = solvers.fixed_point(lambda z, x: 0.5 * z.cos() + x, z0, (x,), solver="forward")
    with forced():
        rough = solvers.fixed_point(lambda z, x: 0.5 * z.cos() + x, z0, (x,), solver="forward")
        assert Goal(block.deq.tolerance, x.dtype, None, x.device).tolerance.rtol == 2e-3
        assert on_cuda(x)
    assert not on_cuda(x)
    assert (rough.evaluations < fine.evaluations).all()
    assert (rough.residual <= 2e-3).all()
