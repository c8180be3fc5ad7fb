"""The spectral radii of a model's equilibrium layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn import DEQ
from implicit_attn.regularization import SpectralRadii
from solvers import Anderson, Implicit


class Model(nn.Module):
    """Two equilibrium layers whose radii are known: 0.25 and 0.75."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.first = DEQ.from_update(lambda z, x: 0.25 * z.roll(1, -1) + x, init="zeros")
        self.second = DEQ.from_update(lambda z, x: 0.75 * z.roll(1, -1) + x, solver=Anderson())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.dropout(x))
        return self.second(x) + self.second(2 * x)


def test_radii_of_a_model_for_the_record() -> None:
    model, x = Model().train(), torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0))
    model.second.eval()
    model.first(torch.ones(1, 2, 3))
    before, state = model.first.last, torch.get_rng_state()
    record = SpectralRadii(x, samples=4)(model)
    assert list(record) == ["first", "second"]
    for name, radius in (("first", 0.25), ("second", 0.75)):
        row = record[name]
        assert row["median"] == pytest.approx(radius, rel=1e-5)
        assert row["largest"] == pytest.approx(radius, rel=1e-5)
        assert row["above_one"] == 0
    assert record["first"]["samples"] == 4 and record["second"]["samples"] == 8
    # Nothing of the training has changed.
    assert model.first.last is before and model.second.last is None
    assert model.first.observer is None and torch.equal(torch.get_rng_state(), state)
    assert model.training and model.first.training and not model.second.training


def test_radii_above_one_and_failing_models() -> None:
    layer = DEQ.from_update(
        lambda z, x: x - 2 * z, solver=Anderson(), adjoint=Implicit(), on_failure="ignore"
    )
    x = torch.ones(3, 1, 2)
    row = SpectralRadii(x)(layer)[""]
    assert row["above_one"] == 1 and row["median"] == pytest.approx(2, rel=1e-5)

    def failing(_: object) -> None:
        raise RuntimeError("the model's own")

    layer.register_forward_pre_hook(lambda module, inputs: failing(module))
    with pytest.raises(RuntimeError, match="the model's own"):
        SpectralRadii(x)(layer)
    assert layer.observer is None and layer.training


@pytest.mark.parametrize(
    ("inputs", "options", "error", "match"),
    [
        ([1.0], {}, TypeError, "inputs must be a tensor"),
        (torch.ones(0, 2), {}, ValueError, "inputs must hold at least one sample"),
    ],
)
def test_wrong_records(inputs: Any, options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        SpectralRadii(inputs, **options)
