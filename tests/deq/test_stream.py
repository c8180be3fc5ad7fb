"""``layer.stream``: all samples of an iterable, in slots that are refilled."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import solvers
from cases.deq import COUNT, DIM, LAYERS, make
from implicit_attn import DEQ, EquilibriumBlock, VariationalDropout
from solvers.core.cuda import forced
from solvers.core.layout import leaves_of
from solvers.recording import RecordedRows

SAMPLES = 40


def inputs(samples: int = SAMPLES) -> Tensor:
    """Tokens of very different sizes, whose samples need different numbers of evaluations."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, COUNT, DIM, generator=generator, dtype=torch.float64)
    return x * torch.logspace(-1.5, 0.5, samples, dtype=torch.float64)[:, None, None]


def gathered(stream: Iterable[Any], like: Tensor) -> tuple[Tensor, Tensor]:
    """The values and the numbers of evaluations of all samples, in the order of the source."""
    value, counts = torch.full_like(like, torch.nan), torch.zeros(len(like), dtype=torch.int64)
    for index, solution in stream:
        assert solution.converged.all() and not solution.value.requires_grad
        assert counts[index].eq(0).all()
        value[index], counts[index] = solution.value, solution.evaluations
    return value, counts


@pytest.mark.parametrize("name", list(LAYERS))
def test_a_stream_gives_what_the_layer_gives(name: str) -> None:
    layer, x = make(name, tolerance=1e-6, max_steps=400), inputs()
    mask = torch.ones(SAMPLES, COUNT, dtype=torch.bool)
    mask[::2, -1] = False
    for given in (None,) if name == "update" else (None, mask):  # whose function takes no mask
        with torch.no_grad():
            expected = layer.solve(x, given)
        parts = x.split(7) if given is None else zip(x.split(7), mask.split(7), strict=True)
        stream = layer.stream(parts, slots=8, masked=given is not None)
        value, counts = gathered(stream, expected.value)
        torch.testing.assert_close(value, expected.value, rtol=1e-5, atol=1e-5)
        assert (counts - expected.evaluations).abs().max() <= 2


def test_batches_of_a_loader_and_one_tensor() -> None:
    layer, x = make("gradient", tolerance=1e-6, max_steps=400), inputs()
    expected = layer(x).detach()
    loader: Any = DataLoader(x, batch_size=9)  # type: ignore[arg-type]
    for source in (loader, x, [x[:1], x[1:]]):
        value, _ = gathered(layer.stream(source, slots=8), expected)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    assert list(layer.stream([])) == [] and layer.last is not None


def test_weights_of_the_layer_are_computed_once() -> None:
    """Parametrised weights are kept from one group of samples to the next."""
    layer, calls = make("gradient", tolerance=1e-6, max_steps=400), [0]
    norms: Any = [m for m in layer.modules() if hasattr(m, "parametrizations")]
    assert norms
    for lists in norms[0].parametrizations.values():
        lists[0].register_forward_hook(lambda *args: calls.__setitem__(0, calls[0] + 1))
    groups = list(layer.stream(inputs(), slots=8))
    assert len(groups) > 2 and 0 < calls[0] <= len(norms[0].parametrizations)


def test_a_block_and_its_padding() -> None:
    torch.manual_seed(0)
    block, x = EquilibriumBlock(DIM, heads=2).double().eval(), inputs()
    padding = torch.zeros(SAMPLES, COUNT, dtype=torch.bool)
    padding[::2, -1] = True
    for given in (None, padding):
        with torch.no_grad():
            expected = block.solve(x, None, given)
        parts = x.split(7) if given is None else zip(x.split(7), padding.split(7), strict=True)
        stream = block.stream(parts, slots=8, masked=given is not None)
        value, _ = gathered(stream, expected.value)
        torch.testing.assert_close(value, expected.value, rtol=2e-3, atol=2e-3)


