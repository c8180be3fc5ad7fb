"""The tasks: what is hidden or drawn, losses and measures against closed forms, a training of each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn.data import (
    ImageData,
    SudokuSymmetries,
    board_counts,
    load_sudoku,
    reveal_up_to,
)
from implicit_attn.data.images import hidden_patches
from implicit_attn.data.sudoku import solved, units
from implicit_attn.data.text import split_text
from implicit_attn.models import BoardSolver, HyperSET, MaskedImageModel
from implicit_attn.programs.boards import RTOL, solved_after, solved_when_converged
from implicit_attn.training import (
    CarriedStates,
    MaskedImages,
    NextToken,
    Recipe,
    SudokuCompletion,
    Task,
    Training,
)

for module in ("sklearn", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="needs the extra [examples]")

BOARDS = load_sudoku(6, 5, source="generated", more=0, seed=0)
TEXT = split_text("letters", ["the cat sat on the mat and the rat sat on the cat, " * 8], 0.2)
PIXELS = torch.rand(70, 2, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.zeros(70, dtype=torch.int64)
IMAGES = ImageData("noise", 1, PIXELS[:50], LABELS[:50], PIXELS[50:], LABELS[50:])
TASKS: dict[str, Task] = {
    "boards": SudokuCompletion(BOARDS, SudokuSymmetries(), batch=2),
    "givens": SudokuCompletion(BOARDS, givens=(30, 34)),
    "text": NextToken(TEXT, 10, windows=7, batch=3),
    "images": MaskedImages(IMAGES, 2, batch=6),
}


def batch(task: Task, seed: int = 0) -> tuple[Tensor, Tensor]:
    return task.augmented(task.inputs, task.targets, torch.Generator().manual_seed(seed))


class Guess(nn.Module):
    """Logits or pixels that are a fixed function of the inputs."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        classes = {"NextToken": len(TEXT.alphabet)}.get(type(task).__name__, 9)
        self.images = isinstance(task, MaskedImages)
        self.table = torch.randn(30, classes, generator=torch.Generator().manual_seed(2))

    def forward(self, inputs: Tensor, iterations: int = 1) -> Tensor:
        return inputs.nan_to_num(0.5 / iterations) if self.images else self.table[inputs]


@pytest.mark.parametrize("name", TASKS)
def test_batches_are_drawn_from_the_generator_and_measures_add_up(name: str) -> None:
    task = TASKS[name]
    first, again, other = batch(task), batch(task), batch(task, 1)
    assert all(a.equal(b) for a, b in zip(first, again, strict=True)) or name == "images"
    assert not first[0].nan_to_num(-1).equal(other[0].nan_to_num(-1))
    model = Guess(task)
    found = task.evaluate(model)
    assert tuple(found) == task.names and not model.training
    parts = [task.evaluate(model, rank, 23) for rank in range(23)]  # some have no sample
    for key, pair in found.items():
        total = [sum(part[key][place] for part in parts) for place in (0, 1)]
        assert total == pytest.approx(list(pair), rel=1e-5)


def test_the_loss_of_boards_is_summed_over_unknown_cells_and_averaged_over_answers() -> None:
    task = SudokuCompletion(BOARDS)
    puzzles, solutions = task.inputs, task.targets
    logits = torch.randn(3, len(puzzles), 81, 9, generator=torch.Generator().manual_seed(0))
    single = [
        F.cross_entropy(each.flatten(0, 1), solutions.flatten() - 1, reduction="none")
        for each in logits
    ]
    expected = torch.stack(single)[:, (puzzles == 0).flatten()].sum(1)
    torch.testing.assert_close(task.loss(logits[0], puzzles, solutions), expected[0])
    torch.testing.assert_close(task.loss(logits, puzzles, solutions), expected.mean())
    assert task.terms(puzzles, solutions) == int((puzzles == 0).sum())


def test_measures_of_boards_whose_mistakes_are_known() -> None:
    unknown = BOARDS.test_puzzles == 0
    answers = BOARDS.test_solutions.clone()
    cells = [(board, int(unknown[board].nonzero()[k])) for board, k in ((1, 0), (1, 3), (4, 2))]
    cells.append((2, int((~unknown[2]).nonzero()[0])))  # a given
    for place in cells:
        answers[place] = answers[place] % 9 + 1
    task = SudokuCompletion(BOARDS)
    found = task.measures(F.one_hot(answers - 1, 9) * 20.0, *next(task.tests(0, 1)))
    number = int(unknown.sum())
    assert found["cell_accuracy"] == (number - 3, number) and found["solved_boards"] == (3, 5)


