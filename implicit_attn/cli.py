"""The command ``implicit-attn``: a table of what it can do, one way to read options and to end; ``info``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import itertools
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch

from implicit_attn import __version__
from implicit_attn.data.files import DATA_VARIABLE, cache_folder
from implicit_attn.kernels import explain
from implicit_attn.optional import DISTRIBUTION, installed_version, require, requirements
from implicit_attn.programs import INTERRUPTED, mistakes
from implicit_attn.weights import pretrained_models, weights_path
from solvers import native

PROGRAM, LONGEST = "implicit-attn", 1000  # characters of a message
COMMANDS: dict[str, tuple[str, str]] = {  # where it is in the package, and what it does
    "demo": ("programs.demo:Demo", "one energy for many tasks, Sudoku, an energy of your own; two minutes"),
    "train classify": ("programs.images:Classify", "a classifier of digits or MNIST beside simpler models"),
    "train vit-images": ("programs.images:VitImages", "Hyper-SET or a baseline classifies images"),
    "train masked-images": ("programs.images:MaskedPatches", "fill in hidden patches of images"),
    "train mnist-spins": ("programs.images:MnistSpins", "coupled vector spins read MNIST"),
    "train sudoku": ("programs.boards:Sudoku", "Hyper-SET or a baseline completes Sudoku boards"),
    "train solve-sudoku": ("programs.boards:SolveSudoku", "an update learns to solve Sudoku"),
    "train language-model": ("programs.language_model:Language", "a model of a text's characters"),
    "study convergence": ("programs.study:Convergence", "every solver on a layer, and its eigenvalues"),
    "study extrapolation": ("programs.study:Extrapolation", "other numbers of iterations than in training"),
    "study paths": ("programs.study:Paths", "where a layer ends from other starts"),
    "study geometry": ("programs.study:Geometry", "energies, rank and angle of tokens, by iteration"),
    "study trade-off": ("programs.study:TradeOff", "layers x iterations at constant depth"),
    "study report": ("programs.study:Report", "training, convergence and accuracy on one page"),
    "weights": ("cli:weights", "the trained models that come with the package"),
    "info": ("cli:info", "versions, devices, kernels, folders, for a report of an error"),
}  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    """Run the command ``implicit-attn``.

    Args:
        words: of the command line, without the name of the program; None: those of the process.

    Raises:
        SystemExit: 2 with one line where the words name nothing or a value is wrong; 130 after Ctrl-C.
    """
    given = list(sys.argv[1:] if words is None else words)
    if given in (["--version"], ["-V"]):
        print(f"{PROGRAM} {__version__}")
        return
    name = next((" ".join(given[:k]) for k in (2, 1) if " ".join(given[:k]) in COMMANDS), None)
    options: set[str] = set()
    with one_line(f"{PROGRAM} {name or ''}".strip(), options):
        if name is None:
            group = next((g for g in ("train", "study") if given[:1] == [g]), "")
            asked = given[bool(group) :][:1]
            if asked in (["--help"], ["-h"]):
                print(overview(group))
                return
            known = [k.removeprefix(group).split()[0] for k in COMMANDS if k.startswith(group)]
            listed, got = ", ".join(dict.fromkeys(known)), repr(asked[0]) if asked else "none"
            raise SystemExit(f"{group or 'command'} must be followed by one of {listed}; got {got}")
        module, _, member = COMMANDS[name][0].partition(":")
        kind: Any = getattr(importlib.import_module(f"implicit_attn.{module}"), member)
        words = given[len(name.split()) :]
        if not dataclasses.is_dataclass(kind):  # a function of the words
            if words in (["--help"], ["-h"]):
                print(f"usage: {kind.__doc__}")
            else:
                kind(words)
            return
        options.update(field.name for field in dataclasses.fields(kind))
        with mistakes():
            program: Any = read(kind, words, f"{PROGRAM} {name}")
        program.run()


@contextlib.contextmanager
def one_line(prog: str, options: Collection[str] = ()) -> Iterator[None]:
    """The whole of a program: what ends it ends it in one line, ``PROG: error: ...``, exit code 2.

    ``SystemExit`` with a text (of ``mistakes``), an ``OSError`` (a full disk, no permission) and want of
    memory end so, Ctrl-C with 130. Any other error is a fault of the program and keeps its traceback. A
    message that begins with the name of an argument names the option.
    """
    try:
        yield
        if sys.stdout is not None:  # a process may be started with its output closed
            sys.stdout.flush()
        return
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        message = end.code
    except BrokenPipeError:  # the reader has gone (``| head``): nothing is left to flush into it
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(1) from None
    except OSError as error:
        message = str(error)
    except (MemoryError, RuntimeError) as error:
        # Of PyTorch's CPU allocator the message alone tells.
        lacks = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not lacks and "DefaultCPUAllocator" not in str(error):
            raise
        message = f"out of memory: choose smaller sizes ({str(error)[:200]})"
    line, first = " ".join(message.split()), re.match(r"\w+", message)
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
    if first is not None and first[0] in options:
        line = f"argument --{first[0].replace('_', '-')}: {line}"
    print(f"{prog}: error: {line}", file=sys.stderr)
    raise SystemExit(2)


def overview(group: str = "") -> str:
    """What the command, or one of its groups, can do: a line each."""
    rows = {name: text for name, (_, text) in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, rows))
    usage = f"usage: {PROGRAM} {group or 'COMMAND'} ... [--help]".replace("  ", " ")
    lines = [f"  {name:{width}}  {text}" for name, text in rows.items()]
    return "\n".join([usage, "", *lines, "", "Results go to ./runs; --version tells the version."])


def read(kind: Any, words: Sequence[str], prog: str = PROGRAM) -> Any:
    """An instance of a dataclass, its fields read from the words as options.

    Whole numbers must be at least 1, or at least 0 where 0 is the default; other numbers finite and at
    least 0. What depends on more than one field is checked by the dataclass.

    Raises:
        SystemExit: 0 after ``--help``.
        ValueError: a value is wrong, or an option is unknown; the message names it.
        ImportError: tyro is not installed.
    """
    tyro: Any = require("tyro", extra="training")
    options: Any = {"prog": prog, "config": (tyro.conf.FlagCreatePairsOff,)}
    said = io.StringIO()
    if asks := {"--help", "-h"}.intersection(words):
        kind, words = _explained(kind, [word for word in words if word not in asks]), ["--help"]
    try:
        with contextlib.redirect_stderr(said):
            found = tyro.cli(kind, args=list(words), **options)
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(_in_one_line(said.getvalue())) from None
    for field in dataclasses.fields(kind):
        value, low = getattr(found, field.name), 0 if field.default == 0 else 1
        for each in value if isinstance(value, tuple) else (value,):
            if type(each) is int and each < low:
                raise ValueError(f"{field.name} must be an integer >= {low}, got {each}")
            if isinstance(each, float) and not 0 <= each < math.inf:
                raise ValueError(f"{field.name} must be a finite number >= 0, got {each}")
    return found


def _explained(kind: Any, words: Sequence[str]) -> Any:
    """The same options, whose help shows the defaults that the program chooses with the other words."""
    conf: Any = require("tyro", extra="training").conf
    chosen: dict[str, Any] = {}
    try:
        program: Any = read(kind, words)
    except ValueError:  # a wrong word does not keep the help from being shown
        program = kind()
    if hasattr(program, "defaults"):
        chosen = {"out": program.place, **program.defaults()}
        chosen["iterations"] = chosen.get("random_iterations") or chosen.get("iterations")

    def hint(field: dataclasses.Field[Any]) -> Callable[[str], str]:
        value = chosen.get(field.name) if field.default is None else None
        own = " to ".join(map(str, value)) if isinstance(value, list) else value

        def text(label: str) -> str:
            shown = label if own is None else own
            return "" if shown in ("", "None") else f"(default: {shown})"

        return text

    types = get_type_hints(kind, include_extras=True)
    fields: Any = {
        field.name: Annotated[types[field.name], conf.arg(help_behavior_hint=hint(field))]
        for field in dataclasses.fields(kind)
    }
    body = {"__annotations__": fields, "__doc__": kind.__doc__, "__module__": kind.__module__}
    return dataclasses.dataclass(kw_only=True)(type(kind.__name__, (kind,), body))


def _in_one_line(box: str) -> str:
    """The first block of text in the box that tyro draws around an error, without its title."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│| ") for line in plain.splitlines()[1:]]
    blocks = itertools.groupby(lines, lambda line: any(map(str.isalnum, line)))
    return " ".join(next(block for is_text, block in blocks if is_text))


