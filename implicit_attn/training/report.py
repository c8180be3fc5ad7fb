"""A training in one line: while it runs, and at its end."""

from __future__ import annotations

from typing import Any


def status_line(row: dict[str, Any]) -> str:
    """The loss, and for models with equilibrium layers how these were solved."""
    if "converged" not in row:
        return f"loss {row['loss']:.4f}"
    return (
        f"loss {row['loss']:.4f}  converged {100 * row['converged']:.1f} %  "
        f"evaluations {row['evaluations']}  adjoint {row['adjoint_residual']:.0e}"
    )


def summary_line(history: list[dict[str, Any]], solves: bool) -> str:
    """Seconds, and with ``solves`` the worst convergence of the rows in ``history``."""
    text = f"training {sum(row['seconds'] for row in history):.0f} s"
    if not solves:
        return text
    share = 100 * min(row["converged"] for row in history)
    spent = max(row["evaluations"] for row in history)
    return (
        f"{text}; worst epoch: {share:.2f} % of training samples converged, "
        f"median evaluations per sample {spent:g}"
    )
