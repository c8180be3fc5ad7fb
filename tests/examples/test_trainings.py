"""The training scripts: pieces of a training end as a whole one; tasks and the pool of boards are right."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from implicit_attn.data import ImageData, load_sudoku, load_text
from implicit_attn.data.sudoku import solved, units
from implicit_attn.models import load_model
from implicit_attn.models.images import hidden_patches

for package in ("tyro", "matplotlib", "sklearn", "safetensors", "lightning_fabric"):
    pytest.importorskip(package, reason="the training scripts need the extra [examples]")
tyro: Any = importlib.import_module("tyro")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BOARDS = load_sudoku(6, 5, source="generated", more=5, seed=3)
IMAGES = ImageData(
    "toy", 2, *(x for n in (30, 20) for x in (torch.rand(n, 1, 8, 8), torch.arange(n) % 2))
)


pytestmark = pytest.mark.usefixtures("load")


def module(name: str) -> Any:
    return importlib.import_module(name)


def train(script: str, words: str) -> list[dict[str, Any]]:
    found = module(script)
    kinds = {"train_images": "Images", "train_language": "Language", "train_boards": "Sudoku"}
    return found.main(tyro.cli(getattr(found, kinds[script]), args=words.split()))


# Options with which an epoch has a few steps of a second at most.
SCRIPTS = {
    "images": "train_images --limit 40 --batch 10 --epochs 2 --test 20 --dim 8 --heads 2",
    "equilibrium": "train_images --model hyperset-equilibrium --limit 40 --batch 20 --epochs 2 --test 20 "
    "--dim 8 --heads 2",
    "block": "train_images --model block --limit 40 --batch 20 --epochs 2 --test 20 --dim 8 --heads 2",
    "masked": "train_images --task masked --model transformer --limit 40 --batch 10 --epochs 2 --test 20 "
    "--dim 8 --heads 2",
    "language": "train_language --steps 4 --evaluate-every 2 --dim 8 --heads 2 --layers 1 --length 8 "
    "--batch 2 --windows 4",
    "fixed point": "train_language --model equilibrium --steps 4 --evaluate-every 2 --dim 8 --heads 2 "
    "--length 8 --batch 2 --windows 4",
    "boards": "train_boards --source generated --train 120 --test 3 --boards 2 --epochs 2 --batch 30 "
    "--iterations 3 --window 2 --features 4 --width 4 --carried 40 --average 0.9 --givens 30 34",
    "completion": "train_boards --task complete --source generated --train 12 --test 3 --epochs 2 --batch 4 "
    "--dim 8 --heads 2 --width 8",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_training_in_pieces_ends_as_a_whole_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, _, words = SCRIPTS[name].partition(" ")
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    rows = train(script, f"{words} --out {whole}")
    assert len(rows) == 2 and all(math.isfinite(row["loss"]) for row in rows)
    # Each look at the clock is half a minute later: a piece ends after a step or two.
    clock = itertools.count(0.0, 30.0)
    times = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr(module("training"), "time", times)
    again = train(script, f"{words} --out {pieces} --minutes 0.9")
    assert "--resume goes on" in capsys.readouterr().out
    for _ in range(12):
        if len(again) == len(rows):
            break
        again = train(script, f"{words} --out {pieces} --minutes 0.9 --resume")
    for row, other in zip(rows, again, strict=True):
        assert {**row, "seconds": 0} == {**other, "seconds": 0}
    files = [folder / "weights.safetensors" for folder in (whole, pieces)]
    assert files[0].read_bytes() == files[1].read_bytes()
    suffixes = {path.suffix for path in whole.iterdir()}
    assert suffixes | {".png"} == {".pt", ".csv", ".png", ".safetensors"}
    assert sum(p.numel() for p in load_model(files[0])[0].parameters()) > 0
    with pytest.raises(SystemExit, match="--resume"):
        train(script, f"{words} --out {whole}")
    with pytest.raises(SystemExit, match="other options"):
        train(script, f"{words} --out {whole} --rate 0.5 --resume")


@pytest.mark.slow
def test_an_equilibrium_learns_the_digits(tmp_path: Path) -> None:
    words = "--model block --epochs 5 --limit 800 --dim 32"
    rows = train("train_images", f"{words} --out {tmp_path}")
    assert rows[-1]["test_accuracy"] > 0.9 and min(row["converged"] for row in rows) > 0.99


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    words = "--model block --limit 41 --batch 8 --epochs 1 --test 21 --dim 8 --heads 2 --accelerator cpu"
    root = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    lines = []
    for devices in (1, 2):
        out = tmp_path / str(devices)
        options = [*words.split(), "--out", str(out), "--devices", str(devices)]
        command = [sys.executable, str(EXAMPLES / "train_images.py"), *options]
        subprocess.run(command, env=root, check=True, timeout=400)
        lines.append((out / "history.csv").read_text().splitlines()[1].split(","))
    assert float(lines[0][1]) == pytest.approx(float(lines[1][1]), rel=0.05)  # dropout differs


@pytest.mark.parametrize(
    ("script", "words", "option"),
    [
        ("train_images", "--limit 0", "--limit"),
        ("train_images", "--task masked --model spins", "--model"),
        ("train_boards", "--evaluate list --weights nope", "--weights"),
        ("train_language", "--text nope", "--text"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(script: str, words: str, option: str) -> None:
    with pytest.raises(SystemExit, match=option) as end:
        train(script, words)
    assert "\n" not in str(end.value.code)


def test_the_rate_rises_and_falls() -> None:
    recipe = module("options").Recipe(rate=1.0).fill({"warmup": 0.1, "floor": 0.1})
    rates = [recipe.rate_at(k / 100) for k in range(101)]
    assert rates[0] == 0 and rates[5] == pytest.approx(0.5, abs=0.01) and max(rates) < 1
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[100] == pytest.approx(0.1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_so_many_patches_are_hidden() -> None:
    task = module("image_tasks").MaskedImages(IMAGES, 2, 0.4, 20)
    assert hidden_patches(task.tests[0], 2).sum(1).tolist() == [6] * 20
    inputs, targets = task.augmented(task.inputs, task.targets, seeded())
    assert torch.equal(inputs[~inputs.isnan()], targets[~inputs.isnan()])
    varied = hidden_patches(inputs, 2).sum(1)
    assert varied.min() >= 1 and varied.max() <= 6


def test_the_loss_of_images_is_that_of_hidden_pixels() -> None:
    task = module("image_tasks").MaskedImages(IMAGES, 4, 0.7, 20)
    inputs, targets = task.augmented(task.inputs, task.targets, seeded())
    outputs = torch.randn(targets.shape, generator=seeded(2)).requires_grad_()
    loss, number = task.loss(outputs, inputs, targets)
    errors = (outputs - targets).square()[inputs.isnan()]
    torch.testing.assert_close(loss, errors.sum() / 16)  # pixels of a patch
    assert number == errors.numel() / 16
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert torch.equal(gradient != 0, inputs.isnan())
    perfect = task.measures(task.tests[1], *task.tests)
    assert perfect["test_loss"][0] == 0 and perfect["test_psnr"][0] == pytest.approx(100 * 20)


def test_crops_and_mirror_images_of_the_padded_image_all_occur() -> None:
    tasks, image = module("image_tasks"), torch.rand(1, 2, 4, 4) + 0.5
    padded = F.pad(image, (1, 1, 1, 1))
    windows = [padded[..., r : r + 4, c : c + 4] for r in range(3) for c in range(3)]
    known = {w.numpy().tobytes() for x in windows for w in (x.contiguous(), x.flip(3).contiguous())}
    found = tasks.crop_and_flip(image.expand(400, -1, -1, -1), 1, seeded())
    assert {each.unsqueeze(0).numpy().tobytes() for each in found} == known


def test_windows_are_of_the_text_and_their_targets_one_character_later() -> None:
    text = load_text()
    task = module("train_language").NextCharacter(text, 10, 4, samples=50)
    inputs, targets = task.augmented(task.inputs, task.targets, seeded())
    whole = text.decode(text.train)
    for window, following in zip(inputs, targets, strict=True):
        assert torch.equal(window[1:], following[:-1])
        assert text.decode(window) + text.decode(following[-1:]) in whole


def test_the_loss_of_boards_is_summed_over_unknown_cells_and_averaged_over_answers() -> None:
    task = module("board_tasks").Completion(BOARDS)
    puzzles, solutions = task.inputs, task.targets
    logits = torch.randn(3, len(puzzles), 81, 9, generator=seeded())
    single = [
        F.cross_entropy(each.flatten(0, 1), solutions.flatten() - 1, reduction="none")
        for each in logits
    ]
    expected = torch.stack(single)[:, (puzzles == 0).flatten()].sum(1)
    torch.testing.assert_close(task.loss(logits[0], puzzles, solutions)[0], expected[0])
    found, number = task.loss(logits, puzzles, solutions)
    torch.testing.assert_close(found, expected.mean())
    assert number == int((puzzles == 0).sum())


def test_givens_are_drawn_anew_and_then_symmetries() -> None:
    task = module("board_tasks").Completion(BOARDS, givens=(30, 34), symmetries=True)
    counts = set()
    for seed in range(40):
        puzzles, solutions = task.augmented(task.inputs, task.targets, seeded(seed))
        assert solved(solutions).all() and ((puzzles == solutions) | (puzzles == 0)).all()
        counts |= set((puzzles != 0).sum(1).tolist())
    assert counts == set(range(30, 35))


def test_carried_boards_age_and_retire() -> None:
    """A state that counts its iterations says how old its board is."""
    pool = module("board_tasks").CarriedStates(4, lives=(30, 60), noise=0.0)

    def step(seed: int) -> Tensor:
        generator = seeded(seed)
        inputs, targets = BOARDS.train_puzzles[:2], BOARDS.train_solutions[:2]
        index, inputs, targets, states = pool.join(inputs, targets, generator)
        before = torch.cat([torch.zeros(2, 81, 9, 1), states.view(-1, 81, 9, 1)])
        pool.put(index, inputs, targets, before + 10, 10, generator)
        return index

    assert len(step(0)) == 0 and len(pool) == 2
    retired = 0
    for seed in range(1, 40):
        before = pool.rows[3].clone()
        index, ages = step(seed), pool.rows[3]
        assert len(index) == 2 and len(pool) == 4
        assert torch.equal(pool.rows[2][:, 0, 0, 0], ages.float())
        assert int(ages.max()) < 60 and int(ages.min()) >= 10
        retired += int((ages[: len(before)] < before).sum())
    # A life is 30 to 60 iterations, a visit has 10.
    assert 39 * 2 * 10 / 70 <= retired <= 39 * 2 * 10 / 20


class Reads(TorchDispatchMode):
    """Counts operations for which the host would wait for a card: their shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        masks = name.startswith("aten.index") and isinstance(args[1], (list, tuple))
        if any(word in name for word in ("nonzero", "masked_select", "unique", "equal")) or (
            masks and any(x is not None and x.dtype == torch.bool for x in args[1])
        ):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_the_host_need_not_wait_for_a_step_of_boards() -> None:
    task = module("board_tasks").Completion(
        BOARDS, givens=(40, 50), carried=module("board_tasks").CarriedStates(4)
    )

    def forward(puzzles: Tensor, iterations: int, state: Tensor) -> tuple[Tensor, Tensor]:
        return puzzles.new_zeros(2, len(puzzles), 81, 9).float(), torch.zeros(
            len(puzzles), 81, 9, 2
        )

    with Reads() as reads:
        for seed in range(4):
            batch = task.inputs[:2], task.targets[:2]
            inputs, targets = task.augmented(*batch, seeded(seed))
            _, number = task.run(forward, inputs, targets, seeded(seed), iterations=3)
            assert isinstance(number, Tensor)
    assert len(task.carried) == 4 and reads.names == []


@pytest.mark.slow
def test_public_sets_of_hard_boards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a file like the public one; logic alone solves boards with five unknown cells."""
    import numpy as np

    boards = module("board_tasks")
    solutions = BOARDS.test_solutions
    puzzles = solutions.clone()
    puzzles[:, ::17] = 0
    arrays: Any = {f"{name}_{kind}": x.numpy().astype("u1") for name in boards.HARD
              for kind, x in (("puzzle", puzzles), ("solution", solutions))}  # fmt: skip
    (tmp_path / "sudoku").mkdir()
    np.savez(tmp_path / "sudoku" / "hard.npz", **arrays)
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path))
    words = "--evaluate hard --weights sudoku-solver-easy --boards 3 --guesses 1"
    rows = train("train_boards", f"{words} --out {tmp_path / 'out'}")
    assert [row["boards"] for row in rows] == list(boards.HARD)
    assert all(
        row["singles"] == row["stops by itself"] == 100 and row["wrong"] == 0 for row in rows
    )
    assert units().shape == (27, 9) and "magictour" in capsys.readouterr().out
