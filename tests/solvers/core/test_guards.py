"""Maps that are not functions of their state, and warnings: where they point, how often they come."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn import DEQ
from solvers import Adjoint, Forward, Implicit, SolveError, SolveWarning, Unrolled, fixed_point
from solvers.core import telling


def part(z: Tensor, b: Tensor) -> Tensor:
    z[:, 0] = 0
    return 0.5 * z + b


def halved_by_numpy(z: Tensor, b: Tensor) -> Tensor:
    numbers = z.numpy()
    numbers *= 0.5
    return torch.from_numpy(numbers + b.numpy())


def late() -> Callable[[Tensor, Tensor], Tensor]:
    """A map that works in place from its third call on."""
    calls: list[int] = []

    def f(z: Tensor, b: Tensor) -> Tensor:
        calls.append(1)
        return z.mul_(0.5).add_(b) if len(calls) > 2 else 0.5 * z + b

    return f


OVERWRITING: list[tuple[Any, Adjoint | None, bool]] = [
    (late(), None, False),
    (lambda z, b: nn.ReLU(inplace=True)(z) * 0.5 + b, Implicit(), False),
    (lambda z, b: 0.5 * z + b.mul_(0.5), Unrolled(), False),
    (part, None, True),
    # torch does not count these changes
    (lambda z, b: z.data.mul_(0.5).add_(b), None, False),
    (lambda z, b: 0.5 * z + b.data.mul_(0.5), None, False),
    (halved_by_numpy, None, False),
]


@pytest.mark.defect("A7")
@pytest.mark.parametrize(("f", "adjoint", "inference"), OVERWRITING)
def test_work_in_place_is_refused_and_undone(
    f: Any, adjoint: Adjoint | None, inference: bool
) -> None:
    with torch.inference_mode(inference):
        z0, b = torch.linspace(-1, 1, 6).reshape(2, 3), torch.ones(2, 3)
        before = z0.clone(), b.clone()
        with pytest.raises(ValueError, match=r"\bf\b"):
            fixed_point(f, z0, (b,), adjoint=adjoint, solver=Forward())
        assert torch.equal(z0, before[0]) and torch.equal(b, before[1])


class SelfAttention(nn.MultiheadAttention):
    def forward(self, z: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(z, z, z)[0]


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * torch.tanh(self.inner(z)) + x


VARYING: dict[str, Callable[[], nn.Module]] = {
    "rrelu": nn.RReLU,
    "attention": lambda: SelfAttention(4, 2, dropout=0.3, batch_first=True),
    "batch_norm": lambda: nn.BatchNorm1d(3),
    "instance_norm": lambda: nn.InstanceNorm1d(3, track_running_stats=True),
    "dropout": lambda: nn.Dropout(0.3),
}


@pytest.mark.defect("A11")
@pytest.mark.parametrize("name", VARYING)
def test_a_map_that_differs_between_evaluations_is_refused(name: str) -> None:
    x, module = torch.randn(2, 3, 4), Around(VARYING[name]())
    layer = DEQ.from_update(module)
    for solve in (lambda: fixed_point(module, x, (x,)), lambda: layer(x)):
        with pytest.raises(ValueError):
            solve()
    value = layer.eval()(x)
    torch.testing.assert_close(module(value, x), value, rtol=1e-3, atol=1e-3)


@pytest.mark.defect("A11")
def test_a_norm_over_the_batch_is_refused_in_evaluation_mode_too() -> None:
    module, x = Around(nn.BatchNorm1d(3, track_running_stats=False)), torch.randn(2, 3, 4)
    with pytest.raises(ValueError):
        fixed_point(module.eval(), x, (x,))


def hidden_draws(z: Tensor, x: Tensor) -> Tensor:
    return 0.5 * F.rrelu(z, training=True) - x  # draws for numbers below 0 alone


@pytest.mark.defect("A11")
@pytest.mark.parametrize("start", [0.0, 1.0])
@pytest.mark.parametrize("f", [lambda z, x: F.dropout(0.5 * z, 0.5) + x, hidden_draws])
def test_random_draws_hidden_at_the_start_are_refused(f: Any, start: float) -> None:
    x = torch.ones(8, 5)
    with pytest.raises(ValueError):
        fixed_point(f, start * x, (x,))


class Holder:
    """No module, but it holds one in a list."""

    def __init__(self, norm: nn.Module) -> None:
        self.parts = [nn.Identity(), norm]

    def __call__(self, z: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.parts[1](z))

    def step(self, z: Tensor) -> Tensor:
        return self(z)


WORLD = Holder(nn.BatchNorm1d(4))


def of_the_world(z: Tensor) -> Tensor:
    return WORLD(z)


def given(norm: nn.Module, z: Tensor) -> Tensor:
    return 0.5 * torch.tanh(norm(z))


def by_function(norm: Any, z: Tensor) -> Tensor:
    return 0.5 * F.batch_norm(z, norm.running_mean, norm.running_var, training=True)


def ways(norm: nn.Module) -> dict[str, Any]:
    WORLD.parts[1] = norm
    return {
        "global": of_the_world,
        "object": Holder(norm),
        "method": Holder(norm).step,
        "partial": partial(given, norm),
        "closure": lambda z: 0.5 * torch.tanh(norm(z)),
        "function": partial(by_function, norm),
    }


@pytest.mark.defect("A11")
@pytest.mark.parametrize(
    ("way", "layer"), [*((way, False) for way in ways(nn.BatchNorm1d(4))), ("method", True)]
)
def test_running_statistics_are_detected_wherever_the_norm_is_held(way: str, layer: bool) -> None:
    norm, z0 = nn.BatchNorm1d(4), torch.randn(8, 4)
    f = ways(norm)[way]
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    with torch.inference_mode(layer), pytest.raises(ValueError, match=r"BatchNorm1d|running"):
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


def halve(z: Tensor, b: Tensor) -> Tensor:
    return 0.5 * z + b


@pytest.mark.defect("C3")
def test_an_error_of_a_solve_survives_pickling() -> None:
    b, weight = torch.ones(2, 3), torch.tensor(0.9, requires_grad=True)
    with pytest.raises(SolveError) as caught:
        fixed_point(lambda z, b: weight * z + b, b, (b,), max_steps=1, on_failure="raise")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is SolveError and str(copy) == str(caught.value)
    assert torch.equal(copy.solution.value, caught.value.solution.value)
    assert not copy.solution.value.requires_grad


def heard_from(function: Any, action: Any, times: int = 4) -> list[warnings.WarningMessage]:
    """Warnings of several calls, each with other numbers in its message."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter(action)
        for turn in range(times):
            function(torch.full((2 + turn, 2, 3), 1.0 + turn))
    return heard


