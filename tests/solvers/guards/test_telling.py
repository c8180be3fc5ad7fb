"""Failures reach the user: at the right line, once, and across processes."""

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

import solvers
from implicit_attn import DEQ
from solvers import EnergyUpdate, Forward, Implicit, SolveError, SolveWarning, fixed_point
from solvers.core.guards import telling


def halve(z: Tensor, b: Tensor) -> Tensor:
    return 0.5 * z + b


def fail(seed: int) -> Tensor:
    """A solve that raises; at module level, where another process finds it."""
    b = torch.ones(2, 3) * (seed + 1)
    weight = torch.tensor(0.9, requires_grad=True)
    solution = fixed_point(
        lambda z, b: weight * z + b, b, (b,), solver=Forward(), max_steps=3, on_failure="raise"
    )
    return solution.value


@pytest.mark.defect("C3")
def test_an_error_of_a_solve_survives_pickling() -> None:
    with pytest.raises(SolveError) as caught:
        fail(0)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is SolveError
    assert str(copy) == str(caught.value)
    assert copy.solution.counts() == {"MAX_STEPS": 2}
    assert torch.equal(copy.solution.value, caught.value.solution.value)
    assert not copy.solution.value.requires_grad
    assert caught.value.solution.value.requires_grad


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
    assert "unconverged" in str(heard[0].message)


@pytest.mark.defect("D8")
def test_other_filters_keep_their_meaning() -> None:
    source = partial(layer_alone, a_layer())
    heard = heard_from(source, "always")
    assert len(heard) == 4
    assert len({str(w.message) for w in heard}) == 4
    assert all("in a layer DEQ" in str(w.message) for w in heard)
    assert not any("Shown once" in str(w.message) for w in heard)
    assert {w.filename for w in heard} == {__file__}
    assert heard_from(source, "ignore") == []
    with pytest.raises(SolveWarning):
        heard_from(source, "error")
    # None of these has used up the one time that it is shown by default.
    assert [len(heard_from(source, action)) for action in ("once", "default", "module")] == [
        1,
        0,
        0,
    ]


class Inner(nn.Module):
    """Layers of this kind call theirs from one line."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer = DEQ.from_update(
            lambda z, x: scale * torch.sin(z).roll(1, 2) + x, solver=Forward(), max_steps=2,
            adjoint=Implicit(max_steps=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_layer_is_told_of_once_though_filters_change_and_lines_differ() -> None:
    """Python forgets what it has shown when the filters change, which torch does within a step."""
    layer = a_layer()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        for _ in range(3):
            layer(torch.ones(2, 2, 3))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
        layer(torch.ones(1, 2, 3))
    assert len(heard) == 1
    assert "Shown once for this layer and cause; its attribute last tells" in str(heard[0].message)


class Model(nn.Module):
    """Two blocks, one of them failing, in a model of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), Inner(0.5)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_layer_is_named_as_in_the_model_that_is_called() -> None:
    said = [str(w.message) for w in heard_from(Model(), "default")]
    assert len(said) == 1 and "; in the layer blocks.1.layer (DEQ) of Model. Shown once" in said[0]
    said = [str(w.message) for w in heard_from(a_layer(), "default")]
    assert len(said) == 1 and "; in a layer DEQ. Shown once" in said[0]


@pytest.mark.parametrize(("factor", "steps", "told", "not_told"), [
    (3.0, 60, 'the map may not contract.*apply_norm.*"bound".*damp', "raise max_steps"),
    (0.99, 60, "raise max_steps, loosen the tolerance", "contract"),
    (3.0, 3, "raise max_steps, loosen the tolerance", "contract"),  # too early to tell
])  # fmt: skip
def test_a_residual_that_does_not_fall_has_an_advice_of_its_own(
    factor: float, steps: int, told: str, not_told: str
) -> None:
    """A circle of radius ``factor`` around the origin, or a slow contraction; steps of a cycle."""

    def f(z: Tensor) -> Tensor:
        return factor * z.flip(1) / z.norm(dim=1, keepdim=True) if factor > 1 else factor * z + 1

    start = torch.tensor([[1.0, 2.0]])
    with pytest.raises(SolveError, match=told) as caught:
        fixed_point(f, start, solver=Forward(), max_steps=steps, on_failure="raise", tolerance=1e-9)
    assert not_told not in str(caught.value)


def test_an_energy_that_does_not_fall_is_to_be_checked() -> None:
    """Its gradient has the wrong sign."""

    class Uphill(EnergyUpdate):
        def joint(self, z: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            return z + z.sin() + 2, z.square().sum(1), -z.sin() - 2

    with pytest.raises(SolveError, match=r"implicit_attn.check_energy tells"):
        fixed_point(Uphill(), torch.ones(1, 2), solver=Forward(), max_steps=60, on_failure="raise")
