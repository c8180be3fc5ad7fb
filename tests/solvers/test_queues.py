"""Queues of samples: each sample has the result of a solve by itself, whatever shares its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import solvers
from solvers.core.cuda import forced
from solvers.core.layout import Layout
from solvers.core.problem import Problem
from solvers.queues import Group, Queue

SAMPLES, SIZE = 60, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Contractions by 0.2 to 0.95 of different samples, so that they need different numbers of evaluations.
GAIN = torch.linspace(0.2, 0.95, SAMPLES, dtype=torch.float64)[:, None].flip(0)
ROTATION = torch.linalg.qr(drawn(SIZE, SIZE)).Q
BIAS, ZEROS = drawn(SAMPLES, SIZE, seed=1), torch.zeros(SAMPLES, SIZE, dtype=torch.float64)
STIFF = torch.logspace(0, 1.5, SIZE, dtype=torch.float64)


def contraction(z: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    return gain * torch.sin(z @ ROTATION) + bias


def pair(z: dict[str, Tensor], gain: Tensor, bias: Tensor) -> dict[str, Tensor]:
    return {"a": contraction(z["b"], gain, bias), "b": 0.5 * torch.cos(z["a"])}


def energy(z: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    return (0.5 * (z - bias).square() * (1 + gain * STIFF) + 0.5 * z.cos()).sum(1)


DESCENT = solvers.Descent(energy, step_size=0.05)
NEVER: Any = {
    "stop": lambda z, *args: torch.zeros(len(z), dtype=torch.bool)
}  # needs the loop in torch
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Anderson": (contraction, {}),
    "plain steps": (contraction, {"solver": "forward"}),
    "Anderson in torch": (contraction, {"solver": "anderson", **NEVER}),
    "plain steps in torch": (contraction, {"solver": "forward", **NEVER}),
    "momentum": (contraction, {"solver": solvers.GradientDescent(0.8, momentum=0.3)}),
    "Nesterov": (contraction, {"solver": solvers.GradientDescent(0.8, 0.3, nesterov=True)}),
    "automatic steps": (DESCENT, {"solver": solvers.GradientDescent("auto")}),
    "L-BFGS": (DESCENT, {}),
    "L-BFGS, three pairs": (DESCENT, {"solver": solvers.LBFGS(3)}),
    "Anderson of an energy": (DESCENT, {"solver": "anderson"}),
    "mask": (contraction, {"mask": drawn(SAMPLES, SIZE, seed=2) > -0.5}),
    "mask in torch": (contraction, {"mask": drawn(SAMPLES, SIZE, seed=2) > -0.5, **NEVER}),
    "measure": (contraction, {"measure": lambda z: z[:, :3]}),
}  # fmt: skip


def leaves(value: Any) -> Tensor:
    return torch.cat([leaf.flatten(1) for leaf in pytree.tree_leaves(value)], 1)


def agrees(
    f: Callable[..., Any], z0: Any, args: Any, options: dict[str, Any], slots: int = 8
) -> solvers.Solution:
    """The queue gives what :func:`solvers.fixed_point` gives."""
    options = {"max_steps": 2000, "on_failure": "ignore"} | options
    found = solvers.solve_queue(f, z0, args, slots=slots, **options)
    rule = options.get("stop")
    if rule is not None:
        options["stop"] = lambda z: rule(z, *args)
    alone = solvers.fixed_point(f, z0, args, adjoint=None, **options)
    assert found.statuses == alone.statuses
    # Histories begin in other slots, and sums are rounded in another order.
    assert (found.evaluations - alone.evaluations).abs().max() <= 2
    assert alone.evaluations.max() > alone.evaluations.min() + 2  # samples end at different times
    difference = (leaves(found.value) - leaves(alone.value)).norm(dim=1)
    done = alone.converged
    assert (difference <= 2e-4 * leaves(alone.value).norm(dim=1))[done].all()
    assert found.error is not None and (found.error <= 2e-4)[done].all()
    assert (found.energy is None) == (alone.energy is None)
    return found


@pytest.mark.parametrize("slots", [1, 8, 100])
@pytest.mark.parametrize("name", list(CASES))
def test_a_queue_gives_the_solutions_of_single_solves(name: str, slots: int) -> None:
    f, options = CASES[name]
    found = agrees(f, ZEROS, (GAIN, BIAS), options, slots)
    assert found.converged.all() and found.value.shape == ZEROS.shape


def test_states_may_be_pytrees() -> None:
    agrees(pair, {"a": ZEROS, "b": ZEROS}, (GAIN, BIAS), {})


@pytest.mark.parametrize("name", ["Anderson", "L-BFGS", "mask"])
def test_the_code_for_cuda_devices(name: str) -> None:
    f, options = CASES[name]
    args = (GAIN.float(), BIAS.float())

    def single(z: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return gain * torch.sin(z @ ROTATION.float()) + bias

    f = solvers.Descent(lambda z, *a: energy(z, *a).float(), 0.05) if f is DESCENT else single
    chosen = {
        "solver": "lbfgs" if name == "L-BFGS" else "anderson"
    }  # an automatic one has other attempts
    with forced():
        agrees(f, ZEROS.float(), args, options | chosen)


def test_a_bound_is_reported_where_the_energy_has_a_modulus() -> None:
    f = solvers.Descent(energy, step_size=0.05, modulus=0.5)
    found = agrees(f, ZEROS, (GAIN, BIAS), {})
    alone = solvers.fixed_point(f, ZEROS, (GAIN, BIAS), max_steps=2000, adjoint=None)
    assert found.bound is not None and alone.bound is not None
    assert (found.bound < 1e-2).all() and found.bound.shape == alone.bound.shape


def test_samples_that_fail_are_solved_again() -> None:
    """Repelling maps: Anderson's method stalls for some, of which the second attempts solve a part."""

    def steep(z: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return -3 * gain * torch.sin(z @ ROTATION) + bias

    found = agrees(steep, ZEROS, (GAIN, BIAS), {"max_steps": 400})
    first = agrees(steep, ZEROS, (GAIN, BIAS), {"max_steps": 400, "solver": "anderson"})
    assert first.counts()["STALLED"] > found.counts().get("STALLED", 0)


def test_a_sample_that_is_not_finite_fails_alone() -> None:
    def f(z: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return contraction(z, gain, bias) / (bias[:, :1] < 1).to(z)

    for options in ({}, NEVER):
        found = agrees(f, ZEROS, (GAIN, BIAS), {"solver": "anderson", **options})
        assert torch.equal(found.status == solvers.Status.NONFINITE, BIAS[:, 0] >= 1)


def test_the_rule_sees_the_rows_and_their_arguments() -> None:
    seen = set()

    def rule(z: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        assert z.shape == bias.shape and len(gain) == len(z)
        seen.add(len(z))
        return (contraction(z, gain, bias) - z).norm(dim=1) < 1e-2

    options: Any = {"stop": rule, "solver": "forward", "tolerance": 0.0}
    found = agrees(contraction, ZEROS, (GAIN, BIAS), options)
    assert found.statuses == ["STOPPED"] * SAMPLES
    assert 8 in seen and min(seen) < 8  # at the end of the queue the batch shrinks


@pytest.mark.parametrize("options", [{}, NEVER, {"tolerance": 1e-3}])
def test_evaluations_exceed_those_of_single_solves_by_little(options: Any) -> None:
    """Rows of f: a quarter more than counted and verified ones, and the tail, where slots are free."""
    many, slots, rows = 10, 16, [0]

    def f(z: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        rows[0] += len(z)
        return contraction(z, gain, bias)

    order = torch.randperm(many * SAMPLES, generator=torch.Generator().manual_seed(0))
    z0, gain, bias = (torch.cat([t] * many)[order] for t in (ZEROS, GAIN, BIAS))
    found = solvers.solve_queue(f, z0, (gain, bias), slots=slots, max_steps=2000, **options)
    most = int(found.evaluations.max())
    assert rows[0] <= 1.25 * (int(found.evaluations.sum()) + len(z0)) + slots * most


def test_rows_that_influence_each_other_are_inconsistent() -> None:
    """The mean over the batch is another one when the solution is verified."""

    def f(z: Tensor, bias: Tensor) -> Tensor:
        return 0.5 * z + 0.4 * z.mean(0) + bias

    found = solvers.solve_queue(f, ZEROS, (BIAS,), slots=8, max_steps=400, on_failure="ignore")
    assert found.counts()["INCONSISTENT"] > SAMPLES // 2
    options: Any = {"max_steps": 400, "on_failure": "ignore", "verify": False}
    assert "INCONSISTENT" not in solvers.solve_queue(f, ZEROS, (BIAS,), slots=8, **options).counts()


def test_there_are_no_gradients_and_modes_are_left_as_they_were() -> None:
    args = (GAIN.clone().requires_grad_(), BIAS)
    found = solvers.solve_queue(contraction, ZEROS, args, slots=8, max_steps=2000)
    assert not found.value.requires_grad and torch.is_grad_enabled()
    with torch.inference_mode():
        again = solvers.solve_queue(contraction, ZEROS, args, slots=8, max_steps=2000)
    torch.testing.assert_close(again.value, found.value)


def test_arguments_are_not_written_over() -> None:
    z0, gain, bias = ZEROS.clone(), GAIN.clone(), BIAS.clone()
    for slots in (8, SAMPLES):
        solvers.solve_queue(contraction, z0, (gain, bias), slots=slots, max_steps=2000)
    for one, other in ((z0, ZEROS), (gain, GAIN), (bias, BIAS)):
        assert torch.equal(one, other)


def test_failures_are_reported_for_all_samples() -> None:
    call = lambda **options: solvers.solve_queue(  # noqa: E731
        contraction, ZEROS, (GAIN, BIAS), slots=8, max_steps=12, solver="forward", **options
    )
    with pytest.warns(solvers.SolveWarning, match="MAX_STEPS"):
        found = call()
    assert 0 < int(found.converged.sum()) < SAMPLES
    with pytest.raises(solvers.SolveError) as caught:
        call(on_failure="raise")
    assert torch.equal(caught.value.solution.value, found.value)


def test_no_samples() -> None:
    found = solvers.solve_queue(contraction, ZEROS[:0], (GAIN[:0], BIAS[:0]))
    assert found.value.shape == (0, SIZE) and found.statuses == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"slots": 0}, ValueError, "slots"),
        ({"solver": "broyden"}, TypeError, "Broyden cannot take new samples"),
        ({"solver": "newton"}, TypeError, "Newton cannot take new samples"),
        ({"solver": "lbfgs"}, ValueError, "LBFGS minimises an energy"),
        ({"max_steps": 0}, ValueError, "max_steps"),
        ({"on_failure": "panic"}, ValueError, "on_failure"),
        ({"stop": 3}, TypeError, "stop"),
        ({"stop": lambda z, *args: z}, TypeError, "stop must return a bool tensor"),
    ],
)
def test_mistakes(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        solvers.solve_queue(contraction, ZEROS, (GAIN, BIAS), **options)
    with pytest.raises(ValueError, match="batch size"):
        solvers.solve_queue(contraction, ZEROS, (GAIN[:3], BIAS))


# --- sources -------------------------------------------------------------------------------------------


def queue(**options: Any) -> Queue:
    chosen: Any = dict.fromkeys(("solver", "tolerance", "stop", "measure")) | {"verify": True}
    return Queue(contraction, 8, max_steps=2000, on_failure="warn", **chosen | options)


def group(tree: Any) -> Group:
    start = torch.zeros_like(tree[1])
    return Group(Problem.of(contraction, None, start, tree, None, True, Layout.of(start)), start)


def batches(sizes: list[int]) -> Iterator[Any]:
    at = 0
    for size in sizes:
        yield (GAIN[at : at + size], BIAS[at : at + size]), size
        at += size


@pytest.mark.parametrize("sizes", [[60], [1] * 60, [7, 0, 20, 3, 30]])
def test_batches_of_any_size(sizes: list[int]) -> None:
    found = list(queue().solve(batches(sizes), group))
    index = torch.cat([part for part, _ in found])
    assert torch.equal(index.sort().values, torch.arange(SAMPLES)) and len(found) > 1
    value = torch.cat([solution.value for _, solution in found])
    expected = solvers.fixed_point(contraction, ZEROS, (GAIN, BIAS), max_steps=2000).value[index]
    torch.testing.assert_close(value, expected, rtol=2e-4, atol=2e-4)


def test_an_error_of_the_source_comes_after_the_samples_before_it() -> None:
    def source() -> Iterator[Any]:
        yield from batches([10, 10])
        raise OSError("no more")

    def failing(tree: Any) -> Group:
        raise AttributeError("no group")

    for f in (group, failing):
        found = list[int]()
        with pytest.raises(OSError if f is group else AttributeError):
            for index, _ in queue().solve(source(), f):
                found += index.tolist()
        assert sorted(found) == (list(range(20)) if f is group else [])


def test_samples_of_another_shape_are_refused() -> None:
    def source(other: Any) -> Iterator[Any]:
        yield (GAIN[:20], BIAS[:20]), 20
        yield other, 3

    for other in ((GAIN[:3], BIAS[:3, :4]), (GAIN[:3].float(), BIAS[:3])):
        with pytest.raises(ValueError, match="pad them to the size of the largest and pass a mask"):
            list(queue().solve(source(other), group))
    with pytest.raises(ValueError, match="the structure of the first"):
        list(queue().solve(source((GAIN[:3],)), group))
