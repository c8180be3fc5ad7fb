"""The equilibrium block and the DEQ transformer: what they compute, masks, gradients, copies, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from cases.energies import relative_error
from implicit_attn import DEQTransformer, EquilibriumBlock
from implicit_attn.energies import AttentionInput
from implicit_attn.energies.conditional import EPSILON
from implicit_attn.updates import TransformerStep

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


@pytest.mark.parametrize(
    ("activation", "curvature"), [("relu", (0.45, 0.45)), ("gelu", (0.1, 0.8))]
)
def test_the_hessian_keeps_within_its_bounds_whatever_the_weights(
    activation: str, curvature: tuple[float, float]
) -> None:
    for seed, scale in ((0, 1.0), (1, 30.0)):
        block = build(4, 2, seed, activation=activation, curvature=curvature)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter *= scale
        x, z = inputs(1, 4, 4, seed), 3.0 * inputs(1, 4, 4, seed + 50)
        energy, n = block.energy, F.rms_norm(x, (4,))
        hessian: Any = torch.autograd.functional.hessian(lambda z, e=energy, n=n: e(z, n).sum(), z)
        eigenvalues = torch.linalg.eigvalsh(hessian.reshape(z.numel(), -1))
        top, bottom = eigenvalues[-1], eigenvalues[0]
        assert bottom >= 1.0 - sum(curvature) - 1e-9
        assert top <= (1.0 if activation == "relu" else 1.0 + 0.13 * curvature[1]) + 1e-9


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
    # gradcheck moves the weights where they are.
    assert torch.autograd.gradcheck(lambda x, *_: block(x), (x, *block.parameters()))
    assert torch.autograd.gradgradcheck(block, (x,), atol=1e-4, fast_mode=True)


def test_causal_masks_are_one_in_every_form() -> None:
    causal, x = build(causal=True), inputs()
    block = build()
    block.load_state_dict(causal.state_dict())
    expected = causal(x)
    added = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    excluded = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for mask, causal in ((None, True), (added, False), (excluded, False), (added, True)):
        torch.testing.assert_close(block(x, mask, is_causal=causal), expected)
    for shape in ((4, 5, 5), (2, 5, 5), (2, 2, 5, 5), (2, 1, 5, 5), (1, 2, 5, 5), (1, 1, 5, 5)):
        torch.testing.assert_close(block(x, excluded.expand(shape)), expected)


def test_a_mask_belongs_to_its_sample_and_head() -> None:
    block, x = build(), inputs()
    torch.manual_seed(0)
    excluded = (torch.rand(2, 2, 5, 5) < 0.4) & ~torch.eye(5, dtype=torch.bool)
    expected = block(x, excluded)
    torch.testing.assert_close(block(x, excluded.flatten(0, 1)), expected)
    one = block(x, excluded[:, :1])
    torch.testing.assert_close(block(x, excluded[:, 0]), one)
    for row in range(2):
        torch.testing.assert_close(block(x[row], excluded[row]), expected[row])
        torch.testing.assert_close(block(x[row], excluded[row, 0]), one[row])
    assert (one - expected).norm() > 1e-3


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "masks",
    [{}, {"src_key_padding_mask": PADDING}, {"src_mask": torch.ones(5, 5).triu(1).bool()},
     {"is_causal": True}, {"src_mask": torch.ones(5, 5).bool()}],
    ids=["none", "padding", "bool", "causal", "no pair"],
)  # fmt: skip
@pytest.mark.parametrize("kind", [EquilibriumBlock, DEQTransformer])
def test_masks_under_autocast_are_those_of_float32(
    kind: Any, masks: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    block, x = kind(8, 2), inputs().float()
    expected = block(x, **masks)
    with torch.autocast("cpu", dtype):
        result = block(x, **masks)
        result.square().sum().backward()
    assert relative_error(result, expected) <= 3e-2
    assert all(p.grad.isfinite().all() for p in block.parameters() if p.grad is not None)


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


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("called", [False, True], ids=["of itself", "by the call"])
@pytest.mark.parametrize(
    "options", [{}, {"hidden": 0, "dropout": 0.5}, {"layer": {"adjoint": "unrolled"}}]
)
def test_no_later_token_changes_a_bit_of_an_earlier_one_in_a_block(
    options: dict[str, Any], called: bool, training: bool
) -> None:
    torch.manual_seed(0)
    block = EquilibriumBlock(32, 4, causal=not called, **options).train(training)
    x, padding = torch.randn(3, 20, 32), torch.zeros(3, 20, dtype=torch.bool)
    padding[0, 18:] = True
    for first in (1, 7, 19):
        other = x.detach().clone()
        other[:, first:] = 5.0 * torch.randn(3, 20 - first, 32)
        outputs = []
        for tokens in (x, other.requires_grad_()):
            torch.manual_seed(1)
            outputs.append(block(tokens, src_key_padding_mask=padding, is_causal=called))
        assert torch.equal(outputs[0][:, :first], outputs[1][:, :first])
        assert not torch.equal(outputs[0], outputs[1])
        (slope,) = torch.autograd.grad(outputs[1][:, first - 1].sum(), other)
        assert (slope[:, first:] == 0).all() and (slope[:, :first] != 0).any()


@torch.no_grad()
def test_a_causal_block_is_causal_when_it_is_compiled() -> None:
    block, x = EquilibriumBlock(8, 2, causal=True), torch.randn(2, 6, 8)
    compiled: Any = torch.compile(block, backend="eager")
    later = torch.cat((x[:, :4], torch.randn(2, 2, 8)), 1)
    assert torch.equal(compiled(x)[:, :4], compiled(later)[:, :4])
    assert torch.equal(compiled(x), block(x))


def test_a_causal_block_is_solved_and_differentiated() -> None:
    block, x = build(causal=True), inputs().requires_grad_()
    solution = block.solve(x, tolerance=1e-9, max_steps=400)
    other = block.solve(x, tolerance=1e-9, max_steps=400, solver="anderson")
    assert solution.converged.all() and (solution.evaluations > 1).all()
    assert relative_error(solution.value, other.value) <= 1e-7
    leaves = [x, *block.parameters()]
    slopes = [torch.autograd.grad(s.value.pow(3).sum(), leaves) for s in (solution, other)]
    for mine, theirs in zip(*slopes, strict=True):
        assert relative_error(mine, theirs) <= 1e-6
    with pytest.warns(solvers.SolveWarning, match="MAX_STEPS"):
        block.solve(x, tolerance=1e-9, max_steps=3)
    assert block.last is not None and (block.last.evaluations == 3).all()


def test_a_causal_block_has_second_derivatives() -> None:
    """Also by its weights, which its tokens share; as the solve of whole samples has them."""
    block, x = build(causal=True), inputs().requires_grad_()
    leaves, found = [x, *block.parameters()], []
    options: dict[str, Any] = {"tolerance": 1e-11, "max_steps": 400}
    for apart in (True, False):
        if not apart:
            options |= {"callback": lambda progress: None}  # solves whole samples
        value = block.solve(x, **options).value
        first = torch.autograd.grad(value.pow(3).sum(), leaves, create_graph=True)
        size = torch.stack([slope.square().sum() for slope in first]).sum()
        found.append(torch.autograd.grad(size, leaves))
    for mine, theirs in zip(*found, strict=True):
        assert relative_error(mine, theirs) <= 1e-6


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


CLOSE: dict[str, Any] = {"tolerance": solvers.Tolerance(1e-12), "max_steps": 200}


def transformer(seed: int = 0, **options: Any) -> DEQTransformer:
    """A block in float64 whose iteration contracts, with no special weight and no bias of zero."""
    torch.manual_seed(seed)
    block = DEQTransformer(8, 2, 12, **options).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(0.5).add_(0.1 * torch.randn_like(parameter))
    return block


def padding(*lengths: int, tokens: int = 5) -> Tensor:
    return torch.arange(tokens) >= torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_update_is_torchs_encoder_layer_on_the_normalised_sum(
    activation: str, fused: bool
) -> None:
    step = transformer(activation=activation).deq.update
    assert isinstance(step, TransformerStep)
    layer = nn.TransformerEncoderLayer(
        8, 2, 12, 0.0, activation, batch_first=True, norm_first=True, dtype=torch.float64
    )
    attention = layer.self_attn
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat((step.query.weight, step.key_value.weight)))
        attention.in_proj_bias.zero_()
        attention.out_proj.bias.zero_()
    attention.out_proj.weight = step.output.weight
    layer.norm1, layer.norm2 = step.attention_norm, step.feedforward_norm
    layer.linear1, layer.linear2 = step.widen, step.narrow
    z, x, seen = inputs(), inputs(seed=2), padding(5, 3)
    n = F.layer_norm(z + x, (8,))
    pattern = torch.randn(4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    pattern[:, 0, 1] = -torch.inf
    scores = pattern.view(2, 2, 5, 5)
    given = AttentionInput(x, scores.isfinite(), scores.nan_to_num(neginf=0.0))

    def found(*arguments: Any, mask: Tensor | None = None) -> Tensor:
        if fused:
            return step(*arguments, mask=mask)
        # Forward-mode derivatives take the dense formula.
        zero = torch.zeros_like(z)
        return torch.func.jvp(lambda z: step(z, *arguments[1:], mask=mask), (z,), (zero,))[0]

    assert relative_error(found(z, x), layer(n)) <= 1e-12
    assert relative_error(found(z, given), layer(n, pattern)) <= 1e-12
    kept = ~seen
    ours, theirs = found(z, x, mask=kept), layer(n, src_key_padding_mask=seen)
    assert relative_error(ours[kept], theirs[kept]) <= 1e-12
    causal = TransformerStep(8, 2, 12, activation=activation, causal=True).double()
    causal.load_state_dict(step.state_dict())
    step = causal
    order = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    assert relative_error(found(z, x), layer(n, order)) <= 1e-12


def test_the_end_is_the_fixed_point_that_a_solver_finds() -> None:
    many, x = transformer(iterations=200), inputs()
    solution = many.solve(x, **CLOSE)
    assert solution.converged.all()
    assert relative_error(many(x), solution.value) <= 1e-10
    converged = transformer(iterations="converged", layer=CLOSE)
    assert relative_error(converged(x), solution.value) <= 1e-10
    assert converged.last is not None and converged.last.converged.all()
    assert relative_error(many(x, iterations="converged"), solution.value) <= 1e-2
    tokens = F.rms_norm(x, (8,), eps=1e-5)
    z = tokens
    for _ in range(3):
        z = many.deq.update(z, tokens)
    assert torch.equal(many(x, iterations=3), z)


def slopes(block: Any, **options: Any) -> list[Tensor]:
    """Gradients of a fixed loss by the input and all weights."""
    x = inputs().requires_grad_()
    loss = (block(x, **options) * inputs(seed=7)).sum()
    return list(torch.autograd.grad(loss, [x, *block.parameters()]))


def test_gradients_through_all_iterations_are_exact() -> None:
    block, x = transformer(iterations=3, gradient="all"), inputs().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: block(x), [x, *block.parameters()])


def test_truncated_gradients_are_those_of_the_last_iterations() -> None:
    block, x = transformer(iterations=3, gradient=2), inputs().requires_grad_()
    tokens = F.rms_norm(x, (8,), eps=1e-5)
    z = block.deq.update(tokens, tokens).detach()
    for _ in range(2):
        z = block.deq.update(z, tokens)
    expected = torch.autograd.grad((z * inputs(seed=7)).sum(), [x, *block.parameters()])
    torch.testing.assert_close(slopes(block), list(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gradient", ["all", "implicit"])
def test_gradients_of_a_converged_block_are_those_of_many_iterations(gradient: Any) -> None:
    implicit = {"adjoint": solvers.Implicit(tolerance=solvers.Tolerance(1e-12))}
    layer = CLOSE | (implicit if gradient == "implicit" else {})
    block = transformer(iterations="converged", gradient=gradient, layer=layer, causal=True)
    exact = transformer(iterations=300, causal=True)
    exact.load_state_dict(block.state_dict())
    for one, other in zip(slopes(block), slopes(exact), strict=True):
        assert relative_error(one, other) <= 1e-8


def test_masked_tokens_are_as_if_they_were_not_there() -> None:
    x, seen = inputs(), padding(5, 3)
    for options in ({}, {"causal": True}, {"iterations": "converged", "layer": CLOSE}):
        block = transformer(**options)
        y = block(x, src_key_padding_mask=seen)
        other = torch.where(seen[..., None], 1e5, x)
        assert torch.equal(block(other, src_key_padding_mask=seen), y)
        assert relative_error(y[1, :3], block(x[1:, :3])[0]) <= 1e-10
        assert (y[1, 3:] == 0.0).all()
    nothing = torch.zeros(5, 5, dtype=torch.bool)
    nothing[1] = True  # token 1 may attend to nobody
    for pattern in (nothing, -1e9 * nothing.double()):
        assert transformer()(x, pattern).isfinite().all()


@pytest.mark.parametrize("gradient", ["all", 2, "implicit"])
def test_no_later_token_changes_a_bit_of_an_earlier_one(gradient: Any) -> None:
    torch.manual_seed(0)
    layer = {"adjoint": solvers.Implicit(on_failure="ignore")} if gradient == "implicit" else None
    block = DEQTransformer(16, 2, causal=True, gradient=gradient, layer=layer)
    x = torch.randn(3, 9, 16, requires_grad=True)
    changed = x.detach().clone()
    changed[:, 6:] = torch.randn(3, 3, 16)
    y = block(x)
    assert torch.equal(y[:, :6], block(changed)[:, :6])
    assert not torch.equal(y[:, 6:], block(changed)[:, 6:])
    (slope,) = torch.autograd.grad(y[:, 5].sum(), x)
    assert (slope[:, 6:] == 0.0).all() and (slope[:, :6] != 0.0).any(-1).all()


@pytest.mark.parametrize("options", [
    {}, {"hidden": 0}, {"state_dim": 9, "activation": "gelu"}, {"batch_first": False},
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_with_a_cache_are_the_whole_pass(options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # In float32 rounding may cost a token an evaluation, which must not matter.
    layer = {"tolerance": 1e-5 if dtype == torch.float32 else 1e-3}
    block = EquilibriumBlock(12, 3, causal=True, layer=layer, **options).to(dtype).eval()
    for parameter in block.parameters():
        parameter.data *= 2.0
    axis = 1 if block.batch_first else 0
    x = torch.randn(2, 9, 12, dtype=dtype)
    x = x if block.batch_first else x.transpose(0, 1)
    whole, parts, cache = block(x), [], None
    for chunk in x.split([4, 1, 1, 3], axis):
        part, cache = block.step(chunk, cache)
        parts.append(part)
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    if dtype == torch.float64:
        close = {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(torch.cat(parts, axis), whole, **close)
    assert cache is not None and cache.key.shape == (2, 3, 9, cache.key.shape[-1])
    # A cache is not changed by the steps that follow it, so a sequence may go on in two ways.
    _, start = block.step(x.narrow(axis, 0, 4))
    ends = [block.step(x.narrow(axis, place, 1), start)[0] for place in (4, 5, 4)]
    assert torch.equal(ends[0], ends[2]) and not torch.equal(ends[0], ends[1])


def test_steps_need_a_causal_block() -> None:
    with pytest.raises(ValueError, match="causal"):
        EquilibriumBlock(8, 2).step(torch.ones(1, 2, 8))


def test_a_half_precision_mask_of_scores_is_one_of_the_dtype_of_the_tokens() -> None:
    block, mask = EquilibriumBlock(8, 2).double(), torch.randn(5, 5).half()
    x = inputs(2, 5)
    assert torch.equal(block(x, src_mask=mask), block(x, src_mask=mask.double()))


# Mistakes, by what the error says.


def option(kind: Any, message: str, **options: Any) -> tuple[Callable[[], object], str]:
    return lambda: kind(**({"dim": 8, "heads": 2} | options)), message


def argument(message: str, **arguments: Any) -> tuple[Callable[[], object], str]:
    return lambda: EquilibriumBlock(8, 2)(**({"src": X} | arguments)), message


MISTAKES: list[tuple[Callable[[], object], str]] = [
    option(EquilibriumBlock, "did you mean hidden", hiden=3),
    option(EquilibriumBlock, "nhead is called heads here", nhead=3),
    option(EquilibriumBlock, "no argument 'elephant'; options of the equilibrium layer", elephant=3),
    option(EquilibriumBlock, "did you mean max_steps", layer={"max_step": 3}),
    (lambda: EquilibriumBlock(8, 2)(X, tolerence=1e-2), "did you mean tolerance"),
    option(EquilibriumBlock, "curvature", curvature=(0.6, 0.4)),
    option(EquilibriumBlock, "curvature", curvature=0.5),
    option(EquilibriumBlock, "attention", attention=None, hidden=0),
    option(EquilibriumBlock, "steps", layer={"steps": 3}),
    option(EquilibriumBlock, "layer", layer=[3]),
    option(EquilibriumBlock, "causal", attention=None, causal=True),
    option(DEQTransformer, "causal", attention="cross", causal=True),
    option(DEQTransformer, "memory_dim", memory_dim=3),
    option(DEQTransformer, "attention", attention=None),
    option(DEQTransformer, "gradient", gradient="exact"),
    option(DEQTransformer, "gradient", gradient=0),
    option(DEQTransformer, "layer", gradient=2, layer={"adjoint": None}),
    option(DEQTransformer, "activation", activation="tanh"),
    option(DEQTransformer, "heads", heads=3),
    argument("src_key_padding_mask=~mask", mask=torch.ones(2, 5).bool()),
    argument("src_mask", src_mask=torch.zeros(4, 4)),
    argument("src_mask", src_mask=torch.zeros(5, 5, dtype=torch.long)),
    argument("padding", src_key_padding_mask=torch.ones(2, 5)),
    argument("src_key_padding_mask", src_key_padding_mask=torch.ones(2, 5).long()),
    argument("src_key_padding_mask", src_key_padding_mask=torch.zeros(2, 4).bool()),
    argument("memory", memory=torch.zeros(2, 5, 8)),
    argument("src", src=torch.zeros(2, 5, 7)),
    argument("src", src=torch.zeros(2, 5, 8).long()),
    (lambda: EquilibriumBlock(8, 2, attention="cross")(X), "memory"),
    *[option(DEQTransformer, "iterations", iterations=n) for n in (0, (3, 2), "done", 2.5)],
    (lambda: DEQTransformer(8, 2)(X, iterations=0), "iterations"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_no_tokens_stay_no_tokens() -> None:
    for causal in (False, True):
        assert EquilibriumBlock(8, 2, causal=causal)(torch.zeros(2, 0, 8)).shape == (2, 0, 8)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_bound_of_an_equilibrium_block_bounds_its_error(scale: float) -> None:
    """The energy is strongly convex with the modulus ``1 - sum(curvature)``."""
    torch.manual_seed(0)
    block = EquilibriumBlock(16, heads=2).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(scale)
    x = torch.randn(6, 5, 16, dtype=torch.float64)
    x = F.rms_norm(x, x.shape[-1:])
    with torch.no_grad():
        exact = block.deq.solve(x, tolerance=1e-12, max_steps=300).value
        for tolerance in (1e-1, 1e-3, 1e-6):
            found = block.deq.solve(x, tolerance=tolerance)
            error = (found.value - exact).flatten(1).norm(dim=1)
            assert found.bound is not None
            assert (error <= found.bound * found.value.flatten(1).norm(dim=1) * (1 + 1e-6)).all()
    assert "(at most " in found.summary()
