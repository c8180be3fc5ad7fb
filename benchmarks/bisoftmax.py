"""Bi-softmax gradient and Hessian-vector product against dense formulas, autograd and attention.

    python benchmarks/bisoftmax.py peers                    # CPU or GPU, the shapes of the table below
    python benchmarks/bisoftmax.py peers --shapes 1 8 1024 64 4 8 197 64 --rounds 9
    python benchmarks/bisoftmax.py variants --sweep         # of the Triton kernels, on a CUDA device
    python benchmarks/bisoftmax.py layer --backend cpp      # a DEQ layer against backend="reference"

``peers`` prints medians of interleaved runs as ratios, the achieved TFLOP/s (counting 6 N^2 p flops for
a gradient and 14 N^2 p for a product, as if every tile were computed once, whatever a backend saves) and
the share of the roofline (the time of just those flops and N^2 exponentials at the measured rates of a
large product and of exponentials; a share may exceed 1 where symmetry saves work). On a GPU times are
the device's own, by events around calls that are all enqueued before the first one runs, and
exponentials are timed in registers; up to 257 tokens the host's times, launches included, are printed
beside them, and at the end what was aimed at. A peer that cannot take a shape is reported. Writes
``bisoftmax.csv``, after every shape, to ``--output``.
"""

from __future__ import annotations

import concurrent.futures
import csv
import json
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
from benchmarks.device_time import interleaved_on_device
from benchmarks.measure import interleaved, peak_bytes, table
from implicit_attn import DEQ
from implicit_attn.energies import BiSoftmaxAttention, Quadratic, ReLUFeedForward
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp, explain
from implicit_attn.optional import require

Runs = dict[str, Callable[[], object]]
Shape = tuple[int, int, int, int]  # batch, heads, tokens, features of a head
DType = Literal["float32", "bfloat16", "float16", "float64"]
ON_GPU = torch.cuda.is_available()
CPU_SHAPES: tuple[Shape, ...] = (
    (8, 4, 65, 64), (4, 8, 197, 64), (1, 8, 512, 64), (1, 8, 1024, 32), (1, 8, 1024, 64),
    (1, 4, 4096, 64),
)  # fmt: skip
GPU_SHAPES: tuple[Shape, ...] = (
    (64, 8, 65, 64), (64, 8, 197, 64), (4, 16, 1024, 64), (2, 16, 4096, 64), (2, 16, 4096, 128),
)  # fmt: skip
# Bytes that a dense peer needs for an element of its N x N matrices: a dozen of them in float32.
DENSE_BYTES = 48
NOT_SUPPORTED = "not supported"
PEERS = {
    "gradient": ("dense", "compiled", "autograd", "flash forward", "cudnn forward"),
    "hvp": ("double backward", "flash forward+backward", "cudnn forward+backward"),
}
FEW_TOKENS = 257  # up to so many, launches are a good part of the time on a GPU
# Ours, the peer, the largest ratio aimed at, fewest and most tokens: in bfloat16, of device times.
TARGETS = (
    ("gradient", "flash forward", 1.25, 4096, None),
    ("hvp", "flash forward+backward", 0.9, 4096, None),
    ("gradient", "dense", 0.2, 4096, None),
    ("gradient", "compiled", 0.5, 65, 257),
)
SWEPT = {
    "gradient": (
        (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 4),
    ),
    "curvature": ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2), (64, 64, 8, 3)),
    "triangle": ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 3), (32, 32, 4, 3)),
    "tangents": ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 4, 3)),
}  # fmt: skip

# --- what is timed -------------------------------------------------------------------------------


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


