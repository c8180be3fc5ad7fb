"""The default tolerance is one that the precision of the update can meet."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import solvers
from implicit_attn import DEQ
from implicit_attn.energies import BiSoftmaxAttention, Quadratic, ReLUFeedForward
from solvers import Status, Tolerance

HALVES = [torch.bfloat16, torch.float16]
each_half = pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])


def energy_layer(**options: object) -> tuple[DEQ, Tensor]:
    torch.manual_seed(0)
    energy = BiSoftmaxAttention(64, 4) + ReLUFeedForward(64, 128) + Quadratic()
    return DEQ(energy, **options), torch.randn(8, 17, 64)  # type: ignore[arg-type]


class TanhLayer(nn.Module):
    """``tanh(W z + x)``, a contraction."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.8 * self.linear(z) + x)


@pytest.mark.defect("D9")
@each_half
@pytest.mark.parametrize("kind", ["energy", "map"])
def test_a_default_layer_converges_under_autocast(kind: str, dtype: torch.dtype) -> None:
    layer, x = energy_layer()
    if kind == "map":
        layer = DEQ.from_update(TanhLayer())
    exact = layer.solve(x, tolerance=Tolerance(1e-6), max_steps=500).value
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        solution = layer.solve(x)  # a warning would be an error
    assert solution.converged.all()
    assert solution.evaluations.max() < 50
    assert (solution.value - exact).norm() <= 0.1 * exact.norm()
    solution.value.float().square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert solution.adjoint.solution is not None and solution.adjoint.solution.converged.all()


@pytest.mark.defect("D9")
@each_half
def test_a_default_layer_in_half_precision_converges(dtype: torch.dtype) -> None:
    layer, x = energy_layer()
    solution = layer.to(dtype).solve(x.to(dtype))
    assert solution.converged.all()


@pytest.mark.defect("D9")
@pytest.mark.parametrize("adjoint", [solvers.Implicit(), solvers.Unrolled(), None])
def test_autocast_leaves_the_tolerance_of_what_it_does_not_change(
    adjoint: solvers.Adjoint | None,
) -> None:
    z0 = torch.zeros(2, 3)
    w = torch.tensor(10.0, requires_grad=True)
    update = solvers.Descent(lambda z: 0.05 * ((z - w) ** 2).sum(1))
    with torch.autocast("cpu", torch.bfloat16):
        solution = solvers.fixed_point(
            update, z0, solver=solvers.Forward(), adjoint=adjoint, max_steps=200
        )
    assert solution.converged.all()
    assert (solution.residual <= Tolerance().rtol).all()
    torch.testing.assert_close(solution.value, torch.full_like(z0, 10.0), rtol=2e-3, atol=0)
    if isinstance(adjoint, solvers.Implicit):
        (gradient,) = torch.autograd.grad(solution.value.sum(), w)
        torch.testing.assert_close(gradient, torch.tensor(6.0), rtol=1e-3, atol=0)


def test_single_precision_keeps_its_tolerance() -> None:
    layer, x = energy_layer(max_steps=100)
    assert layer.tolerance is None
    solution = layer.solve(x)
    assert (solution.residual <= Tolerance().rtol).all()
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        solution = layer.double().solve(x.double())
    assert (solution.residual <= Tolerance().rtol).all()


@pytest.mark.defect("D9")
def test_a_tolerance_out_of_reach_is_kept_and_said() -> None:
    layer, x = energy_layer(tolerance=Tolerance(1e-5), max_steps=20)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.warns(solvers.SolveWarning, match=r"in bfloat16, .* may not reach rtol=1e-05"),
    ):
        solution = layer.solve(x)
    assert (solution.status == Status.MAX_STEPS).all()
