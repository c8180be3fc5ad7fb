"""The shipped models by name: each is built, loaded, and as good as the list says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import implicit_attn
import solvers
from implicit_attn import studies
from implicit_attn.data import SudokuData, load, load_sudoku, load_text
from implicit_attn.models import load_model, read_settings
from implicit_attn.models.language import SymbolModel
from implicit_attn.weights import load_pretrained, pretrained_models, weights_path

pytest.importorskip("safetensors", reason="the weights are read by safetensors")
DATA = Path(os.environ.get("IMPLICIT_ATTN_DATA", "/nowhere"))
NAMES, ROOT = list(pretrained_models()), Path(__file__).resolve().parents[1]
UNROLLED, SOLVED, MNIST = "digits-hyperset", "digits-hyperset-equilibrium", "mnist-hyperset"


def measured(name: str) -> float:
    return float(pretrained_models()[name].measured.split()[0])


def needs(folder: str) -> pytest.MarkDecorator:
    here = (DATA / folder).is_dir()
    return pytest.mark.skipif(not here, reason=f"no {folder} under IMPLICIT_ATTN_DATA")


def test_the_list_and_the_folder_are_the_same() -> None:
    folder = Path(implicit_attn.__file__).parent / "weights"
    assert {path.stem for path in folder.glob("*.safetensors")} == set(NAMES)
    assert implicit_attn.load_pretrained is load_pretrained


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_loaded_as_it_is_described(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = load_pretrained(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    row = pretrained_models()[name]
    assert row.path.stat().st_size <= 3 * 2**20  # small enough to ship
    assert sum(parameter.numel() for parameter in model.parameters()) == row.parameters
    assert float(row.measured.split()[0]) > 0 and row.command.startswith("python examples/")
    assert (ROOT / row.command.split()[1]).is_file()


@pytest.mark.parametrize(
    "name",
    [UNROLLED, SOLVED, *(pytest.param(n, marks=needs("mnist")) for n in (MNIST, "mnist-spins"))],
)
def test_images_are_read(name: str) -> None:
    """Of the digits all, of which another machine may tip one; of MNIST the first 400."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    data = load(name.split("-")[0])
    with torch.no_grad():
        found = load_pretrained(name)(data.test_images[:400]).argmax(1)
    right = 100 * (found == data.test_labels[:400]).double().mean().item()
    few = 101 / 359 if name.startswith("digits") else 1.5
    assert right == pytest.approx(measured(name), abs=few)


def solver_and_boards(name: str) -> tuple[Any, SudokuData]:
    """A board solver and the boards that its training has held out."""
    model, settings = load_model(weights_path(name))
    return model, load_sudoku(settings["train"], 1000, source="list", seed=settings["seed"])


@needs("sudoku")
@pytest.mark.parametrize(
    ("name", "times", "least"),
    [("sudoku-solver", 1, 0.9), ("sudoku-solver-easy", 1, 0.45), ("sudoku-solver-easy", 4, 0.85)],
)
def test_sudoku(name: str, times: int, least: float) -> None:
    """On the first of the held-out boards, with so many times the iterations of training."""
    model, data = solver_and_boards(name)
    boards, answers = data.test_puzzles[:60], data.test_solutions[:60]
    with torch.no_grad():
        found = model(boards, iterations=times * model.iterations).argmax(-1) + 1
    solved = ((found == answers) | (boards > 0)).all(1).double().mean().item()
    assert least <= solved <= 1


@needs("sudoku")
def test_most_boards_converge_and_those_that_agree_are_right() -> None:
    """A solved board is told from others without its solution, and strings are boards."""
    model, data = solver_and_boards("sudoku-solver")
    boards, answers = data.test_puzzles[:24], data.test_solutions[:24]
    texts = ["".join(map(str, board)) for board in boards.tolist()]
    with torch.no_grad():
        rested = model.solve(texts, stop="converged", on_failure="ignore")
        agreed = model.solve(boards, on_failure="ignore")
    for answer, least in ((rested, 0.75), (agreed, 0.9)):
        right = (answer.digits == answers).all(1)
        ended = answer.converged | (answer.status == solvers.Status.STOPPED)
        assert ended.double().mean() >= least
        assert right[ended & answer.consistent].all()
    assert agreed.evaluations.double().mean() < 0.8 * rested.evaluations.double().mean()


