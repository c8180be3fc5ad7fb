"""Sudoku as a Potts model: couplings that repel equal digits, solved by mean field with fixed clues."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from implicit_attn.data.sudoku_boards import CELLS, SIDE, SudokuSymmetries, units
from implicit_attn.energies.spins.gauge import binary_size, check_couplings, zero_sum
from implicit_attn.models.potts.board_runs import BoardRun, SudokuAnswer
from implicit_attn.models.potts.factored import FactoredAttention
from implicit_attn.models.potts.potts_model import PottsModel
from solvers.core.checks import require_count, require_flag, require_number, require_positive

PAIRS = 810  # of cells in a row, a column or a box
NOISE = 1e-3  # of the start, relative to 1/9: parts digits that no clue tells apart
CHECKED_EVERY = 25  # steps of an annealing: each look waits for the device


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
        normalise: scale them. False: the gauge only.

    Raises:
        TypeError, ValueError: another type or shape; couplings that do not repel equal digits cannot
            be scaled.
    """

    matrix: Tensor

    def __init__(self, couplings: Tensor, normalise: bool = True) -> None:
        super().__init__()
        if not isinstance(couplings, Tensor) or not couplings.is_floating_point():
            kind = couplings.dtype if isinstance(couplings, Tensor) else type(couplings).__name__
            raise TypeError(f"couplings must be a floating tensor, got {kind}")
        if tuple(couplings.shape) != (CELLS, CELLS, SIDE, SIDE):
            raise ValueError(
                f"couplings must be (81, 81, 9, 9) of cells and digits, got {tuple(couplings.shape)}"
            )
        check_couplings(couplings)
        if require_flag("normalise", normalise):
            gauged = zero_sum(couplings.detach() / binary_size(couplings))
            gauged = gauged * _scale(gauged)
        else:
            gauged = zero_sum(couplings.detach())
        size = CELLS * SIDE
        matrix = gauged.transpose(1, 2).reshape(size, size).contiguous()
        self.register_buffer("matrix", matrix)

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

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        require_count("steps", steps)
        first, last = _two_betas(beta)
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

        Raises:
            TypeError, ValueError: an argument is wrong.
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


def sudoku_pairs() -> Tensor:
    """(81, 81) bool: the 810 pairs of different cells in one row, column or box, both directions."""
    pairs = torch.zeros(CELLS, CELLS, dtype=torch.bool)
    for unit in units():
        pairs[unit[:, None], unit] = True
    return pairs.fill_diagonal_(False)


def random_symmetries(boards: Tensor, generator: torch.Generator) -> Tensor:
    """A random symmetry of each solved board, colours (B, 81) in 0 .. 8: ``augment`` of a fit."""
    digits = boards + 1
    return SudokuSymmetries()(digits, digits, generator)[1] - 1


def _two_betas(beta: tuple[float, float]) -> tuple[float, float]:
    if not isinstance(beta, (tuple, list)):
        raise TypeError(f"beta must be two rising numbers, got {beta!r}")
    if len(beta) != 2:
        raise ValueError(f"beta must be two rising numbers, got {beta!r}")
    first, last = (require_positive("beta", value) for value in beta)
    if first > last:
        raise ValueError(f"beta must be two rising numbers, got {beta!r}")
    return first, last


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
