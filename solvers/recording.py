"""Fixed points as recorded CUDA graphs: the parts of a solve and of its gradients are replayed.

:class:`Recorder` stands in the place of :func:`solvers.fixed_point` for the map of one layer. The
recordings are the methods that :class:`RecordedSolve` lists; the host reads one number after each turn. On
a CPU, where tests run this code, a recording is a plain call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import solvers
from solvers.adjoint import Caller, Implicit, captured_by
from solvers.core.context import weights_of, within
from solvers.core.layout import Layout
from solvers.core.loop import DIVERGENCE
from solvers.core.loop import Options as LoopOptions
from solvers.core.messages import warn_user
from solvers.core.modes import autocast_dtype, in_transform, outside_inference
from solvers.core.problem import EnergyUpdate, Problem
from solvers.core.rows import STEPS
from solvers.core.safeguard import FAR, rounding
from solvers.core.solution import AdjointReport, Solution, Status, apply_policy
from solvers.core.tolerance import Goal, Tolerance, read_tolerance
from solvers.core.verify import verify
from solvers.fixed_points import set_bound
from solvers.methods.anderson import Anderson
from solvers.methods.turns import Rows, Turns

KEPT = 8  # recordings of a layer, for different shapes, that are kept
_MASKS = (torch.bool, torch.uint8)
_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class UnrecordableError(RuntimeError):
    """What a map does cannot be recorded; the message names the operation."""


class Watch(TorchDispatchMode):
    """Raises :class:`UnrecordableError` for host reads, shapes that depend on data, and random numbers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(tag in func.tags for tag in _DATA) and not _index_by_numbers(func, args):
            raise UnrecordableError(f"reads values on the host: {func}")
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            raise UnrecordableError(f"draws random numbers: {func}")
        result = func(*args, **kwargs)
        moved = isinstance(result, Tensor) and result.device.type != self.device.type
        if moved and any(_is_on(self.device, t) for t in pytree.tree_leaves(args)):
            raise UnrecordableError(f"copies a tensor to another device: {func}")
        return result


