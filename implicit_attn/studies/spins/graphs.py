"""Potts models on sparse graphs, with the exact conditional distributions of their sites."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

import solvers
from implicit_attn.studies.spins.models import SpinModel
from solvers.core.checks import require_choice, require_count

GRAPHS = ("er-kron", "er-general", "tree", "ring4")
DEGREE = 3  # mean number of neighbours of a site of a random graph
_STRENGTHS = {"er-kron": 1.0, "er-general": 1.0, "tree": 3.0, "ring4": -2.0}


def graph_potts(
    kind: str,
    generator: torch.Generator,
    *,
    sites: int = 20,
    colours: int = 10,
    edges: int | None = None,
    strength: float | None = None,
) -> SpinModel:
    """A Potts model without fields on a sparse graph, float64: couplings to be recovered from samples.

    =============  ==============================================  ====================================
    ``kind``       graph                                           block of an edge
    =============  ==============================================  ====================================
    "er-kron"      random pairs of sites                           ``+-U``, a random sign for each edge
    "er-general"   random pairs of sites                           ``U_ij``, another one for each edge
    "tree"         binary tree, site i below site ``(i - 1) // 2``  ``U = I``, equal colours attract
    "ring4"        ring, each site with those 1 and 4 further on   ``U = I``, equal colours repel
    =============  ==============================================  ====================================

    times ``strength``. The random ``U`` has entries N(0, 1) off its diagonal; in "er-kron" it is
    symmetric, ``(G + G^T) / sqrt 2`` with normal ``G``. All but "er-general" are a matrix of sites times
    a matrix of colours, ``J_ij^{ab} = A_ij U_ab``.

    Args:
        kind: one of ``GRAPHS``.
        generator: on the CPU; the edges are drawn first, then the signs, then the blocks.
        sites: N; "ring4" needs at least 9, so that its neighbours are distinct.
        colours: d >= 2.
        edges: of the random graphs, at most N (N - 1) / 2; None: ``3 N / 2``, three neighbours a site.
        strength: factor of the couplings; None: 1 of the random graphs, 3 of the tree, -2 of the ring.

    Raises:
        ValueError: an unknown kind, a number out of range, ``edges`` for a graph that has none to choose.
        TypeError: a number of sites, colours or edges that is no integer.

    Source: the form ``A_ij U_ab`` of the data is that of R. Rende, F. Gerace, A. Laio, S. Goldt, "Mapping of
    attention mechanisms to a generalized Potts model" (https://arxiv.org/abs/2304.07235).
    """
    require_choice("kind", kind, GRAPHS)
    require_count("sites", sites, low=9 if kind == "ring4" else 2)
    require_count("colours", colours, low=2)
    if strength is None:
        strength = _STRENGTHS[kind]
    elif not math.isfinite(strength):
        raise ValueError(f"strength must be finite, got {strength}")
    if kind in ("er-kron", "er-general"):
        number = DEGREE * sites // 2 if edges is None else edges
        pairs = random_edges(sites, number, generator)
        blocks = _random_blocks(kind, len(pairs), colours, generator)
    elif edges is not None:
        raise ValueError(f"edges must be None for {kind}, whose graph is given, got {edges}")
    else:
        pairs = tree_edges(sites) if kind == "tree" else ring_edges(sites, (1, 4))
        blocks = torch.eye(colours, dtype=torch.float64).expand(len(pairs), colours, colours)
    return sparse_potts(sites, pairs, strength * blocks)


def sparse_potts(sites: int, edges: Tensor, blocks: Tensor) -> SpinModel:
    """The Potts model with ``J_ij`` = a block, ``J_ji`` its transpose, on given edges; no fields.

    Args:
        sites: N.
        edges: (E, 2) integers in [0, N), every pair once, no site with itself.
        blocks: (E, d, d), of the edge (i, j) with rows for the colours of i.

    Raises:
        ValueError: edges or blocks that do not fit.
    """
    if edges.dim() != 2 or edges.shape[1] != 2 or edges.is_floating_point():
        raise ValueError(f"edges must be integers (E, 2), got {edges.dtype} {tuple(edges.shape)}")
    if blocks.dim() != 3 or blocks.shape[0] != len(edges) or blocks.shape[1] != blocks.shape[2]:
        raise ValueError(
            f"blocks must have the shape (E, d, d) with E = {len(edges)}, got {tuple(blocks.shape)}"
        )
    first, second = edges.unbind(1)
    ordered = torch.minimum(first, second) * sites + torch.maximum(first, second)
    inside = len(edges) == 0 or (int(edges.min()) >= 0 and int(edges.max()) < sites)
    if not inside or bool((first == second).any()) or len(ordered.unique()) < len(edges):
        raise ValueError(f"edges must be distinct pairs of distinct sites below {sites}")
    colours = blocks.shape[1]
    couplings = torch.zeros(sites, sites, colours, colours, dtype=torch.float64)
    couplings[first, second] = blocks.double()
    couplings[second, first] = blocks.double().mT
    field = torch.zeros(1, sites, colours, dtype=torch.float64)
    return SpinModel(couplings, field, torch.eye(colours).double(), solvers.PottsSite())


def random_edges(sites: int, number: int, generator: torch.Generator) -> Tensor:
    """``number`` distinct pairs of sites (E, 2), i < j, every set of them equally likely."""
    pairs = torch.combinations(torch.arange(require_count("sites", sites, low=2)))
    if require_count("edges", number) > len(pairs):
        raise ValueError(f"edges must be at most {len(pairs)} for {sites} sites, got {number}")
    return pairs[torch.randperm(len(pairs), generator=generator)[:number]]


def tree_edges(sites: int, children: int = 2) -> Tensor:
    """(N - 1, 2): site i is joined to ``(i - 1) // children``."""
    require_count("children", children)
    below = torch.arange(1, require_count("sites", sites, low=2))
    return torch.stack([(below - 1) // children, below], dim=1)


def ring_edges(sites: int, distances: Sequence[int]) -> Tensor:
    """Every site is joined to those ``distances`` further on a ring, (N * number of distances, 2)."""
    around = torch.arange(require_count("sites", sites, low=3))
    for distance in distances:
        if not 0 < require_count("distances", distance) < sites / 2:
            raise ValueError(f"distances must be below half of {sites} sites, got {distance}")
    ends = [torch.stack([around, (around + distance) % sites], dim=1) for distance in distances]
    return torch.cat(ends)


def neighbours(model: SpinModel) -> Tensor:
    """(N, N) bool: which pairs of sites the model couples."""
    return (model.couplings != 0).any(-1).any(-1)


def conditional_logits(model: SpinModel, colours: Tensor) -> Tensor:
    """``x_i^a + sum_j J_ij^{a s_j}`` (M, N, d): up to a constant ``log p(S_i = a | all other sites)``.

    Args:
        model: of one sample (a field for all), spins one-hot.
        colours: ``s`` (M, N), integers in [0, d).

    Raises:
        ValueError: a model with several fields or with spins that are not one-hot, or colours that do
            not fit it.
    """
    samples, sites, dim = model.field.shape
    if samples != 1 or not torch.equal(model.values, torch.eye(dim).to(model.values)):
        raise ValueError(
            f"model must be of one-hot spins with one field, got {samples} fields and spins "
            f"{tuple(model.values.shape)}"
        )
    if colours.dim() != 2 or colours.shape[1] != sites or colours.is_floating_point():
        raise ValueError(
            f"colours must be integers (M, {sites}), got {colours.dtype} {tuple(colours.shape)}"
        )
    spins = F.one_hot(colours, dim).to(model.field.dtype).flatten(1)
    matrix = model.couplings.transpose(1, 2).reshape(sites * dim, sites * dim)
    return (spins @ matrix.mT).view(-1, sites, dim) + model.field


def bayes_npl(model: SpinModel, colours: Tensor) -> float:
    """The least negative log pseudo-likelihood per site: that of the model that made the samples.

    ``-1/(M N) sum_mu sum_i log p(s_i^mu | all other sites)``, an estimate of the mean conditional entropy;
    what a predictor of one site from all others loses beyond it, on the same samples, is its excess.
    Arguments as in :func:`conditional_logits`.
    """
    logits = conditional_logits(model, colours)
    return F.cross_entropy(logits.flatten(0, 1), colours.flatten()).item()


def _random_blocks(kind: str, number: int, colours: int, generator: torch.Generator) -> Tensor:
    """(E, d, d): signs times one symmetric matrix, or free matrices."""
    if kind == "er-general":
        return torch.randn(number, colours, colours, generator=generator, dtype=torch.float64)
    signs = 2.0 * torch.randint(0, 2, (number, 1, 1), generator=generator) - 1
    normal = torch.randn(colours, colours, generator=generator, dtype=torch.float64)
    return signs * (normal + normal.mT) / math.sqrt(2)
