"""Step sizes of time and tokens, and low-rank differences of the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from implicit_attn.updates import ConditionedStepSizes, HyperSETLayer, LowRankDeltas
from implicit_attn.updates.hyperset import build_step_sizes, sinusoids

DIM = 6


def tokens(seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(seed))


def test_sinusoids() -> None:
    times = torch.tensor([1.0, 2.0, 7.5])
    waves = sinusoids(times, 6)
    assert waves.shape == (3, 6) and waves.dtype == torch.float64
    for column, frequency in enumerate((1.0, 1e-2, 1e-4)):
        assert torch.allclose(waves[:, column], torch.sin(times.double() * frequency))
        assert torch.allclose(waves[:, column + 3], torch.cos(times.double() * frequency))


@pytest.mark.parametrize("kind", ["conditioned-state", "conditioned-input"])
def test_the_network_starts_at_its_initial_step(kind: str) -> None:
    """With 0 the layer starts as the identity; its step sizes learn first, then its projections."""
    torch.manual_seed(0)
    for initial in (None, 0.25):
        sizes = build_step_sizes(kind, DIM, initial=initial)
        steps = sizes(tokens(), sizes.prepare(tokens(1), torch.arange(1, 4)), 2)
        for step in steps:
            assert isinstance(step, Tensor) and step.shape == (2, 5, DIM)
            assert (step == (0.0 if initial is None else initial)).all()
    layer = HyperSETLayer(DIM, 2, 9, step_size=kind, time_dim=16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    z = tokens()
    assert torch.equal(layer(z, z, 1), z)
    moved = []
    for _ in range(2):
        before = layer.attention.projection.weight.detach().clone()
        optimizer.zero_grad()
        layer(z, z, 1).square().sum().backward()
        optimizer.step()
        moved.append(not torch.equal(layer.attention.projection.weight, before))
    assert moved == [False, True]
    assert not torch.equal(layer(z, z, 1), z)


@pytest.mark.parametrize("source", ["state", "input"])
def test_what_the_network_looks_at(source: str) -> None:
    """Time, and the direction of its own tokens: neither their size nor the other tokens."""
    torch.manual_seed(0)
    sizes = ConditionedStepSizes(DIM, source, time_dim=16).double()
    torch.nn.init.normal_(sizes.last.weight)
    z, x0 = tokens(1).double(), tokens(2).double()

    def steps(z: Tensor, x0: Tensor, t: float = 3.0) -> Tensor:
        return torch.cat(sizes(z, sizes.prepare(x0, torch.tensor([t])), 0), -1)

    base = steps(z, x0)
    assert not torch.allclose(steps(z, x0, 4.0), base, atol=1e-2)
    assert torch.allclose(steps(z, x0, 3.0 + 1e-6), base, atol=1e-4)  # smooth in time
    other = tokens(3).double()
    changed_z, changed_x = steps(other, x0), steps(z, other)
    assert torch.equal(changed_x if source == "state" else changed_z, base)
    assert not torch.allclose(changed_z if source == "state" else changed_x, base, atol=1e-2)
    scaled = steps(5.0 * z, 5.0 * x0)
    assert torch.allclose(scaled, base, atol=1e-4)
    one = z.clone(), x0.clone()
    for tensor in one:
        tensor[:, 0] += 1.0
    assert torch.equal(steps(*one)[:, 1:], base[:, 1:])
    assert not torch.equal(steps(*one)[:, 0], base[:, 0])


def test_low_rank_deltas() -> None:
    torch.manual_seed(0)
    deltas = LowRankDeltas(40, 30, 3, 5, scale=4.0)
    weight = torch.randn(40, 30)
    for index in range(5):
        expected = weight + 4.0 * deltas.left[index] @ deltas.right[index]
        assert torch.allclose(deltas(weight, index), expected, atol=1e-6)
        change = deltas(weight, index) - weight
        assert torch.linalg.matrix_rank(change, rtol=1e-3) == 3
    assert torch.equal(deltas(weight, 11), deltas(weight, 4))
    assert sum(p.numel() for p in deltas.parameters()) == 5 * 3 * (40 + 30)
    for parameter in deltas.parameters():
        assert 0.018 < parameter.std() < 0.022 and parameter.mean().abs() < 0.004


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: ConditionedStepSizes(DIM, "token"), "source must be one of .*, got 'token'"),
    (lambda: sinusoids(torch.ones(2), 2), "time_dim must be even and >= 4, got 2"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_step_sizes(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
