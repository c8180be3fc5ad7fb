"""Which learning rule finds the couplings of a small Potts model, compared with the exact likelihood?

    python examples/boltzmann_learning.py        # half a minute

The rules are exact likelihood, pseudo-likelihood, contrastive divergence (one Gibbs sweep from the data,
CD-1) and persistent contrastive divergence (PCD-1). The error of the couplings falls with the number of
samples, and pseudo-likelihood is as good as the exact likelihood.
"""

import math
from collections import defaultdict
from typing import Any

import matplotlib.pyplot as plt
import torch
from couplings import coupling_error
from runner import Result, draw_band, quantiles, run
from torch import Tensor
from torch.nn import functional as F

import solvers
from implicit_attn.models import PottsModel, fit_pseudolikelihood
from implicit_attn.studies import SpinModel, random_potts

EXACT, PSEUDO, CD, PCD = RULES = ("exact likelihood", "pseudo-likelihood", "CD-1", "PCD-1")
SCALE = 0.8  # of the couplings of all pairs, N(0, SCALE^2); there are no fields
ENOUGH = 500  # L-BFGS steps: few samples leave directions in which the likelihood is nearly flat
# Without a penalty there is no maximum where a configuration of two sites never occurs in the data.
L2 = 1e-5


def every_state(sites: int, colours: int) -> Tensor:
    """All d^N one-hot states (d^N, N, d), float64."""
    return F.one_hot(torch.cartesian_prod(*[torch.arange(colours)] * sites), colours).double()


def exact_likelihood(model: PottsModel, states: Tensor) -> Tensor:
    """Mean log-likelihood of one-hot states (M, N, d): ``-<E>_data - log sum_S exp(-E(S))``, S all d^N."""
    every = every_state(*model.field.shape).to(model.field)
    return -model.energy(states.to(model.field)).mean() - torch.logsumexp(-model.energy(every), 0)


def fit_exact_likelihood(model: PottsModel, states: Tensor) -> None:
    """Maximise :func:`exact_likelihood`, less ``L2 / 2 sum J^2``, by L-BFGS; the problem is convex."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=ENOUGH, max_eval=ENOUGH, tolerance_grad=1e-5,
        tolerance_change=0.0, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def evaluate() -> float:
        optimizer.zero_grad()
        loss = 0.5 * L2 * model.couplings.weight.square().sum() - exact_likelihood(model, states)
        loss.backward()
        return loss.item()

    optimizer.step(evaluate)


def contrastive_divergence(
    model: PottsModel, states: Tensor, chains: int | None, batch: int, steps: int, seed: int
) -> None:
    r"""Raise the likelihood of one-hot states (M, N, d) by Gibbs samples of the model, CD-1 or PCD-1.

    The gradient of the log-likelihood is a difference of two means::

        d log P / dJ_ij = <S_i S_j^T>_data - <S_i S_j^T>_model,    d log P / dx_i = <S_i>_data - <S_i>_model

    The mean over the model is estimated from a Gibbs sweep, started at the data of the batch (CD: biased,
    even with infinite data), or at the end of the step before, in ``chains`` kept chains (PCD: they
    follow the model, without that bias once they mix faster than the model changes). The rate of Adam falls
    to 0 along a cosine.

    Source: G. E. Hinton (2002), "Training products of experts by minimizing contrastive divergence",
    https://doi.org/10.1162/089976602760128018; T. Tieleman (2008), "Training restricted Boltzmann machines
    using approximations to the likelihood gradient", https://doi.org/10.1145/1390156.1390290.
    """
    generator = torch.Generator().manual_seed(seed)
    states = states.to(model.field.dtype)

    def draw(number: int) -> Tensor:
        return states[torch.randint(len(states), (number,), generator=generator)]

    kept = None if chains is None else draw(chains)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        positive = states if batch >= len(states) else draw(batch)
        negative = solvers.gibbs(
            model.couplings.weight.detach(), model.field.detach(), site=solvers.PottsSite(),
            sweeps=1, generator=generator, start=positive if kept is None else kept,
        )  # fmt: skip
        kept = None if kept is None else negative
        optimizer.zero_grad()
        (model.energy(positive).mean() - model.energy(negative).mean()).backward()
        optimizer.step()
        schedule.step()


def sample_exactly(model: SpinModel, number: int, generator: torch.Generator) -> Tensor:
    """(number, N, d) independent one-hot samples, from all d^N configurations; float32."""
    states = every_state(*model.field.shape[1:])
    acting = model.field[0] + 0.5 * torch.einsum("ijab,kjb->kia", model.couplings, states)
    weights = (acting * states).sum((1, 2)).softmax(0)
    return states[torch.multinomial(weights, number, replacement=True, generator=generator)].float()


def boltzmann_learning(
    samples: tuple[int, ...] = (300, 1000, 5000, 20_000),  # numbers of samples; CD uses the largest
    sites: int = 6,  # number of sites N
    colours: int = 3,  # number of colours d (the sum has d^N configurations)
    seeds: int = 3,  # number of random models, each with its own samples
    steps: int = 800,  # training steps of CD-1 and PCD-1
) -> Result:
    counts = sorted(set(samples))
    errors = defaultdict[Any, list[float]](list)
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        truth = random_potts(sites, colours, SCALE * math.sqrt(sites), generator, field_scale=0.0)
        states = sample_exactly(truth, counts[-1], generator)
        for number in counts:
            for rule in RULES if number == counts[-1] else (EXACT, PSEUDO):
                torch.manual_seed(seed)
                model = PottsModel(sites, colours)
                data = states[:number]
                if rule == EXACT:
                    fit_exact_likelihood(model.double(), data)
                elif rule == PSEUDO:
                    fit_pseudolikelihood(model.double(), data, l2=L2, steps=ENOUGH)
                else:
                    chains, batch = (None, 2000) if rule == CD else (1000, 4000)
                    contrastive_divergence(model, data, chains, batch, steps, seed)
                found = coupling_error(model.couplings.weight.detach(), truth.couplings)
                errors[rule, number].append(found)
    by_samples = [
        {"rule": rule, "samples": number, **quantiles("error", found)}
        | {"gap": max(abs(a - b) for a, b in zip(found, errors[EXACT, number], strict=True))}
        for (rule, number), found in errors.items()
    ]

    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.set_title(f"Small Potts models: {sites} sites, {colours} colours, {seeds} models")
    for number, (rule, marker) in enumerate(zip(RULES, "os^D", strict=True)):
        rows = [row for row in by_samples if row["rule"] == rule]
        look: dict[str, Any] = {"color": f"C{number}", "marker": marker, "label": rule}
        look |= {"markersize": 12 - 2 * number, "markerfacecolor": "none"}  # all seen
        draw_band(axes, rows, "samples", "error", alpha=0.12, **look)
    axes.set(xscale="log", yscale="log", xlabel="samples")
    axes.set_ylabel("error of the couplings,\nmedian and 10 to 90 % of the models")
    axes.legend(frameon=False)
    return {"samples": by_samples}, figure


if __name__ == "__main__":
    run(boltzmann_learning)
