"""O(d) spins as a layer: what it solves, what reaches its parameters, masks and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from implicit_attn.updates import SaddleAttention

KINDS = pytest.mark.parametrize("kind", ["free", "input"])


def make(kind: str, **options: Any) -> tuple[SaddleAttention, Tensor]:
    torch.manual_seed(0)
    layer = SaddleAttention(5, 8, kind, **options).double()
    return layer, torch.randn(3, 5, 8, dtype=torch.float64)


@KINDS
def test_the_layer_solves_what_the_function_solves(kind: str) -> None:
    layer, x = make(kind, beta=0.7)
    normed = torch.nn.functional.layer_norm(x, (8,))
    if kind == "free":
        k = torch.zeros(5, 5, dtype=torch.float64)
        rows, columns = torch.triu_indices(5, 5, 1)
        k[rows, columns] = layer.free.detach()
        k = 2 * 0.7 * (k + k.mT)
    else:
        n = normed / math.sqrt(8)
        scores = torch.tanh(layer.query(n) @ layer.key(n).mT * math.sqrt(8)).detach()
        k = 0.7 * (scores + scores.mT) / math.sqrt(40)
        k = k - torch.diag_embed(k.diagonal(dim1=1, dim2=2))
    wanted = solvers.spherical_saddle(k, 0.7 * normed)
    torch.testing.assert_close(layer(x), wanted.mean)
    assert layer.last is not None and layer.last.converged.all()
    assert not layer.last.mean.requires_grad


@KINDS
def test_it_trains_by_its_output_and_by_its_free_energy(kind: str) -> None:
    layer, x = make(kind)
    target = torch.randn(3, 5, 8, dtype=torch.float64)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        solution = layer.solve(x)
        loss = (solution.mean - target).square().mean() + 1e-2 * solution.log_partition.mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@KINDS
@pytest.mark.parametrize("per_site", [True, False])
def test_masked_tokens_influence_nobody(kind: str, per_site: bool) -> None:
    layer, x = make(kind, per_site=per_site)
    mask = torch.tensor([[True, True, True, False, False]]).expand(3, 5)
    other = x.clone()
    other[:, 3:] += 1.0 + torch.arange(8)
    first, second = layer(x, mask), layer(other, mask)
    torch.testing.assert_close(first, second)
    assert not first[:, 3:].any()
    assert not torch.allclose(layer(x)[:, :3], first[:, :3])


@pytest.mark.parametrize("per_site", [True, False])
def test_padding_changes_nothing(per_site: bool) -> None:
    layer, x = make("input", per_site=per_site)
    mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5, [True, False, True, False, False]])
    padded = layer.solve(x, mask)
    for row in range(3):
        alone = layer.solve(x[row : row + 1, mask[row]])
        torch.testing.assert_close(padded.mean[row, mask[row]], alone.mean[0])
        torch.testing.assert_close(padded.log_partition[row], alone.log_partition[0])


@pytest.mark.parametrize("per_site", [True, False])
def test_free_couplings_of_masked_tokens_are_not_there(per_site: bool) -> None:
    layer, x = make("free", per_site=per_site)
    mask = torch.tensor([[True, True, False, True, False]])
    kept = mask[0]
    fields = torch.nn.functional.layer_norm(x[:1], (8,))
    wanted = solvers.spherical_saddle(
        layer.couplings(fields)[kept][:, kept], fields[:, kept], per_site=per_site
    )
    torch.testing.assert_close(layer(x[:1], mask)[:, kept], wanted.mean)


def test_fields_as_they_are_and_other_lengths() -> None:
    layer, x = make("input", normalise=False)
    longer = torch.cat([x, x], dim=1)
    assert layer(longer).shape == (3, 10, 8)
    assert not torch.allclose(layer(x), layer(2 * x))
    normed, _ = make("input")
    torch.testing.assert_close(normed(x), normed(2 * x), rtol=1e-4, atol=1e-4)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"beta": 0.0}, ValueError, "beta"),
    ({"sites": 0}, ValueError, "sites"),
    ({"per_site": 1}, TypeError, "per_site"),
    ({"on_failure": "quiet"}, ValueError, "on_failure"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_errors_name_the_argument(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    call: Any = SaddleAttention
    with pytest.raises(error, match=words):
        call(**({"sites": 3, "dim": 2} | change))


def test_inputs_must_fit() -> None:
    layer, x = make("free")
    with pytest.raises(ValueError, match="5 sites"):
        layer(x[:, :4])
    with pytest.raises(ValueError, match="8 features"):
        layer(x[..., :4])
