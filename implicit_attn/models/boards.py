"""Boards: learning groups of cells, a solver that repeats one update, and Sudoku with any backbone."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.data.sudoku import CELLS, PLACES, SIDE
from implicit_attn.deq import DEQ
from implicit_attn.energies.spins import zero_sum
from implicit_attn.models.images import grid_positions
from implicit_attn.models.potts import FactoredAttention, fit_pseudolikelihood
from implicit_attn.updates import Update
from solvers import Solution, SolveError, SolveWarning, Tolerance
from solvers.core.checks import (
    require_choice,
    require_count,
    require_integers,
    require_number,
)
from solvers.core.messages import warn_user
from solvers.core.solution import check_on_failure
from solvers.methods.steps import Forward

MOST_GROUPS = 10_000  # a graph of n cells may have 3^(n/3) maximal cliques
# Largest expected number of unrelated pairs of cells that differ in all boards by chance.
CHANCE_PAIRS = 0.01
# Smallest gap between strong and weak couplings, as a share of the weakest strong one.
SMALLEST_GAP = 1 / 3


def learn_groups(
    boards: Tensor, colours: int, *, steps: int = 100, seed: int = 0
) -> list[list[int]]:
    """Learn the groups of cells that constrain each other from complete boards only.

    One head of factored attention is fitted to predict each cell from all others by pseudo-likelihood. The
    widest gap separates its couplings into strong and weak ones. The strong pairs are the edges of a
    graph, and its maximal cliques are the groups. For Sudoku these are the 27 rows, columns and boxes.

    With few boards two unrelated cells may differ in every board by chance. From
    ``log(50 N (N - 1)) / log(q / (q - 1))`` boards on, 108 for Sudoku, fewer than 0.01 such pairs are
    expected.

    Args:
        boards: (M, N) integers, colours in 0 .. q - 1.
        colours: number of colours q.
        steps: number of Adam steps.
        seed: seed of the batches.

    Returns:
        Sorted groups of at least two cells each.

    Raises:
        ValueError: if the boards are invalid or fewer than that, if the gap is less than a third of the
            strength above it, if there are more than 10,000 groups, or if a group repeats a colour in a
            board.

    Source: Rende, Gerace, Laio, Goldt, "Mapping of attention mechanisms to a generalized Potts model"
    (2024), https://arxiv.org/abs/2304.07235, for the head.
    """
    high = require_count("colours", colours, low=2) - 1
    if require_integers("boards", boards, (None,), high=high).shape[1] < 3:
        raise ValueError(f"boards must be (M, N) with N >= 3, got {tuple(boards.shape)}")
    per_board = -math.log1p(-1 / colours)  # -log P(two colours differ by chance)
    least = math.ceil(math.log(math.comb(boards.shape[1], 2) / CHANCE_PAIRS) / per_board)
    if len(boards) < least:
        raise ValueError(
            f"boards must contain at least {least} boards to learn groups from {boards.shape[1]} cells and "
            f"{colours} colours, got {len(boards)}: with fewer, unrelated cells differ by chance"
        )
    with torch.random.fork_rng(devices=[]):  # a single head starts at zero whatever it draws
        model = FactoredAttention(boards.shape[1], colours, rows="softmax")
    model.field.requires_grad_(False)  # all colours are equivalent in every cell
    fit_pseudolikelihood(
        model, boards, 1e-4, "adam", steps=steps, rate=0.1, batch=128, schedule="constant", seed=seed
    )  # fmt: skip
    pairs, gap = _strong_pairs(model.couplings().detach())
    if not gap >= SMALLEST_GAP:
        raise ValueError(
            f"boards must separate related from unrelated cells: after {steps} steps the widest relative gap "
            f"of the couplings is {gap:.2f}, expected >= {SMALLEST_GAP:.2f}; pass more boards or steps"
        )
    found = maximal_cliques(pairs)
    for group in found:
        if bool((boards[:, group].sort(1).values.diff(dim=1) == 0).any()):
            raise ValueError(
                f"boards must have each colour at most once in a group, got a repeated one in cells {group} "
                "of the learned graph; pass more boards or steps"
            )
    return found


def _strong_pairs(couplings: Tensor) -> tuple[Tensor, float]:
    """Return the pairs (N, N) of couplings (N, N, q, q) above the widest gap between their sorted strengths.

    The number is the gap relative to the strength above it: 1 if the other couplings are zero, 0 if all are
    equal. Both directions are averaged.
    """
    strengths = torch.linalg.matrix_norm(zero_sum(couplings.double()))  # squares do not overflow
    strengths = (strengths + strengths.T) / 2
    rows, columns = torch.triu_indices(len(strengths), len(strengths), 1)
    values = strengths[rows, columns].sort(descending=True).values
    gaps = values[:-1] - values[1:]
    last = gaps.argmax()
    share = float(gaps[last] / values[last].clamp_min(torch.finfo(values.dtype).tiny))
    return (strengths >= values[last]).fill_diagonal_(False), share


def maximal_cliques(pairs: Tensor) -> list[list[int]]:
    """Return all maximal cliques of at least two nodes of a graph (N, N) bool, sorted.

    Source: Bron, Kerbosch, "Algorithm 457: finding all cliques of an undirected graph" (1973),
    https://doi.org/10.1145/362342.362367.
    """
    near = [{b for b, joined in enumerate(row) if joined} for row in pairs.tolist()]
    found: list[list[int]] = []

    def extend(clique: list[int], candidates: set[int], excluded: set[int]) -> None:
        if not candidates and not excluded and len(clique) > 1:
            found.append(sorted(clique))
            if len(found) > MOST_GROUPS:
                raise ValueError(f"boards must give at most {MOST_GROUPS} groups, got more")
        if candidates:
            # Neighbours of the pivot are reached through other branches.
            pivot = max(candidates | excluded, key=lambda node: len(candidates & near[node]))
            for node in sorted(candidates - near[pivot]):
                extend([*clique, node], candidates & near[node], excluded & near[node])
                candidates, excluded = candidates - {node}, excluded | {node}

    extend([], set(range(len(near))), set())
    return sorted(found)


MARKS = 3  # marks of a cell and colour: given; another colour is given; no colour is given


class BoardUpdate(Update):
    r"""One message-passing step between the cells of a board and its groups, with shared weights.

    The state has features ``h_ia`` in (-1, 1) for every cell i and colour a. With the members G of a
    group, the groups G(i) of a cell, q colours, n = |G| and the embedded marks ``e_ia = V x_ia + b``::

        c_i  = W_c relu(U_c sum_a h_ia / sqrt(q))                        of a cell, over its colours
        g_Ga = W_g relu(U_g sum_{i in G} h_ia / sqrt(n))                 of a group, for one colour
        y_ia = O relu(A h_ia + e_ia + c_i + sum_{G in G(i)} g_Ga)        two vectors, r and s
        h_ia <- h_ia + sigmoid(s_ia) (tanh(r_ia) - h_ia)

    No weight depends on a cell, a group or a colour. The map is therefore equivariant to permutations of
    the colours and to permutations of the cells that map groups to groups.

    Args:
        groups: cells of each group, integers in 0 .. cells - 1.
        cells, colours: numbers of cells N and of colours q.
        features: number of features m of a cell and colour.
        width: number of hidden units M; not 3, the number of marks.

    Shapes: state (B, N, q, m); input x, the marks (B, N, q, 3), or the result of :meth:`prepare`,
    (B, N, q, M). The initial state is zero.

    Source: message passing between variables and constraints with shared weights, as in Selsam et al.,
    "Learning a SAT solver from single-bit supervision" (2019), https://arxiv.org/abs/1802.03685, and
    Palm, Paquet, Winther, "Recurrent relational networks" (2018), https://arxiv.org/abs/1711.08028.
    """

    members: Tensor

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        cells: int,
        colours: int,
        features: int = 24,
        width: int = 48,
    ) -> None:
        super().__init__()
        self.cells, self.colours = require_count("cells", cells), require_count("colours", colours)
        self.features = require_count("features", features)
        self.width = require_count("width", width)
        if width == MARKS:  # :meth:`forward` distinguishes embedded marks by it
            raise ValueError(f"width must not be {MARKS}, the number of marks, got {width}")
        # Not in the state dict: the groups are arguments, as the sizes are.
        self.register_buffer("members", _incidence(groups, self.cells), persistent=False)
        self.embedding = nn.Linear(MARKS, width)
        self.own = nn.Linear(features, width, bias=False)
        self.to_cell, self.to_group = nn.Linear(features, width), nn.Linear(features, width)
        self.from_cell = nn.Linear(width, width, bias=False)
        self.from_group = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, 2 * features)

    def prepare(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Return the embedded marks e (B, N, q, M)."""
        return self.embedding(x)

    def start(self, x: Tensor, prepared: Tensor) -> Tensor:
        """Return zeros (B, N, q, m) in the dtype of the embedded marks, which is that of autocast."""
        return prepared.new_zeros(*prepared.shape[:-1], self.features)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return the state (B, N, q, m) after one step."""
        return self.advance(z, self.prepare(x) if x.shape[-1] == MARKS else x)

    def advance(self, z: Tensor, prepared: Tensor) -> Tensor:
        """Return the state after one step from the embedded marks (B, N, q, M)."""
        batch = z.shape[0]
        cells = self.to_cell(z.sum(2) * self.colours**-0.5)
        scaled = self.members * self.members.sum(1, keepdim=True).rsqrt()
        sums = torch.matmul(scaled, z.flatten(2))
        sums = sums.view(batch, len(scaled), self.colours, self.features)
        groups = self.from_group(torch.relu(self.to_group(sums))).flatten(2)
        back = torch.matmul(self.members.mT, groups).view(prepared.shape)
        cells = self.from_cell(torch.relu(cells)).unsqueeze(2)
        found = self.output(torch.relu(self.own(z) + prepared + cells + back))
        target, gate = found.split(self.features, -1)
        return torch.lerp(z, torch.tanh(target), torch.sigmoid(gate))

    def extra_repr(self) -> str:
        return f"cells={self.cells}, colours={self.colours}, groups={len(self.members)}"


def _incidence(groups: Sequence[Sequence[int]], cells: int) -> Tensor:
    """Return (groups, cells), 1 if a cell is in a group."""
    if len(groups) == 0:
        raise ValueError("groups must contain at least one group, got none")
    incidence = torch.zeros(len(groups), cells)
    for row, group in zip(incidence, groups, strict=True):
        members = [require_count("a cell of groups", cell, low=0) for cell in group]
        if len(members) == 0 or max(members) >= cells or len(set(members)) < len(members):
            raise ValueError(
                f"groups must contain distinct cells in 0 .. {cells - 1}, got {list(group)}"
            )
        row[members] = 1
    return incidence


STOPS = ("consistent", "converged")
DRAWN = 4  # number of boards that ``print`` draws


@dataclass(eq=False, kw_only=True, repr=False)
class BoardSolution(Solution):
    """Result of :meth:`BoardSolver.solve`, a ``solvers.Solution`` with logits as its value.

    ``print`` draws the boards and states whether each is consistent.

    Attributes:
        value: logits (B, N, q), -inf for the other colours of given and guessed cells.
        digits: most probable colours 1 .. q and the givens, (B, N) int64.
        consistent: (B,) bool, whether no group of the board repeats a colour.
        guesses: (B,) int64, number of guesses for the board.
    """

    digits: Tensor
    consistent: Tensor
    guesses: Tensor

    def __str__(self) -> str:
        parts = []
        for k, board in enumerate(self.digits[:DRAWN].tolist()):
            said = "consistent" if self.consistent[k] else "NOT CONSISTENT: a group repeats a digit"
            count = int(self.evaluations[k])
            parts.append(f"{_drawn(board)}\n{self.statuses[k]}, {said}, {count} evaluations")
        if len(self.digits) > DRAWN:
            parts.append(f"... and {len(self.digits) - DRAWN} more boards")
        return "\n\n".join(parts)


def _drawn(board: list[int]) -> str:
    """Format the cells of a board in lines, with separators of boxes for Sudoku."""
    side = math.isqrt(len(board))
    if side**2 != len(board):
        return " ".join(map(str, board))
    lines = [
        " ".join(map(str, board[start : start + side])) for start in range(0, len(board), side)
    ]
    if len(board) == CELLS:
        lines = [f"{line[:5]} | {line[6:11]} | {line[12:]}" for line in lines]
        lines.insert(6, "------+-------+------")
        lines.insert(3, "------+-------+------")
    return "\n".join(lines)


class BoardSolver(nn.Module):
    """A model that solves boards by repeating a :class:`BoardUpdate`.

    In training only the last ``window`` iterations have gradients, and each of them has logits. With random
    numbers of iterations the model cannot know which iteration is the last, so it learns to keep correct
    answers.

    Args:
        groups: cells of each group, such as the result of :func:`learn_groups`.
        cells, colours, features, width: N, q, and sizes of :class:`BoardUpdate`.
        iterations: maximum number of iterations in training; a call may use any other number.
        window: number of iterations with gradients; None for all.
        layer: options of the ``DEQ`` for :meth:`solve`. The default is plain iteration, for which the map
            is trained, to a relative residual of 1e-3 with at most eight times the iterations.

    Shapes: puzzles (B, N) of integers in 0 .. q, 0 = unknown -> logits (B, N, q) of the colours
    1 .. q, -inf for the other colours of given cells. In training (window, B, N, q), after each of the
    last iterations.
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
        options: dict[str, Any] = {"solver": Forward(), "max_steps": 8 * self.iterations}
        options |= {"tolerance": Tolerance(1e-2)} | (layer or {})
        self.layer = DEQ(update, **options)
        self.head = nn.Linear(features, 1)

    @property
    def update(self) -> Any:
        return self.layer.update

    def forward(
        self, puzzles: Tensor, iterations: int | None = None, state: Tensor | None = None
    ) -> Any:
        """Return logits after ``iterations`` of the update, in training after each of the last ``window``.

        With a ``state`` (C, N, q, m), C <= B, the last C boards continue from it and the others start at
        zero, and the result is a pair of the logits and the detached final states (B, N, q, m).
        """
        count = self.iterations if iterations is None else require_count("iterations", iterations)
        window = self.window if self.training else 0
        if count < window:
            raise ValueError(f"iterations must be >= the window, {window}, got {iterations}")
        prepared, z = self._begin(puzzles)
        if state is not None:
            z = torch.cat([z[: len(z) - len(state)], state.to(z)])
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.training):
            for _ in range(count - window):
                z = self.update.advance(z, prepared)
        kept = []
        for _ in range(window):
            z = self.update.advance(z, prepared)
            kept.append(self.classify(z))
        logits = self._clamped(torch.stack(kept) if self.training else self.classify(z), puzzles)
        return logits if state is None else (logits, z.detach())

    def trajectory(self, puzzles: Tensor, iterations: int) -> Iterator[Tensor]:
        """Yield logits (B, N, q) after each iteration."""
        prepared, state = self._begin(puzzles)
        for _ in range(require_count("iterations", iterations)):
            state = self.update.advance(state, prepared)
            yield self._clamped(self.classify(state), puzzles)

    def solve(
        self,
        puzzles: Tensor | str | Sequence[str],
        *,
        stop: str = "consistent",
        guesses: int = 0,
        slots: int = 64,
        on_failure: str | None = None,
        **options: Any,
    ) -> BoardSolution:
        """Repeat the update for every board until its answer is consistent, or until it converges.

        Args:
            puzzles: integers (B, N), 0 = unknown; or a string with one character per cell, "." or "0" =
                unknown, in which white space and ``|``, ``-``, ``+`` are ignored; or a list of strings.
            stop: "consistent" iterates until no group of a board repeats a colour, by the option ``stop`` of
                the layer. If the groups are all rules, a consistent board solves the puzzle. "converged"
                solves for a fixed point with ``layer.solve``. A converged board may be wrong, and the state
                of a correct board may still change a little.
            guesses: maximum number of guesses for a board that is not consistent. Guess k is a copy of the
                puzzle in which the cell with the k-th largest entropy of its logits has its most probable
                colour. The copy is solved in the same way, and its answer is used if it is consistent.
            slots: with "consistent", the number of boards that are solved at a time. Other boards and guesses
                wait in a queue, see :meth:`DEQ.stream`.
            on_failure: "warn", "raise" or "ignore" boards that are not consistent or, with "converged", do
                not converge; None for the layer's option.
            options: options of :meth:`DEQ.solve`, or with "consistent" of :meth:`DEQ.stream`, which has no
                gradients; there the default is plain iteration to a tolerance of 0.

        Returns:
            A :class:`BoardSolution`, which ``print`` draws. With "consistent" a board is STOPPED where it, or
            its accepted guess, is consistent. Evaluations include those of all guesses.

        Raises:
            solvers.SolveError: if ``on_failure="raise"`` and a board failed; ``solution`` contains all.
        """
        boards = puzzles if isinstance(puzzles, Tensor) else self._read(puzzles)
        require_choice("stop", stop, STOPS)
        if require_count("guesses", guesses, low=0) > 0 and stop != "consistent":
            raise ValueError(f"guesses > 0 needs stop='consistent', got {stop!r}")
        policy = self.layer.on_failure if on_failure is None else on_failure
        check_on_failure(policy)
        if stop == "converged" or len(boards) == 0:
            found = self._solve(boards, options | {"on_failure": policy})
        else:
            found = self._search(boards, guesses, require_count("slots", slots), options)
        wrong = int((~found.consistent).sum())
        if wrong and policy != "ignore":
            message = (
                f"{wrong} of {len(boards)} boards are not consistent: a group repeats a colour. "
                'Allow guesses (guesses=8 with stop="consistent") or raise max_steps'
            )
            if policy == "raise":
                raise SolveError(message, found)
            warn_user(message, SolveWarning, self)
        return found

    def _search(
        self, boards: Tensor, guesses: int, slots: int, options: dict[str, Any]
    ) -> BoardSolution:
        """Solve boards (B, N) until they are consistent; copies with a guess enter the same queue."""
        plain: dict[str, Any] = {"solver": Forward(), "tolerance": 0.0, "on_failure": "ignore"}
        options = plain | options | {"stop": self._agrees, "slots": slots}
        queue, found = _Copies(self, boards, slots), dict[str, Tensor]()
        tries = torch.zeros(len(boards), dtype=torch.int64, device=boards.device)
        evaluations = torch.zeros_like(tries)
        order = favourites = torch.zeros_like(boards, dtype=torch.int64)
        while queue.waiting:  # at the end of a stream copies may be left
            for index, solution in self.layer.stream(queue, **options):
                number, puzzles = queue.copies(index)
                logits = self._clamped(self.classify(solution.value), puzzles)
                digits, consistent = self._digits(logits, puzzles)
                names = [each.name for each in fields(Solution) if each.name != "evaluations"]
                parts = {name: getattr(solution, name) for name in names}
                parts |= {"value": logits, "digits": digits, "consistent": consistent}
                first = tries[number] == 0
                taken = number[first | consistent]
                for name, part in parts.items():
                    if isinstance(part, Tensor):
                        whole = found.setdefault(name, part.new_zeros(len(boards), *part.shape[1:]))
                        whole[taken] = part[first | consistent]
                entropy = torch.special.entr(logits[first].softmax(-1)).sum(-1)
                entropy = entropy.masked_fill(puzzles[first] > 0, -1.0)
                order = order.index_copy(0, number[first], entropy.argsort(1, descending=True))
                favourites = favourites.index_copy(0, number[first], logits[first].argmax(-1) + 1)
                evaluations[number] += solution.evaluations
                tries[number] += 1
                unknown = (boards[number] == 0).sum(1)
                again = ~consistent & (tries[number] <= guesses) & (unknown >= tries[number])
                number = number[again]
                cells = order[number].gather(1, tries[number, None] - 1)
                chosen = favourites[number].gather(1, cells).to(boards.dtype)
                queue.add(number, boards[number].scatter(1, cells, chosen))
        return BoardSolution(**found, evaluations=evaluations, guesses=tries - 1)  # type: ignore[arg-type]

    def _agrees(self, state: Tensor, marks: Tensor) -> Tensor:
        """Return (B,) bool, whether the answers of states to puzzles with these marks are consistent."""
        given = marks[..., 0]
        puzzles = torch.where(given.amax(-1) > 0, given.argmax(-1) + 1, 0)
        return self._digits(self.classify(state), puzzles)[1]

    def _solve(self, boards: Tensor, options: dict[str, Any]) -> BoardSolution:
        """Solve boards (B, N) for fixed points."""
        found = self.layer.solve(self.marks(boards), **options)
        logits = self._clamped(self.classify(found.value), boards)
        digits, consistent = self._digits(logits, boards)
        parts = {each.name: getattr(found, each.name) for each in fields(found)}
        parts |= {"value": logits, "digits": digits, "consistent": consistent}
        return BoardSolution(**parts, guesses=torch.zeros_like(found.steps))

    def _digits(self, logits: Tensor, puzzles: Tensor) -> tuple[Tensor, Tensor]:
        """Return givens and most probable colours, (B, N), and whether each board is consistent."""
        digits = torch.where(puzzles > 0, puzzles.long(), logits.argmax(-1) + 1)
        members = self.update.members
        counts = members @ nn.functional.one_hot(digits, self.update.colours + 1).to(members.dtype)
        return digits, (counts <= 1).flatten(1).all(1)

    def _read(self, puzzles: str | Sequence[str]) -> Tensor:
        """Return the boards (B, N) of strings."""
        rows, cells = list[list[int]](), self.update.cells
        for text in [puzzles] if isinstance(puzzles, str) else puzzles:
            signs = re.sub(r"[\s|+-]", "", text).replace(".", "0")
            if not re.fullmatch(rf"[0-9]{{{cells}}}", signs):
                raise ValueError(
                    f"puzzles must be strings of {cells} digits or dots (white space and | - + are "
                    f"ignored), got {len(signs)} characters in {text!r}"
                )
            rows.append([int(sign) for sign in signs])
        return torch.tensor(rows, device=self.head.weight.device)

    def marks(self, puzzles: Tensor) -> Tensor:
        """Return one-hot marks (B, N, q, 3): given, another colour is given, no colour is given."""
        cells, colours = self.update.cells, self.update.colours
        require_integers("puzzles", puzzles, (cells,), high=colours)
        given = puzzles.unsqueeze(2) == torch.arange(1, colours + 1, device=puzzles.device)
        unknown = (puzzles == 0).unsqueeze(2).expand_as(given)
        marks = torch.stack([given, ~given & ~unknown, unknown], -1)
        return marks.to(self.head.weight.dtype)

    def classify(self, state: Tensor) -> Tensor:
        """Convert a state (B, N, q, m) to logits (B, N, q)."""
        return self.head(state).squeeze(-1)

    def _clamped(self, logits: Tensor, puzzles: Tensor) -> Tensor:
        """Set the logits of other colours of given cells, on which the loss is not trained, to -inf."""
        colours = torch.arange(1, self.update.colours + 1, device=puzzles.device)
        other = (puzzles > 0).unsqueeze(2) & (puzzles.unsqueeze(2) != colours)
        return logits.masked_fill(other, -math.inf)

    def _begin(self, puzzles: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embedded marks and the initial state."""
        marks = self.marks(puzzles)
        prepared = self.update.prepare(marks)
        return prepared, self.update.start(marks, prepared)


class _Copies:
    """Batches of boards in a queue, and of copies of boards with a guess, as marks.

    After its end it goes on where copies have been added since.
    """

    def __init__(self, model: BoardSolver, boards: Tensor, size: int) -> None:
        self.marks = model.marks
        numbers = torch.arange(len(boards), device=boards.device)
        self.waiting = deque(zip(numbers.split(size), boards.split(size), strict=True))
        self.handed: list[tuple[Tensor, Tensor]] = []  # numbers of boards and puzzles

    def add(self, numbers: Tensor, puzzles: Tensor) -> None:
        """Add copies of boards with these numbers; they are the next ones."""
        if len(numbers):
            self.waiting.appendleft((numbers, puzzles))

    def copies(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers (n,) of the boards, and the puzzles (n, N), with these places in the queue."""
        numbers, puzzles = zip(*self.handed, strict=True)
        return torch.cat(numbers)[index], torch.cat(puzzles)[index]

    def __iter__(self) -> Iterator[Tensor]:
        self.handed = []
        return self

    def __next__(self) -> Tensor:
        if not self.waiting:
            raise StopIteration
        self.handed.append(self.waiting.popleft())
        return self.marks(self.handed[-1][1])


SCALE = 0.02  # standard deviation of the initial embeddings and positions
STARTS = ("random", "units")
CELL_POSITIONS = ("learned", "sincos")
FINAL_NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class SudokuModel(nn.Module):
    """A Sudoku model with the 81 cells as tokens of a backbone.

    A token is the embedding of the digit, or of "unknown", plus a position.

    Args:
        backbone: module with ``dim`` and ``forward(tokens (B, 81, d), *, iterations=None)``.
        dropout: dropout rate of the tokens in training.
        start: initial positions: "random" as published; "units" adds random vectors of the row, the
            column and the box, so that cells that constrain each other start with similar positions.
        positions: "learned", or "sincos" for the constants of ``grid_positions``.
        final_norm: norm before the readout, "layer" or, as in the official code, "rms".

    Shapes: puzzles (B, 81) of integers, 0 = unknown, rows of the board one after another ->
    logits (B, 81, 9) of the digits 1 .. 9.

    Source: the Sudoku experiments of Hu, Zou, Xu, "Hyper-SET" (https://arxiv.org/abs/2502.11646).
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dropout: float = 0.0,
        start: str = "random",
        positions: str = "learned",
        final_norm: str = "layer",
    ) -> None:
        super().__init__()
        dim: Any = backbone.dim
        require_choice("start", start, STARTS)
        require_choice("final_norm", final_norm, FINAL_NORMS)
        self.digits = nn.Embedding(SIDE + 1, dim)
        nn.init.normal_(self.digits.weight, std=SCALE)
        if require_choice("positions", positions, CELL_POSITIONS) == "learned":
            places = torch.randn(CELLS, dim) if start == "random" else _units(dim)
            self.position = nn.Parameter(SCALE * places)
        elif start != "random":
            raise ValueError(f"start must be 'random' when positions='sincos', got {start!r}")
        else:
            self.register_buffer("position", grid_positions(SIDE, dim), persistent=False)
        self.dropout = nn.Dropout(require_number("dropout", dropout, low=0.0, high=1.0))
        self.backbone = backbone
        self.norm, self.head = FINAL_NORMS[final_norm](dim), nn.Linear(dim, SIDE, bias=False)

    def tokens(self, puzzles: Tensor) -> Tensor:
        """Convert puzzles (B, 81) to the backbone's input, (B, 81, d)."""
        require_integers("puzzles", puzzles, (CELLS,), high=SIDE)
        return self.dropout(self.digits(puzzles) + self.position)

    def classify(self, z: Tensor) -> Tensor:
        """Convert a state (B, 81, d) to logits (B, 81, 9)."""
        return self.head(self.norm(z))

    def forward(self, puzzles: Tensor, iterations: int | None = None) -> Tensor:
        return self.classify(self.backbone(self.tokens(puzzles), iterations=iterations))


def _units(dim: int) -> Tensor:
    """Draw (81, dim), sums of vectors of rows, columns and boxes with variance 1 per cell."""
    vectors = torch.randn(3 * SIDE, dim) / 3**0.5
    return vectors[torch.tensor(PLACES)].sum(1)
