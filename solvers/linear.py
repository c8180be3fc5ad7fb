"""Solve batches of linear systems ``A x = b`` with products with ``A``.

The file defines, in this order, the scaled right-hand sides and the products, the loop that runs cycles of a
Krylov method and verifies residuals, and :func:`solvers.solve_linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.core.checks import require_callable, require_count, require_flag, require_kind
from solvers.core.device import Watch, choose, ratio, readable, surely_all, true_rows
from solvers.core.layout import Layout, check_args, leaves_of, take
from solvers.core.modes import eager
from solvers.core.rows import SHRINK, Progress
from solvers.core.solution import (
    Solution,
    Status,
    Tolerance,
    Trace,
    apply_policy,
    check_on_failure,
    read_tolerance,
)
from solvers.krylov import CG, LINEAR, KrylovRun, LinearSolver, norm

# Right-hand sides whose norms lie between 1 / MODERATE and MODERATE are not scaled.
MODERATE = 1e6
# Rounding separates the residual of a recurrence from the true one by at most about
# GAP eps (|A| |x| + |b|), ten times the largest measured gap.
GAP = 40.0
RESERVE = 1e-3  # a step is expected to leave more than this share of the residual
# Rounding limits a cycle that converged by its recurrence but did not halve the true residual.
HALVED = 0.5


class System:
    """Right-hand sides (B, D), divided by a power of two so that no square overflows or underflows.

    Scalars per sample are (B, 1).
    """

    def __init__(self, b: Tensor, tolerance: Tolerance) -> None:
        self.factor: Tensor | None = None  # ``scale`` as a tensor, None where it is 1 everywhere
        self.reference = norm(b)
        self.finite, self.scale = self.reference < torch.inf, torch.ones_like(self.reference)
        moderate = (self.reference > 1 / MODERATE) & (self.reference < MODERATE)
        if not surely_all(moderate):
            largest = b.abs().amax(1, keepdim=True)
            self.finite = largest < torch.inf
            exponent = torch.frexp(torch.where(self.finite, largest, 1))[1].clip(-100, 100)
            self.scale = torch.ldexp(torch.ones_like(largest), exponent)
            self.factor = self.scale
            b = torch.where(self.finite, b / self.factor, 0)
            self.reference = norm(b)
        self.b = b  # zero where the caller's is not finite
        # The residual norm at which a sample has converged; ``tolerance`` is in the caller's units.
        norms = (self.reference * self.scale).squeeze(1)
        self.limit = tolerance.threshold(norms).unsqueeze(1) / self.scale

    def scaled(self, x: Tensor) -> Tensor:
        """From the caller's units to scaled ones."""
        return x if self.factor is None else x / self.factor

    def unscaled(self, x: Tensor) -> Tensor:
        return x if self.factor is None else x * self.factor

    def relative(self, norms: Tensor) -> Tensor:
        """Residual norms (B, 1) relative to the right-hand sides, (B,)."""
        return ratio(norms, self.reference).reshape(-1)