def test_givens_are_drawn_anew_and_then_symmetries() -> None:
    task = SudokuCompletion(BOARDS, givens=(30, 34))
    drawn = [batch(task, seed)[0] for seed in range(40)]
    assert set(torch.cat([(each != 0).sum(1) for each in drawn]).tolist()) == set(range(30, 35))
    for each in drawn:
        assert ((each == task.inputs) | (task.inputs == 0)).all()
        assert ((each == task.targets) | (each == 0)).all()
    few = reveal_up_to(BOARDS.train_puzzles, BOARDS.train_solutions, 5, torch.Generator())
    assert torch.equal(few, BOARDS.train_puzzles)  # more givens are kept
    turned = SudokuCompletion(BOARDS, SudokuSymmetries(), givens=(30, 34)).to(torch.device("cpu"))
    puzzles, solutions = batch(turned)
    assert solved(solutions).all() and not torch.equal(solutions, task.targets)
    assert ((puzzles == solutions) | (puzzles == 0)).all() and ((puzzles != 0).sum(1) >= 30).all()


def test_boards_are_learned_by_a_solver_with_several_answers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BoardSolver(units().tolist(), features=8, width=16, iterations=6, window=3)
    task, recipe = SudokuCompletion(BOARDS, givens=(40, 70)), Recipe(3, 3, 1e-2, iterations=(3, 6))
    training = Training(model, task, recipe, tmp_path / "run")
    training.run()
    assert training.history[-1]["loss"] < training.history[0]["loss"]
    assert training.summary().startswith("training ")
    number = torch.tensor([[78], [79], [80], [80], [80]])  # givens: one to three unknown cells
    boards, answers = BOARDS.test_puzzles, BOARDS.test_solutions
    boards = reveal_up_to(boards, answers, number, torch.Generator().manual_seed(0))
    model.eval()

    def share(answer: Tensor) -> float:
        right, unknown = board_counts(answer.argmax(-1) + 1, boards, answers)
        return (right == unknown).double().mean().item()

    def after(
        iterations: int,
    ) -> float:  # in the same batches: rounding decides between equal logits
        with torch.no_grad():
            return share(torch.cat([model(b, iterations=iterations) for b in boards.split(2)]))

    found = solved_after(model, boards, answers, (1, 4), batch=2)
    assert found == [after(1), after(4)]
    solution = model.solve(
        boards, solver=solvers.Forward(), tolerance=solvers.Tolerance(rtol=RTOL), max_steps=9,
        on_failure="ignore",
    )  # fmt: skip
    ends = (solution.converged, solution.evaluations)
    expected = [share(solution.value), *(each.double().mean().item() for each in ends)]
    own = solved_when_converged(model, boards, answers, 9, batch=2)
    assert own == pytest.approx(expected)


def test_windows_are_of_the_text_and_their_targets_one_symbol_later() -> None:
    task = NextToken(TEXT, 10)
    assert len(task.inputs) == (len(TEXT.train) - 1) // 10
    text = TEXT.decode(TEXT.train)
    inputs, targets = batch(task)
    for window, following in zip(inputs, targets, strict=True):
        assert torch.equal(window[1:], following[:-1])
        assert TEXT.decode(window) + TEXT.decode(following[-1:]) in text
    short = NextToken(split_text("short", ["abcdefghijklmnopqrst"], 0.5), 7, samples=200)
    inputs, targets = batch(short)
    assert set(inputs[:, 0].tolist()) == {0, 1, 2} and targets.max() == 9  # nothing is left out


@pytest.mark.parametrize(("masked", "most"), [(0.4, 6), (0.01, 1), (0.99, 15)])
def test_so_many_patches_are_hidden(masked: float, most: int) -> None:
    task = MaskedImages(IMAGES, 2, masked=masked)
    inputs, targets = task.test_images()
    assert hidden_patches(inputs, 2).sum(1).tolist() == [most] * 20
    assert task.terms(inputs, targets) == 20 * most
    inputs, targets = batch(task)
    assert torch.equal(targets, IMAGES.train_images)
    assert torch.equal(inputs[~inputs.isnan()], targets[~inputs.isnan()])
    varied = hidden_patches(inputs, 2).sum(1)
    assert varied.min() >= 1 and varied.max() <= most and len(varied.unique()) > most / 2


def test_the_loss_of_images_is_that_of_hidden_pixels() -> None:
    task = MaskedImages(IMAGES, 4, masked=0.7)
    inputs, targets = batch(task)
    outputs = torch.randn(targets.shape, generator=torch.Generator().manual_seed(2))
    outputs.requires_grad_()
    loss = task.loss(torch.where(inputs.isnan(), outputs, torch.inf), inputs, targets)
    errors = (outputs - targets).square()[inputs.isnan()].sum() / 32  # pixels of a patch
    torch.testing.assert_close(loss, errors)
    (gradient,) = torch.autograd.grad(task.loss(outputs, inputs, targets), outputs)
    wanted = torch.where(inputs.isnan(), 2 * (outputs.detach() - targets) / 32, 0.0)
    torch.testing.assert_close(gradient, wanted)


def test_the_psnr_of_fixed_masks() -> None:
    task = MaskedImages(IMAGES, 2, batch=6)
    inputs, targets = task.test_images()
    hidden = inputs.isnan()
    each = (targets - 0.5).square().where(hidden, 0.0).sum((1, 2, 3)) / hidden.sum((1, 2, 3))
    found = task.evaluate(Guess(task))
    assert found["test_loss"][0] / found["test_loss"][1] == pytest.approx(each.mean().item())
    decibels = -10 * each.double().log10()
    assert found["test_psnr"] == pytest.approx((decibels.sum().item(), 20), rel=1e-6)
    assert task.evaluate(Guess(task), iterations=2) != found
    perfect = task.measures(targets, inputs, targets)
    assert perfect["test_loss"][0] == 0 and perfect["test_psnr"][0] == pytest.approx(100 * 20)
    assert len(MaskedImages(IMAGES, 2, test=7).test_images()[0]) == 7


