"""What a solve returns and remembers: batches, starts, structured inputs, the record."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.deq import DIM, LAYERS, gradients, make, relative_error, tokens
from implicit_attn import DEQ
from implicit_attn.energies import Field, Quadratic, ReLUFeedForward, SoftmaxAttention
from solvers import Anderson, Forward, Implicit, Phantom, Tolerance, Unrolled

each_layer = pytest.mark.parametrize("name", LAYERS)
TIGHT: dict[str, Any] = {
    "tolerance": Tolerance(rtol=1e-11),
    "adjoint": Implicit(tolerance=Tolerance(rtol=1e-11)),
    "max_steps": 300,
}


def mixed() -> Tensor:
    """Samples of different scales: easy and hard ones."""
    scales = torch.tensor([0.1, 1.0, 5.0, 0.5, 20.0], dtype=torch.float64)
    return tokens(batch=5) * scales[:, None, None]


@each_layer
@pytest.mark.parametrize("solver", [None, Anderson(), Forward(damping=0.7)], ids=str)
def test_samples_do_not_depend_on_their_neighbours(name: str, solver: Any) -> None:
    layer = make(name, solver=solver, max_steps=200)
    x = mixed()
    together = layer.solve(x)
    for i in range(len(x)):
        alone = layer.solve(x[i : i + 1])
        assert torch.equal(alone.status, together.status[i : i + 1])
        assert torch.equal(alone.evaluations, together.evaluations[i : i + 1])
        torch.testing.assert_close(alone.value[0], together.value[i], rtol=1e-9, atol=1e-10)
    order = torch.tensor([3, 1, 4, 0, 2])
    shuffled = layer.solve(x[order])
    assert torch.equal(shuffled.evaluations, together.evaluations[order])
    torch.testing.assert_close(shuffled.value, together.value[order], rtol=1e-9, atol=1e-10)


@each_layer
def test_gradients_do_not_depend_on_the_neighbours(name: str) -> None:
    layer = make(name, **TIGHT)
    x = mixed().requires_grad_()
    layer(x).square().sum().backward()
    summed = gradients(layer)
    layer.zero_grad()
    for i in range(len(x)):
        alone = mixed()[i : i + 1].requires_grad_()
        layer(alone).square().sum().backward()
        assert x.grad is not None and alone.grad is not None
        assert relative_error(alone.grad[0], x.grad[i]) <= 1e-8
    for key, gradient in gradients(layer).items():
        if "step_size" not in key:
            assert relative_error(gradient, summed[key]) <= 1e-8, key


@each_layer
def test_warm_start(name: str) -> None:
    layer = make(name, **TIGHT)
    cold = layer.solve(tokens())
    warm = layer.solve(tokens(), z0=cold.value.detach())
    assert (warm.evaluations == 1).all()
    assert relative_error(warm.value, cold.value) <= 1e-10
    near = layer.solve(tokens(), z0=cold.value.detach() + 1e-4)
    assert (near.evaluations < cold.evaluations).all()
    assert relative_error(near.value, cold.value) <= 1e-8


def test_gradient_does_not_depend_on_the_start() -> None:
    found = []
    for z0 in (None, tokens(seed=4), torch.zeros_like(tokens()).requires_grad_()):
        layer = make("gradient", **TIGHT)
        x = tokens().requires_grad_()
        layer.solve(x, z0=z0).value.pow(3).sum().backward()
        found.append(gradients(layer) | {"x": x.grad})
        assert z0 is None or z0.grad is None
    for other in found[1:]:
        for key, reference in found[0].items():
            assert reference is not None
            assert relative_error(other[key], reference) <= 1e-8, key


@pytest.mark.parametrize("init", ["input", "zeros", lambda x: 0.5 * x])
def test_starts(init: Any) -> None:
    layer = make("gradient", init=init, **TIGHT)
    reference = make("gradient", **TIGHT)(tokens())
    torch.testing.assert_close(layer(tokens()), reference, rtol=1e-9, atol=1e-10)
    first = layer.solve(tokens(), max_steps=1, on_failure="ignore").value
    x = tokens()
    start = {"input": x, "zeros": 0 * x}[init] if isinstance(init, str) else init(x)
    torch.testing.assert_close(first, start)


def structured() -> DEQ:
    torch.manual_seed(0)
    attention = SoftmaxAttention(DIM, 2, cross=True, context_dim=3, norm=None, bound=1.0)
    memory = ReLUFeedForward(DIM, 6, norm=None, bound=1.0)
    energy = (
        0.5 * attention.select("context")
        + 0.3 * memory
        + 0.2 * Field().select("field")
        + Quadratic().select("x")
    )
    return DEQ(energy.double(), init=lambda x: x["x"], **TIGHT)


def structured_input() -> dict[str, Tensor]:
    return {
        "x": tokens(),
        "context": tokens(count=5, dim=3, seed=1),
        "field": tokens(seed=2),
    }


def test_dict_input() -> None:
    """Each energy picks its part; gradients reach all parts."""
    layer = structured()

    def run(*parts: Tensor) -> Tensor:
        return layer(dict(zip(("x", "context", "field"), parts, strict=True)))

    inputs = [t.requires_grad_() for t in structured_input().values()]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert layer.last is not None
    assert float(layer.last.residual.max()) <= 1e-11


def test_dict_input_in_batches() -> None:
    """Finished samples leave, and their parts of the input with them."""
    layer = structured()
    x = {key: torch.cat([part, 9 * part, part / 50]) for key, part in structured_input().items()}
    loose: dict[str, Any] = {"tolerance": Tolerance(rtol=1e-3)}
    together = layer.solve(x, **loose)
    assert len(set(together.evaluations.tolist())) > 1
    for i in range(6):
        alone = layer.solve({key: part[i : i + 1] for key, part in x.items()}, **loose)
        torch.testing.assert_close(alone.value[0], together.value[i], rtol=1e-8, atol=1e-9)


def test_dict_input_mistakes() -> None:
    layer = structured()
    x = structured_input()
    del x["field"]
    with pytest.raises(ValueError, match="x must hold 'field', it holds"):
        layer(x)
    with pytest.raises(TypeError, match=r"give init a function|x must be"):
        DEQ(layer.update)(structured_input())
    with pytest.raises(ValueError, match=r"batched along dim 0.*\(1, 5, 3\)"):
        layer(structured_input() | {"context": tokens(batch=1, count=5, dim=3)})


def test_dict_state() -> None:
    def energy(z: dict[str, Tensor], x: dict[str, Tensor]) -> Tensor:
        spring = z["a"].sum(1) - z["b"].sum((1, 2))
        pulls = sum((z[key] - x[key]).square().flatten(1).sum(1) for key in z)
        return 0.5 * pulls + 0.05 * spring.square()

    layer = DEQ.from_energy(energy, init=lambda x: x, **TIGHT)

    def run(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        z = layer({"a": a, "b": b})
        return z["a"], z["b"]

    inputs = (tokens()[:, 0].requires_grad_(), tokens(seed=1).requires_grad_())
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_last_solution() -> None:
    layer = make("gradient")
    assert layer.last is None
    x = tokens().requires_grad_()
    solution = layer.solve(x)
    last = layer.last
    assert last is not None and last.value is None
    assert torch.equal(last.residual, solution.residual)
    assert last.adjoint.solution is None and last.adjoint.solves == 0
    solution.value.square().sum().backward(retain_graph=True)
    adjoint = last.adjoint.solution
    assert adjoint is not None and bool(adjoint.converged.all())
    assert (adjoint.residual <= (layer.tolerance or Tolerance()).rtol).all()
    assert (adjoint.evaluations >= 1).all()
    solution.value.square().sum().backward()
    assert last.adjoint.solves == 2
    layer(x)
    assert layer.last is not last


def test_last_solution_keeps_no_graph() -> None:
    """A layer that remembers its solve must not keep activations of the step before alive."""
    layer = make("gradient")
    x = tokens().requires_grad_()
    hidden = x * 2
    watch = weakref.ref(hidden)
    z = layer(hidden)
    z.sum().backward()
    del hidden, z
    gc.collect()
    assert watch() is None


def test_energy_falls_and_is_that_of_the_value() -> None:
    layer = make("gradient", max_steps=200)
    solution = layer.solve(mixed(), record=True)
    update: Any = layer.update
    torch.testing.assert_close(solution.energy, update.energy(solution.value, mixed()).detach())
    trace = solution.trace
    assert trace is not None and trace.energy is not None and trace.accepted is not None
    for energies, accepted in zip(trace.energy, trace.accepted, strict=True):
        taken = energies[accepted & torch.isfinite(energies)]
        assert (taken.diff() <= 1e-12 * taken[1:].abs().clamp_min(1.0)).all()


def test_solution_residual_is_true() -> None:
    for name in LAYERS:
        layer = make(name)
        solution = layer.solve(tokens(batch=4))
        with torch.no_grad():
            moved = layer.update(solution.value, tokens(batch=4))
        gap = (moved - solution.value).flatten(1).norm(dim=1) / moved.flatten(1).norm(dim=1)
        torch.testing.assert_close(solution.residual, gap.detach(), rtol=1e-6, atol=1e-12)


@pytest.mark.defect("A8")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("adjoint", [Implicit(), Unrolled(), Phantom(2), None], ids=str)
def test_the_output_is_not_the_input(adjoint: Any, requires_grad: bool) -> None:
    """Also where the input is the solution: what is done to one leaves the other alone."""
    layer = DEQ(Quadratic(), adjoint=adjoint)
    leaf = tokens().requires_grad_(requires_grad)
    x = leaf * 1.0
    before = x.detach().clone()
    for y in (layer(x), layer.solve(x, z0=x).value, layer.solve(x, z0=before).value):
        assert torch.equal(y.detach(), before)
        with torch.no_grad():
            y.add_(1)
    assert torch.equal(x.detach(), before)
    z0 = before.clone()
    layer.solve(x, z0=z0).value.detach().zero_()
    assert torch.equal(z0, before)


@pytest.mark.defect("C7")
def test_updates_that_hold_the_whole_batch() -> None:
    """``compact=False``, of the layer or of one solve, is what the error message advises."""
    scale = torch.tensor([0.01, 0.01, 0.01, 0.9], dtype=torch.float64)[:, None, None]
    call: dict[str, Any] = {"tolerance": Tolerance(1e-10), "max_steps": 300}
    x = tokens(batch=4)

    def update(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(scale * z + x)

    layer = DEQ.from_update(update, **call)
    with pytest.raises(ValueError, match="compact=False"):
        layer(x)
    expected = layer.solve(x, compact=False)
    assert bool(expected.converged.all())
    value = DEQ.from_update(update, compact=False, **call)(x)
    assert torch.equal(value, expected.value)
    with pytest.raises(TypeError, match="compact must be True or False, got 1"):
        DEQ.from_update(update, compact=1)  # type: ignore[arg-type]
