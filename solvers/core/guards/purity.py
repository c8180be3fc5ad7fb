"""Functions that overwrite their input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from solvers.core.guards.randomness import same_numbers
from solvers.core.layout import leaves_of

_INFERENCE = "Inplace update to inference tensor"  # torch's words
OVERWRITES = (
    "f works in place on {}: it must return a new tensor and leave its inputs as they are (use "
    "z * 0.5 for z.mul_(0.5), ReLU() for ReLU(inplace=True), or z.clone() first)"
)


def call_outside_inference(function: Callable[[Tensor], Any], z: Tensor) -> Any:
    """``function(z)`` without gradients, outside of inference mode: to change its tensors is an error."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            return function(z)
    except RuntimeError as error:
        if _INFERENCE in str(error):
            raise ValueError(OVERWRITES.format("its input")) from error
        raise


def version_of(tensor: Tensor) -> int:
    """How often the tensor was changed in place; 0 for one of inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


class Witness:
    """The state of the world before the first evaluation of ``f``, to be compared after it.

    Copies of the caller's tensors are held for this one evaluation, and restored if it fails.
    """

    def __init__(self, z: Tensor, args: tuple[Any, ...]) -> None:
        parts = [leaf for argument in args for leaf in leaves_of(argument)]
        leaves = [z, *(leaf for leaf in parts if isinstance(leaf, Tensor))]
        self.tensors = [leaf for leaf in leaves if not _expanded(leaf)]
        self.versions = [version_of(leaf) for leaf in self.tensors]
        self.copies = [leaf.detach().clone() for leaf in self.tensors]

    def restore(self) -> bool:
        """Give overwritten tensors their numbers back; True where there were any.

        On the CPU the numbers themselves are compared: ``z.data``, ``z.numpy()`` and tensors of
        inference mode count no changes. Elsewhere the host would have to wait for the answer.
        """
        changed = False
        for leaf, version, copy in zip(self.tensors, self.versions, self.copies, strict=True):
            if version_of(leaf) != version or _differs(leaf, copy):
                changed = True
                with torch.inference_mode():
                    leaf.copy_(copy)
        return changed

    def check(self) -> None:
        """Raise ValueError where f has changed its inputs."""
        if self.restore():
            raise ValueError(OVERWRITES.format("its inputs"))


def _differs(tensor: Tensor, copy: Tensor) -> bool:
    """Whether numbers have changed, as far as the host knows them."""
    on_host = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return on_host and not torch.equal(tensor, copy) and not same_numbers(tensor, copy)


def _expanded(tensor: Tensor) -> bool:
    """Whether entries share their memory: torch itself refuses to write to such a tensor."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
