"""Studies of layers and models whose answers are known; enumeration of spins."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

import solvers
from cases.deq import make, specification, tokens, write_weights
from implicit_attn import DEQ, EquilibriumBlock, GradientStep, studies
from implicit_attn.energies import FunctionEnergy, Quadratic
from implicit_attn.models import build_model
from implicit_attn.studies import SpinModel, exact_moments, random_ising, random_potts
from implicit_attn.studies.study import Subject, subject_of
from implicit_attn.updates.hyperset import ConditionedStepSizes

CURVATURES = torch.tensor([0.2, 0.5, 1.5], dtype=torch.float64)
STUDIES: dict[str, dict[str, Any]] = {
    "convergence": {"max_steps": 12, "spectra": 1},
    "extrapolation": {"factor": 2},
    "paths": {"starts": 1},
    "geometry": {"iterations": 4},
}


def image_subject(name: str, **options: Any) -> Subject:
    """An untrained model of this backbone with random images, float32."""
    torch.manual_seed(0)
    iterations = options.setdefault("iterations", 3)
    model: nn.Module = build_model(specification(name, **options)).eval()
    for module in model.modules():
        if isinstance(module, ConditionedStepSizes):  # else time and state say nothing yet
            nn.init.normal_(module.last.weight, std=0.02)
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(12, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (12,), generator=generator)
    return Subject(model, images, labels, iterations)


def bowl_layer(step_size: float = 1.0) -> DEQ:
    """A quadratic energy with the curvatures ``CURVATURES`` in each token."""

    def bowl(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * (CURVATURES.to(z) * (z - x).square()).sum((1, 2))

    return DEQ(GradientStep(FunctionEnergy(bowl), step_size), init="zeros")


def rows(batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(batch, 2, 3, generator=generator, dtype=torch.float64)


# Any layer, and any model that calls one.


def block_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8), EquilibriumBlock(8, heads=2), nn.Flatten(), nn.Linear(24, 4)
    )


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("kind", ["update", "block"])
def test_a_study_of_ones_own_layer(name: str, kind: str, tmp_path: Path) -> None:
    """In one call: tables with a picture, of a DEQ or of a model around one."""
    pytest.importorskip("matplotlib", reason="the studies draw")
    if kind == "block":
        layer, x = block_model(), torch.randn(6, 3, 5)
    else:
        layer, x = make(kind), tokens(batch=6)
    judged = kind == "block" and name in ("paths", "extrapolation")
    labels = {"targets": torch.arange(6) % 4} if judged else {}
    found = getattr(studies, name)(layer, x, **STUDIES[name], **labels)
    tables = [each for each in found if isinstance(each, list)]
    assert all(row.keys() == table[0].keys() for table in tables for row in table)
    found.plot("a title").savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_study_is_not_given() -> None:
    wrong: Any
    for wrong in (
        (DEQ(Quadratic()),),
        (len, torch.ones(1, 2, 3)),
        (nn.Linear(3, 3), torch.ones(1, 3)),
    ):
        with pytest.raises(TypeError, match=r"layer must be a DEQ|model must contain a DEQ"):
            studies.paths(*wrong)


def test_a_subject_looks_into_a_model() -> None:
    """What its layer is given, and its outputs for another state; it is as before behind that."""
    model, x = block_model().eval(), torch.randn(6, 3, 5)
    subject = subject_of(model, x)
    block: Any = model[1]
    given, mask = subject.given(x)
    assert torch.equal(given.tokens, block._arguments(model[0](x))[1].tokens) and mask is None
    state = torch.randn(6, 3, 8)
    with torch.no_grad():
        expected = model[3](model[2](model[0](x) + state))
        assert torch.allclose(subject.outputs(x, state), expected)
        usual = model(x)
        z = subject.layer.solve(given, tolerance=solvers.Tolerance(1e-3)).value
        assert torch.allclose(subject.outputs(x, z), usual, atol=1e-2)
        assert torch.equal(model(x), usual)  # no hook is left


# Convergence.


def test_convergence_of_a_bowl() -> None:
    found = studies.convergence(bowl_layer(), rows(5), rtol=1e-6, max_steps=40)
    names = [row["solver"] for row in found.costs]
    assert names == list(studies.solver_choices(bowl_layer()))
    assert {"forward", "plain forward", "L-BFGS", "Newton"} <= set(names)
    for name, curve in found.curves.items():
        assert (curve.residual.diff(dim=1) <= 0).all()
        assert (curve.energy is None) == (name == "plain forward")
    costs = {row["solver"]: row for row in found.costs}
    fast, slow = costs["L-BFGS"], costs["plain forward"]
    assert fast["converged"] == 1.0 and fast["evaluations"] <= 12
    # The slowest mode shrinks by 0.8 a step: 1e-6 is not there within 40.
    assert slow["converged"] == 0.0 and slow["evaluations"] == 40
    without = studies.solver_choices(make("update"))  # an energy
    assert set(without) == {"plain forward", "Anderson", "Broyden", "Newton"}


@pytest.mark.parametrize("step_size", [1.0, 0.5])
def test_eigenvalues_of_a_gradient_step(step_size: float) -> None:
    x = rows(2)
    found = studies.jacobian_eigenvalues(bowl_layer(step_size), x, x)
    expected = sorted([1 - step_size * c for c in CURVATURES.tolist()] * 2)
    assert not found.imag.any() and found.real.tolist() == [pytest.approx(expected)] * 2


# Accuracy against evaluations and iterations.


class Threshold(nn.Module):
    """From zero half way to x in each step; class 1 where the state has come beyond 0.8."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = DEQ(GradientStep(Quadratic(), 0.5), solver=solvers.Forward(), init="zeros")

    def forward(self, x: Tensor) -> Tensor:
        score = self.layer(x)[:, 0] - 0.8
        return torch.stack([-score, score], dim=1)


