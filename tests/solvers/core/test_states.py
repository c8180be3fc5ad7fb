"""What a state may be: structures, dtypes, masks; what a solver keeps in memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import solvers
from cases.solves import FEW, PLAIN, SOLVERS, solve, true_residuals
from problems.zoo import make
from solvers import (
    LBFGS,
    Anderson,
    Broyden,
    Descent,
    Forward,
    GradientDescent,
    Implicit,
    Solver,
    Tolerance,
    Unrolled,
    fixed_point,
)

TIGHT = Tolerance(rtol=1e-10)


def coupled(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A map of two states (B, 3) and (B, 2, 2) that depend on each other."""
    mean = b.mean((1, 2))
    return torch.tanh(0.4 * a + x + 0.2 * mean[:, None]), 0.5 * b.sin() + 0.1 * a.sum(1)[
        :, None, None
    ]


def start(batch: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, generator=generator, dtype=torch.float64)
    return torch.zeros(batch, 3, dtype=torch.float64), torch.zeros(batch, 2, 2).double(), x


def joined(z: Tensor, x: Tensor) -> Tensor:
    """The same map on (B, 7)."""
    a, b = coupled(z[:, :3], z[:, 3:].reshape(-1, 2, 2), x)
    return torch.cat([a, b.flatten(1)], 1)


# The structure made of two states, and the two states of it.
STRUCTURES: dict[str, tuple[Any, Any]] = {
    "tuple": (lambda a, b: (a, b), lambda z: z),
    "list": (lambda a, b: [a, b], lambda z: z),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda z: (z["a"], z["b"])),
    "nest": (lambda a, b: {"inner": (a, {"b": b})},
             lambda z: (z["inner"][0], z["inner"][1]["b"])),
}  # fmt: skip


def structured(structure: str) -> tuple[Any, Any, Any]:
    """The map on a structure, and its entry in the table."""
    build, parts = STRUCTURES[structure]

    def f(z: Any, x: Tensor) -> Any:
        a, b = parts(z)
        return build(*coupled(a, b, x))

    return f, build, parts


@pytest.mark.parametrize("solver", FEW)
@pytest.mark.parametrize("structure", list(STRUCTURES))
def test_a_structure_is_solved_like_one_vector(structure: str, solver: str) -> None:
    f, build, parts = structured(structure)
    a, b, x = start()
    call: dict[str, Any] = {"solver": SOLVERS[solver], "tolerance": TIGHT, "max_steps": 150}
    solution = fixed_point(f, build(a, b), (x,), **call)
    vector = fixed_point(joined, torch.zeros(4, 7, dtype=torch.float64), (x,), **call)
    assert bool(solution.converged.all())
    assert solution.evaluations.tolist() == vector.evaluations.tolist()
    first, second = parts(solution.value)
    torch.testing.assert_close(torch.cat([first, second.flatten(1)], 1), vector.value)
    assert type(solution.value) is type(build(a, b))


@pytest.mark.parametrize("adjoint", [Implicit(tolerance=TIGHT), Unrolled()])
@pytest.mark.parametrize("structure", ["list", "nest"])
def test_gradients_flow_through_every_leaf(structure: str, adjoint: Any) -> None:
    f, build, parts = structured(structure)
    a, b, x = start()
    x.requires_grad_()
    call: dict[str, Any] = {"tolerance": TIGHT, "max_steps": 100, "adjoint": adjoint}
    first, second = parts(fixed_point(f, build(a, b), (x,), **call).value)
    mine = torch.autograd.grad(first.pow(3).sum() + second.cos().sum(), x)[0]
    value = fixed_point(joined, torch.zeros(4, 7, dtype=torch.float64), (x,), **call).value
    expected = torch.autograd.grad(value[:, :3].pow(3).sum() + value[:, 3:].cos().sum(), x)[0]
    torch.testing.assert_close(mine, expected, rtol=1e-7, atol=1e-9)


# dtype, tolerance that it can reach
DTYPES = [
    (torch.float64, 1e-9),
    (torch.float32, 1e-4),
    (torch.float16, 1e-2),
    (torch.bfloat16, 3e-2),
]


@pytest.mark.parametrize("solver", [*FEW, "lbfgs"])
@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
def test_every_floating_dtype(solver: str, dtype: torch.dtype, rtol: float) -> None:
    problem = make("linear_symmetric_0.5", dtype=dtype)
    solution = solve(problem, solver, rtol=rtol, max_steps=100)
    assert bool(solution.converged.all()), solution.summary()
    assert solution.value.dtype == dtype
    reference = make("linear_symmetric_0.5").solution
    assert reference is not None
    error = (solution.value.double() - reference).norm(dim=1) / reference.norm(dim=1)
    assert (error <= 5 * rtol).all()
    relative, _ = true_residuals(problem, solution.value)
    assert (relative <= 1.1 * rtol).all()


