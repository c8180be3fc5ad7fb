"""What a layer hands to :func:`solvers.fixed_point`: checked inputs, what is prepared, state and function.

In the order in which ``DEQ.solve`` needs it: :func:`check_inputs`, :func:`prepare`, :func:`initial_state`,
:class:`Map`. Then :class:`_Preparation`: ``prepare`` of a compiled layer, by programs that have its gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.dropout import SolveMasks
from implicit_attn.energies.energy import Energy, Prepared, Scaled, Select, Sum
from implicit_attn.energies.heads import AttentionInput
from implicit_attn.updates.update import EnergyStep, Update
from solvers.compiled.evaluations import Padding, Wanted, detached
from solvers.compiled.programs import (
    Packed,
    Programs,
    Skeleton,
    UntraceableError,
    Weights,
    pack,
    unpack,
)
from solvers.core.checks import require_finite
from solvers.core.layout import Layout
from solvers.core.modes import (
    autocast_dtype,
    constant_weights,
    found_once,
    in_transform,
    ordinary,
    parts_of,
    read_anew,
    uncompiled,
    with_autocast,
    without_autocast,
)
from solvers.core.problem import gradients

if TYPE_CHECKING:
    from solvers.compiled.graphs import Bound

# These prepare by asking the energies in them, which are parts of the update too.
DELEGATING = tuple(kind.prepare for kind in (Energy, Scaled, Select, Sum))


def check_inputs(x: Any, mask: Tensor | None, update: nn.Module, z0: Any = None) -> Any:
    """Check shapes, finiteness and, without autocast, the dtype: that of the parameters.

    Finiteness is checked on the CPU only: on a GPU the check would wait for the device.

    Returns:
        ``x``, with a matrix of pairs for all samples expanded to one for each of them.
    """
    if mask is not None and (
        not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2
    ):
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise TypeError(f"mask must be a bool tensor (B, N), got {what}")
    parameters = (p for _, part in parts_of(update) for p in part._parameters.values())
    wanted = {p.dtype for p in parameters if p is not None and p.is_floating_point()}
    # Tensors show none to a compiler or an exporter, nor within a transform.
    has_numbers = not (torch.compiler.is_compiling() or in_transform())
    leaves = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if leaf.dim() == 0 or leaf.shape[0] == 0:
            raise ValueError(
                f"x must have a batch dimension (B, ...) and hold at least one sample, got shape "
                f"{tuple(leaf.shape)}"
            )
        if not leaf.is_floating_point():
            continue
        kind = leaf.device.type
        if leaf.dim() > 1 and has_numbers:
            require_finite("x", leaf)
        if len(wanted) == 1 and leaf.dtype not in wanted and not torch.is_autocast_enabled(kind):
            raise TypeError(
                f"x must have the dtype of the layer's parameters, {next(iter(wanted))}, got "
                f"{leaf.dtype}; convert one of them with .to()"
            )
    return _batched(x, leaves, mask, z0)


def _batched(x: Any, leaves: list[Tensor], mask: Tensor | None, z0: Any) -> Any:
    """``x`` with a matrix of pairs for all samples expanded to one for each; the mask has as many.

    A tensor of two dimensions may be such a matrix, so the number of samples is that of a deeper one.
    """
    starts = [leaf for leaf in pytree.tree_leaves(z0) if isinstance(leaf, Tensor) and leaf.dim()]
    deep = [leaf for leaf in leaves if leaf.dim() > 2] or starts
    if deep:
        x = _expand_pairs(x, deep[0].shape[0])
    elif mask is not None:
        x = _expand_pairs(x, mask.shape[0])
        deep = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    if mask is not None and deep and mask.shape[0] != deep[0].shape[0]:
        raise ValueError(
            f"mask must be batched like x, {deep[0].shape[0]} samples, got shape {tuple(mask.shape)}"
        )
    return x


def _expand_pairs(x: Any, batch: int) -> Any:
    """An input with a copy of ``pairs`` and ``pair_bias`` (N, M) for each sample, which copies nothing.

    ``x`` is an ``AttentionInput``, or a pytree that holds some. Solvers take tensors (B, ...) alone.
    """
    if isinstance(x, Tensor) or x is None:
        return x

    def expanded(part: Any) -> Any:
        if not isinstance(part, AttentionInput):
            return part
        pairs, bias = (
            t.expand(batch, *t.shape) if isinstance(t, Tensor) and t.dim() == 2 else t
            for t in (part.pairs, part.pair_bias)
        )
        return part._replace(pairs=pairs, pair_bias=bias)

    return pytree.tree_map(expanded, x, is_leaf=lambda part: isinstance(part, AttentionInput))


def check_batched(x: Any, start: Any) -> None:
    """Tensors of three dimensions or more in ``x`` have one sample for each of the initial state.

    A matrix may be a pattern for all samples, such as pairs (N, N), of which each gets its own.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(start) if isinstance(leaf, Tensor)]
    if not leaves or leaves[0].dim() == 0:
        return  # for the solver to say
    batch = leaves[0].shape[0]
    for leaf in pytree.tree_leaves(x):
        if isinstance(leaf, Tensor) and leaf.dim() > 2 and leaf.shape[0] != batch:
            raise ValueError(
                f"x must be batched along dim 0 like the initial state ({batch} samples), got shape "
                f"{tuple(leaf.shape)}"
            )


