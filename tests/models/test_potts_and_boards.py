"""Potts models and factored attention; learned groups; the board solver."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import networkx
import pytest
import torch
from torch import Tensor

import solvers
from cases.spin_models import all_colours, coupling_error, draw_exactly, samples_of
from cases.spin_models import couplings as random_couplings
from implicit_attn.data import sudoku_pairs
from implicit_attn.data.sudoku import SudokuSymmetries, solve_sudoku, unique_puzzles, units
from implicit_attn.energies.spins import zero_sum
from implicit_attn.models import (
    BoardSolver,
    BoardUpdate,
    FactoredAttention,
    PottsModel,
    fit_pseudolikelihood,
    learn_groups,
)
from implicit_attn.models.boards import _drawn, maximal_cliques, strong_pairs
from implicit_attn.models.potts import ROWS
from implicit_attn.weights import load_pretrained

# The Potts model: its conditionals by enumeration, its gradient by the formula, its gauge.


SITES, COLOURS = 4, 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model_of(
    seed: int = 0, *, sites: int = SITES, scale: float = 1.0, field: float = 1.0
) -> PottsModel:
    model = PottsModel(sites, COLOURS).double()
    drawn = random_couplings(sites, COLOURS, scale, generator(seed))
    with torch.no_grad():
        model.couplings.weight = drawn
        model.field.copy_(field * torch.randn(sites, COLOURS, generator=generator(seed + 1)))
    return model


def colours(samples: int = 5, sites: int = SITES, seed: int = 2) -> Tensor:
    return torch.randint(COLOURS, (samples, sites), generator=generator(seed))


def test_logits_are_the_conditionals_of_the_joint_distribution() -> None:
    model = model_of()
    states = all_colours(SITES, COLOURS)
    weight = (-model.energy(states)).exp().view((COLOURS,) * SITES)
    conditional = torch.softmax(model.logits(states), -1)
    for site in range(SITES):
        wanted = (weight / weight.sum(site, keepdim=True)).movedim(site, -1)
        # Entry [s] of the others, then every colour of the site.
        found = conditional[:, site].view(*(COLOURS,) * SITES, COLOURS).select(site, 0)
        torch.testing.assert_close(found, wanted)


def test_gradient_of_the_pseudo_likelihood() -> None:
    """-<(S_i^a - p_i^a) S_j^b> / N, and the transposed term."""
    model, s = model_of(), colours(7)
    states = model.one_hot(s)
    model.pseudo_likelihood(s).backward()
    surprise = states - torch.softmax(model.logits(s), -1)
    wanted = -torch.einsum("nia,njb->ijab", surprise, states) / (len(s) * SITES)
    wanted = wanted + wanted.permute(1, 0, 3, 2)
    rows, columns = torch.triu_indices(SITES, SITES, 1)
    torch.testing.assert_close(model.couplings.free.grad, wanted[rows, columns])
    assert model.field.grad is not None
    torch.testing.assert_close(model.field.grad, -surprise.sum(0) / (len(s) * SITES))


def test_one_masked_site_estimates_the_pseudo_likelihood_without_bias() -> None:
    model, s = model_of(), colours(6)
    log_p = torch.log_softmax(model.logits(s), -1).gather(2, s.unsqueeze(2)).squeeze(2)
    # The mean over the masked site of the loss of predicting it, as masked modelling draws it.
    torch.testing.assert_close(model.pseudo_likelihood(s), -log_p.mean(0).mean())
    hidden = s.clone()
    hidden[:, 1] = (hidden[:, 1] + 1) % COLOURS
    torch.testing.assert_close(model.logits(hidden)[:, 1], model.logits(s)[:, 1])


def test_a_change_of_gauge_changes_no_conditional() -> None:
    model, other, s = model_of(), model_of(), colours(9)
    shift = torch.randn(SITES, SITES, COLOURS, dtype=torch.float64, generator=generator(7))
    shift = shift * (1 - torch.eye(SITES, dtype=torch.float64)).unsqueeze(2)
    moved = model.couplings.weight + shift[:, :, :, None] + shift.transpose(0, 1)[:, :, None, :]
    with torch.no_grad():
        other.couplings.weight = moved
        other.field.sub_(shift.sum(1))  # K_ij^{a} of all j acts on site i as a field
    torch.testing.assert_close(other.logits(s).softmax(-1), model.logits(s).softmax(-1))
    torch.testing.assert_close(zero_sum(moved), zero_sum(model.couplings.weight))
    assert coupling_error(moved, model.couplings.weight) < 1e-12
    assert float((moved - model.couplings.weight).detach().norm()) > 1


def test_the_fit_recovers_the_couplings_as_samples_grow() -> None:
    truth = model_of(3, sites=5, scale=0.8, field=0.3)
    errors = []
    for number in (500, 20_000):
        with torch.no_grad():
            data = samples_of(truth.energy, 5, COLOURS, number, seed=4)
        model = PottsModel(5, COLOURS).double()
        fit = fit_pseudolikelihood(model, data, 1e-6, steps=200, tolerance=1e-3)
        assert fit.converged and fit.gradient <= 1e-3
        errors.append(coupling_error(model.couplings.weight, truth.couplings.weight))
    assert errors[1] < 0.1 < errors[0]


# Factored attention as a Potts model: rank, row sums, three sites, gradients.


def drawn(sites: int, colours: int, heads: int, rows: str, power: int = 1) -> FactoredAttention:
    """A model with all parameters at random, float64."""
    generator = torch.Generator().manual_seed(0)
    model = FactoredAttention(sites, colours, heads, rows, power).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def drawn_colours(model: FactoredAttention, samples: int = 4) -> Tensor:
    shape = (samples, model.sites)
    return torch.randint(model.colours, shape, generator=torch.Generator().manual_seed(1))


# With 9 heads of 4 sites and 3 colours the product with J is cheaper than the heads.
@pytest.mark.parametrize("heads", [1, 9])
@pytest.mark.parametrize("rows", ROWS)
def test_logits_are_those_of_the_couplings(rows: str, heads: int) -> None:
    model = drawn(4, 3, heads, rows)
    s = drawn_colours(model)
    couplings = model.couplings()
    wanted = model.field.expand(len(s), -1, -1).clone()
    for i in range(4):
        for j in range(4):
            wanted[:, i] += couplings[i, j].T[s[:, j]]
    torch.testing.assert_close(model.logits(s), wanted)
    assert bool((couplings.diagonal() == 0).all())
    torch.testing.assert_close(model.penalty(), 0.5 * couplings.square().sum())


@pytest.mark.parametrize("heads", [1, 4, 9])
def test_the_error_of_the_best_heads_is_the_tail_of_the_singular_values(heads: int) -> None:
    couplings = random_couplings(5, 3, 1.0, torch.Generator().manual_seed(2))
    sigma = torch.linalg.svdvals(couplings.reshape(25, 9))
    model = FactoredAttention.from_couplings(couplings, heads)
    error = (model.couplings() - couplings).norm()
    torch.testing.assert_close(error, sigma[heads:].square().sum().sqrt(), atol=1e-12, rtol=1e-9)
    assert heads == 9 or float(error.detach()) > 0.1  # 9 = min(N^2, d^2) is exact


@pytest.mark.parametrize("heads", [1, 7])
def test_softmax_rows_give_every_site_the_same_sum_of_couplings(heads: int) -> None:
    sums = drawn(5, 3, heads, "softmax").couplings().sum(1)
    torch.testing.assert_close(sums, sums[:1].expand_as(sums), atol=1e-14, rtol=1e-12)
    for rows in ("sink", "linear"):
        free = drawn(5, 3, heads, rows).couplings().sum(1)
        assert float((free - free[:1]).detach().abs().max()) > 0.05
    assert bool((drawn(5, 3, heads, "sink").attention().sum(-1) < 1).all())


def test_the_rules_of_sudoku_are_one_softmax_head() -> None:
    edges, equal = sudoku_pairs(), torch.eye(9, dtype=torch.float64)
    model = FactoredAttention(81, 9, rows="softmax").double()
    with torch.no_grad():
        model.scores.copy_(torch.where(edges, 0.0, -100.0))
        model.values.copy_(-20 * equal)  # 20 neighbours of weight 1/20 each
    rules = -edges.double()[..., None, None] * equal
    torch.testing.assert_close(model.couplings(), rules, atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("rows", ROWS)
def test_squared_values_are_couplings_of_three_sites(rows: str) -> None:
    model = drawn(4, 3, 2, rows, power=2)
    s, weights, values = drawn_colours(model), model.attention(), model.values
    triples = torch.einsum(
        "hij,hik,har,hrb,hrc->ijkabc", weights, weights, model.output, values, values
    )
    states = model.one_hot(s)
    wanted = model.field + torch.einsum("ijkabc,mjb,mkc->mia", triples, states, states)
    torch.testing.assert_close(model.logits(s), wanted)
    with pytest.raises(ValueError, match="power must be 1"):
        model.couplings()


def test_squared_values_learn_three_sites_where_pairs_cannot() -> None:
    """Six spins whose triples (0 1 2) and (3 4 5) multiply to 1: no pair is correlated."""
    states = all_colours(6, 2)
    spins = 1.0 - 2.0 * states
    log_weight = 1.5 * (spins[:, :3].prod(1) + spins[:, 3:].prod(1))
    generator = torch.Generator().manual_seed(5)
    data = states[draw_exactly(log_weight, 4000, generator)]
    # p(s_i | rest) = sigmoid(2 * 1.5 * s_i s_j s_k), the same at every site.
    right = torch.sigmoid(torch.tensor(3.0)).item()
    bayes = -right * math.log(right) - (1 - right) * math.log(1 - right)
    losses = {}
    for power in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = FactoredAttention(6, 2, heads=2, rows="sink", power=power)
        fit = fit_pseudolikelihood(model, data, solver="adam", steps=300, batch=500, rate=0.1)
        assert fit.status == "max_steps"
        losses[power] = float(model.pseudo_likelihood(data).detach())
    assert losses[2] < bayes + 0.02
    assert losses[1] > math.log(2) - 0.01


# Fits by pseudo-likelihood: what the record says, and that it is true.


def data(samples: int = 60) -> Tensor:
    """Four sites of three colours; the second follows the first, nine times in ten."""
    generator = torch.Generator().manual_seed(0)
    s = torch.randint(3, (samples, 4), generator=generator)
    follow = torch.rand(samples, generator=generator) < 0.9
    s[:, 1] = torch.where(follow, s[:, 0], s[:, 1])
    return s


def test_a_converged_fit_is_at_the_minimum() -> None:
    model = PottsModel(4, 3).double()
    fit = fit_pseudolikelihood(model, data(), 0.01, steps=200, tolerance=1e-6)
    assert fit.status == "converged" and fit.gradient <= 1e-6
    objective = model.pseudo_likelihood(data()) + 0.01 * model.penalty()
    gradients = torch.autograd.grad(objective, list(model.parameters()))
    assert max(float(each.abs().max()) for each in gradients) < 1e-6
    assert math.isclose(fit.losses[-1], float(objective.detach()), rel_tol=1e-9)
    assert fit.losses[0] == pytest.approx(math.log(3))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_too_few_steps_are_called_so() -> None:
    fit = fit_pseudolikelihood(PottsModel(4, 3), data(), 0.01, steps=2)
    assert (fit.status, fit.steps, fit.converged) == ("max_steps", 2, False)
    assert fit.gradient > 1e-5


@pytest.mark.parametrize("schedule", ["one-cycle", "constant"])
def test_adam_finds_the_same_minimum(schedule: str) -> None:
    exact, model = PottsModel(4, 3), PottsModel(4, 3)
    fit_pseudolikelihood(exact, data(), 0.01, steps=100)
    seen: list[tuple[int, float]] = []
    fit = fit_pseudolikelihood(
        model, data(), 0.01, "adam", steps=300, schedule=schedule,
        watch=lambda step, loss: seen.append((step, loss)),
    )  # fmt: skip
    assert fit.status == "max_steps" and math.isnan(fit.gradient)
    torch.testing.assert_close(model.couplings.weight, exact.couplings.weight, atol=2e-2, rtol=0)
    assert seen == list(enumerate(fit.losses, 1)) and len(seen) == 300


@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
def test_a_loss_that_is_not_finite_is_told_and_changes_nothing(solver: str) -> None:
    model = PottsModel(4, 3)
    with torch.no_grad():
        model.field[0, 0] = float("nan")
    fit = fit_pseudolikelihood(model, data(), solver=solver)
    assert fit.status == "nonfinite"
    assert not bool(model.couplings.free.any())


# Groups of cells: from boards to couplings to a graph to its cliques.


def pairs_of(edges: list[tuple[int, int]], nodes: int) -> Tensor:
    pairs = torch.zeros(nodes, nodes, dtype=torch.bool)
    for a, b in edges:
        pairs[a, b] = pairs[b, a] = True
    return pairs


def test_the_groups_of_sudoku_are_its_units() -> None:
    assert maximal_cliques(sudoku_pairs()) == sorted(sorted(unit.tolist()) for unit in units())


@pytest.mark.parametrize("seed", range(6))
def test_cliques_of_random_graphs(seed: int) -> None:
    graph = networkx.gnp_random_graph(12, 0.2 + 0.12 * seed, seed=seed)
    expected = sorted(sorted(clique) for clique in networkx.find_cliques(graph) if len(clique) > 1)
    assert maximal_cliques(pairs_of(list(graph.edges), 12)) == expected


def test_strong_pairs_lie_above_the_widest_gap() -> None:
    colours = torch.eye(3, dtype=torch.float64) - 1 / 3
    weights = torch.tensor(
        [[0, 5.0, 0.2, 0.1], [4.8, 0, 4.0, 0.3], [0.2, 4.4, 0, 0.2], [0.3, 0.1, 0, 0]]
    )
    found, gap = strong_pairs(weights.double()[..., None, None] * colours)
    assert torch.equal(found, pairs_of([(0, 1), (1, 2)], 4))
    assert gap == pytest.approx((4.2 - 0.2) / 4.2)  # means of both directions
    assert strong_pairs(torch.zeros(4, 4, 3, 3))[1] == 0


def latin_squares(number: int, side: int, generator: torch.Generator | None = None) -> Tensor:
    """Random ones, (number, side * side): the cyclic one, its lines and colours permuted."""
    generator = generator or torch.Generator().manual_seed(0)
    orders = [torch.rand(number, side, generator=generator).argsort(1) for _ in range(3)]
    cyclic = (torch.arange(side)[:, None] + torch.arange(side)) % side
    squares = cyclic.expand(number, side, side)
    squares = squares.gather(1, orders[0][:, :, None].expand_as(squares))
    squares = squares.gather(2, orders[1][:, None, :].expand_as(squares))
    return orders[2].gather(1, squares.flatten(1))


def test_rows_and_columns_are_learned_from_latin_squares() -> None:
    """Any group structure, and no symmetry of the boards is used but that of the colours."""
    side, boards = 4, latin_squares(100, 4)
    rows = [list(range(side * k, side * k + side)) for k in range(side)]
    columns = [list(range(k, side * side, side)) for k in range(side)]
    state = torch.random.get_rng_state()
    assert learn_groups(boards, side, steps=50) == sorted(rows + columns)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_groups_of_sudoku_are_learned_from_boards() -> None:
    puzzles, solutions = unique_puzzles(8, 0)
    index = torch.arange(600) % 8
    generator = torch.Generator().manual_seed(0)
    boards = SudokuSymmetries()(puzzles[index], solutions[index], generator)[1]
    found = learn_groups(boards[:500] - 1, 9, steps=40)
    assert found == sorted(unit.tolist() for unit in units())


def test_groups_that_the_boards_do_not_show_are_refused() -> None:
    """Too few boards, too few steps, and cells that are alike instead of different."""
    boards = latin_squares(50, 4)
    with pytest.raises(ValueError, match=r"at least 33 to learn groups of 16 cells .* got 32"):
        learn_groups(boards[:32], 4)
    with pytest.raises(ValueError, match=r"the widest gap .* give more boards or steps"):
        learn_groups(boards, 4, steps=2)
    alike = boards[:, [0, 5, 10, 0]]
    with pytest.raises(ValueError, match=r"at most once in a group, .* in the cells \[0, 3\]"):
        learn_groups(alike, 4, steps=20)


# The board solver: its formula, its symmetries, its gradients, its solves.


UNITS = units().tolist()
LATIN = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8]]
SMALL: dict[str, Any] = {"cells": 9, "colours": 3, "features": 4, "width": 6, "iterations": 5}
PUZZLES = torch.tensor([[1, 0, 0, 0, 0, 2, 0, 3, 0], [0, 2, 0, 0, 0, 0, 0, 0, 1]])


def solver(groups: list[list[int]] = LATIN, **options: Any) -> Any:
    torch.manual_seed(0)
    return BoardSolver(groups, **(SMALL | options)).double().eval()


def test_the_update_is_its_formula() -> None:
    """Groups of unequal sizes, cells in no group, in one and in several."""
    groups = [[0, 1, 2], [2, 3]]
    model = solver(groups, cells=5, colours=3)
    update = model.update
    z = torch.randn(2, 5, 3, 4, dtype=torch.float64).tanh()
    marks = model.marks(torch.tensor([[0, 1, 0, 3, 0], [2, 0, 0, 0, 0]]))
    found = update(z, marks)
    relu, linear = torch.relu, torch.nn.functional.linear
    for b in range(2):
        for i in range(5):
            for a in range(3):
                cell = relu(update.to_cell(z[b, i].sum(0) / 3**0.5))
                total = linear(cell, update.from_cell.weight)
                for group in (group for group in groups if i in group):
                    member = relu(update.to_group(z[b, group, a].sum(0) / len(group) ** 0.5))
                    total = total + linear(member, update.from_group.weight)
                total = total + linear(z[b, i, a], update.own.weight)
                total = total + update.embedding(marks[b, i, a])
                r, s = update.output(relu(total)).split(4)
                expected = z[b, i, a] + s.sigmoid() * (r.tanh() - z[b, i, a])
                torch.testing.assert_close(found[b, i, a], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(update(z, update.prepare(marks)), found, rtol=0, atol=0)


def test_gradients_of_the_update() -> None:
    model = solver()
    marks = model.marks(PUZZLES[:1])
    z = torch.rand(1, 9, 3, 4, dtype=torch.float64, requires_grad=True)
    for parameter in model.update.parameters():  # no kink of a relu near the points
        torch.nn.init.normal_(parameter, std=0.5)
    assert torch.autograd.gradcheck(lambda z: model.update(z, marks), (z,))


def test_symmetries_of_sudoku_are_kept() -> None:
    """Exactly those: a permutation of cells that breaks the groups changes the answer."""
    model = solver(UNITS, cells=81, colours=9)
    puzzles, solutions = unique_puzzles(3, 0)
    # What moves the puzzle must move the answer: follow it by numbered digits of the cells.
    moved, _ = SudokuSymmetries()(puzzles, solutions, torch.Generator().manual_seed(1))
    before, after = (model(boards).amax(2).sort(1).values for boards in (puzzles, moved))
    torch.testing.assert_close(before, after, rtol=1e-9, atol=1e-10)
    other = model(puzzles[:, torch.randperm(81, generator=torch.Generator().manual_seed(0))])
    assert (other.amax(2).sort(1).values - before).abs().max() > 1e-6


def test_colours_are_alike() -> None:
    model = solver()
    swapped = torch.tensor([0, 3, 1, 2])[PUZZLES]
    torch.testing.assert_close(model(swapped)[..., [2, 0, 1]], model(PUZZLES), rtol=0, atol=1e-12)


def test_iterations_in_evaluation_and_in_training() -> None:
    model = solver(window=2)
    states = list(model.trajectory(PUZZLES, 7))
    torch.testing.assert_close(model(PUZZLES), states[4], rtol=0, atol=0)
    torch.testing.assert_close(model(PUZZLES, iterations=7), states[6], rtol=0, atol=0)
    model.train()
    kept = model(PUZZLES, iterations=7)
    assert kept.shape == (2, 2, 9, 3)
    torch.testing.assert_close(kept.detach(), torch.stack(states[5:]).detach(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="iterations must be >= the window, 2, got 1"):
        model(PUZZLES, iterations=1)


def test_gradients_reach_back_through_the_window_alone() -> None:
    wide, narrow = solver(window=4).train(), solver(window=1).train()
    for model in (wide, narrow):
        model(PUZZLES, 4)[-1][PUZZLES == 0].square().sum().backward()
    gradients = [model.update.own.weight.grad for model in (wide, narrow)]
    assert (gradients[0] - gradients[1]).abs().max() > 1e-6
    one = solver()
    marks = one.update.prepare(one.marks(PUZZLES))
    state = one.update.initial(marks)
    for _ in range(3):
        state = one.update.advance(state, marks).detach()
    one.classify(one.update.advance(state, marks))[PUZZLES == 0].square().sum().backward()
    torch.testing.assert_close(one.update.own.weight.grad, gradients[1], rtol=1e-10, atol=1e-12)


def latin_puzzles(number: int, unknown: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    boards = latin_squares(number, 4, generator) + 1
    hidden = torch.rand(boards.shape, generator=generator).argsort(1) < unknown
    return boards.masked_fill(hidden, 0), boards


LINES = [list(range(4 * k, 4 * k + 4)) for k in range(4)] + [
    list(range(k, 16, 4)) for k in range(4)
]


@pytest.fixture(scope="module")
def trained() -> Any:
    """A solver of Latin squares of side 4 after 100 steps on seven unknown cells."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = BoardSolver(LINES, 16, 4, features=12, width=24, iterations=4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        given, wanted = latin_puzzles(32, 7, generator)
        unknown = given == 0
        answers = model(given)[:, unknown].flatten(0, 1)
        targets = (wanted[unknown] - 1).repeat(4)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(answers, targets).backward()
        optimizer.step()
    return model.eval()