def test_a_mixed_state_keeps_the_dtype_of_each_leaf() -> None:
    def f(z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        a, b = z["a"], z["b"]
        return {
            "a": torch.tanh(0.3 * a + x + 0.1 * b.to(a.dtype)),
            "b": (0.5 * b.float().sin() + 0.1 * a.float()).to(b.dtype),
        }

    z0 = {"a": torch.zeros(3, 4), "b": torch.zeros(3, 4, dtype=torch.bfloat16)}
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    for solver in (Anderson(), Broyden(), Forward()):
        solution = fixed_point(f, z0, (x,), solver=solver, tolerance=2e-2)
        assert bool(solution.converged.all())
        assert solution.value["a"].dtype == torch.float32
        assert solution.value["b"].dtype == torch.bfloat16
        (gradient,) = torch.autograd.grad(solution.value["a"].sum(), x)
        assert gradient.isfinite().all()


def tokens(z: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """Tokens that pull each other through their masked mean: z, x (B, N, d), mask (B, N)."""
    weights = mask.to(z.dtype) / mask.sum(1, keepdim=True)
    mean = torch.einsum("bn,bnd->bd", weights, z)
    return torch.tanh(0.5 * z + 0.3 * mean[:, None] + x)


def masked() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 1, 0, 1]], dtype=torch.bool)
    return torch.randn(3, 5, 4, generator=generator, dtype=torch.float64), x, mask