def _index_by_numbers(func: Any, args: Any) -> bool:
    """Whether the operation is indexing without masks, whose shape does not depend on data."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return not any(isinstance(t, Tensor) and t.dtype in _MASKS for t in args[1])


def _is_on(device: torch.device, value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == device.type


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw random numbers does: attention does not without dropout."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            default = argument.default_value
            given = args[position] if position < len(args) else kwargs.get("dropout_p", default)
            return given != 0
    return True


def record(run: Callable[[], object], device: torch.device, pool: Any) -> Any:
    """A CUDA graph of ``run()``, whose tensors keep their place; None on a CPU, where run is called."""
    with Watch(device):
        _warm_up(run, device)
    if device.type != "cuda":
        return None
    _warm_up(run, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    graph.replay()  # what is recorded next warms up on real numbers
    return graph


def _warm_up(run: Callable[[], object], device: torch.device) -> None:
    if device.type != "cuda":
        run()
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)


@runtime_checkable
class Prepares(Protocol):
    """A map ``f(z, *args)`` that prepares its arguments, once for a recorded solve."""

    def __call__(self, z: Any, *args: Any) -> Any: ...

    def begin(self, *args: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
        """Return ``g`` and ``prepared`` with ``f(z, *args) = g(z, *prepared)``, and the initial state."""
        ...


@dataclass(frozen=True)
class Options:
    """What a recording depends on beside tensors and modules."""

    solver: Anderson
    max_steps: int
    adjoint: Implicit | None
    autocast: torch.dtype | None
    used: bool  # the map computes in the precision of the autocast
    device: torch.device


class RecordedSolve:
    """The recordings for tensors of one kind; :meth:`solve` and :meth:`pull_back` replay them."""

    def __init__(
        self, f: Callable[..., Any], module: nn.Module, z: Any, args: Any, mask: Any, options: Options
    ) -> None:  # fmt: skip
        self.layout, self.options, self.version = Layout.of(z), options, 0
        start = self.layout.vector(z).detach()
        self.device, self.dtype, self.f = start.device, start.dtype, f
        leaves, self.spec = pytree.tree_flatten(args)
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        self.inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        own = iter(self.inputs)
        self.leaves = [next(own) if isinstance(t, Tensor) else t for t in leaves]
        mask = None if mask is None else self.layout.mask_vector(mask, start)
        self.mask = None if mask is None else mask.contiguous().clone()
        self.z0 = start.clone()
        kinds = {*self.layout.dtypes, options.autocast if options.used else None} - {None}
        eps = max(torch.finfo(kind).eps for kind in kinds)
        given: dict[str, Any] = {"mask": self.mask, "sizes": self.layout.sizes, "eps": eps}
        unit_free = _unit_free(f)
        self.turns = Turns(self.z0, options.solver, options.max_steps, unit_free=unit_free, **given)
        called: Any = f.joint if isinstance(f, EnergyUpdate) and unit_free else f
        self.caller, self.modules = Caller(called, module), list(module.modules())
        runs: list[Callable[[], object]] = [self._start, self._turn, self._examine]
        if not isinstance(f, EnergyUpdate):  # those that are not solved have failed
            runs.append(self._measure)
        if options.adjoint is not None:
            most, method = options.adjoint.max_steps, Anderson()
            self.adjoint_turns = Turns(self.z0, method, max(most, 2), residuals=unit_free, **given)
            self.cotangent = torch.zeros_like(self.turns.z)
            # f reads aliases of the parameters: the nodes of autograd that belong to the parameters
            # themselves live on the ordinary stream, which a recording may not touch.
            self.aliases = {
                f"module.{name}": p.detach().requires_grad_()
                for name, p in module.named_parameters()
                if p.requires_grad
            }
            runs += [self._linearise, self._adjoint_turn, self._gradients]
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.graphs = {run.__name__: record(run, self.device, pool) for run in runs}

    # --- what is recorded ---

    def _start(self) -> None:
        with torch.no_grad(), self._autocast(), within(recording=True):
            self.weights = weights_of(self.modules)
        with torch.no_grad(), self._autocast(), within(recording=True, weights=self.weights):
            self.map, self.prepared = self.f, self.arguments()
            if isinstance(self.f, Prepares):
                self.map, self.prepared, start = self.f.begin(*self.prepared)
                self.z0.copy_(self.layout.vector(start))
            self.turns.start(self.z0)
            if isinstance(self.f, EnergyUpdate):
                self.energy_before = self._energy(self.z0)

    def _turn(self) -> None:
        with torch.no_grad(), self._autocast(), within(recording=True, weights=self.weights):
            z, free = self.turns.z.to(self.dtype), self.turns.unit_free
            dtype = self.options.autocast
            self.problem = Problem(self.map, self.layout, self.prepared, dtype, mask=self.mask)
            self.value, _, gradient = self.problem.joint(z, energies=free)
            if free:
                self.value = self.problem.residual(z, self.value, gradient)
        with torch.no_grad():
            self.turns.turn(self.value)

    def _examine(self) -> None:
        """Whether a sample failed, whether one depends on others, and whether one has not converged.

        One of an energy failed unless it converged and the energy is not higher. One depends on others if its
        residual is no longer that with which it converged.
        """
        with torch.no_grad(), self._autocast(), within(recording=True):
            failed = self.turns.status > int(Status.MAX_STEPS)
            if isinstance(self.f, EnergyUpdate):
                self.energy = self._energy(self.turns.kept.to(self.dtype))
                failed = ~_descended(self.turns, self.energy_before, self.energy)
            unsolved = self.turns.status != Status.CONVERGED
            found = (failed, self.turns.changed(self.value), unsolved)
            self.examined = torch.stack(found).any(1)

    def _measure(self) -> None:
        """Evaluate the map once more, at the values of all samples."""
        with torch.no_grad(), self._autocast(), within(recording=True, weights=self.weights):
            self.measured = self.problem.evaluate(self.turns.kept.to(self.dtype))

    def _energy(self, z: Tensor) -> Tensor:
        assert isinstance(self.f, EnergyUpdate)
        with within(weights=self.weights):
            return self.f.joint(self._state(z), *self.arguments())[1]

    def _linearise(self) -> None:
        self.point = self.turns.kept.to(self.dtype).detach().clone().requires_grad_()
        free = self.point if self.mask is None else self.point.where(self.mask, self.point.detach())
        with torch.enable_grad(), self._autocast(), within(recording=True):
            inputs = (self._state(free), *self.arguments())
            image = functional_call(self.caller, self.aliases, inputs)
            fixed = self.point.detach()
            if self.turns.unit_free:
                value, slope = self.layout.vector(image[0]), image[2]
                gradient = None if slope is None else self.layout.vector(slope)
                value = Problem(self.f, self.layout).constant_step().residual(free, value, gradient)
                fixed = fixed - self.point
            else:
                value = self.layout.vector(image)
            self.image = value if self.mask is None else value.where(self.mask, fixed)
        known = [self.point, *self.inputs, *self.aliases.values()]
        numbers = {id(tensor) for tensor in known}
        if any(id(leaf) not in numbers for leaf in captured_by(self.image)):
            raise UnrecordableError("reads a tensor with a graph that is no parameter or input")

    def _adjoint_turn(self) -> None:
        (product,) = self._pull([self.point], self.adjoint_turns.z)
        with torch.no_grad():
            self.adjoint_turns.turn(self.cotangent + product)

    def _gradients(self) -> None:
        wanted = [t for t in self.inputs if t.requires_grad] + list(self.aliases.values())
        self.found = self._pull(wanted, self.adjoint_turns.kept)

    def _pull(self, wanted: list[Tensor], u: Tensor) -> list[Tensor]:
        if not self.image.requires_grad or not wanted:
            return [torch.zeros_like(t) for t in wanted]
        u = u.to(self.image.dtype)
        found = torch.autograd.grad(self.image, wanted, u, retain_graph=True, allow_unused=True)
        pairs = zip(found, wanted, strict=True)
        return [torch.zeros_like(t) if g is None else g for g, t in pairs]

    def _state(self, z: Tensor) -> Any:
        return self.layout.tree(z.to(self.dtype))

    def arguments(self) -> Any:
        """The arguments of f in the places where the recordings read them."""
        return pytree.tree_unflatten(self.leaves, self.spec)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.options.autocast
        if dtype is None:
            return nullcontext()
        # The cache would keep tensors of the recording beyond it.
        return torch.autocast(self.device.type, dtype, cache_enabled=False)

    # --- what is replayed ---

    def load(self, start: Tensor | None, inputs: list[Tensor], mask: Tensor | None) -> None:
        """Copy the inputs of a call to where the recordings read them."""
        with torch.no_grad():
            if start is not None:
                self.z0.copy_(start)
            for own, given in zip(self.inputs, inputs, strict=True):
                own.copy_(given)
            if self.mask is not None and mask is not None:
                self.mask.copy_(mask)
        self.version += 1

    def solve(self, goal: Goal, checked: bool) -> Solution | None:
        """The solution (B, D), ``checked`` with the whole batch.

        None where a sample failed or, if that is to be seen, depends on others: the ordinary loop knows more.
        """
        self.turns.set_tolerance(goal.tolerance)
        self.replay("_start")
        self._until_done("_turn", self.turns)
        self.replay("_examine")
        failed, changed, unsolved = self.examined.tolist()
        if failed or (changed and checked):
            return None
        solution = self.turns.solution()
        energy = self.energy.clone() if isinstance(self.f, EnergyUpdate) else None
        solution.value, solution.energy = solution.value.to(self.dtype), energy
        if unsolved and checked:  # their best iterates were not the last ones
            self.replay("_measure")
            verify(solution, self.measured, goal, unit_free=False)
        return solution

    def pull_back(self, cotangent: Tensor, tolerance: Tolerance) -> tuple[Solution, list[Tensor]]:
        """The adjoint solution for a cotangent (B, D), and the gradients of inputs and parameters."""
        self.cotangent.copy_(cotangent)
        turns = self.adjoint_turns
        turns.set_tolerance(tolerance)
        turns.start(self.cotangent)
        self._until_done("_adjoint_turn", turns)
        self.replay("_gradients")
        return turns.solution(), [t.clone() for t in self.found]

    def replay(self, name: str) -> None:
        graph = self.graphs[name]
        getattr(self, name)() if graph is None else graph.replay()

    def _until_done(self, name: str, turns: Turns) -> None:
        for number in range(1, turns.max_steps + 1):
            self.replay(name)
            if not int(turns.left) and (number <= STEPS or not turns.sharpen()):
                return


def _descended(turns: Turns, before: Tensor, after: Tensor) -> Tensor:
    """Return (B,) bool: samples that converged at an energy ``after`` that is not above ``before``.

    A relative residual may also be small because the state has grown, down an unbounded energy: a sample that
    is far from its start, by :class:`solvers.core.safeguard.Growth`, does not count.
    """
    far = torch.linalg.vector_norm(turns.kept, dim=1) > FAR / DIVERGENCE * turns.limit
    lower = after <= before + rounding(before)  # False for NaN
    return (turns.status == Status.CONVERGED) & lower & ~far


class RecordedRows(Rows):
    """The rows of a queue, whose turns are replayed; new samples are written over the recorded inputs."""

    def __init__(self, recorded: RecordedSolve, problem: Problem, tolerance: Tolerance) -> None:
        problem = replace(problem, args=recorded.arguments(), mask=recorded.mask)
        turns = recorded.turns
        patience = LoopOptions(tolerance, turns.max_steps).patience
        super().__init__(problem, turns, recorded.dtype, patience)
        self.recorded = recorded
        self.turns.set_tolerance(tolerance)
        recorded.replay("_start")

    def evaluate(self) -> None:
        """A turn evaluates the map itself."""

    def turn(self) -> None:
        with on_device(self.recorded.device):
            self.recorded.replay("_turn")
        self.value = self.recorded.value


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """The current CUDA device; nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _Recorded(torch.autograd.Function):
    """The solution of a recorded solve; the backward pass replays the adjoint."""

    @staticmethod
    def forward(ctx: Any, call: _Call, value: Tensor, *tensors: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(value, *tensors)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a recorded solve has only first derivatives: call layer.compile(False) for second "
                "derivatives (create_graph=True)"
            )
        value, *tensors = ctx.saved_tensors  # raises if one of them was changed in place
        found = iter(ctx.call.pull_back(value, tensors, cotangents[0]))
        return None, None, *(next(found) if t.requires_grad else None for t in tensors)


