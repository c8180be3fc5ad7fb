"""The command ``implicit-attn``: the demo, the shipped weights, and what a report of an error needs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.utils import collect_env

from implicit_attn import __version__
from implicit_attn.data.files import DATA_VARIABLE, cache_folder
from implicit_attn.kernels import explain
from implicit_attn.optional import DISTRIBUTION
from implicit_attn.weights import pretrained_models, weights_path
from solvers import native

Rows = Iterator[tuple[str, str]]
SIZES = ((8, 4, 64, 16), (8, 4, 1024, 64))  # batch, heads, tokens, features of a head


def main(words: Sequence[str] | None = None) -> None:
    """Run the command ``implicit-attn``.

    Args:
        words: of the command line, without the name of the program; None: those of the process.

    Raises:
        SystemExit: 2 with one line where a word, a file or a package is wrong; 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser("implicit-attn")
    parser.add_argument("-V", "--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser(
        "demo", help="one energy for many tasks, Sudoku, an energy of your own; two minutes",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    shown.add_argument("--epochs", type=int, default=15, help="training passes of the first part")
    shown.add_argument("--steps", type=int, default=400, help="training steps of the third part")
    shown.add_argument("--boards", type=int, default=100, help="Sudoku boards to solve")
    shown.add_argument("--seed", type=int, default=0, help="of the weights and the noise")
    shown.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the results")
    listed = commands.add_parser("weights", help="the trained models that come with the package")
    listed.add_argument("path", nargs="?", choices=["path"], help="print the file of NAME")
    listed.add_argument("name", nargs="?", metavar="NAME")
    commands.add_parser("info", help="versions, devices, kernels and folders, for a bug report")
    options = vars(parser.parse_args(words))
    command = options.pop("command")
    try:
        if command == "demo":
            from implicit_attn.demo.parts import demo  # the others start without it

            demo(**options)
        elif command == "weights":
            weights(**options)
        else:
            info()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader has gone ("| head"): nothing is left to flush into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(1) from None
    except (ValueError, ImportError, OSError) as error:
        print(f"implicit-attn {command}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def weights(path: str | None, name: str | None) -> None:
    """Print the shipped models, or the file of one."""
    if path and name is None:
        raise ValueError("weights path must be followed by the NAME of a model")
    if name is not None:
        print(weights_path(name))
        return
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


def info() -> None:
    """Print what torch's own report contains, and the kernels and folders of this package."""
    print(collect_env.get_pretty_env_info())
    print(f"\n{DISTRIBUTION} {__version__}, in {Path(__file__).resolve().parents[1]}")
    for section in (kernels, folders):
        print(f"\n{section.__name__}")
        for name, text in section():
            print(f"  {name:14} {text}")


def kernels() -> Rows:
    """Which kernel "auto" takes for two sizes on every device, and why; the native engine."""
    for place in ("cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))):
        for *sizes, tokens, features in SIZES:
            found = explain(torch.zeros(*sizes, tokens, features, device=place), 1.0)
            shape = f"{tokens} tokens x {features}"
            yield place, f"bi-softmax, {shape}: {found.backend} ({found.reason})"
    yield "native engine", native.told()


def folders() -> Rows:
    """The user's data, and the cache of downloads, with the folders in them."""
    named = os.environ.get(DATA_VARIABLE)
    if not named:
        yield "data", f"${DATA_VARIABLE} is not set"
    places = [("data", Path(named))] if named else []
    for name, folder in (*places, ("data cache", cache_folder())):
        if folder.is_dir():
            sets = sorted(each.name for each in folder.iterdir() if each.is_dir())
            yield name, f"{folder}: {', '.join(sets) or 'empty'}"
        else:
            yield name, f"{folder} (no such folder)"
