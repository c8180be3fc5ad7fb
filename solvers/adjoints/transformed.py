""":func:`solvers.fixed_point` inside of ``torch.func``'s transforms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.adjoints.implicit import Record, record_at
from solvers.adjoints.kinds import Adjoint, Implicit, OneStep, Phantom, lost, without_derivative
from solvers.adjoints.substitution import captured_by
from solvers.adjoints.transforms import Operation, refuse_forward_transforms, transformed_value
from solvers.core.layout import Layout
from solvers.core.problem import EnergyUpdate, Problem
from solvers.core.solution import AdjointReport, Solution
from solvers.core.tolerance import Tolerance, criterion


@dataclass(frozen=True)
class Transformed:
    """One call of ``fixed_point`` whose tensors may be those of a transform.

    Args:
        solve: ``fixed_point`` without a gradient, ``solve(f, z0, args, energy=..., mask=...)``.
        adjoint, tolerance, compact: those of the call.
    """

    solve: Callable[..., Solution]
    adjoint: Adjoint | None
    tolerance: Tolerance | None
    compact: bool

    def __call__(
        self,
        f: Callable[..., Any],
        energy: Callable[..., Tensor] | None,
        z0: Any,
        args: tuple[Any, ...],
        mask: Any,
    ) -> Solution:
        report = AdjointReport()

        def run(f: Any, energy: Any, z0: Any, args: Any, mask: Any) -> Solution:
            solution = self.solve(f, z0, args, energy=energy, mask=mask)
            vector = Layout.of(z0).vector
            solution.value = vector(solution.value)
            if solution.states is not None:
                solution.states = tuple(vector(state) for state in solution.states)
            return solution

        def recorded(f: Any, energy: Any, z0: Any, args: Any, mask: Any, value: Tensor) -> Record:
            return self._record(Problem.of(f, energy, z0, args, mask, self.compact), value, report)

        def evaluate(z0: Any, *args: Any) -> object:
            joint = f.joint if isinstance(f, EnergyUpdate) else f
            return joint(z0, *args), None if energy is None else energy(z0, *args)

        leaves, tree = pytree.tree_flatten((z0, args, mask))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        captured = captured_by(evaluate, (z0, *args), tensors)
        operation = Operation(f, energy, leaves, tree, captured, run, recorded, self.compact)
        implicit = isinstance(self.adjoint, Implicit)
        found = transformed_value(operation, [*tensors, *captured], attach=implicit)
        near = self.adjoint
        if isinstance(near, Implicit):
            near = near.states or OneStep()
        if isinstance(near, (Phantom, OneStep)):
            problem = Problem.of(f, energy, z0, args, mask, self.compact)
            states = found["states"]
            gone = lost(found["status"], found["residual"])
            found["states"] = states and tuple(
                without_derivative(near.attach(problem, state), gone) for state in states
            )
            if not implicit:
                found["value"] = near.attach(problem, found["value"])
            found["value"] = without_derivative(found["value"], gone)
        tree = Layout.of(z0).tree
        found["value"] = tree(found["value"])
        if found["states"] is not None:
            found["states"] = tuple(tree(state) for state in found["states"])
        return Solution(**found, adjoint=report)

    def _record(self, problem: Problem, value: Tensor, report: AdjointReport) -> Record:
        assert isinstance(self.adjoint, Implicit)
        chosen, _ = criterion(self.tolerance, value.dtype, problem.autocast)
        system = self.adjoint.system(report, chosen, value.shape[0], None)
        return record_at(problem, value, system)


def refuse_in_transform(adjoint: Adjoint | None, *, record: bool) -> None:
    """Raise where a transform cannot pass: forward mode, a recorded or an unrolled solve."""
    refuse_forward_transforms()
    if record or not (adjoint is None or isinstance(adjoint, (Implicit, Phantom, OneStep))):
        raise RuntimeError(
            "inside of torch.func's transforms fixed_point needs adjoint=Implicit(), Phantom(), "
            "OneStep() or None, or Unrolled() without callback, and record=False; got "
            f"adjoint={adjoint!r}, record={record}"
        )