def test_accuracy_against_evaluations() -> None:
    """After k evaluations the state is (1 - 2^-(k-1)) x: class 1 where that exceeds 0.8."""
    x = torch.linspace(0.0, 2.0, 41).unsqueeze(1)
    budgets, subject = [1, 2, 3, 4, 8, 30], Subject(Threshold(), x, (x[:, 0] > 0.8).long())
    table = studies.accuracy_by_iterations(subject, budgets)
    for row, budget in zip(table, budgets, strict=True):
        reached = (1 - 0.5 ** (budget - 1)) * x
        expected = ((reached > 0.8) == (x > 0.8)).double().mean().item()
        assert row["evaluations"] == budget and row["accuracy"] == pytest.approx(expected)
        energy = 0.5 * (reached - x).square().mean().item()
        assert row["energy"] == pytest.approx(energy, rel=1e-4, abs=1e-9)
    assert all(b["residual"] <= a["residual"] for a, b in itertools.pairwise(table))


def test_extrapolation_says_what_is_reached() -> None:
    x = torch.linspace(0.0, 2.0, 41).unsqueeze(1)
    found = studies.extrapolation(Threshold(), x, (x[:, 0] > 0.8).long(), factor=2)
    names = [row["method"] for row in found.reach]
    assert names == ["forward", "plain forward", "L-BFGS", "Anderson", "Broyden"]
    reach = {row["method"]: row for row in found.reach}
    # The energy is quadratic with one curvature: an accelerated step ends at its minimum.
    assert reach["L-BFGS"]["to_residual"] < reach["forward"]["to_residual"] <= found.trained


def test_a_collapse_lies_within_the_axes_and_a_solver_has_one_colour() -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")
    names = ["forward", "plain forward", "L-BFGS", "Anderson", "Broyden"]
    curves = [
        {"method": name, "evaluations": count, "accuracy": right, "loss": 1.0 - right, "residual": right}
        for name in names for count, right in ((1, 0.5), (10, 0.95), (20, 0.05))
    ]  # fmt: skip
    panels = studies.Extrapolation(curves, [], 10).plot().axes
    for axes, key, scale in zip(
        panels, ("accuracy", "loss", "residual"), (100, 1, 1), strict=False
    ):
        low, high = axes.get_ylim()
        assert all(low <= scale * row[key] <= high for row in curves)
    found = studies.convergence(bowl_layer(0.5), rows(4), max_steps=20)
    colours = [
        {line.get_label(): line.get_color() for line in axes.lines if line.get_label() in names}
        for axes in (panels[0], found.plot().axes[0])
    ]
    assert colours[0] == colours[1] and len(set(colours[0].values())) == len(names)


