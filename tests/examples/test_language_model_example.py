"""The language model of the examples: it trains, goes on where it stopped, writes, and refuses."""

from __future__ import annotations

import csv
import importlib.util
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_attn.checkpoint import read_progress
from implicit_attn.models import load_model

for module in ("safetensors", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="the example needs the extra [examples]")

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = [
    "--dim", "8", "--heads", "2", "--length", "8", "--steps", "4", "--batch", "2", "--windows", "3",
    "--evaluate-every", "2", "--accelerator", "cpu", "--log-every", "1",
]  # fmt: skip


def load_example() -> Any:
    path = ROOT / "examples" / "language_model.py"
    found = importlib.util.spec_from_file_location("example_language_model", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


EXAMPLE = load_example()


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "tale.txt"
    path.write_text("The cat sat on the mat. " * 20)
    return str(path)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    with torch.random.fork_rng(devices=[]):
        yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "words",
    [
        ["--layers", "2", "--descent", "nesterov", "--lookahead", "queries"],
        ["--model", "equilibrium", "--iterations", "3", "--attention", "light-newton-taylor"],
        ["--layers", "1", "--attention", "newton-taylor", "--order", "0"],
    ],
)
def test_it_trains_and_writes(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    EXAMPLE.main([*TINY, *words, "--text", text, "--out", str(out)])
    said = capsys.readouterr().out
    assert "text: tale, 456 + 24 characters, 12 different ones" in said
    assert "this model" in said and "counts of pairs" in said
    with (out / "evaluations.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["2", "4"]
    kept = read_progress(out / "weights.safetensors")["settings"]
    assert kept["alphabet"] == " .Tacehmnost" and kept["model"]["vocabulary"] == 12
    generated = ["--generate", "20", "--out", str(out), *words]
    EXAMPLE.main([*generated, "--prompt", "The cat"])
    first = capsys.readouterr().out
    assert first.startswith("The cat") and len(first) == 7 + 20 + 1
    assert set(first[:-1]) <= set(kept["alphabet"])
    EXAMPLE.main(
        ["--generate", "20", "--prompt", "The cat", "--weights", str(out / "weights.safetensors")]
    )
    assert capsys.readouterr().out == first  # the seed is the same


def test_a_run_that_was_stopped_goes_on(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = [*TINY, "--layers", "1", "--descent", "momentum", "--text", text]
    EXAMPLE.main([*words, "--out", str(whole)])
    build = EXAMPLE.build_training

    def stopping(*arguments: Any, **options: Any) -> Any:
        training = build(*arguments, **options)
        step = training.step

        def count(*parts: Any) -> Any:
            training.stopping = training.batch == 2  # as after Ctrl-C
            return step(*parts)

        training.step = count
        return training

    monkeypatch.setattr(EXAMPLE, "build_training", stopping)
    with pytest.raises(SystemExit) as stop:
        EXAMPLE.main([*words, "--out", str(cut)])
    assert stop.value.code == 130 and not (cut / "weights.safetensors").exists()
    monkeypatch.setattr(EXAMPLE, "build_training", build)
    EXAMPLE.main([*words, "--out", str(cut), "--resume"])
    models = [load_model(folder / "weights.safetensors")[0] for folder in (whole, cut)]
    for ours, theirs in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(ours, theirs)
    names = ("steps.csv", "evaluations.csv")
    assert all((whole / name).read_text() == (cut / name).read_text() for name in names)
    with pytest.raises(SystemExit) as stop:  # another text has other characters to learn
        EXAMPLE.main([*words[:-1], "python-help", "--out", str(cut), "--resume"])
    assert stop.value.code == 2
    assert "other settings" in capsys.readouterr().err


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as stop:
            EXAMPLE.main(["--out", str(tmp_path / "out"), *words])
        said = capsys.readouterr().err
        assert stop.value.code == 2 and len(said.splitlines()) == 1, said
        assert not (tmp_path / "out" / "checkpoint.safetensors").exists()
        return said

    return run


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--text", "no-such-text"], "--text"),
        (["--text", "missing.txt"], "--text"),
        (["--attention", "linear"], "--attention"),
        (["--descent", "adam"], "--descent"),
        (["--lookahead", "scaled"], "--lookahead"),
        (["--order", "2"], "--order"),
        (["--order", "-1", "--attention", "newton-taylor"], "--order"),
        (["--iterations", "3"], "--iterations"),
        (["--model", "equilibrium", "--descent", "momentum"], "--descent"),
        (["--model", "equilibrium", "--iterations", "1"], "--iterations"),
        (["--model", "equilibrium", "--damping", "0"], "--damping"),
        (["--heads", "5"], "--heads"),
        (["--length", "60000", "--dim", "8"], "--length"),
        (["--rate", "nan"], "--rate"),
        (["--dropout", "1"], "--dropout"),
        (["--dim", "65536", "--layers", "100"], "--dim"),
        (["--resume"], "--resume"),
        (["--generate", "3"], "--weights"),
        (["--generate", "0"], "--generate"),
        (["--generate", "3", "--temperature", "-1"], "--temperature"),
    ],
)
def test_what_it_refuses(
    words: list[str], option: str, refused: Callable[..., str], text: str
) -> None:
    given = [] if "--text" in words or "--length" in words else ["--text", text]
    assert f"{option}" in refused(*given, *words)


def test_prompts_and_weights_that_do_not_fit(
    refused: Callable[..., str], text: str, tmp_path: Path
) -> None:
    out = tmp_path / "trained"
    EXAMPLE.main([*TINY, "--layers", "1", "--text", text, "--out", str(out)])
    weights = ["--weights", str(out / "weights.safetensors"), "--generate", "3"]
    assert "argument --prompt: text must hold symbols of the alphabet" in refused(
        *weights, "--prompt", "Tübingen"
    )
    assert "argument --prompt: must hold a character" in refused(*weights, "--prompt", "")
    (out / "weights.safetensors").write_bytes(b"nothing")
    assert "--weights" in refused(*weights)
