"""Steps in C++ on tensors whose memory is not what they show, or that somebody else keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.kernels import needs_cpp
from cases.turns import Cell, pair, sample, take_turns
from implicit_attn import DEQ
from solvers import CG, GMRES, Implicit, Tolerance, fixed_point
from solvers.native import process

pytestmark = [
    needs_cpp,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
EXACT = Tolerance(1e-11)
WEIGHT = 0.3 * sample(6, 6, 1)
X = sample()


@pytest.fixture(autouse=True)
def in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ENABLED", True)


def flipped(tensor: Tensor) -> Tensor:
    """The negative, as torch keeps ``x.conj().imag``: in the memory of ``tensor``."""
    return torch.ops.aten._neg_view(tensor)


def solution(x: Tensor, f: Any = None, solver: Any = None) -> Tensor:
    f = f or (lambda z, x: torch.tanh(z @ WEIGHT) + x)
    adjoint = Implicit(solver, tolerance=EXACT)
    return fixed_point(f, torch.zeros_like(X), (x,), tolerance=EXACT, adjoint=adjoint).value


@pytest.mark.parametrize("solver", [GMRES(), GMRES(3), CG()], ids=["gmres", "restarts", "cg"])
def test_a_hook_may_keep_what_it_is_given(solver: Any) -> None:
    """No vector that was multiplied by the Jacobian is overwritten later."""
    matrix = WEIGHT + WEIGHT.mT
    kept: list[tuple[Tensor, Tensor]] = []

    def watched(z: Tensor, x: Tensor) -> Tensor:
        output = 0.4 * z @ matrix + x
        if output.requires_grad:
            output.register_hook(lambda g: kept.append((g, g.clone())))
        return output

    x = X.clone().requires_grad_()
    solution(x, watched, solver=solver).sin().sum().backward()
    assert len(kept) > 5 and all(torch.equal(vector, copy) for vector, copy in kept)


def test_a_gradient_that_is_an_imaginary_part() -> None:
    """Its memory may hold the numbers with the other sign."""
    gradient = sample(seed=3)
    x = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(solution(x), x, -gradient)
    (found,) = torch.autograd.grad(solution(x), x, flipped(gradient))
    torch.testing.assert_close(found, wanted)


def test_the_same_where_the_layer_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    take_turns(monkeypatch)
    gradient = sample(seed=3)
    options: Any = {"tolerance": EXACT, "adjoint": Implicit(tolerance=EXACT)}
    found = []
    for layer in pair(DEQ(Cell(), **options)):
        for given in (-gradient, flipped(gradient)):
            x = X.clone().requires_grad_()
            found += torch.autograd.grad(layer(x), x, given)
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


@pytest.mark.parametrize("turns", [True, False], ids=["turns", "blocks"])
def test_a_gradient_whose_square_is_no_number(turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is small, not zero: its adjoint is solved."""
    if turns:
        take_turns(monkeypatch)
    else:
        monkeypatch.setattr(process, "ENABLED", False)
    found = []
    for layer in pair(DEQ(Cell().float(), tolerance=Tolerance(1e-5))):
        x = X.float().requires_grad_()
        found += torch.autograd.grad(layer(x), x, sample(seed=3).float() * 1e-30)
    assert found[0].abs().max() > 1e-32
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-35)


@pytest.mark.parametrize("turns", [True, False], ids=["turns", "blocks"])
def test_generated_code_sees_numbers_as_they_lie(
    turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input and a gradient whose sign is yet to be flipped come to no program like that."""
    if turns:
        take_turns(monkeypatch)
    else:
        monkeypatch.setattr(process, "ENABLED", False)
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        def run(*given: Tensor) -> Any:
            assert not any(tensor.is_neg() for tensor in given)
            seen.append(len(given))
            return graph(*given)

        return run

    layer, wanted = (DEQ(Cell(), tolerance=EXACT) for _ in range(2))
    layer.compile(backend=backend, block=1)
    found = []
    for each in (layer, wanted):
        x = flipped(X).requires_grad_()
        found += torch.autograd.grad(each(x), x, flipped(sample(seed=3)))
    assert len(seen) > 3
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)
