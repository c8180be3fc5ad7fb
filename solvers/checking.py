"""``check_update``: verify the properties of a map that a fixed-point solve relies on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from solvers.adjoint import module_of
from solvers.core.checks import require_callable, require_flag
from solvers.core.layout import Layout, check_args, check_like, leaves_of, take


class Finding(NamedTuple):
    """One check: whether it passed (None if it was skipped), an explanation and the relative error.

    A check with a ``warning`` has passed, but the layer may learn little.
    """

    check: str
    passed: bool | None
    text: str
    error: float | None = None
    warning: bool = False

    def __str__(self) -> str:
        mark = "warn" if self.warning else {True: "ok", False: "FAIL", None: "-"}[self.passed]
        size = "" if self.error is None else f" (relative error {self.error:.1e})"
        return f"{mark:<5}{self.check:<14}{self.text}{size}"


@dataclass(frozen=True)
class UpdateReport:
    """The findings of :func:`check_update`; ``print(report)`` shows them.

    Attributes:
        name: name of what was examined.
        findings: one per check, with ``check``, ``passed``, ``text``, ``error`` and ``warning``.
    """

    name: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed; skipped checks do not count."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Findings of failed checks."""
        return tuple(finding for finding in self.findings if finding.passed is False)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings of passed checks with a warning."""
        return tuple(finding for finding in self.findings if finding.warning)

    def __str__(self) -> str:
        done = sum(finding.passed is not None for finding in self.findings)
        head = f"{self.name}: {done - len(self.failures)} of {done} checks passed"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])


@torch.no_grad()
def check_update(f: Callable[..., Any], z: Any, *args: Any, strict: bool = False) -> UpdateReport:
    """Check the properties of ``f(z, *args)`` that :func:`solvers.fixed_point` relies on, at the state ``z``.

    The checks are: f returns finite numbers like z; it does not change its inputs in place; it draws no
    random numbers; it has no batch norm in training mode; it returns the same at every call; and no row
    influences another. A solve detects only some of these by itself: samples become INCONSISTENT, or do not
    converge. The state of torch's random generators and the buffers of a module f are restored.

    Args:
        f: the map of :func:`solvers.fixed_point`, or the ``update`` of a layer. It is called about ten times.
        z: state, a tensor (B, ...) or a pytree of them, for example the value of a solve, with at least two
            samples that differ.
        args: further inputs of ``f``, batched along dim 0.
        strict: whether to raise if a check fails.

    Raises:
        TypeError, ValueError: for arguments that do not fit; with ``strict``, ValueError with the report if a
            check failed.

    Example:
        >>> import torch, solvers
        >>> z = torch.randn(4, 3)
        >>> report = solvers.check_update(lambda z: 0.5 * z + z.mean(0), z)
        >>> report.ok, [finding.check for finding in report.failures]
        (False, ['rows'])
    """
    require_callable("f", f)
    require_flag("strict", strict)
    layout, first = Layout.of(z, "z", empty=False), leaves_of(z)[0]
    check_args(args, len(first), first.device, "z", "f")
    probe = _Probe(f, layout, z, args)
    devices = [first.device.index or 0] if first.device.type == "cuda" else []
    findings: list[Finding] = []
    with torch.random.fork_rng(devices=devices):
        for name, check in _CHECKS.items():
            early = [
                each.check for each in findings if each.passed is False and each.check in _FIRST
            ]
            if early:
                text = f'not checked: "{early[0]}" must pass first'
                findings.append(Finding(name, None, text))
                continue
            try:
                passed, text = check(probe)
            except Exception as error:  # user code may raise anything, which is reported
                passed, text = False, f"{type(error).__name__} was raised: {error}"
            findings.append(Finding(name, passed, text))
            probe.restore()
    report = UpdateReport(getattr(f, "__name__", type(f).__name__), tuple(findings))
    if strict and not report.ok:
        raise ValueError(str(report))
    return report


class _Probe:
    """A map with copies of its inputs and buffers."""

    def __init__(
        self, f: Callable[..., Any], layout: Layout, z: Any, args: tuple[Any, ...]
    ) -> None:
        self.f, self.layout, self.z, self.args = f, layout, _copied(z), _copied(args)
        self.module = module_of(f)
        self.buffers = {} if self.module is None else dict(self.module.named_buffers())
        self.before = {name: buffer.detach().clone() for name, buffer in self.buffers.items()}

    def value(self, z: Any = None, args: Any = None) -> Tensor:
        """Return ``f`` (B, D) at copies of the inputs."""
        given = _copied(self.z if z is None else z), _copied(self.args if args is None else args)
        return self.layout.vector(self.f(given[0], *given[1])).detach()

    def restore(self) -> None:
        for name, buffer in self.buffers.items():
            buffer.detach().copy_(self.before[name])

    @property
    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return () if self.module is None else self.module.named_modules()


def _copied(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), tree)


def _check_value(p: _Probe) -> tuple[bool, str]:
    z, args = _copied(p.z), _copied(p.args)
    output = p.f(z, *args)
    check_like(p.layout.ordered(output), z, "f(z)", "z")
    bad = (~p.layout.vector(output).isfinite()).any(1).nonzero().flatten().tolist()
    if bad:
        return False, f"f(z) must be finite, got NaN or infinity in samples {bad[:10]}"
    return True, "f(z) is finite and like z"


def _check_inputs(p: _Probe) -> tuple[bool, str]:
    given = _copied(p.z), *_copied(p.args)
    p.f(*given)
    names = ("z", *(f"args[{n}]" for n in range(len(p.args))))
    for name, now, then in zip(names, given, (p.z, *p.args), strict=True):
        pairs = zip(leaves_of(now), leaves_of(then), strict=True)
        if not all(_same(a, b) for a, b in pairs if isinstance(a, Tensor)):
            return False, f"f changes {name} in place: return a new tensor"
    return True, "nothing is changed in place"


def _check_random(p: _Probe) -> tuple[bool, str]:
    drawing = [f"{part} ({path!r})" for path, part in p.modules if part.training and draws(part)]
    if drawing:
        return False, f"{drawing[0]} draws random numbers in training mode: {_ONCE}"
    before = torch.random.get_rng_state(), p.value()
    moved = not torch.equal(before[0], torch.random.get_rng_state())
    if moved and not _same(before[1], p.value()):
        return False, f"f draws random numbers: {_ONCE}"
    return True, "no random numbers change f(z)"


def _check_norms(p: _Probe) -> tuple[bool, str]:
    messages = batch_norms(p.modules)
    return not messages, messages[0] if messages else "no batch norm in training mode"


def _check_calls(p: _Probe) -> tuple[bool, str]:
    """Compare calls at z before and after calls elsewhere."""
    first = p.value()
    for scale in (0.5, 1.0, 1.5):
        p.value(pytree.tree_map(lambda t, s=scale: s * t, p.z))
        if not _same(first, p.value()):
            return False, (
                "f(z) changes between calls: it must not change its own state, such as a counter or the "
                "power iteration of spectral_norm (torch.nn.utils.parametrize.cached() reads a weight once)"
            )
    return True, "f(z) is the same at every call"


def _check_rows(p: _Probe) -> tuple[bool | None, str]:
    """Evaluate each of the first and the last sample in a batch of copies of itself."""
    batch = len(leaves_of(p.z)[0])
    if batch < 2:
        return None, "not checked: z has one sample; pass at least two"
    together = p.value()
    scale = together.norm(dim=1).clamp_min(torch.finfo(together.dtype).tiny)
    for row in (0, batch - 1):
        index = torch.full((batch,), row, device=together.device)
        alone = p.value(take(p.z, index, batch), take(p.args, index, batch))
        error = float((alone[row] - together[row]).norm() / scale[row])
        if not error <= torch.finfo(together.dtype).eps ** 0.5:
            return False, (
                f"row {row} depends on the others (relative change {error:.1e}): rows that influence each "
                "other are one sample, pass z[None]; batched tensors must be passed in args"
            )
    return True, "no row influences another"


_ONCE = "call eval(), use implicit_attn.regularization.VariationalDropout, or draw them before the solve"
_CHECKS: dict[str, Callable[[_Probe], tuple[bool | None, str]]] = {
    "value": _check_value,
    "inputs": _check_inputs,
    "batch norm": _check_norms,
    "random": _check_random,
    "calls": _check_calls,
    "rows": _check_rows,
}
_FIRST = ("value", "random", "calls")  # what the following checks rely on


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether all numbers are equal, NaN to NaN."""
    return torch.equal(first.nan_to_num(), second.nan_to_num())


_DRAWING = (_DropoutNd, nn.MultiheadAttention, nn.RNNBase, nn.RReLU)


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


def batch_norms(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Return a message about each of the named modules that normalises over the batch."""
    return [
        f"{type(part).__name__} ({path!r}) normalises over the batch, so samples influence each other: "
        "call eval() on it, or normalise each sample (LayerNorm, GroupNorm)"
        for path, part in modules
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
    ]


def refuse_drawing_modules(modules: Iterable[tuple[str, nn.Module]], name: str) -> None:
    """Raise ValueError for named modules in training mode that draw random numbers when they are called."""
    for path, part in modules:
        if part.training and isinstance(part, _DRAWING) and draws(part):
            raise ValueError(
                f"{name} contains {part} ({path!r}) in training mode, which changes the map at every "
                "evaluation; call eval() on it, or apply it to the layer's input or output"
            )
