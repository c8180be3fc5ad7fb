"""``DEQ.compile``: the same solutions, statuses, counts and gradients from compiled programs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import solvers
from cases.deq import COUNT, DIM, Cell, energy, gradients, make, relative_error, tokens
from implicit_attn import DEQ, EquilibriumBlock, GradientStep, compile_layers
from implicit_attn.dropout import VariationalDropout
from implicit_attn.updates import Update
from solvers import GMRES, LBFGS, Anderson, Broyden, Forward, Implicit, Status, Tolerance

pytestmark = [
    # torch's compiler uses parts of torch and Python that are deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
OPTIONS: Any = {"tolerance": Tolerance(1e-5), "max_steps": 60}


class Sum(Update):
    """``z -> A tanh(z) + x`` with a chosen spectral norm of A; each sample is scaled by its first x."""

    def __init__(self, size: float = 0.5) -> None:
        super().__init__()
        weight = torch.randn(DIM, DIM, dtype=torch.float64)
        self.weight = nn.Parameter(size * weight / torch.linalg.matrix_norm(weight, 2))

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return torch.tanh(z) @ self.weight.mT + x


def pair(layer: DEQ, **options: Any) -> tuple[DEQ, DEQ]:
    """The layer and a copy that is compiled, without code generation."""
    compiled = copy.deepcopy(layer)
    compiled.compile(**{"backend": "eager", **options})
    return layer, compiled


def programs(layer: DEQ) -> int:
    """How many there are."""
    assert layer._programs is not None
    return len(layer._programs.made) + len(layer._programs.staged)


def run(layer: DEQ, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Value and gradients of a loss, by name."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    value = layer(leaf, mask)
    (value * torch.arange(value.numel()).reshape(value.shape).sin()).sum().backward()
    assert leaf.grad is not None
    return gradients(layer) | {"x": leaf.grad, "value": value.detach()}


def assert_same(first: DEQ, second: DEQ, x: Tensor, mask: Tensor | None = None) -> None:
    """Same values, gradients, statuses and counts, forward and backward."""
    wanted, got = run(first, x, mask), run(second, x, mask)
    assert wanted.keys() == got.keys()
    for name, value in wanted.items():
        assert relative_error(got[name], value) < 1e-7, name
    assert first.last is not None and second.last is not None
    assert torch.equal(first.last.status, second.last.status)
    assert torch.equal(first.last.evaluations, second.last.evaluations)
    assert torch.equal(first.last.steps, second.last.steps)
    pairs = [each.last.adjoint.solution for each in (first, second) if each.last is not None]
    assert pairs[0] is not None and pairs[1] is not None
    assert torch.equal(pairs[0].status, pairs[1].status)
    assert torch.equal(pairs[0].evaluations, pairs[1].evaluations)


@pytest.mark.parametrize("name", ["gradient", "context", "activation", "mean_field"])
def test_same_as_without(name: str) -> None:
    first, second = pair(make(name, **OPTIONS))
    assert_same(first, second, tokens(3))
    assert programs(second)
    if name == "gradient":  # what is masked has programs of its own
        mask = torch.ones(3, COUNT, dtype=torch.bool)
        mask[0, 1] = mask[2, 0] = False
        assert_same(first, second, tokens(3), mask)


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver", [Anderson(memory=3), LBFGS(), Broyden(), Forward(0.7)], ids=lambda s: type(s).__name__
)
def test_solvers(solver: Any) -> None:
    torch.manual_seed(0)
    layer = DEQ(GradientStep(energy()), solver=solver, **OPTIONS | {"max_steps": 40})
    layer.on_failure = "ignore"  # plain iteration takes longer
    assert_same(*pair(layer), tokens(3))


def test_programs_serve_other_numbers_weights_and_limits() -> None:
    first, second = pair(make("mean_field", **OPTIONS))
    assert_same(first, second, tokens(3))
    assert second._programs is not None
    made = programs(second)
    with torch.no_grad():
        for layer in (first, second):
            for weight in layer.parameters():
                weight.mul_(0.9)
            layer.max_steps, layer.tolerance = 4, Tolerance(1e-4)
            layer.on_failure = "ignore"
    assert_same(first, second, tokens(3, seed=1))
    assert first.last is not None and (first.last.evaluations == 4).all()
    assert programs(second) == made


def test_batch_sizes_share_programs() -> None:
    torch.manual_seed(0)
    first, second = pair(DEQ(Sum(), **OPTIONS))
    for batch in (8, 5):
        assert_same(first, second, tokens(batch))
    assert second._programs is not None
    made = programs(second)
    for batch in (4, 6, 7):
        assert_same(first, second, tokens(batch))
    assert programs(second) == made  # all padded to 8


def test_rows_out_of_the_ordinary_are_solved_as_without() -> None:
    """One sample diverges, one is not finite, one converges."""

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 0, 0.5 * torch.tanh(z), 3 * z + z**3) / x[:, 1:2] + x

    x = tokens(3).flatten(1)[:, :6]
    x[:, 0], x[:, 1] = torch.tensor([1.0, -1.0, 1.0]), torch.tensor([1.0, 1.0, 0.0])
    layer = DEQ.from_update(f, solver=Forward(), max_steps=30, on_failure="ignore")
    first, second = pair(layer)
    with torch.no_grad():
        wanted, got = first.solve(x), second.solve(x)
    assert torch.equal(wanted.status, got.status)
    assert wanted.status[0] == Status.CONVERGED and (wanted.status[1:] != Status.CONVERGED).all()
    assert torch.equal(wanted.evaluations, got.evaluations)
    assert torch.equal(wanted.value.nan_to_num(), got.value.nan_to_num())


def test_an_adjoint_that_is_not_solved_is_told_as_without() -> None:
    torch.manual_seed(0)
    short = Implicit(solver=GMRES(2), tolerance=Tolerance(1e-12), max_steps=3)
    first, second = pair(DEQ(Sum(0.9), **OPTIONS | {"adjoint": short}))
    for layer in (first, second):
        with pytest.warns(solvers.SolveWarning, match="adjoint"):
            layer(tokens(2)).sum().backward()
    assert relative_error(second.update.weight.grad, first.update.weight.grad) < 1e-12  # type: ignore[union-attr]


def test_dropout_has_one_mask_a_solve() -> None:
    class Dropped(Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = VariationalDropout(0.5)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return super().forward(self.dropout(z), x)

    first, second = pair(DEQ.from_update(Dropped(), **OPTIONS).double())
    for seed in (1, 2):
        outputs = []
        for layer in (first, second):
            torch.manual_seed(seed)
            outputs.append(layer(tokens(2)))
        assert relative_error(outputs[1], outputs[0]) < 1e-9
    for layer in (first, second):
        layer.eval()
    assert_same(first, second, tokens(2))


def test_autocast_and_inference_mode() -> None:
    torch.manual_seed(0)
    first, second = pair(DEQ.from_update(Cell()))
    x = tokens(2).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_error(second(x), first(x)) < 2e-2
    assert first.last is not None and second.last is not None
    assert torch.equal(first.last.evaluations, second.last.evaluations)
    with torch.inference_mode():
        assert relative_error(second(x.clone()), first(x.clone())) < 1e-4


def test_observed_solves_are_as_without() -> None:
    first, second = pair(make("mean_field", **OPTIONS))
    traces = [layer.solve(tokens(2), record=True).trace for layer in (first, second)]
    assert traces[0] is not None and traces[1] is not None
    residuals = [trace.residual.nan_to_num() for trace in traces if trace is not None]
    torch.testing.assert_close(residuals[1], residuals[0], rtol=1e-3, atol=1e-6)
    assert programs(second)


def test_compile_layers() -> None:
    model = nn.Sequential(EquilibriumBlock(8, 2), nn.Linear(8, 8), EquilibriumBlock(8, 2))
    x = torch.randn(2, 5, 8)
    wanted = model(x)
    assert compile_layers(model, backend="eager") == 2
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-6)
    assert compile_layers(model, backend=None) == 2
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=0)


class Asks(Update):
    """Asks for a number while it computes."""

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return 0.5 * torch.tanh(z) + x if float(z.sum()) > -1e9 else z


def test_what_cannot_be_compiled_says_so() -> None:
    _, layer = pair(DEQ(Asks(), **OPTIONS))
    with pytest.raises(RuntimeError, match="Asks cannot be compiled"):
        layer(tokens(2))


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"backend": "no such"}, ValueError, "backend"),
    ({"mode": "fast"}, ValueError, "mode"),
    ({"backend": "eager", "mode": "max-autotune"}, ValueError, "inductor"),
    ({"options": 3}, TypeError, "options"),
])  # fmt: skip
def test_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DEQ.from_update(Cell()).compile(**options)
    with pytest.raises(ValueError, match="model must hold a DEQ"):
        compile_layers(nn.Linear(2, 2))


@pytest.mark.slow
def test_inductor() -> None:
    torch.manual_seed(0)
    first, second = pair(DEQ.from_update(Cell(), solver=Anderson(memory=2)), backend="inductor")
    assert_close = torch.testing.assert_close
    x = tokens(2).float()
    wanted, got = run(first, x), run(second, x)
    for name, value in wanted.items():
        assert_close(got[name], value, rtol=1e-4, atol=1e-5)
    assert second._programs is not None
    made = programs(second)
    for _ in range(3):
        run(second, x)
    assert programs(second) == made


LOOSE: Any = {"tolerance": Tolerance(1e-4), "solver": Forward(), "max_steps": 20}


class Changing(Update):
    """``scale act(W z) cos(x) + x``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(4, 4, generator=torch.manual_seed(0)))
        self.scale, self.act, self.pair = 0.5, nn.Tanh(), (1.0, 1.0)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return self.scale * self.pair[0] * self.act(z @ self.weight.mT) * x.cos() + x


