"""The published models run at tiny sizes; their solves and gradients are those of long iterations."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_attn import DEQ, ActivationStep
from implicit_attn.energies import LayerNormLagrangian

for package in ("tyro", "sklearn", "torchdeq"):
    pytest.importorskip(package, reason="the programs need the extras [examples] and [torchdeq]")

Load = Callable[[str], ModuleType]
TINY: dict[str, dict[str, int]] = {
    "monotone_operator_network": {"dim": 20},
    "implicit_graph_network": {"length": 6, "dim": 4},
    "multiscale_deq": {"channels": 4},
    "deep_equilibrium_imaging": {"channels": 2},
    "deq_flow": {"channels": 4},
    "tiny_recursive_model": {"dim": 8},
    "energy_based_transformer": {"dim": 8, "length": 8},
    "energy_transformer": {"dim": 8, "heads": 2},
}


@pytest.fixture
def published(load: Load, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a file of ``examples/published`` by its name, as if it were run."""
    folder = load("training").__file__
    assert folder is not None
    monkeypatch.syspath_prepend(folder.replace("training.py", "published"))
    return load


@pytest.mark.parametrize("name", TINY)
def test_the_program_runs(name: str, published: Load, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.random.fork_rng(devices=[]):
        rows = published(name).main(steps=2, **TINY[name])
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 1
    assert {"solved by", "forward", "backward", "status"} < set(rows[0])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def monotone(module: ModuleType) -> tuple[DEQ, Any]:
    return DEQ.from_update(module.Cell(6), init="zeros"), drawn(3, 6).double()


def graph(module: ModuleType) -> tuple[DEQ, Any]:
    """A directed graph with several cycles, which is not normal."""
    edges = (drawn(1, 7, 7) > 0.3).double()
    edges = edges / edges.sum(2, keepdim=True).clamp(min=1)
    cell = module.Cell(4, 0.9)
    cell.project()
    init = lambda x: torch.zeros_like(x[1])  # noqa: E731
    return DEQ.from_update(cell, init=init), (edges, drawn(1, 7, 4, seed=1).double())


def multiscale(module: ModuleType) -> tuple[DEQ, Any]:
    layer = module.Classifier(4).layer
    return layer, {"fine": drawn(2, 4, 8, 8).double(), "coarse": drawn(2, 8, 4, 4).double()}


def imaging(module: ModuleType) -> tuple[DEQ, Any]:
    return DEQ.from_update(module.Cell(3, 0.5)), drawn(2, 1, 16, 16).double()


def thinking(module: ModuleType) -> tuple[DEQ, Any]:
    """Without a fixed input: logits of 5 symbols for 4 positions."""
    update = module.Thinking(module.NextEnergy(5, 4, 4), 2.0)
    return DEQ.from_update(update, init=lambda x: torch.zeros(2, 4, 5).double()), torch.ones(
        2, 4, dtype=torch.int64
    )


def with_decay(module: ModuleType) -> tuple[DEQ, Any]:
    step = ActivationStep(0.1 * module.network(8, 2), LayerNormLagrangian())
    return DEQ(step), drawn(2, 5, 8).double()


CASES = {
    "monotone_operator_network": (monotone, 400),
    "implicit_graph_network": (graph, 400),
    "multiscale_deq": (multiscale, 100),
    "deep_equilibrium_imaging": (imaging, 800),
    "energy_based_transformer": (thinking, 100),
    "energy_transformer": (with_decay, 200),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_long_iterations(name: str, published: Load) -> None:
    build, evaluations = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer, x = build(published(name))
    layer.double().train()
    layer.max_steps = 1000
    damping = 0.3 if name == "monotone_operator_network" else 1.0
    ways = layer(x, tolerance=1e-11), layer.unrolled(evaluations, damping=damping)(x)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    slopes: list[Any] = []
    for value in ways:
        leaves = pytree.tree_leaves(value)
        loss = torch.stack([leaf.mul(drawn(*leaf.shape).double()).sum() for leaf in leaves]).sum()
        options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        slopes.append(torch.autograd.grad(loss, parameters, **options))
    torch.testing.assert_close(*(pytree.tree_leaves(value) for value in ways), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-8)
    assert max(float(slope.abs().max()) for slope in slopes[1]) > 1e-3
    assert layer.last is not None and layer.last.converged.all()


def test_three_ways_to_the_monotone_equilibrium(published: Load) -> None:
    """Where relu is the identity on the equilibrium's support, it solves a linear system."""
    module = published("monotone_operator_network")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        cell = module.Cell(6).double()
    x = drawn(3, 6).double()
    options = {"tolerance": 1e-12, "max_steps": 3000, "adjoint": None}
    u = module.peaceman_rachford(cell)(x, **options)
    z = DEQ.from_update(cell, init="zeros")(x, **options)
    torch.testing.assert_close(u.relu(), z, rtol=1e-9, atol=1e-10)
    weight = cell.linear.weight.detach()
    symmetric = torch.eye(6).double() - (weight + weight.T) / 2
    assert float(torch.linalg.eigvalsh(symmetric).min()) >= 0.1 - 1e-12
    for state, source in zip(z.detach(), x, strict=True):
        active = state > 1e-8  # an inactive unit may be positive by rounding
        inside = torch.eye(int(active.sum())).double() - weight[active][:, active]
        torch.testing.assert_close(state[active], torch.linalg.solve(inside, source[active]))


def test_generated_data(published: Load) -> None:
    module = published("generated")
    boards = module.boards()
    assert boards.shape == (288, 16)
    assert len(boards.unique(dim=0)) == 288
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        given, answers = module.puzzles(boards[:100], boards, 20, 9)
        first, second, flow = module.moving_textures(2)
    assert ((given == answers) | (given == 0)).all() and ((given == 0).sum(1) == 9).all()
    assert ((answers[:, None] == boards[:100]).all(-1).any(1)).all()
    # The first frame is the second one, read where the flow points.
    moved = torch.nn.functional.grid_sample(
        second, module.grid(flow), align_corners=False, padding_mode="reflection"
    )
    torch.testing.assert_close(moved, first)
    edges, features, labels = module.rings(3, 4)
    assert torch.equal(edges.sum(1), torch.ones(12)) and torch.equal(edges.sum(0), torch.ones(12))
    assert torch.equal(
        edges @ torch.arange(12.0), torch.arange(12.0).view(3, 4).roll(1, 1).flatten()
    )
    assert labels.tolist() == [0] * 4 + [1] * 4 + [0] * 4 and features.sum() == 3
