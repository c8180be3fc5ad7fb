"""The shipped models: what they are, what they reach, and how they were trained."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from implicit_attn.checkpoint import read_progress

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Pretrained:
    """A trained model that comes with the package.

    Attributes:
        name: by which :func:`load_pretrained` takes it.
        title: the model in words.
        data: what it was trained on.
        parameters: their number.
        measured: what it reaches, as ``docs/results.md`` reports it.
        share: the same as a number, a share of right answers; of the language model the loss in nats
            a character.
        command: what trained it.
    """

    name: str
    title: str
    data: str
    parameters: int
    measured: str
    share: float
    command: str

    @property
    def path(self) -> Path:
        """The file of the weights."""
        return FOLDER / f"{self.name}.safetensors"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the training, as the file holds them; of a language model its alphabet."""
        return read_progress(self.path)["settings"]


_ROWS = (
    Pretrained(
        "austen-equilibrium",
        "language model of characters, one block at its fixed point",
        "six novels by Jane Austen (text/austen)",
        64_320,
        "1.5769 nats a character of the held-out text",
        1.5769,
        "implicit-attn train language-model --text austen --model equilibrium",
    ),
    Pretrained(
        "austen-language",
        "language model of characters, 6 layers with momentum",
        "six novels by Jane Austen (text/austen)",
        696_792,
        "1.4403 nats a character of the held-out text",
        1.4403,
        "implicit-attn train language-model --text austen --descent momentum",
    ),
    Pretrained(
        "digits-hyperset",
        "Hyper-SET, 12 iterations",
        "digits (8x8 pixels, scikit-learn)",
        65_098,
        "99.72 % of 359 test images",
        0.9972,
        "implicit-attn train vit-images",
    ),
    Pretrained(
        "digits-hyperset-equilibrium",
        "Hyper-SET solved for its equilibrium",
        "digits (8x8 pixels, scikit-learn)",
        29_324,
        "99.44 % of 359 test images",
        0.9944,
        "implicit-attn train vit-images --model hyperset-equilibrium",
    ),
    Pretrained(
        "mnist-hyperset",
        "Hyper-SET, 12 iterations",
        "MNIST",
        180_298,
        "98.86 % of 10,000 test images",
        0.9886,
        "implicit-attn train vit-images --data mnist",
    ),
    Pretrained(
        "mnist-spins",
        "mean-field attention of 17 coupled vector spins",
        "MNIST",
        25_832,
        "99.46 % of 10,000 test images",
        0.9946,
        "implicit-attn train mnist-spins",
    ),
    Pretrained(
        "sudoku-solver",
        "board solver, up to 32 iterations in training",
        "Sudoku with 17 to 34 givens",
        10_729,
        "96.2 % of 1,000 held-out boards (17 to 34 givens) after 32 iterations, 98.3 % where each stops "
        "when it agrees",
        0.962,
        "implicit-attn train solve-sudoku --compile --devices 2 --rate 2e-3 --epochs 30, "
        "then carried states",
    ),
    Pretrained(
        "sudoku-solver-easy",
        "board solver, up to 16 iterations in training",
        "Sudoku with 26 to 34 givens",
        10_729,
        "61.4 % of 1,000 held-out boards (17 to 34 givens) after 16 iterations, 95.3 % after 64",
        0.614,
        "implicit-attn train solve-sudoku --compile --devices 2 --rate 3e-3 --givens 26 34 "
        "--iterations 16 --window 5 --epochs 4",
    ),
)
_BY_NAME = {row.name: row for row in _ROWS}


def pretrained_models() -> Mapping[str, Pretrained]:
    """The shipped models by name, read-only: :class:`Pretrained` with title, data, measures, command."""
    return MappingProxyType(_BY_NAME)


def find_pretrained(name: str) -> Pretrained:
    """The shipped model ``name``.

    Raises:
        TypeError: ``name`` is no text.
        ValueError: there is none of that name; the message has the nearest ones.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if name not in _BY_NAME:
        plain = name.lower().replace("_", "-").removesuffix(".safetensors")
        near = difflib.get_close_matches(plain, _BY_NAME, cutoff=0.5) or list(_BY_NAME)
        raise ValueError(
            f"name must be that of a shipped model, got {name!r}; nearest: {', '.join(near)}"
        )
    return _BY_NAME[name]


def weights_path(name: str) -> Path:
    """The file of the shipped weights ``name``, ``"mnist-hyperset"`` for example.

    Raises:
        ValueError: there are none of that name; the message has the nearest ones.
    """
    return find_pretrained(name).path


def weights_file(text: str) -> Path:
    """A file, or the name of shipped weights where no such file is."""
    path = Path(text)
    return weights_path(text) if text in _BY_NAME and not path.is_file() else path
