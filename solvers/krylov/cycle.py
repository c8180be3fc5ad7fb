"""One cycle of a Krylov method, and what it says of each sample at its end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.device import true_rows
from solvers.core.solution import Status
from solvers.krylov.method import KrylovRun
from solvers.krylov.product import System


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
