"""A DEQ layer on ``backend="auto"`` against the same layer on ``backend="reference"``.

    python benchmarks/bisoftmax_layer.py              # batch 8, 1024 tokens, width 256, 4 heads

Forward solve and implicit backward pass; prints seconds, their ratio, the largest difference of the
gradients, and the peak memory, each backend in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import solvers
from benchmarks.measure import table
from implicit_attn import DEQ
from implicit_attn.energies import BiSoftmaxAttention, Quadratic, ReLUFeedForward


def run(options: dict[str, Any], backend: str, queue: Any) -> None:
    """One solve and its backward pass, after one on a small input that warms everything up."""
    torch.set_num_threads(options["threads"])
    device = torch.device(options["device"])
    torch.manual_seed(0)
    dim = options["dim"]
    attention = BiSoftmaxAttention(dim, heads=options["heads"], backend=backend)
    energy = 0.4 * attention + Quadratic()
    if options["feedforward"]:
        energy = energy + 0.2 * ReLUFeedForward(dim, 2 * dim)
    layer = DEQ(energy, tolerance=solvers.Tolerance(rtol=1e-3)).to(device)
    x = torch.randn(options["batch"], options["tokens"], dim, device=device)
    layer(x[:1, :64]).square().mean().backward()
    layer.zero_grad()
    before = _peak(device)
    clock = time.process_time if options["cpu_time"] else time.perf_counter
    start = clock()
    z = layer(x)
    loss = z.square().mean()
    middle = clock()
    loss.backward()
    memory = _peak(device) - before  # waits for the device
    end = clock()
    assert layer.last is not None
    gradients = [
        p.grad.cpu().double().flatten().tolist() for p in layer.parameters() if p.grad is not None
    ]
    queue.put(
        {
            "forward s": middle - start,
            "backward s": end - middle,
            "seconds": end - start,
            "MiB": memory / 2**20,
            "evaluations": layer.last.evaluations.max().item(),
            "gradients": gradients,
        }
    )


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def separately(options: dict[str, Any], backend: str) -> dict[str, Any]:
    """``run`` in a fresh process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=run, args=(options, backend, queue))
    process.start()
    result = queue.get(timeout=600)
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Times a layer on two backends.")
    for name, value in {"batch": 8, "tokens": 1024, "dim": 256, "heads": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time, for a busy machine and one thread"
    )
    parser.add_argument("--feedforward", action="store_true", help="with a ReLU feed-forward term")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = vars(parser.parse_args())
    runs: dict[str, list[dict[str, Any]]] = {"auto": [], "reference": []}
    for _ in range(options["rounds"]):
        for backend, results in runs.items():
            results.append(separately(options, backend))
    rows = []
    for backend, results in runs.items():
        names = [name for name in results[0] if name != "gradients"]
        rows.append(
            {"backend": backend} | {n: statistics.median(r[n] for r in results) for n in names}
        )
    rows.append(
        {"backend": "auto / reference"} | {n: rows[0][n] / rows[1][n] for n in list(rows[0])[1:]}
    )
    print(table(rows))
    pairs = zip(runs["auto"][0]["gradients"], runs["reference"][0]["gradients"], strict=True)
    errors = [(torch.tensor(a) - torch.tensor(b)).norm() / torch.tensor(b).norm() for a, b in pairs]
    print(f"largest relative difference of a parameter's gradient: {max(errors).item():.1e}")
    if options["output"]:
        options["output"].write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
