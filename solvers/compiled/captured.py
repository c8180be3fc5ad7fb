"""Maps that the user has compiled by ``torch.compile``, for programs of whole blocks of a solve.

torch's compiler says what such a map reads, closures and globals among it, and by its guards notices when
the map has become another one. It is asked anew at every solve, which computes nothing.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from solvers.compiled.packing import look
from solvers.compiled.programs import LOCK, Programs
from solvers.compiled.weights import Weights
from solvers.core.problem import Descent, EnergyUpdate, Problem

SIZES = (
    3  # batch sizes that a map has programs for; with others it runs as its own compiler made it
)
Place = tuple[str, Any]  # "leaf" and its number, "weight" and its name, "number" and the number


@dataclass(eq=False)
class Graph:
    """What torch's compiler has seen of a map: one graph of operators, and the programs made of it."""

    run: Callable[..., Any]
    outputs: tuple[int, ...] | None = (
        None  # which of the graph's make the map's; None: not known yet
    )
    spec: Any = None  # of the map's output
    fit: bool = True  # it can stand for the map
    programs: dict[Hashable, Programs] = field(default_factory=dict)  # by options
    sizes: set[int] = field(default_factory=set)  # of batches

    def __call__(self, *inputs: Any) -> Any:
        _NOW.calls.append((self, inputs))
        if len(_NOW.calls) == 1 and (self.outputs is not None or not self.fit):
            raise _KnownError
        _NOW.results = self.run(*inputs)
        return _NOW.results


class _PerThread(threading.local):
    """What happens in the evaluation that this thread is looking at."""

    def __init__(self) -> None:
        self.calls: list[tuple[Graph, tuple[Any, ...]]] = []
        self.results: Any = None


_NOW = _PerThread()


class _KnownError(Exception):
    """Ends an evaluation of which only the inputs are wanted."""


def _backend(module: Any, inputs: Any) -> Graph:
    """A backend of ``torch.compile`` that keeps the graph."""
    return Graph(module.forward)


_LOOKING: WeakKeyDictionary[Any, Callable[..., Any]] = WeakKeyDictionary()


def options_of(f: Any) -> dict[str, Any] | None:
    """Options of :class:`Programs` by which the user has compiled ``f``; None for any but Inductor's.

    Methods are left as they are.
    """
    if inspect.ismethod(f) or getattr(f, "_torchdynamo_orig_callable", None) is None:
        return None
    asked = getattr(f, "get_compiler_config", lambda: None)()
    if asked is None:
        return None
    inductor: Any = torch._inductor
    usual = inductor.config.get_config_copy()
    return {
        "backend": "inductor",
        "options": {name: value for name, value in asked.items() if value != usual.get(name)},
    }


def _looking(f: Any) -> Callable[..., Any]:
    """``f`` as it was, compiled by :func:`_backend`."""
    found = _LOOKING.get(f)
    if found is None:
        original: Any = f._orig_mod if isinstance(f, nn.Module) else f._torchdynamo_orig_callable
        compiler: Any = torch.compile
        found = _LOOKING[f] = compiler(original, backend=_backend)
    return found


