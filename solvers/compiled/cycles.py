"""The programs of an adjoint solve: blocks of Krylov steps with products by autograd.

``(I - J^T) u = g`` is solved by cycles of GMRES or CG as in :mod:`solvers.krylov.loop`. The program that
ends a cycle differentiates the evaluation by everything that asks for a gradient; the product ``J^T u``
that comes along with it verifies the residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.compiled.inputs import Given
from solvers.compiled.packing import Packed, pack
from solvers.compiled.weights import Weights
from solvers.core.jacobian import gradients, pullback
from solvers.core.layout import leaves_of
from solvers.core.modes import constant_weights
from solvers.core.problem import Problem
from solvers.core.solution import Status
from solvers.core.tolerance import Tolerance
from solvers.krylov.loop import GAP, HALVED
from solvers.krylov.method import KrylovRun, LinearSolver, norm
from solvers.krylov.product import MODERATE

if TYPE_CHECKING:
    pass


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


@dataclass
class Cycle:
    """A cycle of the Krylov method."""

    run: KrylovRun
    running: Tensor  # (B, 1)


@dataclass
class Ended:
    """The end of a cycle; numbers per sample are (B, 1)."""

    u: Tensor  # (B, D)
    residual: Tensor  # (B, D), ``g - (I - J^T) u``
    size: Tensor  # its norm
    used: Tensor  # products of the cycle
    accurate: (
        Tensor  # the recurrence's residual was good enough: no product is counted for this one
    )
    claimed: Tensor  # bool: by the recurrence the target was met
    indefinite: Tensor  # () bool: CG met a direction of non-positive curvature
    gradients: list[Tensor | None]


@dataclass
class Outcome:
    """Solved systems: u (B, D), then norms of residuals, relative ones, steps and products (B,)."""

    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    gradients: Sequence[Tensor | None]


@dataclass
class Solve:
    """The programs of one adjoint solve."""

    problem: Problem
    solver: LinearSolver
    wanted: Wanted
    weights: Weights
    z: Packed
    given: Packed

    def run(self, right: Tensor, tolerance: Tolerance, max_steps: int) -> Outcome | None:
        """The solution for ``right`` (B, D), padded; None where some sample was not solved."""
        reference = norm(right)
        moderate = (reference > 1 / MODERATE) & (reference < MODERATE)
        zero = ~right.any(1, keepdim=True)  # the square of a small number may be 0, too
        if not bool((moderate | zero).all()):
            return None
        found = self._cycles(right, reference, tolerance, max_steps)
        if found is None:
            return None
        ended, size, products, steps = found
        relative = size / reference.clamp_min(1 / MODERATE)  # 0 where the right-hand side is
        numbers = (each.squeeze(1) for each in (size, relative, steps, products))
        return Outcome((ended.u, *numbers), ended.gradients)  # type: ignore[arg-type]

    def _cycles(
        self, right: Tensor, reference: Tensor, tolerance: Tolerance, max_steps: int
    ) -> tuple[Ended, Tensor, Tensor, Tensor] | None:
        """The last cycle's end, residual norms, products and steps; None where a cycle gains too little."""
        limit = tolerance.threshold(reference.squeeze(1)).unsqueeze(1)
        u, residual, size, target = torch.zeros_like(right), right, reference, limit
        steps = products = torch.zeros_like(reference, dtype=torch.int64)
        while True:
            open_rows = size > limit
            start = pack((residual, target, open_rows))
            ended = self._cycle(start, pack((u, right, limit)), max_steps - int(products.max()))
            if bool(ended.indefinite):
                return None
            within = ended.size <= limit
            steps = steps + ended.used
            products = products + ended.used + (open_rows & ~ended.accurate)
            # More are made than asked for where a block goes on, or the last one verifies.
            if bool((within & (products <= max_steps)).all()):
                return ended, ended.size, products, steps
            if int(products.max()) > max_steps:
                return None
            # As in LinearLoop: less may be gained, and the target stays, where a restart ended the cycle.
            less = (1 - torch.finfo(u.dtype).eps ** 0.5) * size
            gained = within | (ended.size <= torch.where(ended.claimed, HALVED * size, less))
            if not bool(gained.all()) or int(products.max()) + 1 >= max_steps:
                return None
            target = torch.where(open_rows & ended.claimed, HALVED * limit, target)
            u, residual, size = ended.u, ended.residual, ended.size

    def _cycle(self, start: Packed, before: Packed, budget: int) -> Ended:
        """Steps until no row runs, the method restarts, or the products are spent."""
        programs = self.problem.programs
        weights, block = self.weights, programs.block
        key = (self.problem.static_key(), self.solver, self.wanted, block)
        cycle = programs.call(self._first, ("adjoint", key), [self.z, self.given, start], weights)
        done = block
        while bool(cycle.get("running").any()) and not cycle.skeleton.record.run.exhausted:
            if done + block > budget:
                break
            parts = [self.z, self.given, cycle]
            cycle = programs.call(self._further, ("more", key), parts, weights)
            done += block
        parts = [self.z, self.given, cycle, before]
        return programs.call(self._last, ("gradients", key), parts, weights).record()

    def _first(self, z: Tensor, given: Given, start: tuple[Tensor, Tensor, Tensor]) -> Cycle:
        return self._further(z, given, Cycle(self.solver.start(*start), start[2]))

    def _further(self, z: Tensor, given: Given, cycle: Cycle) -> Cycle:
        own, run = given.problem(self.problem), cycle.run
        with torch.enable_grad():
            point = z.detach().requires_grad_()
            output = own.masked_map(point)
        product = pullback(output, point)
        for _ in range(self.problem.programs.block):
            if not run.exhausted:
                run.absorb(run.direction - product(run.direction))
        return Cycle(run, run.active)

    def _last(
        self, z: Tensor, given: Given, cycle: Cycle, before: tuple[Tensor, Tensor, Tensor]
    ) -> Ended:
        step, left = cycle.run.final()
        u = before[0] + step
        return self._ended(cycle.run, step, left, before, self._images(u, z, given))

    def _images(self, u: Tensor, z: Tensor, given: Given) -> list[Tensor | None]:
        """``J(z)^T u`` and ``(df/dinput)^T u`` for what is wanted, within a program."""
        own, programs = given.problem(self.problem), self.problem.programs
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
        found = gradients(output, [point, *self.wanted.inputs(args, weights)], u)
        return [torch.zeros_like(u) if found[0] is None else found[0], *found[1:]]

    def _ended(
        self,
        run: KrylovRun,
        step: Tensor,
        left: Tensor,
        before: tuple[Tensor, Tensor, Tensor],
        images: list[Tensor | None],
    ) -> Ended:
        """The outcome of a cycle that ends with ``step``; ``left`` is its residual by the recurrence."""
        u, right, limit = before
        image, *found = images
        assert image is not None
        arrays = run.arrays
        before_step, u = u, u + step
        residual = right - (u - image)
        eps, reference = torch.finfo(u.dtype).eps, norm(right)
        sizes = torch.maximum(norm(u), norm(before_step))
        gap = GAP * eps * (arrays.write(run.matrix_norm) * sizes + reference)
        small = gap <= torch.maximum(left, limit)
        accurate = arrays.write(run.reliable()) & small & (left <= limit)
        verdict = arrays.write(run.verdict())
        indefinite = (verdict == int(Status.INDEFINITE)).any()
        used = arrays.write(run.used)
        claimed = verdict == int(Status.CONVERGED)
        return Ended(u, residual, norm(residual), used, accurate, claimed, indefinite, found)
