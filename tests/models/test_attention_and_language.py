"""Attention as steps of descent, and the causal language models that are made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from cases.energies import relative_error
from implicit_attn.models import (
    ATTENTION_FORMS,
    CausalAttention,
    EnergyAttention,
    EquilibriumLanguageModel,
    LanguageModel,
    LightNewtonAttention,
    NewtonAttention,
    QueryTrajectory,
    build_attention_form,
    generate,
)
from implicit_attn.updates.update import DESCENTS
from solvers import Implicit, Tolerance

# Attention forms against the steps that they are derived from, in float64 by autograd.


DIM, HEADS, WIDTH, TOKENS = 6, 2, 3, 5
each_form = pytest.mark.parametrize("name", ATTENTION_FORMS)


def make(cls: Any = CausalAttention, **options: Any) -> Any:
    torch.manual_seed(0)
    if isinstance(cls, str):
        return build_attention_form(cls, DIM, HEADS, **options).double()
    return cls(DIM, HEADS, **options).double()


def draw(tokens: int = TOKENS, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, DIM, generator=generator, dtype=torch.float64)


def set_scalars(form: Any, temperature: float | None = None, tau: float | None = None) -> None:
    with torch.no_grad():
        if temperature is not None:
            form.temperature.raw.copy_(torch.tensor(temperature).double().expm1().log())
        if tau is not None:
            form.tau.fill_(tau)


def heads_of(layer: nn.Linear) -> list[Tensor]:
    return [layer.weight.detach()[WIDTH * h : WIDTH * (h + 1)] for h in range(HEADS)]


def own_energy(z: Tensor, held: Tensor, query: Tensor, key: Tensor, kind: str, t: float) -> Tensor:
    """The free energy of one token (d,) among held ones (M, d) in one head."""
    q, k = query @ z, held @ key.mT
    pair = -k @ q if kind == "inner" else 0.5 * (q - k).square().sum(-1)
    return -t * torch.logsumexp(-pair / t, 0)


def newton_steps(form: NewtonAttention, z: Tensor, temperature: float, order: int | None) -> Tensor:
    """``-(1/H) sum_h`` of the pseudo-inverse, or its series, times the gradient, token by token."""
    steps = torch.zeros_like(z)
    for b in range(len(z)):
        for i in range(z.shape[1]):
            for query, key in zip(heads_of(form.query), heads_of(form.key), strict=True):
                arguments = (z[b, : i + 1], query, key, "elastic", temperature)

                def energy(at: Tensor, arguments: tuple[Any, ...] = arguments) -> Tensor:
                    return own_energy(at, *arguments)

                gradient = torch.func.grad(energy)(z[b, i])
                hessian = torch.func.hessian(energy)(z[b, i])
                # Least norm solutions live in the rows of W_q, where the Hessian is W_q^T A W_q.
                inverse = torch.linalg.inv(query @ query.mT)
                back = query.mT @ inverse
                curvature = back.mT @ hessian @ back
                if order is None:
                    step = torch.linalg.pinv(hessian, hermitian=True) @ gradient
                else:
                    term = total = back.mT @ gradient
                    for _ in range(order):
                        term = term - curvature @ term
                        total = total + term
                    step = back @ total
                steps[b, i] -= step / HEADS
    return steps


def tie_to_newton(form: NewtonAttention) -> None:
    """``W_V = W_Q`` and ``W_O,h = -(1/H) M_h``, with which the branch is the step itself."""
    with torch.no_grad():
        assert form.value is not None
        form.value.weight.copy_(form.query.weight)
        blocks = [-q.mT @ torch.linalg.inv(q @ q.mT) / HEADS for q in heads_of(form.query)]
        form.output.weight.copy_(torch.cat(blocks, 1))


def test_softmax_attention_is_minus_the_gradient_of_each_tokens_energy() -> None:
    """With tied values and ``T = sqrt(p)``; the factor T that the paper prints would not fit."""
    form, z = make(), draw()
    with torch.no_grad():
        form.value.weight.copy_(form.key.weight)
        form.output.weight.copy_(form.query.weight.mT / HEADS)
    at = z.clone().requires_grad_()
    total: Any = 0.0
    for b in range(len(z)):
        for i in range(TOKENS):
            for query, key in zip(heads_of(form.query), heads_of(form.key), strict=True):
                held = z[b, : i + 1]
                total = total + own_energy(at[b, i], held, query, key, "inner", WIDTH**0.5) / HEADS
    (gradient,) = torch.autograd.grad(total, at)
    assert relative_error(form(z).detach(), -gradient) <= 1e-12
    assert relative_error(make(fused=False)(z), make()(z)) <= 1e-14


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("order", [None, 0, 1, 3])
def test_newton_is_the_step_of_autograds_hessian(order: int | None) -> None:
    temperature, z = 9.0, draw(4)
    form = make(NewtonAttention, order=order)
    set_scalars(form, temperature, 1.0 / temperature if order else None)
    tie_to_newton(form)
    expected = newton_steps(form, z, temperature, order)
    assert relative_error(form(z).detach(), expected) <= 1e-10


def test_the_series_obeys_its_bound_and_ends_at_the_exact_step() -> None:
    temperature, z = 9.0, draw()
    exact = make(NewtonAttention, order=None, values=False)
    set_scalars(exact, temperature)
    with torch.no_grad():
        exact.output.weight.copy_(torch.eye(DIM))
    query, key = (exact.split(layer(z)).detach() for layer in (exact.query, exact.key))
    scores = query @ key.mT - 0.5 * key.square().sum(-1).unsqueeze(-2)
    weights = exact.weights(scores / temperature, None)
    mean = weights @ key
    deviations = key.unsqueeze(2) - mean.unsqueeze(3)
    covariance = torch.einsum("bhij,bhijp,bhijq->bhipq", weights, deviations, deviations)
    norm = torch.linalg.matrix_norm(covariance, ord=2).amax().item() / temperature
    size = (query - mean).norm(dim=-1).amax().item()
    assert 0.01 < norm < 1.0
    for order in (0, 1, 2, 5, 60):
        form = make(NewtonAttention, order=order, values=False)
        form.load_state_dict(exact.state_dict(), strict=False)
        set_scalars(form, temperature, 1.0 / temperature if order else None)
        error = (form.split(form(z) - exact(z)).detach()).norm(dim=-1).amax().item()
        assert error <= norm ** (order + 1) / (1.0 - norm) * size + 1e-12
        assert order > 0 or error > 1e-4


def light(order: int, tau: float) -> Any:
    form = make(LightNewtonAttention, order=order)
    set_scalars(form, tau=tau)
    return form


def test_light_attention_without_tau_is_softmax_attention() -> None:
    z = draw()
    for order in (1, 2):
        assert torch.equal(light(order, 0.0)(z), make(fused=False)(z))
    # The fused attention of torch adds in another order.
    assert relative_error(light(1, 0.0)(z), make()(z)) <= 1e-14


@pytest.mark.parametrize("order", [1, 2, 5, 60])
def test_light_attention_approaches_the_solution_with_the_covariance(order: int) -> None:
    """The rest of a geometric series: ``|tau C|^(order + 1) / (1 - |tau C|) |m|`` at most."""
    z, form = draw(4), light(order, 0.3)
    query, key, value = (form.split(layer(z)) for layer in (form.query, form.key, form.value))
    weights = form.weights((query @ key.mT) * WIDTH**-0.5, None)
    mean = weights @ value
    deviations = value.unsqueeze(2) - mean.unsqueeze(3)
    step = 0.3 * torch.einsum("bhij,bhijp,bhijq->bhipq", weights, deviations, deviations)
    exact = torch.linalg.solve(torch.eye(WIDTH).double() - step, mean.unsqueeze(-1)).squeeze(-1)
    rest = (form.attend(query, key, z, None) - exact).norm(dim=-1)
    size, length = torch.linalg.matrix_norm(step, 2), mean.norm(dim=-1)
    assert size.max() < 0.8
    assert (rest <= size ** (order + 1) / (1 - size) * length + 1e-13).all()


@each_form
def test_later_tokens_reach_no_earlier_one(name: str) -> None:
    form, z = make(name), draw().requires_grad_()
    out = form(z)
    for i in range(TOKENS - 1):
        (gradient,) = torch.autograd.grad(out[:, i].sum(), z, retain_graph=True)
        assert (gradient[:, i + 1 :] == 0.0).all()
    other = z.detach().clone()
    other[:, 3:] += 1.0
    assert torch.equal(form(other)[:, :3], out[:, :3])
    assert not torch.allclose(
        build_attention_form(name, DIM, HEADS, causal=False).double()(other), out
    )


@each_form
def test_masked_tokens_are_absent(name: str) -> None:
    form, z = make(name), draw()
    mask = torch.tensor([[True, False, True, True, False], [False] * 5])
    found = form(z.masked_fill(~mask[..., None], torch.nan), mask=mask)
    assert (found[~mask] == 0).all()
    assert relative_error(found[:1, mask[0]], form(z[:1, mask[0]])) <= 1e-12


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@each_form
def test_transforms_of_functions(name: str) -> None:
    """Also of the fused form, by the dense formula."""
    form, z, v = make(name), draw(3)[:1], draw(3, seed=2)[:1]
    tangent = torch.func.jvp(form, (z,), (v,))[1]
    step = 1e-6
    expected = (form(z + step * v) - form(z - step * v)) / (2.0 * step)
    assert relative_error(tangent.detach(), expected.detach()) <= 1e-7

    def gradient(z: Tensor) -> Tensor:
        return torch.func.grad(lambda z: form(z).pow(3).sum())(z)

    product = torch.func.jvp(gradient, (z,), (v,))[1]
    expected = (gradient(z + step * v) - gradient(z - step * v)) / (2.0 * step)
    assert relative_error(product.detach(), expected.detach()) <= 1e-6


# Energy attention against stock attention, its masks, its gradients, and its errors.


TIGHT: dict[str, Any] = {
    "tolerance": Tolerance(rtol=1e-12),
    "adjoint": Implicit(tolerance=Tolerance(rtol=1e-12)),
    "on_failure": "raise",
}


def build(*arguments: Any, seed: int = 0, **options: Any) -> EnergyAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return EnergyAttention(*arguments, **options).double()


def drawn_input(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def queries_of(y: Tensor, heads: int) -> Tensor:
    return y.unflatten(-1, (heads, -1)).transpose(1, 2)


def stock(model: EnergyAttention, x: Tensor, source: Tensor, **options: Any) -> Tensor:
    """The same weights in torch's attention, with the keys for values."""
    query = queries_of(F.linear(x, model.query.weight), model.heads)
    key = queries_of(F.linear(source, model.key.weight), model.heads)
    attended = F.scaled_dot_product_attention(query, key, key, **options)
    return F.linear(attended.transpose(1, 2).flatten(2), model.output.weight)