def test_it_learns_to_complete_boards_that_it_has_not_seen(trained: Any) -> None:
    """Latin squares: whole boards right, more of them after four iterations than after one."""
    given, wanted = latin_puzzles(300, 7, torch.Generator().manual_seed(1))
    found = [trained(given, iterations=n).argmax(-1) + 1 for n in (1, 4)]
    shares = [((one == wanted) | (given > 0)).all(1).double().mean() for one in found]
    assert shares[0] < 0.5 and shares[1] > 0.7, shares


def test_guesses_are_taken_only_where_they_agree_with_the_groups(trained: Any) -> None:
    given, _ = latin_puzzles(60, 11, torch.Generator().manual_seed(2))
    with torch.no_grad():
        options: Any = {"max_steps": 8, "on_failure": "ignore"}
        plain = trained.solve(given, **options)
        found = trained.solve(given, guesses=4, **options)
    assert not plain.guesses.any() and not plain.consistent.all()
    assert found.consistent.sum() > plain.consistent.sum()
    assert torch.equal(found.guesses == 0, plain.consistent) and found.guesses.max() == 4
    assert (found.guesses[~found.consistent] == 4).all()
    assert (found.evaluations > plain.evaluations)[found.guesses > 0].all()
    assert ((found.digits == given) | (given == 0)).all()
    whole = found.digits[:, LINES].sort(-1).values == torch.arange(1, 5)
    assert torch.equal(whole.flatten(1).all(1), found.consistent)
    kept = found.guesses.bool() & ~found.consistent  # no guess agreed: the first answer stays
    for name in ("digits", "value", "status", "residual", "steps"):
        for same in (kept, plain.consistent):
            assert torch.equal(getattr(found, name)[same], getattr(plain, name)[same]), name


