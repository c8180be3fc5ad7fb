"""Text as numbers of its symbols: the standard library's help topics, or any UTF-8 file."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch
from torch import Tensor

from implicit_attn.data.files import damaged, find, missing, read_content
from solvers.core.checks import require_count

HELP = "python-help"
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
    """

    name: str
    alphabet: str
    train: Tensor
    validation: Tensor

    def encode(self, text: str) -> Tensor:
        """The numbers (N,) of the symbols of ``text``; ValueError for one that is not in the alphabet."""
        return encode(text, self.alphabet)

    def decode(self, ids: Tensor) -> str:
        """The text of numbers (N,)."""
        return decode(ids, self.alphabet)


def encode(text: str, alphabet: str) -> Tensor:
    """The numbers (N,) int64 of the symbols of ``text``; ValueError for one that is not in ``alphabet``."""
    if unknown := sorted(set(text) - set(alphabet)):
        shown = "".join(unknown[:20])
        raise ValueError(f"text must hold symbols of the alphabet only, got {shown!r} besides")
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
        source: ``"python-help"``, the help topics of the standard library, which differ a little between
            versions of Python; a name, such as ``"austen"`` (six novels), of ``text/NAME.txt``, plain or
            compressed as ``.xz`` or ``.gz``, in ``$IMPLICIT_ATTN_DATA`` or the cache; or a path.
        holdout: share of every book that is held out, strictly between 0 and 1. Each help topic and
            each novel of ``"austen"`` is a book, and so is any other file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no UTF-8 text, or too short to be split.
    """
    if not 0 < holdout < 1:
        raise ValueError(f"holdout must lie strictly between 0 and 1, got {holdout}")
    if source == HELP:
        return split_text(HELP, [topics.topics[key] for key in sorted(topics.topics)], holdout)
    path = find("text", *(f"{source}.txt{end}" for end in (".xz", ".gz", "")))
    if path is None and not (path := Path(source)).is_file():
        raise missing(f"text/{source}.txt.xz")
    content = read_content(path)
    with damaged(path, "a text in UTF-8"):
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
        books = re.split(BOOKS[str(source)], text) if source in BOOKS else [text]
        return split_text(path.name.split(".txt")[0], books, holdout)


def split_text(name: str, books: Sequence[str], holdout: float) -> TextData:
    """The first ``floor((1 - holdout) n)`` of the n symbols of each book, and their ends."""
    cuts = [math.floor((1.0 - holdout) * len(book)) for book in books]
    train = "".join(book[:cut] for book, cut in zip(books, cuts, strict=True))
    held = "".join(book[cut:] for book, cut in zip(books, cuts, strict=True))
    alphabet = "".join(sorted(set(train + held)))
    if min(len(train), len(held), len(alphabet)) < 2:
        raise ValueError(f"the text is too short: {len(train)} + {len(held)} symbols")
    return TextData(name, alphabet, encode(train, alphabet), encode(held, alphabet))


def ngram_loss(data: TextData, order: int = 2) -> float:
    """Loss of a model of counts on the validation text, in nats a symbol: a bar for trained models.

    ``P(c | b) = (n_bc + 0.01) / (n_b + 0.01 V)`` of the ``order - 1`` symbols b before c, counted in the
    training text; V symbols.
    """
    size = len(data.alphabet)
    most = min(len(data.train), len(data.validation), int(63 * math.log(2) / math.log(size)))
    if require_count("order", order) > most:
        raise ValueError(f"order must be at most {most} for this text, got {order}")

    # Each sequence of ``order`` symbols is one number.
    powers = size ** torch.arange(order - 1, -1, -1, device=data.train.device)
    seen, sought = ((x.unfold(0, order, 1) * powers).sum(1) for x in (data.train, data.validation))

    def count(seen: Tensor, sought: Tensor) -> Tensor:
        """Return how often each number of ``sought`` is in ``seen``."""
        numbers, counts = seen.unique(return_counts=True)
        places = torch.searchsorted(numbers, sought).clamp(max=len(numbers) - 1)
        return torch.where(numbers[places] == sought, counts[places], 0).double()

    together, before = count(seen, sought), count(seen // size, sought // size)
    return -((together + 0.01) / (before + 0.01 * size)).log().mean().item()
