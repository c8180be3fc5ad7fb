"""The layer as a module: what it takes and refuses, returns and remembers, in every dtype."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.flop_counter import FlopCounterMode

import solvers
from cases.deq import DIM, LAYERS, Cell, gradients, make, relative_error, tokens
from implicit_attn import DEQ, Energy, EquilibriumBlock, GradientStep
from implicit_attn.energies import (
    BiSoftmaxAttention,
    Field,
    FunctionEnergy,
    Quadratic,
    ReLUFeedForward,
    SoftmaxAttention,
)
from implicit_attn.updates import MeanFieldAttention
from solvers import Implicit, Phantom, Tolerance


def well(z: Tensor, x: Tensor) -> Tensor:
    return 0.5 * (z - x).square().flatten(1).sum(1) + 0.1 * z.cosh().flatten(1).sum(1)


def relax(z: Tensor, x: Tensor) -> Tensor:
    return x - 0.1 * z.sinh()


def test_plain_energy_equals_the_energy_class() -> None:
    class Well(Energy):
        def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
            return well(z, x)

    options: dict[str, Any] = {"tolerance": Tolerance(rtol=1e-12)}
    x = tokens()
    expected = DEQ(Well(), **options)(x)
    torch.testing.assert_close(DEQ.from_energy(well, **options)(x), expected)
    torch.testing.assert_close(DEQ(FunctionEnergy(well), **options)(x), expected)
    torch.testing.assert_close(DEQ.from_update(relax, **options)(x), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        DEQ.from_energy(well, step_size=0.2, **options)(x), expected, rtol=1e-9, atol=1e-9
    )


def option(message: str, **options: Any) -> tuple[Callable[[], object], str]:
    """``fixed_point`` has the whole table of them."""
    return lambda: make("gradient", **options)(tokens()), message


def given(message: str, make_input: Callable[[], Any]) -> tuple[Callable[[], object], str]:
    return lambda: make("gradient")(make_input()), message


MISTAKES: list[tuple[Callable[[], object], str]] = [
    option("max_itr", max_itr=3),
    (lambda: make("gradient").solve(tokens(), max_itr=3), "max_itr"),
    (lambda: DEQ.from_energy(well, max_itr=3), "max_itr"),
    (lambda: make("gradient")(tokens(), src_key_padding_mask=None), "mask=~src_key_padding_mask"),
    (lambda: solvers.fixed_point(torch.cos, tokens(), tolerence=1), "did you mean tolerance"),  # type: ignore[call-arg]
    (lambda: solvers.root(torch.sin, tokens(), tol=1), "tol is called tolerance here"),
    (lambda: solvers.solve_linear(torch.abs, tokens(), maxiter=1), "maxiter is called max_steps here"),  # type: ignore[call-arg]
    # A message names what the user has called, not what that passes its options to.
    (lambda: solvers.root(torch.sin, tokens(), symetric=True), "^root has .* mean symmetric"),
    (lambda: solvers.root(lambda z: z.mul_(2), tokens()), "^F must not modify"),
    (lambda: solvers.root(torch.sin, tokens(), (tokens(1),)), "in F$"),
    (lambda: solvers.spectral_radius(torch.sin, tokens(), cont=1), "^spectral_radius .* mean count"),
    (lambda: DEQ.from_energy(well, stepsize=3), "^DEQ.from_energy has .* mean step_size"),
    (lambda: DEQ.from_update(torch.sin, symetric=True), "^DEQ.from_update has .* mean symmetric"),
    (lambda: GradientStep(Quadratic(), stepsize=1), "^GradientStep has .* mean step_size"),  # type: ignore[call-arg]
    (lambda: ReLUFeedForward(4, 8, bounds=1), "^ReLUFeedForward has .* mean bound"),  # type: ignore[call-arg]
    (lambda: EquilibriumBlock(4, 2, max_steps=9), r"go into layer=\{...\}"),  # type: ignore[call-arg]
    (lambda: MeanFieldAttention(3, 4)(tokens(dim=5)), "^MeanFieldAttention: z must"),
    (lambda: make("gradient").stream([tokens()], slotz=3), "did you mean slots"),
    (lambda: make("gradient").stream([tokens()], adjoint="implicit"), "stream takes no adjoint"),
    (lambda: list(make("gradient").stream([tokens()], masked=True)), r"a pair \(x, mask\)"),
    option("max_steps", max_steps=0),
    option("tolerance", tolerance="1e-3"),
    option("solver", solver="andersen"),
    option("adjoint", adjoint="implicitly"),
    option("eval_max_steps", eval_max_steps=0),
    option("eval_tolerance", eval_tolerance="1e-3"),
    *[
        (lambda update=update: DEQ(update), "update")  # type: ignore[arg-type]
        for update in (well, nn.Linear(2, 2), GradientStep)
    ],
    (lambda: DEQ(Quadratic(), init="ones"), "init"),
    *[given(r"\b(x|z|z0)\b", make_input) for make_input in (
        lambda: tokens() / 0, lambda: torch.tensor(1.0), lambda: tokens(dim=DIM + 1),
        lambda: torch.ones(2, 3, DIM).long(), lambda: tokens()[:, 0], lambda: [1.0, 2.0], lambda: None,
        lambda: {"x": tokens()},
    )],
    *[
        (lambda energy=energy: DEQ.from_energy(energy)(tokens()), message)  # type: ignore[arg-type]
        for energy, message in (
            (lambda z, x: (z - x).square().sum(), r"energy|lambda"),
            (lambda z, x: (z - x).square().sum(-1), r"energy|lambda"),
            (lambda z, x: 3.0, r"update|energy|lambda"),
            (lambda x, z: (z - x).square().flatten(1).sum(1), r"\bz\b"),
        )
    ],
    *[
        (lambda update=update: DEQ.from_update(update)(tokens()), message)
        for update, message in (
            (lambda z: z.sum(-1), r"\bf\b"),
            (lambda z: z.float(), r"\bf\b"),
            (lambda z: (z, z), "z0"),
            (lambda x, z: z, r"\bz\b"),
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


each_layer = pytest.mark.parametrize("name", LAYERS)


@each_layer
def test_copies_pickles_and_state_dicts(name: str) -> None:
    """After a backward pass; they are apart, and a file has parameters alone, whatever was solved."""
    layer, x = make(name, max_steps=77), tokens()
    layer(x).square().sum().backward()
    layer.zero_grad()
    loaded = make(name, seed=1)
    assert relative_error(loaded(x), layer(x)) > 1e-3
    loaded.load_state_dict(layer.state_dict())
    assert set(layer.state_dict()) == {key for key, _ in layer.named_parameters()}
    for twin in (loaded, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
        assert twin is loaded or twin.max_steps == 77
        twin(x).sum().backward()
        assert all(p.grad is None for p in layer.parameters())
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(0.1)
        assert relative_error(twin(x), layer(x)) > 1e-4


@each_layer
def test_half_precision(name: str) -> None:
    """Value and gradient are near those of float64."""
    found = []
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.bfloat16, 2e-2)):
        layer = make(name, max_steps=200, tolerance=tolerance).to(dtype)
        x = tokens().to(dtype).requires_grad_()
        solution = layer.solve(x)
        assert bool(solution.converged.all()), solution.summary()
        solution.value.square().sum().backward()
        assert solution.value.dtype == dtype
        assert all(g.dtype == dtype and g.isfinite().all() for g in gradients(layer).values())
        found.append((solution.value, x.grad))
    (exact, exact_gradient), (value, gradient) = found
    assert exact_gradient is not None and gradient is not None
    assert relative_error(value, exact) <= 5e-2
    assert relative_error(gradient, exact_gradient) <= 1e-1


def test_dict_input() -> None:
    """Each energy picks its part; gradients reach all parts."""
    torch.manual_seed(0)
    attention = SoftmaxAttention(DIM, 2, cross=True, context_dim=3, norm=None, bound=1.0)
    parts = 0.2 * Field().select("field") + Quadratic().select("x")
    energy = (0.5 * attention.select("context") + parts).double()
    layer = DEQ(energy, init=lambda x: x["x"], tolerance=1e-11, max_steps=300)

    def run(x: Tensor, context: Tensor, field: Tensor) -> Tensor:
        return layer({"x": x, "context": context, "field": field})

    inputs = [tokens(), tokens(count=5, dim=3, seed=1), tokens(seed=2)]
    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in inputs], fast_mode=True)


def test_last_solution() -> None:
    layer = make("gradient")
    assert layer.last is None
    x = tokens().requires_grad_()
    solution = layer.solve(x)
    last = layer.last
    assert last is not None and last.value is None
    for name, value in vars(last).items():
        assert not (isinstance(value, Tensor) and value.requires_grad), name
    assert torch.equal(pickle.loads(pickle.dumps(last)).residual, solution.residual)
    assert last.adjoint.solution is None and last.adjoint.solves == 0
    for number in (1, 2):
        solution.value.square().sum().backward(retain_graph=True)
        assert last.adjoint.solves == number
    adjoint = last.adjoint.solution
    assert adjoint is not None and bool(adjoint.converged.all())
    assert (adjoint.residual <= Tolerance().rtol).all() and (adjoint.evaluations >= 1).all()
    layer(x)
    assert layer.last is not last


@pytest.mark.defect("A8")
@pytest.mark.parametrize(("adjoint", "requires_grad"), [
    (Implicit(), False), (solvers.Unrolled(), True), (Phantom(2), True), (None, False),
])  # fmt: skip
def test_the_output_is_not_the_input(adjoint: Any, requires_grad: bool) -> None:
    """Also where the input is the solution: what is done to one leaves the other alone."""
    layer = DEQ(Quadratic(), adjoint=adjoint)
    leaf = tokens().requires_grad_(requires_grad)
    x = leaf * 1.0
    before = x.detach().clone()
    for y in (layer(x), layer.solve(x, z0=x).value, layer.solve(x, z0=before).value):
        assert torch.equal(y.detach(), before)
        with torch.no_grad():
            y.add_(1)
    assert torch.equal(x.detach(), before)
    z0 = before.clone()
    layer.solve(x, z0=z0).value.detach().zero_()
    assert torch.equal(z0, before)


@pytest.mark.defect("C7")
def test_updates_that_hold_the_whole_batch() -> None:
    """``compact=False``, of the layer or of one solve, is what the error message advises."""
    scale = torch.tensor([0.01, 0.01, 0.01, 0.9], dtype=torch.float64)[:, None, None]
    call: dict[str, Any] = {"tolerance": Tolerance(1e-10), "max_steps": 300}
    x = tokens(batch=4)

    def update(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(scale * z + x)

    with pytest.raises(ValueError, match="compact"):
        DEQ.from_update(update, **call)(x)
    expected = DEQ.from_update(update, **call).solve(x, compact=False)
    assert bool(expected.converged.all())
    assert torch.equal(DEQ.from_update(update, compact=False, **call)(x), expected.value)


@pytest.mark.defect("D9")
@pytest.mark.parametrize(("kind", "dtype"), [("energy", torch.bfloat16), ("map", torch.float16)])
def test_a_default_layer_converges_under_autocast(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = DEQ(BiSoftmaxAttention(64, 4) + ReLUFeedForward(64, 128) + Quadratic())
    x = torch.randn(8, 17, 64)
    if kind == "map":
        layer = DEQ.from_update(Cell(64))
    exact = layer.solve(x, tolerance=Tolerance(1e-6), max_steps=500).value
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        solution = layer.solve(x)  # a warning would be an error
    assert solution.converged.all()
    assert solution.evaluations.max() < 50
    assert (solution.value - exact).norm() <= 0.1 * exact.norm()
    solution.value.float().square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert solution.adjoint.solution is not None and solution.adjoint.solution.converged.all()


def half_tanh(z: Tensor, x: Tensor) -> Tensor:
    return 0.5 * torch.tanh(z) + x


@pytest.mark.parametrize("init", ["input", "zeros"])
def test_images_keep_their_layout(init: str) -> None:
    seen = []

    def f(z: Tensor, x: Tensor) -> Tensor:
        seen.append(z.is_contiguous(memory_format=torch.channels_last))
        return 0.3 * torch.tanh(z.flip(1)) + x

    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    layer = DEQ.from_update(f, init=init, tolerance=1e-10)
    plain = layer(x)
    assert not any(seen)
    seen.clear()
    moved = x.to(memory_format=torch.channels_last).requires_grad_()
    y = layer(moved)
    assert all(seen) and y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, plain)
    (slope,) = torch.autograd.grad(y.pow(3).sum(), moved)
    x.requires_grad_()
    torch.testing.assert_close(slope, torch.autograd.grad(layer(x).pow(3).sum(), x)[0])


def test_what_has_no_numbers_is_told_a_way() -> None:
    layer, block, x = DEQ.from_update(half_tanh), EquilibriumBlock(4, 2), torch.randn(2, 3, 4)
    with pytest.raises(RuntimeError, match="unrolled"):
        torch.jit.trace(layer, x, check_trace=False)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="fake"):
        layer(torch.randn(2, 3, 4))
    assert layer.unrolled(2)(x.to("meta")).shape == x.shape
    jagged = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged)
    with pytest.raises(TypeError, match="to_padded_tensor"):
        block(jagged)
    with pytest.raises(RuntimeError, match="meta"):
        block.to("meta")(x.to("meta"))


def test_a_number_among_the_inputs() -> None:
    x, rate = torch.randn(2, 3, 4), torch.tensor(0.3)
    layer = DEQ.from_update(lambda z, x: x[1] * z + x[0], init=lambda x: x[0])
    torch.testing.assert_close(layer((x, rate)), x / 0.7, rtol=1e-3, atol=1e-4)


def test_operations_of_a_backward_pass_are_counted() -> None:
    def counted(model: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(2, 3, 4, requires_grad=True)).sum().backward()
        return counter.get_total_flops()

    assert counted(DEQ.from_update(Cell())) > 0
    assert counted(EquilibriumBlock(4, 2, layer={"adjoint": "onestep"})) > 0
    assert counted(EquilibriumBlock(4, 2)) > 0


def test_a_solve_makes_one_power_iteration_of_a_spectral_norm_in_its_update() -> None:
    """Its weight is read once, with a graph."""
    torch.manual_seed(0)
    linear = spectral_norm(nn.Linear(4, 4, dtype=torch.float64))
    twin = copy.deepcopy(linear)
    layer = DEQ.from_update(Squashed(linear), tolerance=1e-10, max_steps=200)
    x = torch.randn(3, 4, dtype=torch.float64)
    value = layer(x)
    value.sum().backward()
    weight = twin.weight  # one power iteration
    for mine, theirs in zip(linear.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    z = value.detach()
    torch.testing.assert_close(0.5 * torch.tanh(z @ weight.mT + linear.bias) + x, z)
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.parameters())


class Squashed(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.linear(z)) + x


def test_an_energy_that_forgets_super_is_told_so() -> None:
    class Forgetful(Energy):
        def __init__(self) -> None:
            self.scale = 1.0

    with pytest.raises(TypeError, match=r"Forgetful.__init__ must call super\(\).__init__\(\)"):
        DEQ(Forgetful())


@pytest.mark.parametrize("filler", [torch.nan, torch.inf])
def test_what_is_not_finite_at_masked_tokens_is_no_error(filler: float) -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    update = nn.Linear(3, 3)
    layers = {
        "energy": DEQ(0.4 * BiSoftmaxAttention(3, heads=1) + Quadratic(), tolerance=1e-6),
        "update": DEQ.from_update(
            lambda z, x, mask=None: 0.5 * update(z).tanh() + x, tolerance=1e-6
        ),
    }
    for layer in layers.values():
        x = torch.randn(2, 4, 3, requires_grad=True)
        filled = x.detach().masked_fill(~mask[..., None], filler).requires_grad_()
        results = [layer(each, mask)[mask] for each in (x, filled)]
        torch.testing.assert_close(results[1], results[0])
        slopes = [
            torch.autograd.grad(y.square().sum(), each)[0]
            for y, each in zip(results, (x, filled), strict=True)
        ]
        torch.testing.assert_close(slopes[1][mask], slopes[0][mask])
        assert (slopes[1][~mask] == 0).all()
        with pytest.raises(ValueError, match=r"samples \[0\]"):
            layer(filled.detach().flip(0), mask)


def test_hooks_of_pruning_compute_the_weights_that_a_solve_reads() -> None:
    """The gradient of a pruned weight is that of the weight, times the mask."""
    x = tokens().float()
    exact = {"tolerance": 1e-6, "adjoint": Implicit(tolerance=1e-6)}
    plain, pruned = (EquilibriumBlock(DIM, 2, layer=exact) for _ in range(2))
    pruned.load_state_dict(plain.state_dict())
    layers = [block.energy.attention for block in (plain, pruned)]
    assert layers[0] is not None and layers[1] is not None
    prune.l1_unstructured(layers[1].query, "weight", 0.5)
    kept: Any = layers[1].query.weight_mask
    layers[0].query.weight.data *= kept
    for step in range(2):  # each with a graph of its own
        results = [block(x) for block in (plain, pruned)]
        torch.testing.assert_close(results[1], results[0])
        for result in results:
            result.pow(3).sum().backward()
        slopes: Any = [layers[0].query.weight.grad * kept, layers[1].query.weight_orig.grad]
        torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-3, atol=1e-4)
        assert slopes[1].abs().max() > 0.1 * (step + 1)


def test_an_older_spectral_norm_is_that_of_the_projection() -> None:
    block = EquilibriumBlock(DIM, 2)
    assert block.energy.attention is not None
    query: Any = block.energy.attention.query
    nn.utils.spectral_norm(query, n_power_iterations=200)
    for _ in range(2):
        block(tokens().float()).sum().backward()
    assert torch.linalg.matrix_norm(query.weight, 2).item() == pytest.approx(1.0, abs=1e-4)
    assert query.weight_orig.grad.abs().max() > 0


def test_batch_norm_that_is_called_in_a_solve_is_warned_of() -> None:
    torch.manual_seed(0)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(DIM)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.1 * self.norm(z) + x

    layer, x = DEQ.from_update(Normed(), on_failure="ignore"), torch.randn(5, DIM)
    for solve in (lambda: layer(x), lambda: list(layer.stream([x]))):
        with pytest.warns(UserWarning, match=r"BatchNorm1d \('function.norm'\) .* call eval\(\)"):
            solve()
    layer.unrolled(3)(x)  # as in any other network
    layer.eval()(x)