def masks(keys: int) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand(2, keys, generator=generator) < 0.7
    seen[:, 0] = True
    pairs = torch.rand(2, 8, 6, keys, generator=generator) < 0.7
    pairs[..., 0] = True
    floating = torch.where(pairs, drawn_input(2, 8, 6, keys), -torch.inf)
    return {"none": None, "keys": seen, "pairs": pairs[:, 0], "heads": pairs, "floating": floating}


def as_stock(mask: Tensor | None) -> Tensor | None:
    if mask is None or mask.dim() == 4:
        return mask
    return mask[:, None, None] if mask.dim() == 2 else mask[:, None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", masks(6))
@pytest.mark.parametrize("cross", [False, True])
def test_one_step_is_stock_attention(cross: bool, name: str, dtype: torch.dtype) -> None:
    """Eight heads of 64 features, and the published bounds: 1e-12 and 1e-6."""
    model = build(48, 20 if cross else None, heads=8, head_dim=64).to(dtype)
    x = drawn_input(2, 6, 48).to(dtype)
    context = drawn_input(2, 7, 20, seed=1).to(dtype) if cross else None
    mask = masks(7 if cross else 6)[name]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    source = x if context is None else context
    if name == "keys" and not cross:  # a masked token asks nothing, either
        assert mask is not None
        x = source = x.masked_fill(~mask.unsqueeze(-1), 0.0)
    found = model(x, context, mask)
    expected = stock(model, x, source, attn_mask=as_stock(mask))
    if name == "keys" and not cross:  # and learns nothing
        assert mask is not None
        expected = expected.masked_fill(~mask.unsqueeze(-1), 0.0)
    bound = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found, expected, rtol=0.0, atol=bound)


