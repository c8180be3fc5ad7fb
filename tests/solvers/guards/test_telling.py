"""Failures reach the user: at the right line, once, and across processes."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn import DEQ
from implicit_attn.energies.simple import Quadratic
from solvers import (
    Forward,
    Implicit,
    SolveError,
    SolveWarning,
    SpectrumError,
    fixed_point,
    solve_linear,
    spectral_radius,
)
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


@pytest.mark.defect("C3")
def test_a_state_that_cannot_be_pickled_is_left_out() -> None:
    with pytest.raises(SolveError) as caught:
        fail(0)
    caught.value.solution.value = [lambda: None]
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.solution.value is None
    assert copy.solution.counts() == {"MAX_STEPS": 2}


@pytest.mark.defect("C3")
def test_an_error_of_a_spectrum_survives_pickling() -> None:
    with pytest.raises(SpectrumError) as caught:
        spectral_radius(lambda z: (z**4).sum(1), torch.full((2, 3), torch.nan), kind="energy")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert not copy.spectrum.converged.any()


@pytest.mark.defect("C3")
def test_a_pool_of_processes_hands_the_error_back() -> None:
    with (
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
        pytest.raises(SolveError, match="MAX_STEPS 2 of 2"),
    ):
        pool.submit(fail, 0).result(timeout=120)


class Doubling(nn.Module):
    """A module of the user around the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = DEQ(Quadratic(), max_steps=1, init="zeros")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(2 * x)


def heard_from(function: Any, action: Any, times: int = 4) -> list[warnings.WarningMessage]:
    """Warnings of several calls, each with other numbers in its message."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter(action)
        for turn in range(times):
            function(torch.full((2 + turn, 2, 3), 1.0 + turn))
    return heard


def layer_alone(x: Tensor) -> Tensor:
    return LAYER(x)  # line of the user


def solve_alone(x: Tensor) -> Any:
    return fixed_point(halve, x, (x,), solver=Forward(), max_steps=2)


def linear_alone(x: Tensor) -> Any:
    return solve_linear(lambda v, x: x.abs() * v * torch.arange(1, 4), x, args=(x,), max_steps=1)


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


LAYER = DEQ.from_update(halve, solver=Forward(), max_steps=2)
NESTED = nn.Sequential(nn.Identity(), LAYER)
SOURCES = [layer_alone, NESTED, solve_alone, linear_alone, backward_alone]


@pytest.mark.defect("D8")
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: getattr(s, "__name__", "nested"))
def test_a_failing_line_warns_once_and_is_named(source: Any) -> None:
    heard = [w for w in heard_from(source, "default") if w.category is SolveWarning]
    assert len(heard) == 1
    assert heard[0].filename == __file__
    assert "unconverged" in str(heard[0].message)


@pytest.mark.defect("D8")
def test_other_filters_keep_their_meaning() -> None:
    heard = heard_from(layer_alone, "always")
    assert len(heard) == 4
    assert len({str(w.message) for w in heard}) == 4
    assert {w.filename for w in heard} == {__file__}
    assert heard_from(layer_alone, "ignore") == []
    with pytest.raises(SolveWarning):
        heard_from(layer_alone, "error")


@pytest.mark.defect("D8")
def test_another_cause_at_the_same_line_is_told_too() -> None:
    def solve(x: Tensor) -> Any:
        factor = 0.5 if x.shape[0] % 2 else 3.0
        steps = 2 if x.shape[0] % 2 else 60
        return fixed_point(lambda z: factor * z + 1, x, solver=Forward(), max_steps=steps)

    heard = heard_from(solve, "default")
    assert len(heard) == 2
    assert "DIVERGED" in str(heard[0].message)
    assert "MAX_STEPS" in str(heard[1].message)


@pytest.mark.defect("D8")
def test_the_line_of_a_module_around_the_layer_is_named() -> None:
    layer = Doubling()
    heard = heard_from(layer, "default")
    assert [w.filename for w in heard] == [__file__]


class Inner(nn.Module):
    """Layers of this kind call theirs from one line."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer = DEQ.from_update(
            lambda z, x: scale * torch.sin(z).roll(1, 2) + x,
            solver=Forward(),
            max_steps=2,
            adjoint=Implicit(max_steps=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.defect("D8")
def test_each_layer_is_told_of_once() -> None:
    network = nn.Sequential(Inner(0.5), Inner(0.6))
    heard = heard_from(network, "default")
    assert len([w for w in heard if "adjoint" not in str(w.message)]) == 2
    assert {w.filename for w in heard} == {__file__}


@pytest.mark.defect("D8")
def test_the_adjoint_of_each_layer_is_told_of_once() -> None:
    network = nn.Sequential(Inner(0.5), Inner(0.6))
    scale = torch.linspace(0.1, 1.0, 6).reshape(2, 3)

    def backward(x: Tensor) -> None:
        network(scale * x.requires_grad_()).square().sum().backward()

    heard = heard_from(backward, "default")
    assert len([w for w in heard if "adjoint solve" in str(w.message)]) == 2


@pytest.mark.defect("D8")
def test_functions_made_anew_are_one_function() -> None:
    def solve(x: Tensor) -> Any:
        return fixed_point(lambda z: 0.5 * z + 1, x, solver=Forward(), max_steps=2)

    assert len(heard_from(solve, "default")) == 1


@pytest.mark.defect("D8")
def test_nothing_is_kept_of_layers_that_are_gone() -> None:
    before = len(telling._TOLD)
    for _ in range(5):
        heard_from(Inner(0.5), "default")
    gc.collect()
    assert len(telling._TOLD) <= before
