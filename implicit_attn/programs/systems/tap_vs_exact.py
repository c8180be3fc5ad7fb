"""How good are mean-field theories of spins, and where do they stop making sense?

    implicit-attn run tap-vs-exact               # writes runs/tap-vs-exact/report.png, about a minute
    implicit-attn run tap-vs-exact --models 10   # a quick look

Random Ising and Potts models, so small that every configuration can be visited, tell the exact means
and correlations. Naive mean field and adaptive TAP are compared with them against the strength of
the couplings, together with the criterion that each theory must meet to be consistent with itself:
the matrix ``Lambda - J``, whose inverse is the estimate of the correlations, is positive definite.
A panel shows the errors of their free energies, and of the second-order theory between them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from implicit_attn.command_line import (
    Parser,
    command,
    folder,
    make_folder,
    mistakes,
    number,
    seed_number,
    whole,
)
from implicit_attn.optional import require
from implicit_attn.studies import (
    error_against_coupling,
    format_table,
    random_ising,
    random_potts,
    write_table,
)
from implicit_attn.studies.figures.spins import mean_field_report
from implicit_attn.studies.spins.models import MOST_CONFIGURATIONS

STRENGTHS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0)
PRINTED = {
    "strength": "s",
    "naive_mean": "means: naive",
    "tap_mean": "TAP",
    "naive_pairs": "pairs: naive",
    "tap_pairs": "TAP chi",
    "derivative_pairs": "TAP dm/dx",
    "naive_log_partition": "log Z: naive",
    "second_log_partition": "second order",
    "tap_log_partition": "TAP log Z",
    "tap_better": "TAP better",
    "tap_consistent": "consistent",
    "tap_stable": "stable",
    "truth_consistent": "naive holds the truth",
}


def command_line() -> Parser:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--models", type=whole(1, 100_000), default=50, help="random models at every strength")
    add("--ising", type=whole(1, 20), default=10, help="sites of the Ising models")
    add("--potts", type=whole(1, 20), default=7, help="sites of the Potts models")
    add("--states", type=whole(2, 1000), default=3, help="states of a Potts site")
    strength = number(0, 1e6, above=True)
    add(
        "--strengths",
        type=strength,
        nargs="+",
        default=STRENGTHS,
        help="of the couplings, each > 0",
    )
    add("--seed", type=seed_number, default=0)
    add("--out", type=folder, default=Path("runs/tap-vs-exact"), help="folder of the report")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line()
    with command(parser):
        options = parser.parse_args(arguments)
        if options.states**options.potts > MOST_CONFIGURATIONS:
            parser.error(
                f"argument --potts: --states to the power of --potts must be at most "
                f"{MOST_CONFIGURATIONS}, got {options.states} and {options.potts}"
            )
        run(options)


def run(options: argparse.Namespace) -> None:
    with mistakes():
        tqdm = require("tqdm", extra="training").tqdm
    with mistakes("--out"):
        make_folder(options.out)
    torch.set_num_threads(1)  # the matrices are tiny
    families = {
        "ising": (f"Ising, N = {options.ising}", partial(random_ising, options.ising)),
        "potts": (
            f"Potts, {options.states} states, N = {options.potts}",
            partial(random_potts, options.potts, options.states),
        ),
    }
    tables = {}
    for name, (title, draw) in families.items():
        strengths = tqdm(sorted(options.strengths), desc=title, unit="strength", leave=False)
        table = error_against_coupling(draw, strengths, options.models, seed=options.seed)
        tables[title] = table
        write_table(options.out / f"{name}.csv", table)
        short = [{PRINTED[key]: row[key] for key in PRINTED} for row in table]
        print(f"\n{title}: medians of relative errors, shares of models\n{format_table(short)}")
    mean_field_report(
        options.out / "report.png",
        f"Mean-field theories against enumeration: {options.models} random models at each strength, "
        "couplings N(0, s²/N), fields N(0, 1/4)",
        tables,
    )
    print(f"\nreport: {options.out / 'report.png'} (tables beside it as CSV)")


if __name__ == "__main__":
    main()
