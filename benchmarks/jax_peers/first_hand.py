"""A jitted Anderson loop with an implicit gradient, in 40 lines as one writes them first; no program."""
# pyright: reportMissingImports=false, reportFunctionMemberAccess=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Update = Callable[[Array, Any, Array], Array]  # (z, weights, x) -> like z


def anderson(f: Any, z: Array, tolerance: Array, memory: int = 5, most: int = 200) -> Array:
    """The fixed point of ``f`` (B, N, D): each sample mixes its last ``memory`` images."""
    shape, unit = z.shape, jnp.eye(memory)

    def image(z: Array) -> Array:
        return f(z.reshape(shape)).reshape(shape[0], -1)

    def unfinished(s: Any) -> Array:
        count, _, _, _, error = s
        return (count < most) & (error > tolerance)

    def step(s: Any) -> Any:
        count, z, images, residuals, _ = s
        fz = image(z)
        residual = fz - z
        images = images.at[:, count % memory].set(fz)
        residuals = residuals.at[:, count % memory].set(residual)
        used = (jnp.arange(memory) <= count).astype(z.dtype)
        gram = jnp.einsum("bmn,bkn->bmk", residuals, residuals)
        scale = jnp.trace(gram, axis1=1, axis2=2)[:, None, None] + 1e-30
        gram = gram / scale + (1e-7 + 1 - used) * unit
        weights = jnp.linalg.solve(gram, jnp.broadcast_to(used, gram.shape[:2])[..., None])
        weights = weights / weights.sum(1, keepdims=True)
        error = (jnp.linalg.norm(residual, axis=1) / jnp.linalg.norm(fz, axis=1)).max()
        return count + 1, (weights * images).sum(1), images, residuals, error

    z = z.reshape(shape[0], -1)
    none = jnp.zeros((shape[0], memory, z.shape[1]), z.dtype)
    return lax.while_loop(unfinished, step, (0, z, none, none, jnp.inf))[1].reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def implicit(update: Update, weights: Any, x: Array, forward: Array, backward: Array) -> Array:
    """The fixed point of ``update``, with the gradient by the weights."""
    return anderson(lambda z: update(z, weights, x), jnp.zeros_like(x), forward)


def _save(
    update: Update, weights: Any, x: Array, forward: Array, backward: Array
) -> tuple[Array, Any]:
    z = implicit(update, weights, x, forward, backward)
    return z, (z, weights, x, backward)


def _pull(update: Update, saved: Any, cotangent: Array) -> tuple[Any, None, None, None]:
    z, weights, x, backward = saved
    _, product = jax.vjp(lambda z, weights: update(z, weights, x), z, weights)
    u = anderson(lambda u: product(u)[0] + cotangent, cotangent, backward)
    return product(u)[1], None, None, None


implicit.defvjp(_save, _pull)
