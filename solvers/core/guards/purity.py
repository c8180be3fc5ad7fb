"""Functions that have no fixed point of their own: they overwrite their input, draw or learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

_INFERENCE = "Inplace update to inference tensor"  # torch's words
OVERWRITES = (
    "f works in place on {}: it must return a new tensor and leave its inputs as they are (use "
    "z * 0.5 for z.mul_(0.5), ReLU() for ReLU(inplace=True), or z.clone() first)"
)
RANDOM = (
    "f returns another value when it is evaluated at the same point again (dropout, RReLU, noise?), so "
    "it has no fixed point: call eval(), or draw the random numbers once, before the solve"
)
LEARNING = (
    "f updates the running statistics of {} at every evaluation, and its samples are not solved on "
    "their own: call eval(), or use a norm of each sample (LayerNorm, GroupNorm)"
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

    def __init__(self, f: Any, z: Tensor, args: tuple[Any, ...]) -> None:
        leaves = [z, *(leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor))]
        self.tensors = [leaf for leaf in leaves if not _expanded(leaf)]
        self.versions = [version_of(leaf) for leaf in self.tensors]
        self.copies = [leaf.detach().clone() for leaf in self.tensors]
        self.statistics = [(module, count) for module, count in _learning(f)]
        self.random = _random_state(z.device)

    def restore(self, failed: bool = True) -> bool:
        """Give overwritten tensors their numbers back; True where there were any.

        Those of inference mode count no changes. Torch refuses to change them, but only after it
        has, so they are restored if f has ``failed``.
        """
        changed = False
        for leaf, version, copy in zip(self.tensors, self.versions, self.copies, strict=True):
            if version_of(leaf) != version or (failed and leaf.is_inference()):
                changed = True
                with torch.inference_mode():
                    leaf.copy_(copy)
        return changed

    def check(self) -> None:
        """Raise ValueError where f has changed its inputs or running statistics."""
        if self.restore(failed=False):
            raise ValueError(OVERWRITES.format("its inputs"))
        for module, count in self.statistics:
            if _updates(module) != count:
                raise ValueError(LEARNING.format(module))

    def drew(self) -> bool:
        """Whether random numbers were drawn from torch's own generators since."""
        now = _random_state(self.tensors[0].device if self.tensors else torch.device("cpu"))
        return any(not _same(a, b) for a, b in zip(self.random, now, strict=False))


def refuse_changing_modules(module: nn.Module, name: str) -> None:
    """Raise ValueError for modules in training mode whose map is another at every evaluation.

    They draw random numbers, or couple the samples of a batch and learn its statistics.
    """
    for path, part in module.named_modules():
        if part.training and _changes(part):
            raise ValueError(
                f"{name} holds {part} ({path!r}) in training mode, which changes the map at every "
                "evaluation; call eval() on it, drop out the layer's input or output instead, use a "
                "norm of each sample"
            )


def _changes(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    if isinstance(module, nn.RReLU):
        return module.lower != module.upper
    if isinstance(module, _NormBase):  # BatchNorm couples the batch, InstanceNorm may learn
        coupled = isinstance(module, nn.modules.batchnorm._BatchNorm)
        return coupled or module.track_running_stats
    return False


def _learning(f: Any) -> Iterator[tuple[_NormBase, int]]:
    """Norms in training mode within reach of ``f``, with the number of their updates."""
    cells = [cell.cell_contents for cell in getattr(f, "__closure__", None) or () if _filled(cell)]
    for home in (f, getattr(f, "__self__", None), *cells):
        if isinstance(home, nn.Module):
            for module in home.modules():
                if isinstance(module, _NormBase) and module.running_mean is not None:
                    yield module, _updates(module)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is not assigned yet
        return False


def _updates(module: _NormBase) -> int:
    return sum(version_of(buffer) for buffer in module.buffers(recurse=False))


def _random_state(device: torch.device) -> list[Any]:
    """States of torch's own generators, known to the host."""
    states: list[Any] = [torch.default_generator.get_state()]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        generator = torch.cuda.default_generators[device.index or 0]
        states += [generator.initial_seed(), generator.get_offset()]
    return states


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    return first == second


def _expanded(tensor: Tensor) -> bool:
    """Whether entries share their memory: torch itself refuses to write to such a tensor."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
