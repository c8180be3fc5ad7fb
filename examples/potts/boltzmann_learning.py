"""Rules that learn the couplings of small Potts models, whose likelihood can be summed exactly.

    python examples/potts/boltzmann_learning.py        # half a minute

Exact likelihood, pseudo-likelihood, contrastive divergence (one Gibbs sweep from the data, CD-1) and its
persistent form (from kept chains, PCD-1). The error of the couplings against the number of samples; of the
rules that sample also against their steps.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from couplings import coupling_error
from likelihood import contrastive_divergence, fit_exact_likelihood
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.models import PottsModel, fit_pseudolikelihood
from implicit_attn.studies import SpinModel, random_potts

EXACT, PSEUDO, CD, PCD = RULES = ("exact likelihood", "pseudo-likelihood", "CD-1", "PCD-1")
SCALE = 0.8  # of the couplings of all pairs, N(0, SCALE^2); there are no fields
ENOUGH = 500  # L-BFGS steps: few samples leave directions in which the likelihood is nearly flat
Table = list[dict[str, Any]]


def sample_exactly(model: SpinModel, number: int, generator: torch.Generator) -> Tensor:
    """(number, N, d) independent one-hot samples, from all d^N configurations; float32."""
    _, sites, dim = model.field.shape
    states = F.one_hot(torch.cartesian_prod(*[torch.arange(dim)] * sites), dim).double()
    acting = model.field[0] + 0.5 * torch.einsum("ijab,kjb->kia", model.couplings, states)
    weights = (acting * states).sum((1, 2)).softmax(0)
    return states[torch.multinomial(weights, number, replacement=True, generator=generator)].float()


def fit(rule: str, model: PottsModel, states: Tensor, seed: int, steps: int, watch: Any) -> str:
    """Change the model; the status of the fit."""
    if rule == EXACT:
        return fit_exact_likelihood(model.double(), states, l2=1e-5, steps=ENOUGH)
    if rule == PSEUDO:
        return fit_pseudolikelihood(model.double(), states, l2=1e-5, steps=ENOUGH).status
    sizes: Any = {"batch": 2000} if rule == CD else {"chains": 1000, "batch": 4000}
    contrastive_divergence(model, states, steps=steps, seed=seed, watch=watch, **sizes)
    return "max_steps"  # an estimated gradient never vanishes


def band(errors: list[float]) -> dict[str, float]:
    """Median, 10 % and 90 % quantile."""
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    low, middle, high = torch.tensor(errors).double().quantile(shares).tolist()
    return {"error": middle, "error_10": low, "error_90": high}


def boltzmann_learning(
    samples: tuple[int, ...] = (300, 1000, 5000, 20_000),
    sites: int = 6,
    colours: int = 3,
    seeds: int = 3,
    steps: int = 800,
) -> tuple[dict[str, Table], Figure]:
    """Contrastive divergence, PCD and pseudo-likelihood against the exact likelihood.

    Args:
        samples: numbers of samples; rules that sample see the largest one.
        sites: N.
        colours: d; there must be at most 2^20 configurations.
        seeds: models, each with samples of its own.
        steps: of the rules that sample.
    """
    if colours**sites > 2**20:
        raise ValueError(f"sites must be fewer: {colours}^{sites} configurations are above 2^20")
    counts = sorted(set(samples))
    errors, statuses, traces = (defaultdict[Any, list[Any]](list) for _ in range(3))
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        truth = random_potts(sites, colours, SCALE * math.sqrt(sites), generator, field_scale=0.0)
        states = sample_exactly(truth, counts[-1], generator)
        for number in counts:
            for rule in RULES if number == counts[-1] else (EXACT, PSEUDO):
                torch.manual_seed(seed)
                model = PottsModel(sites, colours)

                def error(model: PottsModel = model, truth: SpinModel = truth) -> float:
                    return coupling_error(model.couplings.weight.detach(), truth.couplings)

                def watch(step: int, gradient: float, rule: str = rule, error: Any = error) -> None:
                    if step % max(1, steps // 20) == 0:
                        traces[rule, step].append(error())

                statuses[rule, number].append(fit(rule, model, states[:number], seed, steps, watch))
                errors[rule, number].append(error())
    by_samples = [
        {"rule": rule, "samples": number, **band(found)}
        | {"gap": max(abs(a - b) for a, b in zip(found, errors[EXACT, number], strict=True))}
        | {"status": " ".join(sorted(set(statuses[rule, number])))}
        for (rule, number), found in errors.items()
    ]
    by_step = [{"rule": r, "step": step, **band(found)} for (r, step), found in traces.items()]
    title = "Rules that learn the couplings of small Potts models"
    figure = draw(f"{title}: {sites} sites, {colours} colours, {seeds} models", by_samples, by_step)
    return {"samples": by_samples, "steps": by_step}, figure


def draw(title: str, by_samples: Table, by_step: Table) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    figure.suptitle(title)
    for number, (rule, marker) in enumerate(zip(RULES, "os^D", strict=True)):
        color, trace = f"C{number}", [row for row in by_step if row["rule"] == rule]
        look = {
            "marker": marker,
            "markersize": 12 - 2 * number,
            "markerfacecolor": "none",
        }  # all seen
        rows = [row for row in by_samples if row["rule"] == rule]
        for axes, key, table in ((left, "samples", rows), (right, "step", trace)):
            if table:
                x = [row[key] for row in table]
                low, middle, high = (
                    [r[k] for r in table] for k in ("error_10", "error", "error_90")
                )
                axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
                line: Any = look | {"ls": ("-", "--", ":", "-.")[number]} if axes is left else {}
                axes.plot(x, middle, color=color, label=rule, **line)
        if not trace:
            right.axhline(rows[-1]["error"], color=color, linestyle="--", label=rule)
    left.set(xscale="log", yscale="log", xlabel="samples", ylabel="error of the couplings")
    most = max(row["samples"] for row in by_samples)
    right.set_xlabel(f"steps of Gibbs sampling, {most} samples")
    right.set_title("rules that learn by sampling")
    left.set_title("median over models, 10 to 90 %")
    left.legend(frameon=False)
    return figure


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    from runner import run

    run(boltzmann_learning)
