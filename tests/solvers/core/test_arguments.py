"""What a call may be given and what is refused: states, dtypes, masks, options; what a solve keeps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import solvers
from cases.solves import FEW, SOLVERS, plain_batch
from implicit_attn import DEQ
from implicit_attn.energies import Quadratic, ReLUFeedForward
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


def joined(z: Tensor, x: Tensor) -> Tensor:
    """The same map on (B, 7)."""
    a, b = coupled(z[:, :3], z[:, 3:].reshape(-1, 2, 2), x)
    return torch.cat([a, b.flatten(1)], 1)


# The structure made of two states, and the two states of it.
STRUCTURES: dict[str, tuple[Any, Any]] = {
    "list": (lambda a, b: [a, b], lambda z: z),
    "nest": (lambda a, b: {"inner": (a, {"b": b})}, lambda z: (z["inner"][0], z["inner"][1]["b"])),
}  # fmt: skip


@pytest.mark.parametrize(
    ("structure", "solver"),
    [("list", "forward"), ("list", "gradient_auto"), ("nest", "anderson"), ("nest", "newton")],
)
def test_a_structure_is_solved_like_one_vector(structure: str, solver: str) -> None:
    build, parts = STRUCTURES[structure]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    start = torch.zeros(4, 7, dtype=torch.float64)
    call: dict[str, Any] = {"solver": SOLVERS[solver], "tolerance": TIGHT, "max_steps": 150}

    def f(z: Any, x: Tensor) -> Any:
        first, second = parts(z)
        return build(*coupled(first, second, x))

    z0 = build(start[:, :3], start[:, 3:].view(4, 2, 2))
    solution = fixed_point(f, z0, (x,), **call)
    vector = fixed_point(joined, start, (x,), **call)
    assert bool(solution.converged.all())
    # Each leaf must meet the tolerance, which asks for more than their common norm.
    assert (solution.evaluations >= vector.evaluations).all()
    first, second = parts(solution.value)
    torch.testing.assert_close(torch.cat([first, second.flatten(1)], 1), vector.value)
    assert type(solution.value) is type(z0)


def test_leaves_keep_their_dtypes() -> None:
    def f(z: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": 0.5 * z["a"] + z["b"].mean((1, 2))[:, None].double(), "b": 0.5 * z["b"] + 1}

    start = {"a": torch.zeros(4, 3, dtype=torch.float64), "b": torch.zeros(4, 2, 2)}
    value = fixed_point(f, start, tolerance=1e-6).value
    torch.testing.assert_close(value["a"], torch.full_like(start["a"], 4.0), rtol=1e-4, atol=0)
    torch.testing.assert_close(value["b"], torch.full_like(start["b"], 2.0), rtol=1e-4, atol=0)


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


@pytest.mark.parametrize("solver", FEW)
def test_masked_tokens_do_not_move_and_do_not_count(solver: str) -> None:
    z0, x, mask = masked()
    call: dict[str, Any] = {"solver": SOLVERS[solver], "tolerance": TIGHT, "max_steps": 200}
    solution = fixed_point(tokens, z0, (x, mask), mask=mask, **call)
    assert bool(solution.converged.all())
    assert torch.equal(solution.value[~mask], z0[~mask])
    # a sample without its padding, on its own
    alone = fixed_point(tokens, z0[:1, :3], (x[:1, :3], mask[:1, :3]), **call)
    if solver != "newton":  # whose products are as many as there are numbers
        assert int(alone.evaluations) == int(solution.evaluations[0])
    torch.testing.assert_close(solution.value[:1, :3], alone.value, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(solution.residual[:1], alone.residual, rtol=0.5, atol=1e-12)


@pytest.mark.defect("A19")
def test_a_mask_does_not_freeze_a_leaf_with_as_many_features_as_tokens() -> None:
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
@pytest.mark.parametrize(("change", "error"), [
    (lambda mask: {"a": mask, "c": None}, TypeError),
    (lambda mask: {"a": None, "b": None}, TypeError),
    (lambda mask: {"a": mask.float(), "b": None}, TypeError),
    (lambda mask: {"a": mask[:2], "b": None}, ValueError),
    (lambda mask: {"a": mask, "b": mask}, ValueError),
    (lambda mask: mask[:, :4], ValueError),
])  # fmt: skip
def test_masks_that_do_not_fit_are_refused(change: Any, error: type[Exception]) -> None:
    z0, _, mask = masked()
    start = {"a": z0, "b": torch.zeros(3, 2, dtype=torch.float64)}
    with pytest.raises(error, match="mask"):
        fixed_point(lambda z: z, start, mask=change(mask))


BATCH, SIZE = 2, 4096
STATE = BATCH * SIZE * 8  # bytes


def alive() -> int:
    """Bytes of all tensors that Python holds."""
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is Tensor]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def held(solver: Solver, steps: int, energy: bool = False) -> list[int]:
    """States alive at each call of f before it has made anything."""
    counts: list[int] = []

    def f(z: Tensor) -> Tensor:
        """A slow map without any solution in reach of few steps: keeps every solver busy."""
        counts.append(round((alive() - before) / STATE))
        return torch.roll(z, 1, dims=1).mul_(0.999).add_(1)

    def quartic(z: Tensor) -> Tensor:
        counts.append(round((alive() - before) / STATE))
        weights = torch.linspace(1, 50, SIZE, dtype=z.dtype)
        return (weights * (z - 1).square()).sum(1) / 100

    generator = torch.Generator().manual_seed(0)
    z0 = torch.randn(BATCH, SIZE, generator=generator, dtype=torch.float64)
    gc.collect()
    before = alive()
    fixed_point(
        Descent(quartic) if energy else f, z0, solver=solver, max_steps=steps, tolerance=0.0,
        adjoint=None, on_failure="ignore",
    )  # fmt: skip
    return counts


@pytest.mark.parametrize(("solver", "energy", "most"), [
    (Anderson(5), False, 2 * 5 + 7),
    # The last ten steps and changes of the residual are kept to estimate the error.
    (GradientDescent(momentum=0.5), False, 2 * 10 + 11),
    (GradientDescent("auto"), False, 2 * 10 + 11),
    # One vector a step more; the storage grows by halves.
    (Broyden(memory=1000), False, 40 + 20 + 13 + 2 * 10),
    (LBFGS(memory=5), True, 2 * 5 + 12),
])  # fmt: skip
def test_a_solver_keeps_no_more_states_than_its_memory(
    solver: Solver, energy: bool, most: int
) -> None:
    calls = held(solver, 40, energy)
    assert max(calls[:20]) <= max(held(solver, 20, energy)) + 1
    assert 2 <= max(calls) <= most


def test_a_solve_leaves_no_reference_cycle() -> None:
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


KINDS = [
    Anderson, Broyden, Forward, GradientDescent, Newton, Implicit, Unrolled, Phantom, solvers.OneStep,
    solvers.CG, solvers.MINRES, solvers.GMRES,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_or_its_name_means_its_default_options(kind: Any) -> None:
    """Of solvers, of adjoints, in a layer too, and of linear solvers wherever they are taken."""
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)

    def solution(given: Any) -> solvers.Solution:
        if issubclass(kind, solvers.LinearSolver):
            return solve_linear(lambda v: v * torch.tensor([1.0, 2.0, 4.0]), x, solver=given)
        option = {"solver": given} if issubclass(kind, Solver) else {"adjoint": given}
        return fixed_point(lambda z, x: 0.5 * z.cos() + x, torch.zeros_like(x), (x,), **option)

    expected = solution(kind())
    for given in (kind, kind.__name__, kind.__name__.lower()):
        found = solution(given)
        assert torch.equal(found.value, expected.value)
        assert found.evaluations.tolist() == expected.evaluations.tolist()
        if issubclass(kind, solvers.Adjoint):
            assert DEQ.from_update(lambda z, x: 0.5 * z + x, adjoint=given).adjoint == kind()
        elif issubclass(kind, solvers.LinearSolver):
            assert Implicit(solver=given) == Implicit(solver=kind())
            assert Newton(linear=given) == Newton(linear=kind())


F, Z0, ARGS = plain_batch(3, 4)
META = torch.device("meta")


def with_value(tensor: Tensor, value: float, row: int = 1) -> Tensor:
    changed = tensor.clone()
    changed[row] = value
    return changed


WEIGHT, X = ARGS
# The argument that the error names, the error, and the arguments that are changed.
CALLS: list[tuple[str, type[Exception], dict[str, Any]]] = [
    ("f", TypeError, {"f": 3}),
    ("f", ValueError, {"f": lambda z, *args: torch.cat([z, z[:, :1]], 1)}),
    ("f", TypeError, {"f": lambda z, *args: z.float()}),
    ("f", TypeError, {"f": lambda z, *args: (z, z)}),
    ("f", TypeError, {"z0": {"a": Z0}, "f": lambda z, *args: {"b": z["a"]}}),
    ("z0", TypeError, {"z0": 1.0}),
    ("z0", TypeError, {"z0": Z0.long()}),
    ("z0", ValueError, {"z0": torch.tensor(1.0)}),
    ("z0", ValueError, {"z0": (Z0, Z0[:2])}),
    ("z0", ValueError, {"z0": with_value(Z0, torch.nan)}),
    ("args", TypeError, {"args": [WEIGHT, X]}),
    (r"args\[0\]", ValueError, {"args": (WEIGHT[0], X)}),
    (r"args\[1\]", ValueError, {"args": (WEIGHT, X.to(META))}),
    (r"args\[1\]", ValueError, {"args": (WEIGHT, with_value(X, torch.nan, 0))}),
    ("solver", TypeError, {"solver": Implicit}),
    ("solver", ValueError, {"solver": "andersen"}),
    ("tolerance", TypeError, {"tolerance": "tight"}),
    ("tolerance", ValueError, {"tolerance": -0.1}),
    ("max_steps", ValueError, {"max_steps": 0}),
    ("max_steps", TypeError, {"max_steps": 10.0}),
    ("adjoint", ValueError, {"adjoint": "implicitly"}),
    ("adjoint", TypeError, {"adjoint": Anderson}),
    ("energy", TypeError, {"energy": 1}),
    ("energy", ValueError, {"energy": lambda z, *args: z.sum()}),
    ("energy", TypeError, {"energy": lambda z, *args: 1.0}),
    ("mask", TypeError, {"mask": torch.ones(3, 4)}),
    ("mask", ValueError, {"mask": torch.ones(2, 4, dtype=torch.bool)}),
    ("mask", ValueError, {"mask": torch.ones(3, 5, dtype=torch.bool)}),
    ("on_failure", ValueError, {"on_failure": "raises"}),
    ("LBFGS", ValueError, {"solver": LBFGS()}),
    ("LBFGS", ValueError, {"solver": LBFGS(), "energy": lambda z, *args: z.sum(1)}),
    ("callback", TypeError, {"callback": 3}),
    ("verify", TypeError, {"verify": None}),
    ("stop", TypeError, {"stop": lambda z: Z0[:, 0]}),
    ("stop", TypeError, {"stop": lambda z: Z0[:2, 0] > 0}),
    ("stop", TypeError, {"stop": lambda z: True}),
    ("z0", TypeError, {"z0": Z0 + 0j}),
]


def refused(argument: str, error: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(error, match=rf"\b{argument}") as caught:
        call()
    assert type(caught.value) is error


@pytest.mark.parametrize("row", CALLS, ids=lambda row: f"{row[0]}-{row[1].__name__}")
def test_a_wrong_argument_is_refused_by_name(row: Any) -> None:
    argument, error, changes = row
    call = {"f": F, "z0": Z0, "args": ARGS, **changes}
    refused(argument, error, lambda: fixed_point(**call))


NONE_SUCH: Any = "none such"
OPTIONS: list[tuple[str, type[Exception], Callable[[], object]]] = [
    ("rtol", ValueError, lambda: Tolerance(rtol=-1e-6)),
    ("atol", ValueError, lambda: Tolerance(atol=float("inf"))),
    ("rtol", TypeError, lambda: Tolerance(rtol=NONE_SUCH)),
    ("memory", ValueError, lambda: Anderson(memory=0)),
    ("memory", TypeError, lambda: Anderson(memory=2.5)),  # type: ignore[arg-type]
    ("damping", ValueError, lambda: Anderson(damping=0.0)),
    ("regularization", ValueError, lambda: Anderson(regularization=-1)),
    ("memory", ValueError, lambda: Broyden(memory=1)),
    ("step_size", ValueError, lambda: GradientDescent(-1.0)),
    ("step_size", TypeError, lambda: GradientDescent(NONE_SUCH)),
    ("momentum", ValueError, lambda: GradientDescent(momentum=1.0)),
    ("nesterov", ValueError, lambda: GradientDescent(nesterov=True)),
    ("step_size", ValueError, lambda: GradientDescent("auto", 0.5)),
    ("linear", ValueError, lambda: Newton(linear=NONE_SUCH)),
    ("forcing", ValueError, lambda: Newton(forcing=0.0)),
    ("solver", TypeError, lambda: Implicit(Anderson())),  # type: ignore[arg-type]
    ("solver", ValueError, lambda: Implicit(solver=NONE_SUCH)),
    ("solver", ValueError, lambda: solve_linear(lambda v: v, torch.ones(2, 3), solver=NONE_SUCH)),
    ("tolerance", TypeError, lambda: Implicit(tolerance=[0.1])),  # type: ignore[arg-type]
    ("max_steps", ValueError, lambda: Implicit(max_steps=0)),
    ("on_failure", ValueError, lambda: Implicit(on_failure=NONE_SUCH)),
    ("steps", ValueError, lambda: Phantom(steps=0)),
    ("step_size", ValueError, lambda: Descent(lambda z: z.sum(1), 0.0)),
    ("energy", TypeError, lambda: Descent(3)),  # type: ignore[arg-type]
    ("site", ValueError, lambda: adaptive_tap(torch.zeros(4, 4), torch.zeros(4), site=NONE_SUCH)),
    ("site", TypeError, lambda: adaptive_tap(torch.zeros(4, 4), torch.zeros(4), site=3)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: f"{row[0]}-{row[1].__name__}")
def test_a_wrong_option_is_refused_by_name(row: Any) -> None:
    refused(*row)


def test_a_closure_that_would_broadcast_is_explained() -> None:
    """One sample is left: adding the whole batch to it has a shape, but not the right one."""
    x = torch.ones(4, 3, dtype=torch.float64)
    scale = torch.tensor([0.01, 0.01, 0.01, 0.9], dtype=torch.float64)
    with pytest.raises(ValueError, match="compact"):
        fixed_point(
            lambda z, scale: scale[:, None] * torch.tanh(z) + x, torch.zeros_like(x), (scale,),
            tolerance=1e-8,
        )  # fmt: skip


@pytest.mark.parametrize("solver", [None, Newton(), solvers.Anderson()])
def test_inference_mode(solver: solvers.Solver | None) -> None:
    torch.manual_seed(0)
    layer = DEQ(0.3 * ReLUFeedForward(6, 8) + Quadratic(), solver=solver)
    x = torch.randn(3, 4, 6)
    with torch.inference_mode():
        inside = layer(x)
    torch.testing.assert_close(inside, layer(x).detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [np.int64, np.int8, torch.tensor])
def test_a_count_may_be_a_number_of_numpy_or_a_tensor_without_dimensions(kind: Any) -> None:
    x = torch.ones(2, 3)
    solution = fixed_point(
        lambda z: z / 2 + 1, x, tolerance=1e-9, max_steps=kind(3), on_failure="ignore"
    )
    assert solution.evaluations.tolist() == [3, 3]
    wrong: list[Any] = [
        np.bool_(True), torch.tensor(True), np.array([3]), torch.tensor([3]), np.float32(3)
    ]  # fmt: skip
    for bad in wrong:
        with pytest.raises(TypeError, match="max_steps"):
            fixed_point(lambda z: z / 2 + 1, x, max_steps=bad)


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor])
def test_a_number_may_be_one_of_numpy_or_a_tensor_without_dimensions(kind: Any) -> None:
    x = torch.ones(2, 3)
    exact = fixed_point(lambda z: z / 2 + 1, x, solver=Forward(damping=0.5), tolerance=0.125)
    found = fixed_point(
        lambda z: z / 2 + 1, x, solver=Forward(damping=kind(0.5)), tolerance=kind(0.125)
    )
    assert torch.equal(found.value, exact.value)
    with pytest.raises(TypeError, match="damping"):  # an option has no gradient
        Forward(damping=torch.tensor(0.5, requires_grad=True))  # type: ignore[arg-type]
