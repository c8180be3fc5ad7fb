"""What is asked of ``f`` in a solve: a state like its own, and the same at every evaluation.

In this order: what it returns, functions that overwrite their input, functions that draw random numbers,
norms that couple the samples of a batch or learn from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from solvers.core.layout import Layout, leaves_of
from solvers.core.rows import Point


def check_output(
    output: Any, energy: Tensor | None, z: Tensor, layout: Layout, autocast: torch.dtype | None
) -> None:
    """Raise TypeError or ValueError unless ``output`` is like the state z (B, D) of this ``layout``.

    An ``energy`` must be one number per sample. Under ``autocast`` the output may be of another dtype.
    """
    refuse_forward_mode(output)
    leaves, spec = [output], layout.spec
    if not (isinstance(output, Tensor) and spec.is_leaf()):
        leaves, spec = pytree.tree_flatten(layout.ordered(output))
    if spec != layout.spec:
        raise TypeError(f"f must return a state with the structure of z0, got {spec}")
    for leaf, shape, dtype in zip(leaves, layout.shapes, layout.dtypes, strict=True):
        expected = (z.shape[0], *shape)
        if not isinstance(leaf, Tensor):
            raise TypeError(f"f must return tensors, got {type(leaf)}")
        if tuple(leaf.shape) != expected:
            raise ValueError(f"f must return the shape of z0, {expected}, got {tuple(leaf.shape)}")
        if leaf.device != z.device:
            raise ValueError(f"f must return the device of z0, {z.device}, got {leaf.device}")
        if leaf.dtype != dtype and (autocast is None or not leaf.is_floating_point()):
            raise TypeError(f"f must return the dtype of z0, {dtype}, got {leaf.dtype}")
    if energy is not None:
        check_energy(energy, z.shape[0])


def refuse_forward_mode(output: Any) -> None:
    """Raise NotImplementedError for a forward-mode tangent, which the solve would drop."""
    if getattr(forward_ad, "_current_level", -1) < 0:
        return
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and forward_ad.unpack_dual(leaf).tangent is not None:
            raise NotImplementedError(
                "forward-mode differentiation through a fixed point is not implemented; use "
                "reverse mode (backward, torch.autograd.grad)"
            )


def check_energy(energy: Any, batch: int) -> None:
    """Raise TypeError or ValueError unless ``energy`` is a tensor of one number per sample."""
    if not isinstance(energy, Tensor):
        raise TypeError(f"energy must return a tensor of shape ({batch},), got {type(energy)}")
    if tuple(energy.shape) != (batch,):
        raise ValueError(
            f"energy must return one number per sample, shape ({batch},), got shape "
            f"{tuple(energy.shape)}; do not sum over the batch"
        )


_INFERENCE = "Inplace update to inference tensor"  # torch's words
OVERWRITES = (
    "f must not modify {} in place: it must return a new tensor (use z * 0.5 instead of "
    "z.mul_(0.5), ReLU() instead of ReLU(inplace=True), or call z.clone() first)"
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
        self.known: list[tuple[Tensor, int, Tensor]] = []  # tensor, version, copy
        for leaf in (z, *leaves_of(args)):
            if isinstance(leaf, Tensor) and not _expanded(leaf):
                self.known.append((leaf, version_of(leaf), leaf.detach().clone()))

    def restore(self) -> bool:
        """Give overwritten tensors their numbers back; True where there were any.

        On the CPU the numbers themselves are compared: ``z.data``, ``z.numpy()`` and tensors of
        inference mode count no changes. Elsewhere the host would have to wait for the answer.
        """
        changed = False
        for leaf, version, copy in self.known:
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
    if 0 not in tensor.stride():
        return False
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


RANDOM = (
    "f returns different values at the same point (dropout, RReLU or noise?), so it has no fixed point: "
    "call eval(), or draw the random numbers once before the solve"
)


class Draws:
    """The states of torch's random generators at one moment."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.states = device, _random_state(device)

    def any(self) -> bool:
        """Whether random numbers have been drawn since."""
        (own, *others), (now, *others_now) = self.states, _random_state(self.device)
        return not torch.equal(own, now) or others != others_now


@torch.no_grad()
def refuse_random(evaluate: Callable[[Tensor], Point], first: Point) -> None:
    """Raise ValueError where f or the energy gives another answer at the point of ``first``.

    For functions that have drawn random numbers; it is harmless where a seed is set first, or the
    numbers are not used.
    """
    if _differ(first, evaluate(first.z.detach())):
        raise ValueError(RANDOM)


def _differ(first: Point, second: Point) -> bool:
    same = same_numbers(first.residual, second.residual)
    return not (same and same_numbers(first.energy, second.energy))


def same_numbers(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether all numbers are equal, NaN to NaN."""
    if first is None or second is None:
        return first is second
    return torch.equal(first.detach().nan_to_num(), second.detach().nan_to_num())


def refuse_drawing_modules(modules: Iterable[tuple[str, nn.Module]], name: str) -> None:
    """Raise ValueError for named modules in training mode that draw random numbers when they are called."""
    for path, part in modules:
        if part.training and draws(part):
            raise ValueError(
                f"{name} contains {part} ({path!r}) in training mode, which changes the map at every "
                "evaluation; call eval() on it, or apply it to the layer's input or output"
            )


def draws(module: nn.Module) -> bool:
    """Return whether the module draws random numbers in training mode."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    if isinstance(module, nn.RReLU):
        return module.lower != module.upper
    return False


def _random_state(device: torch.device) -> list[Any]:
    """States of torch's own generators, known to the host."""
    states: list[Any] = [torch.default_generator.get_state()]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        generator = torch.cuda.default_generators[device.index or 0]
        states += [generator.initial_seed(), generator.get_offset()]
    return states


class NormWitness:
    """A context that raises ValueError if a norm in training mode couples samples or learns from them.

    The running statistics of a norm are compared before and after, and restored. A batch norm without running
    statistics is watched by a hook.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = [m for m in modules if isinstance(m, _NormBase) and _by_batch(m)]
        self.known: list[dict[str, Tensor]] = []
        self.hooks: list[RemovableHandle] = []
        self.called: list[nn.Module] = []

    def __enter__(self) -> None:
        for module in self.modules:
            buffers = module.named_buffers(recurse=False)
            self.known.append({name: b.clone() for name, b in buffers if not is_lazy(b)})
            if isinstance(module, _BatchNorm) and module.running_mean is None:
                self.hooks.append(
                    module.register_forward_pre_hook(lambda m, _: self.called.append(m))
                )

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()
        for module, before in zip(self.modules, self.known, strict=True):
            now = dict(module.named_buffers(recurse=False))
            if not all(same_numbers(now[name], copy) for name, copy in before.items()):
                self.called.append(module)
                with torch.no_grad():
                    for name, copy in before.items():
                        now[name].copy_(copy)
        if self.called and error[0] is None:
            raise ValueError(
                f"f calls {self.called[0]}, which normalises over the batch or updates its "
                "running statistics at every evaluation: call eval(), or normalise each sample separately "
                "(LayerNorm, GroupNorm)"
            )


def _by_batch(norm: _NormBase) -> bool:
    """Return whether a norm learns from the batch, or always normalises over it."""
    return norm.training or (isinstance(norm, _BatchNorm) and norm.running_mean is None)
