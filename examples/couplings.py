"""Potts models on sparse graphs, and measures of how well their couplings are recovered."""

import math
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

import solvers
from implicit_attn.energies.spins import zero_sum
from implicit_attn.studies import SpinModel

GRAPHS = {"er-kron": 1.0, "er-general": 1.0, "tree": 3.0, "ring4": -2.0}  # strengths of the edges


def graph_potts(kind: str, generator: Generator, sites: int = 20, colours: int = 10) -> SpinModel:
    """A Potts model without fields on a sparse graph, float64.

    =============  ===============================================  ==================================
    ``kind``       graph                                            block of an edge
    =============  ===============================================  ==================================
    "er-kron"      random pairs of sites                            ``+-U``, a random sign an edge
    "er-general"   random pairs of sites                            ``U_ij``, another one an edge
    "tree"         binary tree, site i below site ``(i - 1) // 2``  ``3 I``, equal colours attract
    "ring4"        ring, each site with those 1 and 4 further on    ``-2 I``, equal colours repel
    =============  ===============================================  ==================================

    The random ``U`` has entries N(0, 1) off its diagonal; in "er-kron" it is symmetric,
    ``(G + G^T) / sqrt 2`` with normal ``G``. All but "er-general" are a matrix of sites times a matrix of
    colours, ``J_ij^{ab} = A_ij U_ab``. Random graphs have three neighbours a site.

    Source: R. Rende, F. Gerace, A. Laio, S. Goldt, "Mapping of attention mechanisms to a generalized Potts
    model" (https://arxiv.org/abs/2304.07235), for the form ``A_ij U_ab``.
    """
    options: Any = {"generator": generator, "dtype": torch.float64}
    around = torch.arange(sites)
    if kind == "tree":
        pairs = torch.stack([(around[1:] - 1) // 2, around[1:]], dim=1)
    elif kind == "ring4":
        pairs = torch.cat([torch.stack([around, (around + k) % sites], dim=1) for k in (1, 4)])
    else:
        every = torch.combinations(around)
        pairs = every[torch.randperm(len(every), generator=generator)[: 3 * sites // 2]]
    blocks = torch.eye(colours, dtype=torch.float64).expand(len(pairs), colours, colours)
    if kind == "er-general":
        blocks = torch.randn(len(pairs), colours, colours, **options)
    elif kind == "er-kron":
        signs = 2.0 * torch.randint(0, 2, (len(pairs), 1, 1), generator=generator) - 1
        normal = torch.randn(colours, colours, **options)
        blocks = signs * (normal + normal.mT) / math.sqrt(2)
    couplings = torch.zeros(sites, sites, colours, colours, dtype=torch.float64)
    first, second = pairs.unbind(1)
    couplings[first, second] = GRAPHS[kind] * blocks
    couplings[second, first] = GRAPHS[kind] * blocks.mT
    field = torch.zeros(1, sites, colours, dtype=torch.float64)
    return SpinModel(couplings, field, torch.eye(colours).double(), solvers.PottsSite())


def neighbours(model: SpinModel) -> Tensor:
    """(N, N) bool: which pairs of sites the model couples."""
    return (model.couplings != 0).any(-1).any(-1)


def conditional_logits(model: SpinModel, colours: Tensor) -> Tensor:
    """``x_i^a + sum_j J_ij^{a s_j}`` (M, N, d) of colours ``s`` (M, N): up to a constant the logarithm
    of ``p(S_i = a | all other sites)``."""
    spins = F.one_hot(colours, model.field.shape[-1]).to(model.field)
    return torch.einsum("ijab,mjb->mia", model.couplings, spins) + model.field


def bayes_npl(model: SpinModel, colours: Tensor) -> float:
    """The least ``-1/(M N) sum_mu sum_i log p(s_i^mu | all other sites)``: that of the model of the samples.

    What a predictor of one site from all others loses beyond it, on the same samples, is its excess.
    """
    logits = conditional_logits(model, colours)
    return F.cross_entropy(logits.flatten(0, 1), colours.flatten()).item()


def contact_scores(couplings: Tensor) -> Tensor:
    """Strength of every pair, ``|J^_ij|_F`` in the zero-sum gauge, (N, N)."""
    return torch.linalg.matrix_norm(zero_sum(couplings))


def coupling_error(couplings: Tensor, truth: Tensor) -> float:
    """``|J^ - J^_true|_F / |J^_true|_F`` in the zero-sum gauge, of couplings (N, N, d, d)."""
    true = zero_sum(truth.detach().double())
    return float((zero_sum(couplings.detach().to(true)) - true).norm() / true.norm())


def contact_precision(scores: Tensor, edges: Tensor) -> float:
    """Share of true pairs ``edges`` (N, N) among as many pairs with the largest scores (N, N)."""
    rows, columns = torch.triu_indices(len(scores), len(scores), 1)
    true = edges[rows, columns]
    strongest = scores[rows, columns].topk(int(true.sum())).indices
    return float(true[strongest].double().mean())


@torch.no_grad()
def categorical_jacobian(
    model: Any, sequences: Tensor, colours: int, *, mask: int | None = None, batch: int = 4000
) -> Tensor:
    """What setting site j to b does to the logits of site i: couplings of a black box, (N, N, d, d).

    ``J_ij^{ab}`` is the logit of colour a at site i, site i masked and site j set to b, averaged over
    what the other sites are in ``sequences``; ``J_ii = 0``. It is exact, up to the parts that only move
    fields, for a model whose logits are a sum of terms of single sites: compare after ``zero_sum``.

    ``model`` maps tokens (B, N) to logits (B, N, d), at most ``batch`` sequences a call; of ``sequences``
    (M, N) a dozen usually suffice, N^2 d M are evaluated. ``mask`` is the token that hides a site; None: the
    model does not look at the site that it predicts.

    Source: Z. Zhang et al. (2024), "Protein language models learn evolutionary statistics of interacting
    sequence motifs", https://doi.org/10.1073/pnas.2406285121, for the name and its use on proteins.
    """
    number, sites = sequences.shape
    training, rows = model.training, []
    model.eval()
    for i in range(sites):
        # (j, b, M, N): every other site set to every colour in every sequence
        changed = sequences.expand(sites, colours, number, sites).clone()
        for j in range(sites):
            changed[j, :, :, j] = torch.arange(colours)[:, None]
        if mask is not None:
            changed[..., i] = mask
        parts = [model(part)[:, i] for part in changed.flatten(0, 2).split(batch)]
        row = torch.cat(parts).view(sites, colours, number, -1).mean(2).mT.clone()  # (j, a, b)
        row[i] = 0
        rows.append(row)
    model.train(training)
    return torch.stack(rows)
