"""The comparison of a trained equilibrium: harms, signals, the models beside it."""

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
)
from implicit_attn.studies.subjects import Subject


def images(count: int = 12) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class Brightness(nn.Module):
    """Two classes by the mean of an image, as a model whose answers are known."""

    def forward(self, given: Tensor) -> Tensor:
        bright = given.flatten(1).mean(1)
        return 20 * torch.stack([0.5 - bright, bright - 0.5], dim=1)


def test_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    middle = torch.full((50, 1, 8, 8), 0.5)
    noisy = add_noise(middle, 0.1, generator)
    assert (noisy - middle).std().item() == pytest.approx(0.1, rel=0.05)
    assert add_noise(images(), 5.0, generator).aminmax() == (0.0, 1.0)
    assert torch.equal(add_noise(images(), 0.0, generator), images())


@pytest.mark.parametrize(("share", "side"), [(0.0, 0), (0.25, 2), (1.0, 8)])
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
    table = robustness(pair, images(), known)
    found = {name: [row["accuracy"] for row in table if row["model"] == name] for name in pair}
    assert found["a"] == found["b"]
    assert [row["accuracy"] for row in table if row["strength"] == 0] == [1.0] * 4
    hidden = [row["accuracy"] for row in table if row["harm"] == "occlusion"]
    assert hidden[-1] < 1.0  # the darker an image, the less bright


def test_auroc() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(6, (n,), generator=generator) for n in (40, 30))
    above = (first[:, None] > second).double() + 0.5 * (first[:, None] == second)
    assert auroc(first, second) == pytest.approx(above.mean().item())
    assert auroc(first + 6, first) == 1.0
    assert auroc(first, first[:0]) != auroc(first, first[:0])  # NaN


def test_signals_of_each_kind_of_model() -> None:
    """Features of known images have a mean distance of their number; those of others are farther."""
    torch.manual_seed(0)
    made, x = build_model(specification("equilibrium", iterations=60)).eval(), images(300)
    found = signals(made, torch.cat([x, x > 0.5]), x)  # of another contrast
    assert set(found) == {"softmax", "energy", "features"}
    assert all(score.shape == (600,) and score.isfinite().all() for score in found.values())
    subject = Subject(made, x)
    given, mask = subject.given(x)
    with torch.no_grad():
        expected = subject.energy(subject.layer.solve(given, mask).value, given, mask)
    assert expected is not None
    assert torch.allclose(found["energy"][:300], expected.double(), rtol=1e-4)
    known, other = found["features"].split(300)
    # A LayerNorm without weights yet: its outputs sum to zero, so one of 8 directions is missing.
    assert known.mean().item() == pytest.approx(7 * 299 / 300, rel=1e-2)
    assert other.mean() > 2 * known.mean()
    assert set(signals(Brightness(), x[:3], x[:4])) == {"softmax"}


def test_mahalanobis() -> None:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    rows = torch.randn(500, 4, generator=generator, dtype=torch.float64) @ mix + 3
    away = rows - rows.mean(0)
    expected = torch.einsum("ni,ij,nj->n", away, torch.linalg.inv(torch.cov(rows.T)), away)
    assert torch.allclose(mahalanobis(rows, rows), expected, rtol=1e-3)
    flat = torch.zeros(3, 2, dtype=torch.float64)
    assert mahalanobis(flat, flat + 1).isfinite().all()


def test_foreign_images() -> None:
    given, kinds = images(40), torch.arange(40) % 10
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
    row = confidence({"m": Brightness()}, given, truth, given)[0]
    assert (row["task"], row["positives"], row["negatives"]) == ("mistakes", 10, 91)
    assert row["auroc"] > 0.9


@pytest.mark.parametrize("classes", [[0, 1, 2], [0, 2]])
def test_logistic_regression_is_scikit_learns(classes: list[int]) -> None:
    """Its probabilities, also where classes are missing."""
    sklearn = pytest.importorskip("sklearn.linear_model")
    x, y = images(60), torch.tensor(classes)[torch.arange(60) % len(classes)]
    made, seconds = logistic_regression(ImageData("toy", 3, x, y, x, y))
    fitted = sklearn.LogisticRegression(max_iter=2000).fit(x.flatten(1).numpy(), y.numpy())
    expected = torch.from_numpy(fitted.predict_proba(x.flatten(1).numpy())).double()
    with torch.no_grad():
        found = made(x).softmax(1).double()
    assert torch.allclose(found[:, torch.tensor(classes)], expected, atol=1e-5) and seconds > 0


def test_the_encoder_has_the_blocks_size() -> None:
    """33,472 parameters for the block's 33,088, around them the same classifier."""
    around = {"image_size": 8, "channels": 1, "classes": 10, "patch": 2}
    sizes = {"dim": 64, "heads": 4, "width": 128, "layers": 1, "dropout": 0.1}
    made: Any = {name: build_rival(name, sizes, around) for name in (IDENTITY, ENCODER)}
    size = {name: sum(p.numel() for p in each.parameters()) for name, each in made.items()}
    assert size[ENCODER] - size[IDENTITY] == 33_472
    assert not [module for module in made[ENCODER].modules() if isinstance(module, DEQ)]
    x = torch.randn(2, 5, 64)
    assert torch.equal(made[IDENTITY].backbone(x, iterations=3), x)


def test_the_comparison(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    truth = (images().flatten(1).mean(1) > 0.5).long()
    data = ImageData("toy", 2, images(), truth, images(), truth)
    never = nn.Sequential(Brightness(), nn.Linear(2, 2))
    nn.init.zeros_(never[1].get_parameter("weight"))
    found = compare("good", Brightness(), 1.0, {ENCODER: (never, 2.0)}, data)
    assert [row["model"] for row in found.comparison] == [ENCODER, "good"]
    assert list(found.comparison[1].values()) == ["good", 1.0, 0, 1.0]
    found.save(tmp_path / "a", "a title")
    assert (tmp_path / "a.png").stat().st_size > 20_000
    points = 100 * (1 - found.comparison[0]["accuracy"])
    assert f"{points:+.2f} points against the encoder layer" in str(found)
