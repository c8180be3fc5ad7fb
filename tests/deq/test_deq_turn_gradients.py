"""Compiled solves by single evaluations: gradients, and what may change or last between the passes."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cases.turns import (
    Cell,
    assert_same,
    compiled,
    pair,
    results,
    sample,
    take_turns,
)
from implicit_attn import DEQ
from implicit_attn.deq import preparing
from implicit_attn.energies import BiSoftmaxAttention, Quadratic
from implicit_attn.updates import Update
from solvers import CG, GMRES, Implicit, SolveWarning, Tolerance
from solvers.compiled import forward
from solvers.compiled.graphs import stages
from solvers.native import library

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
EXACT: Any = {"tolerance": Tolerance(1e-11), "adjoint": Implicit(tolerance=Tolerance(1e-11))}


@pytest.fixture(autouse=True)
def in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    take_turns(monkeypatch)


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


def test_an_adjoint_that_is_not_solved_is_told() -> None:
    short = Implicit(solver=GMRES(2), tolerance=Tolerance(1e-12), max_steps=3)
    gradients = []
    for layer in pair(DEQ(Cell(), adjoint=short, tolerance=Tolerance(1e-9))):
        with pytest.warns(SolveWarning, match="adjoint"):
            layer(sample()).sum().backward()
        gradients.append(layer.update.w.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("turns", [True, False], ids=["turns", "blocks"])
def test_no_sample_is_told_more_products_than_it_may_have(
    turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 near its rounding the last of them verifies; blocks make several at once."""
    if not turns:
        monkeypatch.undo()
    for most in (1, 2, 3, 6) if turns else (2,):
        adjoint = Implicit(GMRES(), Tolerance(3e-7), max_steps=most, on_failure="ignore")
        layers = pair(DEQ(Cell().float(), adjoint=adjoint))
        for layer in layers:
            x = sample().float().requires_grad_()
            layer(x).sin().sum().backward()
        wanted, found = (layer.last.adjoint.solution for layer in layers)
        assert (found.evaluations <= most).all() and torch.equal(found.status, wanted.status)


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


def test_second_derivatives() -> None:
    layer = pair(DEQ(Cell(), **EXACT))[1]
    x = sample(1).requires_grad_()
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)


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
    at = stages.Stages.at

    def noting(self: stages.Stages, inputs: Any) -> Any:
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
    monkeypatch.setattr(stages.Stages, "at", noting)
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


def test_threads() -> None:
    layer = pair(DEQ(Cell(), **EXACT))[1]
    plain = pair(DEQ(Cell(), **EXACT))[0]
    wanted = [results(plain, sample(batch)) for batch in (3, 9)]
    got: list[Any] = [None, None]

    def work(place: int, batch: int) -> None:
        for _ in range(3):
            got[place] = results(layer, sample(batch))

    workers = [threading.Thread(target=work, args=each) for each in ((0, 3), (1, 9))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for found, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(found, expected)


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


class Restless(Cell):
    """Changes in what runs once a solve."""

    place = "prepare"

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        if self.place == "prepare" and not torch.compiler.is_compiling():
            self.scale = 0.5 * self.scale
            float(self.w.sum())  # no program can have that
        return super().prepare(x)

    def initial(self, x: Any) -> Any:
        if self.place == "initial":
            self.scale = 0.5 * self.scale
        return x

    def start(self, x: Any, prepared: Any) -> Any:
        return self.initial(x)


@pytest.mark.parametrize("place", ["prepare", "initial"])
def test_a_module_that_changes_before_a_solve(place: str) -> None:
    layer = DEQ(Restless(), **EXACT)
    layer.update.place = place  # type: ignore[union-attr]
    first, second = pair(layer)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(second(sample()), first(sample()))
    assert first.update.scale == second.update.scale == 0.125


def test_energies_that_prepare_nothing_have_no_program_for_it() -> None:
    energy = 0.2 * BiSoftmaxAttention(6, 2) + Quadratic()
    layer = DEQ(energy.double(), tolerance=Tolerance(1e-3))
    layer.compile(backend="eager", block=1)
    x = sample(8).reshape(2, 4, 6).requires_grad_()
    assert preparing.prepare(layer.update, x, None, None, layer.programs(), None, compact=True) is x
    assert layer._programs is not None and not layer._programs.made
    staged: list[Any] = list(layer._programs.staged)
    assert [key[0] for key in staged] == ["example"]


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


def test_without_a_compiler_there_are_blocks(
    monkeypatch: pytest.MonkeyPatch, in_turns: list[int]
) -> None:
    first, second = pair(DEQ(Cell(), **EXACT))
    monkeypatch.setattr("solvers.native.steps.library", lambda source: "no C++ compiler")
    blocks: list[int] = []
    run = forward._run
    monkeypatch.setattr(forward, "_run", lambda *given: blocks.append(1) or run(*given))
    assert_same(first, second, sample())
    assert blocks and not in_turns
    assert library.library is not None


def test_a_number_from_outside_that_learns_is_refused() -> None:
    scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    layer = compiled(DEQ.from_update(lambda z, x: scale * z.tanh() + x))
    with pytest.raises(RuntimeError, match="no parameter or buffer"):
        layer(sample())
