"""The deep-equilibrium layer, and the same layer as a fixed number of evaluations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.deq.problem import (
    Held,
    Map,
    MonitoredMap,
    batch_and_device,
    check_batched,
    check_inputs,
    flat,
    initial_state,
    prepare,
    prepares,
    refuse_sharded_parts,
)
from implicit_attn.dropout import SolveMasks, dropout_seeds
from implicit_attn.energies.energy import Energy, FunctionEnergy, replace_part
from implicit_attn.updates.update import FunctionUpdate, GradientStep, Update
from solvers.adjoints.kinds import read_adjoint
from solvers.core.checks import require_callable, require_count, require_flag, require_number
from solvers.core.cuda import on_cuda
from solvers.core.layout import Layout, check_mask
from solvers.core.modes import (
    constant_weights,
    eager,
    in_transform,
    read_anew,
    read_once,
    refuse_export,
    refuse_shapes,
)
from solvers.core.purity import refuse_drawing_modules
from solvers.core.solution import check_on_failure, read_tolerance
from solvers.core.telling import warn_user
from solvers.cuda.recording import Recorder
from solvers.fixed_points import read_solver, without_aux

Module = TypeVar("Module", bound=nn.Module)
OPTIONS = (
    "solver", "tolerance", "max_steps", "adjoint", "on_failure", "compact", "verify", "stop", "has_aux",
    "bounds",
)  # fmt: skip


class DEQ(nn.Module):
    """Deep-equilibrium layer: its output is the fixed point ``z* = f(z*, x)`` of an update f.

    The forward pass finds z* of every sample with a solver instead of applying a number of layers. The
    backward pass differentiates the equation at z* (implicit function theorem): with the incoming
    gradient g it solves the linear system ``u = g + (df/dz)^T u`` and returns ``(df/dx)^T u``, and
    likewise for the parameters. Its memory does not grow with the number of iterations.

    Args:
        update: f, an :class:`Update`; or an :class:`Energy`, for ``GradientStep(energy)``.
        solver: a ``solvers.Solver``, its class or its name (``"anderson"``); None: L-BFGS for gradient
            steps with one step size, else Anderson.
        tolerance: ``solvers.Tolerance``, or its ``rtol``, for each sample; None: ``Tolerance()``, 1e-4, but
            in half precision and under autocast what f can meet (:func:`solvers.fixed_point`).
        max_steps: maximal number of evaluations of f for each sample.
        adjoint: how gradients are computed, ``solvers.Implicit()`` by default, an adjoint, its class or its
            name (``"unrolled"``); None: no gradients.
        init: the initial state: "input" (``update.start(x, prepared)``, for most updates x), "zeros" (like
            x), or a function ``x -> z0``.
        on_failure: what to do about samples that do not converge: "warn", "raise" or "ignore".
        compact: let finished samples leave the batch; False where the update holds batched tensors.
        verify: evaluate the update once more at the returned value; see :func:`solvers.fixed_point`.
        stop: a rule ``stop(z) -> (B,) bool`` that ends samples as STOPPED, see :func:`solvers.fixed_point`.
        has_aux: the update returns ``(f(z, x), aux)``; ``layer.solve(x).aux`` is that of the returned value,
            with gradients, and ``last.aux`` the same without.
        bounds: a box ``(low, high)`` that the state must not leave, for gradient methods.
        eval_max_steps, eval_tolerance: in place of max_steps and tolerance where the layer is in evaluation
            mode; None: the same.

    Shapes: ``x`` (B, N, d) -> (B, N, d), or any pytree of tensors (B, ...) that the update takes.
    ``mask`` (B, N) bool is False at masked tokens: they keep their initial state, influence no other
    token and are left out of the residual.

    Attributes:
        last: the :class:`solvers.Solution` of the latest solve without its value: status, residual and
            evaluations of each sample, and ``last.adjoint.solution`` after a backward pass.

        observer: None, or a function that is called with (x, mask, solution) after every solve.

        evaluations_before: evaluations already spent on the initial state of the next solve, by a module
            around the layer; a number or (B,). ``last`` counts them; the solve sets them back to 0.

    Example:
        >>> from implicit_attn.energies import BiSoftmaxAttention, Quadratic, ReLUFeedForward
        >>> attention = BiSoftmaxAttention(64, heads=4).weighted(0.2, maximum=1.0)
        >>> layer = DEQ(attention + 0.2 * ReLUFeedForward(64, 128) + Quadratic())
        >>> x = torch.randn(2, 5, 64)
        >>> layer(x).shape
        torch.Size([2, 5, 64])
        >>> layer.solve(x, max_steps=200).statuses
        ['CONVERGED', 'CONVERGED']

    Source: Bai, Kolter, Koltun, "Deep Equilibrium Models" (2019), https://arxiv.org/abs/1909.01377.
    """

    _recorder: Recorder | None = None  # made by compile()

    def __init__(
        self,
        update: Update | Energy,
        *,
        solver: solvers.Solver | type[solvers.Solver] | str | None = None,
        tolerance: solvers.Tolerance | float | None = None,
        max_steps: int = 50,
        adjoint: solvers.Adjoint | type[solvers.Adjoint] | str | None = solvers.Implicit(),  # noqa: B008 (immutable)
        init: str | Callable[[Any], Any] = "input",
        on_failure: str = "warn",
        compact: bool = True,
        verify: bool | None = None,
        stop: Callable[[Any], Tensor] | None = None,
        has_aux: bool = False,
        bounds: tuple[Any, Any] | None = None,
        eval_max_steps: int | None = None,
        eval_tolerance: solvers.Tolerance | float | None = None,
    ) -> None:
        super().__init__()
        if isinstance(update, Energy):
            update = GradientStep(update)
        if not isinstance(update, Update):
            raise TypeError(
                "update must be an Update or an Energy (wrap plain functions by DEQ.from_update or "
                f"DEQ.from_energy), got {type(update)}"
            )
        if not callable(init) and init not in ("input", "zeros"):
            raise ValueError(f'init must be "input", "zeros" or a function of x, got {init!r}')
        self.update: Update = update
        self.solver, self.adjoint = read_solver(solver), read_adjoint(adjoint)
        self.tolerance = read_tolerance("tolerance", tolerance)
        self.eval_tolerance = read_tolerance("eval_tolerance", eval_tolerance)
        self.max_steps = require_count("max_steps", max_steps)
        if eval_max_steps is not None:
            require_count("eval_max_steps", eval_max_steps)
        self.eval_max_steps = eval_max_steps
        check_on_failure(on_failure)
        self.init, self.on_failure = init, on_failure
        self.compact = require_flag("compact", compact)
        self.verify = require_flag("verify", verify, optional=True)
        self.stop = require_callable("stop", stop, optional=True)
        self.has_aux, self.bounds = require_flag("has_aux", has_aux), bounds
        self.last: solvers.Solution | None = None
        self.observer: Callable[[Any, Tensor | None, solvers.Solution], object] | None = None
        self.evaluations_before: int | Tensor = 0
        self._seeds: Tensor | None = None  # of the dropout in the latest solve

    @classmethod
    def from_energy(
        cls, function: Callable[..., Tensor], *, step_size: float = 1.0, **options: Any
    ) -> DEQ:
        """The layer of an energy ``function(z)`` or ``function(z, x)`` -> (B,); options of ``DEQ``."""
        return cls(GradientStep(FunctionEnergy(function), step_size), **options)

    @classmethod
    def from_update(
        cls, function: Callable[..., Any], *, symmetric: bool = False, **options: Any
    ) -> DEQ:
        """The layer of an update ``function(z)`` or ``function(z, x)``; options of ``DEQ``."""
        return cls(FunctionUpdate(function, symmetric=symmetric), **options)

    def forward(self, x: Any, mask: Tensor | None = None, **options: Any) -> Any:
        """The fixed point for the input ``x``, like the initial state; the options are those of ``solve``."""
        refuse_export("layer.unrolled(k), or implicit_attn.deq.unroll(model, k)")
        return self.solve(x, mask, **options).value

    @eager
    @read_once()
    def solve(
        self,
        x: Any,
        mask: Tensor | None = None,
        *,
        z0: Any = None,
        record: bool = False,
        callback: Callable[[solvers.Progress], object] | None = None,
        **options: Any,
    ) -> solvers.Solution:
        """The :class:`solvers.Solution`, whose ``value`` has the same gradients as ``forward``'s.

        Args:
            x, mask: as for the layer.
            z0: initial state, instead of that of ``init``.
            record: keep the trace of residuals and energies.
            callback: called after every evaluation.
            options: those of the layer (solver, tolerance, max_steps, adjoint, on_failure, compact, verify,
                stop, has_aux, bounds), for this solve.

        Raises:
            TypeError, ValueError: for arguments that do not fit, naming the argument.
            solvers.SolveError: if ``on_failure="raise"`` and a sample did not converge.
        """
        before, self.evaluations_before = self.evaluations_before, 0
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise TypeError(f"unknown options {unknown}; solve takes {list(OPTIONS)}")
        refuse_sharded_parts(self.update)
        refuse_shapes(x)
        x = check_inputs(x, mask, self.update, z0)
        dropped = SolveMasks.of(self.update)
        seeds = None if dropped is None else dropout_seeds(*batch_and_device(z0, x))
        f, args, prepared = self._map(x, mask, dropped, seeds)
        start = initial_state(self.update, self.init, x, prepared) if z0 is None else z0
        if prepared is not x:  # the solver will not see x itself
            check_batched(x, start)
        elif not prepares(self.update):  # modules in ``prepare``, called once, may draw
            refuse_drawing_modules(self.update, "the update")
        options = self._options() | options
        options |= {"mask": mask, "record": record, "callback": callback}
        solution = None
        if self._recorder is not None and on_cuda(batch_and_device(start)[1]):
            solution = self._recorder(f, start, args, module=self.update, **options)
        if solution is None:
            solution = solvers.fixed_point(f, start, args, **options)
        if dropped is not None:
            dropped.require_called(self.update)
        if not in_transform():  # whose tensors must not be kept
            spent = solution.evaluations + before
            self.last = replace(solution, value=None, evaluations=spent)
            if solution.aux is not None:
                self.last.aux = pytree.tree_map(_detached, solution.aux)
            self._seeds = seeds
        if self.observer is not None:
            self.observer(x, mask, solution)
        return solution

    def compile(self, enabled: bool = True) -> None:  # type: ignore[override]
        """Ask for recorded solves on a GPU, where a solve is then replayed as CUDA graphs.

        On CUDA devices the solve and its gradients are recorded as CUDA graphs and replayed, see
        :class:`solvers.cuda.recording.Recorder`. This has not been run on a card yet. On a CPU this changes
        nothing, and a warning says so: the solves there already run in C++.

        Args:
            enabled: False returns to ordinary solves.
        """
        self._recorder = Recorder() if require_flag("enabled", enabled) else None
        tensors = (*self.parameters(), *self.buffers())
        if enabled and tensors and not any(on_cuda(tensor) for tensor in tensors):
            warn_user(
                "DEQ.compile() has an effect on a CUDA device only, and this layer is not on one: its "
                "solves run as before",
                UserWarning,
                "compile",
                self,
            )

    def jacobian_penalty(
        self,
        z: Any,
        x: Any,
        mask: Tensor | None = None,
        *,
        samples: int | None = 1,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """``|J|_F^2 / D`` of the Jacobian of the update at ``z``, (B,), with gradients.

        A loss that keeps the update contracting, :func:`solvers.jacobian_penalty`. Dropout has the masks
        of the layer's latest solve.

        Args:
            z: state: the ``value`` of a solve, or ``value.detach()``.
            x, mask: input and mask of that solve.
            samples, generator: as for :func:`solvers.jacobian_penalty`.
        """
        f, args = self._equation(x, mask, z)
        options: Any = {"mask": mask, "samples": samples, "generator": generator}
        return solvers.jacobian_penalty(f, z, args, **options)

    def spectral_radius(self, z: Any, x: Any, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Largest ``|eigenvalue|`` of the Jacobian of the update at ``z``, (B,) float64, no gradient.

        Below one, plain iteration converges near z, by about this factor a step. Arguments as for
        :meth:`jacobian_penalty`; ``options`` and errors are those of :func:`solvers.spectral_radius`.
        """
        f, args = self._equation(x, mask, z)
        return solvers.spectral_radius(Held(f), z, args, **options)

    def _equation(self, x: Any, mask: Tensor | None, z: Any) -> tuple[Any, tuple[Any, ...]]:
        """The map and its inputs ``f(z, *args)``, as the latest solve had them."""
        x = check_inputs(x, mask, self.update, z)
        dropped, seeds = SolveMasks.of(self.update), self._seeds
        if dropped is not None and (seeds is None or len(seeds) != batch_and_device(z, x)[0]):
            raise RuntimeError(
                "dropout in the update has the masks of the latest solve, and there was none with as many "
                "samples: solve for x first, or call eval()"
            )
        f, args, _ = self._map(x, mask, dropped, seeds)
        return (without_aux(f) if self.has_aux else f), args

    def _map(
        self, x: Any, mask: Tensor | None, dropped: SolveMasks | None, seeds: Tensor | None
    ) -> tuple[Map, tuple[Any, ...], Any]:
        """``f`` and ``args`` of ``fixed_point(f, z0, args)``, and what the update has prepared of x."""
        prepared = prepare(self.update, x, mask, seeds, dropped)
        read_anew()  # a user's own code may have changed a module
        given, spec = flat(prepared)
        kind = MonitoredMap if self.update.monitored else Map
        inputs = (given, mask) if dropped is None else (given, mask, seeds)
        return kind(self.update, self, spec, dropped), inputs, prepared

    def _options(self) -> dict[str, Any]:
        """The layer's options of :func:`solvers.fixed_point`, in its mode."""
        chosen = {name: getattr(self, name) for name in OPTIONS}
        if not self.training:
            if self.eval_max_steps is not None:
                chosen["max_steps"] = self.eval_max_steps
            if self.eval_tolerance is not None:
                chosen["tolerance"] = self.eval_tolerance
        return chosen

    def extra_repr(self) -> str:
        return f"solver={self.solver}, tolerance={self.tolerance}, max_steps={self.max_steps}"

    def replace(self, old: Energy, new: Energy) -> DEQ:
        """This layer with the energy ``new`` in the place of ``old``, a part of its energy.

        The two layers share all other parameters and have the same options. The question that a trained
        layer answers can be changed so, as :class:`implicit_attn.energies.DataTerm` shows.

        Raises:
            TypeError: if ``new`` is no energy.
            ValueError: if ``old`` is no part of this layer.
        """
        changed = replace_part(self, old, new)
        changed.last, changed._recorder = None, None
        return changed

    def unrolled(
        self, evaluations: int, *, damping: float = 1.0, window: int | None = None
    ) -> UnrolledLayer:
        """The update in a fixed number of evaluations, with this layer's weights: see the class.

        It has no control flow that depends on numbers, so it can be exported (``torch.export``, ONNX),
        compiled whole, and mapped and differentiated in every mode by ``torch.func``.

        Args:
            evaluations, damping, window: as for :class:`implicit_attn.deq.UnrolledLayer`.
        """
        if self.bounds is not None:
            raise ValueError(
                "unrolled(k) does not know the layer's bounds: clamp in the update instead"
            )
        fixed = UnrolledLayer(
            self.update, evaluations, init=self.init, damping=damping, window=window,
            has_aux=self.has_aux,
        )  # fmt: skip
        fixed.training = self.training  # not .train(), which would set the shared update's mode
        return fixed


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class UnrolledLayer(nn.Module):
    r"""A layer's update, evaluated a fixed number k of times: ``z_{i+1} = (1 - a) z_i + a f(z_i, x)``.

    Made by ``layer.unrolled(k)``, whose weights and initial state it shares. Nothing in it depends on
    numbers (no tolerance, no samples that leave), so ``torch.export``, ONNX, ``torch.compile`` with
    ``fullgraph=True`` and all transforms of ``torch.func`` go through it, forward mode (``jvp``) too.
    Its gradients are those of the k iterations, with memory that grows with k; they are not those of
    implicit differentiation, to which they converge as the iteration does.

    The result ``z_k`` is that of the layer with ``solver=Forward(damping)``, no tolerance and ``max_steps``
    k + 1, as long as residuals and, where an energy is monitored, energies fall: the layer spends its last
    evaluation on the residual of what it returns. Whether k is enough is not looked at here: ask the layer,
    ``layer.solve(x, solver="forward").evaluations``, on inputs like those to come.

    Args:
        update, init: of the layer.
        evaluations: k, >= 1.
        damping: a, in (0, 2].
        window: gradients go through the last ``window`` evaluations alone (truncated back-propagation),
            with memory of these; None: through all.
        has_aux: the update returns a pair, whose second part is dropped.

    Shapes: as for the layer. ``forward`` takes (x, mask), or ``z0`` for another initial state. Inputs are
    checked as by the layer, but for NaN inside of compilers and exporters.

    Example:
        >>> from implicit_attn import DEQ
        >>> from implicit_attn.energies import Hopfield, Quadratic
        >>> layer = DEQ(Quadratic() + 0.5 * Hopfield(torch.eye(4)))
        >>> program = layer.unrolled(12)  # for torch.export.export(program.eval(), (x,))
        >>> program(torch.ones(2, 3, 4)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(
        self,
        update: Update,
        evaluations: int,
        *,
        init: str | Callable[[Any], Any] = "input",
        damping: float = 1.0,
        window: int | None = None,
        has_aux: bool = False,
    ) -> None:
        super().__init__()
        self.update, self.init = update, init
        self.evaluations = require_count("evaluations", evaluations)
        self.has_aux = require_flag("has_aux", has_aux)
        self.damping = require_number("damping", damping, low=0.0, high=2.0, closed=False)
        self.window = evaluations if window is None else require_count("window", window)

    def forward(self, x: Any, mask: Tensor | None = None, *, z0: Any = None) -> Any:
        """``z_k`` for the input ``x``, of the structure of the initial state."""
        x = check_inputs(x, mask, self.update, z0)
        dropped = SolveMasks.of(self.update)
        with _weights_once():
            seeds = None if dropped is None else dropout_seeds(*batch_and_device(z0, x))
            prepared = prepare(self.update, x, mask, seeds, dropped)
            start = initial_state(self.update, self.init, x, prepared) if z0 is None else z0
            check_batched(x, start)
            if not prepares(self.update):  # modules in ``prepare``, called once, may draw
                refuse_drawing_modules(self.update, "the update")
            given, spec = flat(prepared)
            f, rest = Map(self.update, self, spec, dropped), (given, mask, seeds)
            f = without_aux(f) if self.has_aux else f
            early = self.evaluations - min(self.window, self.evaluations)
            if early:
                with torch.no_grad(), _weights_once():  # computed again, without a graph
                    start = self._iterate(early, f, start, *rest)
            return self._iterate(self.evaluations - early, f, start, *rest)

    def _iterate(
        self,
        count: int,
        f: Callable[..., Any],
        start: Any,
        x: Any,
        mask: Tensor | None,
        seeds: Tensor | None,
    ) -> Any:
        layout = Layout.of(start)
        z = layout.vector(start)
        keep = None
        if mask is not None:
            check_mask(mask, layout, z.shape[0], z.device)
            keep = layout.mask_vector(mask)
        for _ in range(count):
            value = layout.vector(f(layout.tree(z), x, mask, seeds))
            if value.shape != z.shape:  # which might be broadcast
                raise ValueError(
                    f"the update must return a state like z0, {tuple(z.shape)} with the numbers of a "
                    f"sample in a row, got {tuple(value.shape)}"
                )
            value = value.to(z.dtype)
            if self.damping != 1.0:
                value = z + self.damping * (value - z)
            z = value if keep is None else torch.where(keep, value, z)  # masked tokens stay
        return layout.tree(z)

    def baked(self) -> UnrolledLayer:
        """A copy whose parametrised weights (``bound=...``) are the tensors that they are now.

        What bounds a weight is an eigenvalue, which ONNX cannot compute, and which a program for
        inference need not compute anew.
        """
        return bake(self)

    def extra_repr(self) -> str:
        return f"evaluations={self.evaluations}, damping={self.damping}"


def _weights_once() -> AbstractContextManager[None]:
    """Within, parametrised weights are computed once.

    Not while Dynamo traces: it follows no variables of a thread, and merges equal computations itself.
    """
    return nullcontext() if torch.compiler.is_dynamo_compiling() else constant_weights()


def bake(module: Module) -> Module:
    """A copy of ``module`` with plain weights in the place of its parametrised ones.

    Frozen weights stay frozen, and buffers buffers.
    """
    copied = copy.deepcopy(module)
    for part in list(copied.modules()):
        if not parametrize.is_parametrized(part):
            continue
        lists: Any = part.parametrizations
        weights = {name: _plain(getattr(part, name), lists[name]) for name in lists}
        # Not by torch.nn.utils.parametrize, which would take the property off a class that the copy
        # shares with its original.
        part.__class__ = parametrize.type_before_parametrizations(part)
        del part.parametrizations
        for name, weight in weights.items():
            if isinstance(weight, nn.Parameter):
                part.register_parameter(name, weight)
            else:
                part.register_buffer(name, weight)
    return copied


def _plain(weight: Tensor, parametrization: nn.Module) -> Tensor:
    """A copy of a computed weight: a parameter, trained or frozen like its originals, or a buffer."""
    originals = list(parametrization.parameters())
    copied = weight.detach().clone()
    if not originals:
        return copied
    return nn.Parameter(copied, requires_grad=any(each.requires_grad for each in originals))


def unroll(model: nn.Module, evaluations: int, *, damping: float = 1.0) -> nn.Module:
    """``model`` with ``layer.unrolled(evaluations)`` in the place of each of its DEQ layers.

    A copy that shares all weights and buffers with ``model``, whose training changes both. What
    reads a layer's ``last`` finds none there.

    Args:
        model: any module; a DEQ itself gives its :class:`UnrolledLayer`, one within its update is
            replaced, too.
        evaluations, damping: as for :class:`UnrolledLayer`, for all layers.

    Raises:
        ValueError: no part of ``model`` is a DEQ.

    Example:
        >>> from implicit_attn import EquilibriumBlock
        >>> model = nn.Sequential(EquilibriumBlock(64, heads=4), nn.Linear(64, 10))
        >>> unroll(model, 8).eval()(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 10])
    """
    if _is_layer(model) and not any(_is_layer(part) for part in model.update.modules()):  # type: ignore[union-attr]
        return model.unrolled(evaluations, damping=damping)  # type: ignore[operator]
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(nn.ModuleList([model]), dict(shared))
    layers = [
        (parent, name, child)
        for parent in copied.modules()
        for name, child in parent._modules.items()  # one that is used twice, twice
        if child is not None and _is_layer(child)
    ]
    if not layers:
        raise ValueError(f"model must hold a DEQ layer, got {type(model).__name__} without one")
    found: Any
    for parent, name, found in layers:
        setattr(parent, name, found.unrolled(evaluations, damping=damping))
    return copied[0]


def _is_layer(module: nn.Module) -> bool:
    return isinstance(getattr(module, "update", None), Update) and hasattr(module, "unrolled")
