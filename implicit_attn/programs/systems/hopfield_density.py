"""A Hopfield memory is a density: what does it know of handwritten digits?

    implicit-attn run hopfield-density              # writes two pictures to runs/hopfield-density
    implicit-attn run hopfield-density --noises 0.1 # one noise only, a quick look

At temperature 1 / beta the energy of the continuous memory is a mixture of Gaussians around its patterns,
and one step of attention over the patterns is the best guess of the pattern behind a noisy state. On
the 8x8 digits of scikit-learn, scaled to norm 1, two memories take the noise off held-out images: one
stores the clean training images, the other is fitted by maximum likelihood to noisy ones and never sees
a clean one. Beside them stand the mean image, the nearest training image and the best linear filter.
density.png shows a memory of five patterns in two dimensions, as the sub-command memory-density does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
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
from implicit_attn.data import load_digits
from implicit_attn.studies import format_table, write_table
from implicit_attn.studies.experiments.experiment import progress
from implicit_attn.studies.experiments.memories.density_figures import digits_figure
from implicit_attn.studies.experiments.memories.digit_density import digit_densities
from implicit_attn.studies.experiments.registry import EXPERIMENTS

NOISES = (0.05, 0.08, 0.12, 0.2)
COUNTS = (5, 10, 20, 40, 80)


def command_line() -> Parser:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    noise = number(0.01, 1)
    add("--noises", type=noise, nargs="+", default=NOISES, help="of a pixel, standard deviations")
    add(
        "--counts",
        type=whole(1, 1000),
        nargs="+",
        default=COUNTS,
        help="numbers of fitted patterns, of which held-out likelihood chooses",
    )
    add("--seed", type=seed_number, default=0)
    add("--out", type=folder, default=Path("runs/hopfield-density"), help="folder of the pictures")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line()
    with command(parser):
        run(parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    with mistakes("--out"):
        make_folder(options.out)
    with mistakes():
        data = load_digits()
    torch.set_num_threads(1)  # the matrices are small
    noises = sorted(set(options.noises))
    with progress("digits", len(noises)) as advance:
        table, gallery = digit_densities(
            data, noises, counts=options.counts, seed=options.seed, advance=advance
        )
    write_table(options.out / "digits.csv", table)
    print(f"errors in units of the noise, nats of an image\n{format_table(table)}")
    title = "Hopfield memories of digits: denoising by one attention step, samples, likelihood"
    digits_figure(options.out / "digits.png", title, table, gallery)

    density = EXPERIMENTS["memory-density"]
    parser = Parser()
    density.add_to(parser)
    with progress("two dimensions") as advance:
        result = density.run(parser.parse_args(["--seed", str(options.seed)]), advance)
    result.draw(options.out / "density.png", density.title)
    print(f"\npictures: {options.out / 'digits.png'}, {options.out / 'density.png'}")


if __name__ == "__main__":
    main()
