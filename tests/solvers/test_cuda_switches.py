"""The code for CUDA devices, on a CPU: the default tolerance in TF32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import solvers
from implicit_attn import EquilibriumBlock
from solvers.core.cuda import forced, on_cuda, uses_tf32
from solvers.core.solution import Goal, criterion

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


def test_the_setting_is_read(tf32: None) -> None:
    assert uses_tf32()


@pytest.mark.usefixtures("tf32")
def test_the_default_tolerance_in_tf32() -> None:
    single, half = torch.float32, torch.bfloat16
    assert criterion(None, single, None, device=CUDA)[0].rtol == 2e-3
    assert criterion(None, single, None, device=CPU)[0].rtol == 1e-4
    assert criterion(None, single, None)[0].rtol == 1e-4
    assert criterion(None, torch.float64, None, device=CUDA)[0].rtol == 1e-4
    # Autocast matters only where the map uses it.
    assert criterion(None, single, half, True, CUDA)[0].rtol == 2e-2
    assert criterion(None, single, half, False, CUDA)[0].rtol == 2e-3
    asked = solvers.Tolerance(1e-5)
    for device, warned in ((CUDA, True), (CPU, False)):
        tolerance, what = criterion(asked, single, None, device=device)
        assert tolerance is asked
        assert ("TF32" in what) == warned
    assert Goal(None, single, None, CUDA).tolerance.rtol == 2e-3


def test_without_tf32_nothing_changes() -> None:
    assert not uses_tf32()
    assert criterion(None, torch.float32, None, device=CUDA)[0].rtol == 1e-4


@pytest.mark.usefixtures("tf32")
def test_a_solve_in_tf32() -> None:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    z0 = torch.zeros_like(x)
    torch.manual_seed(0)
    block = EquilibriumBlock(8, 2)
    assert block._tolerance(x) == solvers.Tolerance(1e-3)
    fine = solvers.fixed_point(lambda z, x: 0.5 * z.cos() + x, z0, (x,), solver="forward")
    with forced():
        rough = solvers.fixed_point(lambda z, x: 0.5 * z.cos() + x, z0, (x,), solver="forward")
        assert block._tolerance(x) is None
        assert on_cuda(x)
    assert not on_cuda(x)
    assert (rough.evaluations < fine.evaluations).all()
    assert (rough.residual <= 2e-3).all()
