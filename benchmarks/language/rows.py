"""The trainings of language models that are compared, as words of ``implicit-attn train language-model``."""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = "plain"
EXAMPLE = "language-model"


@dataclass(frozen=True)
class Row:
    """A line of the table: what differs from plain attention, and the seeds of each size."""

    name: str
    words: tuple[str, ...]
    seeds: dict[str, int]
    color: str
    dashes: str = "-"


# A pilot, and the model of the table; both see every window of the text at random.
SIZES: dict[str, tuple[str, ...]] = {
    "tiny": (
        *("dim=64", "heads=4", "layers=4", "length=64", "--batch", "16"),
        *("--steps", "600", "dropout=0", "windows=1024"),
    ),
    "small": (
        *("dim=96", "heads=4", "layers=6", "length=128", "--batch", "32"),
        *("--steps", "1200", "dropout=0.1", "windows=256"),
    ),
}
FEW, ONE = {"tiny": 3, "small": 1}, {"tiny": 1, "small": 1}

FORMS = (
    Row(PLAIN, (), {"tiny": 3, "small": 2}, "black"),
    Row("momentum", ("--descent", "momentum"), {"tiny": 3, "small": 2}, "#b5323c"),
    Row("nesterov", ("--descent", "nesterov"), {"tiny": 3, "small": 2}, "#3a8f5c"),
    Row("light-newton-taylor", ("--attention", "light-newton-taylor"), FEW, "#2f6db3"),
    Row("newton-taylor", ("--attention", "newton-taylor"), FEW, "#d9772b"),
    Row(
        "newton-taylor-no-value",
        ("--attention", "newton-taylor-no-value"),
        {"tiny": 3, "small": 0},
        "#8c6bb1",
    ),
)
CONTROLS = (
    Row("plain, rate 6e-3", ("--rate", "6e-3"), ONE, "black", "--"),
    Row("plain, rate 1e-2", ("--rate", "1e-2"), ONE, "black", ":"),
    Row(
        "momentum, rate 6e-3",
        ("--descent", "momentum", "--rate", "6e-3"),
        ONE, "#b5323c", "--",
    ),
    Row(
        "momentum, rate 1e-2",
        ("--descent", "momentum", "--rate", "1e-2"),
        {"tiny": 1, "small": 0}, "#b5323c", ":",
    ),
    Row("plain, gain", ("--descent", "gain"), ONE, "#777777", "--"),
    Row(
        "nesterov, scaled",
        ("--descent", "nesterov", "lookahead=scaled"),
        ONE, "#3a8f5c", "--",
    ),
    Row(
        "nesterov, queries",
        ("--descent", "nesterov", "lookahead=queries"),
        ONE, "#3a8f5c", ":",
    ),
    Row(
        "newton-taylor, order 0",
        ("--attention", "newton-taylor", "order=0"),
        ONE, "#d9772b", "--",
    ),
)  # fmt: skip
ROWS = {row.name: row for row in (*FORMS, *CONTROLS)}
