"""The recovery of a Potts model's couplings: methods side by side, few samples, recycles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.experiments.potts.data import PottsData
from implicit_attn.studies.experiments.potts.masked import loss_by_recycles
from implicit_attn.studies.experiments.potts.methods import (
    TRANSFORMERS,
    Effort,
    Recovered,
    describe_method,
    read_method,
    recover,
)
from implicit_attn.studies.spins.measures import contact_scores, roc_curve
from implicit_attn.studies.tables import Table

# Methods worth comparing on each model: linear heads cover all but "er-general", whose edges have each
# their own block; softmax heads need equal degrees and one sign.
USUAL = {
    "er-kron": ("linear", "softmax", "softmax-4", "potts", "vanilla", "recycled"),
    "er-general": ("linear", "linear-16", "linear-64", "softmax-16", "potts"),
    "tree": ("linear", "softmax", "sink", "sink-long", "softmax-4", "potts", "vanilla"),
    "ring4": ("linear", "softmax", "softmax-4", "potts"),
}
RECYCLES = (1, 2, 3, 4, 6, 8)


class Recovery(NamedTuple):
    """What the methods found on one data set; the figure shows all of it.

    Attributes:
        data: the samples and the true model.
        found: the methods' couplings and losses, in their order.
        rows: of the table, one for each method.
        few: rows with ``method``, ``samples``, ``coupling_error``, ``precision``,
            ``status``.
        recycles: rows with ``method``, ``recycles``, ``excess``; empty without transformers.
        curves: rows with ``method``, ``false_share``, ``true_share``, the ROC of the pairs.
    """

    data: PottsData
    found: list[Recovered]
    rows: Table
    few: Table
    recycles: Table
    curves: Table

    def tables(self) -> dict[str, Table]:
        """The tables that are not empty, by name."""
        named = {"methods": self.rows, "few": self.few, "recycles": self.recycles}
        named["roc"] = self.curves
        return {name: table for name, table in named.items() if table}

    def best(self) -> Recovered:
        """The method with the least error of the couplings."""
        errors = [row["coupling_error"] for row in self.rows]
        return self.found[errors.index(min(errors))]


def compare_methods(
    data: PottsData,
    methods: Sequence[str],
    effort: Effort,
    *,
    few: Sequence[int] = (),
    few_methods: Sequence[str] = ("linear", "potts"),
    seed: int = 0,
    advance: Advance = lambda what: None,
) -> Recovery:
    """Fit every method to the samples, and those of ``few_methods`` also to fewer samples.

    Args:
        data: samples of a model that is known.
        methods: names, see :func:`read_method`.
        effort: how long they are trained.
        few: numbers of samples, at most those that there are.
        few_methods: no transformers.
        seed: of the starts and the batches.
        advance: called with the name of each part.

    Raises:
        ValueError: an unknown name, or a number of samples that is not there.
    """
    names = [read_method(name) for name in methods]
    for number in few:
        if not 0 < number <= len(data.train):
            raise ValueError(
                f"few must be within 1 and the {len(data.train)} samples, got {number}"
            )
    parts = [data.first(number) for number in sorted(set(few))]
    found: list[Recovered] = []
    for name in names:
        advance(f"{data.kind}: {describe_method(name)}")
        found.append(recover(name, data, effort, seed=seed))
    table: Table = []
    for name in few_methods if parts else ():
        for part in parts:
            advance(f"{data.kind}: {describe_method(name)}, {len(part.train)} samples")
            row = recover(name, part, _for_few(effort, len(part.train)), seed=seed).row(part)
            kept = {key: row[key] for key in ("method", "coupling_error", "precision", "status")}
            table.append({"samples": len(part.train), **kept})
    recycles: Table = []
    for each in found:
        if each.method in TRANSFORMERS and each.method not in ("vanilla", "vanilla-3"):
            advance(f"{data.kind}: {describe_method(each.method)}, other numbers of recycles")
            label = describe_method(each.method)
            recycles += loss_by_recycles(label, each.model, data, RECYCLES, effort.tested)
    rows = [each.row(data) for each in found]
    return Recovery(data, found, rows, table, recycles, _curves(found, data.edges))


def _for_few(effort: Effort, samples: int) -> Effort:
    """Few samples need a stronger penalty of the many couplings of a Potts model."""
    return replace(effort, l2=effort.l2 * max(1.0, math.sqrt(20_000 / samples)))


def _curves(found: Sequence[Recovered], edges: Tensor) -> list[dict[str, Any]]:
    table: Table = []
    for each in found:
        shares = roc_curve(contact_scores(each.couplings), edges)
        for false_share, true_share in zip(*(share.tolist() for share in shares), strict=True):
            row = {"method": describe_method(each.method)}
            table.append(row | {"false_share": false_share, "true_share": true_share})
    return table
