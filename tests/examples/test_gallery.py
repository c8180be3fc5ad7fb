"""Every experiment of the gallery runs at tiny settings; what it computes beside the library is right."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.spin_models import all_colours, samples_of
from cases.spin_models import couplings as random_couplings
from implicit_attn.data import solve_sudoku
from implicit_attn.data.sudoku import solved
from implicit_attn.models import PottsModel
from implicit_attn.models.images import join_patches

for package in ("tyro", "matplotlib", "sklearn", "safetensors", "lightning_fabric"):
    pytest.importorskip(package, reason="the gallery needs the extra [examples]")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
Load = Callable[[str], ModuleType]
Tables = dict[str, list[dict[str, Any]]]


def column(table: list[dict[str, Any]], key: str, by: str | None = None, **where: Any) -> Any:
    """The values of a column in the rows that have these values; with ``by`` the last of each kind."""
    rows = [row for row in table if all(row[name] == value for name, value in where.items())]
    return [row[key] for row in rows] if by is None else {row[by]: row[key] for row in rows}


def corrections_help(tables: Tables) -> None:
    """At weak couplings by an order of magnitude."""
    for table in tables.values():
        naive = table[0]["naive_log_partition"]
        assert table[0]["second_log_partition"] < naive / 5
        assert table[0]["adaptive_log_partition"] < naive / 5


def the_root_is_the_minimum(tables: Tables) -> None:
    """Of phi right of all eigenvalues of J, to the spacing of the grid, at beta = 1."""
    root = next(row["root"] for row in tables["temperature"] if abs(row["beta"] - 1) < 1e-9)
    inside = [row for row in tables["curve"] if row["t"] > root - 0.2]
    assert min(inside, key=lambda row: row["phi"])["t"] == pytest.approx(root, abs=4e-3)


def the_limit_of_bessel_ratios(tables: Tables) -> None:
    errors = column(tables["ratios"], "relative_error", by="order", at="nu")
    found = [errors[order] for order in (1, 8, 64, 512)]
    assert found == pytest.approx([0.72, 0.078, 9.5e-3, 1.2e-3], rel=0.05)


def energies_fall(tables: Tables) -> None:
    first, last = (column(tables["energy"], "energy", by="graph", sweeps=n) for n in (1, 4))
    assert len(first) == 4 and all(last[graph] < first[graph] for graph in first)


def norms_vanish_in_high_dimension(tables: Tables) -> None:
    """The medians of docs/internal/systems.md, whose draws scatter."""
    known = [3.0, 8.6, 1.9, 0.14, 1.8e-3, 3.5e-6, 5.0e-10]
    for norm, expected in zip(column(tables["usual"], "norm"), known, strict=True):
        assert expected / 3 < norm < 3 * expected


def from_all_to_one(tables: Tables) -> None:
    """The fixed point is the average of all at a high temperature, a single pattern at a low one."""
    for name in ("random", "clusters"):
        hot, cold = tables[name]
        assert hot["least"] == pytest.approx(6, rel=0.01)
        assert cold["largest"] == pytest.approx(1, rel=0.01)


def memories_take_noise_off(tables: Tables) -> None:
    errors = column(tables["digits"], "error", by="method")
    assert errors["memory of clean images"] < 0.9 < errors["noisy"] < 1.03


def a_penalty_costs_likelihood(tables: Tables) -> None:
    assert column(tables["fits"], "l2") == [1e-4, 0]
    with_penalty, without = column(tables["fits"], "held_out")
    assert without < with_penalty < math.log(9)


def decimation_on_the_rules_solves_easy_boards(tables: Tables) -> None:
    solved = column(tables["table"], "solved", by="method")
    assert solved["the rules: with decimation"] == solved["naked and hidden singles"] == 1


def steps_come_in_the_order_of_the_rates(tables: Tables) -> None:
    """Newton, whose error is squared; tuned momentum, plain; heavy-ball of 0.9 shrinks by sqrt 0.9."""
    steps = column(tables["methods"], "steps", by="method")
    assert steps["Newton"] < steps["momentum, tuned"] < steps["plain"] < steps["momentum 0.9"]


def bare_attention_beats_the_mean(tables: Tables) -> None:
    errors = column(tables["errors"], "error", by="predictor")
    assert errors["bare, exact normaliser"] < 0.9 * errors["mean of the site"]
    assert errors["ridge regression"] < errors["mean of the site"]


def fixed_points_are_at_rest(tables: Tables) -> None:
    """Symmetric couplings have no cycles, and fixed points where the residual is rounding."""
    for row in tables["ends"][:2]:
        assert row["cycle"] == 0 < row["fixed point"] and row["largest_residual"] < 1e-13


def theories_agree(tables: Tables) -> None:
    for (row,) in tables.values():
        assert row["tap_mean"] < row["naive_mean"] < 0.1
        assert row["tap_consistent"] == row["truth_consistent"] == 1


def states_become_alike(tables: Tables) -> None:
    """More than fixed weights do, and its energy is lower; both stay above the bound -T log 16."""
    energy, spread = (column(tables["ends"], k, by="rule") for k in ("free_energy", "spread"))
    assert -4 * math.log(16) < energy["local rule"] < energy["fixed weights"]
    assert spread["local rule"] < 0.5 * spread["fixed weights"]


def all_rules_come_near_the_exact_likelihood(tables: Tables) -> None:
    most = column(tables["samples"], "error", by="rule", samples=2000)
    assert len(most) == 4 and most["exact likelihood"] < 0.3
    assert max(column(tables["samples"], "gap", samples=2000)) < 0.1


def linear_heads_find_the_tree_and_softmax_heads_cannot(tables: Tables) -> None:
    """A softmax needs equal degrees."""
    linear, softmax, _ = column(tables["methods"], "excess")
    assert linear < 0.5 * softmax


def rivals_have_equal_parameters(tables: Tables) -> None:
    parameters = column(tables["summary"], "parameters", by="model")
    ours = parameters["equilibrium, until it converges"]
    assert parameters["transformer, equal parameters"] == pytest.approx(ours, rel=0.05)


def a_small_network_has_the_parameters_of_the_cell(tables: Tables) -> None:
    parameters = column(tables["trainings"], "parameters", by="model")
    ours = parameters["equilibrium, until it converges"]
    assert parameters["network, equal parameters"] == pytest.approx(ours, rel=0.1)
    assert set(column(tables["trainings"], "kind")) == {"trees", "bushy trees", "loops"}
    assert column(tables["course"], "iterations")[-1] > 30 * 15 / 2


def more_is_known_of_half_than_of_a_quarter(tables: Tables) -> None:
    """By every answer, and each task has a row for each answer."""
    errors = tables["errors"]
    for answer in ("one energy", "best linear answer of each task"):
        half, quarter = (
            column(errors, "error", answer=answer, task=task)[0]
            for task in ("half missing", "3/4 missing")
        )
        assert half < quarter
    assert len(errors) == 4 * 6 and len(tables["solves"]) == 6


def one_block_has_as_many_parameters_repeated(tables: Tables) -> None:
    once, repeated, three = column(tables["accuracy"], "parameters")
    assert once == repeated < three / 2
    assert column(tables["iterations"], "iterations") == [1, 2, 4, 8, 16, 32]


def layers_have_similar_sizes_and_converge(tables: Tables) -> None:
    none, *others = column(tables["summary"], "parameters")
    assert none == 0 and max(others) < 1.25 * min(others)
    assert min(column(tables["summary"], "converged")[1::2]) > 99
    assert len(tables["test"]) == 4 and len(tables["validation"]) == 8


# Options that keep a run within a second or two, and what its tables must show.
EXPERIMENTS: dict[str, tuple[str, Callable[[Tables], Any]]] = {
    "landscapes": (
        "--states 4 --patterns 6 --points 9",
        lambda t: max(column(t["pictures"], "largest_rise")) <= 0,
    ),
    "norm_map": ("--dimensions 3 --scales 3 --draws 20", norms_vanish_in_high_dimension),
    "repeated_block": (
        "--data digits --patch 4 --train-images 128 --test-images 40 --epochs 1 --seeds 1",
        one_block_has_as_many_parameters_repeated,
    ),
    "one_energy_many_tasks": (
        "--seeds 0 --epochs 1 --test-images 20 --network-steps 2 --weights {folder}",
        more_is_known_of_half_than_of_a_quarter,
    ),
    "attractors": (
        "--images 16 --steps 3 --moves 6 --random-moves 100 --models 1",
        fixed_points_are_at_rest,
    ),
    "bare_attention": ("--images 200 --steps 60", bare_attention_beats_the_mean),
    "capacity": (
        "--sites 20 --loads 0.1 0.5 --dense-sites 12 --dense-loads 0.5 2 --seeds 2 --probes 5",
        lambda t: column(t["pairs"], "exact", rule="pseudo-inverse")[0] == 1,
    ),
    "effective_rbm": (
        "--spins 3 --chains 500 --sweeps 20",
        lambda t: max(column(t["errors"], "largest deviation")) < 5,  # standard errors
    ),
    "fixed_point_kinds": ("--clusters 2 --members 3 --dim 8 --betas 0.5 200", from_all_to_one),
    "hopfield_digits": ("--noises 0.1 --counts 5", memories_take_noise_off),
    "memory_density": (
        "--samples 40 --starts 1 --steps 3",
        lambda t: max(column(t["temperatures"], "error")) < 1e-12,  # of the integral from 1
    ),
    "free_energy": ("--models 5 --ising 5 --potts 3 --strengths 0.25", corrections_help),
    "gibbs_mixing": ("--sites 9 --colours 3 --chains 200 --sweeps 4", energies_fall),
    # Without spread of the couplings beta_c = 2 artanh(1/2) = 1.0986; the spread adds a little.
    "kinetic_ising": (
        "--spins 16 --steps 4 --chains 8 --betas 3 --draws 2 --sweep-spins 16",
        lambda t: t["turns"][0]["critical_beta"] == pytest.approx(1.1108, abs=1e-3),
    ),
    "sudoku_graph": (  # of the 810 pairs, from boards under random symmetries, after the last step
        "--steps 8 --train 20 --boards 5 --few-steps 5 --source generated",
        lambda t: column(t["steps"], "precision", model="factored, softmax head")[-1] > 0.95,
    ),
    "sudoku_potts": (
        "--clues 50 --boards 3 --steps 20 --train 20 --anneal 60 --source generated",
        a_penalty_costs_likelihood,
    ),
    "sudoku_belief": (
        "--clues 50 --boards 3 --fit-steps 10 --train 20 --source generated",
        decimation_on_the_rules_solves_easy_boards,
    ),
    "sudoku_solver": (
        "--givens 34 30 --boards 3 --animation {folder}.gif",
        lambda t: column(t["solved"], "solved", givens=34)[-1] == 1,
    ),
    "descent": ("--draws 2 --steps 60", steps_come_in_the_order_of_the_rates),
    "local_learning": ("--epochs 30 --passes 1", states_become_alike),
    "boltzmann_learning": (
        "--sites 3 --colours 2 --samples 50 2000 --seeds 1 --steps 200",
        all_rules_come_near_the_exact_likelihood,
    ),
    "potts_recovery": (
        "--data tree --sites 7 --colours 3 --samples 3000 --few 50 --steps 150 --masked 3 --batch 16 "
        "--tested 20 --methods linear softmax recycled",
        linear_heads_find_the_tree_and_softmax_heads_cannot,
    ),
    "own_energy": ("--seeds 2 --epochs 1", layers_have_similar_sizes_and_converge),
    "easy_to_hard": ("--size 4 --steps 1 --tests 4 --seeds 1", rivals_have_equal_parameters),
    "mazes": (
        "--steps 2 --tests 2 --seeds 1 --largest 15 --processes 1",
        a_small_network_has_the_parameters_of_the_cell,
    ),
    "kinetic_vectors": (  # lengths of means stay below the radius
        "--spins 12 --dim 6 --steps 3 --chains 16",
        lambda t: all(0 < length < 1 for length in column(t["lengths"], "length")),
    ),
    "busy_slots": (
        "--samples 600 --slots 32",
        lambda t: column(t["summary"], "calls")[1] < 0.8 * column(t["summary"], "calls")[0],
    ),
    "spherical_saddle": ("--sites 4 --dim 6 --frames 9", the_root_is_the_minimum),
    "tap_vs_exact": ("--models 2 --ising 4 --potts 3 --strengths 0.25", theories_agree),
    "studies.convergence": (
        "--samples 4 --max-steps 40 --spectra 1",
        lambda t: column(t["costs"], "converged", solver="Anderson") == [1],
    ),
    "studies.extrapolation": (
        "--samples 20 --factor 2",
        lambda t: column(t["reach"], "accuracy_1x", method="Anderson")[0] > 0.9,
    ),
    "studies.paths": (
        "--samples 6 --starts 1",
        lambda t: max(column(t["summary"], "distance_largest")) < 1e-3,
    ),
    "studies.geometry": (
        "--samples 6",
        lambda t: t["means"][-1]["feedforward_energy"] < t["means"][0]["feedforward_energy"],
    ),
    "studies.tradeoff": (
        "--depth 2 --epochs 1 --limit 64 --weights {folder}",
        lambda t: column(t["table"], "iterations") == [2, 1],
    ),
    "spin_pictures": ("--dim 8 --sites 6 --share 0.5", the_limit_of_bessel_ratios),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_example_is_listed_and_imports_public_names() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    others = "masked_images couplings wrap_your_energy scale_out runner ported_from_torchdeq "
    others += "several_queues "
    others += "options training image_tasks board_tasks train_images train_language train_boards"
    assert names == {*(name.split(".")[0] for name in EXPERIMENTS), *others.split()}
    for path in EXAMPLES.rglob("*.py"):
        assert path.read_text().startswith(('"""', 'r"""')), path
        for line in path.read_text().splitlines():
            assert not re.match(r"\s*(from|import) (implicit_attn|solvers)\S*.*[. ]_\w", line), line


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment(name: str, load: Load, tmp_path: Path) -> None:
    words, check = EXPERIMENTS[name]
    file, _, function = name.partition(".")
    experiment = getattr(load(file), function or file)
    folder = tmp_path / experiment.__name__.replace("_", "-")
    tables = load("runner").run(
        experiment, [*words.format(folder=tmp_path / "weights").split(), "--out", str(tmp_path)]
    )
    assert (folder / f"{folder.name}.png").read_bytes()[:4] == b"\x89PNG"
    for table, rows in tables.items():
        with (folder / f"{table}.csv").open(newline="") as file:
            assert [*csv.DictReader(file)] == [
                {key: "" if value is None else str(value) for key, value in row.items()}
                for row in rows
            ]
    assert check(tables) in (None, True)


def test_local_gradients_are_those_of_autograd(load: Load) -> None:
    """With respect to the states and the weights, among held tokens."""
    local = load("local_learning")
    g = seeded()
    z, h = (torch.randn(2, n, 3, generator=g, dtype=torch.float64) for n in (1, 5))
    inputs = [each.requires_grad_() for each in (z, torch.randn(3, 3, generator=g).double())]
    expected = torch.autograd.grad(len(z) * local.energy(inputs[0], h, inputs[1]), inputs)
    found = local.energy_by_state(z, h, inputs[1]), local.energy_by_weights(z, h, inputs[1])
    torch.testing.assert_close(found, expected)


def test_couplings_of_any_scale_solve_boards_with_many_clues(load: Load) -> None:
    """Clues stand, those that contradict each other too; a board without any ends."""
    sudoku, chooser = load("sudoku_potts"), random.Random(0)
    boards = torch.tensor([solve_sudoku([0] * 81, 1, chooser)[0] for _ in range(24)])
    head = load("sudoku_graph").fitted("factored, softmax head", boards, 30, 0, batch=32)
    learned = load("sudoku_graph").couplings_of(head)
    torch.testing.assert_close(sudoku.scaled(7 * learned), sudoku.scaled(learned))
    hidden = torch.rand(6, 81, generator=seeded()).argsort(1) < 31
    puzzles = torch.cat([boards[:6].masked_fill(hidden, 0), torch.zeros(2, 81, dtype=torch.long)])
    puzzles[6, :2] = 5
    for couplings in (sudoku.rules(), sudoku.scaled(learned)):
        found = sudoku.annealed(couplings, puzzles)
        assert solved(found[:6]).all() and ((found == puzzles) | (puzzles == 0)).all()
    with pytest.raises(ValueError, match="repel"):
        sudoku.scaled(-learned)


def test_a_wrong_option_ends_the_run(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    def experiment(count: int = 2) -> Any:
        """An experiment."""

    for words in (["--count", "two"], ["--unknown", "3"]):
        with pytest.raises(SystemExit) as end:
            load("runner").run(experiment, words)
        assert end.value.code == 2 and words[0] in capsys.readouterr().err


# Parity along a ring.


@pytest.mark.parametrize(("size", "marks"), [(1, (1, 1)), (2, (1, 2)), (7, (1, 3)), (12, (4, 20))])
def test_parities_and_runs_by_hand(size: int, marks: tuple[int, int], load: Load) -> None:
    rings = load("easy_to_hard").draw_rings(20, size, seeded(), marks)
    for ring in range(20):
        bits, marked = (rings.inputs[ring] > 0).long().T.tolist()
        assert min(marks[0], size) <= sum(marked) <= marks[1]
        runs = []
        for place in range(size):
            back = next(n for n in range(size) if marked[place - n])
            runs.append([bits[place - n] for n in range(back + 1)])
            assert int(rings.targets[ring, place]) == sum(runs[-1]) % 2
        assert int(rings.difficulty[ring]) == max(map(len, runs))


@pytest.mark.parametrize("depth", [1, 3])
def test_what_is_farther_than_the_evaluations_is_not_seen(depth: int, load: Load) -> None:
    rings: Any = load("easy_to_hard")
    torch.manual_seed(0)
    x = torch.randn(3, 12, 2, dtype=torch.float64)
    other = x.clone()
    other[:, 0] += 1
    distance = torch.minimum(torch.arange(12), 12 - torch.arange(12))

    def changed(model: Any, **options: int) -> list[bool]:
        model = model.double()
        return ((model(x, **options) - model(other, **options)).abs().sum((0, 2)) > 1e-12).tolist()

    # Evaluation t sees the input itself, and its neighbours' states after t - 1; the first starts at zero.
    seen = changed(rings.EquilibriumRing(8, 2), iterations=depth)
    assert seen == (distance < depth).tolist()
    assert changed(rings.LayeredRing(8, 2, depth, True)) == (distance <= depth).tolist()
    assert all(changed(rings.LayeredRing(8, 2, depth)))


@pytest.mark.parametrize("size", [3, 9, 15])
def test_paths_through_mazes(size: int, load: Load) -> None:
    """Without loops the path is what remains when dead ends are filled one after the other."""
    module = load("mazes")
    cross = torch.tensor([[[[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]]])
    ends_of: dict[str, int] = {}
    for kind in (module.TREES, module.BUSHES, module.LOOPS):
        mazes = module.draw_mazes(20, size, kind, 0)
        opened, ends = mazes.inputs[:, :1], mazes.inputs[:, 1:].sum(1, keepdim=True)
        assert (ends.flatten(1).sum(1) == 2).all() and (ends <= opened).all()
        left = module.fill_dead_ends(mazes.inputs)
        target = mazes.targets[:, None].float()
        degree = F.conv2d(target, cross, padding=1)
        # A path: its ends have one neighbour on it, other sites two.
        assert torch.equal(degree[target > 0], (2 - ends)[target > 0])
        assert (mazes.targets <= left).all()
        if kind == module.LOOPS:
            assert size == 3 or (mazes.targets < left).any()
        else:
            assert torch.equal(mazes.targets, left)
        ends_of[kind] = int((opened * (F.conv2d(opened, cross, padding=1) == 1)).sum())
    assert size == 3 or ends_of[module.LOOPS] < ends_of[module.TREES] < ends_of[module.BUSHES]


def dead_end_rule(module: Any) -> Any:
    """A model of mazes whose fixed point is the maze with filled dead ends, by weights set by hand.

    State 0 becomes 1 at all open sites, state 1 where a site is closed: where it was closed before, and
    where at most one neighbour is open and not closed, except for the ends.
    """
    model = module.EquilibriumMaze(4).double()
    cell = model.layer.update.function
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        look, decide, inside, closed, opened = cell.look, cell.decide, 0, 1, 4
        look.weight[0, closed, 1, 1], look.bias[0] = 1.0, -0.5
        look.bias[1] = 1.5
        look.weight[1, opened + 1 :, 1, 1] = -9.0
        for i, j in ((0, 1), (1, 0), (1, 2), (2, 1)):
            look.weight[1, opened, i, j], look.weight[1, closed, i, j] = -1.0, 1.0
        decide.bias[inside] = 40.0
        decide.weight[closed, :2] = 40.0
        model.readout.weight[1, inside], model.readout.weight[1, closed] = 1.0, -1.0
        model.readout.bias[0] = 0.5
    return model


@pytest.mark.parametrize("kind", ["trees", "bushy trees", "loops"])
def test_a_cell_can_fill_dead_ends(kind: str, load: Load) -> None:
    module = load("mazes")
    test = module.draw_mazes(5, 25, kind, 0)
    model = dead_end_rule(module)
    end = model.solve(test.inputs.double())
    assert end.converged.all()
    assert torch.equal(model.readout(end.value).argmax(1), module.fill_dead_ends(test.inputs))


def test_solves_of_mazes_do_not_depend_on_the_size_of_the_batch(load: Load) -> None:
    module = load("mazes")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = module.EquilibriumMaze(4).double()
    test = module.draw_mazes(3, 9, module.TREES, 0)
    together = model.solve(test.inputs.double())
    assert together.converged.all()
    for row in range(3):
        alone = model.solve(test.inputs[row : row + 1].double())
        assert int(alone.evaluations) == int(together.evaluations[row])
        torch.testing.assert_close(alone.value[0], together.value[row])


# Images as tokens on circles.


def test_tokens_on_circles_and_back(load: Load) -> None:
    bare = load("bare_attention")
    images = torch.rand(200, 3, 4, 4, generator=seeded())
    images[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
    tokens = bare.encode(images, 2)
    torch.testing.assert_close(tokens.norm(dim=-1), torch.full((200, 4), 12**0.5))
    for size in (1.0, 0.1):
        found = join_patches(bare.decode(size * tokens), 2)
        torch.testing.assert_close(found, images, rtol=0, atol=1e-6)


# Local rules.


def test_the_local_gradient_of_a_pair_sum_is_that_of_its_likelihood(load: Load) -> None:
    model = load("bare_attention").PairSum(3, 2, None).double()
    angles = 6.28 * torch.rand(20, 3, generator=seeded(1)).double()
    data = torch.stack([angles.cos(), angles.sin()], -1)
    with torch.no_grad():
        model.couplings.free.normal_(generator=seeded())
    loss = -model.log_prob(data).sum(1).mean()
    (expected,) = torch.autograd.grad(loss, model.couplings.free)
    model.assign_gradient(model.local_gradient(data))
    torch.testing.assert_close(model.couplings.free.grad, expected)


# Likelihoods of Potts models.


def potts(seed: int = 0) -> PottsModel:
    model, generator = PottsModel(3, 3).double(), seeded(seed)
    with torch.no_grad():
        model.couplings.weight = random_couplings(3, 3, 0.8, generator)
        model.field.copy_(0.3 * torch.randn(3, 3, generator=generator))
    return model


def test_the_likelihood_and_its_gradient_by_enumeration(load: Load) -> None:
    exact_likelihood = load("boltzmann_learning").exact_likelihood
    model = potts()
    with torch.no_grad():
        data = F.one_hot(samples_of(potts(1).energy, 3, 3, 50, 0), 3).double()
    states = F.one_hot(all_colours(3, 3), 3).double()
    one_by_one = torch.stack([exact_likelihood(model, each[None]) for each in states])
    assert one_by_one.exp().sum().item() == pytest.approx(1.0, rel=1e-12)
    torch.testing.assert_close(one_by_one, torch.log_softmax(-model.energy(states), 0))
    exact_likelihood(model, data).backward()
    weight = (-model.energy(states)).softmax(0).detach()
    expected = data.mean(0) - torch.einsum("k,kia->ia", weight, states)
    torch.testing.assert_close(model.field.grad, expected)


def test_the_masked_loss_hides_every_site_in_its_turn(load: Load) -> None:
    """Conditionals that depend on the visible sites alone: their pseudo-likelihood, by hand."""
    masked_loss = load("potts_recovery").masked_loss
    test = torch.randint(3, (10, 5), generator=seeded())
    table = torch.randn(4, 3, generator=seeded(3))

    class Neighbours(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            assert ((tokens == 3).sum(1) == 1).all()
            return table[tokens.roll(1, 1)]  # of the site before

    expected = F.cross_entropy(table[test.roll(1, 1)].flatten(0, 1), test.flatten()).item()
    assert masked_loss(Neighbours(), test, 3, batch=15) == pytest.approx(expected, rel=1e-6)


# Potts models on graphs, and measures of couplings.


@pytest.mark.parametrize(
    ("kind", "edges"), [("er-kron", 30), ("er-general", 30), ("tree", 19), ("ring4", 40)]
)
def test_graphs_and_conditionals(load: Load, kind: str, edges: int) -> None:
    """Symmetric and sparse; ``p(s_i | rest)`` against energies of changed configurations."""
    couplings = load("couplings")
    model = couplings.graph_potts(kind, seeded(2), colours=3)
    graph, n = couplings.neighbours(model), torch.arange(20)
    assert torch.equal(model.couplings, model.couplings.permute(1, 0, 3, 2))
    assert int(graph.sum()) == 2 * edges and not graph.diagonal().any()
    colours = torch.randint(0, 3, (4, 20), generator=seeded())

    def energy(s: Tensor) -> Tensor:
        return torch.stack([0.5 * model.couplings[n[:, None], n, r[:, None], r].sum() for r in s])

    logits = couplings.conditional_logits(model, colours).log_softmax(-1)
    changed = colours.repeat(3, 1, 1)
    changed[:, :, 7] = torch.arange(3)[:, None]
    expected = torch.stack([energy(each) for each in changed], dim=1).log_softmax(1)
    torch.testing.assert_close(logits[:, 7], expected)


def test_the_precision_of_pairs(load: Load) -> None:
    """Scores 6 to 1 of the pairs (0,1) (0,2) (0,3) (1,2) (1,3) (2,3), the first and the third true."""
    couplings = load("couplings")
    scores, edges = torch.zeros(4, 4), torch.zeros(4, 4).bool()
    rows, columns = torch.triu_indices(4, 4, 1)
    scores[rows, columns] = torch.arange(6.0).flip(0) + 1
    edges[rows, columns] = torch.tensor([1, 0, 1, 0, 0, 0]).bool()
    assert couplings.contact_precision(scores, edges) == pytest.approx(0.5)


def test_the_categorical_jacobian_of_known_couplings(load: Load) -> None:
    couplings = load("couplings")
    model = couplings.graph_potts("tree", seeded(), sites=5, colours=3)
    sequences = torch.randint(0, 3, (4, 5), generator=seeded(1))

    class Exact(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            assert ((tokens == 3).sum(1) == 1).all()  # one masked site
            return couplings.conditional_logits(model, tokens.clamp_max(2))

    exact = Exact()
    found = couplings.categorical_jacobian(exact, sequences, 3, mask=3, batch=7)
    assert couplings.coupling_error(found, model.couplings) < 1e-12
    assert not found.diagonal().any() and exact.training


# Hidden patches, which need trained models.


def test_two_runs(load: Load, tmp_path: Path) -> None:
    small = (
        "--task masked --limit 64 --epochs 1 --test 9 --iterations 4 --dim 8 --heads 2 --width 8"
    )
    script: Any = load("train_images")
    runs = [str(tmp_path / f"run-{seed}") for seed in range(2)]
    for seed, out in enumerate(runs):
        words = [*f"{small} --seed {seed}".split(), "--out", out]
        script.main(importlib.import_module("tyro").cli(script.Images, args=words))
    words = ["--runs", *runs, "--images", "2", "--out", str(tmp_path)]
    tables = load("runner").run(load("masked_images").masked_images, words)
    assert [row["seed"] for row in tables["errors"]] == [0] * 6 + [1] * 6
    assert len(tables["fillings"]) == 2
    assert (tmp_path / "masked-images" / "masked-images.png").stat().st_size > 10_000


def test_the_guesses_of_hidden_pixels(load: Load) -> None:
    """A training image is found; the Gaussian's is ``mean_h + C_hv C_vv^-1 (x_v - mean_v)``."""
    fill, train = load("masked_images").fill, torch.rand(40, 1, 2, 2, generator=seeded())
    shown = train[3:5].clone()
    shown[:, 0, 0, 0] = torch.nan
    assert torch.equal(fill("nearest training image", train, shown), train[3:5])
    flat: Tensor = train.flatten(1).double()
    mean, c = flat.mean(0), torch.cov(flat.T)
    c = c + 0.01 * c.diagonal().mean() * torch.eye(4).double()
    weights = torch.linalg.solve(c[1:, 1:], c[1:, 0])
    wanted = mean[0] + (shown.flatten(1)[:, 1:].double() - mean[1:]) @ weights
    found = fill("Gaussian, linear", train, shown)[:, 0, 0, 0]
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-5)