def a_layer() -> DEQ:
    return DEQ.from_update(halve, solver=Forward(), max_steps=2)


def layer_alone(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)  # line of the user


def solve_alone(x: Tensor) -> Any:
    return fixed_point(halve, x, (x,), solver=Forward(), max_steps=2)


def linear_alone(x: Tensor) -> Any:
    return solvers.solve_linear(
        lambda v, x: x.abs() * v * torch.arange(1, 4), x, args=(x,), max_steps=1
    )


def backward_alone(x: Tensor) -> None:
    x = x.requires_grad_()
    scale = torch.linspace(0.1, 0.9, 6).reshape(2, 3)
    value = fixed_point(
        lambda z, x: scale * z.roll(1, 2) + x,
        torch.zeros_like(x),
        (x,),
        max_steps=200,
        adjoint=Implicit(max_steps=1),
    ).value
    value.square().sum().backward()


SOURCES: dict[str, Callable[[], Any]] = {  # each made anew: a layer is told of once
    "layer": lambda: partial(layer_alone, a_layer()),
    "nested": lambda: nn.Sequential(nn.Identity(), a_layer()),
    "solve": lambda: solve_alone,
    "linear": lambda: linear_alone,
    "backward": lambda: backward_alone,
}


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions and lines of this file are told of anew by every test."""
    monkeypatch.setattr(telling, "_TOLD", WeakKeyDictionary())
    monkeypatch.setattr(telling, "_TOLD_OF_NONE", set())


@pytest.mark.defect("D8")
@pytest.mark.parametrize("name", SOURCES)
def test_a_failing_line_warns_once_and_is_named(name: str) -> None:
    heard = [w for w in heard_from(SOURCES[name](), "default") if w.category is SolveWarning]
    assert len(heard) == 1
    assert heard[0].filename == __file__


@pytest.mark.defect("D8")
def test_warning_filters_keep_their_meaning() -> None:
    source = partial(layer_alone, a_layer())
    heard = heard_from(source, "always")
    assert len(heard) == 4
    assert len({str(w.message) for w in heard}) == 4
    assert {w.filename for w in heard} == {__file__}
    assert heard_from(source, "ignore") == []
    with pytest.raises(SolveWarning):
        heard_from(source, "error")
    # None of these has used up the one time that it is shown by default.
    assert len(heard_from(source, "default")) == 1


class Model(nn.Module):
    """Two blocks, one of them failing, in a model of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), a_layer()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_layer_is_named_as_in_the_model_that_is_called() -> None:
    said = [str(w.message) for w in heard_from(Model(), "default")]
    assert len(said) == 1 and "blocks.1" in said[0] and "Model" in said[0]