class Product:
    """``matvec`` as a map from (n, D) to (n, D), for the selected samples of a batch.

    Vectors are converted to the layout and dtypes of the right-hand side, results to the working dtype.
    In half precision a vector is scaled to magnitude one by a power of two before the product,
    so that small residuals do not become subnormal, and the result is scaled back.
    """

    def __init__(
        self, matvec: Callable[..., Any], layout: Layout, args: tuple[Any, ...], batch: int
    ) -> None:
        self._matvec, self._layout = matvec, layout
        self._all_args = self._args = args
        self._batch = self._rows = batch
        self._narrow = any(torch.finfo(dtype).bits < 32 for dtype in layout.dtypes)
        self.dtype = torch.promote_types(layout.dtype, torch.float32)
        self.tiny = max(torch.finfo(dtype).tiny for dtype in layout.dtypes)
        self.largest = min(torch.finfo(dtype).max for dtype in layout.dtypes)
        self.eps = max(torch.finfo(dtype).eps for dtype in layout.dtypes)
        # A matrix (B, D) of float32 or float64 is passed unchanged.
        self._direct = layout.spec.is_leaf() and len(layout.shapes[0]) == 1 and not self._narrow

    def select(self, rows: Tensor) -> None:
        """Multiply the samples ``rows`` (indices into the whole batch) from now on."""
        self._args = self._all_args
        self._rows = rows.numel()
        if rows.numel() < self._batch:
            # Always select from the whole batch: a tensor that is not batched could by chance have
            # as many rows as a part of the batch.
            self._args = take(self._all_args, rows, self._batch)

    def __call__(self, vectors: Tensor) -> Tensor:
        """(n, D) -> (n, D), both in the working dtype."""
        if not self._narrow:
            return self.exact(vectors)
        _, exponent = torch.frexp(vectors.abs().amax(1, keepdim=True))
        scale = torch.ldexp(torch.ones_like(vectors[:, :1]), exponent.clamp(-100, 100))
        return self.exact(vectors / scale) * scale

    def rounded(self, vectors: Tensor) -> Tensor:
        """Round ``vectors`` to the dtypes of the right-hand side."""
        if all(dtype == self.dtype for dtype in self._layout.dtypes):
            return vectors
        return self._layout.vector(self._layout.tree(vectors.to(self._layout.dtype))).to(self.dtype)

    def exact(self, vectors: Tensor) -> Tensor:
        """Return the product with unscaled ``vectors``."""
        sent = vectors
        if not self._direct:
            sent = self._layout.tree(vectors.to(self._layout.dtype))
        received = self._call(sent)
        check_like(received, sent, "matvec(v)", "v")
        if self._direct:
            return received.detach().resolve_neg()
        return self._layout.vector(pytree.tree_map(Tensor.detach, received)).to(self.dtype)

    def _call(self, sent: Any) -> Any:
        try:
            return self._matvec(sent, *self._args)
        except (RuntimeError, ValueError, IndexError) as error:
            if self._rows < self._batch:
                shrunk = (
                    f"matvec was called with the {self._rows} of {self._batch} samples that are still "
                    "being solved. If it closes over a tensor of the whole batch, pass that tensor in "
                    "args=(...), or set compact=False."
                )
                error.args = (f"{error}\n{shrunk}",)
            raise


def check_like(
    tree: Any, like: Any, name: str, of: str, device_error: type[Exception] = TypeError
) -> None:
    """Raise unless ``tree`` has the structure, shapes, dtypes and device of ``like``, called ``of``."""
    if isinstance(tree, Tensor) and isinstance(like, Tensor):  # at once where nothing is wrong
        properties = [(each.shape, each.dtype, each.device) for each in (tree, like)]
        if properties[0] == properties[1]:
            return
    leaves, spec = pytree.tree_flatten(tree)
    expected, expected_spec = pytree.tree_flatten(like)
    if spec != expected_spec:
        raise TypeError(f"{name} must have the structure of {of}, {expected_spec}, got {spec}")
    errors = {"shape": ValueError, "dtype": TypeError, "device": device_error}
    for leaf, wanted_leaf in zip(leaves, expected, strict=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name} must hold tensors like {of}, got {type(leaf)}")
        for attribute, error in errors.items():
            came, wanted = getattr(leaf, attribute), getattr(wanted_leaf, attribute)
            if came != wanted:
                raise error(f"{name} must have the {attribute} of {of}, {wanted}, got {came}")


