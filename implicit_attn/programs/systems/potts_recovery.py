"""Which models find the couplings of a Potts model in its samples?

    implicit-attn run potts-recovery --data ring4                       # a minute
    implicit-attn run potts-recovery                                    # four data sets, about ten minutes
    implicit-attn run potts-recovery --data tree --methods sink-long potts vanilla recycled

Four sparse models of 20 sites and 10 colours are sampled by Gibbs chains. Factored attention (weights by
positions, values by colours), the Potts model itself and transformers on masked tokens learn from the
samples; their couplings are compared with the true ones, and their losses with that of the true
conditionals. Each data set ends in a table and a picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from implicit_attn.command_line import (
    Parser,
    command,
    count,
    folder,
    make_folder,
    mistakes,
    seed_number,
    whole,
)
from implicit_attn.studies import format_table, write_table
from implicit_attn.studies.experiments.experiment import progress
from implicit_attn.studies.experiments.potts.commands import method_name
from implicit_attn.studies.experiments.potts.data import draw_data
from implicit_attn.studies.experiments.potts.figures import recovery_figure
from implicit_attn.studies.experiments.potts.methods import Effort
from implicit_attn.studies.experiments.potts.recovery import USUAL, compare_methods
from implicit_attn.studies.spins.graphs import GRAPHS


def command_line() -> Parser:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    usual = Effort()
    add("--data", nargs="+", choices=GRAPHS, default=list(GRAPHS), help="models (default: all)")
    add("--methods", nargs="+", type=method_name, help="default: those of interest for each model")
    add("--samples", type=whole(1, 10_000_000), default=20_000, help="for training")
    add("--test", type=whole(1, 10_000_000), default=5_000, help="samples of the test")
    add("--few", nargs="*", type=count, default=[], help="further fits to fewer samples")
    add("--sites", type=whole(2, 1000), default=20)
    add("--colours", type=whole(2, 100), default=10)
    add("--steps", type=count, default=usual.steps, help="of factored attention")
    add("--masked", type=count, default=usual.masked, help="steps of transformers")
    add("--seeds", nargs="+", type=seed_number, default=[0], help="each a model with its samples")
    add("--out", type=folder, default=Path("runs/potts-recovery"), help="folder of the files")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line()
    with command(parser):
        run(parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    with mistakes("--out"):
        make_folder(options.out)
    torch.set_num_threads(1)  # the matrices are small
    for kind in options.data:
        for seed in options.seeds:
            recover_from(kind, seed, options)


def recover_from(kind: str, seed: int, options: argparse.Namespace) -> None:
    """One data set: its table, printed and written as CSV, and its picture."""
    effort = Effort(steps=options.steps, masked=options.masked, tested=min(1000, options.test))
    sizes = {"sites": options.sites, "colours": options.colours}
    with mistakes(), progress(kind) as advance:
        advance("Gibbs sampling")
        data = draw_data(kind, options.samples, options.test, seed=seed, **sizes)
        recovery = compare_methods(
            data,
            options.methods or USUAL[kind],
            effort,
            few=options.few,
            seed=seed,
            advance=advance,
        )
    title = (
        f"{kind}, seed {seed}: {data.sites} sites, {data.colours} colours, {options.samples} samples, "
        f"loss of the truth {data.bayes():.3f} nats a site"
    )
    print(f"\n{title}\n{format_table(recovery.rows)}", flush=True)
    stem = f"{kind}-{seed}"
    for name, table in recovery.tables().items():
        write_table(options.out / f"{stem}-{name}.csv", table)
    recovery_figure(options.out / f"{stem}.png", title, recovery)
    print(f"figure: {options.out / f'{stem}.png'} (tables beside it as CSV)", flush=True)


if __name__ == "__main__":
    main()