def weights(words: Sequence[str]) -> None:
    """implicit-attn weights [path NAME]: the trained models of the package, or the file of one."""
    if list(words[:1]) == ["path"] and len(words) == 2:
        with mistakes():
            print(weights_path(words[1]))
        return
    if words:
        raise SystemExit(f"weights takes nothing or: path NAME; got {' '.join(words)!r}")
    for row in pretrained_models().values():
        size = row.path.stat().st_size / 1000
        print(
            f"{row.name}: {row.title}\n"
            f"  data        {row.data}\n"
            f"  result      {row.measured}\n"
            f"  size        {row.parameters:,} parameters, {size:,.0f} kB\n"
            f"  trained by  {row.command}\n"
        )
    print("In Python: implicit_attn.load_pretrained(NAME).")


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
    """implicit-attn info: versions, devices, kernels, folders, for a report of an error."""
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
    places: list[tuple[str, Callable[[], Path]]] = [("data cache", cache_folder)]
    if named:
        places.insert(0, ("data", partial(Path, named)))
    else:
        yield "data", f"${DATA_VARIABLE} is not set"
    for name, find in places:
        try:
            folder = find()
            sets = [key for key, pattern in DATA_SETS.items() if any(folder.glob(pattern))]
            there = (
                f": {', '.join(sets) or 'no data set'}" if folder.is_dir() else " (no such folder)"
            )
            yield name, f"{folder}{there}"
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            yield name, f"cannot be read: {error}"


def extras() -> Rows:
    """Which optional dependencies are there, by the extra that brings them."""
    known = requirements()
    if not known:
        yield "unknown", f"{DISTRIBUTION} runs from a folder and is not installed"
    for extra, names in sorted(known.items()):
        if extra:
            missing = [name for name in names if installed_version(name) is None]
            yield extra, f"without {', '.join(missing)}" if missing else "installed"