class LinearLoop:
    """One solve by cycles of a Krylov method.

    A cycle runs the method on ``A d = r`` for the open samples in lockstep, until each has
    converged by its recurrence, broken down, used its products or reached the restart of GMRES. A
    sample is then closed if its recurrence residual is accurate. Otherwise one more product computes
    its true residual, and the sample is closed or enters the next cycle.

    The loop keeps for each sample the best iterate ``x`` and, while it is ``open``, its residual ``r``,
    (B, D), and tensors (B, 1): ``residual_norm``, the ``target`` norm of a cycle, ``status``, the
    ``steps`` of the method and the ``evaluations``, which are products with ``A``.
    """

    def __init__(
        self,
        product: Product,
        system: System,
        solver: LinearSolver,
        max_steps: int,
        *,
        compact: bool,
        record: bool,
        callback: Callable[[Progress], object] | None,
    ) -> None:
        self.product, self.system = product, system
        self.solver, self.max_steps, self.compact = solver, max_steps, compact
        self.record, self.callback = record, callback
        self.noting = record or callback is not None
        self.columns: list[Tensor] = []
        self.noted = 0  # batches of products so far
        self.all_rows = torch.arange(len(system.b), device=system.b.device)
        self.x, self.moved = torch.zeros_like(system.b), False
        self.r, self.residual_norm, self.target = system.b, system.reference, system.limit
        self.matrix_norm = torch.zeros_like(system.reference)  # the largest lower bound of |A| seen
        self.open = system.finite & (system.reference > 0)
        self.steps = self.evaluations = torch.zeros_like(self.open, dtype=torch.int64)
        self.status = self.steps + int(Status.MAX_STEPS)

    def run(self, x0: Tensor | None) -> Solution:
        """Solve from ``x0`` (B, D) or zero; the value is a matrix (B, D) of the working dtype."""
        self._begin(x0)
        while len(rows := true_rows(self.open)) > 0:
            result = self._cycle(rows)
            self._accept(result)
        return self._solution()

    def _begin(self, x0: Tensor | None) -> None:
        """Close the samples that need no work."""
        system = self.system
        if x0 is not None:
            self._start_at(system.scaled(x0.detach().to(system.b.dtype)))
        self._close(~system.finite, Status.NONFINITE)
        self.residual_norm = torch.where(system.finite, self.residual_norm, torch.inf)
        self._close(self.residual_norm <= system.limit, Status.CONVERGED)
        if self.record:
            self.columns.append(system.relative(self.residual_norm))

    def _start_at(self, x: Tensor) -> None:
        """Replace the start 0 by ``x`` (B, D), for one product of every open sample."""
        rows = true_rows(self.open)
        if len(rows) == 0:
            return
        finite = torch.isfinite(x).all(1, keepdim=True)
        x = torch.where((self.open & finite), x, 0)
        r = self._true_residual(x, rows)
        r_norm = norm(r)
        self.evaluations = self.evaluations + self.open
        self._close(self.open & ~(finite & (r_norm < torch.inf)), Status.NONFINITE)
        self._move(self.open, x, r, r_norm)

    def _move(self, rows: Tensor, x: Tensor, r: Tensor, r_norm: Tensor) -> None:
        """In ``rows`` (B, 1) the point ``x`` with the residual ``r`` becomes the best iterate."""
        self.x, self.moved = choose(rows, x, self.x), True
        self.r = choose(rows, r, self.r)
        self.residual_norm = torch.where(rows, r_norm, self.residual_norm)

    def _close(self, rows: Tensor, status: Status | Tensor) -> None:
        """End the samples ``rows`` (B, 1) with ``status``."""
        self.status = torch.where(
            rows, status if isinstance(status, Tensor) else int(status), self.status
        )
        self.open = self.open & ~rows

    def _note(self, rows: Tensor, running: Tensor, residual: Tensor) -> None:
        """One product: residual norms (n, 1) of the samples ``rows``, where ``running`` (n, 1)."""
        norms = torch.full_like(self.system.reference, torch.nan)
        norms[rows] = torch.where(running, residual, torch.nan)
        column = self.system.relative(norms)
        self.noted += 1
        if self.record:
            self.columns.append(column)
        if self.callback is not None:
            self.callback(Progress(self.noted, column, None, int(running.count_nonzero())))

    def _true_residual(self, x: Tensor, rows: Tensor) -> Tensor:
        """``b - A x`` (B, D), by one product for the samples ``rows``; ``b`` elsewhere."""
        index, sent = self._select(rows), self.system.unscaled(x)
        if len(index) == len(self.all_rows):
            return self.system.b - self.system.scaled(self.product.exact(sent))
        image = self.product.exact(sent.index_select(0, index))
        image = torch.zeros_like(x).index_copy_(0, index, image)
        return self.system.b - self.system.scaled(image)

    def _select(self, rows: Tensor) -> Tensor:
        """Multiply ``rows`` from now on, or all samples where they must stay together."""
        index = rows if self.compact else self.all_rows
        self.product.select(index)
        return index

    def _cycle(self, rows: Tensor) -> Results:
        """Run the Krylov method until every sample of ``rows`` has stopped."""
        index = self._select(rows)
        limit, active = self.target[index], self.open[index]
        whole = len(index) == len(self.all_rows)
        r = self.r if whole else self.r.index_select(0, index)
        run = self.solver.start(r, limit, active)
        run.matrix_norm = self.matrix_norm[index]  # what earlier cycles have learned of it
        cycle = Cycle(run, index, self.system, self.residual_norm)
        budget = self.max_steps - self.evaluations
        ends = set(budget[rows].flatten().tolist())
        watch = Watch(self.system.b.device)
        for step in range(max(ends)):
            if step + 1 in ends:
                self._reserve_product(cycle, budget[cycle.rows] == step + 1)
            if step in ends:
                cycle.run.stop(budget[cycle.rows] == step)
            if not self._goes_on(cycle, watch):
                break
            active = cycle.run.running
            cycle.run.absorb(self.product(cycle.run.direction))
            if self.noting:
                latest = cycle.run.current()
                self._note(cycle.rows, active, latest)
            if cycle.run.exhausted:
                break
        return cycle.results()

    def _goes_on(self, cycle: Cycle, watch: Watch) -> bool:
        """Whether any sample of the cycle still runs; stopped ones leave, or multiply zeros."""
        run, size = cycle.run, len(cycle.rows)
        on_host = readable(run.running.device)
        mask = run.running if on_host else watch(run.running)
        running = cycle.running if mask is None else int(mask.count_nonzero())
        if running == 0 or running == cycle.running or mask is None:
            return running > 0
        cycle.running = running
        if not self.compact or (size - running) * SHRINK < size:
            run.zero_stopped()
            return True
        if not on_host:  # the watch's answer lies in pinned memory
            mask = mask.to(run.running.device)
        cycle.shrink(mask)
        self.product.select(cycle.rows)
        watch.reset()
        return True

    def _reserve_product(self, cycle: Cycle, last: Tensor) -> None:
        """Stop the samples whose ``last`` product will be needed to verify the residual."""
        run, rows = cycle.run, cycle.rows
        start = self.x.index_select(0, rows)
        end = start + run.solution()
        gap = self._residual_gap(start, end, self.system.reference[rows], run.matrix_norm)
        # The last step may leave a residual that is smaller still.
        enough = torch.maximum(RESERVE * run.residual_norm, self.system.limit[rows] / 2)
        accurate = run.reliable() & (gap <= enough)
        run.stop(last & ~accurate & (run.used > 0))

    def _residual_gap(
        self, start: Tensor, end: Tensor, reference: Tensor, matrix_norm: Tensor
    ) -> Tensor:
        """Bound on what rounding has done to the residual of a recurrence, (n, 1).

        The recurrence went from ``start`` to ``end`` (n, D).
        """
        length = norm(end)
        size = torch.maximum(norm(start), length) if self.moved else length
        return GAP * self.product.eps * (matrix_norm * size + reference)

    def _accept(self, result: Results) -> None:
        """Close the samples whose recurrence residual is accurate, verify the others.

        Where no product is left to verify a doubtful residual, the last verified iterate stays.
        """
        system = self.system
        self.steps = self.steps + result.used
        self.evaluations = self.evaluations + result.used
        self.matrix_norm = torch.fmax(self.matrix_norm, result.matrix_norm)
        x = self.x + result.correction if self.moved else result.correction
        gap = self._residual_gap(self.x, x, system.reference, result.matrix_norm)
        small_gap = gap <= torch.maximum(result.residual_norm, system.limit)
        unmoved = result.residual_norm == self.residual_norm  # no step was taken
        accurate = (result.reliable & small_gap & self._representable(x)) | unmoved
        spent = (self.evaluations >= self.max_steps) | (result.used == 0)
        finished = result.verdict != int(Status.MAX_STEPS)
        closing = self.open & (spent | (accurate & finished))
        better = closing & accurate & (result.residual_norm < self.residual_norm)
        self.x, self.moved = choose(better, x, self.x), True
        self.residual_norm = torch.where(better, result.residual_norm, self.residual_norm)
        # Converged by the recurrence alone, with no product left to verify it: not converged.
        claimed = result.verdict == int(Status.CONVERGED)
        verdict = torch.where(claimed & ~accurate, int(Status.MAX_STEPS), result.verdict)
        short = claimed & accurate & (result.residual_norm > system.limit)
        verdict = torch.where(short, int(Status.STALLED), verdict)
        self._close(closing, verdict)
        rows = true_rows(self.open)
        if len(rows) > 0:
            self._verify(result, x, rows)

    def _representable(self, x: Tensor) -> Tensor:
        """(B, 1) bool: the dtypes of the right-hand side hold ``x``, which is wider and scaled."""
        size = x.abs().amax(1, keepdim=True)
        held = size if self.system.factor is None else size * self.system.scale
        return (size == 0) | ((held >= self.product.tiny) & (held <= self.product.largest))

    def _verify(self, result: Results, x: Tensor, rows: Tensor) -> None:
        """True residuals of the open samples at ``x``; those that gained nothing have stalled."""
        x = self.system.scaled(self.product.rounded(self.system.unscaled(x)))
        verified, limit = self.open, self.system.limit
        r = self._true_residual(x, rows)
        r_norm = norm(r)
        self.evaluations = self.evaluations + verified
        if self.noting:
            self._note(self.all_rows, verified, r_norm)
        claimed = result.verdict == int(Status.CONVERGED)
        within = r_norm <= limit
        # An iterate that is better by no more than rounding may be worse in every other way.
        decrease = 1 - torch.finfo(x.dtype).eps ** 0.5
        better = within | (r_norm < decrease * self.residual_norm)
        gained = better & ((r_norm <= HALVED * self.residual_norm) | ~claimed)
        self._move(verified & better, x, r, r_norm)
        # Where the recurrence converged too early the next cycle has to go further.
        self.target = torch.where(verified & claimed, HALVED * limit, self.target)
        broken = ~claimed & (result.verdict != int(Status.MAX_STEPS))
        self._close(verified & within, Status.CONVERGED)
        self._close(self.open & ~(r_norm < torch.inf), Status.NONFINITE)
        self._close(self.open & broken, result.verdict)
        self._close(self.open & ~gained, Status.STALLED)
        self._close(self.open & (self.evaluations >= self.max_steps), Status.MAX_STEPS)

    def _solution(self) -> Solution:
        system = self.system
        return Solution(
            value=system.unscaled(self.x),
            status=self.status.reshape(-1),
            residual=system.relative(self.residual_norm),
            residual_norm=((self.residual_norm * system.scale).reshape(-1)),
            steps=self.steps.reshape(-1),
            evaluations=self.evaluations.reshape(-1),
            trace=Trace(torch.stack(self.columns, dim=1)) if self.record else None,
        )