def batch_and_device(*trees: Any) -> tuple[int, torch.device]:
    """Those of the first tensor in ``trees``."""
    tensors = (t for t in pytree.tree_leaves(trees) if isinstance(t, Tensor) and t.dim())
    first = next(tensors, None)
    if first is None:
        raise TypeError("x must hold a tensor (B, ...) where the update has dropout, got none")
    return first.shape[0], first.device


def refuse_sharded_parts(update: nn.Module) -> None:
    """Raise ValueError where FSDP gathers weights at every evaluation of an update.

    Processes whose samples take different numbers of evaluations would wait for each other for ever, or
    take each other's weights.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # nobody has sharded anything
        return
    newer = (fsdp.FSDPModule,) if hasattr(fsdp, "FSDPModule") else ()
    kinds = (fsdp.FullyShardedDataParallel, *newer)
    if any(isinstance(part, kinds) for _, part in parts_of(update)):
        raise ValueError(
            "the update must hold no module that FSDP shards, as processes make different numbers of "
            "evaluations: shard the DEQ layer, or the block around it (fully_shard(layer))"
        )


def prepares(update: nn.Module) -> bool:
    """Whether a part of the update has a ``prepare`` of its own."""

    def find() -> bool:
        parts = (part for _, part in parts_of(update) if isinstance(part, Update))
        own = (part for part in parts if type(part).prepare is not Update.prepare)
        return any(not isinstance(part, EnergyStep) for part in own)  # which asks its energy

    return found_once(("prepares", update), find)


def may_prepare(update: nn.Module) -> bool:
    """Whether what the update prepares may be more than x, by a part of its own or of its energy."""

    def find() -> bool:
        energies = (part for _, part in parts_of(update) if isinstance(part, Energy))
        return prepares(update) or any(type(e).prepare not in DELEGATING for e in energies)

    return found_once(("may prepare", update), find)


def prepare(
    update: Update,
    x: Any,
    mask: Tensor | None,
    seeds: Tensor | None,
    programs: Programs | None,
    dropped: SolveMasks | None,
    *,
    compact: bool,
) -> Any:
    """``update.prepare(x, mask=mask)`` with the dropout of ``seeds``, by ``programs`` where they can.

    ``compact``: the batch may be padded. ``dropped``: the masks of the solve, which note who was called.
    """
    if programs is not None and not in_transform() and may_prepare(update):
        found = _Preparation.of(programs, (x, mask, seeds), compact)
        key = found.key, found.weights.kind
        if programs.known.get(key, True):
            try:
                result = found.run()
                if dropped is not None:
                    dropped.called |= found.called
                return result
            except UntraceableError:  # it draws random numbers, for example, which is no harm here
                programs.known[key] = False
    result = prepare_plainly(update, x, mask, seeds, dropped)
    read_anew()
    return result


def prepare_plainly(
    update: nn.Module,
    x: Any,
    mask: Tensor | None,
    seeds: Tensor | None,
    dropped: SolveMasks | None = None,
) -> Any:
    """``update.prepare(x, mask=mask)`` with the dropout of ``seeds``, called as it is."""
    if dropped is None and seeds is not None:
        dropped = SolveMasks.of(update)
    if dropped is None or seeds is None:
        return update.prepare(x, mask=mask)  # type: ignore[operator]
    with dropped.within(seeds, prepares=True):
        return update.prepare(x, mask=mask)  # type: ignore[operator]


def flat(prepared: Any) -> tuple[Any, Any]:
    """The tensors of a ``Prepared``, and its tree: solvers go through a flat tuple faster.

    What an update prepares that is no ``Prepared`` stays as it is, with None for the tree.
    """
    if not isinstance(prepared, Prepared):
        return prepared, None
    leaves, spec = pytree.tree_flatten(prepared)
    return tuple(leaves), spec


def initial_state(update: Update, init: str | Callable[[Any], Any], x: Any, prepared: Any) -> Any:
    """The initial state by a layer's ``init``, for its input and what the update prepared of it."""
    kind = type(update)
    own = kind.initial is not Update.initial or kind.start is not Update.start
    if callable(init) or (init == "input" and own):
        made = init(x) if callable(init) else update.start(x, prepared)
        read_anew()  # a user's own code may have changed a module
        return made
    if not isinstance(x, Tensor):
        raise TypeError(
            f"x must be a tensor where init={init!r}, got {type(x)}; give init a function x -> z0"
        )
    return x if init == "input" else torch.zeros_like(x)