@needs("text")
@pytest.mark.parametrize(("name", "length"), [("austen-language", 128), ("austen-equilibrium", 64)])
def test_the_language_models_read_and_know_their_alphabet(name: str, length: int) -> None:
    data = load_text("austen")
    assert data.alphabet == read_settings(weights_path(name))["alphabet"]
    starts = torch.linspace(0, len(data.validation) - length - 1, 8).long()
    windows = data.validation[starts[:, None] + torch.arange(length + 1)]
    model = load_pretrained(name)
    for iterations in (None,) if name == "austen-language" else (None, 24, 48):
        options = {} if iterations is None else {"iterations": iterations}
        with torch.no_grad():
            logits = model(windows[:, :-1], **options)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        assert abs(loss.item() - measured(name)) < 0.15  # counts of triples: 1.90


@pytest.mark.parametrize(("name", "nearest"), [
    ("mnist_hyperset", "mnist-hyperset"), ("Sudoku-Solver.safetensors", "sudoku-solver"),
])  # fmt: skip
def test_an_unknown_name_has_the_nearest_ones(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{nearest}"):
        load_pretrained(name)


@pytest.mark.parametrize("name", ["austen-language", "austen-equilibrium"])
def test_the_language_models_write_text(name: str) -> None:
    model = load_pretrained(name)
    assert isinstance(model, SymbolModel) and len(model.alphabet or "") == model.vocabulary
    text = model.generate("It was ", 20, temperature=0.0)
    assert text.startswith("It was ") and len(text) == 27
    for prompt, message in (("5 €", "alphabet.*€"), ("", "prompt")):
        with pytest.raises(ValueError, match=message):
            model.generate(prompt, 3)


# What docs/models.md says of them.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "iterations", "least"),
    [(UNROLLED, [12, 24, 48], 0.99), pytest.param(MNIST, [12, 24], 0.975, marks=needs("mnist"))],
)
def test_accuracies_hold_at_more_iterations(name: str, iterations: list[int], least: float) -> None:
    subject = studies.open_subject(name, samples=2000)
    assert subject.trained == 12
    once, *more = (row["accuracy"] for row in studies.accuracy_by_iterations(subject, iterations))
    assert once >= least and min(more) >= once - 0.002


@pytest.mark.slow
def test_the_equilibrium_is_found_for_every_digit_and_from_anywhere() -> None:
    for row in studies.paths(studies.open_subject(SOLVED), starts=1).summary:
        assert row["distance_largest"] < 1e-2 and row["residual"] < 1e-5
        assert row["accuracy"] >= 0.985 and row["agreement"] == 1.0


@pytest.mark.slow
def test_acceleration_needs_fewer_evaluations_than_forward_iteration() -> None:
    """To the loss, and at least the accuracy, that forward iteration has after training's number."""
    subject = studies.open_subject(SOLVED)
    reach = {row["method"]: row for row in studies.extrapolation(subject, factor=1).reach}
    for name in ("Anderson", "L-BFGS"):
        assert max(reach[name]["to_loss"], reach[name]["to_accuracy"]) <= 0.75 * subject.trained


@pytest.mark.slow
@needs("mnist")
def test_energies_end_lower_and_the_tokens_wider_apart_on_mnist() -> None:
    """From the first to the last iteration; in between they do not move in one direction."""
    found = studies.geometry(studies.open_subject(MNIST, samples=128))
    for energy in found.energies.values():
        assert energy[-1].mean() < energy[0].mean()
    assert (found.rank[-1] > found.rank[0]).all() and (found.angle[-1] > found.angle[0]).all()
