"""The command ``make fuzz``: many random cases of every family, in several processes.

    make fuzz                                             # some minutes
    make fuzz ARGS="--cases 100000 --families fixed_points --workers 2"
    make fuzz ARGS="--family fixed_points --case 1234"     # exactly this one

A case depends on the name of its family and on its number alone. What is broken is printed and written
to a file, each with the command that repeats it; the exit code is then 1.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

import torch
from tqdm import tqdm

from fuzz import adjoints, energies, fixed_points, kernels, linear
from fuzz.cases import Failure, Family, run_case

FAMILIES: dict[str, Family] = {
    "fixed_points": fixed_points.check,
    "energies": energies.check,
    "linear": linear.check,
    "adjoints": adjoints.check,
    "kernels": kernels.check,
}
SHOWN = 3  # failures printed of each invariant of a family; the file has all


def run_range(name: str, numbers: Sequence[int]) -> list[Failure]:
    """The failures of some cases of a family; for worker processes."""
    torch.set_num_threads(1)
    return [failure for n in numbers for failure in run_case(name, FAMILIES[name], n)]


def _chunks(cases: int, first: int) -> Iterator[range]:
    size = max(1, min(50, cases // 20))
    return (range(n, min(n + size, first + cases)) for n in range(first, first + cases, size))


def run_family(
    name: str, cases: int, first: int, pool: ProcessPoolExecutor | None
) -> list[Failure]:
    """All cases of a family, with a progress bar."""
    chunks = list(_chunks(cases, first))
    run = partial(run_range, name)
    results = map(run, chunks) if pool is None else pool.map(run, chunks)
    failures: list[Failure] = []
    with tqdm(total=cases, desc=name, unit="case", disable=None) as bar:
        for chunk, found in zip(chunks, results, strict=True):
            failures += found
            bar.update(len(chunk))
            bar.set_postfix_str(f"{len(failures)} broken" if failures else "")
    return failures


def summary(name: str, cases: int, seconds: float, failures: list[Failure]) -> str:
    """A line for the family, and for each invariant broken how often and the first few cases."""
    broken = len({failure.case for failure in failures})
    lines = [f"{name}: {cases} cases, {broken} broken, {seconds:.0f} s"]
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
    top = ArgumentParser(prog="make fuzz", description=(__doc__ or "").split("\n")[0])
    add = top.add_argument
    add("--cases", type=at_least(1), default=300, help="of each family")
    add("--first", type=at_least(0), default=0, help="number of the first case")
    add("--families", "--family", nargs="+", choices=sorted(FAMILIES), help="default: all")
    add("--case", type=at_least(0), help="run this one case only, in this process")
    add("--workers", type=at_least(1), default=1, help="processes")
    add("--out", type=Path, default=Path("runs") / "fuzz.txt", help="file of all failures")
    return run_families(top.parse_args(arguments))


def run_families(options: Namespace) -> int:
    """The exit code: 1 where anything is broken."""
    names = options.families or list(FAMILIES)
    cases, first = (options.cases, options.first) if options.case is None else (1, options.case)
    found: list[Failure] = []
    alone = options.workers <= 1 or cases == 1
    pool = None if alone else ProcessPoolExecutor(options.workers)
    for name in names:
        start = time.perf_counter()
        failures = run_family(name, cases, first, pool)
        print(summary(name, cases, time.perf_counter() - start, failures), flush=True)
        found += failures
    if pool is not None:
        pool.shutdown()
    if not found:
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(f"{f.family} {f.case} {f}" for f in found) + "\n")
    kinds = Counter(f"{failure.family} {failure.invariant}" for failure in found)
    print(f"all failures: {options.out}; " + ", ".join(f"{n} {k}" for k, n in kinds.items()))
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