def test_causal_attention() -> None:
    model = build(16, heads=2, causal=True)
    x = drawn_input(2, 6, 16)
    torch.testing.assert_close(model(x), stock(model, x, x, is_causal=True), rtol=0.0, atol=1e-12)
    mask = torch.tensor([[True] * 5 + [False], [True] * 6])
    both = mask[:, None, None] & torch.ones(6, 6, dtype=torch.bool).tril()
    hidden = x.masked_fill(~mask.unsqueeze(-1), 0.0)
    expected = stock(model, hidden, hidden, attn_mask=both).masked_fill(~mask.unsqueeze(-1), 0.0)
    torch.testing.assert_close(model(x, mask=mask), expected, rtol=0.0, atol=1e-12)
    open_rows = torch.ones(2, 6, 6, dtype=torch.bool)
    torch.testing.assert_close(model(x, mask=open_rows), model(x), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("steps", [1, 3])
def test_values_by_the_inverse_of_the_keys(steps: int) -> None:
    """One head of full width: ``W_o = W_v W_k^-1`` makes it attention with any values, as in hflayers."""
    model = build(32, head_dim=32, steps=steps)
    x, values = drawn_input(2, 6, 32), drawn_input(32, 32, seed=4) / 32**0.5
    with torch.no_grad():
        model.output.weight.copy_(torch.linalg.solve(model.key.weight.T, values.T).T)
    query, key = F.linear(x, model.query.weight), F.linear(x, model.key.weight)
    for _ in range(steps - 1):
        query = F.scaled_dot_product_attention(query, key, key)
    expected = F.scaled_dot_product_attention(query, key, F.linear(x, values))
    torch.testing.assert_close(model(x), expected, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 3, None])
