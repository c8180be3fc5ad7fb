"""What a layer takes, what it refuses, and what it says then."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.deq import DIM, LAYERS, Cell, make, relative_error, tokens
from implicit_attn import DEQ, Energy, GradientStep
from implicit_attn.energies import FunctionEnergy, Hopfield, Quadratic
from implicit_attn.updates import FunctionUpdate
from solvers import (
    LBFGS,
    Anderson,
    Forward,
    Implicit,
    Progress,
    SolveError,
    SolveWarning,
    Status,
    Tolerance,
)


def well(z: Tensor, x: Tensor) -> Tensor:
    return 0.5 * (z - x).square().flatten(1).sum(1) + 0.1 * z.cosh().flatten(1).sum(1)


def relax(z: Tensor, x: Tensor) -> Tensor:
    return x - 0.1 * z.sinh()


def test_energy_is_a_gradient_step() -> None:
    layer = DEQ(Quadratic())
    assert isinstance(layer.update, GradientStep)
    assert layer.update.step_size() == 1.0
    update = GradientStep(Quadratic(), 0.3)
    assert DEQ(update).update is update


def test_plain_energy_equals_the_energy_class() -> None:
    class Well(Energy):
        def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
            return well(z, x)

    options: dict[str, Any] = {"tolerance": Tolerance(rtol=1e-12)}
    x = tokens()
    expected = DEQ(Well(), **options)(x)
    torch.testing.assert_close(DEQ.from_energy(well, **options)(x), expected)
    torch.testing.assert_close(DEQ(FunctionEnergy(well), **options)(x), expected)
    torch.testing.assert_close(DEQ.from_update(relax, **options)(x), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        DEQ.from_energy(well, step_size=0.2, **options)(x), expected, rtol=1e-9, atol=1e-9
    )


def test_update_flags() -> None:
    assert isinstance(DEQ.from_update(relax).update, FunctionUpdate)
    assert not DEQ.from_update(relax).update.symmetric
    assert DEQ.from_update(relax, symmetric=True).update.symmetric
    assert DEQ.from_energy(well).update.symmetric


def test_functions_without_input() -> None:
    """``fn(z)``: x is the initial state and nothing else."""
    layer = DEQ.from_update(lambda z: z.cos(), tolerance=Tolerance(rtol=1e-12))
    z = layer(tokens())
    torch.testing.assert_close(z, torch.full_like(z, 0.7390851332151607))
    basin = DEQ.from_energy(
        lambda z: (z.square() - 1).square().flatten(1).sum(1), step_size=0.1,
        tolerance=Tolerance(rtol=1e-10),
    )  # fmt: skip
    x = torch.tensor([[0.8, -0.9], [-1.3, 1.2]], dtype=torch.float64)
    torch.testing.assert_close(basin(x), x.sign())


def test_module_as_a_function() -> None:
    cell = Cell()
    layer = DEQ.from_update(cell)
    assert len(list(layer.parameters())) == 2
    assert set(layer.state_dict()) == {f"update.function.{n}" for n in cell.state_dict()}


def test_stored_patterns_are_retrieved() -> None:
    torch.manual_seed(0)
    patterns = torch.sign(torch.randn(4, 16)).double()
    noisy = patterns + 0.4 * torch.randn(4, 16, dtype=torch.float64)
    layer = DEQ(Hopfield(patterns, beta=4.0), tolerance=Tolerance(rtol=1e-8))
    assert relative_error(layer(noisy.unsqueeze(1)).squeeze(1), patterns) <= 1e-6


@pytest.mark.parametrize("name", LAYERS)
def test_default_solvers_converge(name: str) -> None:
    layer = make(name)
    solution = layer.solve(tokens(batch=5), record=True)
    assert bool(solution.converged.all())
    assert (solution.residual <= (layer.tolerance or Tolerance()).rtol).all()
    assert (solution.energy is not None) == layer.update.monitored
    trace = solution.trace
    assert trace is not None
    assert (trace.energy is not None) == layer.update.monitored


def test_options_of_one_solve() -> None:
    layer = make("gradient")
    x = tokens()
    solution = layer.solve(x, max_steps=2, tolerance=Tolerance(rtol=1e-14), on_failure="ignore")
    assert (solution.status == Status.MAX_STEPS).all()
    assert (solution.evaluations == 2).all()
    tight = layer.solve(x, tolerance=Tolerance(rtol=1e-12), max_steps=300, solver=Anderson())
    assert bool(tight.converged.all())
    assert (layer.max_steps, layer.tolerance, layer.solver) == (50, None, None)


def test_default_solver_follows_the_update() -> None:
    x = tokens()
    for name, solver in (("gradient", LBFGS()), ("update", Anderson(memory=5))):
        layer = make(name)
        torch.testing.assert_close(layer(x), layer.solve(x, solver=solver).value, rtol=0, atol=0)


@pytest.mark.parametrize("option", ["max_itr", "steps", "compacted", "energy", "mask0", "rtol"])
def test_unknown_option(option: str) -> None:
    options: dict[str, Any] = {option: 3}
    with pytest.raises(TypeError, match=rf"unknown options \['{option}'\].*max_steps"):
        make("gradient").solve(tokens(), **options)
    with pytest.raises(TypeError, match=option):
        DEQ(Quadratic(), **options)
    with pytest.raises(TypeError, match=option):
        DEQ.from_energy(well, **options)


def test_options_are_not_changed() -> None:
    options = {"max_steps": 7, "on_failure": "ignore"}
    make("gradient", **options).solve(tokens(), **options)  # type: ignore[arg-type]
    assert options == {"max_steps": 7, "on_failure": "ignore"}


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_steps": 0}, ValueError, "max_steps"),
    ({"max_steps": 2.5}, TypeError, "max_steps"),
    ({"max_steps": True}, TypeError, "max_steps"),
    ({"tolerance": 1e-3}, TypeError, "tolerance must be a solvers.Tolerance, got 0.001"),
    ({"solver": "anderson"}, TypeError, "solver must be a solvers.Solver"),
    ({"solver": Anderson}, TypeError, "solver must be a solvers.Solver"),
    ({"adjoint": "implicit"}, TypeError, "adjoint must be a solvers.Adjoint or None"),
    ({"on_failure": "shout"}, ValueError, "on_failure must be one of"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make("gradient").solve(tokens(), **options)
    with pytest.raises(error, match=re.escape(message)):
        make("gradient", **options)(tokens())


@pytest.mark.parametrize("update", [well, nn.Linear(2, 2), None, GradientStep])
def test_bad_update(update: Any) -> None:
    with pytest.raises(TypeError, match=r"update must be an Update or an Energy.*from_update"):
        DEQ(update)


@pytest.mark.parametrize("init", ["ones", None, 0])
def test_bad_init(init: Any) -> None:
    with pytest.raises(ValueError, match="init must be"):
        DEQ(Quadratic(), init=init)


def nan_in_sample_one() -> Tensor:
    x = tokens(batch=3)
    x[1, 0, 2] = torch.nan
    return x


BAD_INPUTS: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("nan", nan_in_sample_one, ValueError, r"NaN or infinity in samples \[1\]"),
    ("infinite", lambda: tokens() / 0, ValueError, r"NaN or infinity in samples \[0, 1\]"),
    ("empty", lambda: tokens(batch=0), ValueError, "at least one sample, got shape"),
    ("scalar", lambda: torch.tensor(1.0), ValueError, "must have a batch dimension"),
    (
        "integers",
        lambda: torch.ones(2, 3, DIM).long(),
        TypeError,
        "floating dtype, got torch.int64",
    ),
    ("features", lambda: tokens(dim=DIM + 1), ValueError, rf"{DIM} features.*\(2, 3, {DIM + 1}\)"),
    ("no-tokens", lambda: tokens()[:, 0], ValueError, r"\(B, N, d\), got \(2, 4\)"),
    ("list", lambda: [1.0, 2.0], TypeError, "x must be a tensor"),
    ("none", lambda: None, TypeError, "x must be a tensor"),
    ("dict", lambda: {"x": tokens()}, TypeError, "x must be a tensor.*give init a function"),
]


@pytest.mark.parametrize(
    ("make_input", "error", "message"), [b[1:] for b in BAD_INPUTS], ids=[b[0] for b in BAD_INPUTS]
)
def test_bad_inputs(make_input: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make("gradient")(make_input())


@pytest.mark.parametrize("init", ["input", "zeros"])
def test_messages_name_what_the_caller_passed(init: str) -> None:
    """The caller passed x; z0 and args[0] are the layer's own names for it."""
    for make_input in (nan_in_sample_one, lambda: tokens(batch=0)):
        with pytest.raises(ValueError, match=r"\bx\b"):
            make("gradient", init=init)(make_input())


