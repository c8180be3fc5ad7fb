"""``check_energy``: does an energy keep what layers and solvers rely on?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_attn.energies.checking.derivatives import (
    check_concave,
    check_gradient,
    check_hessian,
    check_no_grad,
    check_second_order,
    check_slope,
)
from implicit_attn.energies.checking.inputs import (
    check_deterministic,
    check_dtype,
    check_mask_of_ones,
    check_masked_tokens,
    check_prepared,
    check_samples,
    check_untouched,
    check_value,
)
from implicit_attn.energies.checking.probe import Broken, Probe, Unchecked, takes_mask
from implicit_attn.energies.checking.report import EnergyReport, Finding
from implicit_attn.energies.checks import check_mask
from implicit_attn.energies.energy import Energy
from implicit_attn.energies.simple import FunctionEnergy
from solvers.core.checks import require_count, require_flag, require_positive

CHECKS: dict[str, Callable[[Probe], tuple[str, float | None]]] = {
    "value": check_value,
    "deterministic": check_deterministic,
    "inputs": check_untouched,
    "samples": check_samples,
    "slope": check_slope,
    "gradient": check_gradient,
    "no_grad": check_no_grad,
    "hessian": check_hessian,
    "second order": check_second_order,
    "concave": check_concave,
    "prepare": check_prepared,
    "mask of ones": check_mask_of_ones,
    "masked tokens": check_masked_tokens,
    "dtype": check_dtype,
}
FIRST = ("value", "deterministic")  # without these the others mean nothing


def check_energy(
    energy: Energy | Callable[..., Tensor],
    z: Any,
    x: Any = None,
    *,
    mask: Tensor | None = None,
    tolerance: float = 1e-7,
    strict: bool = False,
    seed: int = 0,
) -> EnergyReport:
    r"""Whether an energy keeps what layers and solvers rely on, at the state ``z``.

    A deep copy is evaluated in float64, in the mode (training or evaluation) that the energy is in::

        value          (B,), one finite floating number per sample
        deterministic  two calls give the same
        inputs         z, x, parameters and buffers are left as they were
        samples        no sample influences another
        slope          autograd's gradient of forward equals its central difference
        gradient       grad and value_and_grad equal forward and autograd's gradient of it
        no_grad        the same under torch.no_grad(), as in a solve
        hessian        hvp equals autograd's and the central difference of grad, and is symmetric
        second order   the derivatives of grad by parameters and x equal those of autograd's gradient
        concave        no positive curvature along random directions, where ``concave`` is True
        prepare        prepare(x) in place of x gives the same
        mask of ones   is no mask
        masked tokens  no value, gradient or product there, and no influence of what stands in z there, NaN
                       included
        dtype          gradient and product have the dtype and the device of z, before and in float64

    It looks at one state, and at random directions; try a few states, among them those of a solve. What
    depends on an input that was not given is not checked, and the report says so.

    Args:
        energy: an :class:`Energy`; or a function or module ``(z)`` or ``(z, x)`` -> (B,), for
            ``FunctionEnergy``.
        z: state (B, ...), or a pytree of such tensors; two samples or more, different ones.
        x: input, as the energy takes it.
        mask: (B, N) bool, False at masked tokens, with some of each kind, for the checks of masks. In a
            pytree its tokens are those of ``solvers.fixed_point``: the leaves (B, N, ...), others count
            whole.
        tolerance: relative error that passes; of central differences 1e-5 or this, whichever is greater.
        strict: raise if a check fails.
        seed: of the random directions.

    Returns:
        :class:`EnergyReport`: ``ok``, ``failures``, ``findings``; print it.

    Raises:
        TypeError: if z is no floating tensor or pytree of them, or the energy cannot be copied.
        ValueError: for arguments out of range, and with ``strict`` if a check failed, with the report.

    Example:
        >>> class Well(Energy):
        ...     def forward(self, z, x):
        ...         return (0.5 * (z - x) ** 2 + 0.1 * z**4).flatten(1).sum(1)
        >>> report = check_energy(Well(), torch.randn(3, 5, 8), torch.randn(3, 5, 8))
        >>> report.ok
        True
        >>> print(report)  # doctest: +SKIP
    """
    require_positive("tolerance", tolerance)
    require_flag("strict", strict)
    require_count("seed", seed, low=0)
    energy = energy if isinstance(energy, Energy) else FunctionEnergy(energy)
    leaves = pytree.tree_leaves(z)
    if not leaves or not all(
        isinstance(t, Tensor) and t.is_floating_point() and t.dim() for t in leaves
    ):
        raise TypeError(f"z must be a floating tensor (B, ...) or a pytree of them, got {z!r}")
    takes = takes_mask(leaves, mask) if isinstance(mask, Tensor) else []
    tokens = [leaves[number] for number, fits in enumerate(takes) if fits]
    check_mask(mask, (tokens or leaves)[0], "check_energy")
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        probe = Probe(_copy(energy).double(), _copy(energy), z, x, mask, tolerance, seed)
        report = EnergyReport(_name(energy), _findings(probe))
    if strict:
        report.raise_failures()
    return report


def _findings(probe: Probe) -> tuple[Finding, ...]:
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        early = [f.check for f in findings if f.passed is False and f.check in FIRST]
        if early:
            findings.append(Finding(name, None, f'not checked: "{early[0]}" must pass before'))
        else:
            findings.append(_finding(name, check, probe))
    return tuple(findings)


def _finding(
    name: str, check: Callable[[Probe], tuple[str, float | None]], probe: Probe
) -> Finding:
    try:
        text, error = check(probe)
    except Unchecked as reason:
        return Finding(name, None, f"not checked: {reason}")
    except Broken as broken:
        return Finding(name, False, str(broken), broken.error)
    except Exception as error:  # somebody's code, which may raise anything: this is the finding
        return Finding(name, False, f"{type(error).__name__} was raised: {error}")
    return Finding(name, True, text, error)


def _copy(energy: Energy) -> Energy:
    try:
        return copy.deepcopy(energy)
    except Exception as error:
        raise TypeError(
            f"{_name(energy)} could not be copied ({error}); tensors that it keeps must be "
            "parameters or buffers"
        ) from error


def _name(energy: Energy) -> str:
    return energy.call.name if isinstance(energy, FunctionEnergy) else type(energy).__name__
