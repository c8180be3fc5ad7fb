"""The deep-equilibrium layer, and the same layer as a fixed number of evaluations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import solvers
from implicit_attn.deq.map import (
    Map,
    MonitoredMap,
    PreparingMap,
    TokenRows,
    batch_and_device,
    check_inputs,
    refuse_sharded_parts,
)
from implicit_attn.deq.stream import solve_stream
from implicit_attn.deq.supervised import supervised_states
from implicit_attn.energies.energy import Energy, FunctionEnergy, replace_part
from implicit_attn.parametrised import changes_when_read
from implicit_attn.updates.update import FunctionUpdate, GradientStep, Update
from solvers.adjoint import read_adjoint
from solvers.core.argument_names import closest_name, hint_names
from solvers.core.checks import require_callable, require_count, require_flag, require_number
from solvers.core.cuda import on_cuda
from solvers.core.layout import Layout
from solvers.core.messages import warn_user
from solvers.core.modes import (
    eager,
    require_numbers,
)
from solvers.core.solution import check_on_failure
from solvers.core.tolerance import read_tolerance
from solvers.fixed_points import check_inputs as check_tensors
from solvers.fixed_points import read_solver, solve_checked
from solvers.recording import Recorder

Module = TypeVar("Module", bound=nn.Module)
OPTIONS = (
    "solver", "tolerance", "max_steps", "adjoint", "on_failure", "compact", "verify", "stop",
    "measure",
)  # fmt: skip
_read_options = attrgetter(*OPTIONS)


class DEQ(nn.Module):
    """Deep-equilibrium layer, whose output is the fixed point ``z* = f(z*, x)`` of an update f.

    The forward pass solves for z* of every sample instead of applying a number of layers. The
    backward pass differentiates the equation at z* (implicit function theorem): with the incoming
    gradient g it solves the linear system ``u = g + (df/dz)^T u`` and returns ``(df/dx)^T u``, and
    likewise for the parameters. Memory does not grow with the number of iterations.

    Args:
        update: f, an :class:`Update`; or an :class:`Energy`, for ``GradientStep(energy)``.
        solver: a ``solvers.Solver``, its class or its name (``"anderson"``); None for L-BFGS for gradient
            steps with one step size, else Anderson.
        tolerance: a ``solvers.Tolerance`` or its ``rtol``; None for 1e-4, and a larger value in half
            precision and under autocast (:func:`solvers.fixed_point`).
        max_steps: maximum number of evaluations of f per sample.
        adjoint: how gradients are computed: ``solvers.Implicit()`` (default) or another adjoint, its class
            or its name (``"unrolled"``); None for no gradients.
        init: initial state: "input" (``update.start(x, prepared)``, which is x for most updates), "zeros"
            (like x), or a function ``x -> z0``.
        on_failure: "warn", "raise" or "ignore" samples that do not converge.
        compact: whether finished samples leave the batch; False if the update contains batched tensors.
        verify: whether to evaluate the update again at the returned value; see :func:`solvers.fixed_point`.
        stop: rule ``stop(z) -> (B,) bool`` that ends samples as STOPPED, see :func:`solvers.fixed_point`.
        measure: ``measure(z)``, what is compared in the place of the state, see :func:`solvers.fixed_point`.
        eval_max_steps, eval_tolerance: values of max_steps and tolerance in evaluation mode; None for the
            same values.

    Shapes: ``x`` (B, N, d) -> (B, N, d), or any pytree of tensors (B, ...) that the update accepts.
    ``mask`` (B, N) bool is False at masked tokens, which keep their initial state, do not influence other
    tokens and are excluded from the residual.

    Attributes:
        last: the :class:`solvers.Solution` of the latest solve without its value: status, residual and
            evaluations of each sample, and ``last.adjoint.solution`` after a backward pass.

        observer: function of (x, mask, solution) called after every solve, or None.

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

    @hint_names
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
        verify: bool = True,
        stop: Callable[[Any], Tensor] | None = None,
        measure: Callable[[Any], Any] | None = None,
        eval_max_steps: int | None = None,
        eval_tolerance: solvers.Tolerance | float | None = None,
    ) -> None:
        super().__init__()
        if isinstance(update, Energy):
            update = GradientStep(update)
        if not isinstance(update, Update):
            raise TypeError(
                f"update must be an Update or an Energy, got {type(update)}; wrap a plain function "
                "with DEQ.from_update or DEQ.from_energy"
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
        self.verify = require_flag("verify", verify)
        self.stop = require_callable("stop", stop, optional=True)
        self.measure = require_callable("measure", measure, optional=True)
        self.last: solvers.Solution | None = None
        self.observer: Callable[[Any, Tensor | None, solvers.Solution], object] | None = None
        self._seeds: Tensor | None = None  # dropout seeds of the latest solve

    @classmethod
    @partial(hint_names, passed=__init__)
    def from_energy(
        cls, function: Callable[..., Tensor], *, step_size: float = 1.0, **options: Any
    ) -> DEQ:
        """Make a layer from an energy ``function(z)`` or ``function(z, x)`` -> (B,)."""
        return cls(GradientStep(FunctionEnergy(function), step_size), **options)

    @classmethod
    @partial(hint_names, passed=__init__)
    def from_update(
        cls, function: Callable[..., Any], *, symmetric: bool = False, **options: Any
    ) -> DEQ:
        """Make a layer from an update ``function(z)`` or ``function(z, x)``."""
        return cls(FunctionUpdate(function, symmetric=symmetric), **options)

    def forward(self, x: Any, mask: Tensor | None = None, **options: Any) -> Any:
        """Return the fixed point for the input ``x``, like the initial state; options as in ``solve``."""
        if torch.compiler.is_exporting():  # which cannot follow solve
            require_numbers()
        return self.solve(x, mask, **options).value

    @eager
    def solve(
        self,
        x: Any,
        mask: Tensor | None = None,
        *,
        z0: Any = None,
        record: bool = False,
        callback: Callable[[solvers.Progress], object] | None = None,
        token_rows: bool = False,
        **options: Any,
    ) -> solvers.Solution:
        """Return the :class:`solvers.Solution`, whose ``value`` has the gradients of ``forward``.

        Args:
            x, mask: input and mask of the layer.
            z0: initial state, instead of ``init``.
            record: whether to keep the trace of residuals and energies.
            callback: function called after every evaluation.
            token_rows: whether each token (dim 1 of a state (B, N, d)) is solved on its own: tokens of
                the update must not see each other's states.
            options: options of the layer (solver, tolerance, max_steps, adjoint, on_failure, compact, verify,
                stop, measure) for this solve.

        Raises:
            TypeError, ValueError: if an argument is invalid.
            solvers.SolveError: if ``on_failure="raise"`` and a sample did not converge.
        """
        require_numbers(x)
        options = self._chosen(options, "z0", "record", "callback", "token_rows")
        f = self._map()
        refuse_sharded_parts(f.parts)
        x = check_inputs(x, mask, f.parts, z0)
        seeds = f.seeds(z0, x)
        options |= {"mask": mask, "record": record, "callback": callback}
        with parametrize.cached() if changes_when_read(f.walked_modules) else nullcontext():
            solution = self._run(f, x, mask, seeds, z0, options, token_rows)
        f.masks.require_called(self.update)
        self.last, self._seeds = replace(solution, value=None), seeds
        if self.observer is not None:
            self.observer(x, mask, solution)
        return solution

    def stream(
        self,
        inputs: Iterable[Any],
        *,
        slots: int = 128,
        masked: bool = False,
        start: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> Iterator[tuple[Tensor, solvers.Solution]]:
        """Solve all samples of ``inputs``, ``slots`` of them at a time, and yield those that have ended.

        When samples end, the next ones take their slots. This pays where the numbers of evaluations differ,
        because no sample waits for the slowest one of its batch; see :func:`solvers.solve_queue`. A stream
        has no gradients, and it neither sets ``last`` nor calls ``observer``. After :meth:`compile` its turns
        are recorded once and replayed, except for energies, which it solves by L-BFGS.

        Args:
            inputs: batches x of any sizes, such as those of a ``DataLoader``, or one tensor. All samples have
                the same shapes: pad smaller ones and pass masks. An error of the iterator is raised after the
                samples before it have been yielded.
            slots: number of samples that are solved at a time, >= 1.
            masked: whether each batch is a pair ``(x, mask)``.
            start: function ``x -> z0`` of initial states, instead of ``init``.
            options: options of the layer for this call, except for ``adjoint`` and ``compact``. The rule
                ``stop`` is called with the states of the samples in the slots, ``stop(z)``, or also with
                their inputs, ``stop(z, x)``.

        Yields:
            ``(indices, solution)``: the positions (n,) of some samples among all samples of ``inputs``, and
            their :class:`solvers.Solution`, in the order in which they end.

        Raises:
            TypeError, ValueError: if an argument is invalid.
            solvers.SolveError: if ``on_failure="raise"`` and a sample did not converge.

        Example:
            >>> layer = DEQ.from_update(lambda z, x: 0.5 * torch.tanh(z) + x)
            >>> values = torch.empty(1000, 3)
            >>> for indices, solution in layer.stream(torch.randn(1000, 3).split(100), slots=64):
            ...     values[indices] = solution.value
        """
        if "adjoint" in options:
            raise TypeError("stream takes no adjoint, because it has no gradients")
        options = self._chosen(options, "slots", "masked", "start")
        require_flag("masked", masked)
        require_callable("start", start, optional=True)
        f = self._map()
        refuse_sharded_parts(f.parts)
        return solve_stream(f, inputs, masked, start, slots, options, self._recorder)

    def _chosen(self, options: dict[str, Any], *others: str) -> dict[str, Any]:
        """Return the options of the layer, and of a call in their place, which has ``others`` of its own."""
        if unknown := sorted(set(options) - set(OPTIONS)):
            known = [*OPTIONS, *others]
            hint = closest_name(unknown[0], known)
            if "src_key_padding_mask" in unknown:
                hint = "; pass mask=~src_key_padding_mask, True at the tokens to keep"
            raise TypeError(f"unknown options {unknown}{hint}; the known options are {known}")
        return self._options() | options

    def _map(self) -> Map:
        return MonitoredMap(self) if self.update.monitored else Map(self)

    def _run(
        self, f: Map, x: Any, mask: Tensor | None, seeds: Tensor | None, z0: Any, options: dict[str, Any],
        rows: bool,
    ) -> solvers.Solution:  # fmt: skip
        """Return the solution by recordings, where there are any, or by the ordinary loop."""
        recorder, given = self._recorder, {"module": self.update, **options}
        if recorder is not None and not on_cuda(batch_and_device(z0, x)[1]):
            recorder = None
        if recorder is not None and z0 is None and seeds is None and f.prepares_alike(x):
            solution = recorder(PreparingMap(self), None, (x, mask), **given)
            if solution is not None:
                return solution
            recorder = None
        with f.weights_once():
            args, start = f.prepare_arguments(x, mask, seeds, z0)
            if args[0] is x:
                f.check_modules()
            solution = None if recorder is None else recorder(f, start, args, **given)
            if solution is not None:
                return solution
            if rows and isinstance(start, Tensor) and start.numel():
                return TokenRows(f, start, args).solve(start, mask, options)
            layout = Layout.of(start)
            # An energy of the package makes its context and the start of what has been checked.
            if f.places is None or z0 is not None or callable(self.init):
                check_tensors(start, args)
            return solve_checked(f, start, layout, args, **options)

    def compile(self, enabled: bool = True) -> None:  # type: ignore[override]
        """Record the solve and its gradients as CUDA graphs and replay them.

        See :class:`solvers.recording.Recorder`. On a CPU it has no effect except a warning: solves there
        already run in C++.

        Args:
            enabled: False to return to ordinary solves.
        """
        self._recorder = Recorder() if require_flag("enabled", enabled) else None
        tensors = (*self.parameters(), *self.buffers())
        if enabled and tensors and not any(on_cuda(tensor) for tensor in tensors):
            warn_user(
                "DEQ.compile() has no effect because this layer is not on a CUDA device: its solves "
                "run as before",
                UserWarning,
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
        """Return ``|J|_F^2 / D`` (B,) of the Jacobian of the update at ``z``, with gradients.

        As a loss it keeps the update contracting; see :func:`solvers.jacobian_penalty`. Dropout uses the
        masks of the layer's latest solve.

        Args:
            z: the ``value`` of a solve, or ``value.detach()``.
            x, mask: input and mask of that solve.
            samples, generator: see :func:`solvers.jacobian_penalty`.
        """
        f, args = self._equation(x, mask, z)
        options: Any = {"mask": mask, "samples": samples, "generator": generator}
        return solvers.jacobian_penalty(f, z, args, **options)

    def spectral_radius(self, z: Any, x: Any, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Return the spectral radius of the Jacobian of the update at ``z``, (B,) float64, detached.

        If it is below one, plain iteration converges near z, by about this factor per step. Arguments are
        those of :meth:`jacobian_penalty`, ``options`` and errors those of :func:`solvers.spectral_radius`.
        """
        f, args = self._equation(x, mask, z)
        return solvers.spectral_radius(f, z, args, mask=mask, **options)

    def _equation(self, x: Any, mask: Tensor | None, z: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the map and its inputs ``f(z, *args)`` of the latest solve."""
        f, seeds = self._map(), None
        x = check_inputs(x, mask, f.parts, z)
        if f.masks.numbers:
            seeds = self._seeds
            if seeds is None or len(seeds) != batch_and_device(z, x)[0]:
                raise RuntimeError(
                    "the update's dropout reuses the masks of the latest solve, but there was no solve with "
                    "this batch size: solve for x first, or call eval()"
                )
        args, _ = f.prepare_arguments(x, mask, seeds, z)
        return f, args

    def _options(self) -> dict[str, Any]:
        """Return the options of :func:`solvers.fixed_point` in the current mode."""
        chosen: dict[str, Any] = dict(zip(OPTIONS, _read_options(self), strict=True))
        if not self.training:
            if self.eval_max_steps is not None:
                chosen["max_steps"] = self.eval_max_steps
            if self.eval_tolerance is not None:
                chosen["tolerance"] = self.eval_tolerance
        return chosen

    def extra_repr(self) -> str:
        return f"solver={self.solver}, tolerance={self.tolerance}, max_steps={self.max_steps}"

    def replace(self, old: Energy, new: Energy) -> DEQ:
        """Return this layer with a term ``old`` of its energy replaced by ``new``.

        The two layers share all other parameters and have the same options. This changes the task of a
        trained layer; see :class:`implicit_attn.energies.DataTerm`.

        Raises:
            TypeError: if ``new`` is not an energy.
            ValueError: if ``old`` is not a part of this layer.
        """
        changed = replace_part(self, old, new)
        changed.last, changed._recorder = None, None
        return changed

    def unrolled(
        self, evaluations: int, *, damping: float = 1.0, window: int | None = None
    ) -> UnrolledLayer:
        """Return the :class:`UnrolledLayer` with a fixed number of evaluations and this layer's weights.

        It has no data-dependent control flow, so it supports ``torch.export``, ONNX, ``torch.compile`` with
        ``fullgraph=True`` and all transforms of ``torch.func``.

        Args:
            evaluations, damping, window: see :class:`implicit_attn.deq.UnrolledLayer`.
        """
        fixed = UnrolledLayer(
            self.update, evaluations, init=self.init, damping=damping, window=window
        )
        fixed.training = self.training  # not .train(), which would set the shared update's mode
        return fixed

    def supervised(
        self, x: Any, segments: int, steps: int | Sequence[int], *, grad: int = 1, detach: bool = True,
        mask: Tensor | None = None, z0: Any = None,
    ) -> Iterator[Any]:  # fmt: skip
        """Yield the state after each segment of plain iteration ``z <- f(z, x)``, for deep supervision.

        A segment continues from the state of the previous one. The gradient of a state passes through the
        last ``grad`` evaluations of its segment, or through all previous ones with ``detach=False``. The
        caller may call ``backward`` and change the weights before it asks for the next state; ``x`` then
        needs a graph of its own for every segment, so detach it or compute it in the update. Dropout draws
        new masks for every segment.

        Args:
            x, mask: input and mask of the layer.
            segments: number of segments, >= 1.
            steps: number of evaluations of each segment, or a sequence with one number per segment.
            grad: number of evaluations at the end of a segment with gradients, at most ``steps``.
            detach: whether a segment starts from the detached state of the previous one; False needs
                ``grad`` equal to ``steps``.
            z0: initial state, instead of ``init``.

        Example:
            >>> layer = DEQ.from_update(lambda z, x: 0.5 * torch.tanh(z) + x)
            >>> states = layer.supervised(torch.ones(2, 3), segments=4, steps=2)
            >>> [round(float(z[0, 0]), 4) for z in states]
            [1.4406, 1.4475, 1.4476, 1.4476]

        Source: deep supervision of Jolicoeur-Martineau, "Less is More: Recursive Reasoning with Tiny
        Networks" (2025), https://arxiv.org/abs/2510.04871; states of Bai, Geng, Savani, Kolter (2022),
        https://arxiv.org/abs/2204.08442.
        """
        options: Any = {"grad": grad, "detach": detach, "mask": mask, "z0": z0}
        return supervised_states(self, x, segments, steps, **options)


class UnrolledLayer(nn.Module):
    r"""Fixed number k of evaluations of a layer's update, ``z_{i+1} = (1 - a) z_i + a f(z_i, x)``.

    ``layer.unrolled(k)`` makes it with the layer's weights and initial state. It has no data-dependent
    control flow, so it supports ``torch.export``, ONNX, ``torch.compile`` with ``fullgraph=True`` and all
    transforms of ``torch.func``, including forward mode (``jvp``). Its gradients are those of the k
    iterations, with memory that grows with k. They converge to the implicit gradients when the
    iteration converges.

    The result ``z_k`` is that of the layer with ``solver=Forward(damping)``, tolerance 0 and ``max_steps``
    k + 1, as long as residuals and monitored energies decrease: the layer needs one more evaluation for the
    residual. To choose k, look at ``layer.solve(x, solver="forward").evaluations`` for typical inputs.

    Args:
        update, init: update and initial state of the layer.
        evaluations: number of evaluations k, >= 1.
        damping: damping factor a, in (0, 2].
        window: number of last evaluations that gradients pass through (truncated back-propagation);
            None for all.

    Shapes: those of the layer. ``forward`` takes (x, mask) and optionally ``z0``. Inputs are checked as
    by the layer, except for NaN inside compilers and exporters.

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
    ) -> None:
        super().__init__()
        self.update, self.init = update, init
        self.evaluations = require_count("evaluations", evaluations)
        self.damping = require_number("damping", damping, low=0.0, high=2.0, closed=False)
        self.window = evaluations if window is None else require_count("window", window)

    def forward(self, x: Any, mask: Tensor | None = None, *, z0: Any = None) -> Any:
        """Return ``z_k`` for the input ``x``, with the structure of the initial state."""
        f = Map(self)
        x = check_inputs(x, mask, f.parts, z0)
        with f.weights_once():
            args, start = f.prepare_arguments(x, mask, f.seeds(z0, x), z0)
            f.check_modules(unrolled=True)
            early = self.evaluations - min(self.window, self.evaluations)
            if early:
                # The weights are computed again without a graph.
                with torch.no_grad(), f.weights_once():
                    start = self._iterate(early, f, start, *args)
            return self._iterate(self.evaluations - early, f, start, *args)

    def _iterate(
        self, count: int, f: Callable[..., Any], start: Any, x: Any, mask: Tensor | None, *seeds: Tensor
    ) -> Any:  # fmt: skip
        layout = Layout.of(start)
        z = layout.vector(start)
        keep = None
        if mask is not None:
            keep = layout.mask_vector(mask, z)
        for _ in range(count):
            value = layout.vector(f(layout.tree(z), x, mask, *seeds))
            if value.shape != z.shape:  # it might broadcast
                raise ValueError(
                    f"the update must return a state of shape {tuple(z.shape)}, with each sample "
                    f"flattened, got {tuple(value.shape)}"
                )
            value = value.to(z.dtype)
            if self.damping != 1.0:
                value = z + self.damping * (value - z)
            z = value if keep is None else torch.where(keep, value, z)  # masked tokens are constant
        return layout.tree(z)

    def baked(self) -> UnrolledLayer:
        """Return a copy whose parametrised weights (``bound=...``) are replaced by their current values.

        Bounded weights need eigenvalues, which ONNX does not support and inference need not recompute.
        """
        return bake(self)

    def extra_repr(self) -> str:
        return f"evaluations={self.evaluations}, damping={self.damping}"


def bake(module: Module) -> Module:
    """Return a copy of ``module`` whose parametrised weights are replaced by plain parameters.

    Frozen weights remain frozen, and buffers remain buffers.
    """
    copied = copy.deepcopy(module)
    for part in list(copied.modules()):
        if not parametrize.is_parametrized(part):
            continue
        lists: Any = part.parametrizations
        weights = {name: _plain(getattr(part, name), lists[name]) for name in lists}
        # torch.nn.utils.parametrize would remove the property from a class that the copy shares with
        # its original.
        part.__class__ = parametrize.type_before_parametrizations(part)
        del part.parametrizations
        for name, weight in weights.items():
            if isinstance(weight, nn.Parameter):
                part.register_parameter(name, weight)
            else:
                part.register_buffer(name, weight)
    return copied


def _plain(weight: Tensor, parametrization: nn.Module) -> Tensor:
    """Return a copy of a computed weight as a parameter, trained or frozen like the original, or buffer."""
    originals = list(parametrization.parameters())
    copied = weight.detach().contiguous().clone()
    if not originals:
        return copied
    return nn.Parameter(copied, requires_grad=any(each.requires_grad for each in originals))


def unroll(model: nn.Module, evaluations: int, *, damping: float = 1.0) -> nn.Module:
    """Return a copy of ``model`` with each DEQ layer replaced by ``layer.unrolled(evaluations)``.

    The copy shares all weights and buffers with ``model``. Its layers have no attribute ``last``.

    Args:
        model: any module, or a DEQ itself, which gives its :class:`UnrolledLayer`. Nested DEQ layers are
            replaced, too.
        evaluations, damping: options of :class:`UnrolledLayer` for all layers.

    Raises:
        ValueError: if ``model`` contains no DEQ.

    Example:
        >>> from implicit_attn import EquilibriumBlock
        >>> model = nn.Sequential(EquilibriumBlock(64, heads=4), nn.Linear(64, 10))
        >>> unroll(model, 8).eval()(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 10])
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(nn.ModuleList([model]), dict(shared))
    layers = [
        (parent, name, child)
        for parent in copied.modules()
        for name, child in parent._modules.items()  # a shared module appears more than once
        if child is not None and _is_layer(child)
    ]
    if not layers:
        raise ValueError(f"model must contain a DEQ layer, {type(model).__name__} has none")
    found: Any
    for parent, name, found in layers:
        setattr(parent, name, found.unrolled(evaluations, damping=damping))
    return copied[0]


def _is_layer(module: nn.Module) -> bool:
    return isinstance(getattr(module, "update", None), Update) and hasattr(module, "unrolled")
