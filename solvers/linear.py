"""Linear systems ``A x = b`` for a batch, from products with ``A``: :func:`solvers.solve_linear`.

The system of a backward pass is solved in ``adjoint.py``, by this function where a linear solver is named.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from solvers.core.argument_names import hint_names
from solvers.core.checks import require_callable, require_count, require_flag, require_kind
from solvers.core.layout import Layout, check_args, check_like, leaves_of, take
from solvers.core.modes import eager
from solvers.core.rows import RUNNING, SHRINK, Progress, ratio, true_rows
from solvers.core.solution import Solution, Status, Trace, apply_policy, check_on_failure
from solvers.core.tolerance import Tolerance, read_tolerance
from solvers.krylov import LINEAR, KrylovRun, LinearSolver, VectorMap, identity, norm


def power_of_two(vectors: Tensor) -> Tensor:
    """(n, 1): a power of two about as large as the largest number of each finite row."""
    largest = vectors.abs().amax(1, keepdim=True)
    exponent = torch.frexp(torch.where(largest < torch.inf, largest, 1))[1].clamp(-100, 100)
    return torch.ldexp(torch.ones_like(largest), exponent)


class LinearLoop:
    """One solve by cycles of a Krylov method, each sample until it has converged or cannot.

    A cycle runs the method on ``A d = r`` for the unsolved samples in lockstep, until each has
    converged by its recurrence, has broken down, has one product left, or has reached the restart of
    GMRES. Then one more product gives its true residual, and the sample ends or enters another cycle.
    Vectors (B, D) are divided by a power of two, ``scale``, so that no square overflows.
    """

    def __init__(
        self, matvec: Callable[..., Any], args: tuple[Any, ...], layout: Layout, b: Tensor,
        tolerance: Tolerance, solver: LinearSolver, max_steps: int, compact: bool, record: bool,
        callback: Callable[[Progress], object] | None,
    ) -> None:  # fmt: skip
        self.matvec, self.args, self.layout, self.solver = matvec, args, layout, solver
        self.narrow = any(torch.finfo(dtype).bits < 32 for dtype in layout.dtypes)
        self.max_steps, self.compact = max_steps, compact
        self.columns: list[Tensor] | None = [] if record else None
        self.callback, self.noted = callback, 0  # batches of products so far
        self.scale, finite = power_of_two(b), torch.isfinite(b).all(1, keepdim=True)
        self.b = torch.where(finite, b / self.scale, 0)
        self.x, self.r, self.reference = torch.zeros_like(b), self.b.clone(), norm(self.b)
        self.residual_norm = torch.where(finite, self.reference, torch.inf)
        limit = tolerance.threshold((self.reference * self.scale).squeeze(1))
        self.limit = limit.unsqueeze(1) / self.scale  # residual norm of a converged sample
        self.target = self.limit.clone()  # that at which a cycle ends
        status = torch.where(self.reference > 0, RUNNING, Status.CONVERGED)
        self.status = torch.where(finite, status, Status.NONFINITE)
        self.steps, self.evaluations = torch.zeros_like(status), torch.zeros_like(status)
        self.all_rows = torch.arange(len(b), device=b.device)

    def run(self, x0: Tensor | None) -> Solution:
        """Solve from ``x0`` (B, D) or zero; the value is a matrix (B, D) of the working dtype."""
        if x0 is not None:
            x, r, norms = self._residual(x0.to(self.b.dtype) / self.scale, self.all_rows)
            self._end(self.all_rows, (~(norms < torch.inf), Status.NONFINITE))
            self._move(self.all_rows, self.status == RUNNING, x, r, norms)
        # A step takes one product, and its residual another.
        self._end(self.all_rows, (self.evaluations >= self.max_steps - 1, Status.MAX_STEPS))
        self.status[self.residual_norm <= self.limit] = Status.CONVERGED
        if self.columns is not None:
            self.columns.append(ratio(self.residual_norm, self.reference).flatten())
        while bool((running := self.status == RUNNING).any()):
            self._cycle(true_rows(running) if self.compact else self.all_rows)
        return self._solution()

    def _solution(self) -> Solution:
        return Solution(
            value=self.x * self.scale,
            status=self.status.flatten(),
            residual=ratio(self.residual_norm, self.reference).flatten(),
            residual_norm=(self.residual_norm * self.scale).flatten(),
            steps=self.steps.flatten(),
            evaluations=self.evaluations.flatten(),
            trace=None if self.columns is None else Trace(torch.stack(self.columns, dim=1)),
        )

    def _product(self, rows: Tensor) -> VectorMap:
        """``matvec`` for the samples ``rows``, as a map of matrices (n, D); it gets the dtypes of ``b``."""
        batch = len(self.b)
        args = self.args if len(rows) == batch else take(self.args, rows, batch)
        return self._mapped(self.layout.vector_map(lambda v: self.matvec(v, *args), "matvec"))

    def _mapped(self, function: VectorMap) -> VectorMap:
        """``function``, scaled against subnormal numbers, whose errors say if it got a part of the batch."""

        def mapped(vectors: Tensor) -> Tensor:
            unit = power_of_two(vectors) if self.narrow else None
            try:
                return function(vectors) if unit is None else function(vectors / unit) * unit
            except (RuntimeError, ValueError, IndexError) as error:
                number, batch = len(vectors), len(self.b)
                if number < batch:
                    error.args = (
                        f"{error}\nThe function was called with the {number} of {batch} unsolved samples. "
                        "Pass batched tensors that matvec closes over in args=(...), or use compact=False, "
                        "as for those of a preconditioner.",
                    )
                raise

        return mapped

    def _cycle(self, rows: Tensor) -> None:
        """Run the Krylov method until every one of the samples ``rows`` has stopped."""
        product, last = self._product(rows), self.max_steps - 1 - self.evaluations
        precondition = self.solver.on_vectors(self.layout)
        precondition = precondition if precondition is identity else self._mapped(precondition)
        active = self.status[rows] == RUNNING
        run = self.solver.start(self.r[rows], self.target[rows], active, precondition)
        ends = set(last[rows].flatten().tolist())
        for step in count():
            if step in ends:  # the last product is for the residual
                run.running = run.running & (last[rows] > step)
            running = int(run.running.sum())
            if running == 0:
                break
            if self.compact and 0 < (len(rows) - running) * SHRINK >= len(rows):
                stopped, rest = true_rows(~run.running), true_rows(run.running)
                self._verify(run.rows(stopped), rows[stopped])
                run, rows = run.rows(rest), rows[rest]
                product = self._product(rows)
            active = run.running
            sent = run.direction if running == len(rows) else torch.where(active, run.direction, 0)
            run.absorb(product(sent))
            self._note(rows, active, run.residual_norm)
        self._verify(run, rows)

    def _verify(self, run: KrylovRun, rows: Tensor) -> None:
        """Take the result of a run and its true residual; a sample that has gained nothing has stalled."""
        self.steps.index_add_(0, rows, run.used)
        self.evaluations.index_add_(0, rows, run.used)
        correction, norms = run.result()
        claimed = norms <= run.limit
        x, r, norms = self._residual(self.x[rows] + correction, rows)
        old, limit = self.residual_norm[rows], self.limit[rows]
        active = self.status[rows] == RUNNING
        self._note(rows, active, norms)
        within = norms <= limit
        # An iterate that is better by no more than rounding may be worse in every other way.
        better = within | (norms < (1 - torch.finfo(x.dtype).eps ** 0.5) * old)
        gained = better & ((norms <= 0.5 * old) | ~claimed)
        self._move(rows, active & better, x, r, norms)
        # Where the recurrence converged too early the next cycle has to go further.
        self.target[rows] = torch.where(claimed, 0.5 * limit, self.target[rows])
        self._end(
            rows,
            (~gained, Status.STALLED),
            (self.evaluations[rows] >= self.max_steps - 1, Status.MAX_STEPS),
            (run.indefinite & ~claimed, Status.INDEFINITE),
            (~(norms < torch.inf), Status.NONFINITE),
            (within, Status.CONVERGED),
        )

    def _end(self, rows: Tensor, *endings: tuple[Tensor, int | Tensor]) -> None:
        """End unsolved samples of ``rows``, with the status of the last of the masks (n, 1) that hold."""
        old = status = self.status[rows]
        for mask, new in endings:
            status = torch.where(mask, new, status)
        self.status[rows] = torch.where(old == RUNNING, status, old)

    def _move(self, rows: Tensor, moved: Tensor, x: Tensor, r: Tensor, norms: Tensor) -> None:
        """The best iterate is ``x`` with the residual ``r`` where ``moved`` (n, 1) holds."""
        self.x[rows] = torch.where(moved, x, self.x[rows])
        self.r[rows] = torch.where(moved, r, self.r[rows])
        self.residual_norm[rows] = torch.where(moved, norms, self.residual_norm[rows])

    def _residual(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` (n, D) in the dtypes of the right-hand side, ``b - A x``, by one product, and its norm."""
        layout, scale, active = self.layout, self.scale[rows], self.status[rows] == RUNNING
        x = torch.where(active, x * scale, 0).to(layout.dtype)
        x = layout.vector(layout.tree(x)).to(self.b.dtype)
        r = self.b[rows] - self._product(rows)(x) / scale
        self.evaluations.index_add_(0, rows, active.long())
        norms = torch.where(torch.isfinite(x).all(1, keepdim=True), norm(r), torch.inf)
        return x / scale, r, norms

    def _note(self, rows: Tensor, running: Tensor, norms: Tensor) -> None:
        """Record a product, after which ``running`` ones of the samples ``rows`` have these ``norms``."""
        self.noted += 1
        if self.columns is None and self.callback is None:
            return
        everyone = torch.full_like(self.reference, torch.nan)
        everyone[rows] = torch.where(running, norms, torch.nan)
        column = ratio(everyone, self.reference).flatten()
        if self.columns is not None:
            self.columns.append(column)
        if self.callback is not None:
            self.callback(Progress(self.noted, column, None, int(running.sum())))