def test_a_given_cell_is_never_guessed() -> None:
    """Not even where it is the least certain; its digits, 1 and 2, stay."""
    model, boards = solver(), torch.tensor([[1, 1, 2, 2, 0, 0, 0, 0, 0]])
    asked, solve = [], model._solve

    def unsure_of_givens(boards: Tensor, *arguments: Any) -> Any:
        asked.append(boards)
        found = solve(boards, *arguments)
        found.value = 9.0 * torch.eye(3).repeat(1, 3, 1) * (boards == 0).unsqueeze(2)
        return found

    model._solve = unsure_of_givens
    with torch.no_grad():
        model.solve(boards, max_steps=1, guesses=3, on_failure="ignore")
    assert [int((each > 0).sum()) for each in asked] == [4, 5, 5, 5]
    assert all(torch.equal(each[:, :4], boards[:, :4]) for each in asked)


def test_a_board_without_a_cell_to_guess() -> None:
    full = torch.full((1, 9), 1)  # contradicts itself
    assert solver().solve(full, guesses=2, on_failure="ignore").guesses.item() == 0
    for wrong in ({"guesses": -1}, {"guesses": 1, "stop": "converged"}):
        with pytest.raises(ValueError, match="guesses"):
            solver().solve(full, **wrong)


def test_boards_go_on_from_carried_states() -> None:
    """The last boards of a batch from given states, the others from zero."""
    model = solver(window=2).train()
    _, half = model(PUZZLES[1:], 3, torch.empty(0))
    logits, states = model(PUZZLES, 3, half)
    assert logits.shape == (2, 2, 9, 3) and not states.requires_grad
    torch.testing.assert_close(logits[:, :1], model(PUZZLES[:1], 3), rtol=0, atol=1e-12)
    torch.testing.assert_close(logits[:, 1:], model(PUZZLES[1:], 6), rtol=0, atol=1e-12)
    unknown = PUZZLES == 0
    torch.testing.assert_close(
        model.classify(states)[unknown], logits[-1][unknown], rtol=0, atol=1e-12
    )
    assert torch.equal(logits[-1].argmax(-1)[~unknown] + 1, PUZZLES[~unknown])


