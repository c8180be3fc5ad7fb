"""Sudoku as a Potts model: couplings that repel equal digits, solved by mean field with fixed clues."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor, nn

from implicit_attn.data.sudoku import CELLS, SIDE, SudokuSymmetries, solved, sudoku_pairs
from implicit_attn.energies.spins import binary_size, check_couplings, zero_sum
from implicit_attn.models.potts import FactoredAttention, PottsModel
from solvers.core.checks import require_count, require_number, require_positive

PAIRS = 810  # of cells in a row, a column or a box
NOISE = 1e-3  # of the start, relative to 1/9: parts digits that no clue tells apart
CHECKED_EVERY = 25  # steps of an annealing: each look waits for the device
DECIDED = 0.5  # a cell with a digit at least as probable counts as decided


class BoardStatus(IntEnum):
    """How the solve of a board ended.

    * ``SOLVED``: each row, column and box has every digit once.
    * ``BROKEN``: every cell is decided, and a rule is broken.
    * ``UNDECIDED``: a rule is broken, and some cell has no digit with a probability of one half.
    * ``NONFINITE``: a probability is not finite.
    """

    SOLVED = 0
    BROKEN = 1
    UNDECIDED = 2
    NONFINITE = 3


@dataclass(frozen=True)
class SudokuAnswer:
    """Filled boards.

    Attributes:
        boards: (B, 81) int64, the most probable digits, 1 .. 9; the clues of the puzzle as they are.
        probabilities: (B, 81, 9), the means of the mean field.
        status: (B,) int64 of :class:`BoardStatus`. It is decided by the rules, not by a solution.
        residual: (B,) largest ``|softmax(beta J m) - m|`` of a cell that is neither a clue nor fixed,
            at these means and the beta that was reached.
        steps: (B,) int64, evaluations of the mean field until the board was finished.
    """

    boards: Tensor
    probabilities: Tensor
    status: Tensor
    residual: Tensor
    steps: Tensor

    @property
    def solved(self) -> Tensor:
        """(B,) bool."""
        return self.status == BoardStatus.SOLVED


class BoardRun:
    """The boards that are still being solved, and the places of all for their results."""

    def __init__(self, puzzles: Tensor, start: Tensor) -> None:
        self.puzzles = check_puzzles(puzzles)
        digits = torch.arange(1, SIDE + 1, device=puzzles.device)
        clues = puzzles.unsqueeze(2) == digits
        self.known = clues.any(2, keepdim=True)  # (B, 81, 1): clues, and fixed cells
        self.means = torch.where(self.known, clues.to(start), start)
        self.active = torch.arange(len(puzzles), device=puzzles.device)
        self.step = 0
        self.kept = torch.empty_like(self.means)
        self.residual = start.new_empty(len(puzzles))
        self.steps = torch.zeros_like(self.active)

    def advance(self, model: SudokuPotts, beta: float, damping: float) -> None:
        """One damped step of the mean field in the cells that are not known."""
        response = torch.softmax(beta * model.field(self.means), -1)
        self.means = torch.where(self.known, self.means, self.means.lerp(response, damping))
        self.step += 1

    def ended(self) -> Tensor:
        """(active,) bool: solved, or with a mean that is not finite, from which there is no way back."""
        return solved(self.means.argmax(2) + 1) | ~self.means.flatten(1).isfinite().all(1)

    def take_out(self, done: Tensor, model: SudokuPotts, beta: float) -> None:
        """Write the results of the boards that are done, and go on with the others."""
        which = self.active[done]
        if len(which) == 0:
            return
        means, known = self.means[done], self.known[done]
        response = torch.softmax(beta * model.field(means), -1)
        self.residual[which] = (response - means).masked_fill(known, 0.0).abs().amax((1, 2))
        self.kept[which], self.steps[which] = means, self.step
        left = ~done
        self.active, self.means, self.known = self.active[left], self.means[left], self.known[left]

    def fix_surest(self) -> None:
        """In each board, make the most certain of the cells that are not known one-hot."""
        rows = torch.arange(len(self.active), device=self.active.device)
        cells = self.means.amax(2).masked_fill(self.known.squeeze(2), -1.0).argmax(1)
        digits = self.means[rows, cells].argmax(1)
        self.means[rows, cells] = torch.nn.functional.one_hot(digits, SIDE).to(self.means)
        self.known = self.known.index_put((rows, cells), torch.tensor(True).to(rows.device))

    def answer(self) -> SudokuAnswer:
        means = self.kept
        boards = torch.where(self.puzzles == 0, means.argmax(2) + 1, self.puzzles)
        undecided = (means.amax(2) < DECIDED).any(1)
        status = torch.where(undecided, int(BoardStatus.UNDECIDED), int(BoardStatus.BROKEN))
        status = torch.where(solved(boards), int(BoardStatus.SOLVED), status)
        finite = means.flatten(1).isfinite().all(1)
        status = torch.where(finite, status, int(BoardStatus.NONFINITE))
        return SudokuAnswer(boards, means, status, self.residual, self.steps)


class SudokuPotts(nn.Module):
    r"""A Potts model of 81 cells and 9 digits as a solver of Sudoku.

    The means ``m_i`` of the unknown cells follow the damped naive mean field, those of the clues stay
    one-hot::

        m_i <- (1 - eta) m_i + eta softmax(beta sum_j J_ij m_j)

    Couplings learned from solved boards have no scale of their own: a cell is certain given the 80
    others, so the likelihood grows with them for ever. They are therefore brought to the zero-sum gauge
    and scaled, so that the mean diagonal entry of the 810 strongest pairs is ``-(1 - 1/9)``, that of
    the rules, ``J_ij^{ab} = -(delta_ab - 1/9)``. Fields are left out: all digits are alike.

    Args:
        couplings: J (81, 81, 9, 9), floating, of any model; both directions are averaged.

    Raises:
        TypeError, ValueError: another type or shape; couplings that do not repel equal digits cannot
            be scaled.
    """

    matrix: Tensor

    def __init__(self, couplings: Tensor) -> None:
        super().__init__()
        if not isinstance(couplings, Tensor) or not couplings.is_floating_point():
            kind = couplings.dtype if isinstance(couplings, Tensor) else type(couplings).__name__
            raise TypeError(f"couplings must be a floating tensor, got {kind}")
        if tuple(couplings.shape) != (CELLS, CELLS, SIDE, SIDE):
            raise ValueError(
                f"couplings must be (81, 81, 9, 9) of cells and digits, got {tuple(couplings.shape)}"
            )
        check_couplings(couplings)
        gauged = zero_sum(couplings.detach() / binary_size(couplings))
        gauged = (gauged * _scale(gauged)).transpose(1, 2)
        self.register_buffer("matrix", gauged.reshape(CELLS * SIDE, CELLS * SIDE).contiguous())

    @classmethod
    def from_model(cls, model: FactoredAttention | PottsModel) -> SudokuPotts:
        """From a model fitted to solved boards, with colour k for the digit k + 1."""
        if isinstance(model, PottsModel):
            return cls(model.couplings.weight)
        if isinstance(model, FactoredAttention):
            return cls(model.couplings())
        raise TypeError(f"model must be a FactoredAttention or a PottsModel, got {type(model)}")

    @classmethod
    def from_rules(cls) -> SudokuPotts:
        """The rules themselves, ``-(delta_ab - 1/9)`` in rows, columns and boxes."""
        repulsion = 1 / SIDE - torch.eye(SIDE)
        return cls(sudoku_pairs().float()[..., None, None] * repulsion)

    @property
    def couplings(self) -> Tensor:
        """J (81, 81, 9, 9) as used."""
        return self.matrix.view(CELLS, SIDE, CELLS, SIDE).transpose(1, 2)

    @torch.no_grad()
    def solve(
        self,
        puzzles: Tensor,
        *,
        steps: int = 600,
        beta: tuple[float, float] = (0.5, 8.0),
        damping: float = 0.3,
    ) -> SudokuAnswer:
        """Solve puzzles by annealing: beta grows geometrically from the first to the second value.

        A board whose most probable digits keep all rules is finished, and one whose probabilities are no
        longer finite; this is looked at every 25 steps.

        Args:
            puzzles: (B, 81) int64, 0 = unknown.
            steps: evaluations of the mean field at most.
            beta: inverse temperatures, 0 < first <= second.
            damping: eta in (0, 1].
        """
        require_count("steps", steps)
        if not isinstance(beta, (tuple, list)) or len(beta) != 2:
            raise ValueError(f"beta must be two rising numbers, got {beta!r}")
        first, last = (require_positive("beta", value) for value in beta)
        if first > last:
            raise ValueError(f"beta must be two rising numbers, got {beta!r}")
        require_number("damping", damping, low=0.0, high=1.0, closed=False)
        run = BoardRun(puzzles, self._uniform())
        for step in range(1, steps + 1):
            now = first * (last / first) ** ((step - 1) / max(steps - 1, 1))
            run.advance(self, now, damping)
            if step == steps or step % CHECKED_EVERY == 0:
                run.take_out(run.ended() | (step == steps), self, now)
                if len(run.active) == 0:
                    break
        return run.answer()

    @torch.no_grad()
    def decimate(
        self, puzzles: Tensor, *, beta: float = 2.0, steps: int = 10, damping: float = 0.3
    ) -> SudokuAnswer:
        """Solve puzzles by decimation: fix the surest unknown cell, relax the others, and again.

        A board is finished when its most probable digits keep all rules, when all cells are fixed, or
        when a probability is not finite.

        Args:
            puzzles: (B, 81) int64, 0 = unknown.
            beta: inverse temperature.
            steps: of the mean field before each cell is fixed; ten times as many before the first.
            damping: eta in (0, 1].
        """
        require_positive("beta", beta)
        require_count("steps", steps)
        require_number("damping", damping, low=0.0, high=1.0, closed=False)
        run = BoardRun(puzzles, self._uniform())
        for index in range(CELLS):
            for _ in range(10 * steps if index == 0 else steps):
                run.advance(self, beta, damping)
            last = index == CELLS - 1  # of a puzzle without clues one cell is then left
            run.take_out(run.ended() | run.known.all(2).all(1) | last, self, beta)
            if len(run.active) == 0:
                break
            run.fix_surest()
        return run.answer()

    def field(self, means: Tensor) -> Tensor:
        """``sum_j J_ij m_j``, (B, 81, 9)."""
        return (means.flatten(1) @ self.matrix).view(means.shape)  # the matrix is symmetric

    def _uniform(self) -> Tensor:
        """(81, 9), uniform but for a small noise, the same for all boards."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(CELLS, SIDE, generator=generator).to(self.matrix)
        return torch.softmax(NOISE * noise, -1)


