"""``implicit-attn info``: what an answer to "it does not work here" begins with."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from implicit_attn import __version__
from implicit_attn.data.files import DATA_VARIABLE, cache_folder
from implicit_attn.kernels import explain
from implicit_attn.optional import DISTRIBUTION, installed_version, requirements
from solvers import native

Rows = Iterator[tuple[str, str]]
# In the folders of data, and how each is known to be there.
DATA_SETS = {
    "mnist": "mnist/*ubyte*",
    "fashion-mnist": "fashion-mnist/*ubyte*",
    "cifar10": "cifar10/cifar*",
    "sudoku": "sudoku/sudoku17.npz",
    "texts": "text/*.txt*",
}
SIZES = ((8, 4, 64, 16), (8, 4, 1024, 64))  # batch, heads, tokens, features of a head


def info(words: Sequence[str]) -> None:
    """Print all sections."""
    if words:
        raise SystemExit(f"info takes no options, got {' '.join(words)!r}")
    for number, section in enumerate((versions, devices, kernels, folders, extras)):
        print("\n" * (number > 0) + section.__name__)
        for name, text in section():
            print(f"  {name:14} {text}")


def versions() -> Rows:
    """This package, Python, and what the package computes with."""
    here = Path(__file__).resolve().parents[1]
    yield DISTRIBUTION, f"{__version__}, in {here}"
    yield "python", f"{platform.python_version()}, {sys.executable}"
    yield "system", f"{platform.platform()}"
    yield "torch", torch.__version__
    for name in ("numpy", "scipy", "safetensors", "torchdeq", "triton"):
        yield name, installed_version(name) or "not installed"


def devices() -> Rows:
    """The processor, its threads, and what else torch computes on."""
    threads = f"{torch.get_num_threads()} threads"
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if variable in os.environ:
            threads += f", {variable}={os.environ[variable]}"
    yield "cpu", f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, {threads}"
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        size = f"{found.total_memory / 2**30:.0f} GiB"
        yield f"cuda:{number}", f"{found.name}, {size}, compute {found.major}.{found.minor}"
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        yield "cuda", "none found" if built else "none: this torch is built without CUDA"
    if torch.backends.mps.is_available():
        yield "mps", "available"


def kernels() -> Rows:
    """Which kernel "auto" takes for two sizes on every device, and why; the native engine."""
    places = ["cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))]
    for place in places:
        for batch, heads, tokens, features in SIZES:
            z = torch.zeros(batch, heads, tokens, features, device=place)
            found, shape = explain(z, 1.0), f"{tokens} tokens x {features}"
            yield place, f"bi-softmax, {shape}: {found.backend} ({found.reason})"
    yield "native engine", native.told()


def folders() -> Rows:
    """The user's data, and the cache of downloads, with the sets that are there."""
    named = os.environ.get(DATA_VARIABLE)
    yield "data", _told(lambda: Path(named)) if named else f"${DATA_VARIABLE} is not set"
    yield "data cache", _told(cache_folder)


def _told(find: Callable[[], Path]) -> str:
    """A folder that may not be entered, or has no home to be in, is told; the other rows go on."""
    try:
        folder = find()
        if not folder.is_dir():
            return f"{folder} (no such folder)"
        sets = [name for name, pattern in DATA_SETS.items() if any(folder.glob(pattern))]
        return f"{folder}: {', '.join(sets) or 'no data set'}"
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        return f"cannot be read: {error}"


def extras() -> Rows:
    """Which optional dependencies are there, by the extra that brings them."""
    known = requirements()
    if not known:
        yield "unknown", f"{DISTRIBUTION} runs from a folder and is not installed"
    for extra, names in sorted(known.items()):
        if extra:
            missing = [name for name in names if installed_version(name) is None]
            yield extra, f"without {', '.join(missing)}" if missing else "installed"
