"""Compiled solves: values, statuses, counts and gradients of the ordinary loop."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cases.turns import Cell, assert_same, assert_same_solution, pair, results, sample
from implicit_attn import DEQ
from implicit_attn.updates import Update
from solvers import CG, GMRES, Anderson, Broyden, Forward, Implicit, Newton, Tolerance, fixed_point
from solvers.compiled import graphs

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
EXACT: Any = {"tolerance": Tolerance(1e-11), "adjoint": Implicit(tolerance=Tolerance(1e-11))}


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
    layer = DEQ(Cell(symmetric), tolerance=Tolerance(1e-11), adjoint=adjoint)
    first, second = pair(layer)
    for batch in (6, 4):  # the second is padded
        assert_same(first, second, sample(batch), twice=True)


def test_second_derivatives() -> None:
    first, second = pair(DEQ(Cell(), **EXACT))
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
        layers = pair(DEQ(Cell().float(), adjoint=adjoint))
        for layer in layers:
            x = sample().float().requires_grad_()
            layer(x).sin().sum().backward()
        wanted, found = (layer.last.adjoint.solution for layer in layers)
        assert (found.evaluations <= most).all() and torch.equal(found.status, wanted.status)


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
    for layer in pair(DEQ(Cell(), **EXACT)):
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
    first, second = pair(DEQ(Cell(), **EXACT))
    wanted = results(first, sample())
    results(second, sample())  # its programs are made
    value = second(sample())
    second.update.scale = 0.1
    gradient = torch.autograd.grad(value.sin().square().sum(), second.update.v)[0]
    torch.testing.assert_close(gradient, wanted[3])
    second.update.scale = 1.0
    for weight in (second.update.w, second.update.v):
        value = second(sample())
        with torch.no_grad():
            weight.mul_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.sum().backward()


def test_what_is_linearised_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the backward pass, while the loss lives; and without a collection of garbage."""
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

    layer = pair(DEQ(Cell(), **EXACT))[1]
    results(layer, sample())
    monkeypatch.setattr(graphs.Stages, "at", noting)
    gc.collect()
    gc.disable()
    try:
        loss = layer(sample().requires_grad_()).sum()
        assert alive() == 2  # what was prepared, and the cosine in its derivative
        loss.backward()
        assert len(saved) > 2 and alive() <= 1
        assert loss.grad_fn is not None
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
    finally:
        gc.enable()


def test_copies_modes_and_other_defaults() -> None:
    first, second = pair(DEQ(Cell(), **EXACT))
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
