"""Random command lines: each starts its work, or ends with exit code 2 and one line that says why.

The work itself (training, studies) is replaced; what comes before it, the model included, is real.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import implicit_attn.studies.command as studies
from fuzz.cases import Draw
from implicit_attn.data import ImageData
from implicit_attn.data.images import from_pixels

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("classify", "vit_images", "sudoku", "mnist_spins", "tap_vs_exact")
STUDIES = ("convergence", "extrapolation", "paths", "geometry", "trade-off")
JUNK = (
    "", "x", "-1", "0", "nan", "inf", "-inf", "1e400", "2.5", "-0", "1" + 30 * "0", "1e300", "1_0",
    "½", "0x10", "\n", " ", "--", "3", "7", "None", "true", str(2**63), str(2**70),
)  # fmt: skip
PLAIN = ("1", "2", "4", "8", "0.1", "0.5", "1e-3")
# What starts processes, compiles, or works for long; and what takes a folder, which is given apart.
LEFT_OUT = {"--help", "--devices", "--compile", "--tensorboard", "--shipped", "--out", "--weights"}
# Sizes that a machine may have memory for, but not the time of a test.
NUMBERS_OF_PUZZLES = ("--train", "--test")


SECONDS = 20  # until a command line is judged to hang


class Started(BaseException):
    """Raised where the work would begin."""


class Hangs(BaseException):
    """Neither work nor an error for so many seconds."""


def path_of(name: str) -> Path:
    folders = ("implicit_attn/programs", "implicit_attn/programs/systems")
    return next(
        path for path in (ROOT / folder / f"{name}.py" for folder in folders) if path.exists()
    )


def _hangs(*_: Any) -> None:
    raise Hangs


def _begin(*_: Any, **__: Any) -> Any:
    raise Started


_KNOWN: dict[str, Any] = {}


def _load(name: str, **_: Any) -> ImageData:
    """Small images of the shapes of the data sets."""
    if name not in _KNOWN:
        shape = {"digits": (1, 8, 8), "cifar10": (3, 32, 32)}.get(name, (1, 28, 28))
        pixels = torch.zeros(100, *shape, dtype=torch.uint8)
        pixels[::2] = 255
        split = (pixels, torch.arange(100, dtype=torch.uint8) % 10)
        _KNOWN[name] = from_pixels(name, split, split)
    return _KNOWN[name]


@contextlib.contextmanager
def _replaced(words: list[str], said: io.StringIO) -> Iterator[None]:
    """Standard streams, ``sys.argv``, data and work replaced; restored are signals and variables."""
    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    handlers = {number: signal.getsignal(number) for number in ours}
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(contextlib.redirect_stderr(said))
        enter(contextlib.redirect_stdout(io.StringIO()))
        enter(mock.patch.object(sys, "argv", words))
        enter(mock.patch.dict(os.environ))
        enter(mock.patch("implicit_attn.data.load", _load))
        enter(mock.patch("implicit_attn.training.run_script", _begin))
        enter(mock.patch("implicit_attn.studies.error_against_coupling", _begin))
        for name in ("open_subject", "train_trade_off", "load"):
            enter(mock.patch.object(studies, name, _begin))
        signal.signal(signal.SIGALRM, _hangs)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            torch.set_num_threads(threads)
            torch.set_rng_state(random_state)


def _start(name: str, words: list[str]) -> tuple[Any, str]:
    """How a program ends: Started, an exit code or an exception; and what it said."""
    said = io.StringIO()
    with _replaced([f"{name}.py", *words], said):
        try:
            if name in STUDIES:
                studies.main([name, *words])
            else:
                runpy.run_path(str(path_of(name)), run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):  # Python prints it, and the exit code is 1
                said.write(end.code)
            return end.code, said.getvalue()
        except (Exception, Started, Hangs) as error:
            return error, said.getvalue()
    return 0, said.getvalue()


def _options(name: str) -> list[str]:
    """The options that the program's help names."""
    if name not in _KNOWN:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), _replaced([f"{name}.py", "--help"], io.StringIO()):
            sys.stdout = text
            with contextlib.suppress(SystemExit):
                if name in STUDIES:
                    studies.main([name, "--help"])
                else:
                    runpy.run_path(str(path_of(name)), run_name="__main__")
        flags = set(re.findall(r"(?<![\w-])--[a-z-]+", text.getvalue()))
        assert len(flags) > 5, f"no options in the help of {name}"
        _KNOWN[name] = sorted(flags - LEFT_OUT)
    return _KNOWN[name]


def check(draw: Draw) -> None:
    """One command line."""
    random = draw.random
    name = draw.note("program", random.choice((*SCRIPTS, *SCRIPTS, *STUDIES)))
    words: list[str] = []
    if name == "sudoku":
        words += ["--source", "generated", "--train", "4", "--test", "2"]
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        flag = random.choice(_options(name))
        values = JUNK if random.random() < 0.7 else PLAIN
        words += [flag, random.choice(values)] if draw.chance(0.95) else [flag]
    with tempfile.TemporaryDirectory() as folder:
        out = random.choices(("out", "file", "file/below", "\0"), (8, 1, 1, 1))[0]
        (Path(folder) / "file").write_text("a file")
        words += ["--out", f"{folder}/{out}"]
        draw.note("words", " ".join(words).replace(folder, "DIR"))
        end, said = _start(name, words)
        _judge(draw, end, said)


def _judge(draw: Draw, end: Any, said: str) -> None:
    if isinstance(end, Started) or end == 0:
        return
    if isinstance(end, (Exception, Hangs)):
        where = traceback.extract_tb(end.__traceback__)[-1]
        place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
        told = f"{type(end).__name__} at {place}: {end}"[:200]
        draw.expect(False, "traceback", told)
        return
    draw.expect(end == 2, "exit code", f"{end!r}"[:200])
    lines = said.splitlines()
    draw.expect(
        len(lines) == 1 and len(said) < 1200, "one line", f"{len(lines)} lines: {said!r}"[:300]
    )
