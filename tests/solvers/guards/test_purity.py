"""Functions that overwrite, draw or learn are refused by name; the caller's tensors stay as they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn import DEQ
from solvers import Adjoint, Descent, Forward, Implicit, Unrolled, fixed_point

ADJOINTS = [None, Implicit(), Unrolled()]


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


def halved_by_numpy(z: Tensor, b: Tensor) -> Tensor:
    numbers = z.numpy()
    numbers *= 0.5
    return torch.from_numpy(numbers + b.numpy())


@pytest.mark.defect("A7")
@pytest.mark.parametrize("f", [
    lambda z, b: z.data.mul_(0.5).add_(b),
    lambda z, b: 0.5 * z + b.data.mul_(0.5),
    halved_by_numpy,
], ids=["data", "argument", "numpy"])  # fmt: skip
def test_work_in_place_that_torch_does_not_count_is_refused_and_undone(f: Any) -> None:
    z0, b = torch.linspace(-1, 1, 6).reshape(2, 3), torch.ones(2, 3)
    before = z0.clone(), b.clone()
    with pytest.raises(ValueError, match="f works in place on its inputs"):
        fixed_point(f, z0, (b,), adjoint=None, solver=Forward())
    assert torch.equal(z0, before[0])
    assert torch.equal(b, before[1])


def hidden_draws(z: Tensor, x: Tensor) -> Tensor:
    return 0.5 * F.rrelu(z, training=True) - x  # draws for numbers below 0 alone


@pytest.mark.defect("A11")
@pytest.mark.parametrize("start", [0.0, 1.0])
@pytest.mark.parametrize("f", [
    lambda z, x: F.dropout(0.5 * z, 0.5) + x,
    lambda z, x: F.dropout(torch.relu(0.5 * z), 0.5) + x,
    hidden_draws,
], ids=["dropout", "relu", "rrelu"])  # fmt: skip
def test_draws_that_the_start_hides_are_refused(f: Any, start: float) -> None:
    x = torch.ones(8, 5)
    with pytest.raises(ValueError, match="evaluated at the same point again"):
        fixed_point(f, start * x, (x,))
    if start == 0:
        with pytest.raises(ValueError, match="evaluated at the same point again"):
            DEQ.from_update(f, init="zeros")(x)


class Box:
    """No module, but it holds one."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm

    def __call__(self, z: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.norm(z))

    def method(self, z: Tensor) -> Tensor:
        return self(z)


WORLD = Box(nn.BatchNorm1d(4))


def of_the_world(z: Tensor) -> Tensor:
    return 0.5 * torch.tanh(WORLD.norm(z))


def given(norm: nn.Module, z: Tensor) -> Tensor:
    return 0.5 * torch.tanh(norm(z))


def by_function(norm: Any, z: Tensor) -> Tensor:
    return 0.5 * F.batch_norm(z, norm.running_mean, norm.running_var, training=True)


def ways(norm: nn.Module) -> dict[str, Any]:
    WORLD.norm = box = norm
    holder = Box(norm)
    return {
        "global": of_the_world,
        "attribute": lambda z: 0.5 * torch.tanh(holder.norm(z)),
        "object": holder,
        "method": holder.method,
        "partial": partial(given, norm),
        "closure": lambda z: 0.5 * torch.tanh(box(z)),
        "function": partial(by_function, norm),
    }


@pytest.mark.defect("A11")
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("way", list(ways(nn.BatchNorm1d(4))))
def test_a_norm_that_learns_is_found_wherever_it_is(way: str, layer: bool) -> None:
    norm, z0 = nn.BatchNorm1d(4), torch.randn(8, 4)
    f = ways(norm)[way]
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    with torch.inference_mode(layer), pytest.raises(ValueError, match="running statistics of"):
        if layer:
            DEQ.from_update(lambda z, x: f(z) + x)(z0)
        else:
            fixed_point(f, z0)
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())
    norm(z0)  # outside of a solve it works on
    assert norm.state_dict()["num_batches_tracked"] == 1
    if way != "function":
        norm.eval()
        assert fixed_point(f, z0).converged.all()


def test_a_refused_norm_is_told_whoever_wraps_the_error() -> None:
    """As a compiler does that traces f, in one order of tests and not in another."""
    norm = nn.BatchNorm1d(4, track_running_stats=False)

    def wrapping(z: Tensor) -> Tensor:
        try:
            return 0.5 * torch.tanh(norm(z))
        except ValueError as error:
            raise RuntimeError("while tracing") from error

    with pytest.raises(ValueError, match="normalises over the batch by BatchNorm1d") as found:
        fixed_point(wrapping, torch.randn(8, 4), adjoint=None)
    assert isinstance(found.value.__cause__, RuntimeError)

    def failing(z: Tensor) -> Tensor:
        raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        fixed_point(failing, torch.randn(8, 4), adjoint=None)
