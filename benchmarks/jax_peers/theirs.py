"""Answers for the contestants in JAX: ``benchmarks/vs_jax.py`` starts it in the environment of JAX.

The map of ``benchmarks/step.py``'s MeanField, loops jitted by hand for XLA on CPUs (samples in the last
dimension, a ring of differences that is updated in place, a Cholesky factorisation unrolled over samples),
and the solvers of jaxopt with the settings that were fastest here.
"""
# pyright: reportMissingImports=false, reportFunctionMemberAccess=false

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxopt
import numpy as np
from jax import Array, lax
from jax.scipy.sparse.linalg import bicgstab
from jaxopt.linear_solve import solve_bicgstab

from benchmarks.jax_peers.protocol import Arrays, Contestant, serve

Update = Callable[[Array, Any, Array], Array]  # (z, weights, x) -> like z
Solve = Callable[[Any, Array, Array, Array], Array]  # weights, x, forward and backward tolerances
Loop = Callable[[Callable[[Array], Array], Array, Array], Array]  # f, start, tolerance
Adjoint = Loop  # product, right side, tolerance

# ---- the map ----------------------------------------------------------------------------------------

WEIGHTS = ("raw", "first.weight", "first.bias", "second.weight", "second.bias")
Weights = tuple[Array, ...]  # in that order


@jax.custom_jvp
def gelu(h: Array) -> Array:
    """``h Phi(h)``: jax.nn.gelu's erfc takes twice as long as erf."""
    return 0.5 * h * (1 + lax.erf(h * math.sqrt(0.5)))


@gelu.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (h,), (change,) = primals, tangents
    below = 0.5 * (1 + lax.erf(h * math.sqrt(0.5)))
    # One array to multiply by: it does not change while the adjoint is solved.
    slope = below + h * jnp.exp(-0.5 * h * h) / math.sqrt(2 * math.pi)
    return h * below, change * slope


def inner(weights: Weights, blocks: Array, sites: int, dim: int) -> Weights:
    """The weights that the map takes: couplings symmetric, in the order (D, N) of the state."""
    raw, *others = weights
    couplings = (raw + raw.T) / 2 * blocks
    couplings = couplings.reshape(sites, dim, sites, dim).transpose(1, 0, 3, 2)
    return (couplings.reshape(sites * dim, sites * dim), *others)


def update(z: Array, weights: Weights, x: Array) -> Array:
    """f(z, x): (D, N, B) -> (D, N, B)."""
    couplings, first, first_bias, second, second_bias = weights
    hidden = gelu(first @ z.reshape(len(z), -1) + first_bias[:, None])
    forward = (second @ hidden + second_bias[:, None]).reshape(z.shape)
    return (couplings @ z.reshape(-1, z.shape[-1])).reshape(z.shape) - forward + x


def plain_inner(weights: Weights, blocks: Array, sites: int, dim: int) -> Weights:
    """The weights that ``plain_update`` takes."""
    raw, *others = weights
    return ((raw + raw.T) / 2 * blocks, *others)


def plain_update(z: Array, weights: Weights, x: Array) -> Array:
    """f(z, x): (B, N, D) -> (B, N, D), as one writes it first."""
    couplings, first, first_bias, second, second_bias = weights
    field = (z.reshape(len(z), -1) @ couplings.T).reshape(z.shape)
    hidden = jax.nn.gelu(z @ first.T + first_bias, approximate=False)
    return field - (hidden @ second.T + second_bias) + x


# ---- a loop jitted by hand ------------------------------------------------------------------------------

RIDGE, TINY = 1e-6, 1e-30
MEMORY, MOST = 5, 200  # residuals that are mixed; evaluations of a loop


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


