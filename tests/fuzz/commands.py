"""Random command lines: each starts its work, or ends with exit code 2 and one line that says why.

The work itself (training, studies) is replaced; what comes before it, the model included, is real.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import tempfile
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fuzz.cases import Draw
from implicit_attn.cli import COMMANDS, main
from implicit_attn.data import ImageData

JUNK = (
    "", "x", "-1", "0", "nan", "inf", "-inf", "1e400", "2.5", "-0", "1" + 30 * "0", "1e300", "1_0",
    "½", "0x10", "\n", " ", "--", "3", "7", "None", "true", str(2**63), str(2**70), "dim=0", "=", "a=b",
)  # fmt: skip
PLAIN = ("1", "2", "4", "8", "0.1", "0.5", "1e-3", "dim=8", "rate=0.1")
FLAGS = {
    "train vit-images": "data model preset iterations layers epochs batch rate seed options limit",
    "train sudoku": "model preset iterations epochs rate seed options test source",
    "train classify": "data model readout patch baselines epochs batch rate seed options limit",
    "train mnist-spins": "data epochs batch rate seed options limit",
    "study convergence": "rtol max-steps spectra samples data weights",
    "study paths": "starts samples data weights",
    "study trade-off": "depth layers epochs rate seeds data",
}


class Started(BaseException):
    """Raised where the work would begin."""


def _begin(*_: Any, **__: Any) -> Any:
    raise Started


def _load(name: str) -> ImageData:
    """Few images of the right size."""
    shape = {"digits": (1, 8, 8), "cifar10": (3, 32, 32)}.get(name, (1, 28, 28))
    images, labels = torch.zeros(40, *shape), torch.arange(40) % 10
    return ImageData(name, 10, images, labels, images, labels)


def _start(words: list[str]) -> tuple[Any, str]:
    """How a command line ends: Started, an exit code or an exception; and what it said."""
    said, threads = io.StringIO(), torch.get_num_threads()
    places = ("images", "classify", "mnist_spins")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(said))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.callback(torch.set_num_threads, threads)
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        for place in places:
            stack.enter_context(mock.patch(f"implicit_attn.programs.{place}.load", _load))
        stack.enter_context(mock.patch("implicit_attn.training.Training.run", _begin))
        stack.enter_context(mock.patch("implicit_attn.studies.command.open_subject", _begin))
        stack.enter_context(mock.patch("implicit_attn.studies.train_trade_off", _begin))
        try:
            main(words)
        except SystemExit as end:
            return end.code, said.getvalue()
        except (Exception, Started) as error:
            return error, said.getvalue()
    return 0, said.getvalue()


def check(draw: Draw) -> None:
    """One command line."""
    random = draw.random
    name = draw.note("program", random.choice(tuple(FLAGS)))
    assert name in COMMANDS
    words = name.split()
    if name == "train sudoku":
        words += ["--source", "generated", "--train", "4", "--test", "2"]
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        flag = f"--{random.choice(FLAGS[name].split())}"
        values = JUNK if random.random() < 0.7 else PLAIN
        words += [flag, random.choice(values)] if draw.chance(0.95) else [flag]
    with tempfile.TemporaryDirectory() as folder:
        out = random.choices(("out", "file", "file/below", "\0"), (8, 1, 1, 1))[0]
        (Path(folder) / "file").write_text("a file")
        words += ["--out", f"{folder}/{out}"]
        draw.note("words", shlex.join(words).replace(folder, "DIR"))
        end, said = _start(words)
        _judge(draw, end, said)


def _judge(draw: Draw, end: Any, said: str) -> None:
    if isinstance(end, Started) or end == 0:
        return
    if isinstance(end, Exception):
        where = traceback.extract_tb(end.__traceback__)[-1]
        place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
        draw.expect(False, "traceback", f"{type(end).__name__} at {place}: {end}"[:200])
        return
    draw.expect(end == 2, "exit code", f"{end!r}"[:200])
    lines = said.splitlines()
    told = f"{len(lines)} lines: {said!r}"[:300]
    draw.expect(len(lines) == 1 and len(said) < 1200, "one line", told)
