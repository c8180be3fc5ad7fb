"""The digits example: its report, and that an interruption loses nothing.

The script runs inside the test process, so that Ctrl-C can be pressed at an exact batch.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import re
import runpy
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_attn.models import ImageClassifier, load_model
from implicit_attn.optional import require

for module in ("sklearn", "safetensors", "matplotlib", "tqdm"):
    pytest.importorskip(module, reason="the example needs the extra [examples]")

SCRIPT = Path(__file__).resolve().parent.parent.parent / "implicit_attn/programs/classify.py"
OWN = {
    "checkpoint.safetensors", "convergence.csv", "epochs.csv", "extrapolation.csv", "report.png",
}  # fmt: skip
COMPARED = {
    "baseline-encoder.safetensors", "baseline-identity.safetensors", "comparison.csv",
    "comparison.png", "confidence.csv", "robustness.csv",
}  # fmt: skip
SMALL = ["--limit", "128", "--epochs", "2", "--batch", "16", "--dim", "16", "--memories", "16"]


@contextlib.contextmanager
def surroundings(arguments: list[str]) -> Iterator[None]:
    """Command line, random state and signal handler as the script expects them, and back."""
    argv, handler, random = sys.argv, signal.getsignal(signal.SIGINT), torch.get_rng_state()
    sys.argv = [str(SCRIPT), *SMALL, *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        sys.argv = argv
        signal.signal(signal.SIGINT, handler)
        torch.set_rng_state(random)


def run(*arguments: str) -> tuple[Any, str]:
    """Exit status and everything that was written; 0 is success, a text is a message."""
    output = io.StringIO()
    code: Any = 0
    with (
        surroundings(list(arguments)),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as end:
            code = end.code
    return code, output.getvalue()


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Presses Ctrl-C when the training forward passes whose numbers are in the list are made."""
    original = ImageClassifier.forward
    at: list[int] = []
    count = itertools.count(1)

    def forward(self: ImageClassifier, images: torch.Tensor) -> torch.Tensor:
        if self.training and next(count) in at:
            signal.raise_signal(signal.SIGINT)
        return original(self, images)

    monkeypatch.setattr(ImageClassifier, "forward", forward)
    yield at


def weights(folder: Path) -> dict[str, bytes]:
    """Everything in the checkpoints but times."""
    load = require("safetensors.torch", extra="examples").load_file
    return {
        f"{path.name}:{name}": tensor.numpy().tobytes()
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load(str(path)).items()
    }


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    """Numbers as numbers, and names as they are."""
    with (folder / f"{name}.csv").open(newline="") as file:
        return [{key: read(value) for key, value in row.items()} for row in csv.DictReader(file)]


