"""A learned solver of boards: the state in which cells and groups have nothing new to tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.deq import DEQ
from implicit_attn.models.boards.board_update import BoardUpdate
from solvers.core.checks import require_count, require_instance
from solvers.methods.forward import Forward

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class BoardSolver(nn.Module):
    """Fills in boards by repeating a :class:`BoardUpdate`; logits of the colours of every cell.

    In training the last ``window`` iterations have gradients and logits of their own. With random
    numbers of iterations (``Recipe(iterations=(window, iterations))``) no iteration is the last one:
    what is found must stay.

    Args:
        groups: cells of each group, as :func:`learn_groups` finds them.
        cells: N.
        colours: q.
        features, width: of :class:`BoardUpdate`.
        iterations: of the update, as many as a training batch has at most; a call may ask for any other
            number.
        window: iterations with gradients; None: all.
        layer: options of the ``DEQ`` for :meth:`solve` (solver, tolerance, max_steps, ...);
            the solver is ``solvers.Forward()`` and ``max_steps`` eight times the iterations by default.
            The map is trained in plain iterations and made for them. Methods that extrapolate leave the
            states that it has learned from: of 100 boards with 20 givens trained weights solved 94 by
            ``Forward``, 45 by ``Anderson`` and 9 by ``Broyden``, in at most 512 evaluations.

    Attributes:
        layer: the ``DEQ``; ``layer.last`` tells how the latest :meth:`solve` went.

    Shapes: puzzles (B, N) of integers in 0 .. q, 0 = unknown -> logits (B, N, q) of the colours
    1 .. q. In training (window, B, N, q), after each of the last iterations.

    Raises:
        TypeError, ValueError: an argument is wrong; ``window > iterations``.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        cells: int = 81,
        colours: int = 9,
        *,
        features: int = 24,
        width: int = 48,
        iterations: int = 32,
        window: int | None = None,
        layer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.iterations = require_count("iterations", iterations)
        self.window = self.iterations if window is None else require_count("window", window)
        if self.window > self.iterations:
            raise ValueError(f"window must be <= iterations, {iterations}, got {window}")
        update = BoardUpdate(groups, cells, colours, features, width)
        options = {"solver": Forward(), "max_steps": 8 * self.iterations, **(layer or {})}
        self.layer = DEQ(update, **options)
        self.head = nn.Linear(features, 1)

    @property
    def update(self) -> Any:
        """The :class:`BoardUpdate`."""
        return self.layer.update

    def forward(self, puzzles: Tensor, iterations: int | None = None) -> Tensor:
        """Logits after ``iterations`` of the update; in training see above.

        Raises:
            ValueError: ``puzzles`` of another shape, dtype or colours; fewer iterations than the window
                in training.
        """
        count = self.iterations if iterations is None else require_count("iterations", iterations)
        window = self.window if self.training else 0
        if count < window:
            raise ValueError(f"iterations must be >= the window, {window}, got {iterations}")
        prepared, state = self._begin(puzzles)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.training):
            for _ in range(count - window):
                state = self.update.advance(state, prepared)
        if not self.training:
            return self.classify(state)
        kept = []
        for _ in range(window):
            state = self.update.advance(state, prepared)
            kept.append(self.classify(state))
        return torch.stack(kept)

    def solve(self, puzzles: Tensor, **options: Any) -> Any:
        """Every board until it has converged: a ``solvers.Solution`` whose value are logits (B, N, q).

        Status, residual and evaluations of each board are in it.

        Args:
            puzzles: (B, N).
            options: of :meth:`DEQ.solve`: solver, tolerance, max_steps, adjoint, on_failure, record.
        """
        solution = self.layer.solve(self.marks(puzzles), **options)
        return replace(solution, value=self.classify(solution.value))

    def trajectory(self, puzzles: Tensor, iterations: int) -> Iterator[Tensor]:
        """Logits (B, N, q) after each of so many iterations, one after the other."""
        prepared, state = self._begin(puzzles)
        for _ in range(require_count("iterations", iterations)):
            state = self.update.advance(state, prepared)
            yield self.classify(state)

    def marks(self, puzzles: Tensor) -> Tensor:
        """Of each cell and colour, one-hot (B, N, q, 3): given, another is given, nothing is given.

        Raises:
            TypeError: ``puzzles`` are no tensor.
            ValueError: they have another shape, dtype or colours.
        """
        cells, colours = self.update.cells, self.update.colours
        require_instance("puzzles", puzzles, Tensor, "a tensor")
        if puzzles.dim() != 2 or puzzles.shape[1] != cells or puzzles.dtype not in INTEGERS:
            raise ValueError(
                f"puzzles must be integers (B, {cells}), got {puzzles.dtype} {tuple(puzzles.shape)}"
            )
        outside = (puzzles < 0) | (puzzles > colours)
        if puzzles.device.type == "cpu" and bool(outside.any()):  # a GPU would be waited for
            raise ValueError(
                f"puzzles must be in 0 .. {colours}, got {puzzles[outside][:5].tolist()}"
            )
        numbers = torch.arange(1, colours + 1, device=puzzles.device)
        given = puzzles.unsqueeze(2) == numbers
        unknown = (puzzles == 0).unsqueeze(2).expand_as(given)
        marks = torch.stack([given, ~given & ~unknown, unknown], -1)
        return marks.to(self.head.weight.dtype)

    def classify(self, state: Tensor) -> Tensor:
        """A state (B, N, q, m) -> logits (B, N, q)."""
        return self.head(state).squeeze(-1)

    def _begin(self, puzzles: Tensor) -> tuple[Tensor, Tensor]:
        """The embedded marks and the state before the first iteration."""
        prepared = self.update.prepare(self.marks(puzzles))
        return prepared, self.update.initial(prepared)
