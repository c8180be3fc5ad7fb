"""Functions that overwrite, draw or learn are refused by name; the caller's tensors stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn import DEQ
from solvers import (
    Adjoint,
    Descent,
    Forward,
    Implicit,
    OneStep,
    Phantom,
    Unrolled,
    fixed_point,
)

ADJOINTS = [None, Implicit(), Unrolled(), Phantom(3), OneStep()]


def in_place(z: Tensor, b: Tensor) -> Tensor:
    return z.mul_(0.5).add_(b)


def activation(z: Tensor, b: Tensor) -> Tensor:
    return nn.ReLU(inplace=True)(z) * 0.5 + b


def argument(z: Tensor, b: Tensor) -> Tensor:
    return 0.5 * z + b.mul_(0.5)


def part(z: Tensor, b: Tensor) -> Tensor:
    z[:, 0] = 0
    return 0.5 * z + b


@pytest.mark.defect("A7")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("adjoint", ADJOINTS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("f", [in_place, activation, argument, part])
def test_work_in_place_is_refused_and_undone(
    f: Any, adjoint: Adjoint | None, inference: bool
) -> None:
    with torch.inference_mode(inference):
        z0, b = torch.linspace(-1, 1, 6).reshape(2, 3), torch.ones(2, 3)
        before = z0.clone(), b.clone()
        with pytest.raises(ValueError, match="f works in place on its input"):
            fixed_point(f, z0, (b,), adjoint=adjoint, solver=Forward())
        assert torch.equal(z0, before[0])
        assert torch.equal(b, before[1])


@pytest.mark.defect("A7")
def test_ordinary_tensors_are_safe_in_inference_mode() -> None:
    z0, b = torch.zeros(2, 3), torch.ones(2, 3)
    with torch.inference_mode(), pytest.raises(ValueError, match="f works in place"):
        fixed_point(in_place, z0, (b,))
    assert (z0 == 0).all()


@pytest.mark.defect("A7")
def test_an_update_in_place_is_refused_by_the_layer() -> None:
    x = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match="f works in place"):
        DEQ.from_update(in_place)(x)
    assert (x == 1).all()


@pytest.mark.defect("A7")
def test_work_in_place_that_begins_late_is_refused() -> None:
    calls = []

    def late(z: Tensor, b: Tensor) -> Tensor:
        calls.append(1)
        return in_place(z, b) if len(calls) > 2 else 0.5 * z + b

    with pytest.raises(ValueError, match="f works in place"):
        fixed_point(late, torch.zeros(2, 3), (torch.ones(2, 3),), solver=Forward())


@pytest.mark.parametrize("inference", [False, True])
def test_work_in_place_on_copies_is_allowed(inference: bool) -> None:
    with torch.inference_mode(inference):
        b = torch.ones(2, 3)
        solution = fixed_point(lambda z, b: in_place(z.clone(), b), torch.zeros(2, 3), (b,))
        assert solution.converged.all()
        low = fixed_point(Descent(lambda z, b: ((z - b) ** 2).sum(1), 0.3), 0 * b, (b,))
        assert low.converged.all()


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.1 * self.attention(z, z, z)[0] + x


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * torch.tanh(self.inner(z)) + x


def dropped(z: Tensor, x: Tensor) -> Tensor:
    return 0.3 * F.dropout(z, 0.3) + x


NAMES = ["rrelu", "attention", "batch_norm", "instance_norm", "dropout"]


def module_named(name: str) -> nn.Module:
    if name == "attention":
        return Attention(dropout=0.3)
    inner = {
        "rrelu": nn.RReLU(),
        "batch_norm": nn.BatchNorm1d(3),
        "instance_norm": nn.InstanceNorm1d(3, track_running_stats=True),
        "dropout": nn.Dropout(0.3),
    }[name]
    return Around(inner)


@pytest.mark.defect("A11")
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_changes_at_every_evaluation_is_refused(name: str, direct: bool) -> None:
    x, module = torch.randn(2, 3, 4), module_named(name)
    refused = "in training mode|evaluated at the same point again|running statistics"
    with pytest.raises(ValueError, match=refused):
        if direct:
            fixed_point(module, x, (x,))
        else:
            DEQ.from_update(module)(x)
    module.eval()
    value = fixed_point(module, x, (x,)).value if direct else DEQ.from_update(module).eval()(x)
    torch.testing.assert_close(module(value, x), value, rtol=1e-3, atol=1e-3)


@pytest.mark.defect("A11")
def test_functions_that_draw_or_learn_are_refused() -> None:
    x, norm = torch.randn(2, 3, 4), nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="evaluated at the same point again"):
        fixed_point(dropped, x, (x,))
    with pytest.raises(ValueError, match="evaluated at the same point again"):
        DEQ.from_update(dropped)(x)
    with pytest.raises(ValueError, match="running statistics of BatchNorm1d"):
        fixed_point(lambda z, x: 0.3 * norm(z) + x, x, (x,))
    norm.eval()
    assert fixed_point(lambda z, x: 0.3 * norm(z) + x, x, (x,)).converged.all()


def test_numbers_drawn_from_a_seed_or_for_nothing_are_allowed() -> None:
    x = torch.ones(2, 3)

    def seeded(z: Tensor, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return 0.3 * z + torch.randn(3)

    def idle(z: Tensor, x: Tensor) -> Tensor:
        torch.rand(3)
        return 0.3 * z + x

    for f in (seeded, idle):
        assert fixed_point(f, x, (x,)).converged.all()


def test_a_solve_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    fixed_point(lambda z: 0.5 * z + 1, torch.zeros(2, 3))
    assert torch.equal(state, torch.get_rng_state())