@dataclass
class _Call:
    """One call of a recorded solve, whose backward pass may come after other calls."""

    recorded: RecordedSolve
    version: int
    report: AdjointReport
    tolerance: Tolerance
    mask: Tensor | None
    f: object

    def pull_back(self, value: Tensor, tensors: list[Tensor], cotangent: Tensor) -> list[Tensor]:
        recorded, adjoint = self.recorded, self.recorded.options.adjoint
        assert adjoint is not None
        if recorded.version != self.version:  # another call has used the buffers since
            recorded.load(None, tensors[: len(recorded.inputs)], self.mask)
            recorded.turns.kept.copy_(value)
            recorded.replay("_linearise")
            self.version = recorded.version
        solution, found = recorded.pull_back(cotangent, self.tolerance)
        self.report.solution, self.report.solves = solution, self.report.solves + 1
        apply_policy(solution, adjoint.on_failure, "adjoint solve", self.f)
        return found


class Recorder:
    """:func:`solvers.fixed_point` for one layer, by recordings where they serve, else None.

    Solves with Anderson's method, or with no named solver, and with ``Implicit()`` or no gradients are
    recorded: once for the shapes, dtypes and strides of the inputs, the autocast, the training mode and the
    storage of every parameter and buffer. A map that cannot be recorded is solved by the ordinary loop,
    after one warning that names the operation. A batch in which a sample fails, or in which samples depend
    on each other, is solved by the ordinary loop, too. Where the map descends an energy, Anderson's method
    accelerates the gradient step, and the ordinary loop solves a batch in which a sample does not converge
    or ends at a higher energy than it began. A gradient step that is judged by its residual alone (rtol = 0)
    is not recorded. Recordings give first derivatives only.

    A recording holds what f reads besides its arguments, parameters and buffers as it was: numbers that are
    attributes of modules, and tensors in closures that need no gradient.
    """

    def __init__(self) -> None:
        self.solves: dict[Any, RecordedSolve | None] = {}
        self.of_weights: Any = None

    def __deepcopy__(self, memo: Any) -> Recorder:
        return Recorder()

    def __reduce__(self) -> Any:
        return Recorder, ()

    def __call__(
        self, f: Any, z0: Any, args: tuple[Any, ...], *, module: nn.Module, **options: Any
    ) -> Solution | None:
        """The solution of ``z = f(z, *args)`` from ``z0``; f reads the parameters of ``module``.

        ``z0`` is None for a map that :class:`Prepares` its arguments and initial state. The result is None
        where the ordinary loop must solve.
        """
        chosen = _options(f, options, z0, args)
        if chosen is None:
            return None
        # What is made in inference mode could not be used by a training later.
        grad = torch.is_grad_enabled()
        with outside_inference(), torch.set_grad_enabled(grad), on_device(chosen.device):
            return self._recorded(f, z0, args, module, chosen, options)

    def rows(
        self, f: Any, problem: Problem, start: Tensor, goal: Goal, *, module: nn.Module, **options: Any
    ) -> RecordedRows | None:  # fmt: skip
        """The rows of a queue that begin at ``start`` (n, D); None where the turns are not recorded.

        Those of an energy are not, because a queue solves them by L-BFGS. The recording belongs to the queue,
        since other calls would write over its samples.
        """
        z0, args = problem.layout.tree(start), problem.args
        chosen = None if isinstance(f, EnergyUpdate) else _options(f, options, z0, args)
        if chosen is None:
            return None
        with on_device(chosen.device):
            recorded = _record(f, z0, args, module, chosen, options)
            return None if recorded is None else RecordedRows(recorded, problem, goal.tolerance)

    def _recorded(
        self, f: Any, z0: Any, args: Any, module: nn.Module, chosen: Options, options: dict[str, Any]
    ) -> Solution | None:  # fmt: skip
        tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]
        parameters = [p for p in module.parameters() if p.requires_grad]
        wanted = any(t.requires_grad for t in (*tensors, *parameters))
        if not (wanted and torch.is_grad_enabled()):
            chosen = replace(chosen, adjoint=None)
        recorded = self._find(f, z0, args, module, chosen, options)
        if recorded is None:
            return None
        layout, mask = recorded.layout, options.get("mask")
        mask = None if mask is None else layout.mask_vector(mask, recorded.z0)
        autocast = recorded.options.autocast
        goal = Goal(options["tolerance"], recorded.dtype, autocast, recorded.device)
        goal.resolve(recorded.options.used)
        recorded.load(None if z0 is None else layout.vector(z0), tensors, mask)
        solution = recorded.solve(goal, options.get("verify", True))
        if solution is None:
            return None
        if chosen.adjoint is not None:
            recorded.replay("_linearise")
            own = chosen.adjoint.own_tolerance(goal.tolerance)
            call = _Call(recorded, recorded.version, solution.adjoint, own, mask, f)
            solution.value = _Recorded.apply(call, solution.value, *tensors, *parameters)
        set_bound(solution, f)
        solution.value = layout.tree(solution.value)
        apply_policy(solution, options["on_failure"], goal.what, f)
        return solution

    def _find(
        self, f: Any, z0: Any, args: Any, module: nn.Module, chosen: Options, options: dict[str, Any]
    ) -> RecordedSolve | None:  # fmt: skip
        weights = tuple(_kinds((*module.parameters(), *module.buffers()), places=True))
        if weights != self.of_weights:  # recordings of other weights only take memory
            self.solves.clear()
            self.of_weights = weights
        mask, tree = options.get("mask"), pytree.tree_flatten((z0, args))
        key = (
            _static(f), chosen, options["tolerance"] is None, str(tree[1]),
            tuple(_kinds(tree[0])), tuple(_kinds([mask])),
            tuple(part.training for part in module.modules()),
        )  # fmt: skip
        if key not in self.solves:
            while len(self.solves) >= KEPT:
                self.solves.pop(next(iter(self.solves)))
            self.solves[key] = _record(f, z0, args, module, chosen, options)
        return self.solves[key]


