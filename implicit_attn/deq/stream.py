"""The samples of a stream of inputs, solved by a layer in slots that are refilled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from implicit_attn.deq.map import Map, batch_and_device, check_inputs
from implicit_attn.energies.energy import FunctionCall
from implicit_attn.parametrised import changes_when_read
from solvers.core.context import weights_of, within
from solvers.core.cuda import on_cuda
from solvers.core.layout import Layout
from solvers.core.problem import Problem
from solvers.core.solution import Solution
from solvers.core.tolerance import Goal
from solvers.fixed_points import check_inputs as check_tensors
from solvers.methods.dispatch import Rows
from solvers.queues import Group, Queue
from solvers.recording import Recorder


def solve_stream(
    f: Map,
    inputs: Iterable[Any],
    masked: bool,
    start: Callable[[Any], Any] | None,
    slots: int,
    options: dict[str, Any],
    recorder: Recorder | None = None,
) -> Iterator[tuple[Tensor, Solution]]:
    """Yield indices and solutions of the samples of ``inputs``, batches for the layer of the map f."""
    options, stop = dict(options), options["stop"]
    if changes_when_read(f.walked_modules):
        raise ValueError(
            "stream cannot solve a layer whose weights change whenever they are read, such as "
            "torch.nn.utils.spectral_norm in training: call layer.eval() first"
        )
    if not options.pop("compact"):
        raise ValueError(
            "stream needs compact=True: each evaluation is made with other samples, so the update must not "
            "close over tensors of a batch"
        )
    options.pop("adjoint")  # a stream has no gradients
    options["stop"] = None if stop is None else _rule(stop)

    def record(problem: Problem, states: Tensor, goal: Goal) -> Rows | None:
        if recorder is None or not on_cuda(states):
            return None
        given = {"adjoint": None, "mask": problem.args[1], **options}
        return recorder.rows(f, problem, states, goal, module=f.update, **given)

    with torch.no_grad():
        weights = weights_of(f.walked_modules)
    queue = Queue(f, slots, record=record, weights=weights, **options)

    def read(item: Any) -> tuple[Any, int]:
        if masked and not (isinstance(item, (tuple, list)) and len(item) == 2):
            raise TypeError(
                f"with masked=True each batch must be a pair (x, mask), got {type(item)}"
            )
        x, mask = item if masked else (item, None)
        x = check_inputs(x, mask, f.parts)
        return (x, mask), batch_and_device(x)[0]

    def prepare(tree: Any) -> Group:
        x, mask = tree
        with torch.no_grad(), within(weights=weights):
            z0 = None if start is None else start(x)
            args, z0 = f.prepare_arguments(x, mask, f.seeds(z0, x), z0)
        if args[0] is x:
            f.check_modules()
        layout = Layout.of(z0)
        check_tensors(z0, args)
        problem = Problem.of(f, None, z0, args, mask, True, layout)
        problem.given = None if stop is None else (x,)
        return Group(problem, layout.vector(z0).detach().resolve_neg())

    # Unlike a generator, a map goes on where an iterator has more to give after its end.
    yield from queue.solve(map(read, [inputs] if isinstance(inputs, Tensor) else inputs), prepare)
    f.masks.require_called(f.update)


def _rule(stop: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A rule ``stop(z)`` or ``stop(z, x)`` as one of both."""
    call = FunctionCall.read(stop)
    return lambda z, x: call(stop, z, x, None)
