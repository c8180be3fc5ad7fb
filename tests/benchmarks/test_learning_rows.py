"""The layers that ``benchmarks/learning.py`` compares, and what stands around them."""

from __future__ import annotations

import pytest
import torch

import solvers

pytest.importorskip("sklearn", reason="the digits are scikit-learn's")

from benchmarks.learns.model import TokenModel
from benchmarks.learns.recall import recall
from benchmarks.learns.registry import task_of
from benchmarks.learns.rows import ROWS, layers_of
from implicit_attn import DEQ

LAYERS = [name for name, row in ROWS.items() if not row.regression]
WITHOUT_MIXING = ("identity", "per-token", "block-no-attention")


@pytest.mark.parametrize("row", LAYERS)
@pytest.mark.parametrize("number", [1, 2])
def test_a_row_keeps_the_shape_and_trains_every_weight(row: str, number: int) -> None:
    torch.manual_seed(0)
    layers = layers_of(row, number, tokens=5, dim=8, heads=2)
    x = torch.randn(3, 5, 8, requires_grad=True)
    out = layers(x)
    assert out.shape == x.shape
    (out * torch.randn_like(out)).sum().backward()
    trained = [pair for pair in layers.named_parameters() if pair[1].requires_grad]
    for name, weight in [("x", x), *trained]:
        assert weight.grad is not None and torch.isfinite(weight.grad).all(), name
    assert len(list(layers.parameters())) == number * len(
        list(layers_of(row, 1, tokens=5, dim=8, heads=2).parameters())
    )


@pytest.mark.parametrize("row", LAYERS)
def test_which_rows_mix_tokens(row: str) -> None:
    """A token's state changes with another token's input, or the row says that it does not."""
    torch.manual_seed(0)
    layers = layers_of(row, 1, tokens=5, dim=8, heads=2).double().eval()
    for layer in layers.modules():
        if isinstance(layer, DEQ):  # a solver's steps tell the tokens of a sample of each other
            layer.tolerance = solvers.Tolerance(1e-9)
    with torch.no_grad():
        for weight in layers.parameters():  # Hyper-SET's steps begin at zero
            weight.add_(0.1 * torch.randn_like(weight))
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    other = x.clone()
    other[:, 1:] = torch.randn(1, 4, 8, dtype=torch.float64)
    with torch.no_grad():
        moved = (layers(x) - layers(other))[:, 0].abs().max()
    assert (moved < 1e-5) if row in WITHOUT_MIXING else (moved > 1e-4)


@pytest.mark.parametrize(
    ("row", "parameters"), [("encoder", 33_472), ("per-token", 33_216), ("hyperset", 57_600)]
)
def test_sizes(row: str, parameters: int) -> None:
    assert sum(each.numel() for each in layers_of(row, 1, 16).parameters()) == parameters


def test_the_mixer_has_no_more_than_the_encoder_layer() -> None:
    assert 31_000 < sum(each.numel() for each in layers_of("mixer", 1, 16).parameters()) <= 33_472


def test_the_regression_has_no_layers() -> None:
    with pytest.raises(ValueError, match="row must be one with layers, got 'logistic'"):
        layers_of("logistic", 1, 16)


@pytest.mark.parametrize("readout", ["mean", "class"])
def test_what_is_read(readout: str) -> None:
    task = task_of("digits", 64)
    model = TokenModel(task, torch.nn.Identity(), 8, readout)
    one, other = model(task.inputs[:2])
    if readout == "class":  # the vector in front is the same, and nothing was mixed into it
        assert torch.equal(one, other)
    else:
        assert not torch.allclose(one, other)


def test_recall_reads_the_asking_token_only() -> None:
    task = recall(10)
    model = TokenModel(task, torch.nn.Identity(), 8, "query")
    changed = task.inputs.clone()
    changed[:, 1:] = task.inputs[:, 1:].flip(0)
    assert torch.equal(model(task.inputs), model(changed))
    with pytest.raises(ValueError, match="readout must be one of"):
        TokenModel(task, torch.nn.Identity(), 8, "class")
