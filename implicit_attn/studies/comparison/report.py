"""The comparison of a trained classifier: a figure, tables, their text, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from implicit_attn.data import ImageData
from implicit_attn.studies.comparison.confidence import SOFTMAX, confidence
from implicit_attn.studies.comparison.rivals import ENCODER, comparison
from implicit_attn.studies.comparison.robustness import robustness
from implicit_attn.studies.figures.comparison import comparison_figure
from implicit_attn.studies.tables import Table, format_table, write_table

SAMPLES = 1000  # test images that are harmed and tested for confidence
ERRORS = 2.0  # standard errors below which a difference counts as none
FAMILIAR = 0.4  # AUROC of an energy below which it calls what it should not know familiar
OWN = ("energy", "profile")  # signals that only an equilibrium has
TELLING = 0.02  # of two AUROCs, below which they count as equal


def write_comparison(
    model: nn.Module,
    name: str,
    rivals: Mapping[str, tuple[nn.Module, float]],
    data: ImageData,
    folder: str | Path,
    title: str,
    seconds: float,
) -> str:
    """A trained equilibrium beside simpler models, and what it tells besides the class.

    Writes ``comparison.png``, ``comparison.csv`` (accuracy, parameters, seconds), ``robustness.csv``
    (of :func:`robustness`) and ``confidence.csv`` (of :func:`confidence`).

    Args:
        model, name: the trained model, images -> logits, and its name in the tables.
        rivals: of :func:`train_rivals`.
        data: whose test images are used.
        folder: where the files go.
        title: of the figure.
        seconds: of the model's training.

    Returns:
        The tables as text, and a sentence on each of them.
    """
    every = {**{key: rivals[key] for key in rivals}, name: (model, seconds)}
    table = comparison(every, data.test_images, data.test_labels)
    images, labels = data.test_images[:SAMPLES], data.test_labels[:SAMPLES]
    compared = {key: every[key][0] for key in every if key in (ENCODER, name)}
    harmed = robustness(compared, images, labels)
    trust = confidence(compared, images, labels, known=data.train_images[:SAMPLES])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file, rows in {"comparison": table, "robustness": harmed, "confidence": trust}.items():
        write_table(folder / f"{file}.csv", rows)
    comparison_figure(folder / "comparison.png", title, name, table, harmed, trust)
    wide = {"test images": len(data.test_images), "harmed images": len(images)}
    said = [
        *_on_accuracy(table, name, wide["test images"]),
        *_on_robustness(harmed, name, wide["harmed images"]),
        *_on_confidence(trust, name),
    ]
    shown = [{**row, "accuracy": f"{100 * row['accuracy']:.2f} %"} for row in table]
    return f"\n{format_table(shown)}\n\n" + "\n".join(f"- {line}" for line in said)


def _differ(first: float, second: float, number: int) -> str:
    """ "more", "less" or "as much", by the standard error of a difference of two shares."""
    spread = (first * (1 - first) + second * (1 - second)) / number
    if abs(first - second) <= ERRORS * spread**0.5:
        return "as much"
    return "more" if first > second else "less"


def _on_accuracy(table: Table, name: str, number: int) -> list[str]:
    own = next(row["accuracy"] for row in table if row["model"] == name)
    parts = [
        f"{100 * (own - row['accuracy']):+.2f} points against the {row['model']}"
        for row in table
        if row["model"] != name
    ]
    error = 100 * (2 * own * (1 - own) / number) ** 0.5
    return [
        f"Accuracy on {number} test images: {', '.join(parts)} (standard error of a difference about "
        f"{error:.1f} points; other seeds differ by as much)."
    ]


def _on_robustness(table: Table, name: str, number: int) -> list[str]:
    lines: list[str] = []
    for harm in dict.fromkeys(row["harm"] for row in table):
        rows = {
            (row["model"], row["strength"]): row["accuracy"] for row in table if row["harm"] == harm
        }
        strengths = [strength for model, strength in rows if model == name and strength > 0]
        if (ENCODER, 0.0) not in rows or not strengths:
            continue
        verdicts = {s: _differ(rows[name, s], rows[ENCODER, s], number) for s in strengths}
        worst = max(strengths, key=lambda s: abs(rows[name, s] - rows[ENCODER, s]))
        both = f"{100 * rows[name, worst]:.1f} % for {100 * rows[ENCODER, worst]:.1f} %"
        if set(verdicts.values()) == {"as much"}:
            verdict = "as robust as the encoder layer, within the error: it gains nothing here"
        elif "less" not in verdicts.values():
            verdict = "more robust than the encoder layer"
        elif "more" not in verdicts.values():
            verdict = "less robust than the encoder layer"
        else:
            verdict = "more robust at some strengths and less at others"
        lines.append(f"{harm.capitalize()}: {verdict} (largest difference at {worst:g}: {both}).")
    return lines


def _on_confidence(table: Table, name: str) -> list[str]:
    """For each task the better of the equilibrium's own signals beside the best of the others."""
    lines: list[str] = []
    for task in dict.fromkeys(row["task"] for row in table):
        rows = [row for row in table if row["task"] == task and row["auroc"] == row["auroc"]]
        own = [row for row in rows if row["model"] == name and row["signal"] in OWN]
        usual = [row for row in rows if row["signal"] in (SOFTMAX, "features")]
        softmax = [
            row["auroc"] for row in usual if (row["model"], row["signal"]) == (name, SOFTMAX)
        ]
        if not own or not softmax:
            continue
        best, rival = (max(each, key=lambda row: row["auroc"]) for each in (own, usual))
        verdict = "no better than"
        if best["auroc"] > rival["auroc"] + TELLING:
            verdict = "better than"
        elif best["auroc"] < rival["auroc"] - TELLING:
            verdict = "worse than"
        lines.append(
            f"{task.capitalize()} ({best['positives']} images): its {best['signal']} (AUROC "
            f"{best['auroc']:.2f}) is {verdict} the {rival['signal']} of the {rival['model']} "
            f"({rival['auroc']:.2f}); its own softmax has {softmax[0]:.2f}."
            f"{_on_low_energies(own)}"
        )
    return lines


def _on_low_energies(own: Table) -> str:
    for row in own:
        if row["signal"] == "energy" and row["auroc"] < FAMILIAR:
            low = f"{row['auroc']:.2f}"
            return f" Its energy is lower there ({low}): by itself no measure of what is foreign."
    return ""