def largest_dense(device: torch.device) -> int:
    """Elements of all the N x N matrices of one kind that a dense formula may have."""
    if device.type != "cuda":
        return 2**28
    return min(2**31, torch.cuda.mem_get_info(device)[0] // DENSE_BYTES)


def contestants(z: Tensor, v: Tensor, beta: float, limit: float, compiled: bool) -> Runs:
    """What runs on these tensors, by name; ``limit`` bounds the scores."""
    _, lse = bisoftmax(z, beta, limit=limit)
    runs: Runs = {
        "gradient": lambda: bisoftmax(z, beta, limit=limit),
        "hvp": lambda: bisoftmax_hvp(z, v, beta, limit=limit, lse=lse),
    }
    if z.shape[0] * z.shape[1] * z.shape[2] ** 2 <= largest_dense(z.device):
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
    return runs


def able(runs: Runs) -> tuple[Runs, list[str]]:
    """The runs that work here, tried once, and the names of the peers that do not.

    An error of ours is raised: it is no peer's missing shape.
    """
    working, refused = {}, []
    for name, run in runs.items():
        try:
            run()
            if ON_GPU:
                torch.cuda.synchronize()
        except RuntimeError as error:
            if name in PEERS:
                raise
            refused.append(name)
            print(f"{name}: {NOT_SUPPORTED} ({str(error).strip().splitlines()[0][:120]})")
        else:
            working[name] = run
    return working, refused


# --- against peers -------------------------------------------------------------------------------


def rates(
    device: torch.device, dtype: torch.dtype, clock: Callable[[], float]
) -> tuple[float, float]:
    """Flops and exponentials a second of this machine."""
    side = 8192 if device.type == "cuda" else 1024
    a = torch.randn(side, side, device=device, dtype=dtype)
    if device.type == "cuda":
        seconds = interleaved_on_device({"product": lambda: a @ a}, 9)["product"][1]
        # A long exp over a tensor would measure the memory.
        exp_rate = require("benchmarks.exp_rate", extra="gpu").exp_rate
        return 2.0 * side**3 / seconds, exp_rate(device)
    work = torch.zeros(2**18)
    runs: Runs = {"product": lambda: a @ a, "exp": lambda: torch.exp(work, out=work).zero_()}
    times = interleaved(runs, 9, clock)
    return 2.0 * side**3 / times["product"], work.numel() / times["exp"]


def milliseconds(
    runs: Runs, device: torch.device, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """By name: of the device, and with " host" of the host; one clock on a CPU."""
    if device.type != "cuda":
        times = interleaved(runs, rounds, clock)
        return {f"{name} ms": 1e3 * seconds for name, seconds in times.items()}
    both = interleaved_on_device(runs, rounds)
    row = {f"{name} ms": 1e3 * device_time for name, (_, device_time) in both.items()}
    return row | {f"{name} host ms": 1e3 * host for name, (host, _) in both.items()}


def peak_mebibytes(run: Callable[[], object], device: torch.device) -> float:
    """Beyond what is held already."""
    if device.type != "cuda":
        return peak_bytes(run) / 2**20
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def quotient(row: dict[str, Any], ours: str, peer: str, unit: str = "ms") -> Any:
    """The ratio, ``NOT_SUPPORTED``, or "not run"."""
    above, below = row.get(f"{ours} {unit}"), row.get(f"{peer} {unit}", row.get(f"{peer} ms"))
    if isinstance(above, float) and isinstance(below, float):
        return above / below
    return NOT_SUPPORTED if NOT_SUPPORTED in (above, below) else "not run"


def ratios(row: dict[str, Any]) -> dict[str, Any]:
    """Gradients by what computes a gradient or attends once, products by what differentiates it."""
    short = {"shape": row["shape"], "backend": row["backend"]}
    for ours, others in PEERS.items():
        short[f"{ours} ms"] = row[f"{ours} ms"]
        for name in others:
            if f"{name} ms" in row:
                short[f"{ours} / {name}"] = quotient(row, ours, name)
        short[f"{ours} TFLOP/s"] = row[f"{ours} TFLOP/s"]
        short[f"{ours} roofline"] = row[f"{ours} roofline"]
    return short


def launches(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Device and host milliseconds of each contestant; none where only one clock was read."""
    names = [name.removesuffix(" host ms") for name in row if name.endswith(" host ms")]
    return [
        {"shape": row["shape"], "contestant": name, "device ms": row[f"{name} ms"]}
        | {"host ms": row[f"{name} host ms"]}
        for name in names
    ]


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was aimed at beside what was measured, for the shapes that an aim is for."""
    found = []
    for row in rows:
        for ours, peer, most, first, last in TARGETS:
            if row["tokens"] < first or (last is not None and row["tokens"] > last):
                continue
            measured = quotient(row, ours, peer)
            by_host = quotient(row, ours, peer, "host ms")
            met = "-" if not isinstance(measured, float) else "yes" if measured <= most else "NO"
            found.append(
                {"shape": row["shape"], "ratio": f"{ours} / {peer}", "must be at most": most}
                | {"measured": measured, "by the host's clock": by_host, "met": met}
            )
    return found


def peers(
    device: str = "cuda" if ON_GPU else "cpu",
    dtype: DType = "bfloat16" if ON_GPU else "float32",
    shapes: tuple[Shape, ...] = GPU_SHAPES if ON_GPU else CPU_SHAPES,
    rounds: int = 9,
    threads: int = 2,
    cpu_time: bool = False,
    output: Path = Path("runs/bisoftmax"),
    compiled: bool = ON_GPU or shutil.which("g++") is not None,
) -> None:
    """Times the bi-softmax against its peers.

    Args:
        shapes: batch, heads, tokens and features of a head; four numbers each.
        threads: on the CPU.
        cpu_time: processor time, for a busy machine and one thread.
        compiled: the dense formula under torch.compile, too.
    """
    clock = time.process_time if cpu_time else time.perf_counter
    torch.set_num_threads(threads)
    output.mkdir(parents=True, exist_ok=True)
    where, kind = torch.device(device), getattr(torch, dtype)
    peak = rates(where, kind, clock)
    print(f"{device} {dtype}: {peak[0] / 1e12:.3g} TFLOP/s, {peak[1]:.3g} exp/s")
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        z, v, beta, limit = inputs(shape)
        z, v = z.to(where, kind), v.to(where, kind)
        runs, refused = able(contestants(z, v, beta, limit, compiled))
        row: dict[str, Any] = {"shape": "x".join(map(str, shape)), "tokens": shape[2]}
        row["backend"] = explain(z, beta, limit=limit).backend
        times = milliseconds(runs, where, rounds, clock)
        pairs = shape[0] * shape[1] * shape[2] ** 2
        for name, units in (("gradient", 3), ("hvp", 7)):
            flops, seconds = 2.0 * units * pairs * shape[3], times[f"{name} ms"] / 1e3
            parts = flops / peak[0], pairs / peak[1]
            # A GPU has other units for exp than for products; a CPU core does both by turns.
            bound = max(parts) if where.type == "cuda" else sum(parts)
            row |= {f"{name} TFLOP/s": flops / seconds / 1e12, f"{name} roofline": bound / seconds}
            row[f"{name} MiB"] = peak_mebibytes(runs[name], where)
        rows.append(row | times | {f"{name} ms": NOT_SUPPORTED for name in refused})
        with (output / "bisoftmax.csv").open("w", newline="") as file:
            writer = csv.DictWriter(
                file, list(dict.fromkeys(name for each in rows for name in each))
            )
            writer.writeheader()
            writer.writerows(rows)
        print(table([ratios(rows[-1])]), flush=True)
        if shape[2] <= FEW_TOKENS and launches(rows[-1]):
            print(table(launches(rows[-1])), flush=True)
    if where.type == "cuda" and targets(rows):
        print(table(targets(rows)), flush=True)


# --- variants of the Triton kernels --------------------------------------------------------------


def of_kernels(
    name: str, shape: Shape, dtype: torch.dtype, rounds: int, **options: Any
) -> dict[str, Any]:
    """Milliseconds of gradient and product, on the device's clock, of rows of norm ``p^(1/2)``."""
    z, v, beta, _ = inputs(shape)
    z, v = z.to("cuda", dtype), v.to("cuda", dtype)
    _, lse = bisoftmax(z, beta, backend="triton", **options)
    runs: Runs = {
        "gradient": lambda: bisoftmax(z, beta, backend="triton", **options),
        "hvp": lambda: bisoftmax_hvp(z, v, beta, lse=lse, backend="triton", **options),
    }
    times = interleaved_on_device(runs, rounds)
    return {"variant": name} | {f"{each} ms": 1e3 * device for each, (_, device) in times.items()}


def variants(
    shape: Shape = (2, 16, 4096, 64),
    dtype: DType = "bfloat16",
    rounds: int = 7,
    sweep: bool = False,
) -> None:
    """The Triton kernels in their variants on a CUDA device: limits, masks, widths, tiles.

    Prints medians of interleaved runs on the device's clock, the work before a launch not among them.
    What does not fit the card is said.

    Args:
        shape: batch, heads, tokens and features of a head.
        sweep: other tiles than the tables', too, of one bounded kernel at a time.
    """
    if not ON_GPU:
        raise SystemExit("error: no CUDA device")
    kind, limit = getattr(torch, dtype), 1.01 * shape[3] ** 0.5
    mask = torch.rand(shape[0], shape[2], device="cuda") < 0.8
    given: dict[str, tuple[Shape, dict[str, Any]]] = {
        "limit": (shape, {"limit": limit}),
        "no limit": (shape, {}),
        "causal": (shape, {"causal": True}),
        "masked": (shape, {"limit": limit, "mask": mask}),
    }
    for width in (72, 96):
        given[f"width {width}"] = (*shape[:3], width), {"limit": 1.01 * width**0.5}
    rows = [of_kernels(name, to, kind, rounds, **how) for name, (to, how) in given.items()]
    print(table(rows), flush=True)
    if not sweep:
        return
    arguments: Any = require("implicit_attn.kernels.bi_softmax.triton.arguments", extra="gpu")
    tabulated, rows = arguments.tiles, []
    for kernel, candidate in ((name, each) for name, some in SWEPT.items() for each in some):
        chosen = arguments.Tiles(*candidate)

        def instead(name: str, *rest: int, kernel: str = kernel, chosen: Any = chosen) -> Any:
            return chosen if name == kernel else tabulated(name, *rest)

        arguments.tiles = instead
        name = f"{kernel} {candidate}"
        try:
            rows.append(of_kernels(name, shape, kind, rounds, limit=limit))
        except Exception as error:  # Triton's own kinds of errors: too much for the chip
            rows.append({"variant": name, "gradient ms": type(error).__name__, "hvp ms": "-"})
        finally:
            arguments.tiles = tabulated
    print(table(rows), flush=True)


# --- a layer -------------------------------------------------------------------------------------


def solves(options: dict[str, Any], backend: str, rounds: int) -> list[dict[str, Any]]:
    """So many solves with their backward passes, after a warm-up."""
    torch.set_num_threads(options["threads"])
    device, dim = torch.device(options["device"]), options["dim"]
    torch.manual_seed(0)
    energy = 0.4 * BiSoftmaxAttention(dim, heads=options["heads"], backend=backend) + Quadratic()
    if options["feedforward"]:
        energy = energy + 0.2 * ReLUFeedForward(dim, 2 * dim)
    layer = DEQ(energy, tolerance=solvers.Tolerance(rtol=1e-3)).to(device)
    x = torch.randn(options["batch"], options["tokens"], dim, device=device)
    # A GPU compiles kernels for the size of the input; on a CPU the peak of memory never sinks again.
    for _ in range(2 if device.type == "cuda" else 1):
        layer(x if device.type == "cuda" else x[:1, :64]).square().mean().backward()
    clock = time.process_time if options["cpu_time"] else time.perf_counter
    return [solve_once(layer, x, clock) for _ in range(rounds)]


def solve_once(layer: DEQ, x: Tensor, clock: Callable[[], float]) -> dict[str, Any]:
    on_gpu = x.is_cuda
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    layer.zero_grad()
    wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else resident()
    start = clock()
    loss = layer(x).square().mean()
    wait()
    middle = clock()
    loss.backward()
    wait()
    end = clock()
    after = torch.cuda.max_memory_allocated() if on_gpu else resident()
    assert layer.last is not None
    return {
        "forward s": middle - start,
        "backward s": end - middle,
        "seconds": end - start,
        "MiB": (after - before) / 2**20,
        "evaluations": layer.last.evaluations.max().item(),
        "gradients": [
            p.grad.cpu().double().flatten().tolist()
            for p in layer.parameters()
            if p.grad is not None
        ],
    }


def resident() -> int:
    """The peak of this process's memory, in bytes."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def layer(
    batch: int = 8,
    tokens: int = 1024,
    dim: int = 256,
    heads: int = 4,
    backend: Literal["auto", "blocks", "cpp", "triton"] = "auto",
    rounds: int = 3,
    threads: int = 2,
    device: str = "cuda" if ON_GPU else "cpu",
    cpu_time: bool = False,
    feedforward: bool = False,
    output: Path | None = None,
) -> None:
    """A DEQ layer on a backend against the same layer on the dense formula.

    Forward solve and implicit backward pass; prints seconds, their ratio, the largest difference of the
    gradients, and the peak memory, each backend in processes of its own: on a CPU one a round, on a GPU
    one for all rounds, after solves of the full size.

    Args:
        heads: a divisor of ``dim``.
        cpu_time: processor time, for a busy machine and one thread.
        feedforward: with a ReLU feed-forward term.
        output: JSON file for the figures.
    """
    options = {name: value for name, value in locals().items() if name not in ("backend", "rounds")}
    runs: dict[str, list[dict[str, Any]]] = {backend: [], "reference": []}
    # On a GPU starting and warming up takes longer than the rounds: one process a backend.
    inside = rounds if torch.device(device).type == "cuda" else 1
    context = multiprocessing.get_context("spawn")
    for _ in range(rounds // inside):
        for name, results in runs.items():
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                results += pool.submit(solves, options, name, inside).result()
    rows: list[dict[str, Any]] = []
    for name, results in runs.items():
        measured = [key for key in results[0] if key != "gradients"]
        medians = {key: statistics.median(each[key] for each in results) for key in measured}
        rows.append({"backend": name} | medians)
    ours, dense_ = rows
    # A small layer's memory lies within what the warm-up took.
    shares = {key: ours[key] / (dense_[key] or float("nan")) for key in list(ours)[1:]}
    rows.append({"backend": f"{backend} / reference"} | shares)
    print(table(rows))
    pairs = zip(runs[backend][0]["gradients"], runs["reference"][0]["gradients"], strict=True)
    errors = [(torch.tensor(a) - torch.tensor(b)).norm() / torch.tensor(b).norm() for a, b in pairs]
    print(f"largest relative difference of a parameter's gradient: {max(errors).item():.1e}")
    if output is not None:
        output.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"peers": peers, "variants": variants, "layer": layer})
