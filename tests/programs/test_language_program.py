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

from implicit_attn.checkpoint import read_progress, save_checkpoint
from implicit_attn.data import load_text
from implicit_attn.models import load_model
from implicit_attn.training import NextToken

for module in ("safetensors", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="the example needs the extra [examples]")

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = [
    "--dim", "8", "--heads", "2", "--length", "8", "--steps", "4", "--batch", "2", "--windows", "3",
    "--evaluate-every", "2", "--accelerator", "cpu", "--log-every", "1",
]  # fmt: skip


def load_example() -> Any:
    path = ROOT / "implicit_attn/programs/language_model.py"
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
    kind = words[:2] if "--model" in words else []
    generated = ["--generate", "20", "--out", str(out), *kind]
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
    swapped = tmp_path / "swapped" / "tale.txt"  # of the same name, size and characters
    swapped.parent.mkdir()
    swapped.write_text(Path(text).read_text()[::-1])
    with pytest.raises(SystemExit) as stop:
        EXAMPLE.main([*words[:-1], str(swapped), "--out", str(cut), "--resume"])
    assert stop.value.code == 2 and "other settings" in capsys.readouterr().err


def test_a_text_of_many_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wide.txt"
    path.write_text("".join(chr(1000 + (k * k) % 301) for k in range(2000)))
    out = ["--out", str(tmp_path / "out")]
    EXAMPLE.main([*TINY, "--layers", "1", "--text", str(path), *out])
    assert "counts of triples" in capsys.readouterr().out


def test_an_equilibrium_writes_with_other_numbers_of_evaluations(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = ["--model", "equilibrium", "--out", str(tmp_path / "out")]
    EXAMPLE.main([*TINY, *kind, "--iterations", "3", "--text", text])
    assert "median evaluations per solve 3" in capsys.readouterr().out
    for more in ([], ["--iterations", "2"], ["--iterations", "20"]):
        EXAMPLE.main([*kind, "--generate", "5", "--prompt", "The", *more])
        assert capsys.readouterr().out.startswith("The")


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
        (["--generate", "3", "--steps", "5"], "--steps"),
        (["--generate", "3", "--model", "equilibrium"], "--weights"),
        (["--temperature", "0.5"], "--temperature"),
        (["--weights", "nope"], "--weights"),
    ],
)
def test_what_it_refuses(
    words: list[str], option: str, refused: Callable[..., str], text: str
) -> None:
    alone = {"--text", "--length", "--generate"} & set(words)
    given = [] if alone else ["--text", text]
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
    assert "takes no --iterations" in refused(
        *weights, "--model", "equilibrium", "--iterations", "9"
    )
    kept = load_model(out / "weights.safetensors")
    for alphabet in (" Tac", "cc" * 6, " Tacehmnost?!"):
        progress = {**kept[1], "settings": {**kept[1]["settings"], "alphabet": alphabet}}
        save_checkpoint(out / "weights.safetensors", kept[0], progress=progress)
        assert "argument --weights" in refused(*weights) and "expects 12" in refused(*weights)
    save_checkpoint(out / "weights.safetensors", kept[0], progress={"settings": {}})
    assert "--weights" in refused(*weights)
    (out / "weights.safetensors").write_bytes(b"nothing")
    assert "--weights" in refused(*weights)


def test_the_shipped_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert EXAMPLE.SHIPPED.stat().st_size <= 3_000_000
    monkeypatch.chdir(tmp_path)  # where no run is
    EXAMPLE.main(["--generate", "40", "--prompt", "It was "])
    said = capsys.readouterr()
    assert "the weights that come along" in said.err
    assert said.out.startswith("It was ") and len(said.out) == 7 + 40 + 1
    model, progress = load_model(EXAMPLE.SHIPPED)
    try:
        data = load_text("austen")
    except FileNotFoundError as error:
        pytest.skip(f"the novels are not at hand: {error}")
    assert data.alphabet == progress["settings"]["alphabet"]
    total, number = NextToken(data, 128, windows=16).evaluate(model, 0, 1)["validation_loss"]
    assert total / number < 1.6  # counts of triples: 1.90
