"""What a solve asks of ``f``: a state like its own, the same at every evaluation, for each sample alone.

In this order: what it returns; functions that overwrite their input, draw random numbers, or normalise over
the batch, as the first evaluation shows; and whether the residual that is reported is that of the returned
value. The loop measures residuals along the way, when some samples may have left the batch. Here the
returned value is evaluated once more with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from solvers.core.layout import leaves_of
from solvers.core.rows import Evaluation
from solvers.core.solution import HALF, Solution, Status, Tolerance
from solvers.core.telling import origin_of


def refuse_forward_mode(value: Tensor) -> None:
    """Raise NotImplementedError for a forward-mode tangent, which the solve would drop."""
    active = getattr(forward_ad, "_current_level", -1) >= 0
    if active and forward_ad.unpack_dual(value).tangent is not None:
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


OVERWRITES = (
    "f must not modify {} in place: it must return a new tensor (use z * 0.5 instead of "
    "z.mul_(0.5), ReLU() instead of ReLU(inplace=True), or call z.clone() first)"
)
RANDOM = (
    "f returns different values at the same point (dropout, RReLU or noise?), so it has no fixed point: "
    "call eval(), or draw the random numbers once before the solve"
)


_overlaps = torch._debug_has_internal_overlap  # pyright: ignore[reportPrivateImportUsage]


def version_of(tensor: Tensor) -> int:
    """How often the tensor was changed in place; 0 for one of inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def constant_inputs(z: Tensor, args: tuple[Any, ...]) -> Iterator[None]:
    """Raise ValueError if the first evaluation of f overwrites its inputs, whose numbers are restored.

    On the CPU the numbers themselves are compared: ``z.data``, ``z.numpy()`` and tensors of inference mode
    count no changes. Elsewhere the host would have to wait for the answer.
    """
    known: list[tuple[Tensor, int, Tensor]] = []
    for leaf in (z, *leaves_of(args)):
        # torch itself refuses to write to a tensor whose entries share their memory.
        if isinstance(leaf, Tensor) and _overlaps(leaf) != 1:
            known.append((leaf, 0 if leaf.is_inference() else leaf._version, leaf.detach().clone()))
    overwritten = False
    try:
        yield
    finally:
        for leaf, version, copy in known:
            changed = not leaf.is_inference() and leaf._version != version
            if leaf.is_cpu and leaf.layout == torch.strided and not torch.equal(leaf, copy):
                changed = changed or not same_numbers(leaf, copy)
            if changed:
                overwritten = True
                with torch.inference_mode():
                    leaf.copy_(copy)
    if overwritten:
        raise ValueError(OVERWRITES.format("its inputs"))


def random_state(device: torch.device) -> Any:
    """States of torch's own random generators, known to the host, to be compared with ``==``."""
    state = torch.default_generator.get_state().numpy().tobytes()
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return state
    generator = torch.cuda.default_generators[device.index or 0]
    return state, generator.initial_seed(), generator.get_offset()


@torch.no_grad()
def refuse_random(evaluate: Callable[[Tensor], Evaluation], first: Evaluation) -> None:
    """Raise ValueError where f or the energy gives another answer at the point of ``first``.

    For functions that have drawn random numbers; it is harmless where a seed is set first, or the
    numbers are not used.
    """
    again = evaluate(first.z.detach())
    same = same_numbers(first.residual, again.residual)
    if not (same and same_numbers(first.energy, again.energy)):
        raise ValueError(RANDOM)


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