def test_a_training_learns_what_hidden_patches_hold(tmp_path: Path) -> None:
    """Two kinds of image, black and white: one visible patch tells the hidden ones."""
    bright = (torch.arange(96) % 2).float().view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()
    labels = torch.zeros(96, dtype=torch.int64)
    data = ImageData("two", 1, bright[:64], labels[:64], bright[64:], labels[64:])
    torch.manual_seed(0)
    backbone = HyperSET(16, 2, 16, iterations=2, initial_step=0.1, time_dim=8)
    recipe = Recipe(epochs=40, batch=16, rate=0.02, iterations=(1, 3))
    model, task = MaskedImageModel(backbone, 4, 1, patch=2), MaskedImages(data, 2, masked=0.5)
    training = Training(model, task, recipe, tmp_path / "run")
    before = training.evaluate()["test_loss"]
    training.run()
    assert before > 0.2  # the best constant has 0.25
    assert training.history[-1]["test_loss"] < 0.02 and training.history[-1]["test_psnr"] > 17


@pytest.mark.parametrize(
    ("kind", "data", "options", "message"),
    [
        (SudokuCompletion, BOARDS, {"givens": (20, 19)}, "givens must"),
        (SudokuCompletion, BOARDS, {"givens": (17, 81)}, "givens must"),
        (NextToken, TEXT, {"length": 82}, "length must be below the 82 symbols for validation"),
        (NextToken, TEXT, {"length": 10, "windows": 0}, "windows must be >= 1"),
        (MaskedImages, IMAGES, {"patch": 2, "masked": math.nan}, r"masked must lie in \(0, 1\)"),
        (MaskedImages, IMAGES, {"patch": 3}, "patch must divide .* got 3"),
        (MaskedImages, IMAGES, {"patch": 8}, "patch must leave 2 patches"),
        (MaskedImages, IMAGES, {"patch": 2, "test": 0}, "test must be >= 1, got 0"),
    ],
)
def test_wrong_options_are_named(kind: Any, data: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        kind(data, **options)


def pool_step(pool: CarriedStates, number: int, seed: int = 0) -> Tensor:
    """A step of ``number`` iterations on two fresh boards, whose states count the iterations."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = BOARDS.train_puzzles[:2], BOARDS.train_solutions[:2]
    index, inputs, targets, states = pool.join(inputs, targets, generator)
    before = (
        torch.cat([torch.zeros(2, 81, 9, 1), states]) if len(states) else torch.zeros(2, 81, 9, 1)
    )
    pool.put(index, inputs, targets, before + number, number, generator)
    return index


def test_carried_boards_age_and_retire() -> None:
    """A state that counts its iterations says how old its board is."""
    pool = CarriedStates(4, lives=(30, 60), noise=0.0)
    assert len(pool_step(pool, 10)) == 0 and len(pool) == 2
    retired = 0
    for seed in range(1, 40):
        before = None if len(pool) == 0 else pool.ages.clone()
        index = pool_step(pool, 10, seed)
        assert len(index) == 2 and len(pool) == 4
        assert torch.equal(pool._rows[2][:, 0, 0, 0], pool.ages.float())
        assert int(pool.ages.max()) < 60 and int(pool.ages.min()) >= 10
        if before is not None and len(before) == 4:
            retired += int((pool.ages < before).sum())
    assert (
        39 * 2 * 10 / 70 <= retired <= 39 * 2 * 10 / 20
    )  # a life is 30 to 60 iterations, 10 a visit
    for options in ({"size": 0}, {"lives": (9, 3)}, {"noise": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            CarriedStates(**options)  # type: ignore[arg-type]


def test_a_training_with_carried_states_resumes_to_the_bit(tmp_path: Path) -> None:
    def training(name: str) -> Training:
        torch.manual_seed(0)
        model = BoardSolver(units().tolist(), features=4, width=4, iterations=5, window=2)
        task = SudokuCompletion(BOARDS, givens=(30, 34), carried=CarriedStates(3, (6, 12)))
        return Training(model, task, Recipe(2, 2, 1e-2, iterations=(2, 5)), tmp_path / name)

    whole, part = training("a.safetensors"), training("b.safetensors")
    whole.run()
    part.run()
    first = tmp_path / "b.safetensors"
    half = training("c.safetensors")
    half._run_epoch()
    half.save()
    rest = training("c.safetensors")
    rest.resume()
    rest.run()
    assert first.exists() and rest.epoch == 2
    for ours in (part, rest):
        for name, value in ours.model.state_dict().items():
            assert torch.equal(value, whole.model.state_dict()[name]), name
    assert len(whole.task.carried) == 3  # type: ignore[attr-defined]
