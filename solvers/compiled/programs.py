"""Functions of tensors, traced once for each kind of input and compiled.

Programs take and return tensors alone: records of tensors go in and out as flat lists.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from solvers.core.checks import require_choice, require_instance
from solvers.core.device import tracing
from solvers.core.modes import constant_weights, found_once, parts_of, uncompiled
from solvers.core.telling import warn_user

if TYPE_CHECKING:
    from solvers.compiled.graphs import Bound, Run, Stages


@dataclass(frozen=True)
class _Place:
    """Stands in a skeleton for the tensor of this number."""

    number: int


@dataclass(frozen=True)
class Skeleton:
    """A record with places where its tensors were."""

    record: Any


@dataclass
class Packed:
    """A record as the list of its tensors, each once, and its skeleton.

    ``kind`` tells records apart for which programs differ: by their structure and by what :func:`look`
    sees of the tensors.
    """

    tensors: list[Tensor]
    skeleton: Skeleton
    kind: Hashable


def pack(record: Any) -> Packed:
    """Take a record apart.

    A record is a tensor, None, a plain value, or a tuple, list, dict, dataclass or object with
    ``__dict__`` of records. A tensor that stands at several places is one tensor at all of them.
    """
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}

    def walk(value: Any) -> tuple[Any, Hashable]:
        if isinstance(value, Tensor):
            number = numbers.setdefault(id(value), len(tensors))
            if number == len(tensors):
                tensors.append(value)
            return _Place(number), number
        if isinstance(value, (tuple, list)):
            parts = [walk(item) for item in value]
            return _sequence(value, [part for part, _ in parts]), (
                type(value),
                *(k for _, k in parts),
            )
        if isinstance(value, dict):
            found = {name: walk(item) for name, item in value.items()}
            keys = tuple((name, key) for name, (_, key) in found.items())
            return {name: part for name, (part, _) in found.items()}, (dict, *keys)
        names = _names(value)
        if names is None:
            return value, _checked(value)
        bare, keys = copy(value), []
        for name in names:
            part, key = walk(getattr(value, name))
            object.__setattr__(bare, name, part)
            keys.append((name, key))
        return bare, (type(value), *keys)

    bare, key = walk(record)
    return Packed(tensors, Skeleton(bare), (key, look(tensors)))


def _sequence(like: Any, parts: list[Any]) -> Any:
    """A list, tuple or named tuple like ``like``."""
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def _checked(value: Any) -> Hashable:
    """The fingerprint of what is no record; TypeError for an object that could hold tensors."""
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        frozen = getattr(type(value), "__dataclass_params__", None)
        if frozen is None or not frozen.frozen:
            raise TypeError(
                f"a compiled layer cannot look into a {type(value).__name__}: pass tensors, numbers, tuples, "
                "lists and dicts, or register it as a pytree"
            )
    return fingerprint(value)


@dataclass(frozen=True)
class _Same:
    """An object by its identity; it stays alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def fingerprint(value: Any) -> Hashable:
    """A key that differs where ``value`` does: by value for what is hashable so, else by identity."""
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return (type(value), *[fingerprint(item) for item in value])
    if isinstance(value, dict):
        return (
            dict,
            *[(_Same(k) if k.__hash__ is None else k, fingerprint(v)) for k, v in value.items()],
        )
    if is_dataclass(value) and not isinstance(value, type):
        return (
            type(value),
            *[(e.name, fingerprint(getattr(value, e.name))) for e in fields(value)],
        )
    return _Same(value)


