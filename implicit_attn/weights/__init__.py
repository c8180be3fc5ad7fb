"""Trained models that come with the package, with their measured results and training commands."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from implicit_attn.checkpoint import read_progress
from solvers import Tolerance

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Pretrained:
    """A trained model that comes with the package.

    Attributes:
        name: argument of :func:`load_pretrained`.
        title: description of the model.
        data: training data.
        parameters: number of parameters.
        measured: measured result, as in ``docs/models.md``.
        command: training command.
    """

    name: str
    title: str
    data: str
    parameters: int
    measured: str
    command: str

    @property
    def share(self) -> float:
        """Number at the beginning of ``measured``, a percentage divided by 100."""
        number, unit, *_ = self.measured.split()
        return round(float(number) / (100 if unit == "%" else 1), 6)

    @property
    def path(self) -> Path:
        """File of the weights."""
        return FOLDER / f"{self.name}.safetensors"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the training in the file, including the alphabet of a language model."""
        return read_progress(self.path)["settings"]


_ROWS = (
    Pretrained(
        "austen-equilibrium",
        "language model of characters, one block at its fixed point",
        "six novels by Jane Austen (text/austen)",
        64_320,
        "1.5769 nats a character of the held-out text",
        "implicit-attn train language-model --text austen --model equilibrium",
    ),
    Pretrained(
        "austen-language",
        "language model of characters, 6 layers with momentum",
        "six novels by Jane Austen (text/austen)",
        696_792,
        "1.4403 nats a character of the held-out text",
        "implicit-attn train language-model --text austen --descent momentum",
    ),
    Pretrained(
        "digits-hyperset",
        "Hyper-SET, 12 iterations",
        "digits (8x8 pixels, scikit-learn)",
        65_098,
        "99.72 % of 359 test images",
        "implicit-attn train vit-images",
    ),
    Pretrained(
        "digits-hyperset-equilibrium",
        "Hyper-SET solved for its equilibrium",
        "digits (8x8 pixels, scikit-learn)",
        29_324,
        "99.44 % of 359 test images",
        "implicit-attn train vit-images --model hyperset-equilibrium",
    ),
    Pretrained(
        "mnist-hyperset",
        "Hyper-SET, 12 iterations",
        "MNIST",
        180_298,
        "98.86 % of 10,000 test images",
        "implicit-attn train vit-images --data mnist",
    ),
    Pretrained(
        "mnist-restorer",
        "energy of a convolutional network that restores images, with any data term",
        "MNIST, 20,000 images, noisy or with missing pixels",
        184_994,
        "0.0118 mean squared error of 300 test images under noise of deviation 0.5",
        "python examples/one_energy_many_tasks.py --data mnist --seeds 0",
    ),
    Pretrained(
        "mnist-spins",
        "mean-field attention of 17 coupled vector spins",
        "MNIST",
        25_832,
        "99.46 % of 10,000 test images",
        "implicit-attn train mnist-spins",
    ),
    Pretrained(
        "sudoku-solver",
        "board solver, up to 32 iterations in training",
        "Sudoku with 17 to 28 givens",
        42_193,
        "97.3 % of 1,000 held-out boards (17 to 34 givens) after 32 iterations, 99.1 % after 64",
        "implicit-attn train solve-sudoku --train 38000 --batch 64 --carried 256 --rate 2e-3 "
        "--givens 17 28 --epochs 7 --options features=48 width=96 average=0.995 --compile --seed 2, "
        "stopped after 6 epochs",
    ),
    Pretrained(
        "sudoku-solver-easy",
        "board solver, up to 16 iterations in training",
        "Sudoku with 26 to 34 givens",
        10_729,
        "61.4 % of 1,000 held-out boards (17 to 34 givens) after 16 iterations, 95.3 % after 64",
        "implicit-attn train solve-sudoku --compile --devices 2 --rate 3e-3 --givens 26 34 "
        "--iterations 16 --window 5 --epochs 4",
    ),
)
_BY_NAME = {row.name: row for row in _ROWS}


def pretrained_models() -> Mapping[str, Pretrained]:
    """Return a read-only mapping of names to :class:`Pretrained`, the models in the package."""
    return MappingProxyType(_BY_NAME)


def find_pretrained(name: str) -> Pretrained:
    """Return the :class:`Pretrained` with this name.

    Raises:
        TypeError: if ``name`` is not a string.
        ValueError: if there is no such model; the message suggests similar names.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if name not in _BY_NAME:
        plain = name.lower().replace("_", "-").removesuffix(".safetensors")
        near = difflib.get_close_matches(plain, _BY_NAME, cutoff=0.5) or list(_BY_NAME)
        raise ValueError(
            f"name must be the name of a shipped model, got {name!r}; nearest: {', '.join(near)}"
        )
    return _BY_NAME[name]


def weights_path(name: str) -> Path:
    """Return the file of the shipped weights ``name``, such as ``"mnist-hyperset"``.

    Raises:
        ValueError: if there are no such weights; the message suggests similar names.
    """
    return find_pretrained(name).path


def weights_file(text: str) -> Path:
    """Return the path of a file, or of shipped weights if there is no such file."""
    path = Path(text)
    return weights_path(text) if text in _BY_NAME and not path.is_file() else path


def load_pretrained(name: str, *, layer: Mapping[str, Any] | None = None) -> nn.Module:
    """Load a trained model that comes with the package, in evaluation mode, in float32 on the CPU.

    It does not change torch's random state and ignores torch's default dtype and device.

    Args:
        name: one of :func:`pretrained_models`, such as ``"mnist-hyperset"``.
        layer: options of :class:`~implicit_attn.DEQ`, for models that contain one
            (``"digits-hyperset-equilibrium"``, ``"mnist-spins"`` and the board solvers). The default
            tolerance and maximum number of evaluations are those of the training.

    Returns:
        The model. Image classifiers accept pixels in [0, 1], (B, 1, 8, 8) for the digits and
        (B, 1, 28, 28) for MNIST, and return logits (B, 10). Board solvers accept puzzles (B, 81), int64,
        0 = unknown, and return logits (B, 81, 9) of the digits 1 .. 9. The language model accepts indices
        of characters (B, L), int64, and returns logits (B, L, 81); ``model.alphabet`` contains its
        characters in order, and ``model.generate("It was ", 40)`` continues a text.

    Raises:
        ValueError: if there is no such model (the message suggests similar names), or ``layer`` is
            passed for a model without a DEQ layer.
        ImportError: if safetensors is not installed.
    """
    from implicit_attn.models.registry import load_model  # importing it takes half a second

    row = find_pretrained(name)
    trained = {key: row.settings[key] for key in ("max_steps",) if key in row.settings}
    if row.settings.get("rtol") is not None:
        trained["tolerance"] = Tolerance(rtol=row.settings["rtol"])
    # Use the defaults with which the files were written.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            return load_model(row.path, layer=trained | dict(layer or {}) or None)[0]
    finally:
        torch.set_default_dtype(before)