def _options(f: Any, options: dict[str, Any], z0: Any, args: Any) -> Options | None:
    """What to record; None, after a warning where that may be unexpected, for what is not recorded."""
    solver, adjoint = options["solver"], options["adjoint"]
    watched = bool(options.get("record"))
    watched |= any(options.get(name) is not None for name in ("callback", "stop", "measure"))
    if watched or in_transform() or options["max_steps"] < 2:
        return None
    masks = getattr(f, "masks", None)
    if masks is not None and masks.numbers:
        return _refused("contains a VariationalDropout", f)
    tolerance = read_tolerance("tolerance", options["tolerance"])
    if _unit_free(f) and tolerance is not None and tolerance.rtol == 0:
        return _refused("is judged by its residual alone (rtol = 0)", f)
    if not (solver is None or type(solver) is Anderson):
        return _refused(f"is solved by {type(solver).__name__}", f)
    if not (adjoint is None or (type(adjoint) is Implicit and adjoint.solver is None)):
        return _refused(f"has the adjoint {adjoint}", f)
    device = next(t for t in pytree.tree_leaves((z0, args)) if isinstance(t, Tensor)).device
    solver, autocast = solver or Anderson(), autocast_dtype(device.type)
    return Options(solver, options["max_steps"], adjoint, autocast, True, device)


