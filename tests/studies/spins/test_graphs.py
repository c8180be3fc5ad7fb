"""Potts models on sparse graphs: their graphs, blocks and exact conditional distributions."""

from __future__ import annotations

import pytest
import torch

from implicit_attn.studies import graph_potts, random_ising
from implicit_attn.studies.spins.graphs import (
    GRAPHS,
    bayes_npl,
    conditional_logits,
    neighbours,
    random_edges,
    ring_edges,
    sparse_potts,
    tree_edges,
)
from implicit_attn.studies.spins.models import SpinModel


def drawn(kind: str, seed: int = 0, **options: float | None) -> SpinModel:
    return graph_potts(kind, torch.Generator().manual_seed(seed), **options)  # type: ignore[arg-type]


def energy(model: SpinModel, colours: torch.Tensor) -> torch.Tensor:
    """``1/2 sum_ij J_ij^{s_i s_j}`` (M,), entry by entry."""
    sites = colours.shape[1]
    total = torch.zeros(len(colours), dtype=torch.float64)
    for i in range(sites):
        for j in range(sites):
            total += 0.5 * model.couplings[i, j, colours[:, i], colours[:, j]]
    return total


@pytest.mark.parametrize("kind", GRAPHS)
def test_couplings_are_symmetric_and_sparse(kind: str) -> None:
    model = drawn(kind)
    assert torch.equal(model.couplings, model.couplings.permute(1, 0, 3, 2))
    graph = neighbours(model)
    edges = {"er-kron": 30, "er-general": 30, "tree": 19, "ring4": 40}[kind]
    assert int(graph.sum()) == 2 * edges and not graph.diagonal().any()
    assert torch.equal(model.couplings, drawn(kind).couplings)  # the same again


@pytest.mark.parametrize(
    ("kind", "rank"), [("er-kron", 1), ("tree", 1), ("ring4", 1), ("er-general", 12)]
)
def test_all_but_one_are_sites_times_colours(kind: str, rank: int) -> None:
    model = drawn(kind, sites=9, colours=4, edges=12 if kind.startswith("er") else None)
    pairs = model.couplings[torch.ones(9, 9).triu(1).bool()].flatten(1)
    assert int(torch.linalg.matrix_rank(pairs)) == rank


def test_the_graphs() -> None:
    assert tree_edges(6).tolist() == [[0, 1], [0, 2], [1, 3], [1, 4], [2, 5]]
    assert ring_edges(5, (1, 2)).tolist()[3:7] == [[3, 4], [4, 0], [0, 2], [1, 3]]
    degrees = neighbours(drawn("ring4", sites=9)).sum(0)
    assert degrees.tolist() == [4] * 9
    every = random_edges(5, 10, torch.Generator().manual_seed(0))
    assert {tuple(pair) for pair in every.tolist()} == {(i, j) for j in range(5) for i in range(j)}


@pytest.mark.parametrize("kind", GRAPHS)
def test_conditionals_against_energies_of_changed_configurations(kind: str) -> None:
    model = drawn(kind, sites=9, colours=3, seed=2)
    generator = torch.Generator().manual_seed(0)
    colours = torch.randint(0, 3, (4, 9), generator=generator)
    logits = conditional_logits(model, colours)
    for site in range(9):
        changed = colours.repeat(3, 1, 1)
        changed[:, :, site] = torch.arange(3)[:, None]
        energies = torch.stack([energy(model, each) for each in changed], dim=1)
        expected = torch.log_softmax(energies, 1)
        torch.testing.assert_close(logits[:, site].log_softmax(1), expected)


def test_the_bayes_npl_is_the_loss_of_the_exact_conditionals() -> None:
    model = drawn("er-general", sites=5, colours=3, edges=4)
    colours = torch.randint(0, 3, (6, 5), generator=torch.Generator().manual_seed(1))
    logs = conditional_logits(model, colours).log_softmax(-1)
    chosen = [logs[m, i, colours[m, i]] for m in range(6) for i in range(5)]
    assert bayes_npl(model, colours) == pytest.approx(-torch.stack(chosen).mean().item(), rel=1e-12)


def test_mistakes() -> None:
    generator = torch.Generator()
    with pytest.raises(ValueError, match="kind must be one of"):
        graph_potts("grid", generator)
    with pytest.raises(ValueError, match="edges must be None for tree"):
        graph_potts("tree", generator, edges=3)
    with pytest.raises(ValueError, match="edges must be at most 10"):
        random_edges(5, 11, generator)
    with pytest.raises(ValueError, match="sites must be >= 9"):
        graph_potts("ring4", generator, sites=8)
    with pytest.raises(ValueError, match="distances must be below half"):
        ring_edges(8, (4,))
    with pytest.raises(ValueError, match="strength must be finite"):
        graph_potts("tree", generator, strength=float("nan"))
    for edges in ([[0, 1], [1, 0]], [[0, 0], [1, 2]], [[0, 1], [1, 3]]):
        with pytest.raises(ValueError, match="edges must be distinct pairs"):
            sparse_potts(3, torch.tensor(edges), torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match="blocks must have the shape"):
        sparse_potts(3, torch.tensor([[0, 1]]), torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match="one-hot spins with one field"):
        conditional_logits(random_ising(3, 1.0, generator), torch.zeros(2, 3).long())
    with pytest.raises(ValueError, match="colours must be integers"):
        bayes_npl(drawn("tree"), torch.zeros(2, 3).long())