@pytest.mark.parametrize("cross", [False, True])
def test_gradients(cross: bool, steps: int | None) -> None:
    """By the tokens, the context and every weight, unrolled and at the fixed point."""
    settings: Any = {} if steps else TIGHT
    model = build(
        4, 3 if cross else None, heads=2, beta=0.5, steps=steps, values="after", **settings
    )
    x = drawn_input(2, 3, 4).requires_grad_()
    context = drawn_input(2, 4, 3, seed=1).requires_grad_() if cross else None
    mask = torch.ones(2, 4 if cross else 3, dtype=torch.bool)
    mask[0, 1] = False
    names = [name for name, _ in model.named_parameters()]
    tokens = [x] if context is None else [x, context]

    def run(*given: Tensor) -> Tensor:
        inputs, weights = [*given[: len(tokens)], None], given[len(tokens) :]
        named = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(model, named, (inputs[0], inputs[1], mask))

    assert torch.autograd.gradcheck(run, [*tokens, *model.parameters()], fast_mode=steps is None)


def test_trajectory_and_its_energies() -> None:
    model, x = build(12, heads=3, steps=6, beta=2.0), drawn_input(2, 5, 12)
    found = model(x, return_trajectory=True)
    assert isinstance(found, QueryTrajectory)
    assert found.queries.shape == (7, 2, 3, 5, 4) and found.energies.shape == (7, 2, 3, 5)
    query, key = (queries_of(F.linear(x, w.weight), 3) for w in (model.query, model.key))
    torch.testing.assert_close(found.queries[0], query, rtol=0.0, atol=0.0)
    for at, energy in zip(found.queries, found.energies, strict=True):
        lse = (2.0 * at @ key.mT).logsumexp(-1) / 2.0
        torch.testing.assert_close(energy, 0.5 * at.square().sum(-1) - lse, rtol=1e-12, atol=1e-12)
    assert (found.energies.diff(dim=0) <= 1e-13).all()
    last = F.linear(found.queries[-1].transpose(1, 2).flatten(2), model.output.weight)
    torch.testing.assert_close(model(x), last, rtol=0.0, atol=1e-14)


@pytest.mark.parametrize("name", ["pairs", "heads", "floating"])
def test_equilibrium_among_pairs_is_the_limit_of_the_steps(name: str) -> None:
    """For samples that end after different numbers of evaluations."""
    x, mask = drawn_input(2, 6, 16) * torch.tensor([0.2, 1.0]).view(2, 1, 1), masks(6)[name]
    solved = build(16, heads=8, steps=None, beta=0.3, **TIGHT)
    limit = build(16, heads=8, steps=200, beta=0.3)
    torch.testing.assert_close(solved(x, mask=mask), limit(x, mask=mask), rtol=1e-9, atol=1e-9)
    assert solved.equilibrium is not None and solved.equilibrium.last is not None
    assert solved.equilibrium.last.evaluations.unique().numel() > 1


VOCABULARY, LENGTH = 11, 6
SMALL: dict[str, Any] = {"vocabulary": VOCABULARY, "dim": 8, "heads": 2, "length": LENGTH}


