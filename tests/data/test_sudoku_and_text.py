"""Sudoku: boards, symmetries, solver, puzzles; text as symbols, and the bars of counting models."""

from __future__ import annotations

import lzma
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from implicit_attn.data import (
    SudokuSymmetries,
    TextData,
    load_sudoku,
    load_text,
    ngram_loss,
    read_list,
    resolve_source,
    reveal,
    solve_by_singles,
    solve_sudoku,
    unique_puzzles,
)
from implicit_attn.data.sudoku import solved, units
from implicit_attn.data.text import split_text

PUZZLES, SOLUTIONS = unique_puzzles(4, seed=0)
GENERATED = load_sudoku(12, 6, source="generated", seed=7)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder; the cache is below it."""
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def keys(boards: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(board) for board in boards.tolist()}


def test_units_and_solved_boards() -> None:
    groups = units()
    assert groups.flatten().bincount().tolist() == 81 * [3]
    assert groups[[0, 9, 19], 1].tolist() == [1, 9, 4]  # of a row, a column, a box
    wrong = SOLUTIONS.clone()
    wrong[1, 0], wrong[1, 1] = SOLUTIONS[1, 1], SOLUTIONS[1, 0]  # breaks two columns only
    assert solved(SOLUTIONS).all() and solved(wrong).tolist() == [True, False, True, True]


def test_the_solver_counts_solutions() -> None:
    puzzle = PUZZLES[0].tolist()
    assert solve_sudoku(puzzle) == [SOLUTIONS[0].tolist()]
    assert len(solve_sudoku([0] * 81, most=5)) == 5
    contradiction = [1, 1] + [0] * 79
    assert solve_sudoku(contradiction) == []
    dead_end = [0, 2, 3, 4, 5, 6, 7, 8, 9] + [1] + [0] * 71  # the first cell could only be 1
    assert solve_sudoku(dead_end) == []
    for bad in ([0] * 80, [10] + [0] * 80):
        with pytest.raises(ValueError, match="puzzle"):
            solve_sudoku(bad)


def test_generated_puzzles_have_one_solution_and_no_clue_too_many() -> None:
    assert torch.equal(PUZZLES[PUZZLES != 0], SOLUTIONS[PUZZLES != 0])
    for puzzle, solution in zip(PUZZLES.tolist(), SOLUTIONS.tolist(), strict=True):
        assert solve_sudoku(puzzle) == [solution]
        clues = [cell for cell in range(81) if puzzle[cell]]
        assert 17 <= len(clues) <= 30
        for cell in clues[::6]:
            assert len(solve_sudoku([*puzzle[:cell], 0, *puzzle[cell + 1 :]])) == 2
    again = unique_puzzles(4, seed=0)
    assert torch.equal(again[0], PUZZLES) and torch.equal(again[1], SOLUTIONS)
    assert not torch.equal(unique_puzzles(1, seed=1)[1], SOLUTIONS[:1])


def test_symmetries_keep_the_rules_and_the_clues() -> None:
    many = torch.arange(200) % 4
    puzzles, solutions = SudokuSymmetries()(PUZZLES[many], SOLUTIONS[many], drawn())
    assert solved(solutions).all()
    assert torch.equal(puzzles[puzzles != 0], solutions[puzzles != 0])
    assert torch.equal((puzzles != 0).sum(1), (PUZZLES[many] != 0).sum(1))
    assert len(keys(solutions)) == 200
    assert solve_sudoku(puzzles[0].tolist()) == [solutions[0].tolist()]
    marked = torch.zeros_like(SOLUTIONS[:1]).expand(200, 81).clone()
    marked[:, 0] = SOLUTIONS[0, 0]  # the first cell may move anywhere
    moved, _ = SudokuSymmetries()(marked, SOLUTIONS[:1].expand(200, 81), drawn(1))
    assert len(set(moved.nonzero()[:, 1].tolist())) > 60


def test_revealing_adds_clues_uniformly() -> None:
    many = torch.arange(1200) % 4
    puzzles, solutions = PUZZLES[many], SOLUTIONS[many]
    more = reveal(puzzles, solutions, 5, drawn())
    assert torch.equal(more[puzzles != 0], puzzles[puzzles != 0])
    assert torch.equal(more[more != 0], solutions[more != 0])
    counts = ((more != 0).sum(1) - (puzzles != 0).sum(1)).bincount()
    assert len(counts) == 6
    assert (counts - 200).abs().max() < 60  # about four and a half standard deviations


def test_singles_are_never_wrong_and_find_what_logic_finds() -> None:
    puzzles, solutions = unique_puzzles(3, 0)
    found = solve_by_singles(puzzles)
    assert torch.equal(found[found != 0], solutions[found != 0])
    assert torch.equal(found[puzzles != 0], puzzles[puzzles != 0])
    one_open = solutions[:1].clone()
    one_open[0, 40] = 0  # a naked single
    assert torch.equal(solve_by_singles(one_open), solutions[:1])
    assert not bool(solve_by_singles(torch.zeros(1, 81, dtype=torch.long)).any())
    hidden = torch.zeros(1, 9, 9, dtype=torch.long)
    hidden[0, [1, 2, 3, 6], [3, 6, 1, 2]] = 5  # the first row's 5 must be in its first cell
    assert solve_by_singles(hidden.view(1, 81))[0, 0] == 5


def changed(boards: torch.Tensor) -> torch.Tensor:
    """With a wrong digit in the first unknown cell of the third puzzle."""
    cell = int((PUZZLES[2] == 0).nonzero()[0])
    return boards.index_put((torch.tensor(2), torch.tensor(cell)), SOLUTIONS[2, cell] % 9 + 1)


@pytest.mark.parametrize(("puzzles", "solutions", "message"), [
    (PUZZLES[:, :80], SOLUTIONS, "boards"), (PUZZLES, SOLUTIONS[:3], "boards"),
    (changed(PUZZLES), SOLUTIONS, "puzzle 2"), (PUZZLES, changed(SOLUTIONS), "puzzle 2"),
    (SOLUTIONS, SOLUTIONS, "puzzle 0"),
])  # fmt: skip
def test_bad_boards_are_refused(
    puzzles: torch.Tensor, solutions: torch.Tensor, message: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", puzzle=puzzles.numpy(), solution=solutions.numpy())
    with pytest.raises(ValueError, match=f"a.npz.*{message}"):
        read_list(tmp_path / "a.npz")


@pytest.mark.parametrize("options", [{"source": "internet"}, {"test": 1.5}, {"more": 64}])
def test_bad_requests_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        load_sudoku(**({"train": 2, "test": 1, "source": "generated"} | options))


def test_a_list_is_found_and_split_by_puzzle(folder: Path) -> None:
    """A list of 40 puzzles, two of which have one solution, in the place of the real one."""
    many = torch.arange(40) % 4
    puzzles, solutions = SudokuSymmetries()(PUZZLES[many], SOLUTIONS[many], drawn())
    puzzles[1], solutions[1] = puzzles[0], solutions[0]
    puzzles[1, (puzzles[1] == 0).nonzero()[0]] = solutions[1, (puzzles[1] == 0).nonzero()[0]]
    (folder / "sudoku").mkdir()
    path = folder / "sudoku" / "sudoku17.npz"
    np.savez(path, puzzle=puzzles.numpy().astype("u1"), solution=solutions.numpy().astype("u1"))
    data = load_sudoku(30, 9, more=3)
    found = [resolve_source(source) for source in ("auto", "list", "generated")]
    assert found == ["list", "list", "generated"]
    assert torch.equal(read_list(path)[1], solutions)
    assert keys(data.train_solutions) | keys(data.test_solutions) == keys(solutions)
    assert not keys(data.train_solutions) & keys(data.test_solutions)
    again, other = load_sudoku(30, 9, more=3), load_sudoku(30, 9, more=3, seed=1)
    assert torch.equal(data.train_puzzles, again.train_puzzles)
    assert not torch.equal(data.train_puzzles, other.train_puzzles)
    with pytest.raises(ValueError, match=r"train \+ test is 40"):
        load_sudoku(31, 9)


@pytest.mark.usefixtures("folder")
def test_without_a_list_puzzles_are_generated() -> None:
    assert load_sudoku(1, 1).name == GENERATED.name == "generated Sudoku"
    assert not keys(GENERATED.train_solutions) & keys(GENERATED.test_solutions)
    for puzzle, solution in zip(GENERATED.test_puzzles, GENERATED.test_solutions, strict=True):
        assert solve_sudoku(puzzle.tolist()) == [solution.tolist()]
    assert resolve_source() == "generated"
    with pytest.raises(FileNotFoundError, match=r"sudoku17\.npz.*IMPLICIT_ATTN_DATA"):
        load_sudoku(1, 1, source="list")


@pytest.mark.usefixtures("folder")
def test_the_help_topics_need_no_data() -> None:
    data = load_text()
    assert data.name == "python-help"
    assert len(data.train) > 200_000  # the text differs between versions of Python
    whole = len(data.train) + len(data.validation)
    assert len(data.validation) == pytest.approx(0.05 * whole, 0.01)
    assert {"\n", " ", "e", "_"} <= set(data.alphabet)
    assert list(data.alphabet) == sorted(data.alphabet)
    text = "if x: return None\n"
    assert data.decode(data.encode(text)) == text


def test_the_end_of_every_book_is_held_out() -> None:
    data = split_text("two", ["aaaabb", "cccd"], 0.3)
    assert data.alphabet == "abcd"
    with pytest.raises(ValueError, match="xé"):
        data.encode("abxé")
    assert data.decode(data.train) == "aaaa" + "cc"
    assert data.decode(data.validation) == "bb" + "cd"


def test_any_file_of_utf_8(folder: Path) -> None:
    """By its path, or by its name in the data folder; without the mark of some editors."""
    text = "Grüße aus der Küche,\r\n" * 10
    path = folder / "text" / "my.letter.txt.xz"
    path.parent.mkdir()
    with pytest.raises(FileNotFoundError, match=r"letter\.txt\.xz is not in"):
        load_text("letter")
    path.write_bytes(lzma.compress(f"\ufeff{text}".encode()))
    data = load_text(path, holdout=0.5)
    assert data.name == "my.letter" and torch.equal(
        load_text("my.letter").train, load_text(path).train
    )
    whole = data.decode(data.train) + data.decode(data.validation)
    assert whole == text.replace("\r\n", "\n")
    for content in (b"\xff\xfe\x00", b"ab"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"letter\.txt\.xz: damaged"):
            load_text(path)
    with pytest.raises(ValueError, match="holdout"):
        load_text(holdout=1.0)


def test_counts_of_triples_are_those_of_a_dictionary() -> None:
    ids = torch.randint(300, (4000,), generator=drawn())
    data = TextData("wide", "".join(map(chr, range(1000, 1300))), ids[:3800], ids[3800:])
    text = ids.tolist()
    seen = list(zip(text[:3798], text[1:3799], text[2:3800], strict=True))
    triples, pairs = Counter(seen), Counter(triple[:2] for triple in seen)
    losses = []
    for a, b, c in zip(text[3800:], text[3801:], text[3802:], strict=False):
        losses.append(-math.log((triples[a, b, c] + 0.01) / (pairs[a, b] + 3.0)))
    assert ngram_loss(data, 3) == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    with pytest.raises(ValueError, match="order"):
        ngram_loss(data, 8)
