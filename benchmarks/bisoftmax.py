"""Bi-softmax gradient and Hessian-vector product against dense formulas, autograd and attention.

    python benchmarks/bisoftmax.py                    # CPU or GPU, the shapes of the table below
    python benchmarks/bisoftmax.py --shapes 1,8,1024,64 4,8,197,64 --rounds 9

Prints medians of interleaved runs as ratios, the achieved TFLOP/s (counting 6 N^2 p flops for a
gradient and 14 N^2 p for a product, as if every tile were computed once, whatever a backend saves)
and the share of the roofline (the time of just those flops and N^2 exponentials at the rates of a
large product and a long exp on this machine; a share may exceed 1 where symmetry saves work).
Writes ``bisoftmax.csv`` and ``bisoftmax.png`` to ``--output``.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measure import interleaved, peak_bytes, table
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp, explain

Contestants = dict[str, Callable[[], object]]
CPU_SHAPES = ("8,4,65,64", "4,8,197,64", "1,8,512,64", "1,8,1024,32", "1,8,1024,64", "1,4,4096,64")
GPU_SHAPES = ("64,8,65,64", "64,8,197,64", "4,16,1024,64", "2,16,4096,64", "2,16,4096,128")
LARGEST_DENSE = 2**28  # elements of all the N x N matrices of a dense formula


def dense(z: Tensor, beta: float) -> Tensor:
    """The formula as one writes it: ``(P + P^T) Z``."""
    weights = torch.softmax(beta * (z @ z.mT), -1)
    return (weights + weights.mT) @ z


def energy(z: Tensor, beta: float) -> Tensor:
    return torch.logsumexp(beta * (z @ z.mT), -1).sum() / beta


def by_autograd(z: Tensor, beta: float) -> Tensor:
    point = z.detach().requires_grad_()
    return torch.autograd.grad(energy(point, beta), point)[0]


def double_backward(z: Tensor, v: Tensor, beta: float) -> Tensor:
    point = z.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(point, beta), point, create_graph=True)
    return torch.autograd.grad(gradient, point, v)[0]


def attention(z: Tensor, beta: float, kind: SDPBackend) -> Tensor:
    with sdpa_kernel(kind):
        return F.scaled_dot_product_attention(z, z, z, scale=beta)


def attention_and_back(z: Tensor, v: Tensor, beta: float, kind: SDPBackend) -> Any:
    query, key, value = (z.detach().requires_grad_() for _ in range(3))
    with sdpa_kernel(kind):
        output = F.scaled_dot_product_attention(query, key, value, scale=beta)
    return torch.autograd.grad(output, (query, key, value), v)


def contestants(z: Tensor, v: Tensor, beta: float, compiled: bool) -> tuple[Contestants, float]:
    """What runs on these tensors, by name, and the bound on the scores."""
    limit = beta * z.shape[-1]
    _, lse = bisoftmax(z, beta, limit=limit)
    runs: Contestants = {
        "gradient": lambda: bisoftmax(z, beta, limit=limit),
        "hvp": lambda: bisoftmax_hvp(z, v, beta, limit=limit, lse=lse),
    }
    if z.shape[0] * z.shape[1] * z.shape[2] ** 2 <= LARGEST_DENSE:
        runs["dense"] = lambda: dense(z, beta)
        runs["reference"] = lambda: bisoftmax(z, beta, limit=limit, backend="reference")
        runs["autograd"] = lambda: by_autograd(z, beta)
        runs["double backward"] = lambda: double_backward(z, v, beta)
        if compiled:
            fused = torch.compile(dense, dynamic=False)
            runs["compiled"] = lambda: fused(z, beta)
    kinds = [("flash", SDPBackend.FLASH_ATTENTION)]
    if z.is_cuda and z.dtype != torch.float32:
        kinds.append(("cudnn", SDPBackend.CUDNN_ATTENTION))
    elif z.is_cuda:
        kinds = [("efficient", SDPBackend.EFFICIENT_ATTENTION)]
    for name, kind in kinds:
        runs[f"{name} forward"] = partial(attention, z, beta, kind)
        runs[f"{name} forward+backward"] = partial(attention_and_back, z, v, beta, kind)
    return runs, limit


def settled(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The run, and on a GPU the wait for it."""
    if device.type != "cuda":
        return run

    def waiting() -> None:
        run()
        torch.cuda.synchronize()

    return waiting


