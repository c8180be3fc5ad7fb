"""The layer as an ordinary module: containers, copies, files, dtypes, autocast."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from cases.deq import DIM, LAYERS, Cell, energy, gradients, make, relative_error, tokens
from implicit_attn import DEQ, ActivationStep, GradientStep
from implicit_attn.energies import IdentityLagrangian, Quadratic, ReLUFeedForward
from solvers import Tolerance

each_layer = pytest.mark.parametrize("name", LAYERS)


def test_inside_a_sequential() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(3, DIM).double(), nn.Linear(DIM, 2).double()
    layer = make("gradient")
    model = nn.Sequential(first, layer, nn.LayerNorm(DIM).double(), layer, last)
    x = tokens(dim=3)
    expected = last(layer(model[2](layer(first(x)))))
    torch.testing.assert_close(model(x), expected)
    model(x).square().sum().backward()
    assert all(bool(g.abs().max() > 0) for g in gradients(model).values())


@pytest.mark.parametrize("name", ["gradient", "update"])
def test_training_lowers_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, DIM), make(name).float(), nn.Linear(DIM, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x = tokens(batch=16, dim=3).float()
    target = (x[..., :1] * x[..., 1:2]).sin()
    losses = []
    for _ in range(60):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@each_layer
def test_state_dict_round_trip(name: str) -> None:
    source, target = make(name, seed=0), make(name, seed=1)
    assert relative_error(target(tokens()), source(tokens())) > 1e-3
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    target.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(target(tokens()), source(tokens()))


@each_layer
def test_state_dict_holds_parameters_alone(name: str) -> None:
    """No solver state, no cached weights: a file fits the layer whatever was solved before."""
    layer = make(name)
    before = set(layer.state_dict())
    layer(tokens()).sum().backward()
    assert set(layer.state_dict()) == before == {n for n, _ in layer.named_parameters()}


@each_layer
@pytest.mark.parametrize("when", ["fresh", "after-forward", "after-backward"])
def test_deepcopy(name: str, when: str) -> None:
    layer = make(name)
    if when != "fresh":
        loss = layer(tokens()).square().sum()
        if when == "after-backward":
            loss.backward()
    twin = copy.deepcopy(layer)
    layer.zero_grad()
    twin.zero_grad()
    assert torch.equal(twin(tokens()), layer(tokens()))
    twin(tokens()).sum().backward()
    assert all(p.grad is None for p in layer.parameters())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1)
    assert relative_error(twin(tokens()), layer(tokens())) > 1e-4


@each_layer
@pytest.mark.parametrize("used", [False, True])
def test_whole_module_through_a_file(name: str, used: bool) -> None:
    """``torch.save(layer)``; parametrised modules cannot be pickled by torch itself."""
    layer = make(name, max_steps=77) if name == "update" else unbounded(name)
    if used:
        layer(tokens()).sum().backward()
    twin = pickle.loads(pickle.dumps(layer))
    assert torch.equal(twin(tokens()), layer(tokens()))
    assert twin.max_steps == 77
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(tokens()), layer(tokens()))


def unbounded(name: str) -> DEQ:
    torch.manual_seed(0)
    memory = 0.3 * ReLUFeedForward(DIM, 6, norm=None)
    if name == "activation":
        return DEQ(ActivationStep(memory, IdentityLagrangian()).double(), max_steps=77)
    channels = DIM if name == "channels" else None
    step = GradientStep(energy(bound=None), 0.5, channels=channels)
    return DEQ(step.double(), max_steps=77)


def test_solution_through_a_file() -> None:
    """What the layer keeps of its latest solve must not keep a graph alive, or break copies."""
    layer = make("gradient")
    x = tokens().requires_grad_()
    layer(x).sum().backward()
    assert layer.last is not None and layer.last.value is None
    for name, value in vars(layer.last).items():
        assert not (isinstance(value, Tensor) and value.requires_grad), name
    assert layer.last.adjoint.solution is not None
    twin = pickle.loads(pickle.dumps(layer.last))
    assert torch.equal(twin.residual, layer.last.residual)


@each_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    exact = make(name, max_steps=200, tolerance=Tolerance(rtol=1e-10))
    reference = exact(tokens())
    single = dtype == torch.float32
    tolerance = Tolerance(rtol=1e-5 if single else 2e-2)
    layer = make(name, tolerance=tolerance).to(dtype)
    x = tokens().to(dtype).requires_grad_()
    solution = layer.solve(x)
    assert bool(solution.converged.all()), solution.summary()
    assert solution.value.dtype == dtype
    assert relative_error(solution.value, reference) <= (1e-4 if single else 5e-2)
    solution.value.square().sum().backward()
    y = tokens().requires_grad_()
    exact(y).square().sum().backward()
    assert x.grad is not None and y.grad is not None
    assert x.grad.dtype == dtype
    assert relative_error(x.grad, y.grad) <= (1e-3 if single else 1e-1)
    for key, gradient in gradients(layer).items():
        assert gradient.dtype == dtype, key
        assert bool(torch.isfinite(gradient).all()), key


@each_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(name: str, dtype: torch.dtype) -> None:
    layer = make(name, tolerance=Tolerance(rtol=2e-2)).float()
    x = tokens(scale=0.5).float().requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        solution = layer.solve(x)
        loss = solution.value.float().square().sum()
    loss.backward()
    assert bool(solution.converged.all()), solution.summary()
    exact = make(name, max_steps=200, tolerance=Tolerance(rtol=1e-9))
    y = tokens(scale=0.5).requires_grad_()
    z = exact(y)
    z.square().sum().backward()
    assert relative_error(solution.value, z) <= 5e-2
    assert x.grad is not None and y.grad is not None
    assert relative_error(x.grad, y.grad) <= 1e-1
    for key, gradient in gradients(layer).items():
        assert gradient.dtype == torch.float32, key
        assert bool(torch.isfinite(gradient).all()), key


def test_autocast_leaves_no_half_precision_weights_behind() -> None:
    """Casts made inside autocast must not be reused outside of it."""
    layer = make("gradient").float()
    x = tokens().float()
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer.solve(x, on_failure="ignore")
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("options", [{"channels": DIM}, {"learned": True}], ids=str)
def test_activation_step_in_half_precision(options: dict[str, int]) -> None:
    """Steps that are tensors must not widen the state."""
    memory = 0.3 * ReLUFeedForward(DIM, 6, norm=None)
    update = ActivationStep(memory, IdentityLagrangian(), 0.5, **options)  # type: ignore[arg-type]
    layer = DEQ(update.bfloat16(), tolerance=Tolerance(rtol=2e-2))
    assert layer(tokens().bfloat16()).dtype == torch.bfloat16
    half = ActivationStep(Quadratic(), IdentityLagrangian(), 0.5, **options)  # type: ignore[arg-type]
    assert half(tokens().bfloat16(), tokens().bfloat16()).dtype == torch.bfloat16


def test_hooks_see_the_layer() -> None:
    """Forward hooks, as used for probing and by wrappers, work as on any module."""
    layer = DEQ.from_update(Cell().double())
    seen: list[torch.Size] = []
    handle = layer.register_forward_hook(lambda _module, _inputs, z: seen.append(z.shape))
    layer(tokens())
    handle.remove()
    layer(tokens())
    assert seen == [(2, 3, DIM)]
