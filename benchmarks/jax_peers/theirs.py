"""Answers for the contestants in JAX: ``benchmarks/vs_jax.py`` starts it in the environment of JAX."""
# pyright: reportMissingImports=false, reportFunctionMemberAccess=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import linear_call

from benchmarks.jax_peers import first_hand, hand, mean_field
from benchmarks.jax_peers.libraries import LIBRARIES, Solve, Update
from benchmarks.jax_peers.protocol import Arrays, Contestant, serve

PACKAGES = ("jax", "jaxopt", "optimistix", "lineax")
MEMORY = 5
CALLS = {"f": 0, "vjp": 0, "jvp": 0}
MAKERS: dict[str, Callable[[Update], Solve]] = {
    "hand-jitted": lambda update: hand.implicit(update, MEMORY),
    "hand-jitted, first version": lambda update: partial(first_hand.implicit, update),
    **LIBRARIES,
    **{f"{name}, plain map": LIBRARIES[name] for name in ("jaxopt Anderson", "jaxopt iteration")},
}
# With the map as one writes it first, in the layout (B, N, D).
PLAIN = {name for name in MAKERS if name.endswith(("first version", "plain map", "its adjoint"))}


class Jitted:
    """A training step in JAX: the fixed point and the gradients by the weights, in one program."""

    def __init__(self, make: Callable[[Update], Solve], arrays: Arrays, plain: bool) -> None:
        self.weights = tuple(jnp.asarray(arrays[name]) for name in mean_field.WEIGHTS)
        self.make, self.arrays, self.plain = make, arrays, plain
        self.program, self.counting = self._compiled(False), self._compiled(True)

    def _compiled(self, counted: bool) -> Callable[..., Any]:
        """The step as a function of the tolerances, compiled at its first call."""
        arrays, plain = self.arrays, self.plain
        update = mean_field.plain_update if plain else mean_field.update
        inner = mean_field.plain_inner if plain else mean_field.inner
        solve = self.make(_counting(update) if counted else update)
        sites, dim = arrays["x"].shape[1:]
        blocks = jnp.asarray(arrays["blocks"])
        x, cotangent = (jnp.asarray(self._turned(arrays[name])) for name in ("x", "cotangent"))

        def step(weights: Any, x: Array, cotangent: Array, forward: Array, backward: Array) -> Any:
            def solution(weights: Any) -> Array:
                return solve(inner(weights, blocks, sites, dim), x, forward, backward)

            z, pull = jax.vjp(solution, weights)
            return z, pull(cotangent)[0]

        # x and the cotangent are arguments: as constants the compiler would work on them beforehand.
        program = jax.jit(step)
        return lambda *tolerances: program(self.weights, x, cotangent, *tolerances)

    def run(self, forward: float, backward: float) -> Any:
        return jax.block_until_ready(self.program(np.float32(forward), np.float32(backward)))

    def read(self, result: Any) -> Arrays:
        z, gradients = result
        found = {n: np.asarray(g) for n, g in zip(mean_field.WEIGHTS, gradients, strict=True)}
        return found | {"z": self._turned(np.asarray(z))}

    def count(self, forward: float, backward: float) -> tuple[int, int]:
        CALLS.update(f=0, vjp=0, jvp=0)
        jax.block_until_ready(self.counting(np.float32(forward), np.float32(backward)))
        jax.effects_barrier()
        return CALLS["f"], CALLS["vjp"] + CALLS["jvp"]

    def _turned(self, array: Any) -> Any:
        """(B, N, D) to the order of the map, and back."""
        return array if self.plain else np.ascontiguousarray(array.transpose(2, 1, 0))


def _counting(update: Update) -> Update:
    """The update, which counts its calls and those of its derivative and of the transpose of that."""

    def tick(name: str, z: Array) -> Array:
        jax.debug.callback(lambda: CALLS.__setitem__(name, CALLS[name] + 1))
        return z

    @jax.custom_jvp
    def counted(z: Array) -> Array:
        return tick("f", z)

    @counted.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        forward, transposed = (lambda _, t, name=name: tick(name, t) for name in ("jvp", "vjp"))
        return tick("f", primals[0]), linear_call(forward, transposed, (), tangents[0])

    return lambda z, weights, x: update(counted(z), weights, x)


def load(arrays: Arrays) -> dict[str, Contestant]:
    return {name: Jitted(make, arrays, name in PLAIN) for name, make in MAKERS.items()}


if __name__ == "__main__":
    serve(list(MAKERS), {name: version(name) for name in PACKAGES}, load)