@hint_names
@eager
def solve_linear(
    matvec: Callable[..., Any],
    b: Any,
    *,
    solver: LinearSolver | type[LinearSolver] | str = "cg",
    tolerance: Tolerance | float | None = None,
    max_steps: int = 100,
    x0: Any = None,
    args: tuple[Any, ...] = (),
    compact: bool = True,
    on_failure: str = "warn",
    record: bool = False,
    callback: Callable[[Progress], object] | None = None,
) -> Solution:
    """Solve ``A x = b`` for every sample of a batch, given products with ``A``; records no gradient.

    Args:
        matvec: ``matvec(v, *args) -> A v``, of the structure, shapes and dtypes of ``v``; linear in
            ``v``, and each sample by itself.
        b: right-hand sides, a tensor (B, ...) or a pytree of them, any floating dtype. Below
            float32 the products run in the dtype of ``b`` and everything else in float32.
        solver: ``CG()`` for symmetric positive definite matrices, ``MINRES()`` for symmetric ones,
            ``GMRES(restart)`` for all; or its class, or its name (``"gmres"``).
        tolerance: ``|b - A x| <= max(atol, rtol |b|)`` ends a sample; a number is ``rtol``, None 1e-6.
        max_steps: largest number of products with ``A`` per sample, with those that verify residuals.
        x0: initial iterate, like ``b``; default zero. Costs one product, for the first residual.
        args: further inputs of ``matvec``, pytrees of tensors batched along dim 0. ``matvec`` may close
            over tensors that all samples share, but over batched ones only with ``compact=False``.
        compact: finished samples leave the batch once they are 1/16 of it.
        on_failure: what to do about samples that did not converge: "warn", "raise" or "ignore".
        record: keep the trace: relative residuals after each product, NaN where a sample took none.
        callback: called with a :class:`Progress` after every batch of products.

    Returns:
        A :class:`Solution`: ``value`` is the best iterate, always finite, ``residual`` the true one,
        verified by a product; ``steps`` counts steps of the Krylov method, ``evaluations`` products.
        Statuses: CONVERGED; MAX_STEPS; STALLED by a singular matrix, by rounding or in a cycle of
        GMRES; NONFINITE, NaN or infinity in ``b`` (with an infinite residual), in ``x0`` or in a
        product; INDEFINITE, CG met non-positive curvature.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Example:
        >>> import torch, solvers
        >>> diagonal, b = torch.tensor([2.0, 4.0]), torch.tensor([[1.0, 2.0], [0.0, 4.0]])
        >>> solvers.solve_linear(lambda v: diagonal * v, b, solver=solvers.CG()).value
        tensor([[0.5000, 0.5000],
                [0.0000, 1.0000]])
    """
    require_callable("matvec", matvec)
    chosen: LinearSolver = require_kind("solver", solver, LinearSolver, LINEAR)
    tolerance = read_tolerance("tolerance", tolerance) or Tolerance(rtol=1e-6)
    require_count("max_steps", max_steps)
    require_flag("compact", compact)
    require_flag("record", record)
    require_callable("callback", callback, optional=True)
    check_on_failure(on_failure)
    layout = Layout.of(b, "b")
    leaf = leaves_of(b)[0]
    check_args(args, len(leaf), leaf.device, "b", "matvec")
    if x0 is not None:
        check_like(x0, b, "x0", "b")
    with torch.no_grad():
        right = layout.vector(b).to(torch.promote_types(layout.dtype, torch.float32))
        if right.numel() == 0:
            return Solution.of_nothing(layout.tree(right.to(layout.dtype)), right)
        options = (tolerance, chosen, max_steps, compact, record, callback)
        loop = LinearLoop(matvec, args, layout, right, *options)
        solution = loop.run(None if x0 is None else layout.vector(x0))
        solution.value = layout.tree(solution.value.to(layout.dtype))
    apply_policy(solution, on_failure, f"linear solve with {chosen}")
    return solution