def read(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One uninterrupted run that the tests share."""
    folder = tmp_path_factory.mktemp("finished")
    code, output = run("--out", str(folder))
    assert code == 0, output
    return folder, output


def test_report_and_tables(finished: tuple[Path, str]) -> None:
    folder, output = finished
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in folder.iterdir()} == OWN | COMPARED
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    for text in ("test accuracy", "Accuracy against evaluations", "solves converged"):
        assert text in output


def test_the_models_beside_it(finished: tuple[Path, str]) -> None:
    """Each in the table, with the size that it says, from the worst to the best."""
    rows = {row["model"]: row for row in table(finished[0], "comparison")}
    assert set(rows) == {"equilibrium", "encoder layer", "identity", "logistic regression"}
    assert rows["logistic regression"]["parameters"] == 65 * 10
    less = rows["equilibrium"]["parameters"] - rows["identity"]["parameters"]
    encoder = torch.nn.TransformerEncoderLayer(16, 4, 16)
    more = rows["encoder layer"]["parameters"] - rows["identity"]["parameters"]
    assert more == sum(parameter.numel() for parameter in encoder.parameters())
    assert 0.9 * more < less <= more
    accuracies = [row["accuracy"] for row in rows.values()]
    assert accuracies == sorted(accuracies)
    own = table(finished[0], "epochs")[-1]["test_accuracy"]
    assert rows["equilibrium"]["accuracy"] == pytest.approx(own)
    for name in rows:
        assert re.search(rf"^ *{name} +[\d.]+ %", finished[1], re.MULTILINE), name


def test_robustness_and_confidence(finished: tuple[Path, str]) -> None:
    """Harmless images are those of the table; every signal is there; the text says what follows."""
    accuracy = {row["model"]: row["accuracy"] for row in table(finished[0], "comparison")}
    for row in table(finished[0], "robustness"):
        assert row["model"] in ("equilibrium", "encoder layer")
        if row["strength"] == 0:
            assert row["accuracy"] == pytest.approx(accuracy[row["model"]])
    rows = table(finished[0], "confidence")
    own = ("softmax", "energy", "residual", "flatness", "profile", "features")
    assert {(row["model"], row["signal"]) for row in rows} == {
        *(("equilibrium", name) for name in own),
        *(("encoder layer", name) for name in ("softmax", "features")),
    }
    for word in ("- Accuracy on", "- Noise: ", "- Occlusion: ", "- Inverted (359 images): "):
        assert word in finished[1]


def test_without_the_baselines(tmp_path: Path) -> None:
    """The equilibrium alone; a later --resume may still add them."""
    code, output = run("--baselines", "none", "--out", str(tmp_path))
    assert code == 0 and "logistic" not in output
    assert {path.name for path in tmp_path.iterdir()} == OWN
    code, output = run("--resume", "--out", str(tmp_path))
    assert code == 0, output
    assert {path.name for path in tmp_path.iterdir()} == OWN | COMPARED
    code, output = run("--baselines", "none", "--out", str(tmp_path), "--overwrite")
    assert code == 0, output
    assert {path.name for path in tmp_path.iterdir()} == OWN


def test_the_checkpoint_says_how_its_model_is_built(finished: tuple[Path, str]) -> None:
    model, progress = load_model(finished[0] / "checkpoint.safetensors")
    assert isinstance(model, ImageClassifier)
    assert progress["settings"]["model"]["backbone"]["name"] == "equilibrium"


def test_the_energy_of_hyperset(tmp_path: Path) -> None:
    """The older model, whose energy sees the image in 1/2 |z - x|^2 alone."""
    arguments = ("--model", "hyperset", "--epochs", "1", "--patch", "4", "--out", str(tmp_path))
    code, output = run(*arguments)
    assert code == 0, output
    assert "digits, hyperset, tokens readout" in output
    signals = {row["signal"] for row in table(tmp_path, "confidence") if row["model"] == "hyperset"}
    assert signals == {"softmax", "energy", "residual", "profile", "features"}
    assert {path.name for path in tmp_path.iterdir()} == OWN | COMPARED


@pytest.mark.parametrize(
    ("model", "flag"),
    [("equilibrium", "--bound"), ("equilibrium", "--maximum"), ("hyperset", "--layers"),
     ("hyperset", "--dropout")],
)  # fmt: skip
def test_options_of_the_other_model_are_refused(tmp_path: Path, model: str, flag: str) -> None:
    value = "0.5" if flag == "--dropout" else "3"
    code, output = run("--model", model, flag, value, "--out", str(tmp_path))
    assert code == 2 and f"{flag} is for --model" in output


def test_epochs(finished: tuple[Path, str]) -> None:
    rows = table(finished[0], "epochs")
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[1]["loss"] < rows[0]["loss"]
    for row in rows:
        assert row["converged"] >= 0.99
        assert row["adjoint_converged"] >= 0.99
        assert row["evaluations"] <= 25
        assert 0 < row["adjoint_residual"] <= 1e-3
        assert row["most_evaluations"] <= 60


def test_energy_falls_along_the_trace(finished: tuple[Path, str]) -> None:
    rows = table(finished[0], "convergence")
    size = max(abs(row["energy"]) for row in table(finished[0], "extrapolation"))
    rounding = 2e-6 * size  # float32 sums
    assert all(row["largest_rise"] <= rounding for row in rows)
    drops = [row["energy_drop"] for row in rows]
    assert drops[0] == 0 and drops[-1] < -100 * rounding
    assert all(b <= a + rounding for a, b in itertools.pairwise(drops))
    residuals = [row["residual"] for row in rows]
    assert residuals == sorted(residuals, reverse=True)
    assert residuals[-1] <= 1e-5
    assert rows[-1]["converged"] == 1.0


def test_extrapolation(finished: tuple[Path, str]) -> None:
    rows = table(finished[0], "extrapolation")
    budgets = [row["evaluations"] for row in rows]
    assert budgets == sorted(budgets) and budgets[0] == 1
    trained = budgets[-1] / 4
    assert trained in budgets and 2 * trained in budgets
    assert rows[-1]["residual"] < rows[0]["residual"]
    assert all(0 <= row["accuracy"] <= 1 for row in rows)
    assert rows[-1]["unchanged"] >= 0.997  # all but one image
    said = re.search(r"With (\d+) evaluations, 4 times .* ([\d.]+) % of the pred", finished[1])
    assert said is not None and float(said[1]) == budgets[-1]
    assert float(said[2]) == pytest.approx(100 * rows[-1]["unchanged"], abs=0.01)


@pytest.mark.parametrize(
    "presses",
    [[8], [2, 10, 16], [33, 48]],
    ids=lambda presses: "-".join(map(str, presses)),
)
def test_interrupted_run_continues_exactly(
    finished: tuple[Path, str], tmp_path: Path, ctrl_c: list[int], presses: list[int]
) -> None:
    """Ctrl-C anywhere in the two epochs of 8 batches, of the model and of the two others that are
    trained beside it: the same bits in the end as without."""
    ctrl_c += presses
    flags = ["--out", str(tmp_path)]
    for _ in presses:
        code, output = run(*flags)
        assert code == 130, output
        assert "holds everything: continue with --resume" in output
        flags = ["--resume", "--out", str(tmp_path)]
    code, output = run(*flags)
    assert code == 0, output
    assert weights(tmp_path) == weights(finished[0])
    whole, parts = table(finished[0], "epochs"), table(tmp_path, "epochs")
    for first, second in zip(whole, parts, strict=True):
        del first["seconds"], second["seconds"]
        assert first == second
    for name in ("convergence", "extrapolation", "robustness"):
        assert table(tmp_path, name) == table(finished[0], name)
    for name in ("comparison", "confidence"):  # a NaN, of no mistakes, is not itself
        assert str(without_times(tmp_path, name)) == str(without_times(finished[0], name))


def without_times(folder: Path, name: str) -> list[dict[str, Any]]:
    return [dict(row, seconds=0) for row in table(folder, name)]


def test_second_ctrl_c_leaves_at_once(tmp_path: Path, ctrl_c: list[int]) -> None:
    """... with the checkpoint of the first epoch untouched."""
    ctrl_c += [10]
    assert run("--out", str(tmp_path))[0] == 130
    before = weights(tmp_path)
    assert press_twice(tmp_path) == (130, "")
    assert weights(tmp_path) == before


def press_twice(folder: Path) -> tuple[Any, str]:
    original = ImageClassifier.classify

    def classify(self: ImageClassifier, z: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return original(self, z)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageClassifier, "classify", classify)
        return run("--resume", "--out", str(folder))


def test_resume_of_a_finished_run_reports_again(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    before = weights(folder)
    (folder / "report.png").unlink()
    assert run("--resume", "--out", str(folder))[0] == 0
    assert (folder / "report.png").exists()
    assert weights(folder) == before


@pytest.mark.parametrize(
    "flags", [("--rate", "0.5"), ("--seed", "1"), ("--dim", "24"), ("--readout", "class")], ids=str
)
def test_other_settings_are_refused(finished: tuple[Path, str], flags: tuple[str, str]) -> None:
    """Also where the model itself does not fit: the settings are what the user knows."""
    folder, _ = finished
    before = weights(folder)
    code, output = run("--resume", "--out", str(folder), *flags)
    assert code == 2 and "was made with other settings" in output
    assert weights(folder) == before


def test_nothing_to_resume(tmp_path: Path) -> None:
    """A mistake on the command line is answered by a line, not by a traceback."""
    code, output = run("--resume", "--out", str(tmp_path / "nowhere"))
    assert code == 2 and "nothing to resume" in output


@pytest.mark.parametrize(
    ("flag", "value", "name"),
    [("--epochs", "0", "epochs"), ("--batch", "0", "size|batch"), ("--patch", "3", "patch"),
     ("--rtol", "-1", "rtol"), ("--max-steps", "0", "max_steps|max-steps")],
)  # fmt: skip
def test_bad_options_are_named(tmp_path: Path, flag: str, value: str, name: str) -> None:
    code, output = run("--out", str(tmp_path), flag, value)
    assert code == 2
    assert re.search(name, output) and value in output
