"""Warm starts: the same fixed points and gradients for fewer evaluations."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.deq import DIM, EXACT, Cell, gradient_layer, make, relative_error, tokens
from implicit_attn import DEQ
from implicit_attn.deq import WarmStarts
from solvers import Forward, Implicit, Phantom, SolveError, Status, Tolerance

LOOSE: dict[str, Any] = {
    "tolerance": Tolerance(1e-8),
    "adjoint": Implicit(tolerance=Tolerance(1e-8)),
    "max_steps": 200,
    "on_failure": "raise",
}


def layer(warm_start: int | None = 8, **options: Any) -> DEQ:
    torch.manual_seed(0)
    store = WarmStarts(warm_start, adjoint=True) if warm_start else warm_start
    return gradient_layer(warm_start=store, **{**LOOSE, **options})


def step(deq: DEQ, x: Tensor, ids: Any = None, **options: Any) -> tuple[Tensor, Tensor, int, int]:
    """Value, gradient of x, and the evaluations of both solves."""
    leaf = x.clone().requires_grad_()
    value = deq(leaf, ids=ids, **options)
    (value.square().sum()).backward()
    assert leaf.grad is not None and deq.last is not None
    adjoint = deq.last.adjoint.solution
    assert adjoint is not None
    return (
        value.detach(),
        leaf.grad,
        int(deq.last.evaluations.sum()),
        int(adjoint.evaluations.sum()),
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_a_second_visit_costs_less_and_changes_nothing(masked: bool, listed: bool) -> None:
    deq, x = layer(), tokens(batch=3)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool) if masked else None
    ids, order = torch.tensor([5, 7, 2]), torch.tensor([2, 0, 1])
    cold = step(deq, x, ids.tolist() if listed else ids, mask=mask)
    near = (x + 1e-5 * torch.randn_like(x))[order]
    chosen = None if mask is None else mask[order]
    warm = step(deq, near, ids[order].tolist() if listed else ids[order], mask=chosen)
    exact = step(layer(None, **EXACT), near, mask=chosen)
    for found, expected in zip(warm[:2], exact[:2], strict=True):
        assert relative_error(found, expected) <= 1e-6
    assert warm[2] < 0.7 * cold[2] and warm[3] < 0.9 * cold[3]


def test_masked_tokens_keep_their_initial_value() -> None:
    deq, x = layer(), tokens(batch=2)
    mask = torch.tensor([[True, True, False], [True, False, True]])
    deq(x, mask, ids=[0, 1])
    other = x + 1.0
    value = deq(other, mask, ids=[0, 1])
    assert torch.equal(value[~mask], other[~mask])


def test_what_is_not_known_starts_cold() -> None:
    deq, x = layer(), tokens(batch=3)
    cold = deq.solve(x).evaluations
    deq(x[:1], ids=[4])
    found = deq.solve(x, ids=[4, -1, 9]).evaluations
    assert found[0] < cold[0] and torch.equal(found[1:], cold[1:])
    assert deq.warm_starts is not None and len(deq.warm_starts) == 2  # -1 names no sample
    assert torch.equal(deq.solve(x).evaluations, cold)  # without ids


def test_the_samples_visited_last_are_kept() -> None:
    deq, x = layer(warm_start=2), tokens(batch=3)
    for ids in ([1], [2], [1], [3]):
        deq(x[: len(ids)], ids=ids)
    store = deq.warm_starts
    assert store is not None and list(store.slots) == [1, 3]
    step(deq, x, [6, 7, 8])  # more than there is room for
    assert list(store.slots) == [7, 8] and store.states.shape == (2, 3 * DIM)
    known = store.states[[store.slots[7], store.slots[8]]]
    assert relative_error(known, deq(x[1:]).flatten(1)) <= 1e-6


def test_an_id_may_occur_twice() -> None:
    deq, x = layer(), tokens(batch=3)
    step(deq, x, [1, 1, 2])
    store = deq.warm_starts
    assert store is not None and len(store) == 2
    assert relative_error(store.states[store.slots[1]], deq(x)[1].flatten()) <= 1e-6
    value = step(deq, x, [1, 1, 2])[0]
    assert relative_error(value, deq(x)) <= 1e-6


def test_another_shape_or_dtype_forgets() -> None:
    torch.manual_seed(0)
    deq = DEQ.from_update(lambda z, x: 0.5 * z.tanh() + x, warm_start=4)
    store = deq.warm_starts
    assert store is not None
    for x in (tokens(batch=2), tokens(batch=2)[:, :2], tokens(batch=2)[:, :2].float()):
        deq(x, ids=[0, 1])
        assert len(store) == 2 and store.states.dtype == x.dtype
        assert store.states.shape[1] == x[0].numel()


def test_a_backward_pass_after_its_samples_were_replaced() -> None:
    deq, x = layer(warm_start=2), tokens(batch=2).requires_grad_()
    expected = step(layer(None), x.detach())[1]
    value = deq(x, ids=[0, 1])
    deq(x.detach(), ids=[2, 3])
    deq(x.detach()[:, :2], ids=[2, 3])
    value.square().sum().backward()
    assert x.grad is not None and relative_error(x.grad, expected) <= 1e-6
    assert deq.warm_starts is not None and not deq.warm_starts.with_adjoint


def test_in_evaluation_mode_nothing_is_used_or_kept() -> None:
    deq, x = layer(), tokens(batch=2)
    cold = deq.solve(x).evaluations
    deq(x, ids=[0, 1])
    deq.eval()
    assert torch.equal(deq.solve(x, ids=[0, 1]).evaluations, cold)
    deq(x, ids=[2, 3])
    assert deq.warm_starts is not None and len(deq.warm_starts) == 2
    with pytest.raises(ValueError, match="ids must hold one integer for each of 2 samples, got 1"):
        deq(x, ids=[0])


def test_a_sample_that_failed_starts_anew() -> None:
    options: dict[str, Any] = {"solver": Forward(), "max_steps": 100, "on_failure": "ignore"}
    deq = DEQ.from_update(lambda z, x: x * z + 1, warm_start=4, **options)
    x = torch.tensor([[0.1], [9.0]], dtype=torch.float64)
    deq(x / 100, ids=[0, 1])
    status = deq.solve(x, ids=[0, 1]).status
    assert status.tolist() == [Status.CONVERGED, Status.DIVERGED]
    assert deq.warm_starts is not None and list(deq.warm_starts.slots) == [0]


def test_a_sample_whose_failure_raises_starts_anew() -> None:
    options: dict[str, Any] = {"solver": Forward(), "max_steps": 100, "on_failure": "raise"}
    deq = DEQ.from_update(lambda z, x: x * z + 1, warm_start=4, **options)
    x = torch.tensor([[0.1], [9.0]], dtype=torch.float64)
    deq(x / 100, ids=[0, 1])
    with pytest.raises(SolveError):
        deq(x, ids=[0, 1])
    assert deq.warm_starts is not None and list(deq.warm_starts.slots) == [0]


def test_second_derivatives_are_those_of_a_cold_start() -> None:
    x = tokens(batch=2)

    def second(deq: DEQ, ids: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        value = deq(leaf, ids=ids)
        (first,) = torch.autograd.grad(value.square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    deq = layer(**EXACT)
    expected = second(layer(None, **EXACT), None)
    for _ in range(2):
        assert relative_error(second(deq, [0, 1]), expected) <= 1e-8


def test_other_adjoints_and_trees() -> None:
    cell = Cell().double()
    deq = DEQ.from_update(cell, adjoint=Phantom(steps=40), warm_start=4, tolerance=Tolerance(1e-10))
    x = tokens(batch=2).requires_grad_()
    deq(x.detach(), ids=[0, 1])
    grad = torch.autograd.grad(deq(x, ids=[0, 1]).sum(), x)[0]
    assert relative_error(grad, torch.autograd.grad(deq(x).sum(), x)[0]) <= 1e-6
    both = DEQ.from_update(
        lambda z, x: {"a": 0.5 * z["b"].cos() + x, "b": 0.5 * z["a"].sin()},
        init=lambda x: {"a": x, "b": x},
        warm_start=4,
        tolerance=Tolerance(1e-8),
    )
    cold = both.solve(x.detach(), ids=[0, 1]).evaluations
    assert bool((both.solve(x.detach(), ids=[0, 1]).evaluations < cold).all())


def test_the_store_is_no_part_of_the_state_dict_or_of_copies() -> None:
    deq, x = layer(), tokens(batch=2)
    names = set(deq.state_dict())
    step(deq, x, [0, 1])
    assert set(deq.state_dict()) == names == set(layer(None).state_dict())
    for other in (copy.deepcopy(deq), pickle.loads(pickle.dumps(deq.warm_starts))):
        store = other.warm_starts if isinstance(other, DEQ) else other
        assert isinstance(store, WarmStarts) and len(store) == 0
        assert (store.capacity, store.adjoint) == (8, True)
    assert deq.warm_starts is not None and len(deq.warm_starts) == 2


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([0], ValueError, "ids must hold one integer for each of 2 samples, got 1"),
        ([0, 1.0], TypeError, "ids must be integers"),
        ([True, False], TypeError, "ids must be integers"),
        (3, TypeError, "ids must be a tensor"),
        (torch.tensor([0.0, 1.0]), TypeError, "ids must be integers, .* got dtype torch.float32"),
        (torch.tensor([True, False]), TypeError, "ids must be integers, .* torch.bool"),
        (torch.tensor([[0, 1]]), ValueError, r"ids must be of shape \(2,\), got \(1, 2\)"),
    ],
)
def test_wrong_ids_are_refused(ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layer()(tokens(batch=2), ids=ids)


def test_wrong_uses_are_refused() -> None:
    x = tokens(batch=2)
    with pytest.raises(ValueError, match="ids name samples for a layer with warm_start"):
        layer(None)(x, ids=[0, 1])
    for value in (0, -1, 2.5, True):
        with pytest.raises((TypeError, ValueError), match="warm_start"):
            DEQ.from_update(Cell(), warm_start=value)
    with pytest.raises(TypeError, match="adjoint"):
        WarmStarts(3, adjoint=1)  # type: ignore[arg-type]
    deq = layer()
    with pytest.raises(RuntimeError, match="ids cannot be used inside of torch"):
        torch.func.grad(lambda x: deq(x, ids=[0, 1]).sum())(x)


def test_inference_mode() -> None:
    deq, x = layer(), tokens(batch=2)
    with torch.inference_mode():
        deq(x, ids=[0, 1])
    step(deq, x, [0, 1])
    assert deq.warm_starts is not None and not deq.warm_starts.states.is_inference()


def test_a_number_keeps_states_alone() -> None:
    deq, x = make("gradient", warm_start=3, **LOOSE), tokens(batch=2)
    cold, warm = step(deq, x, [0, 1]), step(deq, x, [0, 1])
    store = deq.warm_starts
    assert store is not None and len(store) == 2 and not store.with_adjoint
    assert warm[2] < cold[2] and warm[3] == cold[3]
