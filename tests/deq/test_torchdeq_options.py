"""The rows of docs/migrating/torchdeq.md: an option of torchdeq and ours do the same, or differ as said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchdeq import get_deq
from torchdeq.dropout import (
    VariationalDropout,
    VariationalDropout1d,
    VariationalDropout2d,
    VariationalDropToken1d,
    VariationalDropToken2d,
)
from torchdeq.norm import apply_norm as their_apply_norm
from torchdeq.norm import reset_norm

from implicit_attn import DEQ
from implicit_attn import regularization as ours
from solvers import GMRES, Anderson, Broyden, Forward, Implicit, Phantom, Tolerance, fixed_point

DRAWN = torch.Generator().manual_seed(0)
WEIGHT = 0.25 * torch.randn(5, 5, generator=DRAWN, dtype=torch.float64)
X = torch.randn(4, 5, generator=DRAWN, dtype=torch.float64)
Z0 = torch.zeros_like(X)


def step(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z @ WEIGHT) + x


def theirs(x: Tensor, training: bool = True, **options: Any) -> tuple[list[Tensor], Any]:
    return get_deq(**options).train(training)(lambda z: step(z, x), Z0)


@pytest.mark.parametrize(
    ("mode", "tolerance"), [("abs", Tolerance(0.0, atol=1e-4)), ("rel", Tolerance(1e-4))]
)
def test_stop_modes_and_the_state_one_application_behind(mode: str, tolerance: Tolerance) -> None:
    """The slowest sample: torchdeq stops the batch by it, and returns f of the point it measured."""
    (state,), info = theirs(X, False, f_tol=1e-4, f_stop_mode=mode)
    found = fixed_point(step, Z0, (X,), solver=Forward(), tolerance=tolerance, adjoint=None)
    slowest = found.evaluations == found.evaluations.max()
    assert int(info["nstep"][slowest][0]) == int(found.evaluations.max())
    torch.testing.assert_close(step(found.value, X)[slowest], state[slowest])


@pytest.mark.parametrize(("name", "options", "solver"), [
    ("fixed_point_iter", {"tau": 0.7}, Forward(0.7)),
    ("simple_fixed_point_iter", {}, Forward()),
    ("anderson", {"m": 4, "lam": 1e-12}, Anderson(memory=4)),
    ("broyden", {}, Broyden()),
])  # fmt: skip
def test_solvers_and_their_arguments(name: str, options: dict[str, Any], solver: Any) -> None:
    deq = get_deq(f_solver=name, f_tol=1e-10, f_max_iter=100).eval()
    (state,), _ = deq(lambda z, tau=1.0: step(z, X), Z0, solver_kwargs=options)
    found = DEQ.from_update(step, init="zeros").solve(
        X, solver=solver, tolerance=Tolerance(1e-10), max_steps=100
    )
    torch.testing.assert_close(found.value, state, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("hook", [False, True])
def test_implicit_gradients(hook: bool) -> None:
    x = X.clone().requires_grad_()
    (state,), _ = theirs(x, ift=True, hook_ift=hook, f_tol=1e-13, b_tol=1e-13, f_max_iter=300,
                        b_max_iter=300)  # fmt: skip
    (expected,) = torch.autograd.grad(state.pow(2).sum(), x)
    adjoint = Implicit(solver=GMRES(), max_steps=99, tolerance=Tolerance(1e-12))
    value = fixed_point(
        step, Z0, (x,), tolerance=Tolerance(1e-12), max_steps=99, adjoint=adjoint
    ).value
    torch.testing.assert_close(torch.autograd.grad(value.pow(2).sum(), x)[0], expected)


def test_phantom_gradients_and_what_is_returned() -> None:
    """``grad=3, tau=0.6``: the same derivative; our value stays the solution, theirs has moved on."""
    x = X.clone().requires_grad_()
    (state,), _ = theirs(x, grad=3, tau=0.6, f_max_iter=5, f_tol=1e-12)
    found = fixed_point(
        step, Z0, (x,), solver=Forward(), max_steps=6, tolerance=Tolerance(1e-12),
        adjoint=Phantom(3, 0.6), on_failure="ignore",
    )  # fmt: skip
    moved = found.value.detach()
    for _ in range(3):
        moved = 0.4 * moved + 0.6 * step(moved, X)
    torch.testing.assert_close(state, moved)
    assert float((state - found.value).detach().abs().max()) > 1e-4
    cotangent = torch.ones_like(X)
    (expected,) = torch.autograd.grad(state, x, cotangent)
    torch.testing.assert_close(torch.autograd.grad(found.value, x, cotangent)[0], expected)


def test_states_on_the_way_that_a_solve_does_not_reach() -> None:
    """torchdeq drops them in silence, with the gradient of the solution; ours are always there."""
    x = X.clone().requires_grad_()
    states, _ = theirs(x, core="indexing", ift=True, n_states=4, f_max_iter=40, f_tol=1e-2)
    assert len(states) < 4
    layer = DEQ.from_update(step, init="zeros", tolerance=1e-2, max_steps=40)
    found = ours.states_at(layer, x, range(10, 41, 10))
    assert len(found) == 4 and torch.equal(found[-1], layer(x))


def test_limits_of_evaluation() -> None:
    deq = get_deq(f_max_iter=3, eval_f_max_iter=9, f_tol=1e-14).eval()
    layer = DEQ.from_update(
        step, max_steps=3, eval_max_steps=9, solver=Forward(), tolerance=Tolerance(1e-14),
        init="zeros", on_failure="ignore",
    )  # fmt: skip
    assert int(layer.solve(X).evaluations.max()) == 3
    found = layer.eval().solve(X)
    assert int(found.evaluations.max()) == 9
    torch.testing.assert_close(step(found.value, X), deq(lambda z: step(z, X), Z0)[0][0])


def test_spectral_radius() -> None:
    """Where the dominant eigenvalue is real and simple; a power iteration turns about others."""
    symmetric = WEIGHT + WEIGHT.T
    deq = get_deq(f_tol=1e-10, f_max_iter=99).eval()
    (state,), info = deq(lambda z: 0.5 * z @ symmetric + X, Z0, sradius_mode=True)
    layer = DEQ.from_update(lambda z, x: 0.5 * z @ symmetric + x)
    torch.testing.assert_close(layer.spectral_radius(state, X), info["sradius"], rtol=1e-3, atol=0)


@pytest.mark.parametrize(("shape", "module", "shared"), [
    ((3, 4, 5), VariationalDropout(), ()),
    ((3, 4, 5), VariationalDropout1d(), 1),
    ((3, 5, 4), VariationalDropout1d(token_first=False), 2),
    ((3, 4, 4, 5), VariationalDropout2d(), (1, 2)),
    ((3, 5, 4, 4), VariationalDropout2d(token_first=False), (2, 3)),
    ((3, 4, 5), VariationalDropToken1d(), -1),
    ((3, 4, 4, 5), VariationalDropToken2d(), -1),
    ((3, 5, 4, 4), VariationalDropToken2d(token_first=False), 1),
], ids=lambda given: type(given).__name__ if isinstance(given, nn.Module) else str(given))  # fmt: skip
def test_what_dropout_shares(shape: tuple[int, ...], module: Any, shared: Any) -> None:
    module(torch.ones(shape))
    mask = ours.VariationalDropout(shared=shared).mask(torch.ones(shape), ours.dropout_seeds(3), 0)
    assert mask.shape == module.mask.shape
    assert set(mask.unique().tolist()) <= {0.0, 2.0}


def test_a_clipped_spectral_norm_is_a_bound() -> None:
    """``norm_clip``, no learned scale: ``W min(1, target / sigma)``, sigma exact with us."""
    torch.manual_seed(0)
    for size in (0.2, 3.0):
        layer, twin = nn.Linear(4, 4), nn.Linear(4, 4)
        with torch.no_grad():
            layer.weight.mul_(size)
            twin.weight.copy_(layer.weight)
        model, own = nn.Sequential(layer), nn.Sequential(twin)
        clipped: dict[str, Any] = {"norm_no_scale": True, "norm_clip": True}
        their_apply_norm(model, "spectral_norm", args=clipped | {"norm_target_norm": 0.9,
                                                                 "sn_n_power_iters": 200})  # fmt: skip
        reset_norm(model)
        ours.apply_norm(own, "bound", target=0.9)
        torch.testing.assert_close(twin.weight, layer.weight, rtol=1e-4, atol=1e-5)


def test_a_norm_of_theirs_is_stale_until_it_is_reset() -> None:
    model, own = nn.Linear(3, 3), nn.Linear(3, 3)
    their_apply_norm(model)
    ours.apply_norm(own)
    before = [model.weight.detach().clone(), own.weight.detach().clone()]
    with torch.no_grad():
        for each in (model, own):
            for parameter in each.parameters():
                parameter.add_(0.1)
    assert torch.equal(model.weight, before[0])
    assert not torch.equal(own.weight, before[1])
