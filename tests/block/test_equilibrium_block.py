"""The equilibrium block: where it stands in for a transformer layer, and that it can be saved."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import solvers
from implicit_attn import EquilibriumBlock, apply_norm
from implicit_attn.energies import Couplings
from implicit_attn.energies.conditional import EPSILON

EXACT: dict[str, Any] = {
    "tolerance": solvers.Tolerance(1e-11),
    "adjoint": solvers.Implicit(tolerance=solvers.Tolerance(1e-11)),
    "max_steps": 200,
}


def build(dim: int = 8, heads: int = 2, seed: int = 0, **options: Any) -> EquilibriumBlock:
    """A block in float64 away from its start: no weight is special, no bias zero."""
    torch.manual_seed(seed)
    chosen: dict[str, Any] = {"layer": EXACT} | options
    block = EquilibriumBlock(dim, heads, **chosen).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return block


def inputs(batch: int = 2, tokens: int = 5, dim: int = 8, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, dim, generator=generator, dtype=torch.float64)


def largest_and_least(block: EquilibriumBlock, x: Tensor, z: Tensor) -> tuple[float, float]:
    """The ends of the Hessian's spectrum at ``z`` (1, N, s)."""
    state = F.rms_norm(x, (x.shape[-1],))
    energy, shape = block.energy, z.shape

    def value(flat: Tensor) -> Tensor:
        return energy(flat.view(shape), state).sum()

    eigenvalues = torch.linalg.eigvalsh(torch.autograd.functional.hessian(value, z.flatten()))
    return eigenvalues[-1].item(), eigenvalues[0].item()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("curvature", [(0.45, 0.45), (0.1, 0.8)])
def test_the_hessian_keeps_within_its_bounds_whatever_the_weights(
    activation: str, curvature: tuple[float, float]
) -> None:
    for seed, scale in ((0, 1.0), (1, 30.0)):
        block = build(4, 2, seed, activation=activation, curvature=curvature)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter *= scale
        x, z = inputs(1, 4, 4, seed), 3.0 * inputs(1, 4, 4, seed + 50)
        top, bottom = largest_and_least(block, x, z)
        assert bottom >= 1.0 - sum(curvature) - 1e-9
        assert top <= (1.0 if activation == "relu" else 1.0 + 0.13 * curvature[1]) + 1e-9


def test_the_bound_on_the_curvature_is_reached() -> None:
    """Two opposite values and weights of rank one: the bounds are not merely cautious."""
    block = build(4, 1, hidden=0, curvature=(0.9, 0.05))
    attention = block.energy.attention
    assert attention is not None
    with torch.no_grad():
        for each in (attention.query.weight, attention.query_bias, attention.value_bias):
            each.zero_()
        attention.value.weight.copy_(1e4 * torch.eye(4))
        attention.state.weight = torch.eye(4, dtype=torch.float64)
    x = torch.tensor([[[1.0, 1, 1, 1], [-1.0, -1, -1, -1]]], dtype=torch.float64)
    _, bottom = largest_and_least(block, x, torch.zeros_like(x))
    assert bottom == pytest.approx(0.1, abs=1e-3)


def test_the_first_step_is_a_feed_forward_block_and_multi_head_attention() -> None:
    block, x = build(8, 2), inputs()
    energy, n = block.energy, F.rms_norm(x, (8,), eps=1e-5)
    memory, attention = energy.memory, energy.attention
    assert memory is not None and attention is not None and memory.context is not None
    hidden = F.relu(F.linear(n, memory.context.weight, memory.bias))
    answer = hidden @ memory.projection.weight
    seen = F.rms_norm(n + answer, (8,), eps=EPSILON)
    sides = []
    for name in ("query", "key", "value"):
        weight, bias = getattr(attention, name).weight, getattr(attention, f"{name}_bias")
        side = F.linear(seen, weight, bias).unflatten(-1, (2, 4)).transpose(1, 2)
        sides.append(side / (side.square().mean(-1, keepdim=True) + 1.0).sqrt())
    query, key, value = sides
    beta = attention.temperatures()
    query = query * beta.view(2, 1, 1) * 2.0  # stock attention divides by sqrt(4)
    attended = F.scaled_dot_product_attention(query, key, value)
    step = attended.transpose(1, 2).flatten(2) @ attention.state.weight + answer
    gradient = energy.grad(torch.zeros_like(x), n)
    torch.testing.assert_close(-gradient, step)


