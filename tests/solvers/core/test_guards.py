"""Maps that are not functions of their state, and warnings: where they point, how often they come."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn import DEQ
from solvers import Adjoint, Forward, Implicit, SolveError, SolveWarning, Unrolled, fixed_point


def part(z: Tensor, b: Tensor) -> Tensor:
    z[:, 0] = 0
    return 0.5 * z + b


def late() -> Callable[[Tensor, Tensor], Tensor]:
    """A map that works in place from its third call on."""
    calls: list[int] = []

    def f(z: Tensor, b: Tensor) -> Tensor:
        calls.append(1)
        return z.mul_(0.5).add_(b) if len(calls) > 2 else 0.5 * z + b

    return f


OVERWRITING: list[tuple[Any, Adjoint | None]] = [
    (late(), None),
    (lambda z, b: nn.ReLU(inplace=True)(z) * 0.5 + b, Implicit()),
    (lambda z, b: 0.5 * z + b.mul_(0.5), Unrolled()),
    (part, None),
]


@pytest.mark.defect("A7")
@pytest.mark.parametrize(("f", "adjoint"), OVERWRITING)
def test_work_in_place_is_refused(f: Any, adjoint: Adjoint | None) -> None:
    z0, b = torch.linspace(-1, 1, 6).reshape(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"in place"):
        fixed_point(f, z0, (b,), adjoint=adjoint, solver=Forward())


class SelfAttention(nn.MultiheadAttention):
    def forward(self, z: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(z, z, z)[0]


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * torch.tanh(self.inner(z)) + x


class Counting(nn.Module):
    """Its values depend on how often it was called, by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, z: Tensor) -> Tensor:
        self.calls += 1
        return z + self.calls


DRAWING: dict[str, Callable[[], nn.Module]] = {
    "rrelu": nn.RReLU,
    "attention": lambda: SelfAttention(4, 2, dropout=0.3, batch_first=True),
    "dropout": lambda: nn.Dropout(0.3),
}
# The check that fails, and the map.
FINDINGS: list[tuple[str, Callable[[], Any]]] = [
    *(("random", lambda make=make: Around(make())) for make in DRAWING.values()),
    ("random", lambda: lambda z, x: F.dropout(0.5 * z, 0.5) + x),
    ("batch norm", lambda: Around(nn.BatchNorm1d(3))),
    ("batch norm", lambda: Around(nn.BatchNorm1d(3, track_running_stats=False)).eval()),
    ("calls", lambda: Around(Counting())),
    ("inputs", lambda: lambda z, x: 0.5 * z.mul_(0.5) + x),
    ("inputs", lambda: lambda z, x: 0.5 * z.data.mul_(0.5) + x),
    ("inputs", lambda: lambda z, x: torch.from_numpy(multiplied(x.numpy())) + 0.5 * z),
    ("rows", lambda: lambda z, x: 0.5 * z + 0.1 * z.mean(0) + x),
    ("rows", lambda: lambda z, x: 0.5 * z + 0.1 * x.roll(1, 0)),
    ("value", lambda: lambda z, x: z / 0.0),
    ("value", lambda: lambda z, x: z.double()),
    ("value", lambda: lambda z, x: z[:1]),
]


def multiplied(numbers: Any) -> Any:
    numbers *= 0.5
    return numbers


@pytest.mark.defect("A11")
@pytest.mark.parametrize(("check", "make"), FINDINGS)
def test_check_update_finds_what_a_solve_does_not(check: str, make: Any) -> None:
    torch.manual_seed(0)
    z, x, f = torch.randn(2, 3, 4), torch.randn(2, 3, 4), make()
    before = z.clone(), x.clone(), torch.get_rng_state()
    report = solvers.check_update(f, z, x)
    assert not report.ok and check in [finding.check for finding in report.failures]
    assert torch.equal(z, before[0]) and torch.equal(x, before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    with pytest.raises(ValueError, match=f"FAIL *{check}"):
        solvers.check_update(f, z, x, strict=True)


def test_check_update_passes_a_map_that_keeps_the_rules() -> None:
    torch.manual_seed(0)
    f, z = Around(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))), torch.randn(3, 2, 4)
    report = solvers.check_update(f, z, z, strict=True)
    assert report.ok and [f.passed for f in report.findings] == [True] * 6
    assert "6 of 6" in str(report)
    alone = solvers.check_update(f, z[:1], z[:1])
    assert alone.ok and alone.findings[-1].passed is None
    state = {"a": z, "b": z[:, 0]}
    assert solvers.check_update(lambda z: {"a": 0.5 * z["a"], "b": z["b"].cos()}, state).ok
    with pytest.raises(TypeError, match="f"):
        solvers.check_update(3, z)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"args\[0\]"):
        solvers.check_update(f, z, z[:2])


@pytest.mark.parametrize("name", DRAWING)
def test_a_layer_refuses_modules_that_draw(name: str) -> None:
    x, module = torch.randn(2, 3, 4), Around(DRAWING[name]())
    layer = DEQ.from_update(module)
    with pytest.raises(ValueError, match="training mode"):
        layer(x)
    value = layer.eval()(x)
    torch.testing.assert_close(module(value, x), value, rtol=1e-3, atol=1e-3)


def test_a_map_that_draws_is_not_solved_and_the_warning_names_the_check() -> None:
    x = torch.ones(8, 5)
    with pytest.warns(SolveWarning, match="check_update"):
        found = fixed_point(lambda z, x: F.dropout(0.5 * z, 0.5) + x, x, (x,))
    assert not found.converged.all()


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


SOURCES: dict[str, Callable[[], Any]] = {
    "layer": lambda: partial(layer_alone, a_layer()),
    "nested": lambda: nn.Sequential(nn.Identity(), a_layer()),
    "solve": lambda: solve_alone,
    "linear": lambda: linear_alone,
    "backward": lambda: backward_alone,
}


@pytest.mark.defect("D8")
@pytest.mark.parametrize("name", SOURCES)
def test_a_failing_line_is_named(name: str) -> None:
    """With the same text at every call, so that Python shows it once."""
    heard = [w for w in heard_from(SOURCES[name](), "always") if w.category is SolveWarning]
    assert len(heard) == 4 and len({str(w.message) for w in heard}) == 1
    assert {w.filename for w in heard} == {__file__}
    assert ("in a layer DEQ" in str(heard[0].message)) == (name in ("layer", "nested"))


def test_a_warning_that_is_an_error_ends_the_solve() -> None:
    with pytest.raises(SolveWarning):
        heard_from(partial(layer_alone, a_layer()), "error")
