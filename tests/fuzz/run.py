"""The command ``make fuzz``: many random cases of every family, in several processes.

    make fuzz                                             # some minutes
    make fuzz ARGS="--cases 100000 --families fixed_points --workers 2"
    make fuzz ARGS="--family fixed_points --case 1234"     # exactly this one

A case depends on the name of its family and on its number alone. What is broken is printed, each with
the command that repeats it; the exit code is then 1.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby

import torch

from fuzz import Failure, Family, run_case, solves, truths

FAMILIES: dict[str, Family] = {
    "fixed_points": solves.check_fixed_point,
    "truths": truths.check_true_value,
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


def at_least(low: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if int(text) < low:
            raise ValueError
        return int(text)

    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where anything is broken."""
    top = ArgumentParser(prog="make fuzz", description=(__doc__ or "").split("\n")[0])
    add = top.add_argument
    add("--cases", type=at_least(1), default=300, help="of each family")
    add("--first", type=at_least(0), default=0, help="number of the first case")
    add("--families", "--family", nargs="+", choices=sorted(FAMILIES), help="default: all")
    add("--case", type=at_least(0), help="this one case only")
    add("--workers", type=at_least(1), default=1, help="processes")
    options = top.parse_args(arguments)
    first, cases = (options.first, options.cases) if options.case is None else (options.case, 1)
    sound = True
    with ProcessPoolExecutor(options.workers) as pool:
        # Processes start with the first case that is handed to them.
        run = map if options.workers == 1 else partial(pool.map, chunksize=20)
        for name in options.families or list(FAMILIES):
            found = run(partial(run_one, name), range(first, first + cases))
            failures = [failure for each in found for failure in each]
            print(summary(name, cases, failures), flush=True)
            sound = sound and not failures
    return 0 if sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