@dataclass
class Results:
    """What a finished cycle says of each sample: tensors (B, D) and (B, 1).

    ``correction`` is to be added to ``x``; the others are as for :class:`KrylovRun`.
    """

    correction: Tensor
    residual_norm: Tensor
    verdict: Tensor
    used: Tensor
    matrix_norm: Tensor
    reliable: Tensor

    @classmethod
    def of(cls, run: KrylovRun) -> Results:
        """The results of a run on the whole batch, without a copy."""
        norms = (run.used, run.matrix_norm, run.reliable())
        return cls(*run.final(), run.verdict(), *norms)

    @classmethod
    def untouched(cls, system: System, residual_norm: Tensor) -> Results:
        """Results of a cycle in which no sample has moved yet."""
        used, zero = (torch.zeros_like(residual_norm, dtype=d) for d in (torch.int64, None))
        norms = residual_norm.clone()
        verdict = used + int(Status.MAX_STEPS)
        return cls(torch.zeros_like(system.b), norms, verdict, used, zero, used == 0)

    def put(self, run: KrylovRun, rows: Tensor) -> None:
        """Write the results of ``run`` to the samples ``rows`` (n,)."""
        solution, self.residual_norm[rows] = run.final()
        self.correction.index_copy_(0, rows, solution)
        self.verdict[rows] = run.verdict()
        self.used[rows], self.matrix_norm[rows] = run.used, run.matrix_norm
        self.reliable[rows] = run.reliable()


