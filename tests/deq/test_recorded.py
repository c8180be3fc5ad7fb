"""``layer.compile()`` on CUDA devices: recorded solves against ordinary ones, all but the capture itself."""

from __future__ import annotations

import copy
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import solvers
from cases.deq import LAYERS, make, tokens
from cases.energies import relative_error
from implicit_attn import DEQ, EquilibriumBlock
from implicit_attn.energies import FunctionEnergy, IdentityLagrangian
from implicit_attn.updates import ActivationStep
from solvers import Tolerance, recording
from solvers.core.cuda import forced
from solvers.recording import Recorder


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    """The code for CUDA devices serves these tests on a CPU."""
    with forced(), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The recordings that are made, in order."""
    seen: list[Any] = []
    plain = recording.RecordedSolve.__init__

    def noted(self: Any, *args: Any) -> None:
        plain(self, *args)
        seen.append(weakref.ref(self))

    monkeypatch.setattr(recording.RecordedSolve, "__init__", noted)
    return seen


def results(layer: Any, x: Tensor, *args: Any) -> tuple[Tensor, solvers.Solution, list[Tensor]]:
    """Value, solution and gradients by x and all parameters."""
    x = x.clone().requires_grad_()
    y = layer(x, *args)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=y.dtype)
    given = [x, *layer.parameters()]
    found = torch.autograd.grad(y, given, cotangent, allow_unused=True)
    pairs = zip(found, given, strict=True)
    found = [torch.zeros_like(t) if g is None else g for g, t in pairs]
    return y.detach(), getattr(layer, "deq", layer).last, found


def agree(layer: Any, x: Tensor, *args: Any, close: float = 1e-8, counts: bool = True) -> None:
    """The compiled layer gives what the layer gives, when it is recorded and when it is replayed."""
    solved = getattr(layer, "deq", layer)
    solved.compile(False)
    expected = results(layer, x, *args)
    solved.compile()
    for _ in range(2):
        found = results(layer, x, *args)
        assert torch.equal(found[1].status, expected[1].status)
        if counts:
            assert (found[1].evaluations - expected[1].evaluations).abs().max() <= 1
        assert (found[1].residual <= 1e-10 if close < 1e-6 else found[1].residual < 2e-3).all()
        assert found[1].adjoint.solution is not None
        assert found[1].adjoint.solution.converged.all()
        assert relative_error(found[0], expected[0]) <= close
        for ours, theirs in zip(found[2], expected[2], strict=True):
            assert (ours - theirs).norm() <= close * 100 * (theirs.norm() + 1e-3)


EXACT: dict[str, Any] = {"tolerance": Tolerance(1e-11), "max_steps": 200}


@pytest.mark.parametrize(
    ("name", "masked"), [(name, k % 2 == 1) for k, name in enumerate(sorted(LAYERS))]
)
def test_layers(name: str, masked: bool, made: list[Any]) -> None:
    layer, x = make(name, **EXACT), tokens(batch=3)
    mask = torch.tensor([[True] * 3, [True, False, True], [True] * 3]) if masked else None
    if masked and name == "update":
        pytest.skip("takes no mask")
    # The energies of the others are descended by L-BFGS in the ordinary loop.
    agree(layer, x, mask, counts=name in ("update", "mean_field"))
    assert len(made) == 1


@pytest.mark.parametrize("causal", [False, True])
def test_a_recorded_block_prepares_its_input_in_the_recording(
    causal: bool, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights, keys and start are computed anew in each solve, from that solve's input."""
    torch.manual_seed(0)
    block: Any = EquilibriumBlock(8, 2, causal=causal, layer=EXACT).double()
    for scale in (1.0, 0.5):
        agree(block, scale * tokens(2, 5, 8), counts=not causal)
    assert len(made) == 2  # compile() forgets the recordings
    monkeypatch.delattr(solvers, "fixed_point")  # before which the input is prepared outside
    block(tokens(2, 5, 8).requires_grad_())


def test_which_changes_record_a_solve_again(made: list[Any]) -> None:
    layer: Any = make("update")
    x = tokens()
    layer.compile()

    def number(x: Tensor = x, **options: Any) -> int:
        layer(x.clone().requires_grad_(), **options)
        return len(made)

    assert number() == number() == 1
    assert number(tokens(batch=3)) == 2  # a shape
    assert number() == 2  # the first is kept
    layer.eval()
    assert number() == 3
    layer.train()
    assert number() == 3
    with torch.no_grad():
        assert number() == 4
    assert number(max_steps=30) == 5
    assert number(tolerance=Tolerance(1e-3)) == number(tolerance=Tolerance(1e-5)) == 6
    weight = layer.update.function.linear.weight
    with torch.no_grad():
        weight.mul_(0.5)  # an optimiser's step
    changed = layer(x.clone().requires_grad_()).detach()
    assert number() == 6
    weight.data = weight.data.clone()  # another tensor
    assert number() == 7
    assert torch.equal(changed, layer(x.clone().requires_grad_()))
    assert sum(ref() is not None for ref in made) == 1  # those of the old weights are gone
    layer.float()
    assert number(x.float()) == 8