def _unit_free(f: Any) -> bool:
    """Whether f is a gradient step of an energy, whose residual is in units of its own."""
    return isinstance(f, EnergyUpdate) and f.step_size is not None


def _refused(reason: str, f: Any) -> None:
    message = f"this layer is not recorded as CUDA graphs, because its update {reason}"
    warn_user(message, RuntimeWarning, f)


def _static(f: Any) -> Any:
    """What a recording depends on of the map itself; a layer makes its map anew for each solve."""
    return (type(f), str(getattr(f, "spec", None))) if hasattr(f, "walked_modules") else f


def _kinds(leaves: Any, places: bool = False) -> Iterator[Any]:
    """Of each tensor what a recording depends on, with ``places`` where its numbers are."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            yield leaf
            continue
        place = leaf.data_ptr() if places else None
        yield leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, place


def _record(
    f: Any, z0: Any, args: Any, module: nn.Module, chosen: Options, options: dict[str, Any]
) -> RecordedSolve | None:
    """The recordings; None, after a warning, for a map that cannot be recorded."""
    if isinstance(f, Prepares):
        with torch.no_grad():
            z0 = f.begin(*args)[2].detach()
    # One evaluation by the ordinary loop checks the arguments and what f does.
    once = options | {"max_steps": 1, "on_failure": "ignore", "adjoint": None}
    goal = Goal(None, pytree.tree_leaves(z0)[0].dtype, chosen.autocast, chosen.device)
    with torch.no_grad(), goal.watching():
        solvers.fixed_point(f, z0, args, **once)
    chosen = replace(chosen, used=goal.used)
    alone = copy(f)
    vars(alone).pop("layer", None)  # the layer holds the recordings, which are to end with it
    try:
        return RecordedSolve(alone, module, z0, args, options.get("mask"), chosen)
    except RuntimeError as error:
        return _refused(str(error).splitlines()[0], f)
