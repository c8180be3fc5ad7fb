"""Values of functionals that are stationary in a state, so that their derivatives are partial ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solvers.adjoints.capture import Recorder
from solvers.core.jacobian import gradients


class Functional(Protocol):
    """A dataclass whose ``args``, a pytree, a recorder replaces."""

    args: Any

    def masked_map(self, z: Tensor) -> Tensor:
        """The value (B,) of the state as a matrix (B, D)."""
        ...


def stationary_value(functional: Functional, z: Tensor) -> Tensor:
    """The value (B,) at ``z`` (B, D), differentiable as if its derivative by ``z`` were 0.

    That is so where the functional is stationary. Second derivatives go through ``z``.
    """
    recorder = Recorder(cast("Any", functional))  # of which it only asks these two
    record = _Record(recorder, *recorder.record(z))
    return _StationaryValue.apply(record, z, *recorder.inputs)


@dataclass
class _Record:
    """A recorded evaluation: ``output`` (B,) at ``point`` (B, D)."""

    recorder: Recorder
    point: Tensor
    output: Tensor


class _StationaryValue(torch.autograd.Function):
    """(state, inputs) -> the value, whose derivative by the state is zero and is not computed."""

    @staticmethod
    def forward(ctx: Any, record: _Record, z: Tensor, *inputs: Tensor) -> Tensor:
        ctx.record = record
        ctx.save_for_backward(z, *inputs)
        return record.output.detach().clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (cotangent,) = cotangents
        record: _Record = ctx.record
        z, *inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            results: Any = _PartialGradient.apply(record, cotangent, z, *inputs)
        else:
            results = gradients(record.output, record.recorder.aliases, cotangent)
        return (None, None, *results)


class _PartialGradient(torch.autograd.Function):
    """(cotangent, state, inputs) -> gradients of the inputs; its derivative goes through the state too."""

    @staticmethod
    def forward(
        ctx: Any, record: _Record, cotangent: Tensor, z: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.record = record
        ctx.save_for_backward(cotangent, z, *inputs)
        results = gradients(record.output, record.recorder.aliases, cotangent)
        pairs = zip(results, inputs, strict=True)
        return tuple(torch.zeros_like(t) if g is None else g for g, t in pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        record: _Record = ctx.record
        variables = [record.point, *record.recorder.aliases]
        with torch.enable_grad():
            weight = ctx.saved_tensors[0].detach().requires_grad_()
            images = gradients(record.output, variables[1:], weight, create_graph=True)
            terms = [
                (image * cotangent).sum()
                for image, cotangent in zip(images, cotangents, strict=True)
                if image is not None and image.requires_grad
            ]
            if not terms:
                return (None,) * (len(variables) + 2)
            results = gradients(sum(terms[1:], terms[0]), [weight, *variables])
        return (None, *results)
