"""Bi-softmax gradient and Hessian-vector product against dense formulas, autograd and attention.

    python benchmarks/bisoftmax.py peers                    # CPU or GPU, the shapes of the table below
    python benchmarks/bisoftmax.py peers --shapes 1 8 1024 64 4 8 197 64 --rounds 9
    python benchmarks/bisoftmax.py peers --backend blocks   # without the C++ kernel
    python benchmarks/bisoftmax.py layer --backend cpp      # a DEQ layer against backend="reference"

All print medians of runs in turns, on a GPU of the device's own times. A peer that cannot take a shape is
reported.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import solvers
from benchmarks.measure import interleaved, table
from implicit_attn import DEQ
from implicit_attn.energies import BiSoftmaxAttention, Quadratic
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp, explain

Runs = dict[str, Callable[[], object]]
Shape = tuple[int, int, int, int]  # batch, heads, tokens, features of a head
DType = Literal["float32", "bfloat16", "float16", "float64"]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
CPU_SHAPES: tuple[Shape, ...] = (
    (8, 4, 65, 64), (4, 8, 197, 64), (1, 8, 512, 64), (1, 8, 1024, 32), (1, 8, 1024, 64),
    (1, 4, 4096, 64),
)  # fmt: skip
GPU_SHAPES: tuple[Shape, ...] = (
    (64, 8, 65, 64), (64, 8, 197, 64), (4, 16, 1024, 64), (2, 16, 4096, 64), (2, 16, 4096, 128),
)  # fmt: skip
# Bytes that a dense peer needs for an element of its N x N matrices: a dozen of them in float32.
DENSE_BYTES = 48
PEERS = {
    "gradient": ("dense", "compiled", "autograd", "flash forward", "cudnn forward"),
    "hvp": ("double backward", "flash forward+backward", "cudnn forward+backward"),
}


def inputs(shape: Shape) -> tuple[Tensor, Tensor, float, float]:
    """RMS-normalised tokens, a direction, beta, and the bound on the scores."""
    generator = torch.Generator().manual_seed(0)
    z, v = (torch.randn(shape, generator=generator) for _ in range(2))
    width = shape[3]
    return F.normalize(z, dim=-1) * width**0.5, v, width**-0.5, width**0.5


def dense(z: Tensor, beta: float) -> Tensor:
    """The formula as one writes it: ``(P + P^T) Z``."""
    weights = torch.softmax(beta * (z @ z.mT), -1)
    return (weights + weights.mT) @ z


def by_autograd(z: Tensor, beta: float, v: Tensor | None = None) -> Tensor:
    """The gradient of the energy, or its derivative along v."""
    point = z.detach().requires_grad_()
    energy = torch.logsumexp(beta * (point @ point.mT), -1).sum() / beta
    (gradient,) = torch.autograd.grad(energy, point, create_graph=v is not None)
    return gradient if v is None else torch.autograd.grad(gradient, point, v)[0]


def attention(z: Tensor, beta: float, kind: SDPBackend) -> Tensor:
    with sdpa_kernel(kind):
        return F.scaled_dot_product_attention(z, z, z, scale=beta)


def attention_and_back(z: Tensor, v: Tensor, beta: float, kind: SDPBackend) -> Any:
    query, key, value = (z.detach().requires_grad_() for _ in range(3))
    with sdpa_kernel(kind):
        output = F.scaled_dot_product_attention(query, key, value, scale=beta)
    return torch.autograd.grad(output, (query, key, value), v)


def contestants(
    z: Tensor, v: Tensor, beta: float, limit: float, compiled: bool, backend: str
) -> Runs:
    """What runs on these tensors, by name; ``limit`` bounds the scores."""
    options: dict[str, Any] = {"limit": limit, "backend": backend}
    _, lse = bisoftmax(z, beta, **options)
    runs: Runs = {
        "gradient": lambda: bisoftmax(z, beta, **options),
        "hvp": lambda: bisoftmax_hvp(z, v, beta, lse=lse, **options),
    }
    free = min(2**31, torch.cuda.mem_get_info()[0] // DENSE_BYTES) if z.is_cuda else 2**28
    if z.shape[0] * z.shape[1] * z.shape[2] ** 2 <= free:
        runs["dense"] = lambda: dense(z, beta)
        runs["autograd"] = lambda: by_autograd(z, beta)
        runs["double backward"] = lambda: by_autograd(z, beta, v)
        if compiled:
            fused = torch.compile(dense, dynamic=False)
            runs["compiled"] = lambda: fused(z, beta)
    kinds = [("flash", SDPBackend.FLASH_ATTENTION)]
    if z.is_cuda and z.dtype != torch.float32:
        kinds.append(("cudnn", SDPBackend.CUDNN_ATTENTION))
    for name, kind in kinds:
        runs[f"{name} forward"] = partial(attention, z, beta, kind)
        runs[f"{name} forward+backward"] = partial(attention_and_back, z, v, beta, kind)
    return runs


def able(runs: Runs) -> Runs:
    """The runs that work here, tried once. An error of ours is raised: it is no peer's missing shape."""
    working = {}
    for name, run in runs.items():
        try:
            run()
            if ON_GPU:
                torch.cuda.synchronize()
        except RuntimeError as error:
            if name in PEERS:
                raise
            print(f"{name}: not supported ({str(error).strip().splitlines()[0][:120]})")
        else:
            working[name] = run
    return working


