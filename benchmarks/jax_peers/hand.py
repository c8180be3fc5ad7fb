"""A jitted Anderson loop with an implicit gradient, by hand; no program.

The loop is generic in the map and written for XLA on CPUs: samples in the last dimension; a ring of
differences that is updated in place; the small systems solved by a Cholesky factorisation unrolled
over vectors of samples (``jnp.linalg.solve`` takes 1.15 times as long a step); a combination written as
a sum (as a reduction over a broadcast it alone takes as long as two evaluations of the map).
"""
# pyright: reportMissingImports=false, reportFunctionMemberAccess=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.sparse.linalg import bicgstab

RIDGE, TINY = 1e-6, 1e-30
Map = Callable[[Array], Array]
Update = Callable[[Array, Any, Array], Array]  # (z, weights, x) -> like z


class State(NamedTuple):
    count: Array  # evaluations so far
    z: Array  # (D, N, B)
    fz: Array
    residual: Array
    last: tuple[Array, Array]  # f(z) and residual before
    changes: Array  # (m, D, N, B) of the residuals
    images: Array  # (m, D, N, B) of f(z)
    gram: Array  # (m, m, B)
    done: Array  # (B,)


def anderson(f: Map, z: Array, tolerance: Array, memory: int, most: int) -> Array:
    """The fixed point of ``f`` (D, N, B), from ``z``.

    A sample is frozen where ``|f(z) - z| <= tolerance |f(z)|``; the loop ends when all are.
    """

    def advance(s: State, z: Array, **changes: Any) -> State:
        fz = f(z)
        residual = fz - z
        done = s.done | (_squares(residual) <= tolerance**2 * _squares(fz))
        new = s._replace(count=s.count + 1, z=z, fz=fz, residual=residual, done=done)
        return new._replace(last=(s.fz, s.residual), **changes)

    def step(s: State) -> State:
        slot = (s.count - 2) % memory
        change = s.residual - s.last[1]
        changes = lax.dynamic_update_index_in_dim(s.changes, change, slot, 0)
        images = lax.dynamic_update_index_in_dim(s.images, s.fz - s.last[0], slot, 0)
        row, right = (changes * change).sum((1, 2)), (changes * s.residual).sum((1, 2))
        gram = lax.dynamic_update_index_in_dim(s.gram, row, slot, 0)
        gram = lax.dynamic_update_index_in_dim(gram, row, slot, 1)
        weights = solve_small(gram, right)
        mixed = s.fz - sum(weights[i] * images[i] for i in range(memory))
        z = jnp.where(s.done, s.z, mixed)
        return advance(s, z, changes=changes, images=images, gram=gram)

    def unfinished(s: State) -> Array:
        return (s.count < most) & ~s.done.all()

    none = jnp.zeros((memory, *z.shape), z.dtype)
    gram = jnp.zeros((memory, memory, z.shape[-1]), z.dtype)
    done = jnp.zeros(z.shape[-1], bool)
    start = State(jnp.int32(0), z, z, z, (z, z), none, none, gram, done)
    start = advance(start, z)
    start = advance(start, start.fz)
    s = lax.while_loop(unfinished, step, start)
    return s.fz


def _squares(a: Array) -> Array:
    return (a * a).sum((0, 1))


def solve_small(gram: Array, right: Array) -> Array:
    """``(G + ridge diag G) c = b`` by Cholesky's factorisation: (m, m, B), (m, B) -> (m, B)."""
    m = len(right)
    lower: dict[tuple[int, int], Array] = {}
    inverse: list[Array] = []
    for j in range(m):
        pivot = gram[j, j] * (1 + RIDGE) + TINY - sum(lower[j, k] ** 2 for k in range(j))
        inverse.append(lax.rsqrt(pivot))
        for i in range(j + 1, m):
            rest = gram[i, j] - sum(lower[i, k] * lower[j, k] for k in range(j))
            lower[i, j] = rest * inverse[j]
    y: list[Array] = []
    for i in range(m):
        y.append((right[i] - sum(lower[i, k] * y[k] for k in range(i))) * inverse[i])
    c = [right[0]] * m
    for i in reversed(range(m)):
        c[i] = (y[i] - sum(lower[k, i] * c[k] for k in range(i + 1, m))) * inverse[i]
    return jnp.stack(c)


def implicit(update: Update, memory: int, most: int = 200) -> Callable[..., Array]:
    """``solve(weights, x, forward, backward)``: the fixed point, with the gradient by the weights.

    The adjoint system ``u = g + (df/dz)^T u`` is solved for the whole batch by BiCGSTAB, whose products
    are two a step and hardly anything besides; Anderson's loop takes 1.2 times as long a step there.
    """

    @jax.custom_vjp
    def solve(weights: Any, x: Array, forward: Array, backward: Array) -> Array:
        z0 = jnp.zeros_like(x)
        return anderson(lambda z: update(z, weights, x), z0, forward, memory, most)

    def save(weights: Any, x: Array, forward: Array, backward: Array) -> tuple[Array, Any]:
        z = solve(weights, x, forward, backward)
        return z, (z, weights, x, backward)

    def pull(saved: Any, cotangent: Array) -> tuple[Any, None, None, None]:
        z, weights, x, backward = saved
        _, product = jax.vjp(lambda z, weights: update(z, weights, x), z, weights)
        u, _ = bicgstab(lambda u: u - product(u)[0], cotangent, tol=backward, maxiter=most)
        return product(u)[1], None, None, None

    solve.defvjp(save, pull)
    return solve