def test_plain_iteration_is_not_safeguarded() -> None:
    """A step that is too long by half: without its energy the iteration diverges."""
    found = studies.extrapolation(bowl_layer(2.0), rows(4), factor=2)
    last = {row["method"]: row["residual"] for row in found.curves}
    assert last["forward"] < 0.5 < last["plain forward"]


@pytest.mark.parametrize("name", ["hyperset", "transformer"])
def test_an_unrolled_model_at_other_numbers_of_iterations(name: str) -> None:
    subject = image_subject(name, iterations=3)
    for row in studies.accuracy_by_iterations(subject, [1, 2, 5]):
        with torch.no_grad():
            logits = subject.model(subject.inputs, iterations=row["evaluations"])
        labels: Any = subject.targets
        loss = nn.functional.cross_entropy(logits.double(), labels).item()
        assert row["loss"] == pytest.approx(loss, rel=1e-6)
    (reach,) = studies.extrapolation(subject, factor=2).reach
    assert reach["method"] == "recurrence" and reach["to_residual"] <= 3


# Paths.


def test_a_contraction_forgets_its_start_and_a_bistable_map_does_not() -> None:
    x = rows(9).abs() + 0.1
    forgets = studies.paths(DEQ.from_update(lambda z, x: 0.5 * z + x), x)
    assert [row["start"] for row in forgets.summary] == ["input", "zero", "random 1", "random 2"]
    assert all(row["distance_largest"] < 1e-5 and row["same"] == 1.0 for row in forgets.summary)
    assert [len(each) for each in forgets.distances.values()] == [9] * 4
    # ``z <- tanh(3 z)`` has attracting ends +m and -m, and keeps zero.
    layer = DEQ.from_update(lambda z, x: torch.tanh(3 * z), solver=solvers.Forward())
    keeps = {row["start"]: row for row in studies.paths(layer, x).summary}
    assert keeps["zero"]["distance"] == pytest.approx(1.0) and keeps["zero"]["same"] == 0.0
    assert keeps["random 1"]["same"] < 1.0


# Geometry.

HALF = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
SETS = {  # tokens, effective rank, average angle
    "orthonormal": (torch.eye(5, 8), 5.0, 90.0),
    "one direction": (torch.ones(6, 1) * torch.arange(1.0, 5.0), 1.0, 0.0),
    "two to one": (HALF, math.exp(-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3)), 90.0),
    "zero": (torch.zeros(4, 3), 0.0, 90.0),
    "simplex": (torch.eye(4) - 0.25, 3.0, math.degrees(math.acos(-1 / 3))),
}


@pytest.mark.parametrize("name", SETS)
def test_rank_and_angle(name: str) -> None:
    """Of sets of known geometry, and the same in a random frame, which changes neither."""
    given, rank, angle = SETS[name]
    generator, size = torch.Generator().manual_seed(3), given.shape[-1]
    frame = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
    both = torch.stack([given.double(), given.double() @ frame])
    assert studies.effective_rank(both).tolist() == pytest.approx([rank, rank], abs=1e-9)
    # Near 0 and 180 degrees the arc cosine takes the square root of the rounding.
    assert studies.average_angle(both).tolist() == pytest.approx([angle, angle], abs=2e-5)


def test_geometry_of_the_recurrence() -> None:
    """The tables say what the model's own trajectory holds."""
    subject = image_subject("hyperset", iterations=3)
    found = studies.geometry(subject, iterations=4)
    with torch.no_grad():
        own = subject.model.backbone.trajectory(subject.model.tokens(subject.inputs), iterations=4)
    for name in ("attention", "feedforward"):
        torch.testing.assert_close(found.energies[name], getattr(own, f"{name}_energy"))
    torch.testing.assert_close(found.rank, studies.effective_rank(own.features).mean(1))
    assert found.angle.shape == (5, 2)
    with pytest.raises(TypeError, match="SharedTransformer"):
        studies.geometry(image_subject("transformer"))


