"""The solvers of jaxopt and optimistix, each with the settings that were fastest here; no program.

Each function makes ``solve(weights, x, forward, backward)`` of an update ``(z, weights, x)``.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jaxopt
import lineax
import optimistix
from jax import Array
from jaxopt.linear_solve import solve_bicgstab

Update = Callable[[Array, Any, Array], Array]
Solve = Callable[[Any, Array, Array, Array], Array]
MOST = 400


def jaxopt_solver(kind: Any, *, tuned: bool = True) -> Callable[[Update], Solve]:
    """A solver of jaxopt, its adjoint by BiCGSTAB: its GMRES and CG took two to three times as long.

    Not ``tuned`` it is as jaxopt makes it: conjugate gradients on the normal equations, to its tolerance.
    """

    def make(update: Update) -> Solve:
        def solve(weights: Any, x: Array, forward: Array, backward: Array) -> Array:
            def adjoint(matvec: Any, right: Any, **options: Any) -> Any:
                return solve_bicgstab(matvec, right, tol=backward, **options)

            # The tolerance is that of the residual's norm, of the whole batch.
            tolerance = forward * jnp.linalg.norm(x)
            options = {"implicit_diff_solve": adjoint} if tuned else {}
            solver = kind(update, tol=tolerance, maxiter=MOST, **options)
            return solver.run(jnp.zeros_like(x), weights, x).params

        return solve

    return make


def optimistix_solver(kind: Callable[[Array], Any]) -> Callable[[Update], Solve]:
    """A solver of optimistix, its adjoint by GMRES: lineax's BiCGStab breaks down in float32."""

    def make(update: Update) -> Solve:
        def solve(weights: Any, x: Array, forward: Array, backward: Array) -> Array:
            solution = optimistix.fixed_point(
                lambda z, args: update(z, *args),
                kind(forward),
                jnp.zeros_like(x),
                (weights, x),
                max_steps=MOST,
                adjoint=optimistix.ImplicitAdjoint(_gmres(backward, backward)),
                throw=False,
            )
            return solution.value

        return solve

    return make


def _gmres(relative: Array | float, absolute: Array) -> Any:
    # A cycle is never cut short: with restart 20 the products are half as many again.
    return lineax.GMRES(rtol=relative, atol=absolute, norm=optimistix.rms_norm, restart=10)


def _iteration(tolerance: Array) -> Any:
    norm = optimistix.rms_norm
    return optimistix.FixedPointIteration(rtol=tolerance, atol=tolerance, norm=norm)


def _newton(tolerance: Array) -> Any:
    linear = _gmres(1e-2, 1e-2 * tolerance)
    norm = optimistix.rms_norm
    return optimistix.Newton(rtol=tolerance, atol=tolerance, norm=norm, linear_solver=linear)


LIBRARIES: dict[str, Callable[[Update], Solve]] = {
    "jaxopt Anderson": jaxopt_solver(jaxopt.AndersonAcceleration),
    "jaxopt iteration": jaxopt_solver(jaxopt.FixedPointIteration),
    "jaxopt Anderson, its adjoint": jaxopt_solver(jaxopt.AndersonAcceleration, tuned=False),
    "jaxopt iteration, its adjoint": jaxopt_solver(jaxopt.FixedPointIteration, tuned=False),
    "optimistix iteration": optimistix_solver(_iteration),
    "optimistix Newton": optimistix_solver(_newton),
}
