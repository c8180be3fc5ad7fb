"""Tables of trained models: command lines, how runs go on, what is said of claims, what layers learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning_fabric", reason="the benchmarks train by programs of [examples]")
pytest.importorskip("matplotlib", reason="the benchmarks train by programs of [examples]")

from benchmarks import images, language, learning, trainings
from benchmarks.learning import ABLATIONS, ROWS, TokenModel, perform, recall, task_of
from benchmarks.trainings import Run
from implicit_attn.cli import read
from implicit_attn.programs.backbones import MaskedPatches, VitImages
from implicit_attn.programs.language_model import Language


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that a table asks for; none is trained."""
    seen: list[Run] = []

    def note(runs: list[Run], *_: object) -> list[Run]:
        seen.extend(runs)
        raise SystemExit

    for module in (images, language):
        monkeypatch.setattr(module, "perform", note)
    return seen


@pytest.mark.parametrize(
    ("show", "program", "number"),
    [(language.forms, Language, 41), (language.equilibrium, Language, 63),
     (images.cifar10, VitImages, 5), (images.masked, MaskedPatches, 12)],
)  # fmt: skip
def test_the_programs_take_every_command_line(
    show: object, program: type, number: int, planned: list[Run]
) -> None:
    with pytest.raises(SystemExit):
        show()  # type: ignore[operator]
    assert len({run.folder(Path()) for run in planned}) == len(planned) == number
    for run in planned:
        assert read(program, run.command[1:]).seed == run.seed


def test_runs_are_made_once_and_failures_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 40)
    words = ("language-model", "--text", str(tmp_path / "text.txt"), "--steps", "2", "--batch", "2")
    small = ("dim=8", "heads=2", "length=8", "windows=3", "evaluate_every=1", "layers=1")
    good, bad = Run("plain", 0, (*words, *small), "tiny"), Run("bad", 0, (*words, "heads=7"))
    assert trainings.perform([good, bad], tmp_path, 2) == [good]
    assert "bad-0: ended with 2" in capsys.readouterr().err
    assert trainings.perform([good], tmp_path, 2, train=False) == [good]
    with pytest.raises(SystemExit, match="run with other options"):
        trainings.perform([Run("plain", 0, words, "tiny")], tmp_path, 2)
    losses = {good: language.read_losses(good.folder(tmp_path))}
    assert list(losses[good]) == [1, 2]
    assert language.lines(losses, "tiny", tmp_path)[0]["form"] == "plain"
    found = language.measured(good.folder(tmp_path), str(tmp_path / "text.txt"))
    assert set(found) == {"parameters", "12", "seconds"}  # a stack has one number


def a_run(row: str, seed: int = 0) -> Run:
    return Run(row, seed, (), "tiny")


CURVES = {
    a_run("plain"): {1: 3.0, 2: 2.0},
    a_run("plain", 1): {1: 3.1, 2: 2.1},
    a_run("momentum"): {1: 2.9, 2: 1.9},
    a_run("momentum", 1): {1: 3.2, 2: 2.0},
    a_run("nesterov"): {1: 2.9, 2: 2.05},
    a_run("light-newton-taylor"): {1: 3.0, 2: 2.005},
}


def test_claims_are_of_pairs_with_one_seed(tmp_path: Path) -> None:
    apart = language.differences(CURVES, "tiny", "momentum", "plain")
    assert apart == {0: pytest.approx({1: -0.1, 2: -0.1}), 1: pytest.approx({1: 0.1, 2: -0.1})}
    found = language.verdicts(CURVES, "tiny")
    assert [line.split(": ")[1].split(" (")[0] for line in found] == [
        "seen at the end", "not seen", "not seen", "not measured", "not measured", "seen",
    ]  # fmt: skip
    assert "(-0.1000 -0.1000; below at 3 of 4 evaluations)" in found[0]
    language.draw(tmp_path / "forms.png", CURVES)
    assert (tmp_path / "forms.png").read_bytes()[:4] == b"\x89PNG"


# What layers learn.


@pytest.mark.parametrize("row", [name for name, build in (ROWS | ABLATIONS).items() if build])
def test_a_row_trains_every_weight(row: str) -> None:
    torch.manual_seed(0)
    build = (ROWS | ABLATIONS)[row]
    assert build is not None
    layer, x = build(5, 8, 2), torch.randn(3, 5, 8, requires_grad=True)
    out = layer(x)
    assert out.shape == x.shape
    (out * torch.randn_like(out)).sum().backward()
    for weight in [x, *(each for each in layer.parameters() if each.requires_grad)]:
        assert weight.grad is not None and weight.grad.isfinite().all()


def test_no_test_image_is_trained_on() -> None:
    for name in ("digits", "same-different"):
        task = task_of(name, None)
        seen, unseen = (
            {row.numpy().tobytes() for row in part[0]} for part in (task.train, task.test)
        )
        assert not seen & unseen


def test_recall_is_answered_by_the_pairs() -> None:
    pairs, values = recall(50).train
    for sequence, value in zip(pairs, values, strict=True):
        (place,) = (sequence[1:, 0] == sequence[0, 0]).nonzero().flatten().tolist()
        assert sequence[1 + place, 1] == value
    model = TokenModel(recall(10), lambda n, d, h: torch.nn.Identity(), 1, "query")
    other = pairs.clone()
    other[:, 1:] = pairs[:, 1:].flip(0)
    assert torch.equal(model(pairs), model(other))  # nothing is mixed: only the first token is read


def test_a_command_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "tasks": ("digits",),
        "rows": ("logistic", "per-token", "block"),
        "readouts": ("class",),
    }
    options |= {"limit": 100, "epochs": 1, "seeds": 2, "rates": (1e-3, 3e-3), "out": tmp_path}
    threads, asked = torch.get_num_threads(), list[learning.Run]()

    def until_the_sixth(run: learning.Run) -> dict[str, object]:
        asked.append(run)
        if len(asked) == 6:
            raise KeyboardInterrupt
        return perform(run)

    monkeypatch.setattr(learning, "perform", until_the_sixth)
    try:
        with pytest.raises(KeyboardInterrupt):
            learning.main(**options)  # type: ignore[arg-type]
        rows = learning.main(**options)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)
    assert len(asked) == len(set(asked)) + 1 == 1 + (3 + 1) + 2 * (2 + 2)
    assert [row["row"] for row in rows] == ["logistic", "per-token", "block"]
    assert rows[2]["converged (worst epoch)"] == 1.0 and "evaluations" not in rows[1]
