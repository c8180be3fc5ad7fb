"""Attention as steps of descent, and the causal language models that are made of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from cases.energies import relative_error
from implicit_attn.models import (
    ATTENTION_FORMS,
    BlockLanguageModel,
    CausalAttention,
    EnergyAttention,
    EquilibriumLanguageModel,
    LanguageModel,
    NewtonAttention,
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


def heads_of(layer: nn.Linear) -> list[Tensor]:
    return [layer.weight.detach()[WIDTH * h : WIDTH * (h + 1)] for h in range(HEADS)]


def own_energy(z: Tensor, held: Tensor, query: Tensor, key: Tensor, kind: str, t: float) -> Tensor:
    """The free energy of one token (d,) among held ones (M, d) in one head."""
    q, k = query @ z, held @ key.mT
    return -t * ((k @ q if kind == "inner" else -0.5 * (q - k).square().sum(-1)) / t).logsumexp(0)


def newton_steps(form: NewtonAttention, z: Tensor, temperature: float, order: int | None) -> Tensor:
    """``-(1/H) sum_h`` of the pseudo-inverse, or its series, times the gradient, token by token."""
    steps = torch.zeros_like(z)
    for b in range(len(z)):
        for i in range(z.shape[1]):
            for query, key in zip(heads_of(form.query), heads_of(form.key), strict=True):
                energy = partial(
                    own_energy,
                    held=z[b, : i + 1],
                    query=query,
                    key=key,
                    kind="elastic",
                    t=temperature,
                )
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


@pytest.mark.parametrize("order", [None, 0, 1, 3])
def test_newton_is_the_step_of_autograds_hessian(order: int | None) -> None:
    temperature, z = 9.0, draw(4)
    form = make(NewtonAttention, order=order)
    tie_to_newton(form)
    with torch.no_grad():
        form.temperature.raw.copy_(torch.tensor(temperature).double().expm1().log())
        if order:
            form.tau.fill_(1.0 / temperature)
    expected = newton_steps(form, z, temperature, order)
    assert relative_error(form(z).detach(), expected) <= 1e-10


@each_form
def test_masked_tokens_are_absent(name: str) -> None:
    form, z = make(name), draw()
    mask = torch.tensor([[True, False, True, True, False], [False] * 5])
    found = form(z.masked_fill(~mask[..., None], torch.nan), mask=mask)
    assert (found[~mask] == 0).all()
    assert relative_error(found[:1, mask[0]], form(z[:1, mask[0]])) <= 1e-12


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


SEEN = torch.tensor([[True, False, True, True, True, False], [True] * 3 + [False] * 3])
PAIRS = torch.rand(2, 8, 6, 6, generator=torch.Generator().manual_seed(3)) < 0.7
PAIRS[..., 0] = True
FLOATING = torch.where(PAIRS, drawn_input(2, 8, 6, 6), -torch.inf)


@pytest.mark.parametrize(("mask", "cross", "dtype"), [
    (None, False, torch.float64), (PAIRS[:, 0], False, torch.float64), (PAIRS, False, torch.float64),
    (FLOATING, False, torch.float64), (SEEN, False, torch.float64), (SEEN, True, torch.float64),
    (FLOATING, True, torch.float32),
])  # fmt: skip
def test_one_step_is_stock_attention(mask: Tensor | None, cross: bool, dtype: torch.dtype) -> None:
    """Eight heads of 64 features, and the published bounds: 1e-12 and 1e-6."""
    model = build(48, 20 if cross else None, heads=8, head_dim=64).to(dtype)
    x = drawn_input(2, 6, 48).to(dtype)
    context = drawn_input(2, 6, 20, seed=1).to(dtype) if cross else None
    of_keys = mask is not None and mask.dim() == 2
    rows = mask[..., None] if mask is not None and of_keys and not cross else torch.tensor(True)
    x = x * rows  # a masked token asks nothing, and learns nothing
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    whole = mask
    if mask is not None and mask.dim() < 4:
        whole = mask[:, None, None] if of_keys else mask[:, None]
    expected = stock(model, x, x if context is None else context, attn_mask=whole) * rows
    bound = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(model(x, context, mask), expected, rtol=0.0, atol=bound)


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


@pytest.mark.parametrize(("steps", "cross"), [(3, True), (None, False)])
def test_gradients(cross: bool, steps: int | None) -> None:
    """By the tokens, the context and every weight, unrolled and at the fixed point."""
    settings: Any = {} if steps else TIGHT
    model = build(4, 3 if cross else None, heads=2, beta=0.5, steps=steps, **settings)
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
    states = model.mix(tokens)
    for i in range(LENGTH - 1):
        (gradient,) = torch.autograd.grad(states[:, i].sum(), tokens, retain_graph=True)
        assert (gradient[:, i + 1 :] == 0.0).all()
        assert (gradient[:, : i + 1] != 0.0).any(-1).all()
    other = ids.clone()
    other[:, 3:] = (other[:, 3:] + 1) % VOCABULARY
    logits, changed = model(ids), model(other)
    assert torch.equal(logits[:, :3], changed[:, :3])
    assert not torch.equal(logits[:, 3:], changed[:, 3:])


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


def test_generated_text() -> None:
    model, prompt = stirred(language_model()), symbols(3, 4)
    generator = torch.Generator().manual_seed(0)
    greedy = generate(model, prompt, 10, temperature=0.0)
    assert torch.equal(generate(model, prompt, 10, most=1), greedy)
    model.eval()
    assert greedy.shape == (3, 14) and torch.equal(greedy[:, :4], prompt)
    assert torch.equal(greedy[:, 4], model(prompt)[:, -1].argmax(-1))
    assert torch.equal(greedy[:, 13], model(greedy[:, 7:13])[:, -1].argmax(-1))
    few = generate(model, prompt, 30, most=2, generator=generator)
    best = model(few[:, 20:26])[:, -1].topk(2, -1).indices
    assert (few[:, 26:27] == best).any(-1).all()
    model.train().norm.eval()
    generate(model, prompt, 1)  # leaves every module in its mode
    assert model.training and model.dropout.training and not model.norm.training


@pytest.mark.parametrize("length", [30, 9])
def test_generation_by_steps_is_that_of_the_whole_sequence(length: int) -> None:
    """Beyond the context length the window moves, and the positions of all symbols change."""
    torch.manual_seed(0)
    model = BlockLanguageModel(VOCABULARY, 8, 2, 2, length).double().eval()
    for parameter in model.parameters():
        parameter.data *= 1.5
    prompt, calls = symbols(3, 4), []

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.length, self.model = length, model

        def forward(self, ids: Tensor) -> Tensor:
            return model(ids)

    model.register_forward_hook(lambda module, ids, logits: calls.append(ids[0].shape))
    found = generate(model, prompt, 20, generator=torch.Generator().manual_seed(0))
    assert len(calls) == max(0, 23 - length)
    expected = generate(Whole(), prompt, 20, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found, expected)
    logits, cache = model.step(found[:, :4])
    parts = [logits]
    for k in range(4, 9):
        logits, cache = model.step(found[:, k : k + 1], cache)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(found[:, :9]), rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match="symbols must have a length of 1"):
        model.step(torch.zeros(3, length, dtype=torch.int64), cache)


# Mistakes, by what the error says.


X = torch.zeros(2, 5, 8)
MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: make("softmax", order=2), "order"),
    (lambda: make("newton", order=2), "order"),
    (lambda: make()(draw(), draw(3)), "memory"),
    *[(lambda given=given: EnergyAttention(8, heads=2)(*given), message) for given, message in (
        ((X[..., :4],), r"\bx\b"),
        ((X, X), "context"),
        ((X, None, torch.ones(2, 4).bool()), "mask"),
        ((X, None, torch.ones(2, 5)), "mask"),
    )],
    (lambda: language_model()(symbols(count=7)), "symbols"),
    (lambda: language_model()(symbols() + 9), "symbols"),
    (lambda: generate(language_model(), symbols()[:, :0], 3), "prompt"),
    (lambda: generate(language_model(), symbols(), 3, temperature=-1.0), "temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