class Map:
    """An update as the function ``f(z, x, mask, seeds)`` that ``solvers.fixed_point`` takes.

    ``x`` and ``spec`` are what was prepared of the layer's input, by :func:`flat`. ``seeds`` (B,) are those
    of the dropout in the update, None where it has none; ``dropped`` makes the masks of them.
    """

    def __init__(
        self,
        update: Update,
        layer: nn.Module,
        spec: Any,
        dropped: SolveMasks | None,
        programs: Programs | None = None,
    ) -> None:
        self.programs = programs
        self.update, self.symmetric = update, update.symmetric
        self.layer = layer  # named by warnings
        self.spec, self.dropped = spec, dropped

    def __call__(self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None) -> Any:
        if self.dropped is None or seeds is None:
            return self.update(z, self.whole(x), mask=mask)
        with self.dropped.within(seeds):
            return self.update(z, self.whole(x), mask=mask)

    def on(self, update: Update) -> Map:
        """The same map with another update in the place of this one, of the same kind."""
        other = copy(self)
        other.update, other.programs = update, None
        other.dropped = None if self.dropped is None else SolveMasks.of(update)
        return other

    def static_key(self) -> tuple[Any, ...]:
        """What a compiled evaluation depends on beside tensors and the modules' own attributes."""
        return type(self), self.spec, self.dropped is None

    def whole(self, x: Any) -> Any:
        """What was prepared, from the tensors in it."""
        return x if self.spec is None else pytree.tree_unflatten(list(x), self.spec)


class MonitoredMap(Map, solvers.EnergyUpdate):
    """A monitored update as a ``solvers.EnergyUpdate``."""

    def joint(  # type: ignore[override]
        self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None
    ) -> tuple[Any, Tensor, Any | None]:
        if self.dropped is None or seeds is None:
            return self.update.joint(z, self.whole(x), mask=mask)
        with self.dropped.within(seeds):
            return self.update.joint(z, self.whole(x), mask=mask)


class Held:
    """A map with the masked tokens held constant: their rows and columns of its Jacobian are zero."""

    def __init__(self, function: Map) -> None:
        self.function = function

    def __call__(self, z: Any, x: Any, mask: Tensor | None, seeds: Tensor | None = None) -> Any:
        if mask is None:
            return self.function(z, x, mask, seeds)
        layout = Layout.of(z)
        keep, vector = layout.mask_vector(mask), layout.vector(z)
        held = layout.tree(torch.where(keep, vector, vector.detach()))
        image = layout.vector(self.function(held, x, mask, seeds))
        return layout.tree(torch.where(keep, image, 0))


# What is prepared, by programs.


@dataclass(frozen=True)
class _Same:
    """Stands for an output that is this input."""

    number: int


@dataclass(frozen=True)
class _Outline:
    """How outputs belong together, and which of them depend on what asks for a gradient."""

    spec: Any
    differentiable: tuple[int, ...]
    called: frozenset[int]  # numbers of modules that drop


