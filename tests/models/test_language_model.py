"""Causal language models: sizes, no leak, equality at the start, sampling, equilibrium."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import solvers
from cases.energies import relative_error
from implicit_attn.models import ATTENTION_FORMS, EquilibriumLanguageModel, LanguageModel, generate
from implicit_attn.updates.update import DESCENTS

VOCABULARY, DIM, HEADS, LENGTH = 11, 8, 2, 6
SMALL: dict[str, Any] = {"vocabulary": VOCABULARY, "dim": DIM, "heads": HEADS, "length": LENGTH}


def make(cls: Any = LanguageModel, **options: Any) -> Any:
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
    model, ids = stirred(make(cls, **options)), symbols()
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
    model, ids = stirred(make(layers=1, iterations=3)), symbols()
    z = model.tokens(ids)
    for _ in range(3):
        for step in model.steps:
            z = z + step.branch(z)
    assert torch.equal(model(ids), model.head(model.norm(z)))
    assert torch.equal(model(ids, iterations=3), model(ids))
    assert not torch.equal(model(ids, iterations=1), model(ids))


def test_what_the_symbols_may_be() -> None:
    model = make()
    assert model(symbols(count=1)).shape == (2, 1, VOCABULARY)
    with pytest.raises(ValueError, match="symbols must be 1 to 6 in a row, got 7"):
        model(symbols(count=7))
    with pytest.raises(ValueError, match=r"symbols must be integers \(B, N\)"):
        model(symbols().float())
    with pytest.raises(ValueError, match="dropout must be < 1"):
        make(dropout=1.0)
    with pytest.raises(ValueError, match="layers must be >= 1"):
        make(layers=0)
    with pytest.raises(ValueError, match="iterations must be >= 1"):
        model(symbols(), iterations=0)


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
    model, ids = make(EquilibriumLanguageModel, iterations=(4, 8)).eval(), symbols()
    z = model.block.solve(model.tokens(ids), tolerance=1e-11, max_steps=200).value
    expected = model.head(model.norm(z))
    assert relative_error(model(ids, iterations=60), expected) <= 1e-9
    assert relative_error(model(ids, iterations="converged"), expected) <= 1e-2
    assert model.last.converged.all()
    assert torch.equal(model(ids), model(ids, iterations=6))
    assert model(symbols()[:0]).shape == (0, LENGTH, VOCABULARY)
    with pytest.raises(ValueError, match="iterations must be >= 1"):
        model(ids, iterations=0)


def test_generated_text() -> None:
    model, prompt = stirred(make()), symbols(3, 4)
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
    model, prompt = stirred(make()).eval(), symbols(1, 4).expand(4000, -1)
    drawn = generate(model, prompt, 1, generator=torch.Generator().manual_seed(0))[:, -1]
    shares = drawn.bincount(minlength=VOCABULARY) / len(drawn)
    expected = model(prompt[:1])[0, -1].softmax(-1).float().detach()
    assert (shares - expected).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_mistakes_of_sampling() -> None:
    model = make()
    with pytest.raises(ValueError, match=r"prompt must be integers \(B, N\), N >= 1"):
        generate(model, symbols()[:, :0], 3)
    with pytest.raises(ValueError, match="temperature must be finite and >= 0"):
        generate(model, symbols(), 3, temperature=-1.0)
    with pytest.raises(ValueError, match="most must be >= 1"):
        generate(model, symbols(), 3, most=0)
