"""Methods that learn the couplings of a Potts model from samples."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.models import FactoredAttention, PottsModel, fit_pseudolikelihood
from implicit_attn.models.potts.factored import ROWS
from implicit_attn.studies.experiments.potts.data import PottsData, seeded
from implicit_attn.studies.experiments.potts.masked import (
    make_transformer,
    masked_loss,
    masked_task,
    train_masked,
)
from implicit_attn.studies.spins.measures import contact_precision, contact_scores, coupling_error
from implicit_attn.studies.spins.predictors import categorical_jacobian
from implicit_attn.training import Recipe

SEQUENCES = 12  # over which the categorical Jacobian is averaged
RANDOM = (2, 4)  # recycles of the method "recycled", drawn for each batch
ALWAYS = 3  # recycles of the method "fixed", and at which "recycled" is read
_FACTORED = re.compile(rf"({'|'.join(ROWS)})(-(\d+))?(-long)?")
TRANSFORMERS = {
    "vanilla": "vanilla, 1 layer",
    "vanilla-3": "vanilla, 3 layers",
    "fixed": f"recycled, T = {ALWAYS}",
    "recycled": f"recycled, T in {RANDOM[0]}..{RANDOM[1]}",
}


@dataclass(frozen=True)
class Effort:
    """How long the methods are trained.

    Attributes:
        steps: of factored attention (Adam, rate 0.1, batches of 2000).
        evaluations: L-BFGS steps of the Potts model.
        l2: weight of its penalty, on the loss per site.
        masked: steps of transformers (Adam, rate 3e-3), each on ``batch`` sequences.
        batch, dim: of transformers.
        tested: test sequences of transformers, each with every site masked in its turn.
    """

    steps: int = 500
    evaluations: int = 40
    l2: float = 2e-5
    masked: int = 800
    batch: int = 512
    dim: int = 48
    tested: int = 1000


@dataclass(frozen=True)
class Recovered:
    """What a method found.

    Attributes:
        method: its name.
        parameters: their number.
        couplings: (N, N, d, d); of transformers the categorical Jacobian.
        loss: negative log pseudo-likelihood per site of test samples.
        excess: the same above that of the true conditionals on these samples.
        model: the trained model.
        status: of the fit, as of ``fit_pseudolikelihood``: "max_steps" where all steps of Adam were
            made, as of transformers.
    """

    method: str
    parameters: int
    couplings: Tensor
    loss: float
    excess: float
    model: Any
    status: str

    def row(self, data: PottsData) -> dict[str, Any]:
        """One row of the table."""
        return {
            "data": data.kind,
            "method": describe_method(self.method),
            "parameters": self.parameters,
            "coupling_error": coupling_error(self.couplings, data.truth),
            "precision": contact_precision(contact_scores(self.couplings), data.edges),
            "excess": self.excess,
            "status": self.status,
        }


def read_method(text: str) -> str:
    """A name, checked: "potts", a transformer, or rows of factored attention with heads.

    Raises:
        ValueError: an unknown name.
    """
    match = _FACTORED.fullmatch(text)
    if text == "potts" or text in TRANSFORMERS or (match and int(match[3] or 1) > 0):
        return text
    rows = ", ".join(ROWS)
    raise ValueError(
        f"methods must be potts, {', '.join(TRANSFORMERS)}, or factored attention by its rows "
        f"({rows}), also with heads or longer training (softmax-16, sink-long), got {text!r}"
    )


def describe_method(method: str) -> str:
    """The name as tables and figures show it."""
    match = _FACTORED.fullmatch(method)
    if match is None:
        return "Potts, pseudo-likelihood" if method == "potts" else TRANSFORMERS[method]
    heads = int(match[3] or 1)
    long = ", long" if match[4] else ""
    return f"factored, {heads} {match[1]} head{'s' * (heads > 1)}{long}"


def recover(method: str, data: PottsData, effort: Effort, *, seed: int = 0) -> Recovered:
    """Fit a method to the training samples.

    Args:
        method: a name that :func:`read_method` accepts.
        data: samples.
        effort: how long.
        seed: of the start and of the batches.
    """
    match = _FACTORED.fullmatch(read_method(method))
    if method in TRANSFORMERS:
        return _by_masking(method, data, effort, seed)
    if match is None:
        model: Any = seeded(partial(PottsModel, data.sites, data.colours), seed)
        fit = fit_pseudolikelihood(model, data.train, effort.l2, steps=effort.evaluations)
        couplings = model.couplings.weight
    else:
        shape = (data.sites, data.colours, int(match[3] or 1), match[1])
        model = seeded(partial(FactoredAttention, *shape), seed)
        options: Any = {"rate": 0.1, "steps": effort.steps}
        if match[4]:  # heads with a sink converge slowly
            options = {"rate": 0.2, "batch": 1000, "steps": 5 * effort.steps // 2}
        fit = fit_pseudolikelihood(model, data.train, solver="adam", seed=seed, **options)
        couplings = model.couplings()
    with torch.no_grad():
        loss = model.pseudo_likelihood(data.test).item()
    number = _count(model)
    excess = loss - data.bayes()
    return Recovered(method, number, couplings.detach(), loss, excess, model, fit.status)


def _by_masking(method: str, data: PottsData, effort: Effort, seed: int) -> Recovered:
    layers = 3 if method == "vanilla-3" else 1
    times = ALWAYS if method in ("fixed", "recycled") else 1
    model = make_transformer(data, effort.dim, seed, layers=layers, iterations=times)
    recipe = Recipe(
        1, effort.batch, 3e-3, weight_decay=0.0, optimizer="adam", seed=seed, iterations=None
    )
    if method == "recycled":
        recipe = replace(recipe, iterations=RANDOM)
    task = masked_task(data, effort.tested)
    train_masked(model, task, recipe, effort.masked)
    read = data.test[:SEQUENCES]
    couplings = categorical_jacobian(model, read, data.colours, mask=data.colours)
    loss = masked_loss(model, task)
    excess = loss - data.bayes(effort.tested)
    status = "max_steps" if math.isfinite(loss) else "nonfinite"
    return Recovered(method, _count(model), couplings, loss, excess, model, status)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
