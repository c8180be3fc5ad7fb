"""Gradient steps of a bi-softmax layer with carried normalisers against plain gradient steps.

    python benchmarks/carried_normaliser.py           # 1 x 512 tokens, width 128, 4 heads
    python benchmarks/carried_normaliser.py --device cuda

For each weight of the attention term and each tolerance on the residual of the *plain* step, the mean
evaluations and the seconds of the forward solve, and the seconds of the backward pass. A carried solve
runs at the loosest tolerance of its own residual (in steps of 10^(1/4)) that meets it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import solvers
from benchmarks.measure import table
from implicit_attn import DEQ, GradientStep
from implicit_attn.energies import BiSoftmaxAttention, Quadratic, ReLUFeedForward
from implicit_attn.updates import CarriedNormaliser


def layers(weight: float, args: argparse.Namespace) -> tuple[dict[str, DEQ], GradientStep]:
    """Layers on one energy, and its plain step."""
    torch.manual_seed(0)
    energy = weight * BiSoftmaxAttention(args.dim, heads=args.heads)
    energy = energy + 0.2 * ReLUFeedForward(args.dim, 2 * args.dim) + Quadratic()
    plain, carried = GradientStep(energy), CarriedNormaliser(energy)
    options: dict[str, Any] = {"max_steps": args.max_steps, "on_failure": "ignore"}
    made = {
        "plain L-BFGS": DEQ(plain, **options),
        "plain Anderson": DEQ(plain, solver=solvers.Anderson(), **options),
        "carried Anderson": DEQ(carried, **options),
        "carried Forward": DEQ(carried, solver=solvers.Forward(0.5), **options),
    }
    return {name: layer.to(args.device) for name, layer in made.items()}, plain


def tokens(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else value.tokens


def residual(plain: GradientStep, z: Tensor, x: Tensor) -> float:
    """The largest of the samples', by the plain step."""
    with torch.no_grad():
        fz = plain(z, x)
    return ((fz - z).flatten(1).norm(dim=1) / fz.flatten(1).norm(dim=1)).max().item()


def loosest(layer: DEQ, plain: GradientStep, x: Tensor, target: float) -> float | None:
    """The tolerance at which the plain residual is met; None: at none down to a tenth of it."""
    for quarter in range(4, -5, -1):
        rtol = target * 10 ** (quarter / 4)
        with torch.no_grad():
            solution = layer.solve(x, tolerance=solvers.Tolerance(rtol=rtol))
        if residual(plain, tokens(solution.value), x) <= target:
            return rtol
    return None


def timed(
    run: Callable[[], Any], clock: Callable[[], float], device: torch.device
) -> tuple[float, Any]:
    """Seconds, the wait for a GPU included, and the result."""
    wait(device)
    start = clock()
    result = run()
    wait(device)
    return clock() - start, result


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    weight: float, target: float, args: argparse.Namespace, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    made, plain = layers(weight, args)
    x = torch.randn(args.batch, args.tokens, args.dim).to(args.device)
    rtols = {name: loosest(layer, plain, x, target) for name, layer in made.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    evaluations: dict[str, float] = {}
    warming = 1 if x.is_cuda else 0  # the backward pass has kernels to compile as well
    for number in range(args.rounds + warming):
        for name, layer in made.items():
            rtol = rtols[name]
            if rtol is None:
                continue
            tolerance = solvers.Tolerance(rtol=rtol)
            forward, solution = timed(
                lambda: layer.solve(x, tolerance=tolerance),  # noqa: B023
                clock,
                x.device,
            )
            backward, _ = timed(
                lambda: tokens(solution.value).square().mean().backward(),  # noqa: B023
                clock,
                x.device,
            )
            if number >= warming:
                times[name].append((forward, backward))
            evaluations[name] = solution.evaluations.double().mean().item()
    rows = []
    for name, seconds in times.items():
        row: dict[str, Any] = {"weight": weight, "residual": target, "method": name}
        if seconds:
            forward, backward = (statistics.median(part) for part in zip(*seconds, strict=True))
            row |= {"evaluations": evaluations[name], "forward s": forward, "backward s": backward}
            row |= {"total s": forward + backward}
        else:
            row |= dict.fromkeys(("evaluations", "forward s", "backward s", "total s"), "not met")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts and times carried normalisers.")
    sizes = {"batch": 1, "tokens": 512, "dim": 128, "heads": 4, "max_steps": 100, "rounds": 5}
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--weights", type=float, nargs="+", default=[0.2, 0.4, 1.0])
    parser.add_argument("--residuals", type=float, nargs="+", default=[1e-3, 1e-5])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time, for a busy machine and one thread"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    rows = []
    for weight in args.weights:
        for target in args.residuals:
            rows += measure(weight, target, args, clock)
            print(f"weight {weight}, residual {target}: done", file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
