"""Potts models on graphs, and measures of couplings, against energies and known rankings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.energies.spins import zero_sum
from implicit_attn.models import FactoredAttention

pytest.importorskip("sklearn", reason="the examples need the extra [examples]")
FILE = Path(__file__).resolve().parents[2] / "examples/potts/couplings.py"


@pytest.fixture
def potts(load: Callable[[Path], ModuleType]) -> ModuleType:
    return load(FILE)


@pytest.mark.parametrize(
    ("kind", "edges"), [("er-kron", 30), ("er-general", 30), ("tree", 19), ("ring4", 40)]
)
def test_graphs_and_conditionals(potts: ModuleType, kind: str, edges: int) -> None:
    """Symmetric and sparse; ``p(s_i | rest)`` against energies of changed configurations."""
    model = potts.graph_potts(kind, torch.Generator().manual_seed(2), colours=3)
    graph, n = potts.neighbours(model), torch.arange(20)
    assert torch.equal(model.couplings, model.couplings.permute(1, 0, 3, 2))
    assert int(graph.sum()) == 2 * edges and not graph.diagonal().any()
    colours = torch.randint(0, 3, (4, 20), generator=torch.Generator().manual_seed(0))

    def energy(s: Tensor) -> Tensor:
        return torch.stack([0.5 * model.couplings[n[:, None], n, r[:, None], r].sum() for r in s])

    logits = potts.conditional_logits(model, colours).log_softmax(-1)
    for site in (0, 7):
        changed = colours.repeat(3, 1, 1)
        changed[:, :, site] = torch.arange(3)[:, None]
        expected = torch.stack([energy(each) for each in changed], dim=1).log_softmax(1)
        torch.testing.assert_close(logits[:, site], expected)
    chosen = logits.gather(2, colours[:, :, None]).mean().item()
    assert potts.bayes_npl(model, colours) == pytest.approx(-chosen, rel=1e-12)


def test_scores_and_errors(potts: ModuleType) -> None:
    single = torch.zeros(2, 2, 2, 2)
    single[0, 1] = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    torch.testing.assert_close(potts.contact_scores(single)[0, 1], torch.tensor(1.0))
    truth = potts.graph_potts("er-general", torch.Generator().manual_seed(0), colours=3).couplings
    assert potts.coupling_error(1.1 * truth, truth) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("truth", "precision", "area"),
    [([1, 1, 0, 0, 0, 0], 1.0, 1.0), ([0, 0, 0, 0, 1, 1], 0.0, 0.0),
     ([1, 0, 1, 0, 0, 0], 0.5, 7 / 8)],
)  # fmt: skip
def test_precision_and_area(
    potts: ModuleType, truth: list[float], precision: float, area: float
) -> None:
    """Scores 6 to 1 of the pairs (0,1) (0,2) (0,3) (1,2) (1,3) (2,3)."""
    scores, edges = torch.zeros(4, 4), torch.zeros(4, 4).bool()
    rows, columns = torch.triu_indices(4, 4, 1)
    scores[rows, columns] = torch.arange(6.0).flip(0) + 1
    edges[rows, columns] = torch.tensor(truth).bool()
    assert potts.contact_precision(scores, edges) == pytest.approx(precision)
    false_share, true_share = potts.roc_curve(scores, edges)
    assert float(torch.trapezoid(true_share, false_share)) == pytest.approx(area)


class Exact(nn.Module):
    """The conditionals of a Potts model; refuses a call with two masked sites or none."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: Tensor) -> Tensor:
        assert ((tokens == 3).sum(1) == 1).all()
        return self.logits(tokens.clamp_max(2))


def test_the_categorical_jacobian_of_known_couplings(potts: ModuleType) -> None:
    model = potts.graph_potts("tree", torch.Generator().manual_seed(0), sites=5, colours=3)
    sequences = torch.randint(0, 3, (4, 5), generator=torch.Generator().manual_seed(1))
    exact = Exact(lambda tokens: potts.conditional_logits(model, tokens))
    found = potts.categorical_jacobian(exact, sequences, 3, mask=3, batch=7)
    assert potts.coupling_error(found, model.couplings) < 1e-12
    assert not found.diagonal().any() and exact.training
    torch.manual_seed(0)
    factored = FactoredAttention(5, 3, heads=2, rows="sink").double()
    with torch.no_grad():
        factored.values.normal_()
    found = potts.categorical_jacobian(factored, sequences, 3)
    torch.testing.assert_close(zero_sum(found), zero_sum(factored.couplings().detach()))
