"""Text as symbols: the embedded help topics, any file, the novels, and the bars of counting models."""

from __future__ import annotations

import gzip
import lzma
import math
from pathlib import Path

import pytest
import torch

from implicit_attn.data import TextData, load_text, ngram_loss
from implicit_attn.data.files import DATA_VARIABLE, find
from implicit_attn.data.text import split_text

NOVELS = find("text", "austen.txt.xz")


def test_the_help_topics_need_no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = load_text()
    assert data.name == "python-help"
    assert len(data.train) > 200_000  # the text differs between versions of Python
    assert len(data.validation) == pytest.approx(
        0.05 * (len(data.train) + len(data.validation)), 0.01
    )
    assert {"\n", " ", "e", "_"} <= set(data.alphabet) and list(data.alphabet) == sorted(
        data.alphabet
    )
    text = "if x: return None\n"
    assert data.decode(data.encode(text)) == text


def test_the_end_of_every_book_is_held_out() -> None:
    data = split_text("two", ["aaaabb", "cccd"], 0.3)
    assert data.alphabet == "abcd"
    with pytest.raises(ValueError, match="symbols of the alphabet only, got 'xé' besides"):
        data.encode("abxé")
    assert data.decode(data.train) == "aaaa" + "cc"
    assert data.decode(data.validation) == "bb" + "cd"


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
def test_any_file_of_utf_8(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its path, or by its name in the data folder; without the mark of some editors."""
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = "Grüße aus der Küche,\r\n" * 10
    pack = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}[suffix]
    path = tmp_path / "text" / f"my.letter.txt{suffix}"
    path.parent.mkdir()
    with pytest.raises(FileNotFoundError, match=r"letter.txt.xz is not in .*text, .*'python-help'"):
        load_text("letter")
    path.write_bytes(pack(f"\ufeff{text}".encode()))
    path.with_name(f"letter.txt{suffix}").write_bytes(path.read_bytes())
    data = load_text(path, holdout=0.5)
    assert data.name == "my.letter" and load_text("letter").name == "letter"
    whole = data.decode(data.train) + data.decode(data.validation)
    assert whole == text.replace("\r\n", "\n")
    assert torch.equal(load_text(str(path)).train, load_text(path).train)


def test_what_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "bytes.txt"
    with pytest.raises(FileNotFoundError, match=r"source: there is no file .*bytes.txt"):
        load_text(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="expected a text in UTF-8"):
        load_text(path)
    path.write_text("")
    with pytest.raises(ValueError, match="must hold two symbols at least"):
        load_text(path)
    path.write_text("ab")
    with pytest.raises(ValueError, match="too short, the part for train has 1 symbols"):
        load_text(path)
    path.write_bytes(lzma.compress(b"abc" * 100)[:-20])
    with pytest.raises(ValueError, match="damaged or another file"):
        load_text(path)
    with pytest.raises(ValueError, match=r"holdout is 1\.0"):
        load_text(holdout=1.0)


def test_text_data_checks_its_parts() -> None:
    ids = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="every symbol once"):
        TextData("x", "aa", ids, ids)
    with pytest.raises(ValueError, match=r"validation must lie in \[0, 1\], got \[0, 2\]"):
        TextData("x", "ab", ids, ids * 2)
    with pytest.raises(TypeError, match="train must be int64"):
        TextData("x", "ab", ids.float(), ids)


def test_counts_among_many_symbols() -> None:
    """Three hundred different characters: no table of all triples, the same numbers as a dictionary."""
    ids = torch.randint(300, (4000,), generator=torch.Generator().manual_seed(0))
    data = TextData("wide", "".join(map(chr, range(1000, 1300))), ids[:3800], ids[3800:])
    seen: dict[tuple[int, ...], int] = {}
    for place in range(3798):
        triple = tuple(ids[place : place + 3].tolist())
        for key in (triple, triple[:2]):
            seen[key] = seen.get(key, 0) + 1
    losses = []
    for place in range(3800, 3998):
        triple = tuple(ids[place : place + 3].tolist())
        chance = (seen.get(triple, 0) + 0.01) / (seen.get(triple[:2], 0) + 3.0)
        losses.append(-math.log(chance))
    assert ngram_loss(data, 3) == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    with pytest.raises(ValueError, match="order must be <= 7 for 3800 and 200 symbols"):
        ngram_loss(data, 8)


def test_a_digest_tells_texts_apart() -> None:
    ids = torch.tensor([0, 1, 1, 0])
    data = TextData("t", "ab", ids, ids)
    assert data.digest == TextData("other name", "ab", ids.clone(), ids).digest
    others = (TextData("t", "ab", ids.flip(0)[1:], ids), TextData("t", "ba", ids, ids))
    moved = TextData("t", "ab", torch.cat((ids, ids[:1])), ids[1:])
    assert len({data.digest, moved.digest, *(other.digest for other in others)}) == 4


@pytest.mark.skipif(NOVELS is None, reason="text/austen.txt.xz is not in the data folders")
def test_the_novels() -> None:
    data = load_text("austen")
    assert (len(data.train), len(data.validation)) == (3_823_768, 201_254)
    assert len(data.alphabet) == 81
    losses = [ngram_loss(data, order) for order in (1, 2, 3)]
    assert losses == pytest.approx([3.083, 2.443, 1.901], abs=1e-3)
