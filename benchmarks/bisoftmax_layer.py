"""A DEQ layer on ``backend="auto"`` against the same layer on ``backend="reference"``.

    python benchmarks/bisoftmax_layer.py              # batch 8, 1024 tokens, width 256, 4 heads
    python benchmarks/bisoftmax_layer.py --backend cpp

Forward solve and implicit backward pass; prints seconds, their ratio, the largest difference of the
gradients, and the peak memory, each backend in processes of its own: on a CPU one a round, on a GPU
one for all rounds, after solves of the full size.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import solvers
from benchmarks.measure import table
from implicit_attn import DEQ
from implicit_attn.command_line import Parser, command, count, device, place, size, threads
from implicit_attn.energies import BiSoftmaxAttention, Quadratic, ReLUFeedForward


def layer_of(options: dict[str, Any], backend: str) -> DEQ:
    dim = options["dim"]
    attention = BiSoftmaxAttention(dim, heads=options["heads"], backend=backend)
    energy = 0.4 * attention + Quadratic()
    if options["feedforward"]:
        energy = energy + 0.2 * ReLUFeedForward(dim, 2 * dim)
    return DEQ(energy, tolerance=solvers.Tolerance(rtol=1e-3))


def run(options: dict[str, Any], backend: str, rounds: int) -> list[dict[str, Any]]:
    """So many solves with their backward passes, after a warm-up."""
    torch.set_num_threads(options["threads"])
    device = torch.device(options["device"])
    torch.manual_seed(0)
    layer = layer_of(options, backend).to(device)
    x = torch.randn(options["batch"], options["tokens"], options["dim"], device=device)
    # A GPU compiles kernels for the size of the input; on a CPU the peak of memory never sinks again.
    for _ in range(2 if device.type == "cuda" else 1):
        layer(x if device.type == "cuda" else x[:1, :64]).square().mean().backward()
    return [one_round(layer, x, options) for _ in range(rounds)]


def one_round(layer: DEQ, x: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    layer.zero_grad()
    before = _memory(x.device)
    clock = time.process_time if options["cpu_time"] else time.perf_counter
    start = clock()
    z = layer(x)
    loss = z.square().mean()
    _wait(x.device)
    middle = clock()
    loss.backward()
    _wait(x.device)
    end = clock()
    memory = _peak(x.device) - before
    assert layer.last is not None
    gradients = [
        p.grad.cpu().double().flatten().tolist() for p in layer.parameters() if p.grad is not None
    ]
    return {
        "forward s": middle - start,
        "backward s": end - middle,
        "seconds": end - start,
        "MiB": memory / 2**20,
        "evaluations": layer.last.evaluations.max().item(),
        "gradients": gradients,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _memory(device: torch.device) -> int:
    """What is held before a round, from where on its peak counts."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return _peak(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def separately(options: dict[str, Any], backend: str, rounds: int) -> list[dict[str, Any]]:
    """``run`` in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        results = pool.submit(run, options, backend, rounds).result()
    for result in results:
        shown = {name: value for name, value in result.items() if name != "gradients"}
        print(f"{backend}: " + ", ".join(f"{n} {v:.3g}" for n, v in shown.items()), flush=True)
    return results


def main() -> None:
    parser = Parser(description="Times a layer on two backends.")
    for name, value in {"batch": 8, "tokens": 1024, "dim": 256, "heads": 4}.items():
        parser.add_argument(f"--{name}", type=size, default=value)
    parser.add_argument("--backend", choices=("auto", "blocks", "cpp", "triton"), default="auto")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--threads", type=threads, default=2)
    parser.add_argument(
        "--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time, for a busy machine and one thread"
    )
    parser.add_argument("--feedforward", action="store_true", help="with a ReLU feed-forward term")
    parser.add_argument("--output", type=place, help="JSON file for the figures")
    with command(parser):
        options = parser.parse_args()
        if options.dim % options.heads:
            parser.error(f"argument --heads: must divide --dim {options.dim}, got {options.heads}")
        compare(vars(options))


def compare(options: dict[str, Any]) -> None:
    ours = options["backend"]
    runs: dict[str, list[dict[str, Any]]] = {ours: [], "reference": []}
    # On a GPU starting and warming up takes longer than the rounds: one process a backend.
    inside = options["rounds"] if torch.device(options["device"]).type == "cuda" else 1
    for _ in range(options["rounds"] // inside):
        for backend, results in runs.items():
            results.extend(separately(options, backend, inside))
    rows = []
    for backend, results in runs.items():
        names = [name for name in results[0] if name != "gradients"]
        rows.append(
            {"backend": backend} | {n: statistics.median(r[n] for r in results) for n in names}
        )
    rows.append(
        {"backend": f"{ours} / reference"} | {n: rows[0][n] / rows[1][n] for n in list(rows[0])[1:]}
    )
    print(table(rows))
    pairs = zip(runs[ours][0]["gradients"], runs["reference"][0]["gradients"], strict=True)
    errors = [(torch.tensor(a) - torch.tensor(b)).norm() / torch.tensor(b).norm() for a, b in pairs]
    print(f"largest relative difference of a parameter's gradient: {max(errors).item():.1e}")
    if options["output"]:
        options["output"].write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