# Examples to be read.


@pytest.mark.slow
def test_wrap_your_energy(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    """The filters learn: the error ends well below that of the noisy signals themselves."""
    with torch.random.fork_rng(devices=[]):
        load("wrap_your_energy").train(steps=40)
    pattern = r"error ([\d.]+) \(noisy ([\d.]+)\) +converged (\d+) % +energy ([\d.]+) -> ([\d.]+)"
    lines = re.findall(pattern, capsys.readouterr().out)
    rows = [[float(value) for value in line] for line in lines]
    assert len(rows) >= 5
    assert rows[-1][0] < 0.25 * rows[0][0] and rows[-1][0] < 0.7 * rows[-1][1]
    assert all(done == 100 and after < before for _, _, done, before, after in rows)


# The models ported from torchdeq.


SMALL = {"dim": 16, "heads": 2, "length": 12, "batch": 4}


@pytest.mark.parametrize(
    ("name", "sizes"), [("language", SMALL), ("digits", {"channels": 4, "batch": 8})]
)
def test_losses_agree_with_those_of_torchdeq(name: str, sizes: dict[str, int], load: Load) -> None:
    """Twelve steps of training: within 1 % of torchdeq's at each of them, and they fall."""
    example = load("ported_from_torchdeq")
    options = example.Options(steps=12, rate=5e-3)
    expected, found = (
        example.train(name, engine, options, **sizes) for engine in ("torchdeq", "ours")
    )
    assert sum(expected["losses"][6:]) < sum(expected["losses"][:6])
    assert found["losses"] == pytest.approx(expected["losses"], rel=0.01)
    assert max(found["residuals"]) <= 1e-3
    # We also ask for the error, which may take one or two evaluations more.
    assert sum(found["forward"]) <= sum(expected["forward"]) + 2 * len(found["forward"])
    assert sum(found["backward"]) <= sum(expected["backward"])


# The notebooks run from top to bottom, and their pages show the code that they have now.

NOTEBOOK_FOLDER = ROOT / "docs" / "notebooks"
found = importlib.util.spec_from_file_location("notebooks_build", NOTEBOOK_FOLDER / "build.py")
assert found is not None and found.loader is not None
BUILDER: Any = importlib.util.module_from_spec(found)
found.loader.exec_module(BUILDER)


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


NOTEBOOKS = pytest.mark.parametrize("path", BUILDER.notebooks(), ids=lambda path: path.stem)


@pytest.mark.slow
@NOTEBOOKS
def test_a_notebook_runs_and_its_page_is_of_its_code(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with torch.random.fork_rng(devices=[]):
        page = BUILDER.build(path, tmp_path)
    pictures = re.findall(r"!\[.+\]\((.+)\)", page)
    assert pictures and {file.name for file in tmp_path.iterdir()} == set(pictures)
    assert blocks(page, "text")
    shown = path.with_suffix(".md").read_text(encoding="utf-8")
    assert re.findall(r"!\[.+\]\((.+)\)", shown) == pictures, "run make notebooks"
    assert all((NOTEBOOK_FOLDER / picture).stat().st_size < 200_000 for picture in pictures)
    cells = BUILDER.read_cells(path)
    code = [cell.source + "\n" for cell in cells if not cell.text]
    assert blocks(shown, "python") == code, "run make notebooks"
    assert all(cell.source in shown for cell in cells if cell.text), "run make notebooks"
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", shown):
        assert (NOTEBOOK_FOLDER / link).exists(), link
    index = (NOTEBOOK_FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"]({path.stem}.md)" in index


@NOTEBOOKS
def test_a_jupyter_notebook_has_the_cells_of_its_program(path: Path) -> None:
    kept = path.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert kept == BUILDER.jupyter(path), "run make notebooks"
    install, *cells = json.loads(kept)["cells"]
    assert "implicit-attn" in "".join(install["source"])
    sources = [(cell["cell_type"] == "markdown", "".join(cell["source"])) for cell in cells]
    assert sources == [tuple(cell) for cell in BUILDER.read_cells(path)]
