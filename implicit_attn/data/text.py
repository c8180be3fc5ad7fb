"""Text as symbols: the standard library's help topics, texts in the data folder, any UTF-8 file."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch
from torch import Tensor

from implicit_attn.data.files import DATA_VARIABLE, damaged, find, read_content, search_folders
from solvers.core.checks import require_count, require_positive

HELP = "python-help"
FOLDER = "text"
MOST_TEXT = 2**28  # bytes of a text, once decompressed
# Where the books of a collection begin, so that a part of each is held out.
BOOKS = {
    "austen": r"\n\n(?=(?:PRIDE AND PREJUDICE|MANSFIELD PARK|EMMA|NORTHANGER ABBEY|Persuasion)\n\n)"
}


@dataclass(frozen=True)
class TextData:
    """A text as numbers of its symbols, split into training and validation.

    Attributes:
        name: where it comes from.
        alphabet: the symbols, each once; symbol k has the number k.
        train, validation: (N,) int64 in 0 .. len(alphabet) - 1, each part of the text in its order.

    Raises:
        TypeError, ValueError: a dtype or a range differs from those above, a symbol is twice in the
            alphabet, or a part is empty.
    """

    name: str
    alphabet: str
    train: Tensor
    validation: Tensor

    def __post_init__(self) -> None:
        if len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError(f"alphabet must hold every symbol once, got {self.alphabet!r}")
        for part in ("train", "validation"):
            ids = getattr(self, part)
            if ids.dtype != torch.int64 or ids.dim() != 1 or not len(ids):
                raise TypeError(
                    f"{part} must be int64 of shape (N,), N >= 1, got {ids.dtype} {tuple(ids.shape)}"
                )
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= len(self.alphabet):
                raise ValueError(
                    f"{part} must lie in [0, {len(self.alphabet) - 1}], got [{low}, {high}]"
                )

    def encode(self, text: str) -> Tensor:
        """The numbers (N,) of the symbols of ``text``; ValueError for one that is not in the alphabet."""
        return encode(text, self.alphabet)

    def decode(self, ids: Tensor) -> str:
        """The text of numbers (N,)."""
        return decode(ids, self.alphabet)

    @property
    def digest(self) -> str:
        """SHA-256 of the symbols and of both parts, which tells texts apart that agree in size."""
        found = hashlib.sha256(self.alphabet.encode("utf-8", "surrogatepass"))
        for part in (self.train, self.validation):
            found.update(len(part).to_bytes(8, "little") + part.cpu().numpy().tobytes())
        return found.hexdigest()

    def to(self, device: torch.device | str) -> TextData:
        """The same data on another device."""
        return replace(self, train=self.train.to(device), validation=self.validation.to(device))


def encode(text: str, alphabet: str) -> Tensor:
    """The numbers (N,) int64 of the symbols of ``text``; ValueError for one that is not in ``alphabet``."""
    unknown = sorted(set(text) - set(alphabet))
    if unknown:
        raise ValueError(
            f"text must hold symbols of the alphabet only, got {''.join(unknown[:20])!r} besides"
        )
    symbols, codes = (  # code points
        np.frombuffer(each.encode("utf-32-le", "surrogatepass"), "<u4") for each in (alphabet, text)
    )
    numbers = np.zeros(int(symbols.max(initial=0)) + 1, dtype=np.int64)
    numbers[symbols] = np.arange(len(symbols))
    return torch.from_numpy(numbers[codes])


def decode(ids: Tensor, alphabet: str) -> str:
    """The text of numbers (N,) of symbols in ``alphabet``."""
    return "".join(alphabet[number] for number in ids.tolist())


def load_text(source: str | Path = HELP, *, holdout: float = 0.05) -> TextData:
    """A text as symbols, the last part of each of its books held out for validation.

    Args:
        source: ``"python-help"``, the help topics of the standard library, which are always there
            and differ a little between versions of Python; a name, such as ``"austen"`` (six novels),
            for ``text/NAME.txt`` in ``$IMPLICIT_ATTN_DATA`` or the cache, plain or compressed as
            ``.txt.xz`` or ``.txt.gz``; or the path of a UTF-8 file, plain or compressed.
        holdout: share of every book that is held out, strictly between 0 and 1. A file is one book;
            each help topic is one, and so is each novel of ``"austen"``.

    Returns:
        :class:`TextData` with the sorted symbols of the whole text as its alphabet.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no UTF-8 text, or too short to be split; or ``holdout`` is out of range.
    """
    if not 0 < holdout < 1:
        raise ValueError(f"holdout is {holdout}, expected a number strictly between 0 and 1")
    if source == HELP:
        return split_text(HELP, [topics.topics[key] for key in sorted(topics.topics)], holdout)
    path = _find(source)
    name = re.fullmatch(r"(.+?)(\.txt)?(\.xz|\.gz)?", path.name)
    content = read_content(path, MOST_TEXT)
    with damaged(path, "a text in UTF-8"):
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    # Known by its name alone: a file called so may be any.
    books = re.split(BOOKS[str(source)], text) if source in BOOKS else [text]
    return split_text(name[1] if name else path.name, books, holdout)


def split_text(name: str, books: Sequence[str], holdout: float) -> TextData:
    """The beginnings of the books one after another, and their ends, as :class:`TextData`.

    Of a book of n symbols the first ``floor((1 - holdout) n)`` are for training.
    """
    alphabet = "".join(sorted(set("".join(books))))
    if len(alphabet) < 2:
        raise ValueError(f"{name}: the text must hold two symbols at least, got {alphabet!r}")
    train, validation = [], []
    for book in books:
        cut = math.floor((1.0 - holdout) * len(book))
        train.append(book[:cut])
        validation.append(book[cut:])
    parts = {"train": "".join(train), "validation": "".join(validation)}
    for part, text in parts.items():
        if len(text) < 2:
            told = f"the part for {part} has {len(text)} symbols, expected two or more"
            raise ValueError(f"{name}: too short, {told}")
    return TextData(name, alphabet, *(encode(text, alphabet) for text in parts.values()))


def ngram_loss(data: TextData, order: int = 2, *, pseudocount: float = 0.01) -> float:
    """Loss of a model of counts on the validation text, in nats a symbol: a bar for trained models.

    ``P(c | b) = (n_bc + pseudocount) / (n_b + pseudocount V)`` of the ``order - 1`` symbols b before c,
    counted in the training text; V symbols.

    Args:
        data: the text.
        order: 1 counts symbols, 2 pairs, 3 triples.
        pseudocount: > 0.

    Raises:
        ValueError: ``order`` < 1, longer than a part of the text, or too large to number all sequences
            of that length.
    """
    require_count("order", order)
    require_positive("pseudocount", pseudocount)
    size, train, held = len(data.alphabet), len(data.train), len(data.validation)
    most = min(train, held, int(63 * math.log(2) / math.log(max(size, 2))))
    if order > most:
        raise ValueError(
            f"order must be <= {most} for {train} and {held} symbols among {size} different ones, "
            f"got {order}"
        )

    def read(ids: Tensor) -> Tensor:
        """The number of the sequence that ends at each place."""
        index = torch.zeros(len(ids) - order + 1, dtype=torch.int64, device=ids.device)
        for place in range(order):
            index = index * size + ids[place : len(ids) - order + 1 + place]
        return index

    seen, sought = read(data.train), read(data.validation)
    together, before = _count(seen, sought), _count(seen // size, sought // size)
    chances = (together + pseudocount) / (before + pseudocount * size)
    return -chances.log().mean().item()


def _count(seen: Tensor, sought: Tensor) -> Tensor:
    """How often each number of ``sought`` is in ``seen``, in float64."""
    numbers, counts = seen.unique(return_counts=True)
    places = torch.searchsorted(numbers, sought).clamp(max=len(numbers) - 1)
    return torch.where(numbers[places] == sought, counts[places], 0).double()


def _find(source: str | Path) -> Path:
    """The file of a path, or of a name in the data folder."""
    if isinstance(source, Path) or Path(source).suffix or Path(source).name != source:
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"source: there is no file {path}")
        return path
    names = [f"{source}{suffix}" for suffix in (".txt.xz", ".txt.gz", ".txt")]
    found = find(FOLDER, *names)
    if found is None and Path(source).is_file():
        return Path(source)
    if found is None:
        places = ", ".join(str(base / FOLDER) for base in search_folders())
        raise FileNotFoundError(
            f"source: {names[0]} is not in {places}; set {DATA_VARIABLE} to a folder that contains "
            f"{FOLDER}/{names[0]}, give the path of a text, or take {HELP!r}"
        )
    return found