@contextmanager
def constant_norms(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Raise ValueError if a norm in training mode couples samples or learns from them.

    The running statistics of a norm are compared before and after, and restored. A batch norm without running
    statistics is watched by a hook.
    """
    called: list[nn.Module] = []
    known: list[tuple[_NormBase, dict[str, Tensor]]] = []
    hooks = []
    for module in modules:
        if isinstance(module, _NormBase):
            alone = isinstance(module, _BatchNorm) and module.running_mean is None
            if alone:
                hooks.append(module.register_forward_pre_hook(lambda m, _: called.append(m)))
            if alone or module.training:
                buffers = module.named_buffers(recurse=False)
                known.append((module, {name: b.clone() for name, b in buffers if not is_lazy(b)}))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, before in known:
            now = dict(module.named_buffers(recurse=False))
            if not all(same_numbers(now[name], copy) for name, copy in before.items()):
                called.append(module)
                with torch.no_grad():
                    for name, copy in before.items():
                        now[name].copy_(copy)
    if called:
        raise ValueError(
            f"f calls {called[0]}, which normalises over the batch or updates its "
            "running statistics at every evaluation: call eval(), or normalise each sample separately "
            "(LayerNorm, GroupNorm)"
        )


# Every solve of a function is validated up to this number, and one in so many after that.
ALWAYS, EVERY = 8, 32
# How far the residual may be above the tolerance, and above rounding in units of the precision.
SLACK, ROUNDINGS = 2.0, 32.0
SAME = 0.01  # relative difference of the residuals at the start that shows another function

_COUNTS: WeakKeyDictionary[object, list[int]] = WeakKeyDictionary()
# By the code of functions that are no modules: what the latest of them has captured, and its count.
_LATEST: WeakKeyDictionary[CodeType, tuple[list[Any], list[int]]] = WeakKeyDictionary()


def count_solve(f: object) -> int:
    """Return how many solves of ``f`` there have been before this one.

    A function that is made anew for every call goes on counting, as long as it captures the same modules and
    functions. The tensors and numbers that it captures may differ.
    """
    origin = origin_of(f)
    try:
        if not isinstance(origin, CodeType):
            count = _COUNTS.setdefault(f if origin is None else origin, [0])
        else:
            count = _COUNTS.get(f)
            if count is None:
                captured = [ref(each) for each in _captured(f)]
                known, count = _LATEST.get(origin, (None, [0]))
                if known is None or [r() for r in known] != [r() for r in captured]:
                    count = [0]
                _LATEST[origin] = captured, count
                _COUNTS[f] = count
    except (TypeError, ValueError):  # no weak references, or an empty cell of a closure
        return 0
    count[0] += 1
    return count[0] - 1


def _captured(f: Any) -> list[Any]:
    """Return the callables that a function captures, and the object of a bound method."""
    captured: list[Any] = []
    while isinstance(f, partial):
        captured += [*f.args, *f.keywords.values()]
        f = f.func
    captured += [cell.cell_contents for cell in getattr(f, "__closure__", None) or ()]
    captured += getattr(f, "__defaults__", None) or ()
    own = getattr(f, "__self__", None)
    return [each for each in captured if callable(each)] + ([] if own is None else [own])


def due(number: int, wanted: bool | None) -> bool:
    """Whether to evaluate again after so many solves, unless it is ``wanted`` or not."""
    return (number < ALWAYS or number % EVERY == EVERY - 1) if wanted is None else wanted


def exceeds(
    norm: Tensor, allowed: Tensor | float, reference: Tensor, precision: torch.dtype
) -> Tensor:
    """(B,) bool: residual norms that are above what is ``allowed`` by more than rounding explains."""
    roundings = 2.0 if precision in HALF else ROUNDINGS
    return ~(norm <= SLACK * allowed + roundings * torch.finfo(precision).eps * reference)


def judge_again(
    solution: Solution,
    point: Evaluation,
    tolerance: Tolerance,
    precision: torch.dtype,
    among: Tensor | None = None,
    *,
    converged: bool = False,
) -> None:
    """Put the residuals of ``point``, an evaluation at the returned value, into ``solution``.

    A sample that had converged by the residual that was measured, and has not by this one, becomes
    INCONSISTENT.

    Args:
        among: (B,) bool, samples that ``point`` is about; None: all.
        converged: ``point`` is at the returned value where a sample has converged, and only there.
    """
    norm, reference = point.norm, point.reference
    measured = torch.maximum(tolerance.threshold(reference), solution.residual_norm)
    wrong = exceeds(norm, measured, reference, precision)
    relative = point.relative().clamp_max(torch.finfo(norm.dtype).max)
    known = solution.status == Status.CONVERGED
    # A sample without a finite evaluation keeps its infinite residual.
    finite = point.finite() & (solution.residual < torch.inf)
    if converged:
        finite = finite & known
    if among is not None:
        finite, known = finite & among, known & among
    solution.status = torch.where(wrong & known, int(Status.INCONSISTENT), solution.status)
    for name, new in (("residual", relative), ("residual_norm", norm)):
        old = getattr(solution, name)
        setattr(solution, name, torch.where(finite, new.to(old.dtype), old))


def mark_changed(
    solution: Solution, again: Evaluation, first: Tensor, precision: torch.dtype
) -> None:
    """INCONSISTENT where ``again``, at the start, has another residual than the ``first`` call, (B,)."""
    eps = torch.finfo(precision).eps
    changed = (again.norm - first).abs() > SAME * first + ROUNDINGS * eps * again.reference
    if bool(changed.any()):
        converged = solution.status == Status.CONVERGED
        solution.status = torch.where(converged, int(Status.INCONSISTENT), solution.status)
