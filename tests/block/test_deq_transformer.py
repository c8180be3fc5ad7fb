"""The DEQ transformer: its block, its fixed point and gradients, masks, what no later token reaches."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from cases.energies import relative_error
from implicit_attn import DEQTransformer
from implicit_attn.deq import unroll
from implicit_attn.energies import AttentionInput
from implicit_attn.updates import TransformerStep

EXACT: dict[str, Any] = {"tolerance": solvers.Tolerance(1e-12), "max_steps": 200}


def build(seed: int = 0, **options: Any) -> DEQTransformer:
    """A block in float64 whose iteration contracts, with no special weight and no bias of zero."""
    torch.manual_seed(seed)
    block = DEQTransformer(8, 2, 12, **options).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(0.5).add_(0.1 * torch.randn_like(parameter))
    return block


def inputs(batch: int = 2, tokens: int = 5, dim: int = 8, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, dim, generator=generator, dtype=torch.float64)


def padding(*lengths: int, tokens: int = 5) -> Tensor:
    return torch.arange(tokens) >= torch.tensor(lengths)[:, None]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_update_is_torchs_encoder_layer_on_the_normalised_sum(
    activation: str, fused: bool
) -> None:
    step = build(activation=activation).deq.update
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


def test_cross_attention_is_torchs() -> None:
    block = build(attention="cross", memory_dim=6)
    step, z, memory = block.deq.update, inputs(), inputs(2, 7, 6, seed=4)
    assert isinstance(step, TransformerStep)
    seen = torch.arange(7) < torch.tensor([7, 4])[:, None]
    key, value = step.key_value(memory).chunk(2, -1)
    query = step.query(step.attention_norm(F.layer_norm(z, (8,))))
    heads = [t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (query, key, value)]
    mask = seen[:, None, None, :]
    attended = F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)
    h = F.layer_norm(z, (8,)) + step.output(attended)
    expected = h + step.narrow(F.gelu(step.widen(step.feedforward_norm(h))))
    given = AttentionInput(torch.zeros_like(z), memory=memory, memory_mask=seen)
    assert relative_error(step(z, given), expected) <= 1e-12
    y = block(z, memory=memory, memory_key_padding_mask=~seen)
    assert relative_error(y[1], block(z[1:], memory=memory[1:, :4])[0]) <= 1e-12


def test_the_end_is_the_fixed_point_that_a_solver_finds() -> None:
    many, x = build(iterations=200), inputs()
    solution = many.solve(x, **EXACT)
    assert solution.converged.all()
    assert relative_error(many(x), solution.value) <= 1e-10
    converged = build(iterations="converged", layer=EXACT)
    assert relative_error(converged(x), solution.value) <= 1e-10
    assert converged.last is not None and converged.last.converged.all()
    assert relative_error(many(x, iterations="converged"), solution.value) <= 1e-2
    tokens = F.rms_norm(x, (8,), eps=1e-5)
    z = tokens
    for _ in range(3):
        z = many.deq.update(z, tokens)
    assert torch.equal(many(x, iterations=3), z)


@pytest.mark.parametrize("gradient", ["all", 2, "implicit"])
@pytest.mark.parametrize("iterations", [3, "converged"])
def test_gradients(gradient: Any, iterations: Any) -> None:
    """Through all iterations exact; truncated that of the last ones; implicit exact at the end."""
    adjoint = {"adjoint": solvers.Implicit(tolerance=solvers.Tolerance(1e-12))}
    layer = EXACT | (adjoint if gradient == "implicit" else {})
    block = build(iterations=iterations, gradient=gradient, layer=layer, causal=True)
    x, weight = inputs().requires_grad_(), inputs(seed=7)
    given = [x, *block.parameters()]
    if gradient == "all" and iterations == 3:
        assert torch.autograd.gradcheck(lambda x, *_: block(x), given)
        return

    def gradients(y: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((y * weight).sum(), given))

    if gradient == 2 and iterations == 3:
        tokens = F.rms_norm(x, (8,), eps=1e-5)
        z = block.deq.update(tokens, tokens).detach()
        for _ in range(2):
            z = block.deq.update(z, tokens)
        for ours, theirs in zip(gradients(block(x)), gradients(z), strict=True):
            assert relative_error(ours, theirs) <= 1e-12
        return
    count = "converged" if iterations == "converged" else 200
    exact = build(iterations=300, causal=True)
    exact.load_state_dict(block.state_dict())
    ours = gradients(block(x, iterations=count))
    given = [x, *exact.parameters()]
    theirs = gradients(exact(x))
    bound = 1e-8 if isinstance(gradient, str) else 0.7  # two of infinitely many terms
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one, other) <= bound


def test_the_implicit_gradient_tells_what_was_solved() -> None:
    block = build(iterations=(4, 6), gradient="implicit")
    y = block(inputs())
    assert block.last is not None and (block.last.evaluations <= 7).all()
    y.sum().backward()
    assert block.last.adjoint.solution is not None and block.deq.evaluations_before == 0
    block.eval()
    all_of_them = build(iterations=5)
    assert torch.equal(block(inputs()), all_of_them(inputs()))


def test_masked_tokens_are_as_if_they_were_not_there() -> None:
    x, seen = inputs(), padding(5, 3)
    for options in ({}, {"causal": True}, {"iterations": "converged", "layer": EXACT}):
        block = build(**options)
        y = block(x, src_key_padding_mask=seen)
        other = torch.where(seen[..., None], 1e5, x)
        assert torch.equal(block(other, src_key_padding_mask=seen), y)
        assert relative_error(y[1, :3], block(x[1:, :3])[0]) <= 1e-10
        assert (y[1, 3:] == 0.0).all()
    nothing = torch.zeros(5, 5, dtype=torch.bool)
    nothing[1] = True  # token 1 may attend to nobody
    y = build()(x, nothing)
    assert y.isfinite().all()
    y = build()(x, -1e9 * nothing.double())
    assert y.isfinite().all()


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
    again = build()
    y = again(inputs(), is_causal=True)
    later = torch.cat((inputs()[:, :3], inputs(seed=9)[:, 3:]), 1)
    assert relative_error(again(later, is_causal=True)[:, :3], y[:, :3]) <= 1e-14


def test_tokens_rest_when_their_prefix_has_converged() -> None:
    for gradient in ("all", 2, "implicit"):
        options: dict[str, Any] = {"gradient": gradient}
        block = build(causal=True, iterations="prefix", layer=EXACT, **options)
        x, seen = inputs(3, 7), padding(7, 4, 6, tokens=7)
        with torch.no_grad():
            exact = block(x, src_key_padding_mask=seen, iterations=200)
            assert relative_error(block(x, src_key_padding_mask=seen), exact) <= 1e-11
        assert block.last is not None and block.last.converged.all()
        spent = block.evaluations
        assert spent is not None and (spent[0].diff() >= 0).all() and spent[0, 0] < spent[0, -1]
        assert torch.equal(spent.amax(1) + 1, block.last.evaluations)  # one for the residual
        later = torch.cat((x[:, :4], inputs(3, 3, seed=9)), 1)
        with torch.no_grad():
            assert torch.equal(block(later)[:, :4], block(x)[:, :4])
    x.requires_grad_(True)
    (slope,) = torch.autograd.grad(block(x).square().sum(), x)
    loss = block(x, iterations="converged").square().sum()
    assert relative_error(slope, torch.autograd.grad(loss, x)[0]) <= 1e-9
    loose = build(causal=True, iterations="prefix", layer={"max_steps": 2})
    with pytest.warns(solvers.SolveWarning), torch.no_grad():
        loose(inputs())
    with pytest.raises(ValueError, match="needs torch"):
        loose(inputs())
    with pytest.raises(ValueError, match="needs causal=True"):
        build(iterations="prefix")(inputs())


def test_a_sample_does_not_depend_on_its_batch() -> None:
    for iterations in (5, "converged"):
        block, x = build(iterations=iterations, layer=EXACT), inputs(4)
        y = block(x)
        for i in range(4):
            assert relative_error(block(x[i : i + 1])[0], y[i]) <= 1e-10
            assert relative_error(block(x[i]), y[i]) <= 1e-10
    turned = build(batch_first=False)
    assert relative_error(turned(x.transpose(0, 1)).transpose(0, 1), build()(x)) <= 1e-12


def test_numbers_of_iterations() -> None:
    block, x = build(iterations=(2, 4)), inputs()
    each = {k: block(x, iterations=k) for k in (2, 3, 4)}
    drawn = [block(x) for _ in range(40)]
    assert {next(k for k in each if torch.equal(y, each[k])) for y in drawn} == {2, 3, 4}
    assert torch.equal(block.eval()(x), each[3])
    for wrong, words in (
        (0, "iterations must be >= 1"),
        ((3, 2), r"iterations must be \(least, most\)"),
        ((1, 2, 3), r"iterations must be a number or \(least, most\)"),
        ("done", "iterations must be one of"),
        (2.5, "iterations must be an integer"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            DEQTransformer(8, 2, iterations=wrong)  # type: ignore[arg-type]
        with pytest.raises((ValueError, TypeError), match=words):
            block(x, iterations=wrong)  # type: ignore[arg-type]


def test_mistakes() -> None:
    for options, words in (
        ({"gradient": "exact"}, "gradient must be one of"),
        ({"gradient": 0}, "gradient must be >= 1"),
        ({"gradient": 2, "layer": {"adjoint": None}}, r'layer\["adjoint"\] needs gradient="implicit"'),
        ({"attention": None}, "attention must be one of"),
        ({"attention": "cross", "causal": True}, 'causal=True needs attention="self"'),
        ({"memory_dim": 3}, 'memory_dim needs attention="cross"'),
        ({"activation": "tanh"}, "activation must be one of"),
        ({"heads": 3}, "heads must divide dim"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            DEQTransformer(**({"dim": 8, "heads": 2} | options))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="src must have the shape"):
        build()(inputs(dim=6))
    with pytest.raises(ValueError, match="memory must be given"):
        build(attention="cross")(inputs())


def test_saved_loaded_unrolled_and_in_torchs_encoder() -> None:
    block, x = build(iterations=6), inputs()
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x), block(x))
    other = build(seed=1, iterations=6)
    other.load_state_dict(block.state_dict())
    assert torch.equal(other(x), block(x))
    assert torch.equal(unroll(block, 6)(x), block(x))
    layer: Any = block
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert stack(x, src_key_padding_mask=padding(5, 3)).shape == x.shape


def test_training_makes_the_end_a_fixed_point() -> None:
    """The parity of the bits before each place, which one pass cannot count: drawn iterations learn."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(2, 16),
            "block": DEQTransformer(16, 2, causal=True, iterations=(4, 12), gradient=4),
            "head": nn.Linear(16, 2),
        }
    )
    place = 0.5 * torch.randn(3, 16)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def loss(iterations: int | None = None) -> Tensor:
        bits = torch.randint(2, (64, 3))
        z = model["block"](model["embed"](bits) + place, iterations=iterations)
        return F.cross_entropy(model["head"](z).flatten(0, 1), (bits.cumsum(1) % 2).flatten())

    first = loss().item()
    for _ in range(100):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        assert loss(8).item() < 0.5 * first and loss(32).item() < 0.5 * first