@dataclass(eq=False)
class _Preparation:
    """One call of ``prepare``: leaves of (x, mask, seeds), and the weights of the update."""

    programs: Programs
    leaves: list[Any]
    spec: Any
    autocast: torch.dtype | None
    wanted: Wanted
    weights: Weights
    padding: Padding
    device: str
    pull: Bound | None = None  # gradients, of cotangents; what it holds is in :attr:`held`
    held: list[Tensor] = field(default_factory=list)
    after: Skeleton | None = None  # of outputs and gradients
    outputs: int = 0  # tensors among them
    called: frozenset[int] = frozenset()  # numbers of modules that drop

    @classmethod
    def of(cls, programs: Programs, given: Any, compact: bool) -> _Preparation:
        leaves, spec = pytree.tree_flatten(ordinary(given))
        weights = programs.weights()
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        first = (tensors or list(weights.tensors.values()) or [torch.empty(1)])[0]
        recorded = torch.is_grad_enabled()
        wanted = Wanted.of(leaves, weights.tensors) if recorded else Wanted((), ())
        shapes = tuple((tuple(t.shape[1:]), t.dtype) for t in tensors)
        batch, fixed = first.shape[0] if tensors else 1, not (compact and tensors)
        padding = Padding.to_size(programs, ("prepare", shapes), batch, fixed, first.device)
        device = first.device.type
        return cls(programs, leaves, spec, autocast_dtype(device), wanted, weights, padding, device)

    @property
    def key(self) -> tuple[Any, ...]:
        return "prepare", self.spec, self.autocast, self.wanted

    def run(self) -> Any:
        """What the update prepares, with its gradient."""
        with torch.no_grad(), without_autocast(self.device):
            key, given = ("outputs", *self.key), self._given(self.leaves)
            like, outline = self.programs.example(self._outputs, key, [given], self.weights)
            self.called = outline.called
        if not any(isinstance(each, Tensor) for each in like):  # nothing is computed
            return pytree.tree_unflatten(self._cut(like), outline.spec)
        linearizes = self.linearizes and outline.differentiable
        outputs = self._linearized(given, like, outline) if linearizes else self._forward(given)
        if outline.differentiable:
            inputs = self.wanted.inputs(self.leaves, self.weights.tensors)
            others = [t for t in self._tensors() if all(t is not each for each in inputs)]
            values = [outputs[n] for n in outline.differentiable]
            with_gradient = _Prepared.apply(self, outline, values, len(inputs), *inputs, *others)
            for n, value in zip(outline.differentiable, with_gradient, strict=True):
                outputs[n] = value
        return pytree.tree_unflatten(outputs, outline.spec)

    def _tensors(self) -> list[Tensor]:
        own = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        return [*own, *self.weights.tensors.values()]

    def _given(self, leaves: list[Any]) -> Packed:
        given = [detached(t) if isinstance(t, Tensor) else t for t in leaves]
        return pack(self.padding.tree(given))

    def _call(self, function: Any, *parts: Any) -> Any:
        self.programs.begin(torch.device(self.device))
        with torch.no_grad(), without_autocast(self.device):
            key = (function.__name__, *self.key)
            return self.programs.call(function, key, parts, self.weights).record()

    @property
    def linearizes(self) -> bool:
        """Whether the evaluation keeps what its gradient will need, as one without programs does."""
        return self.device == "cpu"

    def _linearized(self, given: Packed, found: list[Any], outline: _Outline) -> list[Any]:
        """The outputs, like those ``found``, and ``pull``, of which the gradients come later."""
        programs, weights = self.programs, self.weights
        with torch.no_grad(), without_autocast(self.device):
            record = pack(found)
            places = slice(len(record.tensors)), slice(len(record.tensors), None)
            like = [found[n] for n in outline.differentiable]
            cotangents = [torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in like]
            parts = [pack(cotangents), given]
            (evaluated, pull), after = programs.stages(
                self._outputs_and_gradients, ("linearized", *self.key), parts, weights, places
            )
            values = list(evaluated(*cotangents))
        self.held, pull.others = [t.detach() for t in pull.others], ()
        self.pull, self.after, self.outputs = pull, after, len(values)
        return self._cut(unpack(values, record.skeleton))

    def _forward(self, given: Packed) -> list[Any]:
        return self._cut(self._call(self._outputs, given)[0])

    def _cut(self, found: list[Any]) -> list[Any]:
        """Outputs of the batch as it is, without what pads it."""
        batch, own = self.padding.batch, self.device == "cuda"  # where a later program may write
        outputs: list[Any] = []
        for each in found:
            if isinstance(each, _Same):
                outputs.append(self.leaves[each.number])
            elif isinstance(each, Tensor) and each.dim():
                outputs.append(each[:batch].clone() if own else each[:batch])
            else:
                outputs.append(each)
        return outputs

    def backward(self, cotangents: list[Tensor], held: list[Tensor]) -> list[Tensor | None]:
        """Gradients of what is wanted; ``held`` by ``pull``."""
        padded = [self.padding.zeros(each.resolve_neg()).contiguous() for each in cotangents]
        if self.pull is None or self.after is None:
            self.programs.check_unchanged(self.weights)
            found = self._call(self._gradients, self._given(self.leaves), pack(padded))
        else:
            with torch.no_grad(), without_autocast(self.device):
                pulled = self.pull.run(*padded, *held)
            # No gradient is an output, so that none of these is asked for.
            found = unpack([torch.empty(0)] * self.outputs + list(pulled), self.after)[1]
        inputs = self.wanted.inputs(self.leaves, self.weights.tensors)
        return self.padding.gradients(found, inputs)

    def _evaluate(self, leaves: list[Any]) -> tuple[list[Any], list[Tensor], list[Any], Any]:
        """Within a program: leaves and wanted inputs as they were used, outputs and their spec."""
        leaves, weights = list(leaves), self.programs.traced_weights()
        for number in self.wanted.leaves:
            leaves[number] = leaves[number].detach().requires_grad_()
        for name in self.wanted.weights:
            weights[name] = weights[name].detach().requires_grad_()
        given = pytree.tree_unflatten(leaves, self.spec)
        with torch.enable_grad(), constant_weights(), with_autocast(self.device, self.autocast):
            dropped = SolveMasks.of(self.programs.clone or self.programs.module)
            clone = self.programs.clone
            found = self.programs.within(weights, prepare_plainly, clone, *given, dropped)
        self.called = frozenset(dropped.called if dropped else ())
        return leaves, self.wanted.inputs(leaves, weights), *pytree.tree_flatten(found)

    def _outputs(self, leaves: list[Any]) -> tuple[list[Any], _Outline]:
        leaves, _, outputs, spec = self._evaluate(leaves)
        return self._outlined(leaves, outputs, spec)

    def _outlined(
        self, leaves: list[Any], outputs: list[Any], spec: Any
    ) -> tuple[list[Any], _Outline]:
        """The outputs without a graph, :class:`_Same` in the place of an input, and their outline."""
        numbers = {id(leaf): n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        found, differentiable = [], []
        for n, each in enumerate(outputs):
            if not isinstance(each, Tensor):
                found.append(each)
            elif id(each) in numbers:
                found.append(_Same(numbers[id(each)]))
            else:
                found.append(each.detach())
                if each.requires_grad:
                    differentiable.append(n)
        return found, _Outline(spec, tuple(differentiable), self.called)

    def _gradients(self, leaves: list[Any], cotangents: list[Tensor]) -> list[Tensor | None]:
        leaves, inputs, outputs, _ = self._evaluate(leaves)
        return self._pulled(leaves, inputs, outputs, cotangents)

    def _outputs_and_gradients(
        self, cotangents: list[Tensor], leaves: list[Any]
    ) -> tuple[list[Any], list[Tensor | None]]:
        leaves, inputs, outputs, spec = self._evaluate(leaves)
        pulled = self._pulled(leaves, inputs, outputs, cotangents)
        return self._outlined(leaves, outputs, spec)[0], pulled

    def _pulled(
        self, leaves: list[Any], inputs: list[Tensor], outputs: list[Any], cotangents: list[Tensor]
    ) -> list[Tensor | None]:
        """Gradients of the inputs from the cotangents of the outputs, which are no inputs themselves."""
        own = {id(leaf) for leaf in leaves}
        outputs = [t for t in outputs if isinstance(t, Tensor) and id(t) not in own]
        with torch.enable_grad():
            pairs = zip([t for t in outputs if t.requires_grad], cotangents, strict=True)
            total = sum((t * c).sum() for t, c in pairs)
        return gradients(total, inputs)  # type: ignore[arg-type]

    def recorded(self) -> list[Tensor]:
        """The differentiable outputs, with a graph: for second derivatives."""
        self.programs.check_unchanged(self.weights)
        given = pytree.tree_unflatten(self.leaves, self.spec)
        with (
            self.programs.cloned(),
            torch.enable_grad(),
            constant_weights(),
            uncompiled(),
            with_autocast(self.device, self.autocast),
        ):
            weights = self.weights.tensors
            found = self.programs.within(weights, prepare_plainly, self.programs.clone, *given)
        own = {id(leaf) for leaf in self.leaves}
        outputs = [t for t in pytree.tree_leaves(found) if isinstance(t, Tensor)]
        return [t for t in outputs if t.requires_grad and id(t) not in own]


class _Prepared(torch.autograd.Function):
    """(inputs) -> the values that a program has computed of them, with their gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        preparation: _Preparation,
        outline: _Outline,
        values: list[Tensor],
        wanted: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.preparation, ctx.wanted, ctx.number = preparation, wanted, len(tensors)
        # All of them, so that a change in place is noticed; what the linearisation holds is freed.
        ctx.save_for_backward(*tensors, *preparation.held)
        preparation.held = []
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors[: ctx.wanted]
        preparation: _Preparation = ctx.preparation
        results: Any
        if torch.is_grad_enabled():
            outputs = preparation.recorded()
            results = torch.autograd.grad(
                outputs, inputs, cotangents, create_graph=True, allow_unused=True
            )
        else:
            results = preparation.backward(list(cotangents), list(ctx.saved_tensors[ctx.number :]))
        return (None, None, None, None, *results, *[None] * (ctx.number - ctx.wanted))