def test_every_named_start_has_a_recording(made: list[Any]) -> None:
    layer, x = make("update", max_steps=2, on_failure="ignore"), tokens()
    for init in ("zeros", "input", "zeros", lambda x: torch.ones_like(x)):
        layer.init = init
        layer.compile(False)
        expected = layer(x)
        layer.compile()
        assert torch.equal(layer(x), expected) and torch.equal(layer(x), expected)
    assert len(made) == 4  # compile() forgets the recordings


class HostRead(nn.Module):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z.cos() / (1 + float(z.detach().abs().max() > 1e9)) + x


class DataShape(nn.Module):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        z = z.clone()
        z[z > 5] = 0.0
        return 0.5 * z[torch.nonzero(x[:, 0, 0] < 1e9)[:, 0]].cos() + x


class Drawing(nn.Module):
    """It draws, to no effect, which the ordinary loop allows."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z.cos() + x + 0 * torch.rand_like(x)


OUTSIDE = torch.full((4,), 0.5, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (HostRead(), "_local_scalar_dense"),
        (DataShape(), "nonzero"),
        (Drawing(), "rand_like"),
        (lambda z, x: OUTSIDE * z.cos() + x, "no parameter or input"),
    ],
    ids=["host read", "data shape", "random", "closure"],
)
def test_a_map_that_cannot_be_recorded_is_solved_by_the_ordinary_loop(
    function: Any, named: str
) -> None:
    layer, x = DEQ.from_update(function), tokens(2, 3, 4)
    given = [x.requires_grad_(), OUTSIDE]
    expected = layer(x)
    exact = torch.autograd.grad(expected.sum(), given, allow_unused=True)
    layer.compile()
    with pytest.warns(RuntimeWarning, match=named):
        found = layer(x)
    again = layer(x)  # without another warning
    for value in (found, again):
        assert torch.equal(value, expected)
        ours = torch.autograd.grad(value.sum(), given, allow_unused=True)
        for one, other in zip(ours, exact, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


def test_a_batch_with_a_failure_is_solved_by_the_ordinary_loop() -> None:
    def diverges(z: Tensor, x: Tensor) -> Tensor:
        return torch.where(x[:, :, :1] > 0, torch.inf, 0.5 * z.cos() + x)

    layer: Any = DEQ.from_update(diverges, on_failure="ignore", max_steps=30)
    x = tokens(3).abs()
    x[0] *= -1
    expected = layer(x)
    statuses = layer.last.status
    layer.compile()
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.last.status, statuses)


@pytest.mark.parametrize("max_steps", [4, 200])
def test_rows_that_influence_each_other_are_judged_by_the_returned_batch(
    max_steps: int, made: list[Any]
) -> None:
    """The first rows converge long before the last one reaches a value that matters to them."""
    rates = torch.tensor([0.5, 0.8, 0.95], dtype=torch.float64)

    def f(z: Tensor, x: Tensor) -> Tensor:
        last = torch.zeros_like(z)
        last[-1] = (rates - 0.3) * z[-1]
        return x + 0.3 * z + last + torch.relu(z[-1].detach().max() - 10) * (x == 0)

    solver = solvers.Anderson(memory=1, damping=0.5)
    options: dict[str, Any] = {"max_steps": max_steps, "on_failure": "ignore", "solver": solver}
    layer: Any = DEQ.from_update(f, tolerance=1e-6, **options)
    x = torch.zeros(6, 1, 3, dtype=torch.float64)
    x[-1] = 1.0
    layer.compile()
    value, solution = layer(x), layer.last
    residuals = (f(value, x) - value).flatten(1).norm(dim=1)
    torch.testing.assert_close(solution.residual_norm, residuals, rtol=1e-4, atol=1e-9)
    size = f(value, x).flatten(1).norm(dim=1)
    assert (residuals <= 2e-6 * size)[solution.converged].all()
    expected = "MAX_STEPS" if max_steps < 200 else "INCONSISTENT"
    assert solution.statuses[-1] == expected
    layer(x, verify=False)
    assert len(made) == 1 and "INCONSISTENT" not in layer.last.statuses


@pytest.mark.parametrize("recorded", [False, True])
def test_an_energy_in_small_units_is_solved(recorded: bool, made: list[Any]) -> None:
    """In float32 its gradient step is too small to change the state, so ``f(z) - z`` is zero."""
    x = tokens(4).float()
    layer: Any = DEQ.from_energy(
        lambda z, x: 1e-10 * (z - x).square().flatten(1).sum(1),
        init=torch.ones_like,
        tolerance=1e-4,
    )
    if recorded:
        layer.compile()
    value = layer(x)
    assert layer.last.converged.all()
    assert (value - x).norm() <= 1e-3 * x.norm()
    slope = 2e-10 * (value - x).flatten(1).norm(dim=1)
    torch.testing.assert_close(layer.last.residual_norm, slope, rtol=1e-2, atol=1e-20)
    assert len(made) == recorded


# The relative residual of the first ones falls because the state grows; the last is no number.
UNBOUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "quartic": lambda z: (z**2 / 2 - z**4 / 4).sum(1),
    "square root": lambda z: -z.abs().sqrt().sum(1),
    "linear": lambda z: -z.sum(1),
    "NaN": lambda z: (z - z.detach()).square().sum(1) + torch.nan,
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_unbounded_energies_do_not_converge(name: str, made: list[Any]) -> None:
    layer: Any = DEQ.from_energy(UNBOUNDED[name], max_steps=60, on_failure="ignore")
    x = 1.5 * torch.ones(2, 3)
    layer(x)
    expected = layer.last.status
    layer.compile()
    layer(x)
    assert len(made) == 1 and torch.equal(layer.last.status, expected)
    assert not layer.last.converged.any()


def test_an_energy_judged_by_its_residual_alone_is_not_recorded(made: list[Any]) -> None:
    x = tokens(2).float()
    layer: Any = DEQ.from_energy(
        lambda z, x: 50 * (z - x).square().flatten(1).sum(1),
        tolerance=Tolerance(0.0, 1e-3),
        max_steps=100,
        init="zeros",
    )
    layer.compile()
    with pytest.warns(RuntimeWarning, match="rtol = 0"):
        layer(x)
    assert not made and layer.last.converged.all()
    assert (layer.last.residual_norm <= 1e-3).all()


def test_other_steps_of_an_energy_are_recorded_with_an_absolute_tolerance(made: list[Any]) -> None:
    energy = FunctionEnergy(lambda z, x: 0.1 * (z - x).square().flatten(1).sum(1))
    tolerance = Tolerance(0.0, 1e-3)
    layer: Any = DEQ(
        ActivationStep(energy, IdentityLagrangian()), tolerance=tolerance, max_steps=80
    )
    layer.compile()
    layer(tokens(2).float())
    assert len(made) == 1 and layer.last.converged.all()


@pytest.mark.parametrize("unit", [1.0, 0.1])
def test_recorded_gradients_of_an_energy(
    unit: float, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adjoint turns are given the residual itself, because ``I - J`` is rounded to one in small units."""
    answers: list[Any] = []
    plain = recording.RecordedSolve.pull_back

    def noted(self: Any, *args: Any) -> Any:
        answers.append(plain(self, *args))
        return answers[-1]

    monkeypatch.setattr(recording.RecordedSolve, "pull_back", noted)
    x = tokens(3).float().requires_grad_()
    curvature = unit * torch.linspace(0.5, 1, x.shape[-1])
    layer: Any = DEQ.from_energy(
        lambda z, x: 0.5 * (curvature * (z - x).square()).flatten(1).sum(1), max_steps=200
    )
    layer.compile()
    (gradient,) = torch.autograd.grad(layer(x, z0=x.detach()).sum(), x)
    assert len(made) == len(answers) == 1
    torch.testing.assert_close(gradient, torch.ones_like(x), rtol=2e-3, atol=2e-3)


