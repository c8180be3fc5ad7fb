"""Groups of cells that constrain each other, learned from complete boards."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from implicit_attn.energies.spins.gauge import binary_size, check_couplings, zero_sum
from implicit_attn.models.potts.factored import FactoredAttention
from implicit_attn.models.potts.fitting import fit_pseudolikelihood
from solvers.core.checks import require_count

RATE, BATCH, L2 = 0.1, 128, 1e-4
MOST_GROUPS = 10_000  # a graph of n cells may have 3^(n/3) maximal cliques
CHANCE = 0.01  # expected pairs of free cells that never share a colour in the boards, at most
CLEAR = 1 / 3  # of the weakest strong coupling, by which the next one must be weaker


def learn_groups(
    boards: Tensor, colours: int, *, steps: int = 100, seed: int = 0
) -> list[list[int]]:
    """The groups of cells that constrain each other, from complete boards alone.

    One head of factored attention is fitted to predict each cell from all others (by
    pseudo-likelihood). The strengths of its couplings fall into two sets: they are parted at their
    widest gap. The stronger pairs are the edges of a graph, and its maximal cliques are the groups.
    For Sudoku these are the 27 rows, columns and boxes.

    Few boards show wrong groups: cells that are free to agree have different colours in all of them by
    chance. With N (N - 1) / 2 pairs of cells that agree once in q boards, less than 0.01 such pairs are
    expected from ``log(50 N (N - 1)) / log(q / (q - 1))`` boards on, 108 for Sudoku. Fewer are refused,
    and what was learned from more is checked: the gap is clear, and in every board a group has each
    colour at most once.

    Args:
        boards: (M, N) int64, colours in 0 .. q - 1.
        colours: q.
        steps: of Adam.
        seed: of the batches.

    Returns:
        Groups of at least two cells each, sorted.

    Raises:
        TypeError, ValueError: boards of another dtype or shape, with other colours, or too few; a gap
            of less than a third of the strength above it, a graph of more than 10,000 groups, or a
            group with a colour twice in a board.

    Source: Rende, Gerace, Laio, Goldt, "Mapping of attention mechanisms to a generalized Potts model"
    (2024), https://arxiv.org/abs/2304.07235, for the head.
    """
    if not isinstance(boards, Tensor) or boards.dtype != torch.int64:
        kind = boards.dtype if isinstance(boards, Tensor) else type(boards).__name__
        raise TypeError(f"boards must be an int64 tensor, got {kind}")
    if boards.dim() != 2 or boards.shape[0] == 0 or boards.shape[1] < 3:
        raise ValueError(f"boards must be (M, N) with N >= 3, got {tuple(boards.shape)}")
    least = _fewest_boards(boards.shape[1], require_count("colours", colours, low=2))
    if len(boards) < least:
        raise ValueError(
            f"boards must be at least {least} to learn groups of {boards.shape[1]} cells and {colours} "
            f"colours, got {len(boards)}: in fewer, free cells differ everywhere by chance"
        )
    with torch.random.fork_rng(devices=[]):  # a single head starts at zero; nothing is random
        model = FactoredAttention(boards.shape[1], colours, rows="softmax")
    model.field.requires_grad_(False)  # no colour is special in any cell
    fit_pseudolikelihood(
        model, boards, L2, "adam", steps=require_count("steps", steps), rate=RATE, batch=BATCH,
        schedule="constant", seed=seed,
    )  # fmt: skip
    pairs, gap = strong_pairs(model.couplings().detach())
    if not gap >= CLEAR:
        raise ValueError(
            f"boards must show which cells belong together: the widest gap between the {steps} steps' "
            f"couplings is {gap:.2f} of the strength above it, less than {CLEAR:.2f}; give more boards "
            "or steps"
        )
    found = maximal_cliques(pairs)
    for group in found:
        shared = boards[:, group].sort(1).values.diff(dim=1) == 0
        if bool(shared.any()):
            raise ValueError(
                f"boards must have each colour at most once in a group, got it twice in the cells {group} "
                "of the learned graph; give more boards or steps"
            )
    return found


def _fewest_boards(cells: int, colours: int) -> int:
    """So many that less than ``CHANCE`` pairs of free cells are expected to differ in all of them."""
    pairs = cells * (cells - 1) / 2
    return math.ceil(math.log(pairs / CHANCE) / -math.log1p(-1 / colours))


def strong_pairs(couplings: Tensor) -> tuple[Tensor, float]:
    """The pairs above the widest gap between the sorted strengths of couplings.

    Args:
        couplings: J (N, N, q, q), floating, N >= 3; both directions are averaged.

    Returns:
        (N, N) bool, symmetric, with a diagonal of False; and the gap, as a share of the strength above
        it: 1 where the other couplings are zero, 0 where all are alike.
    """
    check_couplings(couplings)
    strengths = torch.linalg.matrix_norm(zero_sum(couplings / binary_size(couplings)))
    strengths = (strengths + strengths.T) / 2
    rows, columns = torch.triu_indices(len(strengths), len(strengths), 1, device=couplings.device)
    values = strengths[rows, columns].sort(descending=True).values
    gaps = values[:-1] - values[1:]
    last = gaps.argmax()
    share = float(gaps[last] / values[last].clamp_min(torch.finfo(values.dtype).tiny))
    return (strengths >= values[last]).fill_diagonal_(False), share


def maximal_cliques(pairs: Tensor) -> list[list[int]]:
    """All maximal cliques of two nodes or more, sorted, by the algorithm of Bron and Kerbosch.

    Args:
        pairs: (N, N) bool, symmetric; the diagonal has no effect.

    Raises:
        TypeError, ValueError: another dtype or shape, not symmetric, or more than 10,000 cliques.

    Source: Bron, Kerbosch, "Algorithm 457: finding all cliques of an undirected graph" (1973),
    https://doi.org/10.1145/362342.362367.
    """
    if pairs.dtype != torch.bool:
        raise TypeError(f"pairs must be bool, got {pairs.dtype}")
    if pairs.dim() != 2 or not torch.equal(pairs, pairs.mT):
        raise ValueError(f"pairs must be a symmetric matrix (N, N), got {tuple(pairs.shape)}")
    nodes = range(len(pairs))
    near = [{b for b in nodes if b != a and row[b]} for a, row in enumerate(pairs.tolist())]
    found: list[list[int]] = []

    def extend(clique: list[int], candidates: set[int], excluded: set[int]) -> None:
        if not candidates and not excluded:
            if len(clique) > 1:
                found.append(sorted(clique))
            if len(found) > MOST_GROUPS:
                raise ValueError(f"pairs must have at most {MOST_GROUPS} maximal cliques, got more")
            return
        # Neighbours of the pivot are reached through others: they need no branch of their own.
        pivot = max(candidates | excluded, key=lambda node: len(candidates & near[node]))
        for node in sorted(candidates - near[pivot]):
            extend([*clique, node], candidates & near[node], excluded & near[node])
            candidates = candidates - {node}
            excluded = excluded | {node}

    extend([], set(nodes), set())
    return sorted(found)