@pytest.mark.parametrize("solver", PLAIN)
def test_masked_tokens_do_not_move_and_do_not_count(solver: str) -> None:
    z0, x, mask = masked()
    call: dict[str, Any] = {"solver": SOLVERS[solver], "tolerance": TIGHT, "max_steps": 200}
    solution = fixed_point(tokens, z0, (x, mask), mask=mask, **call)
    assert bool(solution.converged.all())
    assert torch.equal(solution.value[~mask], z0[~mask])
    # a sample without its padding, on its own
    alone = fixed_point(tokens, z0[:1, :3], (x[:1, :3], mask[:1, :3]), **call)
    assert int(alone.evaluations) == int(solution.evaluations[0])
    torch.testing.assert_close(solution.value[:1, :3], alone.value, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(solution.residual[:1], alone.residual, rtol=0.5, atol=1e-12)
    # other padding, the same answer
    other = torch.where(mask[..., None], z0, 100.0)
    moved = fixed_point(tokens, other, (x, mask), mask=mask, **call)
    assert moved.evaluations.tolist() == solution.evaluations.tolist()
    torch.testing.assert_close(moved.value[mask], solution.value[mask])


@pytest.mark.defect("A19")
def test_a_mask_spares_features_of_which_there_are_as_many_as_tokens() -> None:
    """A vector (B, N) beside tokens (B, N, d) counts whole, unless a mask of its own is given."""
    z0, x, mask = masked()

    def f(z: dict[str, Tensor], x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"tokens": tokens(z["tokens"], x, mask), "features": 0.5 * z["features"] + 1}

    features = torch.zeros(3, 5, dtype=torch.float64)
    start = {"features": features, "tokens": z0}

    def solve(mask_of: Any) -> Any:
        call: dict[str, Any] = {"tolerance": TIGHT, "max_steps": 99}
        return fixed_point(f, start, (x, mask), mask=mask_of, **call).value

    twos = torch.full_like(features, 2.0)
    for given in (mask, {"tokens": mask, "features": None}):
        value = solve(given)
        assert torch.equal(value["tokens"][~mask], z0[~mask])
        torch.testing.assert_close(value["features"], twos)
    value = solve({"tokens": None, "features": mask})
    assert not torch.equal(value["tokens"][~mask], z0[~mask])
    torch.testing.assert_close(value["features"], torch.where(mask, twos, 0.0))
    scalars = fixed_point(lambda z: 0.5 * z + 1, features, mask=mask, tolerance=TIGHT).value
    torch.testing.assert_close(scalars, torch.where(mask, twos, 0.0))


@pytest.mark.defect("A19")
@pytest.mark.parametrize(("change", "error", "words"), [
    (lambda mask: {"a": mask, "c": None}, TypeError, "pytree structured like z0"),
    (lambda mask: {"a": None, "b": None}, TypeError, "pytree structured like z0"),
    (lambda mask: {"a": mask.float(), "b": None}, TypeError, "bool tensor"),
    (lambda mask: {"a": mask[:2], "b": None}, ValueError, "batched"),
    (lambda mask: {"a": mask, "b": mask}, ValueError, r"5 tokens for a leaf .* \(3, 2\)"),
    (lambda mask: mask[:, :4], ValueError, "which no leaf of z0 has"),
])  # fmt: skip
def test_masks_that_do_not_fit(change: Any, error: type[Exception], words: str) -> None:
    z0, _, mask = masked()
    start = {"a": z0, "b": torch.zeros(3, 2, dtype=torch.float64)}
    with pytest.raises(error, match=words):
        fixed_point(lambda z: z, start, mask=change(mask))


BATCH, SIZE = 2, 4096
STATE = BATCH * SIZE * 8  # bytes


class Storages(TorchDispatchMode):
    """Bytes of live storages made since it was entered; ``highest`` is the largest sum seen."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.live or self.live[key][0]() is None:
                    self.live[key] = (weakref.ref(storage), storage.nbytes())
                    weakref.finalize(storage, self.live.pop, key, None)
        self.highest = max(self.highest, self.now())
        return result

    def now(self) -> int:
        return sum(size for _, size in self.live.values())


def rotation(z: Tensor) -> Tensor:
    """A slow map without any solution in reach of few steps: keeps every solver busy."""
    return torch.roll(z, 1, dims=1).mul_(0.999).add_(1)  # makes one state, its result


def held(solver: Solver, steps: int, energy: bool = False) -> tuple[int, list[int]]:
    """States alive at the peak, and at each call of f before it has made anything."""
    counts: list[int] = []
    storages = Storages()

    def f(z: Tensor) -> Tensor:
        counts.append(round(storages.now() / STATE))
        return rotation(z)

    def quartic(z: Tensor) -> Tensor:
        counts.append(round(storages.now() / STATE))
        weights = torch.linspace(1, 50, SIZE, dtype=z.dtype)
        return (weights * (z - 1).square()).sum(1) / 100

    generator = torch.Generator().manual_seed(0)
    z0 = torch.randn(BATCH, SIZE, generator=generator, dtype=torch.float64)
    gc.collect()
    with storages:
        fixed_point(
            Descent(quartic) if energy else f, z0, solver=solver, max_steps=steps,
            tolerance=0.0, adjoint=None, on_failure="ignore",
        )  # fmt: skip
    return round(storages.highest / STATE), counts


@pytest.mark.parametrize("memory", [1, 5])
@pytest.mark.parametrize("steps", [15, 40])
def test_anderson_keeps_two_states_per_difference(memory: int, steps: int) -> None:
    peak, at_calls = held(Anderson(memory), steps)
    assert max(at_calls) <= 2 * memory + 6
    assert peak <= 2 * memory + 7  # with the result of f
    assert len(at_calls) == steps


@pytest.mark.parametrize(
    "solver", [Forward(), GradientDescent(momentum=0.5), GradientDescent("auto")]
)
def test_first_order_methods_keep_a_handful_of_states(solver: Solver) -> None:
    peak, at_calls = held(solver, 30)
    assert max(at_calls) <= 6
    assert peak <= 9


def test_broyden_grows_with_the_steps() -> None:
    short, early = held(Broyden(memory=1000), 4)
    long, calls = held(Broyden(memory=1000), 60)
    assert short <= 20  # nothing like a thousand vectors
    assert max(calls[:4]) <= max(early) + 1
    assert 60 <= max(calls) <= 80  # a vector per step, room for twice as many at most
    assert long <= 64 + 32 + 10  # while it grows, the old storage and the new one


def test_lbfgs_keeps_two_states_per_pair() -> None:
    _, calls = held(LBFGS(memory=5), 30, energy=True)
    assert max(calls) <= 2 * 5 + 10
    assert max(calls[15:]) <= max(calls[:15]) + 1


def test_nothing_stays_behind() -> None:
    """No cycle keeps a solve alive: its tensors go with the solution."""
    before = weakref.WeakSet[Tensor]()
    gc.collect()
    gc.disable()
    try:
        z0 = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
        solution = fixed_point(lambda z: 0.5 * z + 1, z0, tolerance=1e-4)
        before.add(solution.value)
        del solution
        assert len(before) == 0
    finally:
        gc.enable()


def test_unrolled_memory_is_cut_by_checkpoints() -> None:
    """The graph of f, wide inside, is not kept under checkpointing."""
    assert unrolled_elements(True) < unrolled_elements(False) / 3


def unrolled_elements(checkpoint: bool) -> int:
    """Numbers saved for the backward pass of ten unrolled steps of a wide map."""
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel()
        return tensor

    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)) / 512
    weight.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fixed_point(
            lambda z: torch.tanh(torch.tanh(z @ weight).sin() @ weight.mT) + 1, torch.zeros(4, 8),
            solver=Forward(), tolerance=0.0, max_steps=10, on_failure="ignore",
            adjoint=solvers.Unrolled(checkpoint),
        )  # fmt: skip
    return total
