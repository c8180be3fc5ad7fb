"""What a layer computes of its input before a solve, compiled or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from implicit_attn.deq.problem import may_prepare
from implicit_attn.dropout import SolveMasks
from implicit_attn.updates.update import Update
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
from solvers.core.modes import (
    autocast_dtype,
    constant_weights,
    in_transform,
    ordinary,
    read_anew,
    uncompiled,
    with_autocast,
    without_autocast,
)
from solvers.core.problem import gradients

if TYPE_CHECKING:
    from solvers.compiled.graphs import Bound


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
    """The same without programs."""
    if dropped is None and seeds is not None:
        dropped = SolveMasks.of(update)
    if dropped is None or seeds is None:
        return update.prepare(x, mask=mask)  # type: ignore[operator]
    with dropped.within(seeds, prepares=True):
        return update.prepare(x, mask=mask)  # type: ignore[operator]


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
        return self._told(leaves, outputs, spec)

    def _told(self, leaves: list[Any], outputs: list[Any], spec: Any) -> tuple[list[Any], _Outline]:
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
        return self._told(leaves, outputs, spec)[0], pulled

    def _pulled(
        self, leaves: list[Any], inputs: list[Tensor], outputs: list[Any], cotangents: list[Tensor]
    ) -> list[Tensor | None]:
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