def test_a_recorded_block_reports_its_bound(made: list[Any]) -> None:
    block: Any = EquilibriumBlock(8, 2).double()
    block.deq.compile()
    with torch.no_grad():
        block(tokens(2, 5, 8))
    recorded = block.deq.last.bound
    block.deq.compile(False)
    with torch.no_grad():
        block(tokens(2, 5, 8))
    torch.testing.assert_close(recorded, block.deq.last.bound, rtol=0.5, atol=0)
    assert len(made) == 1


class Half(nn.Module):
    """A map whose result has the dtype of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.linear(0.4 * torch.tanh(z) + x)


@pytest.mark.parametrize("name", ["half", "block"])
def test_recordings_under_autocast(name: str, made: list[Any]) -> None:
    torch.manual_seed(0)
    layer: Any = DEQ.from_update(Half()) if name == "half" else EquilibriumBlock(4, 2)
    solved, x = getattr(layer, "deq", layer), tokens(2, 5, 4).float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        solved.compile()
        found = layer(x.requires_grad_())
        found.sum().backward()
    assert len(made) == 1 and found.dtype == expected.dtype
    assert relative_error(found, expected) <= 0.02
    assert solved.last.converged.all()


def test_second_derivatives_raise() -> None:
    layer, x = make("update"), tokens().requires_grad_()
    layer.compile()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_a_compiled_layer_can_be_copied_and_pickled() -> None:
    layer: Any = make("update")
    x = tokens()
    layer.compile()
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(other._recorder, Recorder)
        assert torch.equal(other(x), expected)
