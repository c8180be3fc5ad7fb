"""Train a local block on small rings, then give it more iterations on larger ones.

    implicit-attn run easy-to-hard                     # half a minute

The task is the parity of bits along a ring since the last mark, which takes as many local steps as a run
is long. The block is trained with random numbers of iterations, so that its answer is a fixed point;
rings of four times the size then take more iterations and nothing else. Beside other models, with
other solvers and several seeds: ``implicit-attn study easy-to-hard``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from implicit_attn.command_line import Parser, command, count, mistakes, seed_number, whole
from implicit_attn.data import Instances, draw_rings
from implicit_attn.models import EquilibriumRing
from implicit_attn.studies import format_table
from implicit_attn.studies.harder.curves import adaptive_curve, iteration_curve, multiples
from implicit_attn.studies.harder.methods import iterated
from implicit_attn.training import Recipe, train_on_drawn
from solvers import Forward


def command_line() -> Parser:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--size", type=whole(4, 64), default=16, help="positions of the largest rings in training")
    add("--steps", type=count, default=200, help="of training, a batch of 64 rings each")
    add("--tests", type=count, default=100, help="rings of each size in the test")
    add("--seed", type=seed_number, default=0, help="of weights and rings")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line()
    with command(parser):
        run(parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # the matrices are small
    size = options.size
    torch.manual_seed(options.seed)
    model = EquilibriumRing(features=2, classes=2, dim=32, heads=4, iterations=2 * size)

    def draw(number: int, generator: torch.Generator) -> Instances:
        positions = int(torch.randint(max(2, size // 2 - 2), size + 1, (), generator=generator))
        return draw_rings(number, positions, generator=generator)

    recipe = Recipe(
        epochs=options.steps,
        batch=64,
        rate=3e-3,
        warmup=0.1,
        iterations=(size, 2 * size),
        seed=options.seed,
    )
    with mistakes():
        losses = train_on_drawn(model, draw, recipe)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.4f} on rings of up to {size} positions\n")

    generator = torch.Generator().manual_seed(options.seed + 1)
    budgets = multiples(2 * size, high=4)
    shares, stops = [], []
    for factor in (1, 2, 4):
        rings = draw_rings(options.tests, factor * size, generator=generator)
        rows = iteration_curve(iterated(model), rings, budgets)
        solved = {str(row["iterations"]): f"{row['solved']:.0%}" for row in rows}
        shares.append({"positions": factor * size, **solved})
        row = adaptive_curve(model, rings, Forward(), 16 * size, rtols=[1e-3])[0][0]
        stops.append({"positions": factor * size, **row})
    print(f"rings solved, by iterations (at most {2 * size} in training)\n{format_table(shares)}")
    print(f"\neach ring stops by itself\n{format_table(stops)}")
    print(f"\n{unfolding(model, draw_rings(1, 2 * size, marks=(1, 1), generator=generator))}")


@torch.no_grad()
def unfolding(model: EquilibriumRing, ring: Instances) -> str:
    """A line for every few iterations: # where an answer is right, . where it is wrong."""
    positions = ring.targets.shape[1]
    budgets = [max(1, positions * k // 8) for k in range(1, 11)]
    mark = int((ring.inputs[0, :, 1] > 0).nonzero()[0])
    lines = [f"one ring of {positions}, from its mark on; # right, . wrong"]
    for budget, answer in zip(budgets, iterated(model)(ring.inputs, budgets), strict=True):
        right = ring.right(answer.predicted)[0].roll(-mark).tolist()
        lines.append(f"{budget:5d}  {''.join('#' if each else '.' for each in right)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
