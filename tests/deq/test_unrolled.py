"""A layer in a fixed number of evaluations: the layer's numbers, exported, compiled, transformed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.func import jacfwd, jacrev, jvp, vmap

from cases.deq import LAYERS, make, relative_error, tokens
from implicit_attn import DEQ, DEQTransformer, EquilibriumBlock
from implicit_attn.deq import UnrolledLayer, bake, unroll
from implicit_attn.energies import AttentionInput, FunctionEnergy, Quadratic
from solvers import Forward, Solver, Tolerance
from solvers.core.cuda import forced

ANY: Any = torch.export.Dim("batch", min=1, max=64)


def by_solver(
    layer: nn.Module, x: Tensor, solver: Solver, evaluations: int, mask: Tensor | None = None
) -> Tensor:
    """The layer's own value; one evaluation more is for the residual of what it returns."""
    exact = {"tolerance": Tolerance(0.0), "max_steps": evaluations + 1, "on_failure": "ignore"}
    return layer(x, mask, solver=solver, adjoint=None, **exact)


def exported(module: nn.Module, *given: Any, **options: Any) -> nn.Module:
    return torch.export.export(module, given, **options).module()


@pytest.mark.parametrize("name", LAYERS)
def test_as_the_layer_at_as_many_steps(name: str) -> None:
    layer, x = make(name), tokens(batch=3)
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[1, -1] = False
    masked = name != "update"
    ways: list[tuple[dict[str, Any], Solver]] = [({}, Forward()), ({"damping": 0.7}, Forward(0.7))]
    for options, solver in ways:
        found = layer.unrolled(5, **options)
        close: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-13}
        torch.testing.assert_close(found(x), by_solver(layer, x, solver, 5), **close)
        if masked:
            expected = by_solver(layer, x, solver, 5, mask)
            torch.testing.assert_close(found(x, mask), expected, **close)
    assert relative_error(layer.unrolled(1)(x), layer.unrolled(5)(x)) > 1e-4


@pytest.mark.parametrize("name", LAYERS)
def test_a_window_has_the_gradient_of_the_last_evaluations(name: str) -> None:
    layer, x = make(name), tokens()
    parameters = [each for each in layer.parameters() if each.requires_grad]
    whole, windowed = layer.unrolled(5), layer.unrolled(5, window=2)
    close: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-13}
    torch.testing.assert_close(windowed(x), whole(x), **close)
    torch.testing.assert_close(layer.unrolled(5, window=9)(x), whole(x), **close)
    last = layer.unrolled(2)(x, z0=layer.unrolled(3)(x).detach())
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    expected = torch.autograd.grad(last.square().sum(), parameters, **options)
    found = torch.autograd.grad(windowed(x).square().sum(), parameters, **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **close)
    assert any(each.abs().max() > 0 for each in found)


@pytest.mark.parametrize("name", ["gradient", "kinetic", "by autograd"])
def test_every_transform(name: str) -> None:
    wave = FunctionEnergy(lambda z, x: (0.5 * (z - x).square() + z.cos() / 3).flatten(1).sum(1))
    fixed = (DEQ(wave) if name == "by autograd" else make(name)).unrolled(3)
    x, direction = tokens(batch=3), tokens(batch=3, seed=1)
    torch.testing.assert_close(vmap(lambda row: fixed(row[None])[0])(x), fixed(x))
    jacobian: Any = torch.autograd.functional.jacobian(fixed, x)
    torch.testing.assert_close(jacrev(fixed)(x), jacobian)
    torch.testing.assert_close(jacfwd(fixed)(x), jacobian)
    slope = torch.tensordot(jacobian, direction, 3)
    torch.testing.assert_close(jvp(fixed, (x,), (direction,))[1], slope)


@pytest.mark.parametrize("name", ["gradient", "kinetic", "update"])
def test_exported_with_any_number_of_samples(name: str) -> None:
    layer, count = make(name), 2
    fixed = layer.unrolled(count).eval()
    program = exported(fixed, tokens(batch=3), dynamic_shapes=({0: ANY},))
    for batch in (1, 5):
        x = tokens(batch=batch, seed=batch)
        torch.testing.assert_close(program(x), fixed(x), rtol=1e-11, atol=1e-13)
        expected = by_solver(layer, x, Forward(), count)
        torch.testing.assert_close(program(x), expected, rtol=1e-11, atol=1e-13)


