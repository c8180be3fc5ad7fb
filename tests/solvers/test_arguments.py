"""Arguments as people write them: numbers, names, classes, tensors with fewer dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from implicit_attn import DEQ
from solvers import Tolerance, adaptive_tap, fixed_point, solve_linear


def solve(**options: Any) -> solvers.Solution:
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    return fixed_point(lambda z, x: 0.9 * z.cos() + x, torch.zeros_like(x), (x,), **options)


def assert_same(first: solvers.Solution, second: solvers.Solution) -> None:
    assert torch.equal(first.value, second.value)
    assert first.evaluations.tolist() == second.evaluations.tolist()


def test_a_number_is_a_relative_tolerance() -> None:
    assert_same(solve(tolerance=1e-9), solve(tolerance=Tolerance(rtol=1e-9)))
    assert solvers.Implicit(tolerance=1e-3) == solvers.Implicit(tolerance=Tolerance(1e-3))
    b = torch.ones(2, 3)
    found = [
        solve_linear(lambda v: v * b.cumsum(1)[0], b, tolerance=t) for t in (1e-2, Tolerance(1e-2))
    ]
    assert_same(*found)


@pytest.mark.parametrize(
    "kind",
    [solvers.Anderson, solvers.Broyden, solvers.Forward, solvers.GradientDescent, solvers.Newton],
)
def test_a_solver_has_a_name_and_a_class(kind: type[solvers.Solver]) -> None:
    wanted = solve(solver=kind(), tolerance=0.1)
    for given in (kind, kind.__name__, kind.__name__.lower()):
        assert_same(solve(solver=given, tolerance=0.1), wanted)


@pytest.mark.parametrize(
    "kind", [solvers.Implicit, solvers.Unrolled, solvers.Phantom, solvers.OneStep]
)
def test_an_adjoint_has_a_name_and_a_class(kind: type[solvers.Adjoint]) -> None:
    """Also in a layer; their gradients differ in this one."""

    def gradient(given: Any) -> Tensor:
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
        fixed_point(
            lambda z, x: 0.9 * z.cos() + x, x.detach(), x, adjoint=given
        ).value.sum().backward()
        assert x.grad is not None
        return x.grad

    for given in (kind, kind.__name__, kind.__name__.lower()):
        assert torch.equal(gradient(given), gradient(kind()))
        assert DEQ.from_update(lambda z, x: 0.5 * z + x, adjoint=given).adjoint == kind()


@pytest.mark.parametrize("kind", [solvers.CG, solvers.MINRES, solvers.GMRES])
def test_a_linear_solver_has_a_name_and_a_class(kind: type[solvers.CG]) -> None:
    def solution(given: Any) -> solvers.Solution:
        return solve_linear(
            lambda v: v * torch.tensor([1.0, 2.0, 4.0]), torch.ones(2, 3), solver=given
        )

    for given in (kind, kind.__name__, kind.__name__.lower()):
        assert_same(solution(given), solution(kind()))
        assert solvers.Implicit(solver=given) == solvers.Implicit(solver=kind())
        assert solvers.Newton(linear=given) == solvers.Newton(linear=kind())
    for wrong in (lambda: solution("gmress"), lambda: solvers.Implicit(solver="gmress")):
        with pytest.raises(
            ValueError, match=r"solver must be one of cg, gmres, minres .* got 'gmress'"
        ):
            wrong()


def test_one_tensor_is_all_that_f_takes() -> None:
    x = torch.ones(2, 3)
    found = [fixed_point(lambda z, x: 0.5 * z + x, x, args) for args in (x, (x,))]
    assert_same(*found)


@pytest.mark.parametrize("site", ["ising", "Ising", solvers.IsingSite])
@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 4, 1)])
def test_scalar_spins(site: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    couplings = 0.2 * torch.randn(4, 4, dtype=torch.float64).triu(1)
    couplings, field = couplings + couplings.mT, torch.randn(4, dtype=torch.float64)
    wanted = adaptive_tap(
        couplings[:, :, None, None], field.view(1, 4, 1), site=solvers.IsingSite(), tolerance=1e-9
    ).value.mean
    found = adaptive_tap(couplings, field.view(shape), site=site, tolerance=Tolerance(1e-9))
    assert torch.equal(found.value.mean, wanted)


def test_a_site_that_is_none_is_refused() -> None:
    couplings, field = torch.zeros(4, 4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"site must be one of ising, potts.* got 'icing'"):
        adaptive_tap(couplings, field, site="icing")
    for wrong in (solvers.GaussianSite, 3):
        with pytest.raises(TypeError, match=r"site must be a solvers.Site such as"):
            adaptive_tap(couplings, field, site=wrong)  # type: ignore[arg-type]


def couples(z: Tensor) -> Tensor:
    return torch.tensor([[0.1, 0.2, 0.0], [0.0, 0.9, 0.1], [0.5, 0.0, 0.3]]) @ z + 1


def test_a_vector_is_told_to_be_several_problems_of_one_unknown() -> None:
    with pytest.raises(
        (RuntimeError, solvers.SolveError), match=r"3 problems of one unknown.*z0\[None\]"
    ):
        fixed_point(couples, torch.zeros(3), max_steps=8, tolerance=1e-9, on_failure="raise")
    one = fixed_point(lambda z: couples(z[0])[None], torch.zeros(3)[None], tolerance=1e-6)
    torch.testing.assert_close(couples(one.value[0]), one.value[0], rtol=1e-4, atol=1e-4)
