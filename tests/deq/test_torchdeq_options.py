"""Options of torchdeq and ours do the same, or differ as docs/migrating/torchdeq.md says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchdeq import get_deq

from implicit_attn import DEQ
from solvers import Forward, Phantom, Tolerance, fixed_point

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
    """The slowest sample: torchdeq stops the batch by its residual, and returns f of the point it measured.

    We also ask for the error, so that we never stop earlier.
    """
    (state,), info = theirs(X, False, f_tol=1e-4, f_stop_mode=mode)
    found = fixed_point(step, Z0, (X,), solver=Forward(), tolerance=tolerance, adjoint=None)
    slowest = found.evaluations == found.evaluations.max()
    assert int(info["nstep"][slowest][0]) <= int(found.evaluations.max())
    torch.testing.assert_close(step(found.value, X)[slowest], state[slowest], rtol=1e-3, atol=1e-3)


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