def anderson(f: Callable[[Array], Array], z: Array, tolerance: Array) -> Array:
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
        slot = (s.count - 2) % MEMORY
        change = s.residual - s.last[1]
        changes = lax.dynamic_update_index_in_dim(s.changes, change, slot, 0)
        images = lax.dynamic_update_index_in_dim(s.images, s.fz - s.last[0], slot, 0)
        row, right = (changes * change).sum((1, 2)), (changes * s.residual).sum((1, 2))
        gram = lax.dynamic_update_index_in_dim(s.gram, row, slot, 0)
        gram = lax.dynamic_update_index_in_dim(gram, row, slot, 1)
        weights = solve_small(gram, right)
        mixed = s.fz - sum(weights[i] * images[i] for i in range(MEMORY))
        z = jnp.where(s.done, s.z, mixed)
        return advance(s, z, changes=changes, images=images, gram=gram)

    def unfinished(s: State) -> Array:
        return (s.count < MOST) & ~s.done.all()

    none = jnp.zeros((MEMORY, *z.shape), z.dtype)
    gram = jnp.zeros((MEMORY, MEMORY, z.shape[-1]), z.dtype)
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


def implicit(update: Update, loop: Loop, adjoint: Adjoint) -> Solve:
    """The fixed point by a ``loop``, with its gradient; ``adjoint`` solves ``u = g + (df/dz)^T u``."""

    @jax.custom_vjp
    def solve(weights: Any, x: Array, forward: Array, backward: Array) -> Array:
        return loop(lambda z: update(z, weights, x), jnp.zeros_like(x), forward)

    def save(weights: Any, x: Array, forward: Array, backward: Array) -> tuple[Array, Any]:
        z = solve(weights, x, forward, backward)
        return z, (z, weights, x, backward)

    def pull(saved: Any, cotangent: Array) -> tuple[Any, None, None, None]:
        z, weights, x, backward = saved
        _, product = jax.vjp(lambda z, weights: update(z, weights, x), z, weights)
        u = adjoint(lambda u: product(u)[0], cotangent, backward)
        return product(u)[1], None, None, None

    solve.defvjp(save, pull)
    return solve


def by_bicgstab(product: Callable[[Array], Array], right: Array, tolerance: Array) -> Array:
    """For the whole batch."""
    return bicgstab(lambda u: u - product(u), right, tol=tolerance, maxiter=MOST)[0]


# ---- the same as one writes it first, in 40 lines -------------------------------------------------------


def plain_anderson(f: Any, z: Array, tolerance: Array) -> Array:
    """The fixed point of ``f`` (B, N, D): each sample mixes its last MEMORY images."""
    shape, unit = z.shape, jnp.eye(MEMORY)

    def image(z: Array) -> Array:
        return f(z.reshape(shape)).reshape(shape[0], -1)

    def unfinished(s: Any) -> Array:
        count, _, _, _, error = s
        return (count < MOST) & (error > tolerance)

    def step(s: Any) -> Any:
        count, z, images, residuals, _ = s
        fz = image(z)
        residual = fz - z
        images = images.at[:, count % MEMORY].set(fz)
        residuals = residuals.at[:, count % MEMORY].set(residual)
        used = (jnp.arange(MEMORY) <= count).astype(z.dtype)
        gram = jnp.einsum("bmn,bkn->bmk", residuals, residuals)
        scale = jnp.trace(gram, axis1=1, axis2=2)[:, None, None] + 1e-30
        gram = gram / scale + (1e-7 + 1 - used) * unit
        weights = jnp.linalg.solve(gram, jnp.broadcast_to(used, gram.shape[:2])[..., None])
        weights = weights / weights.sum(1, keepdims=True)
        error = (jnp.linalg.norm(residual, axis=1) / jnp.linalg.norm(fz, axis=1)).max()
        return count + 1, (weights * images).sum(1), images, residuals, error

    z = z.reshape(shape[0], -1)
    none = jnp.zeros((shape[0], MEMORY, z.shape[1]), z.dtype)
    return lax.while_loop(unfinished, step, (0, z, none, none, jnp.inf))[1].reshape(shape)


def by_plain_anderson(product: Callable[[Array], Array], right: Array, tolerance: Array) -> Array:
    return plain_anderson(lambda u: product(u) + right, right, tolerance)


# ---- jaxopt ---------------------------------------------------------------------------------------------