class Cycle:
    """A cycle of the Krylov method: the ``run`` on a working batch of the samples ``rows`` (n,).

    ``running`` is how many of them are known to run. The usual cycle, from which no sample leaves
    before its end, holds no vectors but those of the run.
    """

    def __init__(self, run: KrylovRun, rows: Tensor, system: System, residual_norm: Tensor) -> None:
        self.run, self.rows, self.running = run, rows, len(rows)
        self.system, self.residual_norm = system, residual_norm
        self.left: Results | None = None  # of samples that have left; None before the first has

    def _put(self, run: KrylovRun, rows: Tensor) -> Results:
        if self.left is None:
            self.left = Results.untouched(self.system, self.residual_norm)
        self.left.put(run, rows)
        return self.left

    def shrink(self, running: Tensor) -> None:
        """Keep the samples ``running`` (n, 1) in the working batch, note the results of the others."""
        gone, stay = (true_rows(mask) for mask in (~running, running))
        self._put(self.run.rows(gone), self.rows[gone])
        self.run, self.rows = self.run.rows(stay), self.rows[stay]

    def results(self) -> Results:
        """The results of every sample at the end of the cycle."""
        whole = self.left is None and len(self.rows) == len(self.residual_norm)
        return Results.of(self.run) if whole else self._put(self.run, self.rows)