def random_symmetries(boards: Tensor, generator: torch.Generator) -> Tensor:
    """A random symmetry of each solved board, colours (B, 81) in 0 .. 8: ``augment`` of a fit."""
    digits = boards + 1
    return SudokuSymmetries()(digits, digits, generator)[1] - 1


def _scale(gauged: Tensor) -> Tensor:
    """What brings the mean diagonal entry of the 810 strongest pairs to ``-(1 - 1/9)``."""
    rows, columns = torch.triu_indices(CELLS, CELLS, 1, device=gauged.device)
    blocks = gauged[rows, columns]
    strongest = torch.linalg.matrix_norm(blocks).topk(PAIRS).indices
    mean = blocks[strongest].diagonal(dim1=1, dim2=2).mean()
    if not bool(mean < 0):
        raise ValueError(
            f"couplings must repel equal digits, got a mean of {float(mean):.3g} on the diagonals of "
            "the 810 strongest pairs"
        )
    return (1 / SIDE - 1) / mean


def check_puzzles(puzzles: Tensor) -> Tensor:
    """Puzzles (B, 81) of integers in 0 .. 9, or errors that say so."""
    if not isinstance(puzzles, Tensor) or puzzles.dtype != torch.int64:
        kind = puzzles.dtype if isinstance(puzzles, Tensor) else type(puzzles).__name__
        raise TypeError(f"puzzles must be int64 (B, 81), got {kind}")
    if puzzles.dim() != 2 or puzzles.shape[1] != CELLS or len(puzzles) == 0:
        raise ValueError(f"puzzles must be (B, 81) with B >= 1, got {tuple(puzzles.shape)}")
    low, high = (int(value) for value in puzzles.aminmax())
    if low < 0 or high > SIDE:
        raise ValueError(f"puzzles must hold 0 .. 9, got {low} .. {high}")
    return puzzles
