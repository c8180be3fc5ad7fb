"""Tables, targets and plot of the bi-softmax benchmark."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from benchmarks.bisoftmax_peers import NOT_SUPPORTED
from implicit_attn.optional import require

PEERS = {
    "gradient": ("dense", "compiled", "autograd", "flash forward", "cudnn forward"),
    "hvp": ("double backward", "flash forward+backward", "cudnn forward+backward"),
}
TITLES = {"gradient": "Gradient", "hvp": "Hessian-vector product"}
FEW_TOKENS = 257  # up to so many, launches are a good part of the time on a GPU
# Ours, the peer, the largest ratio aimed at, fewest and most tokens: in bfloat16, of device times.
TARGETS = (
    ("gradient", "flash forward", 1.25, 4096, None),
    ("hvp", "flash forward+backward", 0.9, 4096, None),
    ("gradient", "dense", 0.2, 4096, None),
    ("gradient", "compiled", 0.5, 65, 257),
)


def quotient(row: dict[str, Any], ours: str, peer: str, unit: str = "ms") -> Any:
    """The ratio, ``NOT_SUPPORTED``, or "not run"."""
    above, below = row.get(f"{ours} {unit}"), row.get(f"{peer} {unit}", row.get(f"{peer} ms"))
    if isinstance(above, float) and isinstance(below, float):
        return above / below
    return NOT_SUPPORTED if NOT_SUPPORTED in (above, below) else "not run"


def ratios(row: dict[str, Any]) -> dict[str, Any]:
    """Gradients by what computes a gradient or attends once, products by what differentiates it."""
    short = {"shape": row["shape"], "backend": row["backend"]}
    for ours, others in PEERS.items():
        short[f"{ours} ms"] = row[f"{ours} ms"]
        if ours == "gradient" and "atomic gradient ms" in row:
            short["atomic gradient ms"] = row["atomic gradient ms"]
        for name in others:
            if f"{name} ms" in row:
                short[f"{ours} / {name}"] = quotient(row, ours, name)
        short[f"{ours} TFLOP/s"] = row[f"{ours} TFLOP/s"]
        short[f"{ours} roofline"] = row[f"{ours} roofline"]
    return short


def launches(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Device and host milliseconds of each contestant; none where only one clock was read."""
    names = [name.removesuffix(" host ms") for name in row if name.endswith(" host ms")]
    return [
        {
            "shape": row["shape"],
            "contestant": name,
            "device ms": row[f"{name} ms"],
            "host ms": row[f"{name} host ms"],
        }
        for name in names
    ]


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was aimed at beside what was measured, for the shapes that an aim is for."""
    found = []
    for row in rows:
        for ours, peer, most, first, last in TARGETS:
            if row["tokens"] < first or (last is not None and row["tokens"] > last):
                continue
            measured = quotient(row, ours, peer)
            by_host = quotient(row, ours, peer, "host ms")
            met = "-" if not isinstance(measured, float) else "yes" if measured <= most else "NO"
            found.append(
                {"shape": row["shape"], "ratio": f"{ours} / {peer}", "must be at most": most}
                | {"measured": measured, "by the host's clock": by_host, "met": met}
            )
    return found


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "bisoftmax.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds by shape, gradient left, product right."""
    require("matplotlib", extra="examples").use("Agg")
    pyplot = require("matplotlib.pyplot", extra="examples")
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    for axis, (ours, others) in zip(axes, PEERS.items(), strict=True):
        names = (ours, *others)
        shown = [n for n in names if any(isinstance(row.get(f"{n} ms"), float) for row in rows)]
        for number, name in enumerate(shown):
            heights = [row.get(f"{name} ms") for row in rows]
            heights = [h if isinstance(h, float) else float("nan") for h in heights]
            places = [place + number * 0.8 / len(shown) for place in range(len(rows))]
            axis.bar(places, heights, 0.8 / len(shown), label=name, align="edge")
        axis.set_xticks([k + 0.4 for k in range(len(rows))], [row["shape"] for row in rows])
        axis.tick_params(axis="x", labelrotation=20)
        axis.set_yscale("log")
        axis.set_ylabel("milliseconds")
        axis.set_xlabel("batch x heads x tokens x width")
        axis.set_title(TITLES[ours])
        axis.grid(axis="y", alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
