"""The command ``make fuzz``: many random cases of every family, in several processes.

    make fuzz                                             # some minutes
    make fuzz ARGS="--cases 100000 --families fixed_points --workers 2"
    make fuzz ARGS="--families fixed_points --first 1234 --cases 1"     # exactly this one

A case depends on the name of its family and on its number alone. What is broken is printed, each with
the command that repeats it; the exit code is then 1.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby
from typing import Literal, get_args

import torch
import tyro

from fuzz import Failure, Family, run_case, solves, truths

Name = Literal["fixed_points", "truths", "errors", "linear", "adjoints"]
FAMILIES: dict[str, Family] = {
    "fixed_points": solves.check_fixed_point,
    "truths": truths.check_true_value,
    "errors": truths.check_error,
    "linear": solves.check_linear,
    "adjoints": solves.check_adjoint,
}
SHOWN = 3  # failures printed of each invariant of a family


def run_one(name: str, number: int) -> list[Failure]:
    """The failures of a case; for worker processes."""
    torch.set_num_threads(1)
    return run_case(name, FAMILIES[name], number)


def summary(name: str, cases: int, failures: list[Failure]) -> str:
    """A line for the family, and for each invariant broken how often and the first few cases."""
    broken = len({failure.case for failure in failures})
    lines = [f"{name}: {cases} cases, {broken} broken"]
    order = sorted(failures, key=lambda failure: failure.invariant)
    for invariant, group in groupby(order, key=lambda failure: failure.invariant):
        members = list(group)
        lines.append(f"  {invariant}: {len(members)} times")
        lines += [f"  - {failure}" for failure in members[:SHOWN]]
    return "\n".join(lines)


def main(
    families: tuple[Name, ...] = get_args(Name), cases: int = 300, first: int = 0, workers: int = 1
) -> None:
    """Run ``cases`` of each family, from number ``first`` on, in so many processes."""
    sound = True
    with ProcessPoolExecutor(workers) as pool:
        for name in families:
            numbers = range(first, first + cases)
            found = pool.map(partial(run_one, name), numbers, chunksize=20)
            failures = [failure for each in found for failure in each]
            print(summary(name, cases, failures), flush=True)
            sound = sound and not failures
    sys.exit(not sound)


if __name__ == "__main__":
    tyro.cli(main)