def test_dropout_draws_one_mask_a_sample() -> None:
    torch.manual_seed(0)
    update = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), VariationalDropout(0.5)).double()
    with torch.no_grad():
        update[0].weight.mul_(0.3)  # type: ignore[operator, union-attr]
    layer = DEQ.from_update(lambda z, x: update(z) + x, tolerance=1e-6, max_steps=400)
    layer.update.part = update
    x = torch.ones(SAMPLES, COUNT, DIM, dtype=torch.float64)
    value, _ = gathered(layer.stream(x, slots=8), x)
    assert len({tuple(row.flatten().tolist()) for row in value.round(decimals=4)}) > SAMPLES // 2


def test_the_rule_may_see_the_inputs() -> None:
    layer = DEQ.from_update(lambda z, x: 0.5 * torch.tanh(z) + x, init="zeros")
    x = inputs()

    def near(z: Tensor, x: Tensor) -> Tensor:
        return (0.5 * torch.tanh(z) + x - z).flatten(1).norm(dim=1) < 1e-2

    for rule in (near, lambda z: z.flatten(1).norm(dim=1) >= 0):
        for _, solution in layer.stream(x, slots=8, stop=rule, tolerance=0.0):
            assert set(solution.statuses) == {"STOPPED"}


def test_initial_states_may_be_those_of_a_function() -> None:
    layer, x = make("gradient", tolerance=1e-6, max_steps=400), inputs()
    expected = layer.solve(x).value.detach()
    for _, solution in layer.stream(x, slots=40, start=lambda x: expected[: len(x)]):
        assert (solution.evaluations <= 4).all()


def test_samples_that_fail() -> None:
    layer = DEQ.from_update(lambda z, x: 0.9 * z.flip(-1) + x, solver="forward", max_steps=3)
    with pytest.warns(solvers.SolveWarning, match="MAX_STEPS"):
        assert len(list(layer.stream(inputs(), slots=40))) > 0
    with pytest.raises(solvers.SolveError):
        list(layer.stream(inputs(), slots=8, on_failure="raise"))


def test_mistakes() -> None:
    layer = make("gradient")
    with pytest.raises(TypeError, match="unknown options"):
        layer.stream(inputs(), recrod=True)
    with pytest.raises(ValueError, match="slots"):
        list(layer.stream(inputs(), slots=0))
    with pytest.raises(ValueError, match="compact=True"):
        list(layer.stream(inputs(), compact=False))
    with pytest.raises(ValueError, match="pad them to the size of the largest and pass a mask"):
        list(layer.stream([inputs(), inputs()[:, :2]], slots=8))
    with pytest.raises(ValueError, match="x must be finite"):
        list(layer.stream(inputs() / 0, slots=8))
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, DIM).double())
    changing = DEQ.from_update(lambda z, x: normed(z) + x)
    changing.update.part = normed
    with pytest.raises(ValueError, match="eval"):
        list(changing.stream(inputs()))


@pytest.mark.parametrize("name", ["update", "kinetic", "softmax_couplings"])
def test_recorded_turns_are_replayed_for_new_samples(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a recording is a plain call, which reads and writes the same buffers."""
    layer, x = make(name, tolerance=1e-4, max_steps=400).float(), inputs().float()
    expected = layer.solve(x)
    made, plain = list[RecordedRows](), RecordedRows.__init__

    def noted(self: RecordedRows, *args: Any) -> None:
        made.append(self)
        plain(self, *args)

    monkeypatch.setattr(RecordedRows, "__init__", noted)
    with warnings.catch_warnings(), forced():
        warnings.filterwarnings("ignore", "DEQ.compile")
        layer.compile()
        stream = layer.stream(x.split(7), slots=8)
        first = next(stream)
        places = [leaf.data_ptr() for leaf in leaves_of(made[0].problem.args) if leaf is not None]
        layer(x[:8])  # a recording of the same shapes does not disturb the stream
        value, counts = gathered([first, *stream], expected.value)
    assert places == [
        leaf.data_ptr() for leaf in leaves_of(made[0].problem.args) if leaf is not None
    ]
    assert len(made) == 1 and made[0].number < int(expected.evaluations.sum()) / 4
    torch.testing.assert_close(value, expected.value, rtol=5e-4, atol=5e-4)
    assert (counts - expected.evaluations).abs().max() <= 2