def language_model(cls: Any = LanguageModel, **options: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = SMALL | {"dropout": 0.0} | options
    if cls is LanguageModel:
        settings.setdefault("layers", 2)
    build: Any = cls
    return build(**settings).double()


def stirred(model: Any, scale: float = 0.3) -> Any:
    """Away from the small weights of the start, where every map is nearly linear."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def symbols(rows: int = 2, count: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(1))


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Each form, each step, and the equilibrium model with each gradient.
MODELS = [
    *((LanguageModel, name, "plain") for name in ATTENTION_FORMS),
    *((LanguageModel, "softmax", step) for step in DESCENTS if step != "plain"),
    *((EquilibriumLanguageModel, "softmax", gradient) for gradient in ("all", 4, "implicit")),
]


@pytest.mark.filterwarnings("ignore:tau is too large")
@pytest.mark.parametrize(("cls", "attention", "step"), MODELS)
def test_no_later_symbol_reaches_an_earlier_logit(cls: Any, attention: str, step: str) -> None:
    options: dict[str, Any] = {"attention": attention, "descent": step}
    if cls is EquilibriumLanguageModel:
        layer = {"adjoint": solvers.Implicit(on_failure="ignore")} if step == "implicit" else None
        options = {"gradient": step, "iterations": 12, "layer": layer}
    model, ids = stirred(language_model(cls, **options)), symbols()
    with torch.no_grad():
        tokens = model.tokens(ids)
    tokens.requires_grad_()
    states = model.mix(tokens, None)
    for i in range(LENGTH - 1):
        (gradient,) = torch.autograd.grad(states[:, i].sum(), tokens, retain_graph=True)
        assert (gradient[:, i + 1 :] == 0.0).all()
        assert (gradient[:, : i + 1] != 0.0).any(-1).all()
    other = ids.clone()
    other[:, 3:] = (other[:, 3:] + 1) % VOCABULARY
    logits, changed = model(ids), model(other)
    assert torch.equal(logits[:, :3], changed[:, :3])
    assert not torch.equal(logits[:, 3:], changed[:, 3:])


def test_sizes_by_the_formula() -> None:
    """``2 V d + n d + L (12 d^2 + 9 d) + 2 d``, and what the forms and steps add."""
    with torch.device("meta"):

        def size(*shape: Any, **options: Any) -> int:
            return count(LanguageModel(*shape, **options))

        pilot = (81, 64, 4, 4, 64)
        assert size(*pilot) == 2 * 81 * 64 + 64 * 64 + 4 * (12 * 64**2 + 9 * 64) + 2 * 64 == 213_504
        for descent, extra in (("gain", 8), ("momentum", 16), ("nesterov", 16)):
            assert size(*pilot, descent=descent) == 213_504 + extra
        assert size(*pilot, attention="light-newton-taylor") == 213_520
        assert size(*pilot, attention="newton-taylor") == 213_536
        experiment = (81, 96, 4, 6, 128)
        assert size(*experiment) == 696_768
        assert size(*experiment, attention="newton-taylor-no-value") == 641_520
        published = [(256, 4, 6), (384, 6, 8), (512, 8, 8), (768, 12, 12)]
        sizes = [size(50_257, d, heads, layers, 256) / 1e6 for d, heads, layers in published]
        assert sizes == pytest.approx([30.53, 52.88, 76.80, 162.41], abs=0.005)
        solved = EquilibriumLanguageModel(81, 64, 4, 64)
        assert count(solved) == size(81, 64, 4, 1, 64)


def test_a_looped_model_repeats_its_blocks() -> None:
    model, ids = stirred(language_model(layers=1, iterations=3)), symbols()
    z = model.tokens(ids)
    for _ in range(3):
        for step in model.steps:
            z = z + step.branch(z)
    assert torch.equal(model(ids), model.head(model.norm(z)))
    assert torch.equal(model(ids, iterations=3), model(ids))
    assert not torch.equal(model(ids, iterations=1), model(ids))
    assert model(ids[:, :1]).shape == (2, 1, VOCABULARY)


def test_a_few_steps_learn_what_follows_what() -> None:
    """``abab...``: from log 2 to almost nothing."""
    torch.manual_seed(0)
    model = LanguageModel(2, 8, 2, 1, 6, dropout=0.0, descent="momentum")
    ids = torch.arange(7) % 2
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    loss = torch.tensor(torch.inf)
    for _ in range(60):
        loss = F.cross_entropy(model(ids[None, :-1])[0], ids[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    found = generate(model, ids[None, :1], 9, temperature=0.0)
    assert found.tolist() == [[k % 2 for k in range(10)]]


def test_the_equilibrium_model_is_a_deq_transformer_among_its_tokens() -> None:
    model, ids = language_model(EquilibriumLanguageModel, iterations=(4, 8)).eval(), symbols()
    z = model.block.solve(model.tokens(ids), tolerance=1e-11, max_steps=200).value
    expected = model.head(model.norm(z))
    assert relative_error(model(ids, iterations=60), expected) <= 1e-9
    assert relative_error(model(ids, iterations="converged"), expected) <= 1e-2
    assert model.last.converged.all()
    assert torch.equal(model(ids), model(ids, iterations=6))
    assert model(symbols()[:0]).shape == (0, LENGTH, VOCABULARY)


def test_generated_text() -> None:
    model, prompt = stirred(language_model()), symbols(3, 4)
    generator = torch.Generator().manual_seed(0)
    found = generate(model, prompt, 10, generator=generator)
    assert found.shape == (3, 14) and torch.equal(found[:, :4], prompt)
    assert torch.equal(generate(model, prompt, 10, generator=generator.manual_seed(0)), found)
    greedy = generate(model, prompt, 10, temperature=0.0)
    assert torch.equal(generate(model, prompt, 10, most=1), greedy)
    model.eval()
    assert torch.equal(greedy[:, 4], model(prompt)[:, -1].argmax(-1))
    assert torch.equal(greedy[:, 13], model(greedy[:, 7:13])[:, -1].argmax(-1))
    few = generate(model, prompt, 30, most=2, generator=generator)
    best = model(few[:, 20:26])[:, -1].topk(2, -1).indices
    assert (few[:, 26:27] == best).any(-1).all()
    assert torch.equal(generate(model, prompt, 0), prompt)
    model.train().norm.eval()
    generate(model, prompt, 1)  # leaves every module in its mode
    assert model.training and model.dropout.training and not model.norm.training


def test_symbols_are_drawn_as_often_as_the_model_says() -> None:
    model, prompt = stirred(language_model()).eval(), symbols(1, 4).expand(4000, -1)
    drawn = generate(model, prompt, 1, generator=torch.Generator().manual_seed(0))[:, -1]
    shares = drawn.bincount(minlength=VOCABULARY) / len(drawn)
    expected = model(prompt[:1])[0, -1].softmax(-1).float().detach()
    assert (shares - expected).abs().max() < 4 * (0.25 / 4000) ** 0.5


# Mistakes, by what the error says.


X = torch.zeros(2, 5, 8)
MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: make("softmax", order=2), "order"),
    (lambda: make("newton", order=2), "order must be .* for the form 'newton'"),
    (lambda: make("newton-taylor", order=None), "order must be .* for the form 'newton-taylor'"),
    (lambda: make("newton-taylor-no-value", values=True), "values must be .* for the form 'newton-taylor-no"),
    (lambda: make()(draw(), draw(3)), "memory must have the shape of z"),
    (lambda: make()(torch.zeros(1, 2, 5)), "z must have 6 features"),
    *[(lambda given=given: EnergyAttention(8, heads=2)(*given), message) for given, message in (
        ((X[..., :4],), r"x must have the shape \(B, N, 8\), got \(2, 5, 4\)"),
        ((None,), r"x must hold tokens \(B, N, 8\), got NoneType"),
        ((X.double(),), "dtype of the weights, torch.float32, got torch.float64"),
        ((X, X), "context must be None in self-attention, got Tensor"),
        ((X, None, torch.ones(2, 4).bool()), r"mask must have the shape \(2, 5\)"),
        ((X, None, torch.ones(2, 5)), "mask must be bool where it is one of keys"),
        ((X, None, torch.ones(2, 5).long()), "mask must be bool, or floating"),
    )],
    (lambda: EnergyAttention(8, 8)(X, X[:1]), "context must have 2 samples like x, got 1"),
    (lambda: language_model()(symbols(count=7)), "symbols must be 1 to 6 in a row, got 7"),
    (lambda: language_model()(symbols().float()), r"symbols must be integers \(B, N\)"),
    (lambda: language_model()(symbols() + 9), r"symbols must lie in \[0, 10\], got "),
    (lambda: language_model(layers=0), "layers must be >= 1"),
    (lambda: language_model()(symbols(), iterations=0), "iterations must be >= 1"),
    (lambda: language_model(EquilibriumLanguageModel)(symbols(), iterations=0), "iterations must be >= 1"),
    (lambda: generate(language_model(), symbols()[:, :0], 3), r"prompt must be integers \(B, N\), N >= 1"),
    (lambda: generate(language_model(), symbols(), 3, temperature=-1.0), "temperature must be finite"),
    (lambda: generate(language_model(), symbols(), 3, most=0), "most must be >= 1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
