"""The modes of torch during a solve: autocast, gradients, inference, compilation, export and transforms."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch  # type: ignore[attr-defined]
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from solvers.core.layout import leaves_of

Function = TypeVar("Function", bound=Callable[..., Any])


def eager(function: Function) -> Function:
    """``torch.compiler.disable`` that keeps the function and does not import the compiler.

    A solver loop branches on values at every step, where a compiler would break its graph anyway.
    """
    frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    # A compiler neither follows a call of the function nor compiles what runs within.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def compiles_backward() -> bool:
    """Whether torch compiles backward passes (compiled autograd), which it takes apart before they run."""
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.compiled_autograd_enabled


def require_numbers(*trees: Any) -> None:
    """Raise RuntimeError where tensors do not show their numbers, by which a solve decides when to stop.

    These are the tensors of exporters and of ``torch.func``, fake tensors and those on the device "meta".
    """
    reason = ""
    if torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None:
        reason = "torch.export and torch.jit.trace do not support"
    elif in_transform():
        reason = "transforms of torch.func do not support"
    elif lacks_numbers(trees):
        reason = "meta and fake tensors do not support"
    if reason:
        raise RuntimeError(
            f"a fixed-point solve decides by numbers when to stop, which {reason}: use a fixed number of "
            "evaluations, layer.unrolled(k) of a DEQ or a loop of evaluations of f"
        )


def lacks_numbers(tree: Any) -> bool:
    """Return whether a tensor is fake or on "meta"."""
    fake: Any = sys.modules.get("torch._subclasses.fake_tensor")
    for leaf in leaves_of(tree):
        if isinstance(leaf, Tensor) and (leaf.is_meta or (fake and fake.is_fake(leaf))):
            return True
    return False


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` is at work, whose tensors do not show their numbers."""
    return _functorch.peek_interpreter_stack() is not None


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of the surrounding autocast; None where it is off."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast off; free where it is off already."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def outside_inference() -> AbstractContextManager[object]:
    """Inference mode off; free where it is off already."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def recording() -> Iterator[None]:
    """Gradients on, also under ``no_grad`` and ``inference_mode``."""
    with outside_inference(), torch.enable_grad():
        yield


class _Shared:
    """A context for a setting that torch keeps for the whole process, and that threads may share.

    The first thread that enters makes it, and the last one that leaves takes it back.
    """

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        self.setting, self.lock, self.entered, self.made = setting, threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if self.entered == 0:
                self.made.enter_context(self.setting())
            self.entered += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.entered -= 1
            if self.entered == 0:
                self.made.close()


# Within, functions compiled by ``torch.compile`` run as they were before compilation. A compiled function
# that another thread calls meanwhile is slower, not wrong.
UNCOMPILED = _Shared(lambda: torch.compiler.set_stance("force_eager"))
# Within, attention is computed by torch's plain formula, which can be differentiated twice.
PLAIN_ATTENTION = _Shared(lambda: sdpa_kernel(SDPBackend.MATH))


def uncompiled() -> AbstractContextManager[None]:
    """:data:`UNCOMPILED`; nothing where the compiler is at work, or nobody has imported it."""
    idle = "torch._dynamo" not in sys.modules  # the import would take seconds
    return nullcontext() if idle or torch.compiler.is_compiling() else UNCOMPILED


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Within, attention is computed by torch's plain formula, and compiled functions run uncompiled."""
    with uncompiled(), PLAIN_ATTENTION, _FusedLayout():
        yield


class _FusedLayout(TorchFunctionMode):
    """Within, attention returns the memory layout of torch's fused kernels, whichever formula computes it.

    The fused kernels return (B, H, N, p) with the strides of (B, N, H, p), so a function may take a view of
    the transposed result, which the plain formula would not allow.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not scaled_dot_product_attention or result.dim() < 4:
            return result
        return result.transpose(-3, -2).contiguous().transpose(-3, -2)


def ordinary(tree: Any) -> Any:
    """The pytree with copies of its inference tensors, which no backward pass could save."""
    return pytree.tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() else t, tree)
