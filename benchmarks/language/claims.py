"""The table of trained language models, and what it says of the published claims."""

from __future__ import annotations

from statistics import mean

from benchmarks.language.rows import PLAIN, ROWS
from benchmarks.trainings.runs import Run

Losses = dict[Run, dict[int, float]]
SOURCE = "Ren, Ouyang, Tang, Liu, arXiv 2511.00907, figure 1"
# (letter, what is claimed, the lower row, the higher one)
CLAIMS = (
    ("a", "momentum below plain, all along", "momentum", PLAIN),
    ("a", "Nesterov below plain, all along", "nesterov", PLAIN),
    ("b", "Nesterov below momentum (lowest of all)", "nesterov", "momentum"),
    ("c", "plain below first-order Newton", PLAIN, "newton-taylor"),
    ("d", "first-order Newton below that without values", "newton-taylor", "newton-taylor-no-value"),
)  # fmt: skip
ABOUT = 0.01  # nats that "about equal" allows


def of_row(losses: Losses, size: str, row: str) -> dict[int, dict[int, float]]:
    """The curves of a row by seed."""
    return {run.seed: each for run, each in losses.items() if (run.size, run.row) == (size, row)}


def differences(losses: Losses, size: str, row: str, other: str) -> dict[int, dict[int, float]]:
    """By seed and step, how far ``row`` is above ``other`` with the same seed and the same data."""
    these, those = of_row(losses, size, row), of_row(losses, size, other)
    return {
        seed: {step: these[seed][step] - those[seed][step] for step in these[seed]}
        for seed in sorted(these.keys() & those.keys())
    }


def last(curve: dict[int, float]) -> float:
    return curve[max(curve)]


def lines(losses: Losses, parameters: dict[Run, int], size: str) -> list[dict[str, str]]:
    """The table of a size."""
    found: list[dict[str, str]] = []
    for name in ROWS:
        curves = of_row(losses, size, name)
        if not curves:
            continue
        ends = [last(curves[seed]) for seed in sorted(curves)]
        apart = [last(each) for each in differences(losses, size, name, PLAIN).values()]
        count = next(n for run, n in parameters.items() if (run.size, run.row) == (size, name))
        found.append(
            {
                "size": size,
                "form": name,
                "parameters": f"{count:,}",
                "loss": f"{mean(ends):.4f}",
                "seeds": " ".join(f"{end:.4f}" for end in ends),
                "above plain": " ".join(f"{each:+.4f}" for each in apart) if name != PLAIN else "",
            }
        )
    return found


def verdicts(losses: Losses, size: str) -> list[str]:
    """A sentence a claim: seen, not seen or not measured, with the differences at the end."""
    found = []
    for letter, words, low, high in CLAIMS:
        apart = differences(losses, size, low, high)
        if not apart:
            found.append(f"({letter}) {words}: not measured")
            continue
        ends = [last(curve) for curve in apart.values()]
        points = [value for curve in apart.values() for value in curve.values()]
        below = sum(value < 0 for value in points)
        seen = "seen" if all(end < 0 for end in ends) else "not seen"
        if "all along" in words and seen == "seen" and below < len(points):
            seen = "seen at the end"
        told = " ".join(f"{end:+.4f}" for end in ends)
        found.append(
            f"({letter}) {words}: {seen} ({told}; below at {below} of {len(points)} evaluations)"
        )
    apart = differences(losses, size, "light-newton-taylor", PLAIN)
    ends = [last(curve) for curve in apart.values()]
    words = "light form about equal to plain"
    if not ends:
        return [*found, f"(e) {words}: not measured"]
    seen = "seen" if max(abs(end) for end in ends) <= ABOUT else "not seen"
    told = " ".join(f"{end:+.4f}" for end in ends)
    return [*found, f"(e) {words}, within {ABOUT}: {seen} ({told})"]
