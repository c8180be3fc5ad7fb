"""Evaluations of a map, and products with its Jacobian, by compiled programs.

A solve by them is the ordinary one: a program makes what ``f`` would have made. What does not depend on the
state is computed once a solve, by the first of its programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.compiled.inputs import Given, Padding
from solvers.compiled.packing import pack, unpack
from solvers.compiled.programs import Weights
from solvers.core.jacobian import gradients
from solvers.core.layout import leaves_of, map_tensors
from solvers.core.modes import constant_weights, without_autocast
from solvers.core.problem import Problem


@dataclass(frozen=True)
class Wanted:
    """Which inputs of the map ask for a gradient, by their place or name."""

    leaves: tuple[int, ...]  # among the leaves of the arguments
    weights: tuple[str, ...]

    @classmethod
    def of(cls, args: Any, weights: dict[str, Tensor]) -> Wanted:
        leaves = enumerate(leaves_of(args))
        return cls(
            tuple(n for n, leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad),
            tuple(name for name, weight in weights.items() if weight.requires_grad),
        )

    def inputs(self, args: Any, weights: dict[str, Tensor]) -> list[Tensor]:
        leaves = leaves_of(args)
        return [leaves[n] for n in self.leaves] + [weights[name] for name in self.weights]


class Evaluation:
    """``f(z)``, or ``(f(z), E(z), dE/dz)`` of a problem with an energy, at states like ``start`` (B, D)."""

    def __init__(self, problem: Problem, start: Tensor) -> None:
        programs = self.programs = problem.programs
        self.padding = Padding.of(problem, start)
        given = Given.of(problem, self.padding)
        parts = [pack(self.padding.rows(start)), given]
        key = ("evaluation", problem.static_key())

        def evaluate(z: Tensor, inside: Given) -> Any:
            own = inside.problem(problem)
            return own.joint(z) if own.has_energy else own.image(z)

        with torch.no_grad(), without_autocast(start.device.type):
            (self.run,), self.after = programs.stages(evaluate, key, parts, programs.weights())

    def __call__(self, z: Tensor) -> Any:
        padding = self.padding
        with torch.no_grad(), without_autocast(z.device.type):
            self.programs.begin(z.device)
            found = unpack(list(self.run(padding.rows(z.detach()))), self.after)
        return map_tensors(padding.own, found)


class Linearization:
    """Products ``J^T u`` at a state z (B, D), and with one of them the gradients of inputs."""

    def __init__(self, problem: Problem, z: Tensor, wanted: Wanted, weights: Weights) -> None:
        programs = self.programs = problem.programs
        self.problem, self.wanted = problem, wanted
        self.inputs = wanted.inputs(problem.args, weights.tensors)
        padding = self.padding = Padding.of(problem, z)
        rows = padding.rows(z.detach())
        parts = [pack(torch.empty_like(rows)), pack(rows), Given.of(problem, padding)]
        key = ("product", problem.static_key(), wanted)
        which = (slice(1), slice(None))
        with torch.no_grad(), without_autocast(z.device.type):
            (self.one, self.all), self.after = programs.stages(
                self._images, key, parts, weights, which
            )

    def product(self, u: Tensor) -> Tensor:
        """``J^T u``."""
        with torch.no_grad(), without_autocast(u.device.type):
            self.programs.begin(u.device)
            return self.padding.own(self.one(self.padding.zeros(u))[0])

    def gradients(self, u: Tensor) -> list[Tensor | None]:
        """``(df/dinput)^T u`` for what is wanted."""
        with torch.no_grad(), without_autocast(u.device.type):
            self.programs.begin(u.device)
            found = unpack(list(self.all(self.padding.zeros(u))), self.after)
        return self.padding.gradients(found[1:], self.inputs)

    def _images(self, u: Tensor, z: Tensor, given: Given) -> list[Tensor | None]:
        """``J(z)^T u`` and ``(df/dinput)^T u``, within a program."""
        own, programs = given.problem(self.problem), self.programs
        leaves, spec = pytree.tree_flatten(own.args)
        for number in self.wanted.leaves:
            leaves[number] = leaves[number].detach().requires_grad_()
        weights = programs.traced_weights()
        for name in self.wanted.weights:
            weights[name] = weights[name].detach().requires_grad_()
        args = pytree.tree_unflatten(leaves, spec)
        with torch.enable_grad(), constant_weights():
            point = z.detach().requires_grad_()
            output = programs.within(weights, replace(own, args=args).masked_map, point)
        variables: Sequence[Tensor] = [point, *self.wanted.inputs(args, weights)]
        found = gradients(output, variables, u)
        return [torch.zeros_like(u) if found[0] is None else found[0], *found[1:]]
