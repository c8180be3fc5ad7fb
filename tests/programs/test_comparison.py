"""The comparison of a trained equilibrium: budgets, harms, signals, the models beside it, the words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.studies import specification
from implicit_attn import DEQ
from implicit_attn.data import ImageData
from implicit_attn.models import build_model
from implicit_attn.programs.comparison import (
    ENCODER,
    IDENTITY,
    EncoderBackbone,
    _on_accuracy,
    _on_confidence,
    _on_robustness,
    add_noise,
    auroc,
    build_rival,
    compare,
    confidence,
    foreign_images,
    logistic_regression,
    mahalanobis,
    occlude,
    robustness,
    signals,
    smallest_curvature,
)
from implicit_attn.studies.subjects import Subject


def model(name: str = "equilibrium", **options: Any) -> Any:
    torch.manual_seed(0)
    return build_model(specification(name, iterations=60, **options)).eval()


def images(count: int = 12, seed: int = 0) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def labels(count: int = 12) -> Tensor:
    return torch.arange(count) % 10


class Brightness(nn.Module):
    """Two classes by the mean of an image, as a model whose answers are known."""

    def forward(self, given: Tensor) -> Tensor:
        bright = given.flatten(1).mean(1)
        return 20 * torch.stack([0.5 - bright, bright - 0.5], dim=1)


# Robustness.


def test_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    middle = torch.full((50, 1, 8, 8), 0.5)
    noisy = add_noise(middle, 0.1, generator)
    assert (noisy - middle).std().item() == pytest.approx(0.1, rel=0.05)
    assert add_noise(images(), 5.0, generator).aminmax() == (0.0, 1.0)
    assert torch.equal(add_noise(images(), 0.0, generator), images())


@pytest.mark.parametrize(("share", "side"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_occlusion_hides_one_square(share: float, side: int) -> None:
    white = torch.ones(200, 2, 8, 8)
    hidden = occlude(white, share, torch.Generator().manual_seed(0)) == 0
    assert (hidden.sum((2, 3)) == side * side).all()
    assert torch.equal(hidden[:, 0], hidden[:, 1])
    for way in (2, 3):  # neighbouring rows and columns, and every place among the images
        lines = hidden[:, 0].any(way - 1)
        assert (lines.sum(1) == side).all()
        if side:
            first = lines.int().argmax(1)
            assert all(lines[k, f : f + side].all() for k, f in enumerate(first.tolist()))
            assert set(first.tolist()) == set(range(8 - side + 1))


def test_all_models_see_the_same_harms() -> None:
    pair = {"a": Brightness(), "b": Brightness()}
    known = (images().flatten(1).mean(1) > 0.5).long()
    table = robustness(pair, images(), known, draws=2)
    found = {name: [row["accuracy"] for row in table if row["model"] == name] for name in pair}
    assert found["a"] == found["b"]
    assert [row["accuracy"] for row in table if row["strength"] == 0] == [1.0] * 4
    hidden = [row["accuracy"] for row in table if row["harm"] == "occlusion"]
    assert hidden[-1] < 1.0  # the darker an image, the less bright
    assert table == robustness(pair, images(), known, draws=2)
    assert table != robustness(pair, images(), known, draws=2, seed=1)


# Confidence.


def test_auroc() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(6, (40,), generator=generator)
    second = torch.randint(6, (30,), generator=generator)
    above = (first[:, None] > second).double() + 0.5 * (first[:, None] == second)
    assert auroc(first, second) == pytest.approx(above.mean().item())
    assert auroc(second, first) == pytest.approx(1 - above.mean().item())
    assert auroc(first + 6, first) == 1.0 and auroc(first, first) == pytest.approx(0.5)
    assert auroc(first, first[:0]) != auroc(first, first[:0])  # NaN


def test_curvature_is_the_smallest_eigenvalue() -> None:
    subject = Subject(model().double(), images(2).double())
    x, mask = subject.given(subject.inputs)
    with torch.no_grad():
        z = subject.layer.solve(x, mask).value
    update: Any = subject.layer.update
    prepared = update.prepare(x)
    basis = torch.eye(z[0].numel(), dtype=torch.float64).view(-1, *z.shape[1:])
    columns = [update.energy.hvp(z, e.expand_as(z), prepared).flatten(1) for e in basis]
    expected = torch.linalg.eigvalsh(torch.stack(columns, dim=2))[:, 0]
    found = smallest_curvature(subject, z, x, mask, 400)
    assert found is not None and torch.allclose(found, expected, atol=1e-3)
    assert (smallest_curvature(subject, z, x) - expected).abs().max() < 0.15  # type: ignore[operator]
    assert (expected > 0.1).all() and (expected < 1).all()


def test_signals_of_each_kind_of_model() -> None:
    made = model()
    found = signals(made, images(300))
    assert set(found) == {"softmax", "energy", "flatness", "residual"}
    assert all(score.shape == (300,) and score.isfinite().all() for score in found.values())
    subject = Subject(made, images(300))
    x, mask = subject.given(subject.inputs)
    with torch.no_grad():
        energies = subject.energy(subject.layer.solve(x, mask).value, x, mask)
    assert energies is not None
    expected = energies.double()
    assert torch.allclose(found["energy"], expected, rtol=1e-4)
    other = signals(model("hyperset-equilibrium", weight=0.05), images(3))
    assert set(other) == {"softmax", "energy", "residual"}
    assert set(signals(Brightness(), images(3), images(4, 1))) == {"softmax"}


def test_distances_from_known_images() -> None:
    """Those of the images themselves have a mean of their number of columns; far ones are far."""
    made, x = model(), images(300)
    found = signals(made, torch.cat([x, x > 0.5]), x)  # of another contrast
    assert set(found) - set(signals(made, x)) == {"profile", "features"}
    for name, size in (("profile", 3), ("features", 8)):
        known, other = found[name].split(300)
        # A LayerNorm without weights yet: its outputs sum to zero, so a direction is missing.
        expected = (size - (name == "features")) * 299 / 300
        assert known.mean().item() == pytest.approx(expected, rel=1e-2)
        assert other.mean() > 2 * known.mean()


def test_mahalanobis() -> None:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    rows = torch.randn(500, 4, generator=generator, dtype=torch.float64) @ mix + 3
    found = mahalanobis(rows, rows)
    away = rows - rows.mean(0)
    expected = torch.einsum("ni,ij,nj->n", away, torch.linalg.inv(torch.cov(rows.T)), away)
    assert torch.allclose(found, expected, rtol=1e-3)
    flat = torch.zeros(3, 2, dtype=torch.float64)
    assert mahalanobis(flat, flat + 1).isfinite().all()


def test_foreign_images() -> None:
    given, kinds = images(40), labels(40)
    found = foreign_images(given, kinds)
    assert torch.equal(found["inverted"], 1 - given)
    shuffled = found["pixels shuffled"]
    assert not torch.equal(shuffled, given)
    assert torch.equal(shuffled.flatten(1).sort(1).values, given.flatten(1).sort(1).values)
    assert set(found["pixels drawn"].flatten().tolist()) <= set(given.flatten().tolist())
    blended = 2 * found["two blended"]
    assert 20 < len(blended) <= 40
    for image in blended:
        gaps = (image - given[:, None] - given[None]).abs().amax((2, 3, 4))
        first, second = divmod(int(gaps.argmin()), 40)
        assert gaps.min() < 1e-6 and kinds[first] != kinds[second]


def test_a_signal_that_knows_its_mistakes() -> None:
    """Brightness errs near the threshold alone, where it is unsure."""
    given = torch.linspace(0, 1, 101).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    truth = (given[:, 0, 0, 0] > 0.4).long()  # wrong in between
    table = confidence({"m": Brightness()}, given, truth, foreign={"grey": given[50:51]})
    rows = {row["task"]: row for row in table}
    assert rows["mistakes"]["positives"] == 10 and rows["mistakes"]["negatives"] == 91
    assert rows["mistakes"]["auroc"] > 0.9
    assert rows["grey"]["auroc"] == pytest.approx(1.0, abs=0.01)
    assert rows["grey"]["positives"] == 1 and rows["grey"]["negatives"] == 101


# The models beside it.


@pytest.mark.parametrize("classes", [[0, 1, 2], [0, 2], [1, 2]])
def test_logistic_regression_is_scikit_learns(classes: list[int]) -> None:
    """Its probabilities, also where classes are missing."""
    sklearn = pytest.importorskip("sklearn.linear_model")
    x, y = images(60), torch.tensor(classes)[torch.arange(60) % len(classes)]
    data = ImageData("toy", 3, x, y, x, y)
    made, seconds = logistic_regression(data)
    fitted = sklearn.LogisticRegression(max_iter=2000).fit(x.flatten(1).numpy(), y.numpy())
    expected = torch.zeros(60, 3, dtype=torch.float64)
    expected[:, torch.tensor(classes)] = torch.from_numpy(
        fitted.predict_proba(x.flatten(1).numpy())
    ).double()
    with torch.no_grad():
        assert torch.allclose(made(x).softmax(1).double(), expected, atol=1e-5)
    assert seconds > 0


def test_the_encoder_has_the_blocks_size() -> None:
    """33,472 parameters for the block's 33,088, around them the same classifier."""
    around = {"image_size": 8, "channels": 1, "classes": 10, "patch": 2}
    backbone = {"dim": 64, "heads": 4, "hidden": 128}
    made: Any = {name: build_rival(name, backbone, around) for name in (IDENTITY, ENCODER)}
    size = {name: sum(p.numel() for p in each.parameters()) for name, each in made.items()}
    assert size["encoder layer"] - size["identity"] == 33_472
    assert not [module for module in made["encoder layer"].modules() if isinstance(module, DEQ)]
    two = EncoderBackbone(64, 4, 128, layers=2)
    assert sum(p.numel() for p in two.parameters()) == 2 * 33_472
    x = torch.randn(2, 5, 64)
    assert torch.equal(made["identity"].backbone(x, iterations=3), x)
    assert two(x).shape == x.shape