def test_a_model_of_blocks() -> None:
    torch.manual_seed(0)
    blocks = (EquilibriumBlock(8, 2), EquilibriumBlock(8, 2, causal=True, hidden=0))
    model = nn.Sequential(*blocks, nn.Linear(8, 3)).double().eval()
    fixed, x = unroll(model, 40), tokens(count=5, dim=8)
    assert fixed.state_dict().keys() == model.state_dict().keys()
    assert all(a is b for a, b in zip(fixed.parameters(), model.parameters(), strict=True))
    for block in blocks:
        block.deq.tolerance = Tolerance(1e-12)
    torch.testing.assert_close(fixed(x), model(x), rtol=1e-8, atol=1e-9)
    short = bake(unroll(model, 1))
    shapes = ({0: ANY, 1: torch.export.Dim("tokens", min=2, max=64)},)
    other = tokens(batch=3, count=7, dim=8)
    torch.testing.assert_close(short(other), unroll(model, 1)(other), rtol=1e-12, atol=1e-13)
    program, block = exported(short[1], x, dynamic_shapes=shapes), short[1]  # type: ignore[index]
    torch.testing.assert_close(program(other), block(other), rtol=1e-12, atol=1e-13)
    assert model(x).requires_grad  # baking has left the model's own weights alone


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*onnx.*:UserWarning")
def test_onnx() -> None:
    pytest.importorskip("onnxscript", reason="the extra export is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    fixed = make("mean_field").float().unrolled(3).eval()
    program = torch.onnx.export(
        fixed.baked(), (tokens(batch=3).float(),), dynamo=True, verbose=False,
        dynamic_shapes=({0: ANY},),
    )  # fmt: skip
    assert program is not None
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    x = tokens(batch=5, seed=2).float()
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), fixed(x), rtol=1e-5, atol=1e-6)


def test_an_unrolled_block_is_compiled_as_one_graph_for_cuda() -> None:
    """The bounds of its weights depend on a setting of the backend there."""
    fixed, x = EquilibriumBlock(8, 2).double().deq.unrolled(2), tokens(dim=8)
    with forced():
        compiled: Any = torch.compile(fixed, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), fixed(x))


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * self.dropout(z) + x


def test_an_unrolled_layer_refuses_what_the_layer_refuses() -> None:
    """A state of another shape would be broadcast; a mask a step has no fixed point."""
    x = tokens()
    for layer, start in (
        (DEQ.from_update(lambda z, x: z.sum((1, 2), keepdim=True)), x),
        (DEQ.from_update(lambda z, x: 0.5 * z + x), x[:1]),
        (DEQ.from_update(Drops()), x),
    ):
        for module in (layer, layer.unrolled(2)):
            with pytest.raises(ValueError):
                module(x, z0=start)
    assert DEQ.from_update(Drops()).eval().unrolled(2)(x).shape == x.shape


@pytest.mark.parametrize(("argument", "call"), [
    ("finite", lambda: make("gradient").unrolled(2)(tokens() * torch.nan)),
    ("dtype", lambda: make("gradient").unrolled(2)(tokens().float())),
    ("mask", lambda: make("gradient").unrolled(2)(tokens(), torch.ones(2, 9, dtype=torch.bool))),
    ("DEQ", lambda: unroll(nn.Linear(2, 2), 3)),
    ("evaluations", lambda: make("update").unrolled(0)),
    ("damping", lambda: make("update").unrolled(2, damping=3.0)),
    ("window", lambda: make("update").unrolled(2, window=0)),
])  # fmt: skip
def test_a_wrong_argument_is_refused_by_name(argument: str, call: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=argument):
        call()


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8)])
def test_no_samples_and_no_tokens_have_an_output(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for model in (EquilibriumBlock(8, 2).deq.unrolled(3), DEQTransformer(8, 2)):
        x = torch.zeros(shape, requires_grad=True)
        result = model(AttentionInput(tokens=x) if isinstance(model, UnrolledLayer) else x)
        result.sum().backward()
        assert result.shape == shape and x.grad is not None


def test_shapes_are_computed_of_fake_tensors() -> None:
    mask = torch.ones(2, 5, dtype=torch.bool)
    with FakeTensorMode() as mode:
        layer = DEQ(Quadratic()).unrolled(2)
        result = layer(torch.randn(2, 5, 8), mode.from_tensor(mask))
        assert result.shape == (2, 5, 8) and is_fake(result)
