"""The compiled adjoint of a fixed point; what it does not solve is left to the ordinary code."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from solvers.compiled.cycles import Ended, Outcome, Solve, Wanted
from solvers.compiled.inputs import Given, Padding
from solvers.compiled.packing import Packed, Skeleton, pack, unpack
from solvers.compiled.turns import one_by_one
from solvers.compiled.weights import Weights
from solvers.core.guards.native import native_steps, wanting_native_steps
from solvers.core.modes import without_autocast
from solvers.core.problem import Problem
from solvers.core.solution import Solution
from solvers.core.tolerance import Tolerance
from solvers.krylov.cg import CG
from solvers.krylov.gmres import GMRES
from solvers.krylov.loop import GAP, HALVED
from solvers.krylov.method import LinearSolver
from solvers.native.systems import GOES_ON, SOLVED, Limits, Systems, fits

if TYPE_CHECKING:
    from solvers.compiled.graphs.stages import Bound

TRACEABLE = (CG, GMRES)  # methods whose steps are operations on tensors alone


def compiled_adjoint(
    problem: Problem,
    z: Tensor,
    right: Tensor,
    solver: LinearSolver,
    tolerance: Tolerance,
    max_steps: int,
    wanted: Wanted,
    weights: Weights,
) -> tuple[Solution, list[Tensor | None]] | None:
    """``u`` with ``(I - J(z)^T) u = right``, both (B, D), and ``(df/dinput)^T u`` for what is ``wanted``.

    ``weights`` are those of the solve. None where some sample was not solved.
    """
    if not isinstance(solver, TRACEABLE) or z.dtype not in (torch.float32, torch.float64):
        return None
    batch = z.shape[0]
    padding, given = problem.given or (Padding.of(problem, z), None)
    given = given or Given.of(problem, padding, None)
    kind = InTurns if one_by_one(problem.programs, z.device) else Solve
    solve = kind(problem, solver, wanted, weights, pack(padding.rows(z.detach())), given)
    problem.programs.begin(z.device)
    with torch.no_grad(), without_autocast(z.device.type):
        found = solve.run(
            padding.zeros(right.detach().resolve_neg()), tolerance.rows(padding.index), max_steps
        )
        if found is None:
            return None
        rows = found.rows if padding.index is None else [t[:batch] for t in found.rows]
        u, size, relative, steps, products = rows
        solution = Solution(
            value=u,
            status=torch.zeros_like(steps),  # CONVERGED
            residual=relative,
            residual_norm=size,
            steps=steps,
            evaluations=products,
        )
    gradients = padding.gradients(found.gradients, wanted.inputs(problem.args, weights.tensors))
    if z.device.type == "cuda":  # else a later program may write there
        gradients = [None if g is None else g.clone() for g in gradients]
    return solution, gradients


class InTurns(Solve):
    """The same on a CPU, one product after another: a program multiplies, the method goes on by itself."""

    @cached_property
    def _programs(self) -> tuple[list[Bound], Skeleton]:
        """``J^T u`` of a vector u, and that with all gradients; the evaluation at z has been made."""
        programs = self.problem.programs
        parts = [pack(torch.empty_like(self.z.tensors[0])), self.z, self.given]
        key = ("product", self.problem.static_key(), self.wanted)
        wanted = (slice(1), slice(None))
        return programs.stages(self._images, key, parts, self.weights, wanted)

    def run(self, right: Tensor, tolerance: Tolerance, max_steps: int) -> Outcome | None:
        solver = self.solver
        restart = solver.restart if isinstance(solver, GMRES) else None
        if type(solver) not in TRACEABLE or not fits(right, restart):
            return super().run(right, tolerance, max_steps)
        with wanting_native_steps():
            steps = native_steps(right)
        if steps is None:
            return super().run(right, tolerance, max_steps)
        limits = Limits(tolerance.rtol, tolerance.atol, GAP, HALVED)
        systems = Systems(right, restart, limits, steps)
        return self._solved(systems, max_steps) if systems.running >= 0 else None

    def _solved(self, systems: Systems, max_steps: int) -> Outcome | None:
        """:meth:`_cycles` with all but the products in C++."""
        (product, images), after = self._programs
        made = spent = 0  # products; those that are told of a sample
        while True:
            most = min(systems.restart or max_steps, max_steps - spent)
            while systems.running and systems.step < most:
                systems.absorb(product(systems.direction)[0])
            made += systems.step + 1
            image, *gradients = unpack(list(images(systems.correct())), after)
            outcome = systems.verify(image)
            if outcome != SOLVED or made > max_steps:
                spent = int(systems.products.max())
            if spent > max_steps:  # by the one that verified
                return None
            if outcome == SOLVED:
                break
            if outcome != GOES_ON or spent + 1 >= max_steps:
                return None
        systems.close()
        own = systems
        return Outcome((own.u, own.size, own.relative, own.steps, own.products), gradients)

    def _cycle(self, start: Packed, before: Packed, budget: int) -> Ended:
        (product, images), after = self._programs
        with wanting_native_steps():
            run = self.solver.start(*start.record())
        for _ in range(budget):
            if run.exhausted or not run.running.any():
                break
            run.absorb_image(product(run.direction)[0].resolve_neg())
        u, right, limit = before.record()
        step, left = run.final()
        found = unpack(list(images(u + step)), after)
        return self._ended(run, step, run.arrays.write(left), (u, right, limit), found)
