"""Steps down an energy: of gradients, of activations, of queries, with momentum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.energies import EnergyCase, build, few_energies, masks, relative_error, tokens
from implicit_attn import DEQ, ActivationStep, EquilibriumBlock, GradientStep
from implicit_attn.energies import (
    AttentionInput,
    BiSoftmaxAttention,
    Field,
    IdentityLagrangian,
    IsingLagrangian,
    Lagrangian,
    LayerNormLagrangian,
    Quadratic,
    ReLUFeedForward,
    ReLULagrangian,
    RMSNorm,
    RMSNormLagrangian,
    SoftmaxAttention,
    SoftmaxLagrangian,
    SphericalLagrangian,
)
from implicit_attn.updates import DescentStep, QueryDescent, TransformerStep
from solvers import Tolerance

DIM = 6


def inputs(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, DIM, generator=generator, dtype=torch.float64)


@few_energies("quadratic-input", "composition", "function", "softmax-cross-tiny-bound")
@pytest.mark.parametrize("mask", ["no-mask", "empty-sample"])
def test_joint_is_one_consistent_triple(case: EnergyCase, mask: str) -> None:
    update = GradientStep(build(case), 0.3)
    z, x = tokens(case)
    chosen = masks()[mask]
    moved, value, gradient = update.joint(z, x, mask=chosen)
    torch.testing.assert_close(moved, update(z, x, mask=chosen), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(value, update.energy(z, x, mask=chosen), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moved, z - 0.3 * gradient, rtol=1e-13, atol=1e-13)
    point = z.clone().requires_grad_()
    (reference,) = torch.autograd.grad(update.energy(point, x, mask=chosen).sum(), point)
    assert relative_error(gradient, reference) <= 1e-9
    if chosen is not None:
        assert torch.equal(moved[~chosen], z[~chosen])


@pytest.mark.parametrize("options", [
    {}, {"hidden": 0}, {"attention": None}, {"activation": "gelu", "causal": True}, {"state_dim": 4},
], ids=str)  # fmt: skip
def test_the_unit_step_of_the_block_is_its_gradient_step(options: dict[str, Any]) -> None:
    """With masked tokens and without, and in its derivatives by state and weights."""
    torch.manual_seed(0)
    block = EquilibriumBlock(DIM, 2, **options).double()
    own, plain = block.deq.update, GradientStep(block.energy)
    x, z = inputs(), inputs(1)[..., : block.state_dim].requires_grad_()
    for mask in (None, torch.tensor([[True, False, True], [False] * 3])):
        found, expected = (step(z, x, mask=mask) for step in (own, plain))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        sources = [z, *block.energy.parameters()]
        slopes = (
            torch.autograd.grad(t.pow(3).sum(), sources, materialize_grads=True, allow_unused=True)
            for t in (found, expected)
        )
        torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-11)
    other = block.deq.replace(block.energy.quadratic, 2.0 * Quadratic()).update
    torch.testing.assert_close(other(z, x), plain(z, x) - z, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [None, torch.tensor([[True, False, True]])], ids=["all", "mask"])
def test_the_jacobian_is_symmetric(mask: Tensor | None) -> None:
    torch.manual_seed(3)
    energy = BiSoftmaxAttention(DIM, heads=2) + ReLUFeedForward(DIM, 9) + Quadratic()
    update, z, x = GradientStep(energy.double(), 0.3), inputs()[:1], inputs(1)[:1]
    assert update.symmetric

    def step(flat: Tensor) -> Tensor:
        return update(flat.view_as(z), x, mask=mask).flatten()

    jacobian: Any = torch.autograd.functional.jacobian(step, z.flatten())
    assert relative_error(jacobian, jacobian.mT) < 1e-12


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"cross": True}], ids=str)
def test_a_query_of_the_transformer_without_keys_attends_to_nothing(options: Any) -> None:
    torch.manual_seed(0)
    step, z, x = TransformerStep(DIM, 2, **options).double(), inputs(), inputs(1)
    pairs = torch.tensor([[True] * 3, [False] * 3, [True, False, True]])
    given = AttentionInput(x, pairs, memory=inputs(2) if step.cross else None)
    n = F.layer_norm(z + x, (DIM,))
    normed = step.attention_norm(n)
    source = normed if given.memory is None else given.memory
    query, (key, value) = step.query(normed), step.key_value(source).chunk(2, -1)
    allowed = pairs.tril() if step.causal else pairs
    q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (query, key, value))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).nan_to_num(0.0)
    h = n + step.output(attended.transpose(1, 2).flatten(2))
    expected = h + step.narrow(F.gelu(step.widen(step.feedforward_norm(h))))
    torch.testing.assert_close(step(z, given), expected, rtol=1e-12, atol=1e-12)
    found: Any = torch.func.jvp(lambda z: step(z, given), (z,), (x,))
    moved, slopes = found
    torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)
    difference = (step(z + 1e-6 * x, given) - step(z - 1e-6 * x, given)) / 2e-6
    torch.testing.assert_close(slopes, difference, rtol=1e-6, atol=1e-7)


WIDE = 8
LAGRANGIANS: dict[str, Lagrangian] = {
    "identity": IdentityLagrangian(),
    "relu": ReLULagrangian(),
    "softmax": SoftmaxLagrangian(),
    "rms": RMSNormLagrangian(),
    "layer-tiny": LayerNormLagrangian(epsilon=1e-6),
    "ising": IsingLagrangian(),
    "sphere": SphericalLagrangian(),
}
MIXED = ("bisoftmax-soft-4", "hopfield-cold", "composition")
CONCAVE = ("relu-none", "softmax-cross-none-1", "conditional", "dense-2", "rbm-ising")
BOUNDED = ("softmax", "rms", "layer-tiny", "ising", "sphere")  # |g| <= sqrt(d)


def legendre(lagrangian: Lagrangian, z: Tensor, x: Tensor | None) -> Tensor:
    """``sum_i [z_i.g_i - Lag(z_i) - x_i.g_i]`` with g by automatic differentiation."""
    value = lagrangian.token_value(z)
    (g,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    pull = z if x is None else z - x
    return ((pull * g).sum(-1) - value).sum(1)


@pytest.mark.parametrize("with_input", [True, False])
@pytest.mark.parametrize("name", ["softmax", "layer-tiny", "sphere"])
@few_energies(*MIXED)
def test_monitored_energy_and_its_gradient(case: EnergyCase, name: str, with_input: bool) -> None:
    lagrangian = LAGRANGIANS[name]
    update = ActivationStep(build(case), lagrangian, 0.3)
    z, _ = tokens(case)
    x = tokens(case, seed=5)[0] if with_input else None
    moved, value, slope = update.joint(z, x)
    torch.testing.assert_close(moved, update(z, x), rtol=1e-12, atol=1e-12)
    point, g = z.clone().requires_grad_(), lagrangian.activation(z)
    monitored = legendre(lagrangian, point, x) + update.energy(lagrangian.activation(point), x)
    torch.testing.assert_close(value, monitored.detach(), rtol=1e-11, atol=1e-11)
    (reference,) = torch.autograd.grad(monitored.sum(), point)
    assert relative_error(slope, reference) <= 1e-9
    # The step follows the force z - x + dE_int/dg, which holds no derivative of the activation.
    force = (z if x is None else z - x) + update.energy.grad(g, x)
    torch.testing.assert_close(moved, z - 0.3 * force, rtol=1e-12, atol=1e-12)
    assert ((force * slope).sum((1, 2)) >= -1e-9).all()  # downhill in every sample


@pytest.mark.parametrize("name", LAGRANGIANS)
@few_energies("bisoftmax-soft-4")
def test_masked_tokens_do_not_move_and_do_not_count(case: EnergyCase, name: str) -> None:
    update = ActivationStep(build(case), LAGRANGIANS[name], 0.3)
    z, x = tokens(case)[0], tokens(case, seed=5)[0]
    mask = masks()["empty-sample"]
    assert mask is not None
    moved, value, slope = update.joint(z, x, mask=mask)
    assert torch.equal(moved[~mask], z[~mask]) and (slope[~mask] == 0).all()
    assert torch.equal(update(z, x, mask=mask)[~mask], z[~mask])
    hidden = ~mask.unsqueeze(-1)
    other, other_value, _ = update.joint(
        z.masked_fill(hidden, 7.0), x.masked_fill(hidden, -3.0), mask=mask
    )
    torch.testing.assert_close(other[mask], moved[mask], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(other_value, value, rtol=1e-12, atol=1e-12)
    point = z.clone().requires_grad_()
    (reference,) = torch.autograd.grad(update.joint(point, x, mask=mask)[1].sum(), point)
    assert relative_error(slope, reference) <= 1e-9


@pytest.mark.parametrize("name", ["relu", "rms", "ising"])
@few_energies(*CONCAVE)
def test_unit_step_never_raises_the_energy_of_concave_interactions(
    case: EnergyCase, name: str
) -> None:
    """Any weights, small or large: the concave part lies below its tangent."""
    for seed, strength in enumerate((1.0, 100.0)):
        torch.manual_seed(seed)
        energy = case.factory(WIDE).double()
        with torch.no_grad():
            for tensor in (*energy.parameters(), *energy.buffers()):
                tensor.mul_(strength)
        z, x = 3 * tokens(case, seed=seed)[0], tokens(case, seed=seed + 50)[0]
        update, values = ActivationStep(energy, LAGRANGIANS[name]), []
        for _ in range(4):
            # Sums of large terms of both signs round at the scale of the terms.
            scale = z.square().sum((1, 2)).clamp_min(1.0)
            z, value, _ = update.joint(z, x)
            values.append(value)
            if len(values) > 1 and value.isfinite().all():  # others fell to minus infinity
                rise = (value - values[-2]) / scale.maximum(value.abs())
                assert rise.max() <= 1e-12, (seed, strength)
        assert name not in BOUNDED or values[1].isfinite().all()  # some step was really compared


def test_gradients_through_the_layer() -> None:
    torch.manual_seed(4)
    energy = (0.5 * SoftmaxAttention(4, 2, cross=True, norm=RMSNorm(1.0), bound=1.0)).double()
    update = ActivationStep(energy, RMSNormLagrangian())
    layer = DEQ(update, tolerance=Tolerance(rtol=1e-13), max_steps=300, on_failure="raise")
    x = torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x), (x,))


QUERY_DIM, HEADS, N, M = 6, 2, 4, 5
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("step_size", [1.0, 0.3])
def test_a_step_moves_towards_stock_attention(step_size: float) -> None:
    z, keys = draw(3, N, QUERY_DIM), draw(3, M, QUERY_DIM, seed=1)
    heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (z, keys)]
    attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[1])
    expected = torch.lerp(z, attended.transpose(1, 2).flatten(2), step_size)
    update = QueryDescent(QUERY_DIM, HEADS, step_size=step_size)
    torch.testing.assert_close(update(z, keys), expected, **EXACT)
    torch.testing.assert_close(update(z, update.prepare(keys)), expected, **EXACT)
    moved, value, gradient = update.joint(z, keys)
    torch.testing.assert_close(moved, expected, **EXACT)
    torch.testing.assert_close(value, update.energy.each(z, keys).sum((1, 2)), **EXACT)
    torch.testing.assert_close(gradient, (z - expected) / step_size, **EXACT)


@pytest.mark.parametrize(("beta", "step_size"), [(0.1, 1.0), (20.0, 0.25)])
def test_frozen_keys_the_energy_of_each_query_falls(beta: float, step_size: float) -> None:
    update = QueryDescent(QUERY_DIM, HEADS, beta=beta, step_size=step_size)
    z, keys = draw(8, N, QUERY_DIM), draw(8, M, QUERY_DIM, seed=1)
    states, energies = update.trajectory(z, keys, 20)
    assert states.shape == (21, *z.shape) and energies.shape == (21, 8, HEADS, N)
    assert torch.equal(states[0], z)
    assert (energies.diff(dim=0) <= 1e-13).all()
    assert (energies[-1] < energies[0]).all()


STEPS = 8


def step_of(branch: Any, method: str, lookahead: str = "literal", **numbers: float) -> DescentStep:
    """With these beta and eta."""
    made = DescentStep(branch, method, lookahead=lookahead).double().requires_grad_(False)
    for name, number in numbers.items():
        made.numbers[name].fill_(number)
    return made


def run(steps: list[DescentStep], z: Tensor) -> list[Tensor]:
    states, p = [z], None
    for step in steps:
        z, p = step(z, p)
        states.append(z)
    return states


@pytest.mark.parametrize(("method", "lookahead", "eta", "equal"), [
    ("momentum", "literal", 0.3, True), ("nesterov", "scaled", 0.3, True),
    ("nesterov", "literal", 1.0, True), ("nesterov", "literal", 0.3, False),
])  # fmt: skip
def test_momentum_is_that_of_torch(method: str, lookahead: str, eta: float, equal: bool) -> None:
    """The points of evaluation are the parameters of ``SGD``; for Nesterov's literal ones at eta 1 only."""
    torch.manual_seed(0)
    energy = SoftmaxAttention(6, 2, energy="elastic", cross=True, norm=None).double()
    z, x, seen = draw(2, 4, 6), draw(2, 4, 6, seed=1), []

    def branch(at: Tensor) -> Tensor:
        seen.append(at)
        return -energy.grad(at, x)

    options: dict[str, Any] = {"beta": 0.6, "eta": eta, "lookahead": lookahead}
    run([step_of(branch, method, **options) for _ in range(STEPS)], z)
    parameter, errors = nn.Parameter(z.clone()), []
    optimizer = torch.optim.SGD([parameter], lr=eta, momentum=0.6, nesterov=method == "nesterov")
    for at in seen:
        errors.append(relative_error(at, parameter.detach()))
        parameter.grad = energy.grad(parameter.detach(), x)
        optimizer.step()
    assert max(errors) <= 1e-12 if equal else max(errors) > 0.1


def test_without_momentum_it_is_the_plain_step_bit_by_bit() -> None:
    torch.manual_seed(3)
    branches = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(5)]
    plain = run([step_of(branch, "plain") for branch in branches], draw(2, 4, 6))
    for method in ("gain", "momentum", "nesterov"):
        options: dict[str, Any] = {} if method == "gain" else {"beta": 0.0}
        found = run([step_of(branch, method, **options) for branch in branches], draw(2, 4, 6))
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


MISTAKES: list[tuple[Any, type[Exception], str]] = [
    (lambda: GradientStep(Quadratic(), 0.0), ValueError, "step_size"),
    (lambda: ActivationStep(nn.Linear(2, 2), RMSNormLagrangian()), TypeError, "energy"),  # type: ignore[arg-type]
    (lambda: ActivationStep(Field(), RMSNormLagrangian), TypeError, "lagrangian"),  # type: ignore[arg-type]
    (lambda: DescentStep(torch.tanh, "momentum", lookahead="scaled"), ValueError, "method"),
]


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES)
def test_mistakes(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