def look(tensors: Iterable[Tensor]) -> Hashable:
    """What a program depends on of the tensors that it is given."""
    return tuple([(t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def unpack(tensors: list[Tensor], skeleton: Skeleton) -> Any:
    """The record that :func:`pack` took apart, made of ``tensors``."""

    def walk(value: Any) -> Any:
        if isinstance(value, _Place):
            return tensors[value.number]
        if isinstance(value, (tuple, list)):
            return _sequence(value, [walk(item) for item in value])
        if isinstance(value, dict):
            return {name: walk(item) for name, item in value.items()}
        names = _names(value)
        if names is None:
            return value
        whole = copy(value)
        for name in names:
            object.__setattr__(whole, name, walk(getattr(value, name)))
        return whole

    return walk(skeleton.record)


def _names(value: Any) -> list[str] | None:
    """Names of the fields of a record; None for a plain value."""
    if is_dataclass(value) and not isinstance(value, type):
        # A frozen dataclass holds hyperparameters: its own equality tells them apart.
        frozen = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
        return None if frozen else [entry.name for entry in fields(value)]
    if type(value).__module__.startswith("solvers.") and hasattr(value, "__dict__"):
        return sorted(vars(value))
    return None


_LOG = logging.getLogger(__name__)


def _graphs() -> Any:
    """Imported with the first program: it brings torch's compiler, which takes seconds."""
    from solvers.compiled import graphs

    return graphs


Compiler = Callable[[Any, Sequence[Tensor]], Callable[..., Sequence[Tensor]]]
MOST = 64  # programs that are kept
LOCK = threading.RLock()  # torch traces in one thread at a time


class Programs:
    """The programs of one map, which reads the weights of ``module`` and its inputs.

    A program is made at the first call with tensors of new shapes, strides, dtypes or devices, with
    other numbers in the records, in another mode of the module (training, plain attributes) or with
    another number of threads. All tensors that the map reads must be inputs: weights and buffers of the
    module, or arguments.

    Args:
        module: whose parameters and buffers the map reads; they may change between calls.
        backend: as of ``torch.compile``: "inductor", "eager" (the traced operators one by one), another
            registered name, or a function ``(graph, tensors) -> callable``.
        mode: as of ``torch.compile``, for "inductor".
        options: options of Inductor, for "inductor".

    Raises:
        TypeError, ValueError: backend, mode or options are unknown or do not belong together.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        backend: str | Compiler = "inductor",
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.module = module
        self.name = type(module).__name__
        self.backend, self.mode, self.options = backend, mode, options
        check_backend(backend, mode, options)
        self.made: dict[Hashable, tuple[Stages, Skeleton]] = {}
        self.sizes: dict[Hashable, list[int]] = {}  # of batches, by the shapes of a sample
        self.known: dict[Hashable, bool] = {}  # maps that have been checked: does autocast matter?
        self.kinds: dict[Hashable, int] = {}  # numbers of modules' states
        self.clone: nn.Module | None = None  # see :meth:`cloned`

    def weights(self) -> Weights:
        """The weights as they are, and what else of the module a program has in it."""
        return found_once(self, self._read)

    def _read(self) -> Weights:
        tensors, plain = read_module(self.module)
        kind = torch.get_num_threads(), plain, look(tensors.values())
        return Weights(tensors, self.kinds.setdefault(kind, len(self.kinds)))

    def check_unchanged(self, weights: Weights) -> None:
        """Raise RuntimeError where the module is another one than that of ``weights`` was."""
        if self._read().kind != weights.kind:
            raise RuntimeError(
                f"{self.name} was changed between a compiled solve and its backward pass, in its mode or an "
                "attribute: change it after backward()"
            )

    def stages(
        self,
        function: Callable[..., Any],
        key: Hashable,
        parts: Sequence[Packed],
        weights: Weights,
        wanted: Sequence[slice] = (slice(None),),
    ) -> tuple[list[Bound], Skeleton]:
        """``function(*records)`` as functions of the tensors in the first record, compiled.

        What does not depend on that record is computed here, once. Each of the functions returns those
        tensors that ``wanted`` says of the record that ``function`` returns, whose skeleton comes, too.
        """
        inputs, which = _inputs(key, parts, weights)
        found = self.made.get(which)
        if found is None:
            with self._making(weights):
                graph, examples, after = self._traced(function, inputs, parts, weights)
                varying = range(len(parts[0].tensors))
                stages = _graphs().made(graph, examples, varying, wanted, self._compiled)
                found = stages, after
            self.made[which] = found
        return found[0].at(inputs), found[1]

    def of(self, module: nn.Module) -> Programs:
        """The same options for another module."""
        options: dict[str, Any] = {"mode": self.mode, "options": self.options}
        return Programs(module, backend=self.backend, **options)

    def begin(self, device: torch.device) -> None:
        """A solve begins: what CUDA graphs have returned before may be overwritten from now on."""
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()

    @contextmanager
    def cloned(self) -> Iterator[None]:
        """Within, ``clone`` is a copy of the module that has its tensors and may be changed, by one thread.

        The module itself is never touched: other threads may be using it.
        """
        with LOCK:
            tensors = read_module(self.module)[0].values()
            self.clone = deepcopy(self.module, {id(tensor): tensor for tensor in tensors})
            try:
                yield
            finally:
                self.clone = None

    def traced_map(self, f: Any) -> Callable[..., Any]:
        """The map ``f`` of a solve with the clone in the place of the module."""
        return f.on(self.clone)

    def traced_weights(self) -> dict[str, Tensor]:
        """The weights that the clone has now."""
        assert self.clone is not None
        return read_module(self.clone)[0]

    def within(
        self, weights: dict[str, Tensor], function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """``function(*arguments)`` while the clone has these ``weights``."""
        assert self.clone is not None
        swapped = {f"module.{name}": weight for name, weight in weights.items()}
        return torch.func.functional_call(_Within(self.clone), swapped, (function, arguments))

    @contextmanager
    def _making(self, weights: Weights) -> Iterator[None]:
        """Within, a program is made; what prevents it becomes an error of ours."""
        self.check_unchanged(weights)
        number = len(self.made)
        if number >= MOST:
            self._forget()
        _LOG.info("compiling program %d of %s", number + 1, self.name)
        try:
            with self.cloned():
                yield
        except Exception as error:
            raise RuntimeError(
                f"{self.name} cannot be compiled ({type(error).__name__}: {error}); "
                "use the layer without compile(), or state its step by torch's operators alone"
            ) from error

    def _traced(
        self,
        function: Callable[..., Any],
        inputs: list[Tensor],
        parts: Sequence[Packed],
        weights: Weights,
    ) -> tuple[GraphModule, list[Tensor], Skeleton]:
        """The operators of ``function``, tensors like its inputs, and what it returns them in."""
        found: list[Skeleton] = []
        sizes = [(len(part.tensors), part.skeleton) for part in parts]
        names = list(weights.tensors)

        def flat(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors)
            given = [unpack(list(islice(rest, size)), skeleton) for size, skeleton in sizes]
            weights = dict(zip(names, rest, strict=True))
            with torch.no_grad(), tracing(), constant_weights(), uncompiled():
                result = self.within(weights, function, *given)
            packed = pack(result)
            found.append(packed.skeleton)
            return packed.tensors

        return *_graphs().trace(flat, inputs, fixed=len(names)), found[-1]

    def _compiled(self, graph: GraphModule, examples: list[Tensor]) -> Run:
        options = (self.backend, self.mode, self.options)
        return _graphs().compiled(graph, examples, *options)

    def _forget(self) -> None:
        """Drop all programs, and say so: they should be few."""
        self.made.clear()
        warn_user(
            f"{MOST} programs were compiled for {self.name} and are dropped: the shapes of its inputs "
            "differ from call to call (pad them), or a plain attribute of one of its modules does",
            UserWarning,
            "programs",
            self.module,
        )

    def __getstate__(self) -> dict[str, Any]:
        # Compiled code belongs to its process.
        return vars(self) | {"made": {}, "sizes": {}, "known": {}, "kinds": {}}


def _inputs(
    key: Hashable, parts: Sequence[Packed], weights: Weights
) -> tuple[list[Tensor], Hashable]:
    """All tensors that a program takes, and what it depends on beside them."""
    tensors = [tensor for part in parts for tensor in part.tensors]
    kinds = [part.kind for part in parts]
    return [*tensors, *weights.tensors.values()], (key, weights.kind, *kinds)


class _Within(nn.Module):
    """Calls a function while the weights of ``module`` are replaced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], given: Sequence[Any]) -> Any:
        return function(*given)


MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check_backend(backend: Any, mode: Any, options: Any) -> None:
    """Raise TypeError or ValueError unless these are a backend of torch and belong together."""
    if not callable(backend):
        names = torch.compiler.list_backends(exclude_tags=())
        require_choice("backend", backend, ["eager", *(n for n in names if n != "eager")])
    if mode is not None:
        require_choice("mode", mode, MODES)
    require_instance("options", options, dict, "a dict of options of Inductor", optional=True)
    if backend != "inductor" and (mode is not None or options):
        raise ValueError(
            f'mode and options belong to backend="inductor", got backend={backend!r}, mode={mode!r}, '
            f"options={options!r}"
        )


_OF_EVERY_MODULE = set(vars(nn.Module()))


@dataclass(frozen=True)
class Weights:
    """Parameters and buffers of a module, by name.

    ``kind`` tells apart for which of its states programs differ: shapes, modes, plain attributes.
    """

    tensors: dict[str, Tensor]
    kind: Hashable


def read_module(module: nn.Module) -> tuple[dict[str, Tensor], Hashable]:
    """Parameters and buffers by name, each once, and what else an evaluation of the module may depend on.

    That is the modules' types, modes, numbers of hooks and own attributes.
    """
    tensors: dict[str, Tensor] = {}
    plain: list[Hashable] = []
    seen: set[int] = set()
    for prefix, part in parts_of(module):
        values = vars(part)
        for own in (values["_parameters"], values["_buffers"]):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    tensors[prefix + name] = tensor
        hooks = len(values["_forward_hooks"]) + len(values["_forward_pre_hooks"])
        plain += [prefix, type(part), part.training, hooks]
        plain += [(n, fingerprint(v)) for n, v in values.items() if n not in _OF_EVERY_MODULE]
    return tensors, tuple(plain)