_DEFAULT_SOLVER = CG()
_DEFAULT_TOLERANCE = Tolerance(rtol=1e-6)


@eager
def solve_linear(
    matvec: Callable[..., Any],
    b: Any,
    *,
    solver: LinearSolver | type[LinearSolver] | str = _DEFAULT_SOLVER,
    tolerance: Tolerance | float | None = None,
    max_steps: int = 100,
    x0: Any = None,
    args: tuple[Any, ...] = (),
    compact: bool = True,
    on_failure: str = "warn",
    record: bool = False,
    callback: Callable[[Progress], object] | None = None,
) -> Solution:
    """Solve ``A x = b`` for every sample of a batch, given products with ``A``.

    The result is detached; ``matvec`` may use autograd inside.

    Args:
        matvec: ``matvec(v, *args) -> A v`` with the structure, shapes and dtypes of ``v``; linear in
            ``v``, with independent samples.
        b: right-hand sides, a floating-point tensor (B, ...) or a pytree of them. In half precision
            the products use the dtype of ``b`` and everything else float32.
        solver: ``CG()`` for symmetric positive definite matrices, ``MINRES()`` for symmetric ones,
            ``GMRES(restart)`` for all; or its class, or its name (``"gmres"``).
        tolerance: stopping criterion ``|b - A x| <= max(atol, rtol |b|)``, a :class:`Tolerance` or a
            number, its ``rtol``; None for rtol 1e-6.
        max_steps: maximum number of products with ``A`` per sample, including those that verify a
            residual.
        x0: initial iterate, like ``b``, which costs one product; None for zero.
        args: further inputs of ``matvec``, pytrees of tensors batched along dim 0. Finished samples
            leave the batch, so batched tensors must be passed here (or set ``compact=False``).
            ``matvec`` may close over tensors that all samples share.
        compact: whether finished samples leave the batch once they are 1/16 of it; False if
            ``matvec`` closes over batched tensors.
        on_failure: "warn", "raise" or "ignore" samples that did not converge.
        record: whether to keep the trace. Column 0 is the relative residual at the start, column k
            that after k products with ``A``, NaN for samples that have ended.
        callback: function of a :class:`Progress`, called after every batch of products.

    Returns:
        A :class:`Solution`. ``value`` is the best iterate, which is always finite, and ``residual``
        its residual; ``steps`` counts steps of the Krylov method, ``evaluations`` products.
        A product with ``A`` verifies the residual whenever rounding could change it by more than about
        a tenth (or a tenth of the tolerance), and a sample that has not converged by its true residual
        continues. The solution of a zero right-hand side is zero, without a step. A nonfinite
        right-hand side ends as NONFINITE with an infinite residual.

        Statuses: CONVERGED; MAX_STEPS; STALLED if the residual cannot be reduced (singular matrix,
        rounding, a cycle of GMRES without progress); NONFINITE for NaN or infinity in ``b``, ``x0`` or
        a product; INDEFINITE if CG met a direction of non-positive curvature.

    Raises:
        TypeError, ValueError: if an argument is invalid.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Example:
        >>> import torch, solvers
        >>> b = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
        >>> weights = torch.tensor([2.0, 4.0])
        >>> solvers.solve_linear(lambda v: weights * v, b, solver=solvers.CG()).value
        tensor([[0.5000, 0.5000],
                [0.0000, 1.0000]])
    """
    require_callable("matvec", matvec)
    chosen: LinearSolver = require_kind("solver", solver, LinearSolver, LINEAR)
    tolerance = read_tolerance("tolerance", tolerance) or _DEFAULT_TOLERANCE
    require_count("max_steps", max_steps)
    require_flag("compact", compact)
    require_flag("record", record)
    require_callable("callback", callback, optional=True)
    check_on_failure(on_failure)
    layout = Layout.of(b, "b")
    leaf = leaves_of(b)[0]
    check_args(args, len(leaf), leaf.device, "b", "matvec")
    if x0 is not None:
        check_like(x0, b, "x0", "b", ValueError)
    with torch.no_grad():
        product = Product(matvec, layout, args, len(leaf))
        system = System(layout.vector(b).detach().to(product.dtype), tolerance)
        loop = LinearLoop(
            product, system, chosen, max_steps, compact=compact, record=record, callback=callback
        )
        solution = loop.run(None if x0 is None else layout.vector(x0))
        solution.value = layout.tree(solution.value.to(layout.dtype))
    apply_policy(solution, on_failure, f"linear solve with {chosen}")
    return solution