LIBRARY_MOST = 400


def jaxopt_solver(kind: Any, *, tuned: bool = True) -> Callable[[Update], Solve]:
    """A solver of jaxopt, its adjoint by BiCGSTAB; not ``tuned``, by jaxopt's conjugate gradients."""

    def make(update: Update) -> Solve:
        def solve(weights: Any, x: Array, forward: Array, backward: Array) -> Array:
            def adjoint(matvec: Any, right: Any, **options: Any) -> Any:
                return solve_bicgstab(matvec, right, tol=backward, **options)

            # The tolerance is that of the residual's norm, of the whole batch.
            tolerance = forward * jnp.linalg.norm(x)
            options = {"implicit_diff_solve": adjoint} if tuned else {}
            solver = kind(update, tol=tolerance, maxiter=LIBRARY_MOST, **options)
            return solver.run(jnp.zeros_like(x), weights, x).params

        return solve

    return make


LIBRARIES: dict[str, Callable[[Update], Solve]] = {
    "jaxopt Anderson": jaxopt_solver(jaxopt.AndersonAcceleration),
    "jaxopt iteration": jaxopt_solver(jaxopt.FixedPointIteration),
    "jaxopt Anderson, its adjoint": jaxopt_solver(jaxopt.AndersonAcceleration, tuned=False),
    "jaxopt iteration, its adjoint": jaxopt_solver(jaxopt.FixedPointIteration, tuned=False),
}


# ---- the contestants ------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Update], Solve]] = {
    "hand-jitted": lambda update: implicit(update, anderson, by_bicgstab),
    "hand-jitted, first version": lambda update: implicit(
        update, plain_anderson, by_plain_anderson
    ),
    **LIBRARIES,
    **{f"{name}, plain map": LIBRARIES[name] for name in ("jaxopt Anderson", "jaxopt iteration")},
}
# With the map as one writes it first, in the layout (B, N, D).
PLAIN = {name for name in MAKERS if name.endswith(("first version", "plain map", "its adjoint"))}


class Jitted:
    """A training step in JAX: the fixed point and the gradients by the weights, in one program."""

    def __init__(self, make: Callable[[Update], Solve], arrays: Arrays, plain: bool) -> None:
        self.weights = tuple(jnp.asarray(arrays[name]) for name in WEIGHTS)
        self.plain = plain
        to_map = plain_inner if plain else inner
        solve = make(plain_update if plain else update)
        sites, dim = arrays["x"].shape[1:]
        blocks = jnp.asarray(arrays["blocks"])
        x, cotangent = (jnp.asarray(self._turned(arrays[name])) for name in ("x", "cotangent"))

        def step(weights: Any, x: Array, cotangent: Array, forward: Array, backward: Array) -> Any:
            def solution(weights: Any) -> Array:
                return solve(to_map(weights, blocks, sites, dim), x, forward, backward)

            z, pull = jax.vjp(solution, weights)
            return z, pull(cotangent)[0]

        # x and the cotangent are arguments: as constants the compiler would work on them beforehand.
        program = jax.jit(step)
        self.program = lambda *tolerances: program(self.weights, x, cotangent, *tolerances)

    def run(self, forward: float, backward: float) -> Any:
        return jax.block_until_ready(self.program(np.float32(forward), np.float32(backward)))

    def read(self, result: Any) -> Arrays:
        z, gradients = result
        found = {n: np.asarray(g) for n, g in zip(WEIGHTS, gradients, strict=True)}
        return found | {"z": self._turned(np.asarray(z))}

    def _turned(self, array: Any) -> Any:
        """(B, N, D) to the order of the map, and back."""
        return array if self.plain else np.ascontiguousarray(array.transpose(2, 1, 0))


def load(arrays: Arrays) -> dict[str, Contestant]:
    return {name: Jitted(make, arrays, name in PLAIN) for name, make in MAKERS.items()}


if __name__ == "__main__":
    serve(list(MAKERS), {name: version(name) for name in ("jax", "jaxopt")}, load)