def test_wrong_dtype_of_the_input() -> None:
    with pytest.raises((TypeError, ValueError), match=r"float32|torch\.float"):
        make("gradient")(tokens().float())


BAD_FUNCTIONS: list[tuple[str, Callable[..., Any], type[Exception], str]] = [
    ("scalar", lambda z, x: (z - x).square().sum(), ValueError, r"returned a scalar.*\(2,\)"),
    ("tokens", lambda z, x: (z - x).square().sum(-1), ValueError, r"\(2,\).*got shape \(2, 3\)"),
    ("number", lambda z, x: 3.0, TypeError, "must return a tensor of shape"),
]


@pytest.mark.parametrize(("_", "function", "error", "message"), BAD_FUNCTIONS)
def test_bad_energies(
    _: str, function: Callable[..., Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DEQ.from_energy(function)(tokens())


def test_update_that_changes_shape_or_dtype() -> None:
    with pytest.raises(ValueError, match=r"must return shape \(2, 3, 4\).*got \(2, 3\)"):
        DEQ.from_update(lambda z: z.sum(-1))(tokens())
    with pytest.raises(TypeError, match=r"must return dtype torch.float64.*got torch.float32"):
        DEQ.from_update(lambda z: z.float())(tokens())
    with pytest.raises(TypeError, match="structured like z0"):
        DEQ.from_update(lambda z: (z, z))(tokens())


@pytest.mark.parametrize(("policy", "raised"), [("warn", SolveWarning), ("raise", SolveError)])
def test_failure_is_never_silent(policy: str, raised: Any) -> None:
    layer = make("gradient", max_steps=1, tolerance=Tolerance(rtol=1e-14), on_failure=policy)
    with (pytest.warns if policy == "warn" else pytest.raises)(raised, match="MAX_STEPS 2 of 2"):
        layer(tokens())


def test_failing_adjoint_is_reported() -> None:
    layer = make("gradient", adjoint=Implicit(max_steps=1, tolerance=Tolerance(rtol=1e-14)))
    loss = layer(tokens()).pow(3).sum()
    with pytest.warns(SolveWarning, match="adjoint solve"):
        loss.backward()


class Noisy(nn.Module):
    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.cell, self.dropout = Cell().double(), dropout

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.cell(self.dropout(z), x)


@pytest.mark.parametrize(
    "dropout",
    [nn.Dropout(0.1), nn.Dropout1d(0.2), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.3)],
)
def test_dropout_in_the_update(dropout: nn.Module) -> None:
    layer = DEQ.from_update(Noisy(dropout))
    with pytest.raises(ValueError, match=r"Dropout.*function\.dropout.*training mode"):
        layer(tokens())
    layer.eval()
    assert bool(layer.solve(tokens()).converged.all())


def test_dropout_that_does_nothing_is_no_dropout() -> None:
    assert bool(DEQ.from_update(Noisy(nn.Dropout(0.0))).solve(tokens()).converged.all())


def test_callback_and_repr() -> None:
    seen: list[Progress] = []
    layer = make("gradient", solver=Forward())
    solution = layer.solve(tokens(), callback=seen.append)
    assert [p.evaluation for p in seen] == list(range(1, int(solution.evaluations.max()) + 1))
    assert "max_steps=50" in repr(layer)