def test_the_output_is_the_input_and_the_minimum() -> None:
    block, x = build(), inputs()
    y = block(x)
    z = block.solve(x).value
    torch.testing.assert_close(y, x + z)
    energy, n = block.energy, F.rms_norm(x, (8,), eps=1e-5)
    assert energy.grad(z, n).norm() < 1e-9 * z.norm()
    for seed in range(5):
        other = z + 0.1 * inputs(seed=seed + 10)
        assert (energy(other, n) > energy(z, n)).all()


def test_gradients_are_those_of_the_minimum() -> None:
    block, x = build(4, 2, hidden=6), inputs(2, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(block, (x,))
    parameters = dict(block.named_parameters())

    def output(*values: Tensor) -> Tensor:
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(block, named, (x.detach(),))

    values = tuple(p.detach().clone().requires_grad_() for p in parameters.values())
    assert torch.autograd.gradcheck(output, values)
    assert torch.autograd.gradgradcheck(block, (x,), atol=1e-4)


def test_a_causal_block_does_not_look_ahead() -> None:
    block, x = build(causal=True), inputs().requires_grad_()
    for token in range(4):
        (slope,) = torch.autograd.grad(block(x)[:, token].sum(), x)
        assert (slope[:, token + 1 :] == 0).all() and (slope[:, : token + 1] != 0).any()


def test_causal_masks_are_one_in_every_form() -> None:
    causal, x = build(causal=True), inputs()
    block = build()
    block.load_state_dict(causal.state_dict())
    expected = causal(x)
    added = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    excluded = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for mask, causal in ((None, True), (added, False), (excluded, False), (added, True)):
        torch.testing.assert_close(block(x, mask, is_causal=causal), expected)
    torch.testing.assert_close(block(x, excluded.expand(4, 5, 5)), expected)  # B heads of them


def test_masks_of_pairs_exclude_and_weigh_them() -> None:
    block, x = build(), inputs()
    mask = torch.zeros(5, 5, dtype=torch.float64)
    mask[0, 3] = -torch.inf
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(block(x, mask)[:, 0].sum(), x)
    assert (slope[:, 3] == 0).all() and (slope[:, 1] != 0).any()
    mask[0, 3] = 0.7
    assert not torch.allclose(block(x, mask), block(x))
    alone = ~torch.eye(5, dtype=torch.bool)
    (slope,) = torch.autograd.grad(block(x, alone)[:, 2].sum(), x)
    assert (slope[:, [0, 1, 3, 4]] == 0).all()


def test_padding_is_left_out_and_comes_out_as_it_went_in() -> None:
    block, x = build(), inputs(tokens=6)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    y = block(x, src_key_padding_mask=padding)
    torch.testing.assert_close(y[1:, :4], block(x[1:, :4]))
    assert torch.equal(y[1, 4:], x[1, 4:])
    torch.testing.assert_close(y[:1], block(x[:1]))


def test_it_is_called_and_shaped_as_the_encoder_layer() -> None:
    x = inputs().float()
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    block = EquilibriumBlock(8, 2, 16)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    added = padding.float()  # of one kind with the mask of pairs, as stock layers want them
    for arguments in ((), (causal,), (causal, added), (None, padding)):
        assert block(x, *arguments).shape == layer(x, *arguments).shape
    assert block(x[0]).shape == layer(x[0]).shape
    later = EquilibriumBlock(8, 2, 16, batch_first=False)
    later.load_state_dict(block.state_dict())
    torch.testing.assert_close(later(x.transpose(0, 1)), block(x).transpose(0, 1))
    whole = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    whole.layers = nn.ModuleList([EquilibriumBlock(8, 2, 16) for _ in range(2)])
    assert whole(x, mask=causal, src_key_padding_mask=added, is_causal=True).shape == x.shape


def test_cross_attention_reads_the_memory_alone() -> None:
    block = build(attention="cross", memory_dim=6)
    x, memory = inputs().requires_grad_(), inputs(tokens=7, dim=6).requires_grad_()
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[:, 5:] = True
    y = block(x, memory=memory, memory_key_padding_mask=padding)
    by_x, by_memory = torch.autograd.grad(y[:, 2].sum(), (x, memory))
    assert (by_x[:, [0, 1, 3, 4]] == 0).all() and (by_x[:, 2] != 0).any()
    assert (by_memory[:, 5:] == 0).all() and (by_memory[:, :5] != 0).any()
    torch.testing.assert_close(y, block(x, memory=memory[:, :5]))


def test_a_state_of_another_width_is_mapped_back() -> None:
    block = build(state_dim=12)
    assert block.solve(inputs()).value.shape == (2, 5, 12)
    assert block(inputs()).shape == (2, 5, 8)
    x = inputs(1, 2)[..., :8].requires_grad_()
    assert torch.autograd.gradcheck(block, (x,))


def test_without_attention_tokens_stay_apart_and_without_hidden_units_they_do_not() -> None:
    x = inputs().requires_grad_()
    (slope,) = torch.autograd.grad(build(attention=None)(x)[:, 1].sum(), x)
    assert (slope[:, [0, 2, 3, 4]] == 0).all() and (slope[:, 1] != 0).any()
    (slope,) = torch.autograd.grad(build(hidden=0)(x)[:, 1].sum(), x)
    assert (slope != 0).any(-1).all()


def test_long_sequences_take_no_matrix_of_pairs_and_agree() -> None:
    block, x = build(8, 2), inputs(1, 150)
    dense = block(x)
    attention = block.energy.attention
    assert attention is not None
    n = F.rms_norm(x, (8,), eps=1e-5)

    def held() -> Tensor | None:
        return block.energy.prepare(n).parts[1].parts.log_weights

    assert held() is None  # with so many tokens
    attention.backend = "reference"
    assert held() is not None
    torch.testing.assert_close(block(x), dense)


def test_every_solve_converges_within_few_evaluations_whatever_the_weights() -> None:
    torch.manual_seed(0)
    for scale in (0.1, 1.0, 10.0):
        block = EquilibriumBlock(32, 4)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter *= scale
        x = 10.0 * torch.randn(16, 9, 32, requires_grad=True)
        block(x).square().sum().backward()
        last = block.last
        assert last is not None and bool(last.converged.all()) and last.evaluations.max() <= 20
        assert last.adjoint is not None and last.adjoint.solution is not None
        assert bool(last.adjoint.solution.converged.all())


def test_dropout_is_drawn_outside_the_solve() -> None:
    block, x = EquilibriumBlock(8, 2, dropout=0.5), inputs().float()
    assert not torch.equal(block(x), block(x))
    assert bool(block.last is not None and block.last.converged.all())
    block.eval()
    assert torch.equal(block(x), block(x))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"curvature": (0.6, 0.4)}, "curvature must sum to less than 1"),
        ({"curvature": 0.5}, "curvature must be two numbers"),
        ({"memory_dim": 3}, 'memory_dim needs attention="cross"'),
        ({"attention": None, "causal": True}, 'causal=True needs attention="self"'),
        ({"attention": None, "hidden": 0}, "must not both be None"),
        ({"layer": {"steps": 3}}, "layer must hold options of DEQ, .* got .'steps'"),
        ({"layer": {"init": "zeros"}}, "layer must hold options of DEQ, .* got .'init'"),
        ({"layer": [3]}, "layer must be a dict"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        arguments: dict[str, Any] = {"dim": 8, "heads": 2} | options
        EquilibriumBlock(**arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"src_mask": torch.zeros(4, 4)}, r"src_mask must have the shape \(5, 5\)"),
        ({"src_mask": torch.zeros(5, 5, dtype=torch.long)}, "src_mask must be bool or floating"),
        ({"src_key_padding_mask": torch.ones(2, 5)}, "must be -infinity at padding and else 0"),
        ({"src_key_padding_mask": torch.ones(2, 5).long()}, "must be bool, True at padding, or"),
        ({"src_key_padding_mask": torch.zeros(2, 4).bool()}, r"must have the shape \(2, 5\)"),
        ({"memory": torch.zeros(2, 5, 8)}, 'memory needs attention="cross"'),
        ({"src": torch.zeros(2, 5, 7)}, r"src must have the shape \(B, N, 8\) or \(N, 8\), got"),
        ({"src": torch.zeros(2, 5, 8).long()}, "src must be of a floating dtype, got"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        EquilibriumBlock(8, 2)(**{"src": inputs().float()} | arguments)


def test_cross_attention_needs_its_memory() -> None:
    with pytest.raises(ValueError, match=r'memory must be given with attention="cross"'):
        EquilibriumBlock(8, 2, attention="cross")(torch.zeros(2, 5, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_solved_to_what_it_can_hold(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    block, x = EquilibriumBlock(64, 4), torch.randn(8, 20, 64)
    exact = block(x)
    rounded = block.to(dtype)(x.to(dtype))
    assert block.last is not None and bool(block.last.converged.all())
    assert (rounded - exact).abs().max() < 0.1


def test_causal_by_plain_steps_of_a_fixed_number_holds_for_every_bit() -> None:
    torch.manual_seed(0)
    layer: dict[str, Any] = {"solver": solvers.Forward(), "tolerance": solvers.Tolerance(0.0)}
    layer |= {"max_steps": 12, "on_failure": "ignore"}
    block, x = EquilibriumBlock(32, 4, causal=True, layer=layer), torch.randn(3, 20, 32)
    other = x.clone()
    other[:, -1] = 5.0 * torch.randn(3, 32)
    assert torch.equal(block(x)[:, :-1], block(other)[:, :-1])
    # By the default, what is computed is causal within the tolerance.
    plain = EquilibriumBlock(32, 4, causal=True)
    plain.load_state_dict(block.state_dict())
    moved = (plain(x) - plain(other))[:, :-1]
    assert moved.norm() < 1e-3 * (plain(x) - x)[:, :-1].norm()


def test_nan_at_padding_reaches_nothing() -> None:
    block, x = build(state_dim=4), inputs()
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    x[padding] = torch.nan
    given, mask = block.arguments(x, None, padding)[1:]
    assert given.tokens is not None and mask is not None
    tokens = given.tokens.masked_fill(padding.unsqueeze(-1), torch.nan)
    prepared = block.energy.prepare(given._replace(tokens=tokens), mask=mask)
    z = torch.zeros(2, 5, 4, dtype=torch.float64)
    block.energy.grad(z, prepared, mask=mask).square().sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad is None or bool(parameter.grad.isfinite().all()), name


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Normed(nn.Sequential):
    """With two parametrised tensors in one layer, the second by torch's own function."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8))
        apply_norm(self, "bound", target=0.5)
        parametrize.register_parametrization(self[0], "bias", nn.Softplus())


class Tokens(nn.Module):
    """Something else with parametrised weights, applied to tokens."""

    def __init__(self, part: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.use = part, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.part, x)


def couplings(part: nn.Module, x: Tensor) -> Tensor:
    return x.flatten(1) @ part.matrix  # type: ignore[operator]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "block": lambda: EquilibriumBlock(8, heads=2),
    "stack": lambda: nn.Sequential(*(EquilibriumBlock(8, heads=2) for _ in range(2))),
    "norm": Normed,
    "couplings": lambda: Tokens(Couplings(5, 8, bound=0.5), couplings),
}


def saved(module: nn.Module, folder: Path) -> nn.Module:
    torch.save(module, folder / "module.pt")
    return torch.load(folder / "module.pt", weights_only=False)


@pytest.mark.parametrize("name", MODULES)
def test_copies_are_equal_and_apart(name: str, tmp_path: Path) -> None:
    module = MODULES[name]()
    expected = module(X)
    expected.sum().backward()  # what a solve leaves behind goes along or is left out
    for copied in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(module)))),
        saved(module, tmp_path),
    ):
        assert torch.equal(copied(X), expected)
        assert list(copied.state_dict()) == list(module.state_dict())
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(0.5)
        assert not torch.equal(copied(X), expected) and torch.equal(module(X), expected)


def test_a_loaded_module_is_trained_parametrised_and_freed_as_any_other() -> None:
    loaded = pickle.loads(pickle.dumps(Normed()))
    loaded(X).sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())
    parametrize.remove_parametrizations(loaded[0], "bias")
    assert type(loaded[0]).__name__ == "ParametrizedLinear"
    parametrize.remove_parametrizations(loaded[0], "weight")
    assert type(loaded[0]) is nn.Linear
