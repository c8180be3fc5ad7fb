"""Compiled solves by single evaluations: statuses, counts, values and gradients of the ordinary loop."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from cases.turns import take_turns
from implicit_attn import DEQ
from implicit_attn.deq import preparing
from implicit_attn.energies import BiSoftmaxAttention, Quadratic
from implicit_attn.updates import Update
from solvers import CG, GMRES, Anderson, Forward, Implicit, SolveWarning, Status, Tolerance
from solvers.compiled import forward, stages, turns
from solvers.native import library

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
EXACT: Any = {"tolerance": Tolerance(1e-11), "adjoint": Implicit(tolerance=Tolerance(1e-11))}


@pytest.fixture(autouse=True)
def in_turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of samples of the solves that were made in turns."""
    take_turns(monkeypatch)
    solves: list[int] = []
    init = turns.Turns.__init__

    def noting(self: Any, start: Tensor, *rest: Any) -> None:
        solves.append(len(start))
        init(self, start, *rest)

    monkeypatch.setattr(turns.Turns, "__init__", noting)
    return solves


def pair(f: Any, **options: Any) -> tuple[Any, Any]:
    layer = f if isinstance(f, nn.Module) else DEQ.from_update(f, **options)
    return layer, compiled(layer)


def compiled(layer: Any) -> Any:
    other = copy.deepcopy(layer)
    other.compile(backend="eager", block=3)
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


def results(layer: Any, *inputs: Tensor, twice: bool = False) -> list[Any]:
    """The value and the gradients by inputs and weights, of one backward pass or two."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    value = layer(leaves[0] if len(leaves) == 1 else tuple(leaves))
    variables = [*leaves, *(p for p in layer.parameters() if p.requires_grad)]
    loss = value.sin().square().sum()
    options: Any = {"allow_unused": True, "retain_graph": twice}
    found = [value, *torch.autograd.grad(loss, variables, **options)]
    if twice:
        again = torch.autograd.grad(loss, variables, allow_unused=True)
        for one, other in zip(found[1:], again, strict=True):
            assert one is None or torch.equal(one, other)
    return found


def assert_same(first: Any, second: Any, *inputs: Tensor, twice: bool = False) -> None:
    wanted, got = results(first, *inputs, twice=twice), results(second, *inputs, twice=twice)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    reports = [layer.last.adjoint.solution for layer in (first, second)]
    assert (reports[0] is None) == (reports[1] is None)
    if reports[0] is not None:
        assert torch.equal(reports[1].status, reports[0].status)
        assert torch.equal(reports[1].evaluations, reports[0].evaluations)


def uneven(z: Tensor, x: Tensor) -> Tensor:
    """Samples of large x contract slowly."""
    return torch.sigmoid(x[:, :1]) * 0.97 * torch.tanh(z.roll(1, 1)) + 0.5 * x


SOLVERS = [Anderson(), Anderson(memory=1, damping=0.7), Anderson(memory=20), Forward(0.6)]


@pytest.mark.parametrize("solver", SOLVERS, ids=["plain", "short", "long", "forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_that_converge_at_different_times(
    solver: Any, dtype: torch.dtype, in_turns: list[int]
) -> None:
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
    assert in_turns == [7]


@pytest.mark.parametrize("shape", [(1, 6), (5, 1), (1, 1), (2, 3, 2)])
@pytest.mark.parametrize("most", [1, 2, 40])
def test_shapes_and_budgets(shape: tuple[int, ...], most: int) -> None:
    x = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    options: Any = {"max_steps": most, "on_failure": "ignore", "tolerance": Tolerance(1e-9)}
    assert_same_solution(*pair(lambda z, x: 0.9 * z.cos() + x, **options), x)


def test_tolerances_of_each_sample() -> None:
    layers = pair(uneven, max_steps=60)
    for tolerance in (
        Tolerance(torch.tensor([1e-2, 1e-4, 1e-6, 1e-8])),
        Tolerance(1e-3, torch.tensor([1e-1, 1e-3, 1e-6, 0.0], dtype=torch.float64)),
        Tolerance(0.0, 1e-5),
    ):
        assert_same_solution(*layers, sample(), tolerance=tolerance)
    padded = Tolerance(torch.tensor([1e-2, 1e-4, 1e-7]))
    assert_same_solution(*layers, sample(3), tolerance=padded)


def test_what_is_out_of_the_ordinary() -> None:
    """Samples that diverge, are not finite, or end at zero, beside others."""

    def f(z: Tensor, x: Tensor) -> Tensor:
        slope = torch.where(x[:, :1] > 0, 0.5, 3.0)
        return (slope * z + slope.gt(1) * z**3) / x[:, 1:2] + x[:, 2:3]

    x = sample(5)
    x[:, :3] = torch.tensor(
        [[1.0, 1, 1], [-1, 1, 1], [1, 0, 1], [1, 1, 0], [1, torch.inf, 1]], dtype=torch.float64
    )
    x[2, 1] = 0.0
    x[4, 1] = 1e-300
    options: Any = {"solver": Forward(), "max_steps": 40, "on_failure": "ignore"}
    solution = assert_same_solution(*pair(f, **options), x)
    assert len(solution.status.unique()) > 2 and solution.status[0] == Status.CONVERGED
    zero = assert_same_solution(
        *pair(lambda z, x: 0 * z, **options), sample(), tolerance=Tolerance(1e-6, 1e-9)
    )
    assert zero.converged.all()


def test_samples_that_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("solvers.core.loop", "solvers.compiled.turns"):
        monkeypatch.setattr(f"{module}.PATIENCE", 10)
    options: Any = {"solver": Forward(), "max_steps": 60, "on_failure": "ignore"}

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 0, 2 * x - z, 0.5 * z + x)

    solution = assert_same_solution(*pair(f, init=torch.zeros_like, **options), sample())
    assert set(solution.status.tolist()) == {int(Status.STALLED), int(Status.CONVERGED)}


def test_masks_trees_and_padding(in_turns: list[int]) -> None:
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
    assert in_turns == [8] * 6  # the batch of five is padded


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


class Cell(Update):
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


def test_half_precision_is_solved_in_blocks(in_turns: list[int]) -> None:
    first, second = pair(uneven)
    x = sample().bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(second(x), first(x), rtol=5e-2, atol=5e-2)
        assert not in_turns
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(second(x.float()), first(x.float()), rtol=5e-2, atol=5e-2)
    assert in_turns == [4]
