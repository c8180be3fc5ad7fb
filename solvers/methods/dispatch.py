"""Run one solver: in C++ on CPUs, in turns on CUDA devices, and otherwise by the loop in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from solvers.core.loop import Loop, Options, Solver
from solvers.core.problem import Problem
from solvers.core.rows import Evaluation
from solvers.core.solution import Solution
from solvers.methods import turns
from solvers.methods.anderson import Anderson
from solvers.methods.steps import Forward
from solvers.native import MOST, Turns, solve_native, supports


class Rows(Protocol):
    """A solve whose rows can be replaced by new samples; each row is at an evaluation of its own.

    A row that has ended stays until it is replaced or left out.
    """

    problem: Problem  # of the rows

    @property
    def status(self) -> Tensor:
        """(n,) statuses of the rows."""
        ...

    def evaluate(self) -> None:
        """Evaluate the map at the next points."""
        ...

    def move(self) -> int:
        """Judge the rows, and find the next point of each; return how many go on."""
        ...

    def put(self, places: Tensor, z: Tensor) -> None:
        """Replace the samples in the rows ``places`` (n,) by new ones that start at ``z`` (n, D)."""
        ...

    def keep(self, stay: Tensor) -> bool:
        """Let only the rows ``stay`` go on; False where the number of rows is fixed."""
        ...

    def wait(self) -> int:
        """Let rows that have ended be evaluated at their values; return how many of them go on instead."""
        ...

    def record_of(self, places: Tensor) -> Any:
        """What is known of the rows ``places``: a tensor, a record or a tuple of them; see :meth:`read`."""
        ...

    def read(self, record: Any) -> tuple[Solution, Evaluation | Tensor]:
        """The solution of rows, with a value (n, D), and their latest evaluation, or f there.

        Args:
            record: of all rows, of several results of :meth:`record_of`.
        """
        ...


def refilled(problem: Problem, first: Evaluation, solver: Solver, options: Options) -> Rows:
    """Begin a solve whose rows can be replaced, from the ``first`` evaluation, by the fastest way."""
    plain = _plain(problem, first, options)
    if plain and type(solver) is Anderson and turns.supports_cuda(first.z):
        return turns.Rows.of(problem, first, solver, options)
    if plain and (numbers := _in_cpp(first, solver)) is not None:
        return Turns(problem, first, *numbers, options)
    return Loop(problem, first, solver, options, refilled=True)


def run_solver(
    problem: Problem, first: Evaluation, solver: Solver, options: Options
) -> tuple[Solution, Callable[[], Evaluation] | None]:
    """Solve from the evaluation ``first`` at the start.

    The C++ engine supports Anderson acceleration and plain steps in float32 and float64 on a CPU. The turns
    support Anderson acceleration in float32 and half precision on CUDA devices. Both need maps without
    an energy, a trace, a callback or a measure, and no autograd.

    Returns:
        The solution, with a value (B, D), and a function that gives the last evaluation if it included all
        samples at their returned values, else None.
    """
    plain = _plain(problem, first, options)
    if plain and type(solver) is Anderson and turns.supports_cuda(first.z):
        solution, last = turns.solve_on_cuda(problem, first, solver, options)
        if solution is not None:
            return solution, last
    if plain and (numbers := _in_cpp(first, solver)) is not None:
        return solve_native(problem, first, *numbers, options)
    loop = Loop(problem, first, solver, options)
    del first  # the loop frees it when it has moved on
    return loop.run(), None


def _plain(problem: Problem, first: Evaluation, options: Options) -> bool:
    """Whether the engines serve: they know no energies, and round the residual to the size of z."""
    general = options.watched or problem.measure is not None or len(first.sizes) > MOST
    return not (general or problem.has_energy or problem.unit_free)


def _in_cpp(first: Evaluation, solver: Solver) -> tuple[int, tuple[float, float, float]] | None:
    """The number of differences and the numbers for the C++ engine, where it serves."""
    if not supports(first.z):
        return None
    if isinstance(solver, Anderson) and type(solver) is Anderson and solver.memory <= MOST:
        return solver.memory, (solver.damping, *solver.ridge(first.z.dtype))
    if isinstance(solver, Forward) and type(solver) is Forward:
        return 0, (solver.damping, 0.0, 0.0)
    return None
