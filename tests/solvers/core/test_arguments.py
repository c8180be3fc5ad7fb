"""What a call may be given and what is refused: states, dtypes, masks, options; what a solve keeps."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import solvers
from cases.solves import FEW, PLAIN, SOLVERS, plain_batch, solve, true_residuals
from implicit_attn import DEQ
from implicit_attn.energies import Quadratic, ReLUFeedForward
from problems.zoo import make
from solvers import (
    LBFGS,
    Anderson,
    Broyden,
    Descent,
    Forward,
    GradientDescent,
    Implicit,
    Newton,
    Phantom,
    SolveError,
    Solver,
    Tolerance,
    Unrolled,
    adaptive_tap,
    fixed_point,
    solve_linear,
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


def solve_cosine(**options: Any) -> solvers.Solution:
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    return fixed_point(lambda z, x: 0.9 * z.cos() + x, torch.zeros_like(x), (x,), **options)


def assert_same(first: solvers.Solution, second: solvers.Solution) -> None:
    assert torch.equal(first.value, second.value)
    assert first.evaluations.tolist() == second.evaluations.tolist()


def test_a_number_is_a_relative_tolerance() -> None:
    assert_same(solve_cosine(tolerance=1e-9), solve_cosine(tolerance=Tolerance(rtol=1e-9)))
    assert solvers.Implicit(tolerance=1e-3) == solvers.Implicit(tolerance=Tolerance(1e-3))
    b = torch.ones(2, 3)
    found = [
        solve_linear(lambda v: v * b.cumsum(1)[0], b, tolerance=t) for t in (1e-2, Tolerance(1e-2))
    ]
    assert_same(*found)


KINDS = [
    Anderson, Broyden, Forward, GradientDescent, Newton, Implicit, solvers.Unrolled, Phantom, solvers.OneStep,
    solvers.CG, solvers.MINRES, solvers.GMRES,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_or_its_name_stands_for_its_defaults(kind: Any) -> None:
    """Of solvers, of adjoints, in a layer too, and of linear solvers wherever they are taken."""
    right = torch.ones(2, 3)

    def solution(given: Any) -> solvers.Solution:
        if issubclass(kind, solvers.Solver):
            return solve_cosine(solver=given, tolerance=0.1)
        if issubclass(kind, solvers.Adjoint):
            return solve_cosine(adjoint=given)
        return solve_linear(lambda v: v * torch.tensor([1.0, 2.0, 4.0]), right, solver=given)

    for given in (kind, kind.__name__, kind.__name__.lower()):
        assert_same(solution(given), solution(kind()))
        if issubclass(kind, solvers.Adjoint):
            assert DEQ.from_update(lambda z, x: 0.5 * z + x, adjoint=given).adjoint == kind()
        elif issubclass(kind, solvers.LinearSolver):
            assert Implicit(solver=given) == Implicit(solver=kind())
            assert Newton(linear=given) == Newton(linear=kind())


def test_a_linear_solver_that_there_is_not() -> None:
    wrong = r"solver must be one of cg, gmres, minres .* got 'gmress'"
    with pytest.raises(ValueError, match=wrong):
        solve_linear(lambda v: v, torch.ones(2, 3), solver="gmress")
    with pytest.raises(ValueError, match=wrong):
        Implicit(solver="gmress")


def test_one_tensor_is_all_that_f_takes() -> None:
    x = torch.ones(2, 3)
    found = [fixed_point(lambda z, x: 0.5 * z + x, x, args) for args in (x, (x,))]
    assert_same(*found)


@pytest.mark.parametrize("site", ["ising", "Ising", solvers.IsingSite])
@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 4, 1)])
def test_scalar_spins(site: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    couplings = 0.2 * torch.randn(4, 4, dtype=torch.float64).triu(1)
    couplings, field = couplings + couplings.mT, torch.randn(4, dtype=torch.float64)
    wanted = adaptive_tap(
        couplings[:, :, None, None], field.view(1, 4, 1), site=solvers.IsingSite(), tolerance=1e-9
    ).value.mean
    found = adaptive_tap(couplings, field.view(shape), site=site, tolerance=Tolerance(1e-9))
    assert torch.equal(found.value.mean, wanted)


def test_a_site_that_is_none_is_refused() -> None:
    couplings, field = torch.zeros(4, 4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"site must be one of ising, potts.* got 'icing'"):
        adaptive_tap(couplings, field, site="icing")
    for wrong in (solvers.GaussianSite, 3):
        with pytest.raises(TypeError, match=r"site must be a solvers.Site such as"):
            adaptive_tap(couplings, field, site=wrong)  # type: ignore[arg-type]


def couples(z: Tensor) -> Tensor:
    return torch.tensor([[0.1, 0.2, 0.0], [0.0, 0.9, 0.1], [0.5, 0.0, 0.3]]) @ z + 1


def test_a_vector_is_told_to_be_several_problems_of_one_unknown() -> None:
    with pytest.raises(
        (RuntimeError, solvers.SolveError), match=r"3 problems of one unknown.*z0\[None\]"
    ):
        fixed_point(couples, torch.zeros(3), max_steps=8, tolerance=1e-9, on_failure="raise")
    one = fixed_point(lambda z: couples(z[0])[None], torch.zeros(3)[None], tolerance=1e-6)
    torch.testing.assert_close(couples(one.value[0]), one.value[0], rtol=1e-4, atol=1e-4)


F, Z0, ARGS = plain_batch(3, 4)
META = torch.device("meta")


def refused(kind: type[Exception], pattern: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=pattern) as caught:
        call()
    assert type(caught.value) is kind


def solve_refused(**changes: Any) -> object:
    options: dict[str, Any] = {"f": F, "z0": Z0, "args": ARGS, **changes}
    return fixed_point(options.pop("f"), options.pop("z0"), options.pop("args"), **options)


def with_value(tensor: Tensor, value: float, row: int = 1) -> Tensor:
    changed = tensor.clone()
    changed[row] = value
    return changed


WEIGHT, X = ARGS
CALLS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "f not callable": (TypeError, r"f must be callable, got <class 'int'>", {"f": 3}),
    "z0 no tensor": (TypeError, r"z0 must be a tensor or a pytree .* got <class 'float'>", {"z0": 1.0}),
    "z0 integers": (TypeError, r"z0 must be of a floating dtype, got torch.int64", {"z0": Z0.long()}),
    "z0 scalar": (ValueError, r"z0 must have a batch dimension .* 0-d", {"z0": torch.tensor(1.0)}),
    "z0 batch sizes": (ValueError, r"leaves of z0 must share the batch size, got \[3, 2\]",
                       {"z0": (Z0, Z0[:2])}),
    "z0 NaN": (ValueError, r"z0 must be finite, got NaN or infinity in samples \[1\]",
               {"z0": with_value(Z0, torch.nan)}),
    "args list": (TypeError, r"args must be a tuple of inputs, got <class 'list'>",
                  {"args": [WEIGHT, X]}),
    "args not batched": (ValueError, r"args\[0\] must be batched along dim 0 like z0 \(3 samples\), "
                         r"got shape \(4, 4\)", {"args": (WEIGHT[0], X)}),
    "args device": (ValueError, r"args\[1\] must be on cpu like z0, got meta",
                    {"args": (WEIGHT, X.to(META))}),
    "args NaN": (ValueError, r"args\[1\] must be finite, got NaN or infinity in samples \[0\]",
                 {"args": (WEIGHT, with_value(X, torch.nan, 0))}),
    "solver class": (TypeError, r"solver must be a solvers.Solver such as Anderson\(\), .* got <class",
                     {"solver": Implicit}),
    "solver name": (ValueError, r"solver must be one of anderson, .* got 'andersen'",
                    {"solver": "andersen"}),
    "tolerance text": (TypeError, r"tolerance must be a number \(rtol\), a solvers.Tolerance or None, "
                       "got 'tight'", {"tolerance": "tight"}),
    "tolerance negative": (ValueError, r"tolerance must be finite and >= 0, got -0.1",
                           {"tolerance": -0.1}),
    "max_steps zero": (ValueError, r"max_steps must be >= 1, got 0", {"max_steps": 0}),
    "max_steps float": (TypeError, r"max_steps must be an integer, got 10.0", {"max_steps": 10.0}),
    "adjoint name": (ValueError, r"adjoint must be one of implicit, .* got 'implicitly'",
                     {"adjoint": "implicitly"}),
    "adjoint class": (TypeError, r"adjoint must be a solvers.Adjoint such as Implicit\(\), .* got <class",
                      {"adjoint": Anderson}),
    "energy not callable": (TypeError, r"energy must be callable or None, got <class 'int'>",
                            {"energy": 1}),
    "energy scalar": (ValueError, r"energy must return one number per sample, shape \(3,\), got "
                      r"shape \(\)", {"energy": lambda z, *args: z.sum()}),
    "energy number": (TypeError, r"energy must return a tensor of shape \(3,\), got <class 'float'>",
                      {"energy": lambda z, *args: 1.0}),
    "mask float": (TypeError, r"mask must be a bool tensor \(B, N\)", {"mask": torch.ones(3, 4)}),
    "mask batch": (ValueError, r"mask must be batched .* \(3 samples\), got shape \(2, 4\)",
                   {"mask": torch.ones(2, 4, dtype=torch.bool)}),
    "mask tokens": (ValueError, r"mask has 5 tokens, which no leaf of z0 has: \[\(3, 4\)\]",
                    {"mask": torch.ones(3, 5, dtype=torch.bool)}),
    "on_failure": (ValueError, r"on_failure must be one of .*, got 'raises'",
                   {"on_failure": "raises"}),
    "f shape": (ValueError, r"f must return shape \(3, 4\) like z0, got \(3, 5\)",
                {"f": lambda z, *args: torch.cat([z, z[:, :1]], 1)}),
    "f dtype": (TypeError, r"f must return dtype torch.float64 like z0, got torch.float32",
                {"f": lambda z, *args: z.float()}),
    "f structure": (TypeError, r"f must return a state structured like z0",
                    {"f": lambda z, *args: (z, z)}),
    "f keys": (TypeError, r"f must return a state structured like z0",
               {"z0": {"a": Z0}, "f": lambda z, *args: {"b": z["a"]}}),
    "minimiser without energy": (ValueError, r"LBFGS minimises an energy .* pass f as an EnergyUpdate",
                                 {"solver": LBFGS()}),
    "minimiser with values only": (ValueError, r"LBFGS minimises an energy and needs its gradient",
                                   {"solver": LBFGS(), "energy": lambda z, *args: z.sum(1)}),
    "callback": (TypeError, r"callback must be callable", {"callback": 3}),
    "states at 0": (ValueError, r"states_at\[0\] must be >= 1", {"states_at": [0]}),
    "states twice": (ValueError, r"states_at must increase, got \[2, 2\]", {"states_at": [2, 2]}),
    "states beyond": (ValueError, "states_at must be at most max_steps=30",
                      {"states_at": [2, 31], "max_steps": 30}),
    "states float": (TypeError, r"states_at\[0\] must be an integer", {"states_at": [2.0]}),
    "states number": (TypeError, "states_at must be a sequence of integers, got 5", {"states_at": 5}),
    "states text": (TypeError, "states_at must be a sequence", {"states_at": "5"}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CALLS))
def test_a_call_is_refused(name: str) -> None:
    kind, pattern, changes = CALLS[name]
    refused(kind, pattern, lambda: solve_refused(**changes))


OPTIONS: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (ValueError, r"rtol must be finite and >= 0, got -1e-06", lambda: Tolerance(rtol=-1e-6)),
    (ValueError, r"atol must be finite and >= 0, got inf", lambda: Tolerance(atol=float("inf"))),
    (TypeError, r"rtol must be a number, got '1e-3'", lambda: Tolerance(rtol="1e-3")),  # type: ignore[arg-type]
    (ValueError, r"memory must be >= 1, got 0", lambda: Anderson(memory=0)),
    (TypeError, r"memory must be an integer, got 2.5", lambda: Anderson(memory=2.5)),  # type: ignore[arg-type]
    (ValueError, r"damping must be in \(0.0, 2.0\], got 0.0", lambda: Anderson(damping=0.0)),
    (ValueError, r"regularization must be in \[0.0, 1.0\], got -1", lambda: Anderson(regularization=-1)),
    (ValueError, r"memory must be >= 2, got 1", lambda: Broyden(memory=1)),
    (ValueError, r"step_size must be in \(0.0, 1e\+30\], got -1.0", lambda: GradientDescent(-1.0)),
    (TypeError, r"step_size must be a number, got 'fast'", lambda: GradientDescent("fast")),  # type: ignore[arg-type]
    (ValueError, r"momentum must be < 1, got 1.0", lambda: GradientDescent(momentum=1.0)),
    (ValueError, r"nesterov=True needs momentum > 0", lambda: GradientDescent(nesterov=True)),
    (ValueError, r'step_size="auto" needs momentum=0', lambda: GradientDescent("auto", 0.5)),
    (ValueError, r"linear must be one of cg, .* got 'cgs'", lambda: Newton(linear="cgs")),
    (ValueError, r"forcing must be in \(0.0, 0.99\], got 0.0", lambda: Newton(forcing=0.0)),
    (TypeError, r"solver must be .* CG\(\), .* got Anderson", lambda: Implicit(Anderson())),  # type: ignore[arg-type]
    (TypeError, r"tolerance must be a number .* or None, got \[0.1\]", lambda: Implicit(tolerance=[0.1])),  # type: ignore[arg-type]
    (ValueError, r"max_steps must be >= 1, got 0", lambda: Implicit(max_steps=0)),
    (ValueError, r"on_failure must be one of .*'loud'", lambda: Implicit(on_failure="loud")),
    (TypeError, "states must be solvers.Phantom.* got Unr", lambda: Implicit(states=solvers.Unrolled())),  # type: ignore[arg-type]
    (ValueError, r"steps must be >= 1, got 0", lambda: Phantom(steps=0)),
    (ValueError, r"step_size must be finite and > 0, got 0.0", lambda: Descent(lambda z: z.sum(1), 0.0)),
    (TypeError, r"energy must be callable, got 3", lambda: Descent(3)),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: re.sub(r"\W+", "_", row[1])[:60])
def test_an_option_is_refused(row: tuple[type[Exception], str, Callable[[], object]]) -> None:
    refused(*row)


def test_options_cannot_be_changed_behind_the_back() -> None:
    with pytest.raises(AttributeError):
        Anderson().memory = 3  # type: ignore[misc]


def closing_over(x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, scale: scale[:, None] * torch.tanh(z) + x


def test_a_closure_over_the_batch_is_explained() -> None:
    x = torch.ones(4, 3, dtype=torch.float64)
    scale = torch.tensor([0.01, 0.01, 0.9, 0.9], dtype=torch.float64)
    call: dict[str, Any] = {"tolerance": Tolerance(1e-8), "max_steps": 200}
    with pytest.raises(
        (RuntimeError, ValueError), match=r"pass that tensor in args=.*compact=False"
    ):
        fixed_point(closing_over(x), torch.zeros_like(x), (scale,), **call)
    whole = fixed_point(closing_over(x), torch.zeros_like(x), (scale,), compact=False, **call)
    assert bool(whole.converged.all())


def test_a_closure_that_would_broadcast_is_explained() -> None:
    """One sample is left: adding the whole batch to it has a shape, but not the right one."""
    x = torch.ones(4, 3, dtype=torch.float64)
    scale = torch.tensor([0.01, 0.01, 0.01, 0.9], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"f must return shape \(1, 3\) .*\n.*compact=False"):
        fixed_point(closing_over(x), torch.zeros_like(x), (scale,), tolerance=Tolerance(1e-8))


def test_a_shape_that_changes_during_the_solve() -> None:
    evaluations = 0

    def f(z: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        image = 0.5 * z + 1
        return image if evaluations < 4 else image.mT

    pattern = r"f must return shape \(3, 4\) like z0, got \(4, 3\)"
    refused(ValueError, pattern, lambda: fixed_point(f, Z0, solver=Forward(), compact=False))


def test_newton_keeps_a_batch_whole_that_f_closes_over() -> None:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    seen: set[int] = set()

    def f(z: Tensor) -> Tensor:
        seen.add(z.shape[0])
        return 0.5 * torch.sin(z) + x

    options: dict[str, Any] = {"tolerance": 1e-10, "max_steps": 60, "adjoint": None}
    whole = fixed_point(f, torch.zeros(6, 4).double(), solver=Newton(), compact=False, **options)
    assert whole.converged.all()
    assert seen == {6}
    assert (whole.evaluations <= 60).all()
    alone = fixed_point(
        lambda z, x: 0.5 * torch.sin(z) + x, torch.zeros_like(x), (x,), solver=Newton(), **options
    )
    torch.testing.assert_close(whole.value, alone.value, rtol=1e-9, atol=0)


def test_an_error_of_f_after_shrinking_keeps_its_type() -> None:
    rate = torch.tensor([0.01, 0.01, 0.9, 0.9], dtype=torch.float64)

    def f(z: Tensor, rate: Tensor) -> Tensor:
        if z.shape[0] < 4:
            solution = fixed_point(
                lambda y: 2 * y + 1, z, solver=solvers.Forward(), max_steps=2, on_failure="raise"
            )
            return solution.value
        return rate[:, None] * z + 1

    with pytest.raises(SolveError, match=r"2 samples that are still being solved"):
        fixed_point(f, torch.zeros(4, 3).double(), (rate,), solver=solvers.Forward(), max_steps=80)


@pytest.mark.parametrize("solver", [None, Newton(), solvers.Anderson()])
def test_inference_mode(solver: solvers.Solver | None) -> None:
    torch.manual_seed(0)
    layer = DEQ(0.3 * ReLUFeedForward(6, 8) + Quadratic(), solver=solver)
    x = torch.randn(3, 4, 6)
    with torch.inference_mode():
        inside = layer(x)
        plain = fixed_point(
            solvers.Descent(lambda z, x: 0.5 * (z - x).square().flatten(1).sum(1)),
            torch.zeros(2, 3), (torch.ones(2, 3),), solver=solver,
        )  # fmt: skip
    torch.testing.assert_close(inside, layer(x).detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(plain.value, torch.ones(2, 3), rtol=1e-3, atol=1e-4)
