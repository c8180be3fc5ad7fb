"""The programs that train: their presets, a small run of each, what they refuse before the work."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_attn import load_pretrained
from implicit_attn.checkpoint import read_progress
from implicit_attn.cli import main
from implicit_attn.data import load, unique_puzzles
from implicit_attn.data.sudoku import units
from implicit_attn.models import BoardSolver, load_model
from implicit_attn.programs import choose_threads
from implicit_attn.programs.boards import Sudoku, frames_of
from implicit_attn.programs.images import (
    ENCODER,
    IDENTITY,
    LOGISTIC,
    Classify,
    MaskedPatches,
    MnistSpins,
    VitImages,
    compare,
    logistic_regression,
)
from implicit_attn.programs.language_model import Language
from implicit_attn.weights import weights_path

for module in ("tyro", "safetensors", "tqdm", "lightning_fabric", "matplotlib", "sklearn"):
    pytest.importorskip(module, reason="the programs need the extra [examples]")

HAS_DATA = Path(os.environ.get("IMPLICIT_ATTN_DATA", "/nowhere"))
SHIPPED: dict[str, tuple[Any, str]] = {
    "digits-hyperset": (VitImages(), "."),
    "digits-hyperset-equilibrium": (VitImages(model="hyperset-equilibrium"), "."),
    "mnist-hyperset": (VitImages(data="mnist"), "mnist"),
    "mnist-spins": (MnistSpins(), "mnist"),
    "austen-language": (Language(text="austen", descent="momentum"), "text"),
    "austen-equilibrium": (Language(text="austen", model="equilibrium"), "text"),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_defaults_are_those_of_the_shipped_weights(name: str) -> None:
    program, needed = SHIPPED[name]
    if needed != "." and not (HAS_DATA / needed).is_dir():
        pytest.skip(f"no {needed} under IMPLICIT_ATTN_DATA")
    job, held = program.job(False), read_progress(weights_path(name))["settings"]
    found = json.loads(json.dumps({**asdict(job.recipe), **job.settings}))
    for key in ("rate", "batch", "warmup", "floor", "weight_decay", "clip", "seed", "rtol", "data"):
        assert key not in held or found.get(key) == held[key], key
    assert found["iterations"] == held.get("random_iterations")
    if "model" in held:
        wanted, made = (dict(each["model"]) for each in (held, found))
        backbone, ours = wanted.pop("backbone", {}), made.pop("backbone", {})
        wanted = {key: "class" for key in made if key == "readout"} | wanted  # the default
        assert made == wanted and ours == {k: v for k, v in backbone.items() if v is not None}
    assert sum(p.numel() for p in job.model.parameters()) == sum(
        value.numel() for value in load_pretrained(name).parameters()
    )


SMALL = "dim=8 heads=2"
RUNS = {
    "train classify": f"--limit 64 --epochs 1 --patch 4 --readout class --options {SMALL} width=8",
    "train vit-images": f"--limit 64 --epochs 2 --iterations 2 --options {SMALL} patch=4",
    "train masked-images": f"--limit 64 --epochs 1 --test 9 --iterations 2 --options {SMALL} width=8",
    "train mnist-spins": "--limit 64 --epochs 1 --options dim=4",
    "train sudoku": "--source generated --train 8 --test 4 --epochs 1 --iterations 2 "
    f"--options {SMALL} width=16",
    "train solve-sudoku": "--source generated --train 110 --test 2 --epochs 1 --iterations 2 "
    "--window 1 --batch 60 --boards 2 --carried 50 --start sudoku-solver --options features=4 width=8",
    "train language-model": "--steps 4 --batch 2 --options dim=8 heads=2 layers=1 length=8 windows=3 "
    "evaluate_every=2",
}
PICTURES = {
    "train classify": {"report.png", "comparison.png", "report-convergence.csv", "comparison-noise.csv"},
    "train mnist-spins": {"report.png", "report-extrapolation.csv"},
}  # fmt: skip


@pytest.mark.slow
def test_the_demo_draws_three_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one epoch and few boards; its last line says what to do next."""
    threads = torch.get_num_threads()
    try:
        main(["demo", "--epochs", "1", "--boards", "4", "--out", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    shown = capsys.readouterr().out
    for name in ("one-energy", "sudoku", "own-energy"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) >= 3 and f"{name}.png" in shown
        for row in rows:
            assert all(0 <= float(v) <= 100 for k, v in row.items() if k.endswith("(%)") and v)
    assert "own_energy.md" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if "spins" in n else []) for n in RUNS],
)
def test_a_small_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "spins" in name and not (HAS_DATA / "mnist").is_dir():
        pytest.skip("no MNIST under IMPLICIT_ATTN_DATA")
    out, threads = tmp_path / "out", torch.get_num_threads()
    try:
        main([*name.split(), *RUNS[name].split(), "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    made = {path.name for path in out.iterdir()}
    assert {"checkpoint.safetensors", "checkpoint.csv", "weights.safetensors"} <= made
    assert PICTURES.get(name, set()) <= made
    with (out / "checkpoint.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == [str(k + 1) for k in range(len(rows))]
    assert str(out) in capsys.readouterr().out
    if name != "train mnist-spins":
        model, progress = load_model(out / "weights.safetensors")
        assert len(progress["history"]) == len(rows) and not model.training


@pytest.mark.defect("B6")
def test_an_earlier_run_is_kept_resumed_or_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "vit-images", *RUNS["train vit-images"].split(), "--out", str(tmp_path / "a")]
    weights = tmp_path / "a" / "weights.safetensors"

    def refused(*more: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main([*words, *more])
        assert stop.value.code == 2
        return capsys.readouterr().err

    assert "no checkpoint at" in refused("--resume") and not (tmp_path / "a").exists()
    main(words)
    first = load_model(weights)[0].state_dict()
    said = refused()
    assert "argument --out: " in said and "--resume" in said and "checkpoint.safetensors" in said
    assert "exclude each other" in refused("--resume", "--overwrite")
    assert "made with other settings" in refused("--resume", "--seed", "3")
    main([*words, "--resume"])  # nothing is left to do but the report
    assert all(torch.equal(a, first[n]) for n, a in load_model(weights)[0].state_dict().items())
    main([*words, "--overwrite", "--seed", "3"])
    assert not torch.equal(next(load_model(weights)[0].parameters()), next(iter(first.values())))


@pytest.mark.defect("C6")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("train classify --limit 1", "argument --limit: limit must leave training images of two"),
        ("train vit-images --limit 9 --options dim=7", "heads must divide dim=7"),
        ("train vit-images --limit 9 --options foo=3", "unexpected keyword argument 'foo'"),
        ("train vit-images --limit 9 --options foo", "argument --options: options must be KEY"),
        ("train vit-images --limit 9 --options rtol=0.1", "rtol is for hyperset-equilibrium and"),
        ("train vit-images --limit 9 --options rate=-1", "rate must be"),
        ("train vit-images --accelerator cuda", "accelerator must be 'cpu' or 'auto'"),
        ("train sudoku --source list --train 100000", "train"),
        ("train solve-sudoku --givens 30 20", "argument --givens: givens must be LEAST <= MOST"),
        ("train solve-sudoku --source list --start sudoku-solver --train 9", "or 38000"),
        ("train solve-sudoku --window 40", "argument --window: window must be <= iterations"),
        ("train solve-sudoku --weights digits-hyperset", "argument --weights: weights must be"),
        ("train language-model --epochs 3", "argument --epochs: epochs must be left out"),
        ("train language-model --attention linear", "got 'linear'"),
        ("train language-model --generate 3 --steps 5", "argument --steps: steps is for"),
        ("train language-model --generate 3 --prompt Tübingen", "alphabet"),
        ("train language-model --generate 3 --weights mnist-hyperset", "is no language model"),
    ],
)
def test_what_is_refused_before_the_work(
    words: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a card")
    if "list" in words and not (HAS_DATA / "sudoku").is_dir():
        pytest.skip("no list of puzzles")
    out = [] if "--generate" in words else ["--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        main([*words.split(), *out])
    line = capsys.readouterr().err.removeprefix(
        "no run in runs/language-decoder: the weights that come along\n"
    )
    assert stop.value.code == 2 and part in line and line.count("\n") == 1
    assert not (tmp_path / "out" / "checkpoint.safetensors").exists()


def test_a_missing_extra_is_named_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as a fault of an option."""
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit) as stop:
        main(["train", "vit-images", "--out", str(tmp_path)])
    line = capsys.readouterr().err
    assert stop.value.code == 2 and "argument" not in line
    assert line.startswith("implicit-attn train vit-images: error: sklearn.datasets could not be")


def test_presets_and_what_overrides_them() -> None:
    preset = {"iterations": 5, "random_iterations": [1, 9], "initial_step": 0.0}
    assert VitImages().adjusted(preset) == preset
    asked = VitImages(iterations=7, rate=0.5, options=("rate=0.25", "step_size=shared", "layers=2"))
    assert asked.adjusted(preset) == {"iterations": 5}
    found = asked.values("iterations", "layers").items()
    assert found >= {"iterations": 7, "rate": 0.25, "step_size": "shared", "layers": 2}.items()
    crate = VitImages(model="crate").adjusted({"width": 3, "initial_step": 0.1, "rate": 1})
    assert crate == {"rate": 1}
    solved = Sudoku(model="equilibrium").adjusted({"iterations": 16, "random_iterations": [12, 20]})
    assert solved == {"iterations": 50, "random_iterations": None, "rtol": 1e-3}
    masked = MaskedPatches(model="hyperset-equilibrium").job(False)
    assert masked.recipe.batch == 32 and masked.recipe.iterations is None
    assert masked.settings["model"]["backbone"]["width"] == 772


def test_the_comparison(tmp_path: Path) -> None:
    """Rivals of equal sizes but for the layer; the least accurate first; scikit-learn's own score."""
    program = Classify(out=tmp_path, epochs=1, limit=64)
    job, data = program.job(True), load("digits").first(64)
    rivals = program._rivals(data, {})
    size = {name: sum(p.numel() for p in model.parameters()) for name, (model, _) in rivals.items()}
    assert size[ENCODER] - size[IDENTITY] == 33_472  # beside the block's 33,092
    assert sum(p.numel() for p in job.model.parameters()) - size[IDENTITY] == 33_092
    logistic = logistic_regression(data)
    assert logistic["parameters"] == 650 and 0.5 < logistic["accuracy"] < 1
    found = compare("own", rivals | {"own": (job.model, 1.0)}, logistic, data)
    table = found.comparison
    assert {row["model"] for row in table} == {IDENTITY, ENCODER, LOGISTIC, "own"}
    assert [row["accuracy"] for row in table] == sorted(row["accuracy"] for row in table)
    for name in ("own", ENCODER):
        clean, *noisy = [row["accuracy"] for row in found.noise if row["model"] == name]
        assert clean == next(row["accuracy"] for row in table if row["model"] == name)
        assert len(noisy) == 5
    assert "points against the encoder layer" in str(found)


def test_frames_of_a_board() -> None:
    torch.manual_seed(0)
    model = BoardSolver(units().tolist(), features=4, width=8).eval()
    puzzle = unique_puzzles(1, 0)[0][0]
    found = frames_of(model, puzzle, (1, 3, 6))
    assert [frame.iterations for frame in found] == [1, 3, 6]
    for frame in found:
        chances = model(puzzle[None], iterations=frame.iterations)[0].softmax(-1)  # with ties
        own = chances.gather(1, frame.digits[:, None] - 1)[:, 0]
        torch.testing.assert_close(own, chances.amax(-1))
        torch.testing.assert_close(frame.certainty, own)


def test_small_models_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    small, large = torch.nn.Linear(9, 9), torch.nn.Linear(1000, 1000)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    choose_threads(small)
    monkeypatch.delenv("OMP_NUM_THREADS")
    choose_threads(large)
    assert asked == []
    choose_threads(small)
    assert asked == [1]


def test_an_equilibrium_writes_with_other_numbers_of_evaluations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "tale.txt"
    text.write_text("The cat sat on the mat. " * 40)
    kind = ["train", "language-model", "--model", "equilibrium", "--out", str(tmp_path / "out")]
    tiny = ["dim=8", "heads=2", "length=8", "windows=3", "evaluate_every=2", "gradient=implicit"]
    words = ["--steps", "4", "--batch", "2", "--iterations", "3", "--text", str(text)]
    main([*kind, *words, "--options", *tiny])
    assert "text: tale, 912 + 48 characters, 12 different ones" in capsys.readouterr().out
    for more in ([], ["--iterations", "2"], ["--iterations", "20"]):
        main([*kind, "--generate", "5", "--prompt", "The", *more])
        assert capsys.readouterr().out.startswith("The")
