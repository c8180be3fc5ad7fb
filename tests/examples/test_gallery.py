"""Every experiment of the gallery runs at tiny settings; a key figure where the answer is known."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn.cli import main

pytest.importorskip("tyro", reason="the gallery needs the extra [examples]")
pytest.importorskip("matplotlib", reason="the gallery needs the extra [examples]")

ROOT = Path(__file__).resolve().parents[2]
NAN = torch.nan
EXAMPLES = ROOT / "examples"
Tables = dict[str, list[dict[str, Any]]]


def turns_where_the_formula_says(tables: Tables) -> None:
    """Without spread of the couplings beta_c = 2 artanh(1/2) = 1.0986; the spread adds a little."""
    assert tables["turns"][0]["critical_beta"] == pytest.approx(1.1108, abs=1e-3)


def lengths_stay_below_the_radius(tables: Tables) -> None:
    assert all(0 < row["length"] < 1 for row in tables["histories"])


def corrections_improve_on_naive_mean_field(tables: Tables) -> None:
    """At weak couplings by an order of magnitude."""
    for table in tables.values():
        naive = table[0]["naive_log_partition"]
        assert table[0]["second_log_partition"] < naive / 5
        assert table[0]["adaptive_log_partition"] < naive / 5


def energies_fall(tables: Tables) -> None:
    for graph in ("er-kron", "er-general", "tree", "ring4"):
        energies = [row["energy"] for row in tables["energy"] if row["graph"] == graph]
        assert energies[-1] < energies[0]


def the_root_is_the_minimum(tables: Tables) -> None:
    """Of phi right of all eigenvalues of J, to the spacing of the grid, at beta = 1."""
    root = next(row["root"] for row in tables["temperature"] if abs(row["beta"] - 1) < 1e-9)
    inside = [row for row in tables["curve"] if row["t"] > root - 0.2]
    assert min(inside, key=lambda row: row["phi"])["t"] == pytest.approx(root, abs=4e-3)


def the_limit_of_bessel_ratios(tables: Tables) -> None:
    errors = [
        row["relative_error"]
        for row in tables["ratios"]
        if row["at"] == "nu" and row["order"] in (1, 8, 64, 512)
    ]
    assert errors == pytest.approx([0.72, 0.078, 9.5e-3, 1.2e-3], rel=0.05)


def no_state_rises(tables: Tables) -> None:
    assert max(row["largest_rise"] for row in tables["pictures"]) <= 0


def norms_vanish_in_high_dimension(tables: Tables) -> None:
    """The medians of docs/systems.md, whose draws scatter."""
    known = [3.0, 8.6, 1.9, 0.14, 1.8e-3, 3.5e-6, 5.0e-10]
    for row, norm in zip(tables["usual"], known, strict=True):
        assert norm / 3 < row["norm"] < 3 * norm


def few_patterns_are_retrieved(tables: Tables) -> None:
    first = next(row for row in tables["pairs"] if row["rule"] == "pseudo-inverse")
    assert first["exact"] == 1


def from_all_patterns_to_one(tables: Tables) -> None:
    """The fixed point is the average of all at a high temperature, a single pattern at a low one."""
    for name, count in (("random", 6), ("clusters", 6)):
        hot, cold = tables[f"{name}-summary"]
        assert hot["least"] == pytest.approx(count, rel=0.01)
        assert cold["largest"] == pytest.approx(1, rel=0.01)


def the_density_integrates_to_one(tables: Tables) -> None:
    assert max(row["error"] for row in tables["temperatures"]) < 1e-12


def chains_agree_with_enumeration(tables: Tables) -> None:
    assert max(row["largest deviation"] for row in tables["errors"]) < 5


def memories_take_noise_off(tables: Tables) -> None:
    errors = {row["method"]: row["error"] for row in tables["digits"]}
    assert errors["noisy"] == pytest.approx(1, rel=0.03)
    assert errors["memory of clean images"] < 0.9


def softmax_head_finds_the_rules(tables: Tables) -> None:
    """Of the 810 pairs, from boards under random symmetries."""
    precision = {row["model"]: row["precision"] for row in tables["steps"]}  # the last step's
    assert precision["factored, softmax head"] > 0.95


def penalty_is_that_of_the_first_head_alone(tables: Tables) -> None:
    assert [row["l2"] for row in tables["fits"]] == [1e-4, 0, 0]
    with_penalty, without, _ = (row["held_out"] for row in tables["fits"])
    assert without < with_penalty < math.log(9)


def decimation_on_the_rules_solves_easy_boards(tables: Tables) -> None:
    solved = {row["method"]: row["solved"] for row in tables["table"]}
    assert solved["the rules: with decimation"] == solved["naked and hidden singles"] == 1


def steps_come_in_the_order_of_the_rates(tables: Tables) -> None:
    """Newton, whose error is squared; tuned momentum, plain; heavy-ball of 0.9 shrinks by sqrt 0.9."""
    steps = {row["method"]: row["steps"] for row in tables["methods"]}
    assert steps["Newton"] < steps["momentum, tuned"] < steps["plain"] < steps["momentum 0.9"]


def bare_attention_beats_the_mean(tables: Tables) -> None:
    errors = {row["predictor"]: row["error"] for row in tables["errors"]}
    assert errors["bare, exact normaliser"] < 0.9 * errors["mean of the site"]
    assert errors["ridge regression"] < errors["mean of the site"]


def fixed_points_are_at_rest(tables: Tables) -> None:
    """Symmetric couplings have no cycles, and fixed points where the residual is rounding."""
    for row in tables["ends"][:2]:
        assert row["cycle"] == 0 < row["fixed point"]
        assert row["largest_residual"] < 1e-13


def theories_agree_at_weak_couplings(tables: Tables) -> None:
    for table in tables.values():
        row = table[0]
        assert row["tap_log_partition"] < row["naive_log_partition"]
        assert row["tap_mean"] < row["naive_mean"] < 0.1
        assert row["tap_consistent"] == row["truth_consistent"] == 1


def the_local_rule_makes_states_alike(tables: Tables) -> None:
    """More than fixed weights do, and its energy is lower; both stay above the bound -T log 16."""
    ends = {row["rule"]: row for row in tables["digits"]}
    fixed, local = ends["fixed weights"], ends["local rule"]
    assert -4 * math.log(16) < local["free_energy"] < fixed["free_energy"]
    assert local["spread"] < 0.5 * fixed["spread"]


def all_rules_come_near_the_exact_likelihood(tables: Tables) -> None:
    most = {row["rule"]: row for row in tables["samples"] if row["samples"] == 2000}
    assert len(most) == 4 and most["exact likelihood"]["error"] < 0.3
    assert all(row["gap"] < 0.1 for row in most.values())


def linear_heads_find_the_tree_and_softmax_heads_cannot(tables: Tables) -> None:
    """A softmax needs equal degrees."""
    linear, softmax, _ = (row["excess"] for row in tables["methods"])
    assert linear < 0.5 * softmax


def rivals_have_equal_parameters(tables: Tables) -> None:
    parameters = {row["model"]: row["parameters"] for row in tables["summary"]}
    ours = parameters["equilibrium, 32 iterations"]
    assert parameters["transformer, equal parameters"] == pytest.approx(ours, rel=0.05)
    assert parameters["one iteration"] == ours


def one_block_has_as_many_parameters_repeated(tables: Tables) -> None:
    once, repeated, three = (row["parameters"] for row in tables["accuracy"])
    assert once == repeated < three / 2
    assert [row["iterations"] for row in tables["iterations"]] == [1, 2, 4, 8, 16, 32]


# Options that keep a run within a second or two, and what its tables must show.
EXPERIMENTS: dict[str, tuple[str, Callable[[Tables], None]]] = {
    "attention/landscapes": ("--states 4 --patterns 6 --points 9", no_state_rises),
    "attention/norm_map": ("--dimensions 3 --scales 3 --draws 20", norms_vanish_in_high_dimension),
    "attention/repeated_block": (
        "--data digits --patch 4 --train-images 128 --test-images 40 --epochs 1 --seeds 1",
        one_block_has_as_many_parameters_repeated,
    ),
    "bare/attractors": (
        "--images 16 --steps 3 --moves 6 --random-moves 100 --models 1 --ends 4",
        fixed_points_are_at_rest,
    ),
    "bare/bare_attention": ("--images 200 --steps 60", bare_attention_beats_the_mean),
    "memories/capacity": (
        "--sites 20 --loads 0.1 0.5 --dense-sites 12 --dense-loads 0.5 2 --seeds 2 --probes 5",
        few_patterns_are_retrieved,
    ),
    "memories/effective_rbm": ("--spins 3 --chains 500 --sweeps 20", chains_agree_with_enumeration),
    "memories/fixed_point_kinds": (
        "--clusters 2 --members 3 --dim 8 --betas 0.5 200",
        from_all_patterns_to_one,
    ),
    "memories/hopfield_digits": ("--noises 0.1 --counts 5", memories_take_noise_off),
    "memories/memory_density": ("--samples 40 --starts 1 --steps 3", the_density_integrates_to_one),
    "spins/free_energy": (
        "--models 5 --ising 5 --potts 3 --strengths 0.25",
        corrections_improve_on_naive_mean_field,
    ),
    "potts/gibbs_mixing": ("--sites 9 --colours 3 --chains 200 --sweeps 4", energies_fall),
    "spins/kinetic_ising": (
        "--spins 16 --steps 4 --chains 8 --starts 3 --betas 3 --draws 2 --sweep-spins 16",
        turns_where_the_formula_says,
    ),
    "boards/sudoku_graph": (
        "--steps 8 --train 20 --boards 5 --few-steps 5 --source generated",
        softmax_head_finds_the_rules,
    ),
    "boards/sudoku_potts": (
        "--clues 50 --boards 3 --steps 20 --train 20 --anneal 60 --source generated",
        penalty_is_that_of_the_first_head_alone,
    ),
    "boards/sudoku_belief": (
        "--clues 50 --boards 3 --fit-steps 10 --train 20 --source generated",
        decimation_on_the_rules_solves_easy_boards,
    ),
    "optimisers/descent": ("--draws 2 --steps 60", steps_come_in_the_order_of_the_rates),
    "optimisers/local_learning": (
        "--epochs 30 --passes 1 --steps 2 --inner 2",
        the_local_rule_makes_states_alike,
    ),
    "potts/boltzmann_learning": (
        "--sites 3 --colours 2 --samples 50 2000 --seeds 1 --steps 200",
        all_rules_come_near_the_exact_likelihood,
    ),
    "potts/potts_recovery": (
        "--data tree --sites 7 --colours 3 --samples 3000 --few 50 --steps 150 --masked 3 --batch 16 "
        "--tested 20 --methods linear softmax recycled",
        linear_heads_find_the_tree_and_softmax_heads_cannot,
    ),
    "rings/easy_to_hard": ("--size 4 --steps 1 --tests 4 --seeds 1", rivals_have_equal_parameters),
    "spins/kinetic_vectors": (
        "--spins 12 --dim 6 --steps 3 --chains 16",
        lengths_stay_below_the_radius,
    ),
    "spins/spherical_saddle": ("--sites 4 --dim 6 --frames 9", the_root_is_the_minimum),
    "spins/tap_vs_exact": (
        "--models 2 --ising 4 --potts 3 --strengths 0.25",
        theories_agree_at_weak_couplings,
    ),
    "spins/spin_pictures": ("--dim 8 --sites 6 --share 0.5", the_limit_of_bessel_ratios),
}


def gallery() -> list[Path]:
    """The files that use the runner."""
    return [p for p in sorted(EXAMPLES.glob("*/*.py")) if "from runner import" in p.read_text()]


def test_every_experiment_is_listed() -> None:
    found = {path.relative_to(EXAMPLES).with_suffix("").as_posix() for path in gallery()}
    assert found == {*EXPERIMENTS, "attention/masked_images"}  # which needs trained models


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment(name: str, load: Callable[[Path], ModuleType], tmp_path: Path) -> None:
    words, check = EXPERIMENTS[name]
    module = load(EXAMPLES / f"{name}.py")
    experiment = getattr(module, module.__name__)
    tables = load(EXAMPLES / "runner.py").run(experiment, [*words.split(), "--out", str(tmp_path)])
    stem = module.__name__.replace("_", "-")
    assert (tmp_path / stem / f"{stem}.png").read_bytes()[:4] == b"\x89PNG"
    for table, rows in tables.items():
        with (tmp_path / stem / f"{table}.csv").open(newline="") as file:
            assert [*csv.DictReader(file)] == [
                {key: "" if value is None else str(value) for key, value in row.items()}
                for row in rows
            ]
    check(tables)


@pytest.mark.parametrize("elastic", [True, False])
def test_local_gradients_are_those_of_autograd(
    elastic: bool, load: Callable[[Path], ModuleType]
) -> None:
    """By states and both weights, among held tokens, causal."""
    energy = load(EXAMPLES / "optimisers/local_learning.py").Energy(elastic, causal=True)
    g = torch.Generator().manual_seed(0)
    z, h = torch.randn(2, 2, 5, 3, generator=g, dtype=torch.float64)
    weights = torch.randn(2, 3, 3, generator=g, dtype=torch.float64)
    inputs = [each.clone().requires_grad_() for each in (z, *weights)]
    state, query, key = torch.autograd.grad(
        z.shape[0] * z.shape[1] * energy.value(inputs[0], h, *inputs[1:]), inputs
    )
    torch.testing.assert_close(energy.by_state(z, h, *weights), state)
    for found, expected in zip(energy.by_weights(z, h, *weights), (query, key), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_wrong_option_ends_the_run(
    load: Callable[[Path], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    def experiment(count: int = 2) -> Any:
        """An experiment."""

    for words in (["--count", "two"], ["--unknown", "3"]):
        with pytest.raises(SystemExit) as end:
            load(EXAMPLES / "runner.py").run(experiment, words)
        assert end.value.code == 2 and words[0] in capsys.readouterr().err


# Hidden patches, which need trained models.


@pytest.fixture
def masked(load: Callable[[Path], ModuleType]) -> ModuleType:
    return load(EXAMPLES / "attention/masked_images.py")


def test_two_runs(masked: ModuleType, load: Callable[[Path], ModuleType], tmp_path: Path) -> None:
    small = "--limit 64 --epochs 1 --test 9 --iterations 4 --options dim=8 heads=2 width=8"
    runs = [str(tmp_path / f"run-{seed}") for seed in range(2)]
    for seed, out in enumerate(runs):
        main([*f"train masked-images {small} --seed {seed}".split(), "--out", out])
    words = ["--runs", *runs, "--images", "2", "--out", str(tmp_path)]
    tables = load(EXAMPLES / "runner.py").run(masked.masked_images, words)
    assert [row["seed"] for row in tables["errors"]] == [0] * 6 + [1] * 6
    assert len(tables["fillings"]) == 5
    assert (tmp_path / "masked-images" / "masked-images.png").stat().st_size > 10_000


def test_the_nearest_visible_pixels_are_averaged(masked: ModuleType) -> None:
    """By hand: of (0, 0) the two neighbours; (1, 2) is sqrt 2 from (0, 1), (2, 2) sqrt 5 from both."""
    image = torch.tensor([[NAN, 2.0, NAN], [4.0, NAN, NAN], [NAN, NAN, NAN]]).view(1, 1, 3, 3)
    filled = masked.fill("nearest visible pixel", image, image)[0, 0]
    assert torch.allclose(filled, torch.tensor([[3.0, 2, 2], [4, 3, 2], [4, 4, 3]]))


def test_the_other_guesses(masked: ModuleType) -> None:
    """A training image is found; the Gaussian's is ``mean_h + C_hv C_vv^-1 (x_v - mean_v)``."""
    train = torch.rand(40, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    shown = train[3:5].clone()
    shown[:, 0, 0, 0] = NAN
    assert torch.equal(masked.fill("nearest training image", train, shown), train[3:5])
    flat: Tensor = train.flatten(1).double()
    mean, c = flat.mean(0), torch.cov(flat.T)
    c = c + 0.01 * c.diagonal().mean() * torch.eye(4).double()
    weights = torch.linalg.solve(c[1:, 1:], c[1:, 0])
    wanted = mean[0] + (shown.flatten(1)[:, 1:].double() - mean[1:]) @ weights
    found = masked.fill("Gaussian, linear", train, shown)[:, 0, 0, 0]
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-5)


# Examples to be read.


def test_wrap_your_energy(
    load: Callable[[Path], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    """The filters learn: the error ends well below that of the noisy signals themselves."""
    with torch.random.fork_rng(devices=[]):
        load(EXAMPLES / "wrap_your_energy.py").train(steps=40)
    pattern = r"error ([\d.]+) \(noisy ([\d.]+)\) +converged (\d+) % +energy ([\d.]+) -> ([\d.]+)"
    lines = re.findall(pattern, capsys.readouterr().out)
    rows = [[float(value) for value in line] for line in lines]
    assert len(rows) >= 5
    assert rows[-1][0] < 0.25 * rows[0][0] and rows[-1][0] < 0.7 * rows[-1][1]
    for _, _, converged, before, after in rows:
        assert converged == 100 and after < before


def test_examples_are_listed_and_public() -> None:
    """Nothing private is imported."""
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"wrap_your_energy.py", "scale_out.py", "runner.py"}
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/*.py")]:
        assert path.read_text().startswith(('"""', 'r"""')), path
        for line in path.read_text().splitlines():
            assert not re.match(r"\s*(from|import) (implicit_attn|solvers)\S*.*[. ]_\w", line), line
