"""Evaluations of a map, and products with its Jacobian, by compiled programs.

A solve by them is the ordinary one: a program makes what ``f`` would have made. What does not depend on the
state is computed once a solve, by the first of its programs. Batches come in a few sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.compiled.programs import Packed, Weights, pack, unpack
from solvers.core.layout import leaves_of, map_tensors, take
from solvers.core.modes import constant_weights, without_autocast
from solvers.core.problem import Problem, gradients

WASTE = 2  # a batch is padded to a size that programs exist for, up to so many times its own


@dataclass
class Given:
    """The inputs of a map."""

    args: tuple[Any, ...]
    mask: Tensor | None

    @classmethod
    def of(cls, problem: Problem, padding: Padding) -> Packed:
        """The inputs of ``problem`` with rows added to the batch, packed."""
        args, mask = map_tensors(detached, (problem.args, problem.mask))
        return pack(cls(padding.tree(args), padding.tree(mask)))

    def problem(self, like: Problem) -> Problem:
        """``like`` with these tensors, within a program."""
        return replace(
            like,
            f=like.programs.traced_map(like.f),
            args=self.args,
            mask=self.mask,
            programs=None,
            compiled=None,
            checked=True,
            draws=None,
        )


def detached(tensor: Tensor) -> Tensor:
    """Without a graph, and not of inference mode: no backward pass could save such a tensor.

    Nor with a sign that is yet to be flipped: generated code reads the numbers as they lie.
    """
    return tensor.clone() if tensor.is_inference() else tensor.detach().resolve_neg()


@dataclass(frozen=True)
class Padding:
    """Copies of the last sample that fill a batch up to a size that programs exist for."""

    batch: int
    index: Tensor | None  # rows of the padded batch in the caller's; None: the same

    @classmethod
    def of(cls, problem: Problem, state: Tensor) -> Padding:
        """The padding for ``problem`` and a state (B, D); see :func:`program_size`."""
        batch = state.shape[0]
        shapes = tuple(
            (tuple(leaf.shape[1:]), leaf.dtype)
            for leaf in leaves_of(problem.args)
            if isinstance(leaf, Tensor)
        )
        sizes = problem.programs.sizes.setdefault((problem.layout.shapes, shapes), [])
        size = program_size(batch, sizes) if problem.compact else batch
        if size == batch:
            return cls(batch, None)
        return cls(batch, torch.arange(size, device=state.device).clamp_max(batch - 1))

    def rows(self, tensor: Tensor) -> Tensor:
        """(B, ...) -> (size, ...), contiguous."""
        padded = tensor if self.index is None else tensor.index_select(0, self.index)
        return padded.contiguous()

    def own(self, tensor: Tensor) -> Tensor:
        """(size, ...) -> (B, ...), where no later program writes: CUDA graphs do to what they returned."""
        cut = tensor if self.index is None else tensor[: self.batch]
        return cut.clone() if tensor.is_cuda else cut

    def zeros(self, tensor: Tensor) -> Tensor:
        """(B, ...) -> (size, ...), the added rows zero."""
        tensor = tensor.detach().resolve_neg().contiguous()
        if self.index is None:
            return tensor
        added = tensor.new_zeros(len(self.index) - self.batch, *tensor.shape[1:])
        return torch.cat((tensor, added))

    def gradients(
        self, found: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """What was ``found`` for padded inputs, for the ``inputs``; no two in the same memory.

        Autograd takes a gradient over as ``.grad``, which the user may change in place.
        """
        seen, cut = set[int](), list[Tensor | None]()
        for gradient, like in zip(found, inputs, strict=True):
            if gradient is not None:
                if self.index is not None and like.dim():
                    gradient = gradient[: len(like)]
                memory = gradient.untyped_storage().data_ptr()
                if memory in seen:
                    gradient = gradient.clone()
                seen.add(memory)
                if gradient.is_cuda:  # a later program may write there
                    gradient = gradient.clone()
            cut.append(gradient)
        return cut

    def tree(self, tree: Any) -> Any:
        """The pytree with its batched tensors padded."""
        return tree if self.index is None else take(tree, self.index, self.batch)


def program_size(batch: int, sizes: list[int]) -> int:
    """The size of batch to compile for; a new one is added to ``sizes``.

    A batch that fills at least half of a known size is padded to it. The first two other sizes are taken as
    they come, later ones are powers of two.
    """
    known = [size for size in sizes if batch <= size <= WASTE * batch]
    if batch in sizes:
        return batch
    if known:
        return min(known)
    size = batch if len(sizes) < 2 else 1 << (batch - 1).bit_length()
    sizes.append(size)
    return size


@dataclass(frozen=True)
class Wanted:
    """Which inputs of the map ask for a gradient, by their place or name."""

    leaves: tuple[int, ...]  # among the leaves of the arguments
    weights: tuple[str, ...]

    @classmethod
    def of(cls, args: Any, weights: dict[str, Tensor]) -> Wanted:
        leaves = enumerate(leaves_of(args))
        return cls(
            tuple(n for n, leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad),
            tuple(name for name, weight in weights.items() if weight.requires_grad),
        )

    def opened(self, args: Any, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """Arguments and weights, of which those that are wanted are new leaves that require a gradient."""
        leaves, spec = pytree.tree_flatten(args)
        for number in self.leaves:
            leaves[number] = leaves[number].detach().requires_grad_()
        weights = dict(weights)
        for name in self.weights:
            weights[name] = weights[name].detach().requires_grad_()
        return pytree.tree_unflatten(leaves, spec), weights

    def inputs(self, args: Any, weights: dict[str, Tensor]) -> list[Tensor]:
        leaves = leaves_of(args)
        return [leaves[n] for n in self.leaves] + [weights[name] for name in self.weights]


class Evaluation:
    """``f(z)``, or ``(f(z), E(z), dE/dz)`` of a problem with an energy, at states like ``start`` (B, D)."""

    def __init__(self, problem: Problem, start: Tensor) -> None:
        programs = self.programs = problem.programs
        self.padding = Padding.of(problem, start)
        given = Given.of(problem, self.padding)
        parts = [pack(self.padding.rows(start)), given]
        key = ("evaluation", problem.static_key())

        def evaluate(z: Tensor, inside: Given) -> Any:
            own = inside.problem(problem)
            return own.joint(z) if own.has_energy else own.image(z)

        with torch.no_grad(), without_autocast(start.device.type):
            (self.run,), self.after = programs.stages(evaluate, key, parts, programs.weights())

    def __call__(self, z: Tensor) -> Any:
        padding = self.padding
        with torch.no_grad(), without_autocast(z.device.type):
            self.programs.begin(z.device)
            found = unpack(list(self.run(padding.rows(z.detach()))), self.after)
        return map_tensors(padding.own, found)


class Linearization:
    """Products ``J^T u`` at a state z (B, D), and with one of them the gradients of inputs."""

    def __init__(self, problem: Problem, z: Tensor, wanted: Wanted, weights: Weights) -> None:
        programs = self.programs = problem.programs
        self.problem, self.wanted = problem, wanted
        self.inputs = wanted.inputs(problem.args, weights.tensors)
        padding = self.padding = Padding.of(problem, z)
        rows = padding.rows(z.detach())
        parts = [pack(torch.empty_like(rows)), pack(rows), Given.of(problem, padding)]
        key = ("product", problem.static_key(), wanted)
        which = (slice(1), slice(None))
        with torch.no_grad(), without_autocast(z.device.type):
            (self.one, self.all), self.after = programs.stages(
                self._images, key, parts, weights, which
            )

    def product(self, u: Tensor) -> Tensor:
        """``J^T u``."""
        with torch.no_grad(), without_autocast(u.device.type):
            self.programs.begin(u.device)
            return self.padding.own(self.one(self.padding.zeros(u))[0])

    def gradients(self, u: Tensor) -> list[Tensor | None]:
        """``(df/dinput)^T u`` for what is wanted."""
        with torch.no_grad(), without_autocast(u.device.type):
            self.programs.begin(u.device)
            found = unpack(list(self.all(self.padding.zeros(u))), self.after)
        return self.padding.gradients(found[1:], self.inputs)

    def _images(self, u: Tensor, z: Tensor, given: Given) -> list[Tensor | None]:
        """``J(z)^T u`` and ``(df/dinput)^T u``, within a program."""
        own, programs = given.problem(self.problem), self.programs
        args, weights = self.wanted.opened(own.args, programs.traced_weights())
        with torch.enable_grad(), constant_weights():
            point = z.detach().requires_grad_()
            output = programs.within(weights, replace(own, args=args).masked_map, point)
        variables: Sequence[Tensor] = [point, *self.wanted.inputs(args, weights)]
        found = gradients(output, variables, u)
        return [torch.zeros_like(u) if found[0] is None else found[0], *found[1:]]
