"""The table that is printed: a line a setting, means over the seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.learns.runs import Results, Wanted

BUSY = 1.1  # seconds of the clock for one of the processor, beyond which a time is marked


def lines(wanted: Sequence[Wanted], done: Results) -> list[dict[str, Any]]:
    """The rows of the table, of settings of which all runs are done or at least one is."""
    found = (line(each, done) for each in wanted)
    return [each for each in found if each is not None]


def line(wanted: Wanted, done: Results) -> dict[str, Any] | None:
    """One row; None as long as no run that is shown is done."""
    rate = wanted.chosen(done)
    runs = [] if rate is None else [run for run in wanted.shown(rate) if run in done]
    if not runs or rate is None:
        return None
    results = [done[run] for run in runs]
    good = [each for each in results if each["status"] == "ok"]
    setting, seconds = wanted.setting, _mean(results, "cpu_seconds")
    busy = _mean(results, "seconds") > max(1.0, BUSY * seconds)
    return {
        "task": f"{setting.task} {setting.limit}" if setting.limit else setting.task,
        "readout": setting.readout,
        "layers": setting.layers,
        "row": setting.row,
        "parameters": int(results[0]["parameters"]),
        "epochs": setting.epochs,
        "rate": f"{rate:g}{_at_end(wanted, rate)}",
        "seeds": len(results) if len(good) == len(results) else f"{len(good)} of {len(results)}",
        "train %": _percent(good, "train_accuracy"),
        "test %": _percent(good, "accuracy"),
        "min to max": _range(good),
        "training s": f"{seconds:.1f}{' (busy)' if busy else ''}",
        "evaluations": _plain(good, "evaluations", ".0f"),
        "converged % (worst epoch)": _shares(good, "converged"),
        "adjoint % (worst epoch)": _shares(good, "adjoint_converged"),
        "step ms": _plain(good, "step_ms", ".1f"),
        "evaluation ms": _plain(good, "evaluation_ms", ".1f"),
    }


def _at_end(wanted: Wanted, rate: float) -> str:
    """A mark where the best rate is the smallest or the largest: another might be better."""
    ends = (min(wanted.rates), max(wanted.rates))
    return "!" if len(wanted.rates) > 1 and rate in ends else ""


def _mean(results: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(each[name] for each in results) if results else math.nan


def _plain(results: list[dict[str, Any]], name: str, form: str) -> str:
    mean = _mean(results, name)
    return "" if math.isnan(mean) else f"{mean:{form}}"


def _percent(results: list[dict[str, Any]], name: str) -> str:
    return _plain([{name: 100 * each[name]} for each in results], name, ".1f")


def _range(results: list[dict[str, Any]]) -> str:
    shown = [100 * each["accuracy"] for each in results]
    return f"{min(shown):.1f} to {max(shown):.1f}" if shown else ""


def _shares(results: list[dict[str, Any]], name: str) -> str:
    """The share of all training solves, and in brackets that of the worst epoch of any seed.

    Seeds in which nothing was solved have none.
    """
    solved = [each for each in results if not math.isnan(each[name])]
    if not solved:
        return ""
    worst = min(each[f"{name}_worst"] for each in solved)
    return f"{100 * _mean(solved, name):.2f} ({100 * worst:.2f})"