def test_no_boards_have_no_answers() -> None:
    """As in a last batch of nothing."""
    model = solver(window=2)
    assert model(PUZZLES[:0]).shape == (0, 9, 3)
    assert model.train()(PUZZLES[:0]).shape == (2, 0, 9, 3)
    assert model.solve(PUZZLES[:0], stop="converged").digits.shape == (0, 9)
    answer = model.eval().solve(PUZZLES[:0])
    assert answer.digits.shape == (0, 9) and answer.statuses == [] and "no samples" in repr(answer)


SOLVED_BOARD = "".join(str(digit) for digit in unique_puzzles(1, 0)[1][0].tolist())


def test_boards_are_read_and_answered_in_the_shape_they_have() -> None:
    model = solver(UNITS, cells=81, colours=9).float()
    text = SOLVED_BOARD[:-1] + "."
    board = torch.tensor([int(sign) for sign in SOLVED_BOARD[:-1] + "0"])
    lines = "\n".join(" | ".join(text[k : k + 9]) for k in range(0, 81, 9))
    forms: list[Any] = [text, text.replace(".", "0"), [text] * 2, board, board.view(9, 9)]
    forms += [board[None], board.view(1, 9, 9).to(torch.uint8), f"{lines}\n", [lines, text]]
    shapes = [(81,), (81,), (2, 81), (81,), (9, 9), (1, 81), (1, 9, 9), (81,), (2, 81)]
    for form, shape in zip(forms, shapes, strict=True):
        found = model.solve(form, max_steps=2, on_failure="ignore")
        assert found.digits.shape == shape and found.digits.dtype == torch.int64
        assert torch.equal(found.digits.view(-1, 81)[0, :80], board[:80])
        assert found.value.shape == (found.digits.numel() // 81, 81, 9)
    for wrong in (text[:80], "x" + text[1:], [text, text + "."]):
        with pytest.raises(ValueError, match="puzzles"):
            model.solve(wrong)
    with pytest.raises(TypeError, match="puzzles must be a tensor, a string or a list"):
        model.solve(board.tolist())


def test_a_board_ends_at_its_first_answer_that_agrees_with_the_groups() -> None:
    model = solver(UNITS, cells=81, colours=9)
    one = "." + SOLVED_BOARD[1:]
    wrong = SOLVED_BOARD[:80] + SOLVED_BOARD[79]  # twice in the last row
    with pytest.warns(solvers.SolveWarning):
        answer = model.solve([SOLVED_BOARD, wrong], max_steps=4)
    with pytest.raises(solvers.SolveError) as caught:
        model.solve([SOLVED_BOARD, wrong], max_steps=4, on_failure="raise")
    assert torch.equal(caught.value.solution.digits, answer.digits)  # type: ignore[attr-defined]
    assert answer.consistent.tolist() == [True, False] and not answer.converged.any()
    assert answer.statuses == ["STOPPED", "MAX_STEPS"]
    assert answer.steps.tolist() == [1, 4] and answer.evaluations.tolist() == [2, 5]
    state = [model.update.initial(model.update.prepare(model.marks(answer.digits[:1])))]
    prepared = model.update.prepare(model.marks(answer.digits[:1]))
    for _ in range(2):
        state.append(model.update.advance(state[-1], prepared))
    residual = (state[2] - state[1]).norm() / state[2].norm()
    torch.testing.assert_close(answer.residual[0], residual.detach(), rtol=1e-10, atol=0)
    found = model.classify(state[1])[answer.value[:1].isfinite()]  # all other colours are excluded
    torch.testing.assert_close(answer.value[0].amax(-1), found, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="stop must be one of"):
        model.solve(one, stop="never")
    with pytest.raises(TypeError, match="tolerance"):
        model.solve(one, tolerance=solvers.Tolerance())


HARD = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."


def test_a_hard_board_is_solved_or_drawn_as_what_it_is() -> None:
    """The drawing of a board is itself a board."""
    model: Any = load_pretrained("sudoku-solver")
    right = torch.tensor(solve_sudoku([int(sign) for sign in HARD.replace(".", "0")])[0])
    with pytest.warns(solvers.SolveWarning):
        answer = model.solve(HARD)
    assert not answer.consistent.any() and answer.statuses == ["MAX_STEPS"]
    drawn, _, state = str(answer).rpartition("\n")
    assert len(drawn.splitlines()) == 9 + 2 and "NOT CONSISTENT" in state
    assert torch.equal(model._read(drawn)[0][0], answer.digits)
    answer = model.solve(HARD, guesses=8)
    assert answer.consistent.all() and answer.statuses == ["STOPPED"]
    assert torch.equal(answer.digits, right)
    assert len(repr(answer)) <= 300 and "NOT" not in str(answer)
    assert len(str(model.solve([HARD] * 9, max_steps=1, on_failure="ignore"))) < 2000


def test_a_board_with_one_blank_cell_is_solved() -> None:
    model: Any = load_pretrained("sudoku-solver")
    for cell in (0, 40, 80):
        answer = model.solve(SOLVED_BOARD[:cell] + "." + SOLVED_BOARD[cell + 1 :])
        assert answer.statuses == ["STOPPED"]
        assert "".join(map(str, answer.digits.tolist())) == SOLVED_BOARD


@pytest.mark.parametrize(("cells", "lines"), [(5, 1), (9, 3), (16, 5), (81, 11)])
def test_boards_of_any_size_are_drawn(cells: int, lines: int) -> None:
    assert len(_drawn([10] * cells).splitlines()) == lines


# Mistakes, by what the error says.


BLANK = torch.zeros(1, 81, dtype=torch.int64)


def fit(**options: Any) -> object:
    return fit_pseudolikelihood(PottsModel(4, 3), data(), **options)


MISTAKES: list[tuple[Callable[[], object], str]] = [
    *[(lambda s=s: PottsModel(SITES, COLOURS).logits(s), message) for s, message in (  # type: ignore[arg-type]
        (torch.zeros(2, 5, dtype=torch.long), r"s must be integers \(B, 4\)"),
        (torch.zeros(2, 4, 2), r"\(B, N, d\), N = 4, d = 3, got"),
        (torch.full((2, 4), 3), r"\[0, 2\], got 3 to 3"),
        (torch.full((2, 4), -1), "got -1"),
        (torch.zeros(2, 4, dtype=torch.bool), "bool"),
        (torch.zeros(0, 4, dtype=torch.long), "at least one sample"),
        ([[0, 1, 2, 0]], "list"),
    )],
    (lambda: FactoredAttention(4, 3, rows="none"), "rows"),
    (lambda: FactoredAttention(4, 3, power=3), "power"),
    (lambda: FactoredAttention.from_couplings(torch.zeros(5, 5, 3, 3), 10), "heads must be <= 9"),
    (lambda: FactoredAttention.from_couplings(torch.zeros(5, 4, 3, 3), 1), "shape"),
    (lambda: FactoredAttention.from_couplings(torch.ones(5, 5, 3, 3), 1), "J_ii"),
    *[(lambda options=options: fit(**options), message) for options, message in (
        ({"l2": -1.0}, "l2"),
        ({"solver": "newton"}, "solver"),
        ({"solver": "adam", "rate": 0.0}, "rate"),
        ({"solver": "adam", "rate": 1e38}, "rate"),
        ({"solver": "adam", "schedule": "none"}, "schedule"),
        ({"rate": 0.1}, "rate needs solver='adam'"),
        ({"solver": "adam", "tolerance": 1e-3}, "tolerance needs solver='lbfgs'"),
        ({"watch": 3}, "watch"),
    )],
    (lambda: fit_pseudolikelihood(torch.nn.Linear(2, 2), data()), "model"),  # type: ignore[arg-type]
    (
        lambda: fit_pseudolikelihood(PottsModel(4, 3).requires_grad_(False), data()),
        "model must have a parameter",
    ),
    *[(lambda boards=boards: learn_groups(boards, 3, steps=1), message) for boards, message in (  # type: ignore[arg-type]
        (torch.zeros(2, 4), r"boards must be integers \(B, N\), got torch.float32"),
        ([[0, 1]], "boards must be integers"),
        (torch.zeros(4, 2, dtype=torch.int64), r"boards must be \(M, N\) with N >= 3"),
        (torch.full((20, 4), 5), r"boards must lie in \[0, 2\], got 5 to 5"),
    )],
    *[(lambda changes=changes: solver(**changes), message) for changes, message in (  # type: ignore[arg-type]
        ({"groups": []}, "groups must hold at least one group"),
        ({"groups": [[0, 9]]}, r"groups must hold different cells in 0 .. 8 each, got \[0, 9\]"),
        ({"groups": [[0, 0]]}, "groups must hold different cells"),
        ({"width": 3}, "width must not be 3"),
        ({"window": 6}, "window must be <= iterations, 5, got 6"),
    )],
    *[(lambda board=board: solver()(board), message) for board, message in (
        (PUZZLES[None], r"puzzles must be integers \(B, 9\)"),
        (PUZZLES[:, :8], r"puzzles must be integers \(B, 9\)"),
        (PUZZLES.double(), "puzzles must be integers"),
        (PUZZLES + 1, r"puzzles must lie in \[0, 3\], got 1 to 4"),
        (PUZZLES - 1, "got -1 to 2"),
    )],
    (lambda: BoardUpdate(LATIN, 9, 3)(torch.zeros(1, 9, 3, 24)), "x must be the marks"),
    (
        lambda: BoardUpdate(LATIN, 9, 3)(BLANK, BLANK, mask=torch.ones(1, 9, dtype=torch.bool)),
        "mask must be None",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