def test_geometry_of_an_equilibrium() -> None:
    """Energies of Hyper-SET apart; of another layer their sum, which falls."""
    subject = image_subject("hyperset-equilibrium", iterations=30).exact()
    energies = studies.geometry(subject, iterations=6).energies
    total = (energies["attention"] + energies["feedforward"]).mean(1)
    x, _ = subject.given(subject.inputs)
    energy = subject.energy(x, x)  # no pull at the input
    assert energy is not None and total[0].item() == pytest.approx(energy.mean().item())
    assert total[-1] < total[0]
    whole = studies.geometry(make("gradient"), tokens()).energies["whole"].mean(1)
    assert (whole.diff() <= 0).all()


# Tables, and subjects of files.


def test_tables(tmp_path: Path) -> None:
    table = [{"name": "a", "share": 0.123456}, {"name": "longer, with a comma", "share": 1e-9}]
    studies.write_table(tmp_path / "a.csv", table)
    with (tmp_path / "a.csv").open(newline="") as file:
        assert [{**row, "share": float(row["share"])} for row in csv.DictReader(file)] == table
    lines = studies.format_table(table).split("\n")
    assert len({len(line) for line in lines}) == 1 and lines[1].split() == ["a", "0.1235"]


def test_subjects_of_files(tmp_path: Path) -> None:
    path = write_weights(tmp_path / "weights.safetensors", "hyperset-equilibrium")
    subject = studies.open_subject(path, samples=7)
    assert len(subject.inputs) == 7 and subject.trained == 4
    with pytest.raises(ValueError, match="LanguageModel"):
        studies.open_subject("austen-language")


Draw = Callable[[float, torch.Generator], SpinModel]

FAMILIES: dict[str, Draw] = {
    "one spin": lambda s, g: random_ising(1, s, g, samples=2),
    "ising": lambda s, g: random_ising(4, s, g, samples=2),
    "potts": lambda s, g: random_potts(3, 3, s, g, samples=2),
}


def drawn(family: str, strength: float = 1.3, seed: int = 0) -> SpinModel:
    return FAMILIES[family](strength, torch.Generator().manual_seed(seed))


def looped(model: SpinModel, field: Tensor) -> Tensor:
    """log Z, one configuration after the other; its derivatives by the field are the moments."""
    sites, exponents = len(field), []
    for chosen in itertools.product(model.values, repeat=sites):
        exponent = sum(spin @ x for spin, x in zip(chosen, field, strict=True))
        for i, j in itertools.combinations(range(sites), 2):
            exponent = exponent + chosen[i] @ model.couplings[i, j] @ chosen[j]
        exponents.append(exponent)
    return torch.stack(exponents).logsumexp(0) - sites * math.log(len(model.values))


@pytest.mark.parametrize("family", FAMILIES)
def test_enumeration_against_loops(family: str) -> None:
    model = drawn(family)
    exact = exact_moments(model)
    batch, sites, dim = model.field.shape
    assert exact.mean.shape == (batch, sites, dim)
    assert exact.covariance.shape == (batch, sites, dim, sites, dim)
    for sample, field in enumerate(model.field):
        log_partition = partial(looped, model)
        torch.testing.assert_close(exact.log_partition[sample], log_partition(field))
        mean, covariance = (kind(log_partition, field) for kind in (jacobian, hessian))
        torch.testing.assert_close(exact.mean[sample], mean)
        torch.testing.assert_close(exact.covariance[sample], covariance)


@pytest.mark.parametrize("family", FAMILIES)
def test_couplings_are_symmetric_and_proportional_to_the_strength(family: str) -> None:
    model, stronger = drawn(family, 1.0), drawn(family, 2.5)
    assert torch.equal(model.couplings, model.couplings.permute(1, 0, 3, 2))
    assert not model.couplings.diagonal().any() and torch.equal(stronger.field, model.field)
    torch.testing.assert_close(stronger.couplings, 2.5 * model.couplings)


G = torch.Generator()
BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: random_ising(0, 1.0, G), "sites"),
    (lambda: random_ising(3, -1.0, G), "strength"),
    (lambda: random_potts(3, 1, 1.0, G), "states"),
    (lambda: exact_moments(random_ising(21, 1.0, G)), "configurations"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