def timed(runs: Runs, rounds: int) -> dict[str, float]:
    """Median milliseconds: of the processor, or of the CUDA device alone."""
    if not ON_GPU:
        return {name: 1e3 * seconds for name, seconds in interleaved(runs, rounds).items()}
    launching: dict[str, float] = {}
    for name, run in runs.items():
        run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        launching[name] = time.perf_counter() - start
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            # A kernel that sleeps until the host has enqueued everything: no gaps between launches.
            torch.cuda._sleep(int((10 * launching[name] + 1e-4) * 2e9))
            begin.record()
            for _ in range(3):
                run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 3)
    return {name: statistics.median(values) for name, values in times.items()}


# --- the programs --------------------------------------------------------------------------------


def peers(
    dtype: DType = "bfloat16" if ON_GPU else "float32",
    shapes: tuple[Shape, ...] = GPU_SHAPES if ON_GPU else CPU_SHAPES,
    rounds: int = 9,
    threads: int = 2,
    compiled: bool = ON_GPU
    or shutil.which("g++") is not None,  # torch.compile of the dense formula
    backend: Literal["auto", "blocks", "cpp", "triton"] = "auto",
) -> None:
    """Ratios to the peers; a shape is a batch, heads, tokens and features of a head."""
    torch.set_num_threads(threads)
    for shape in shapes:
        z, v, beta, limit = inputs(shape)
        z, v = (each.to(DEVICE, getattr(torch, dtype)) for each in (z, v))
        runs = able(contestants(z, v, beta, limit, compiled, backend))
        times = timed(runs, rounds)
        row: dict[str, Any] = {"shape": "x".join(map(str, shape))}
        row["backend"] = explain(z, beta, limit=limit, backend=backend).backend
        for name, others in PEERS.items():
            row[f"{name} ms"] = times[name]
            row |= {f"{name} / {o}": times[name] / times[o] for o in others if o in times}
        print(table([row]), flush=True)


def solved(
    shape: tuple[int, int, int], heads: int, threads: int, backend: str
) -> tuple[dict[str, float], list[float]]:
    """A solve and its backward pass after a warm-up: what they took, and the gradients."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    energy = 0.4 * BiSoftmaxAttention(shape[2], heads=heads, backend=backend) + Quadratic()
    layer, x = DEQ(energy, tolerance=solvers.Tolerance(rtol=1e-3)), torch.randn(shape)
    # A small input: the peak of a process's memory never sinks again.
    layer(x[:1, :64]).square().mean().backward()
    layer.zero_grad()
    before, start = peak(), time.perf_counter()
    loss = layer(x).square().mean()
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    assert layer.last is not None
    row = {"forward s": middle - start, "backward s": end - middle, "seconds": end - start}
    row |= {"MiB": (peak() - before) / 2**20, "evaluations": layer.last.evaluations.max().item()}
    gradients = [p.grad.flatten() for p in layer.parameters() if p.grad is not None]
    return row, torch.cat(gradients).tolist()


def peak() -> int:
    """The peak of the memory of this process, in bytes."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def layer(
    batch: int = 8,
    tokens: int = 1024,
    dim: int = 256,
    heads: int = 4,
    backend: Literal["auto", "blocks", "cpp"] = "auto",
    rounds: int = 3,
    threads: int = 2,
) -> None:
    """Solve and backward pass of a DEQ layer on the CPU, on a backend and on the dense formula.

    Each round is a process of its own, so that its peak of memory is known.
    """
    results: dict[str, list[Any]] = {backend: [], "reference": []}
    context, size = multiprocessing.get_context("spawn"), (batch, tokens, dim)
    for _ in range(rounds):
        for name, each in results.items():
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                each.append(pool.submit(solved, size, heads, threads, name).result())
    rows: list[dict[str, Any]] = []
    for name, each in results.items():
        medians = {key: statistics.median(row[key] for row, _ in each) for key in each[0][0]}
        rows.append({"backend": name} | medians)
    first, second = rows
    # A small layer's memory lies within what the warm-up took.
    shares = {key: first[key] / (second[key] or float("nan")) for key in list(first)[1:]}
    rows.append({"backend": f"{backend} / reference"} | shares)
    print(table(rows))
    ours, theirs = (torch.tensor(each[0][1]) for each in results.values())
    print(f"difference of the gradients: {((ours - theirs).norm() / theirs.norm()).item():.1e}")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"peers": peers, "layer": layer})
