"""``DEQ.compile``: the same solutions, statuses, counts and gradients from compiled programs."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import solvers
from cases.deq import COUNT, DIM, Cell, gradients, make, relative_error, tokens
from implicit_attn import DEQ, EquilibriumBlock, compile_layers
from implicit_attn.dropout import VariationalDropout
from implicit_attn.updates import Update
from solvers import (
    CG,
    GMRES,
    Anderson,
    Broyden,
    Forward,
    Implicit,
    Newton,
    Status,
    Tolerance,
    fixed_point,
)
from solvers.compiled import graphs

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


def pair(f: Any, *, backend: str = "eager", **options: Any) -> tuple[Any, Any]:
    """The layer (of an update) and a copy that is compiled, as a rule without code generation."""
    layer = f if isinstance(f, nn.Module) else DEQ.from_update(f, **options)
    return layer, compiled(layer, backend)


def programs(layer: DEQ) -> int:
    """How many there are."""
    assert layer._programs is not None
    return len(layer._programs.made)


def loss_of(value: Tensor) -> Tensor:
    return (value * torch.arange(value.numel()).reshape(value.shape).sin()).sum()


def results(
    layer: Any, x: Tensor, mask: Tensor | None = None, *, twice: bool = False
) -> list[Tensor | None]:
    """The value and the gradients by input and weights, of one backward pass or two."""
    leaf = x.clone().requires_grad_()
    value = layer(leaf, mask)
    variables = [leaf, *(p for p in layer.parameters() if p.requires_grad)]
    loss = loss_of(value)
    options: Any = {"allow_unused": True, "retain_graph": twice}
    found = [value.detach(), *torch.autograd.grad(loss, variables, **options)]
    if twice:
        again = torch.autograd.grad(loss, variables, allow_unused=True)
        for one, other in zip(found[1:], again, strict=True):
            assert one is None or torch.equal(one, other)
    return found


def assert_same(
    first: Any, second: Any, x: Tensor, mask: Tensor | None = None, *, twice: bool = False
) -> None:
    """Same values, gradients, statuses and counts, forward and backward."""
    wanted, got = (results(layer, x, mask, twice=twice) for layer in (first, second))
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or relative_error(one, other) < 1e-7
    for name in ("status", "evaluations", "steps"):
        assert torch.equal(getattr(second.last, name), getattr(first.last, name)), name
    one, other = (layer.last.adjoint.solution for layer in (first, second))
    assert torch.equal(other.status, one.status)
    assert torch.equal(other.evaluations, one.evaluations)


@pytest.mark.parametrize("name", ["gradient", "context", "activation", "mean_field"])
def test_same_as_without(name: str) -> None:
    first, second = pair(make(name, **OPTIONS))
    assert_same(first, second, tokens(3))
    assert programs(second)
    if name == "gradient":  # what is masked has programs of its own
        mask = torch.ones(3, COUNT, dtype=torch.bool)
        mask[0, 1] = mask[2, 0] = False
        assert_same(first, second, tokens(3), mask)


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
    torch.testing.assert_close(got.value, wanted.value, equal_nan=True)


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
    for got, wanted in zip(results(second, x), results(first, x), strict=True):
        assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert second._programs is not None
    made = programs(second)
    for _ in range(3):
        results(second, x)
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
        torch.autograd.grad(value.sum(), layer.update.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="was changed between"):
        value.sum().backward()


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


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, DIM).double()
        self.layer = make(name, tolerance=Tolerance(rtol=1e-10), max_steps=200)
        self.head = nn.Linear(DIM, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.relu(self.embed(x)))).mean(1))


def run_model(function: nn.Module, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    value = function(leaf)
    value.square().sum().backward()
    assert leaf.grad is not None
    return gradients(model) | {"x": leaf.grad, "value": value.detach()}


# Where compiled code goes on after a layer, torch's tracer looks at the .grad of its input.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "backend"), [
    ("gradient", "aot_eager"),
    ("update", "eager"),
])  # fmt: skip
def test_compiled_model_equals_eager(name: str, backend: str) -> None:
    model = Model(name)
    compiled = torch.compile(model, backend=backend)
    for seed, batch in ((0, 2), (1, 3)):
        x = tokens(batch=batch, dim=3, seed=seed)
        expected = run_model(model, model, x)
        found = run_model(compiled, model, x)  # type: ignore[arg-type]
        for key, reference in expected.items():
            assert relative_error(found[key], reference) <= 1e-8, key
    layer = model.layer
    assert layer.last is not None and bool(layer.last.converged.all())
    assert layer.last.adjoint.solution is not None


EXACT: Any = {"tolerance": Tolerance(1e-11), "adjoint": Implicit(tolerance=Tolerance(1e-11))}


def compiled(layer: Any, backend: str = "eager") -> Any:
    other = copy.deepcopy(layer)
    other.compile(backend=backend)
    return other


def sample(batch: int = 4, size: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, size, generator=generator, dtype=torch.float64)


def assert_same_solution(first: Any, second: Any, x: Any, **given: Any) -> Any:
    with torch.no_grad():
        one, other = first.solve(x, **given), second.solve(x, **given)
    for name in ("status", "evaluations", "steps"):
        assert torch.equal(getattr(other, name), getattr(one, name)), name
    torch.testing.assert_close(other.value, one.value, equal_nan=True)
    for name in ("residual", "residual_norm"):
        found, wanted = getattr(other, name), getattr(one, name)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-12, equal_nan=True)
    return other


class Prepares(Update):
    """``tanh(W z) scale + p``, where ``p = sin(V x)`` is prepared."""

    def __init__(self, symmetric: bool = False) -> None:
        super().__init__()
        weight = 0.3 * sample(6, 6, 1)
        self.w = nn.Parameter((weight + weight.mT) / 2 if symmetric else weight)
        self.v = nn.Parameter(0.5 * sample(6, 6, 2))
        self.scale, self.symmetric, self.raised = 1.0, symmetric, False

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return torch.sin(x @ self.v.mT)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        linear = z @ self.w.mT
        return self.scale * (linear if self.symmetric else torch.tanh(linear)) + x


def uneven(z: Tensor, x: Tensor) -> Tensor:
    """Samples of large x contract slowly."""
    return torch.sigmoid(x[:, :1]) * 0.97 * torch.tanh(z.roll(1, 1)) + 0.5 * x


SOLVERS = [Anderson(), Anderson(memory=1, damping=0.7), Anderson(memory=20), Forward(0.6)]


@pytest.mark.parametrize("solver", SOLVERS, ids=["plain", "short", "long", "forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_that_converge_at_different_times(solver: Any, dtype: torch.dtype) -> None:
    first, second = pair(
        uneven, solver=solver, max_steps=30, tolerance=Tolerance(1e-4), on_failure="ignore"
    )
    x = 2 * sample(7).to(dtype)
    if dtype == torch.float64:
        solution = assert_same_solution(first, second, x)
        assert len(solution.evaluations.unique()) > 1
    else:  # another order of sums may end a sample one evaluation earlier
        with torch.no_grad():
            one, other = first.solve(x), second.solve(x)
        assert (one.evaluations - other.evaluations).abs().max() <= 1
        torch.testing.assert_close(other.value, one.value, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 6), (5, 1), (1, 1), (2, 3, 2)])
@pytest.mark.parametrize("most", [1, 2, 40])
def test_shapes_and_budgets(shape: tuple[int, ...], most: int) -> None:
    x = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    options: Any = {"max_steps": most, "on_failure": "ignore", "tolerance": Tolerance(1e-9)}
    assert_same_solution(*pair(lambda z, x: 0.9 * z.cos() + x, **options), x)


def test_masks_trees_and_padding() -> None:
    def f(z: dict[str, Tensor], x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        shown = z["b"] if mask is None else torch.where(mask[:, :, None], z["b"], 0)
        return {"a": 0.3 * z["a"].sin() + shown.sum(1) * 0.1, "b": 0.4 * z["b"].cos() + x}

    def init(x: Tensor) -> dict[str, Tensor]:
        return {"a": x[:, 0], "b": torch.zeros_like(x)}

    layers = pair(f, init=init, tolerance=Tolerance(1e-8))
    for batch in (8, 5, 8):
        x = sample(batch, 12).reshape(batch, 4, 3)
        mask = torch.ones(batch, 4, dtype=torch.bool)
        mask[1:, 3] = mask[2, 0] = False
        for given in (None, mask):
            with torch.no_grad():
                one, other = [layer.solve(x, given) for layer in layers]
            assert torch.equal(other.evaluations, one.evaluations)
            torch.testing.assert_close(other.value, one.value)


def test_an_output_that_shares_the_state() -> None:
    """The state of a solve is written to in place: what f returns of it must not be."""
    x = sample()
    for f in (
        lambda z, x: z,
        lambda z, x: z.flip(1).flip(1),
        lambda z, x: x,
        lambda z, x: 0.5 * z + x,
    ):
        first, second = pair(f, **EXACT, max_steps=60)
        solution = assert_same_solution(first, second, x)
        kept = solution.value.clone()
        assert_same_solution(first, second, x + 1)
        assert torch.equal(solution.value, kept) and torch.equal(x, sample())


def test_starts_and_cotangents_of_any_layout() -> None:
    first, second = pair(uneven, **EXACT, max_steps=80)
    x = sample(6, 4)
    assert_same(first, second, x.mT.contiguous().mT)
    assert_same_solution(first, second, x, z0=sample(12, 4, 1)[::2])
    found = []
    for layer in (first, second):
        leaf = x.clone().requires_grad_()
        value = layer(leaf)
        found.append(torch.autograd.grad(value, leaf, torch.ones(6, 1).double().expand(6, 4))[0])
        value = layer(leaf)
        found.append(torch.autograd.grad(value, leaf, sample(4, 6).mT)[0])
    torch.testing.assert_close(found[2:], found[:2])


@pytest.mark.parametrize(
    ("solver", "symmetric"),
    [(GMRES(), False), (GMRES(3), False), (CG(), True), (None, True)],
    ids=["gmres", "restarted", "cg", "chosen"],
)
def test_adjoints(solver: Any, symmetric: bool) -> None:
    adjoint = Implicit(solver=solver, tolerance=Tolerance(1e-9), max_steps=200)
    layer = DEQ(Prepares(symmetric), tolerance=Tolerance(1e-11), adjoint=adjoint)
    first, second = pair(layer)
    for batch in (6, 4):  # the second is padded
        assert_same(first, second, sample(batch), twice=True)


def test_second_derivatives() -> None:
    first, second = pair(DEQ(Prepares(), **EXACT))
    x, v = sample(1).requires_grad_(), second.update.v
    assert torch.autograd.gradgradcheck(second, x)
    found = []
    for layer, weight in ((second, v), (first, first.update.v)):
        slope = torch.autograd.grad(layer(x).square().sum(), weight, create_graph=True)[0]
        found.append(torch.autograd.grad(slope.square().sum(), [weight, x]))
    torch.testing.assert_close(*found)


def test_no_sample_is_told_more_products_than_it_may_have() -> None:
    """In float32 near its rounding the last of them verifies."""
    for most in (1, 2, 3, 6):
        adjoint = Implicit(GMRES(), Tolerance(3e-7), max_steps=most, on_failure="ignore")
        layers = pair(DEQ(Prepares().float(), adjoint=adjoint))
        for layer in layers:
            x = sample().float().requires_grad_()
            layer(x).sin().sum().backward()
        wanted, found = (layer.last.adjoint.solution for layer in layers)
        clear = (
            wanted.residual / 3e-7
        ).log().abs() > 1  # rounding does not decide whether it is solved
        assert (found.evaluations <= most).all()
        assert torch.equal(found.status[clear], wanted.status[clear])


@pytest.mark.parametrize("most", [2, 60])
@pytest.mark.parametrize("solver", [None, Forward(), Broyden(), Newton()], ids=str)
def test_every_run_of_a_program_is_counted_and_the_budget_kept(solver: Any, most: int) -> None:
    """Of a compiled layer, whose first call also evaluates f as it is, and of a compiled map."""
    torch.compiler.reset()  # which allows so many compilations of one function
    x, runs, calls = 3 * sample(8, 3), 0, 0

    def backend(graph: Any, inputs: Any) -> Any:
        evaluates = any("cos" in str(node.target) for node in graph.graph.nodes)

        def run(*tensors: Tensor) -> Any:
            nonlocal runs
            runs += evaluates
            return graph.forward(*tensors)

        return run

    def f(z: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += not torch.compiler.is_compiling()
        return 0.97 * torch.cos(z * x.abs().clamp_max(3)) + x

    options: Any = {"solver": solver, "max_steps": most, "tolerance": 1e-9, "on_failure": "ignore"}
    layer = DEQ.from_update(f, init="zeros", **options)
    layer.compile(backend=backend)
    compiled: Any = torch.compile(f, backend=backend)
    with torch.no_grad():
        layer.solve(x)
        for solve in (
            lambda: layer.solve(x),
            lambda: fixed_point(compiled, torch.zeros_like(x), (x,), compact=False, **options),
        ):
            runs = calls = 0
            told = int(solve().evaluations.max())
            if isinstance(solver, Newton):  # its products count, too
                assert 0 < runs + calls <= told <= most
            else:
                assert (runs, calls) == (told, 0) and told <= most


def test_cotangents_of_zero() -> None:
    found = []
    for layer in pair(DEQ(Prepares(), **EXACT)):
        leaf = sample().requires_grad_()
        value = layer(leaf)
        found.append(torch.autograd.grad((value[1:3] ** 2).sum(), [leaf, layer.update.w]))
        assert not found[-1][0][0].any()
        report = layer.last.adjoint.solution
        assert report.evaluations[0] == 0 and report.converged.all()
    torch.testing.assert_close(found[1], found[0])


def test_gradients_share_no_memory() -> None:
    """They are equal here, and become ``.grad``, which an optimizer changes in place."""

    def f(z: Tensor, x: Any) -> Tensor:
        return 0.5 * z.tanh() + x[0] + x[1]

    layer = pair(f, init=lambda x: torch.zeros_like(x[0]), **EXACT)[1]
    for batch in (6, 5):
        leaves = [sample(batch, seed=n).requires_grad_() for n in (0, 1)]
        layer(tuple(leaves)).square().sum().backward()
        first, second = [leaf.grad for leaf in leaves]
        assert first is not None and second is not None
        before = second.clone()
        first.mul_(2)
        assert torch.equal(second, before)


def test_what_changes_between_the_passes() -> None:
    first, second = pair(DEQ(Prepares(), **EXACT))
    wanted = results(first, sample())
    results(second, sample())  # its programs are made
    value = second(sample())
    second.update.scale = 0.1
    gradient = torch.autograd.grad(loss_of(value), second.update.v)[0]
    torch.testing.assert_close(gradient, wanted[3])
    second.update.scale = 1.0
    for weight in (second.update.w, second.update.v):
        value = second(sample())
        with torch.no_grad():
            weight.mul_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.sum().backward()


class WithinPrepares(Prepares):
    """The same map, whose ``sin(V x)`` is computed within: once a solve, as it sees no state."""

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return x

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z, torch.sin(x @ self.v.mT))


def test_what_programs_save_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each pass, while the loss lives; and without a collection of garbage."""
    saved: dict[int, StorageWeakRef] = {}
    at = graphs.Stages.at

    def noting(self: graphs.Stages, inputs: Any) -> Any:
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        found = at(self, inputs)
        for storage in [t.untyped_storage() for bound in found for t in bound.others]:
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = StorageWeakRef(storage)
        return found

    def alive() -> int:
        return sum(not reference.expired() for reference in saved.values())

    layer = pair(DEQ(WithinPrepares(), **EXACT))[1]
    results(layer, sample())
    monkeypatch.setattr(graphs.Stages, "at", noting)
    gc.collect()
    gc.disable()
    try:
        loss = layer(sample().requires_grad_()).sum()
        forward = len(saved)
        assert forward and alive() == 0
        loss.backward()
        assert len(saved) > forward and alive() == 0
        assert loss.grad_fn is not None
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
    finally:
        gc.enable()


def test_copies_modes_and_other_defaults() -> None:
    first, second = pair(DEQ(Prepares(), **EXACT))
    assert_same(first, second, sample())
    for other in (copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert_same(first, other, sample())
    solution = copy.deepcopy(second.last)
    assert torch.equal(solution.status, second.last.status)
    with torch.inference_mode():
        value = second(sample())
    torch.testing.assert_close(value, first(sample()))
    assert_same(first, second, sample())
    torch.set_default_device("meta")  # tensors that C++ writes to are on the CPU all the same
    try:
        with torch.no_grad():
            torch.testing.assert_close(second(sample_on_cpu), first(sample_on_cpu))
    finally:
        torch.set_default_device(None)


sample_on_cpu = sample()


def test_a_layer_within_a_layer() -> None:
    inner = DEQ.from_update(lambda z, x: 0.3 * z.sin() + x, tolerance=Tolerance(1e-12))

    class Outer(Update):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(inner)

        def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
            return 0.5 * self.inner(z) + x

    layer = DEQ(Outer(), **EXACT)
    wanted = results(layer, sample())
    layer.update.inner.compile(backend="eager")  # type: ignore[union-attr,operator]
    torch.testing.assert_close(results(layer, sample()), wanted)