def changing(update: Update | None = None, **options: Any) -> tuple[Any, Any]:
    return pair(DEQ(update or Changing(), **LOOSE | options))


def given(batch: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(batch, 4, generator=torch.Generator().manual_seed(seed))


def _scale(layer: Any) -> None:
    layer.update.scale = 0.1


def _pair(layer: Any) -> None:
    layer.update.pair = (0.3, 1.0)


def _module(layer: Any) -> None:
    layer.update.act = nn.Sigmoid()


def _update(layer: Any) -> None:
    torch.manual_seed(3)
    layer.update = Changing()
    with torch.no_grad():
        layer.update.weight.mul_(-1)


def _hook(layer: Any) -> None:
    layer.update.act.register_forward_hook(lambda module, inputs, output: 0.5 * output)


@pytest.mark.parametrize("change", [_scale, _pair, _module, _update, _hook])
def test_what_a_module_has_is_part_of_the_program(change: Callable[[Any], None]) -> None:
    layers = changing()
    with torch.no_grad():
        before, again = [layer(given()) for layer in layers]
        torch.testing.assert_close(again, before)
        for layer in layers:
            change(layer)
        wanted, got = [layer(given()) for layer in layers]
    assert (wanted - before).abs().max() > 1e-3
    torch.testing.assert_close(got, wanted)


def test_a_change_between_forward_and_backward() -> None:
    layer = changing()[1]
    value = layer(given())
    layer.update.scale = 0.1
    with pytest.raises(RuntimeError, match="was changed between"):
        value.sum().backward()
    layer.update.scale = 0.5
    value = layer(given())
    value.sum().backward()
    layer.zero_grad()
    value = layer(given())
    layer.update.scale = 0.1  # its programs are there: the gradient is that of the solve
    value.sum().backward()
    plain = changing()[0]
    plain(given()).sum().backward()
    torch.testing.assert_close(layer.update.weight.grad, plain.update.weight.grad)


class Draws(Changing):
    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return 0.5 * nn.functional.rrelu(z @ self.weight.mT + x, 0.1, 0.9, True)


def test_random_numbers_are_refused() -> None:
    layer = changing(Draws())[1]
    with torch.no_grad():
        layer.update.weight.zero_()
    with pytest.raises(RuntimeError, match="draws random numbers"):
        layer(given().abs())


def test_tensors_of_closures_and_power_iterations_are_refused() -> None:
    held = torch.ones(3, 4)
    _, layer = pair(DEQ.from_update(lambda z, x: 0.5 * z.tanh() + x + held, compact=False))
    with pytest.raises(RuntimeError, match="no parameter or buffer"):
        layer(given())
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    module = nn.Sequential(linear)
    layer = DEQ.from_update(module)
    layer.update.function = module
    _, other = pair(layer)
    with pytest.raises(RuntimeError, match="changes a parameter or buffer"):
        other.solve(None, z0=given())


class Keeps(Changing):
    kept: Any = None

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        self.kept = torch.tanh(z)
        return super().forward(z, x)


def test_modules_are_not_touched() -> None:
    layer = changing(Keeps())[1]
    layer(given()).sum().backward()
    assert type(layer.update.kept) is Tensor
    assert type(layer.update.weight) is nn.Parameter


def test_programs_are_few_however_long_a_solve_takes() -> None:
    numbers = []
    for most in (12, 60):
        options: Any = {"max_steps": most, "tolerance": Tolerance(0.0), "on_failure": "ignore"}
        layer = DEQ.from_update(lambda z, x: 0.99 * z + x, solver=Forward(), **options)
        _, layer = pair(layer)
        with torch.no_grad():
            layer(given())
        assert layer._programs is not None
        numbers.append(len(layer._programs.made))
    assert numbers[0] == numbers[1] <= 3