def test_the_comparison(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    truth = (images().flatten(1).mean(1) > 0.5).long()
    data = ImageData("toy", 2, images(), truth, images(), truth)
    never = nn.Sequential(Brightness(), nn.Linear(2, 2))
    nn.init.zeros_(never[1].get_parameter("weight"))
    found = compare("good", Brightness(), 1.0, {ENCODER: (never, 2.0)}, data)
    assert [row["model"] for row in found.comparison] == [ENCODER, "good"]
    assert found.comparison[1] == {
        "model": "good",
        "accuracy": 1.0,
        "parameters": 0,
        "seconds": 1.0,
    }
    assert found.comparison[0]["parameters"] == 6
    found.save(tmp_path / "a", "a title")
    assert (tmp_path / "a.png").stat().st_size > 20_000
    assert "points against the encoder layer" in str(found)


# The words.


def test_words_on_accuracy_and_robustness() -> None:
    """A difference within the error is none; without the encoder there is nothing to say."""
    rows = [{"model": "mine", "accuracy": 0.99}, {"model": "line", "accuracy": 0.98}]
    line = _on_accuracy(rows, "mine", 400)
    assert "+1.00 points against the line" in line and "400 test images" in line

    def harmed(name: str, *values: float) -> list[dict[str, Any]]:
        row = {"harm": "noise", "model": name}
        return [{**row, "strength": 0.1 * k, "accuracy": v} for k, v in enumerate(values)]

    for own, verdict in (
        ((0.9, 0.9, 0.9), "within the error: it gains nothing"),
        ((0.9, 0.95, 0.99), ": more robust"),
        ((0.9, 0.8, 0.7), ": less robust"),
        ((0.9, 0.99, 0.7), "at some strengths and less"),
    ):
        rows = [*harmed("mine", *own), *harmed(ENCODER, 0.9, 0.9, 0.9)]
        (line,) = _on_robustness(rows, "mine", 1000)
        assert line.startswith("Noise: ") and verdict in line
        assert _on_robustness(harmed("mine", *own), "mine", 1000) == []


@pytest.mark.parametrize(
    ("energy", "verdict"), [(0.9, "better"), (0.5, "worse"), (0.71, "no better")]
)
def test_words_on_confidence(energy: float, verdict: str) -> None:
    """The better of its own signals, beside the best that needs no equilibrium, of any model."""
    row = {"task": "noise", "model": "mine", "positives": 7}
    scores = {"softmax": 0.6, "energy": energy, "profile": 0.4, "residual": 1.0}
    rows = [{**row, "signal": name, "auroc": score} for name, score in scores.items()]
    rows.append({**row, "model": "other", "signal": "features", "auroc": 0.7})
    (line,) = _on_confidence(rows, "mine")
    said = (
        f"Noise (7 images): its energy (AUROC {energy:.2f}) is {verdict} than the features of the "
    )
    assert line.startswith(said + "other (0.70)") and line.endswith("its own softmax has 0.60.")