def rates(
    device: torch.device, dtype: torch.dtype, clock: Callable[[], float]
) -> tuple[float, float]:
    """Flops and exponentials a second of this machine."""
    side = 8192 if device.type == "cuda" else 1024
    a = torch.randn(side, side, device=device, dtype=dtype)
    work = torch.zeros(2**18 if device.type == "cpu" else 2**26, device=device)
    runs = {"product": lambda: a @ a, "exp": lambda: torch.exp(work, out=work).zero_()}
    times = interleaved({k: settled(run, device) for k, run in runs.items()}, 9, clock)
    return 2.0 * side**3 / times["product"], work.numel() / times["exp"]


def measure(shape: tuple[int, ...], args: argparse.Namespace, peak: Any) -> dict[str, Any]:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    batch, heads, tokens, width = shape
    generator = torch.Generator().manual_seed(0)
    z, v = (torch.randn(shape, generator=generator) for _ in range(2))
    z = (F.normalize(z, dim=-1) * width**0.5).to(device, dtype)
    v, beta = v.to(device, dtype), width**-0.5
    runs, limit = contestants(z, v, beta, args.compiled)
    times = interleaved(
        {k: settled(run, device) for k, run in runs.items()}, args.rounds, args.clock
    )
    pairs = batch * heads * tokens**2
    row: dict[str, Any] = {"shape": "x".join(map(str, shape))}
    row["backend"] = explain(z, beta, limit=limit).backend
    for name, units in (("gradient", 3), ("hvp", 7)):
        flops, seconds = 2.0 * units * pairs * width, times[name]
        parts = flops / peak[0], pairs / peak[1]
        # A GPU has other units for exp than for products; a CPU core does both by turns.
        bound = max(parts) if device.type == "cuda" else sum(parts)
        row |= {f"{name} TFLOP/s": flops / seconds / 1e12, f"{name} roofline": bound / seconds}
    if device.type == "cpu":
        for name in ("gradient", "hvp"):
            row[f"{name} MiB"] = peak_bytes(runs[name]) / 2**20
    return row | {f"{name} ms": 1e3 * seconds for name, seconds in times.items()}


def ratios(row: dict[str, Any]) -> dict[str, Any]:
    """Gradients by what computes a gradient or attends once, products by what differentiates it."""
    short = {"shape": row["shape"], "backend": row["backend"]}
    peers = {
        "gradient": ("dense", "compiled", "autograd", "flash forward", "cudnn forward"),
        "hvp": ("double backward", "flash forward+backward", "cudnn forward+backward"),
    }
    for ours, others in peers.items():
        short[f"{ours} ms"] = row[f"{ours} ms"]
        for name in others:
            if f"{name} ms" in row:
                short[f"{ours} / {name}"] = row[f"{ours} ms"] / row[f"{name} ms"]
        short[f"{ours} TFLOP/s"] = row[f"{ours} TFLOP/s"]
        short[f"{ours} roofline"] = row[f"{ours} roofline"]
    return short


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "bisoftmax.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    plot(rows, folder / "bisoftmax.png")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds by shape, gradient left, product right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = {
        "Gradient": ("gradient", "dense", "compiled", "autograd", "flash forward", "cudnn forward"),
        "Hessian-vector product": (
            "hvp",
            "double backward",
            "flash forward+backward",
            "cudnn forward+backward",
        ),
    }
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    for axis, (title, names) in zip(axes, groups.items(), strict=True):
        shown = [name for name in names if any(f"{name} ms" in row for row in rows)]
        for number, name in enumerate(shown):
            heights = [row.get(f"{name} ms", float("nan")) for row in rows]
            places = [place + number * 0.8 / len(shown) for place in range(len(rows))]
            axis.bar(places, heights, 0.8 / len(shown), label=name, align="edge")
        axis.set_xticks([k + 0.4 for k in range(len(rows))], [row["shape"] for row in rows])
        axis.tick_params(axis="x", labelrotation=20)
        axis.set_yscale("log")
        axis.set_ylabel("milliseconds")
        axis.set_xlabel("batch x heads x tokens x width")
        axis.set_title(title)
        axis.grid(axis="y", alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the bi-softmax against its peers.")
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--shapes", nargs="+", default=GPU_SHAPES if on_gpu else CPU_SHAPES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="on the CPU")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time, for a busy machine and one thread"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/bisoftmax"))
    has_compiler = on_gpu or shutil.which("g++") is not None
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=has_compiler)
    args = parser.parse_args()
    args.clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    peak = rates(torch.device(args.device), getattr(torch, args.dtype), args.clock)
    print(f"{args.device} {args.dtype}: {peak[0] / 1e12:.3g} TFLOP/s, {peak[1]:.3g} exp/s")
    rows = []
    for text in args.shapes:
        rows.append(measure(tuple(map(int, text.split(","))), args, peak))
        print(table([ratios(rows[-1])]), flush=True)
    write(rows, args.output)


if __name__ == "__main__":
    main()
