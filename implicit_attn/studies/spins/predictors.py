"""Couplings of any model that predicts one site from the others, and of its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from solvers.core.checks import require_count


@torch.no_grad()
def categorical_jacobian(
    model: Any,
    sequences: Tensor,
    colours: int,
    *,
    mask: int | None = None,
    batch: int = 4000,
    iterations: int | None = None,
) -> Tensor:
    """What setting site j to b does to the logits of site i: couplings of a black box, (N, N, d, d).

    ``J_ij^{ab}`` is the logit of colour a at site i, site i masked and site j set to b, averaged over
    what the other sites are in ``sequences``; ``J_ii = 0``. It is exact, up to the parts that only move
    fields, for a model whose logits are a sum of terms of single sites: compare after ``zero_sum`` of
    ``implicit_attn.energies.spins``.

    Args:
        model: tokens (B, N) -> logits (B, N, d); put into evaluation mode for the calls.
        sequences: (M, N) integers in [0, d), a dozen usually suffice; N^2 d M sequences are evaluated.
        colours: d.
        mask: the token that hides a site; None: the model does not look at the site that it predicts.
        batch: sequences of a call.
        iterations: of a recurrent model; None: as many as it makes by itself.

    Raises:
        ValueError, TypeError: for sequences that are no integers (M, N) or a number out of range.

    Source: Z. Zhang et al. (2024), "Protein language models learn evolutionary statistics of interacting
    sequence motifs", https://doi.org/10.1073/pnas.2406285121, for the name and its use on proteins.
    """
    require_count("colours", colours)
    require_count("batch", batch)
    if sequences.dim() != 2 or sequences.is_floating_point() or len(sequences) == 0:
        raise ValueError(
            f"sequences must be integers (M, N), got {sequences.dtype} {tuple(sequences.shape)}"
        )
    number, sites = sequences.shape
    options = {} if iterations is None else {"iterations": iterations}
    training, found = model.training, None
    model.eval()
    for i in range(sites):
        # (j, b, M, N): every other site set to every colour in every sequence
        changed = sequences.expand(sites, colours, number, sites).clone()
        for j in range(sites):
            changed[j, :, :, j] = torch.arange(colours, device=sequences.device)[:, None]
        if mask is not None:
            changed[..., i] = mask
        parts = [model(part, **options)[:, i] for part in changed.flatten(0, 2).split(batch)]
        logits = torch.cat(parts).view(sites, colours, number, -1).mean(2)  # (j, b, a)
        if found is None:
            found = logits.new_zeros(sites, sites, logits.shape[-1], colours)
        found[i] = logits.mT
        found[i, i] = 0
    model.train(training)
    assert found is not None
    return found