def capture(problem: Problem, start: Tensor) -> Captured | None:
    """Programs for a solve whose map, or whose energy that is descended, the user has compiled.

    None where it is another map, and where its graph cannot stand for it: breaks, several graphs, outputs
    that no graph returns, or more than ``SIZES`` sizes of batch.
    """
    f: Any = problem.f
    f = f.energy if type(f) is Descent else f
    if isinstance(f, EnergyUpdate) or problem.energy is not None:
        return None
    options = options_of(f)
    if options is None or torch.is_inference_mode_enabled():
        return None
    # Tensors of our own, so that each of the inputs is known by its identity.
    given = (problem.layout.tree(start.detach()), *problem.args)
    leaves, spec = pytree.tree_flatten(given)
    leaves = [t.detach() if isinstance(t, Tensor) else t for t in leaves]
    found = _look(_looking(f), pytree.tree_unflatten(leaves, spec))
    if found is None:
        return None
    graph, inputs = found
    batch = start.shape[0]
    if batch not in graph.sizes and len(graph.sizes) >= SIZES:
        return None
    graph.sizes.add(batch)
    numbers = {id(leaf): n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    places: list[Place] = []
    weights: dict[str, Tensor] = {}
    for value in inputs:
        if not isinstance(value, Tensor):
            places.append(("number", value))
        elif id(value) in numbers:
            places.append(("leaf", numbers[id(value)]))
        else:
            places.append(("weight", f"input{len(weights)}"))
            weights[f"input{len(weights)}"] = value
    key = repr(sorted(options.items(), key=str))
    if key not in graph.programs:
        graph.programs[key] = Programs(nn.Module(), **options)
    name = getattr(f, "__name__", type(getattr(f, "_orig_mod", f)).__name__)
    return Captured.at(graph.programs[key], name, graph, tuple(places), weights)


def _look(evaluate: Callable[..., Any], given: Any) -> tuple[Graph, tuple[Any, ...]] | None:
    """The graph of an evaluation and its inputs."""
    outer = _NOW.calls, _NOW.results
    _NOW.calls, _NOW.results = [], None
    try:
        # As in the adjoint: a graph may hold the mode that it was seen in.
        with torch.enable_grad():
            output = evaluate(*given)
    except _KnownError:
        graph, inputs = _NOW.calls[0]
        return (graph, inputs) if graph.fit else None
    except Exception:  # the ordinary solve meets it again, and raises it
        return None
    else:
        return _first_look(output)
    finally:
        _NOW.calls, _NOW.results = outer


def _first_look(output: Any) -> tuple[Graph, tuple[Any, ...]] | None:
    """:func:`_look` at a graph that has just run: which of its outputs are the map's?"""
    calls, results = _NOW.calls, _NOW.results
    if len(calls) != 1:  # the map's graph breaks
        for graph, _ in calls:
            graph.fit = False
        return None
    graph, inputs = calls[0]
    leaves, spec = pytree.tree_flatten(output)
    numbers = {id(result): n for n, result in enumerate(results)}
    if not graph.fit or not all(id(leaf) in numbers for leaf in leaves):
        graph.fit = False
        return None
    graph.outputs, graph.spec = tuple(numbers[id(leaf)] for leaf in leaves), spec
    return graph, inputs


class Captured(Programs):
    """The programs of a graph, and the tensors beside the arguments that it reads in this solve."""

    pads = False  # the graph may be of one batch size
    required = False
    graph: Graph
    places: tuple[Place, ...]
    given: Weights
    inside: dict[str, Tensor]  # the weights while a function is traced or recorded

    @classmethod
    def at(
        cls,
        shared: Programs,
        name: str,
        graph: Graph,
        places: tuple[Place, ...],
        weights: dict[str, Tensor],
    ) -> Captured:
        """``shared`` as they are now, for one solve."""
        found = cls.__new__(cls)
        found.__dict__.update(shared.__dict__)  # the same records of what has been made
        found.name, found.graph, found.places = name, graph, places
        found.given = Weights(weights, (torch.get_num_threads(), places, look(weights.values())))
        found.inside = weights
        return found

    def weights(self) -> Weights:
        return self.given

    def check_unchanged(self, weights: Weights) -> None:
        """A graph is what it was."""

    def give_up(self) -> None:
        self.graph.fit = False

    @contextmanager
    def cloned(self) -> Iterator[None]:
        with LOCK:
            yield

    def traced_weights(self) -> dict[str, Tensor]:
        return dict(self.inside)

    def within(
        self, weights: dict[str, Tensor], function: Callable[..., Any], *arguments: Any
    ) -> Any:
        outer, self.inside = self.inside, weights
        try:
            return function(*arguments)
        finally:
            self.inside = outer

    def traced_map(self, f: Any) -> Callable[..., Any]:
        if isinstance(f, Descent):
            other = copy.copy(f)
            other.energy = self._evaluate
            return other
        return self._evaluate

    def map_key(self, f: Any) -> Hashable:
        return self.places, f.step_size if isinstance(f, Descent) else None

    def _evaluate(self, *given: Any) -> Any:
        leaves, weights = pytree.tree_leaves(given), self.inside
        inputs = [
            leaves[value] if kind == "leaf" else weights[value] if kind == "weight" else value
            for kind, value in self.places
        ]
        results = self.graph.run(*inputs)
        assert self.graph.outputs is not None
        return pytree.tree_unflatten([results[n] for n in self.graph.outputs], self.graph.spec)
