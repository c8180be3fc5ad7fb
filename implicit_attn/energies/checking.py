"""``check_energy``: verify the properties of an energy that layers and solvers rely on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_attn.energies.energy import Energy, FunctionEnergy
from implicit_attn.energies.tokens import Mask, check_values
from solvers.checking import Finding, UpdateReport
from solvers.core.checks import require_count, require_flag, require_positive
from solvers.core.layout import Layout
from solvers.core.modes import twice_differentiable


class EnergyReport(UpdateReport):
    """The findings of :func:`implicit_attn.energies.check_energy`; ``print(report)`` shows them.

    Attributes:
        name: name of the energy.
        findings: one per check, with ``check``, ``passed``, ``text``, ``error`` and ``warning``.
    """


def check_energy(
    energy: Energy | Callable[..., Tensor],
    z: Any,
    x: Any = None,
    *,
    mask: Mask = None,
    tolerance: float = 1e-7,
    strict: bool = False,
    seed: int = 0,
) -> EnergyReport:
    r"""Check the properties of an energy that layers and solvers rely on, at the state ``z``.

    A deep copy of the energy is evaluated in float64, in its current mode (training or evaluation). The
    checks cover values, first and second derivatives against autograd and central differences, the
    independence of samples and masked tokens, ``prepare``, ``concave`` and dtypes. A warning reports that
    the input enters only through ``|z - x|^2``: the energy is correct, but the layer may learn little.
    Tensors that a plain function closes over are not converted. If the energy raises in float64 because of
    such a tensor, it is evaluated in float32 with tolerances of at least 1e-4, and 1e-2 for central
    differences, which the report states.

    The check covers one state; repeat it for several, including solutions. Checks that need an argument
    that you do not pass are skipped, which the report states.

    Args:
        energy: an :class:`Energy`; or a function or module ``(z)`` or ``(z, x)`` -> (B,), for
            ``FunctionEnergy``.
        z: state (B, ...), or a pytree of such tensors, with at least two different samples.
        x: input of the energy.
        mask: (B, N) bool, with both True and False entries, for the checks of masks. In a pytree it
            applies to the leaves (B, N, ...), as in ``solvers.fixed_point``.
        tolerance: tolerated relative error; for central differences at least 1e-5.
        strict: whether to raise if a check fails.
        seed: seed of the random directions.

    Raises:
        TypeError: if z is not a floating-point tensor or a pytree of them, or the energy cannot be copied.
        ValueError: if an argument is out of range or, with ``strict``, if a check failed, with the report.

    Example:
        >>> class Well(Energy):
        ...     def forward(self, z, x):
        ...         return (0.5 * (z - x) ** 2 + 0.1 * z**4).flatten(1).sum(1)
        >>> report = check_energy(Well(), torch.randn(3, 5, 8), torch.randn(3, 5, 8))
        >>> report.ok, [finding.check for finding in report.warnings]
        (True, ['proximal'])
        >>> print(report)  # doctest: +SKIP
    """
    require_positive("tolerance", tolerance)
    require_flag("strict", strict)
    require_count("seed", seed, low=0)
    energy = energy if isinstance(energy, Energy) else FunctionEnergy(energy)
    layout, first = Layout.of(z, "z", empty=False), pytree.tree_leaves(z)[0]
    if mask is not None:
        layout.mask_vector(mask, first)
    findings: list[Finding] = []
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        probe, title = Probe(energy, z, x, mask, tolerance, seed), energy._title()
        if first.dtype == torch.float32 and not probe.computes():
            other = Probe(energy, z, x, mask, max(tolerance, 1e-4), seed, torch.float32)
            if other.computes():
                probe, title = other, f"{title} (in float32, as it does not compute in float64)"
        for name in CHECKS:
            early = [f.check for f in findings if f.passed is False and f.check in FIRST]
            if early:
                said = f'not checked: "{early[0]}" must pass first'
                findings.append(Finding(name, None, said))
            else:
                findings.append(probe.run(name))
    report = EnergyReport(title, tuple(findings))
    if strict and not report.ok:
        raise ValueError(str(report))
    return report


FLOOR = 1e-3  # smallest norm that relative errors refer to
# Of central differences: the step relative to the size of the state, and the tolerated relative error.
DIFFERENCES = {torch.float64: (1e-5, 1e-5), torch.float32: (1e-2, 1e-2)}
GRADIENTS = ("gradient by value_and_grad", "gradient by grad")
HIDE = "hide(z, mask) of implicit_attn.energies.tokens"


class Verdict(Exception):
    """Ends a check early: as failed, as skipped (None), or as passed with a warning."""

    def __init__(self, text: str, passed: bool | None = False, error: float | None = None) -> None:
        super().__init__(text)
        self.passed, self.error = passed, error


class Probe:
    """A copy of an energy in float64 or float32, its arguments, and two random directions ``u``, ``v``.

    States, gradients and directions are matrices (B, D). ``given`` has the energy, the state and the input
    in their own dtypes.
    """

    def __init__(
        self,
        energy: Energy,
        z: Any,
        x: Any,
        mask: Mask,
        tolerance: float,
        seed: int,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.dtype, (self.step, self.difference_tolerance) = dtype, DIFFERENCES[dtype]
        try:
            self.energy, original = copy.deepcopy(energy).to(dtype), copy.deepcopy(energy)
        except Exception as error:
            wanted = f"{energy._title()} must store tensors as parameters or buffers"
            raise TypeError(f"{wanted}, it could not be copied: {error}") from error
        self.given = original, copied(z), copied(x)
        state = copied(z, dtype)
        self.layout = Layout.of(state, "z")
        self.z, self.x, self.mask = self.layout.vector(state), copied(x, dtype), mask
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(
            2, *self.z.shape, generator=generator, dtype=torch.float64, device="cpu"
        )
        self.u, self.v = drawn.to(self.z)
        self.before = copied(self.tensors())
        self.tolerance, self.worst = tolerance, None

    def computes(self) -> bool:
        """Return whether the energy computes in this dtype."""
        try:
            with torch.no_grad():
                self.value(self.z)
        except Exception:  # user code may raise anything, torch RuntimeError for different dtypes
            return False
        return True

    def run(self, name: str) -> Finding:
        """Return the finding of a check."""
        check, said = CHECKS[name]
        self.worst: float | None = None
        try:
            check(self)
        except Verdict as end:
            text = f"not checked: {end}" if end.passed is None else str(end)
            return Finding(name, end.passed, text, end.error, warning=end.passed is True)
        except Exception as error:  # user code may raise anything, which is reported as the finding
            return Finding(name, False, f"{type(error).__name__} was raised: {error}")
        return Finding(name, True, said, self.worst)

    def compare(self, got: Tensor, expected: Tensor, wrong: str, least: float = 0.0) -> None:
        """Fail with the text ``wrong`` if the relative error exceeds the tolerance and ``least``."""
        error = relative_error(got, expected)
        if not error <= max(least, self.tolerance):
            raise Verdict(wrong, error=error)
        self.worst = max(error, self.worst or 0.0)

    def compare_all(self, got: dict[str, Tensor], expected: dict[str, Tensor], wrong: str) -> None:
        """Compare :meth:`results`; ``wrong`` has a placeholder for the name."""
        for name, result in got.items():
            self.compare(result, expected[name], wrong.format(name))

    def tensors(self) -> dict[str, Any]:
        """Return by name what evaluations must not modify."""
        own = dict(self.energy.named_parameters()) | dict(self.energy.named_buffers())
        return {**own, "z": self.z, "x": self.x, "mask": self.mask}

    def results(self, z: Tensor, x: Any, mask: Mask, record: bool = False) -> dict[str, Tensor]:
        """Return values (B,) and gradients (B, D), each from both methods that compute it."""
        state, matrix = self.layout.tree(z), self.layout.vector
        with torch.set_grad_enabled(record):
            value, gradient = self.energy.value_and_grad(state, x, mask=mask)
            own, grad = self.energy(state, x, mask=mask), self.energy.grad(state, x, mask=mask)
        return {
            "value by value_and_grad": value,
            "value by forward": own,
            "gradient by value_and_grad": matrix(gradient),
            "gradient by grad": matrix(grad),
        }

    def own(self, record: bool = False) -> dict[str, Tensor]:
        """Return the results at the probe's state."""
        return self.results(self.z, self.x, self.mask, record)

    def value(self, z: Tensor) -> Tensor:
        """Return ``forward`` at a state."""
        return self.energy(self.layout.tree(z), self.x, mask=self.mask)

    def grad(self, z: Tensor) -> Tensor:
        """Return ``grad`` at a state."""
        return self.layout.vector(self.energy.grad(self.layout.tree(z), self.x, mask=self.mask))

    def slope(self, *, create_graph: bool = False) -> Tensor:
        """Return autograd's gradient of ``forward``."""
        with torch.enable_grad(), twice_differentiable():
            z = self.z.clone().requires_grad_()
            return derivatives(self.value(z).sum(), [z], create_graph=create_graph)[0]

    def product(self, v: Tensor) -> Tensor:
        """Return the Hessian-vector product with ``v``."""
        z, v = self.layout.tree(self.z), self.layout.tree(v)
        return self.layout.vector(self.energy.hvp(z, v, self.x, mask=self.mask))

    def difference(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the central difference of a function of the state along ``v``."""
        step = self.step * max(1.0, self.z.abs().max().item())
        with torch.no_grad():
            ahead, behind = (function(self.z + h * self.v) for h in (step, -step))
        return (ahead - behind) / (2 * step)

    def needed_mask(self) -> Tensor:
        if self.mask is None:
            raise Verdict("mask is None; pass a mask (B, N) that is False at some tokens", None)
        return self.mask


def derivatives(
    output: Tensor, inputs: Sequence[Tensor], *, create_graph: bool = False
) -> tuple[Tensor, ...]:
    """Return autograd's derivatives, zero for inputs that ``output`` does not depend on."""
    if not output.requires_grad:
        return tuple(torch.zeros_like(t) for t in inputs)
    options: dict[str, Any] = {"create_graph": create_graph, "materialize_grads": True}
    return torch.autograd.grad(output, inputs, **options)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return ``|got - expected| / |expected|``, inf for NaN or another shape."""
    if got.shape != expected.shape:
        return float("inf")
    expected = expected.detach().double()
    error = ((got.detach() - expected).norm() / expected.norm().clamp_min(FLOOR)).item()
    return error if error == error else float("inf")


def copied(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """Return detached copies of the tensors, floating-point ones in ``dtype``."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().to(dtype if leaf.is_floating_point() else None)

    return pytree.tree_map(copy, tree)


# The checks. One that returns has passed.


def check_value(p: Probe) -> None:
    with torch.no_grad():
        value = p.value(p.z)
    check_values(value, len(p.z), "forward")
    if not value.is_floating_point():
        raise Verdict(f"forward must return a floating dtype, got {value.dtype}")
    bad = (~torch.isfinite(value)).nonzero().flatten().tolist()
    if bad:
        raise Verdict(f"the energy of sample {bad[0]} must be finite, got {value[bad[0]].item()}")


def check_deterministic(p: Probe) -> None:
    """Compare two calls bit by bit."""
    first, second = p.own(record=True), p.own(record=True)
    if not all(torch.equal(first[name], second[name]) for name in first):
        raise Verdict(
            "two equal calls differ, so there is no fixed point: use regularization.VariationalDropout for "
            "dropout, and do not change the energy's own state"
        )


def check_inputs(p: Probe) -> None:
    for name, tree in p.tensors().items():
        pairs = zip(pytree.tree_leaves(tree), pytree.tree_leaves(p.before[name]), strict=True)
        if any(isinstance(now, Tensor) and not torch.equal(now, then) for now, then in pairs):
            raise Verdict(f"{name} was changed in place: work on a copy")


def check_samples(p: Probe) -> None:
    """Evaluate the first and the last sample in a batch of copies of itself."""
    batch = len(p.z)
    if batch < 2:
        raise Verdict("z has one sample; pass at least two", None)
    expected = p.own()
    for kept in (0, batch - 1):

        def repeat(leaf: Any, kept: int = kept) -> Any:
            batched = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch
            return leaf[kept : kept + 1].expand_as(leaf).clone() if batched else leaf

        found = p.results(*(pytree.tree_map(repeat, tree) for tree in (p.z, p.x, p.mask)))
        alone, same = ({k: t[kept] for k, t in each.items()} for each in (found, expected))
        wrong = (
            f"the {{}} of sample {kept} depends on the others: do not reduce the first dimension"
        )
        p.compare_all(alone, same, wrong)


def check_slope(p: Probe) -> None:
    """Compare ``<dE/dz, v>`` of each sample by autograd with its central difference."""
    wrong = (
        "autograd's gradient of forward is wrong: forward uses .detach(), .item(), .data or no_grad"
    )
    p.compare((p.slope() * p.v).sum(1), p.difference(p.value), wrong, p.difference_tolerance)


def check_gradient(p: Probe) -> None:
    gradient = p.energy.value_and_grad(p.layout.tree(p.z), p.x, mask=p.mask)[1]
    if pytree.tree_structure(gradient) != p.layout.spec:
        raise Verdict("value_and_grad must return a gradient with the structure of z")
    found, slope = p.own(record=True), p.slope()
    wrong = "value_and_grad and forward return different values: correct or remove one"
    p.compare(found["value by value_and_grad"], found["value by forward"], wrong)
    wrong = "the {} is not that of forward: it has a wrong factor, sign or term, or is inherited"
    for name in GRADIENTS:
        p.compare(found[name], slope, wrong.format(name))


def check_no_grad(p: Probe) -> None:
    """Evaluate as solvers do."""
    results = p.own()
    if any(result.requires_grad for result in results.values()):
        raise Verdict("a result requires grad under torch.no_grad(), so a solve would keep graphs")
    wrong = "the {} changes under torch.no_grad(): compute it the same way in both modes"
    p.compare_all(results, p.own(record=True), wrong)


def check_hessian(p: Probe) -> None:
    wrong = "autograd's derivative of grad is wrong: grad uses .detach(), .item() or no_grad"
    p.compare(p.product(p.v), p.difference(p.grad), wrong, p.difference_tolerance)


def check_second_order(p: Probe) -> None:
    """Compare derivatives of ``<grad, v>`` with those of autograd's gradient."""
    given = [t for t in pytree.tree_leaves(p.x) if isinstance(t, Tensor) and t.is_floating_point()]
    sources = {f"parameter {n}": t for n, t in p.energy.named_parameters() if t.requires_grad}
    sources |= {f"x (tensor {number})": leaf for number, leaf in enumerate(given)}
    if not sources:
        raise Verdict("no parameter requires grad and x is not floating-point", None)
    wanted = [leaf.requires_grad_() for leaf in sources.values()]
    try:
        with torch.enable_grad():
            got = derivatives((p.grad(p.z) * p.v).sum(), wanted)
            expected = derivatives((p.slope(create_graph=True) * p.v).sum(), wanted)
    finally:
        for leaf in given:
            leaf.requires_grad_(False)
    for name, a, b in zip(sources, got, expected, strict=True):
        p.compare(a, b, f"the derivative of grad with respect to {name} is wrong: grad detaches it")


def check_proximal(p: Probe) -> None:
    """Test whether d2E/dz dx is a multiple c of the identity: its product with a random v is then c v."""
    x, state = p.x, p.layout.tree(p.z)
    alike = isinstance(x, Tensor) and isinstance(state, Tensor) and x.shape == state.shape
    if not alike or not x.is_floating_point():
        raise Verdict("x is not a floating-point tensor with the shape of z", None)
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        gradient = p.layout.vector(p.energy.grad(state, x))
        mixed = p.layout.vector(derivatives((gradient * p.v).sum(), [x])[0])
    if not mixed.count_nonzero():
        raise Verdict("the gradient does not depend on x", None)
    factor = ((mixed * p.v).sum() / p.v.square().sum()).item()
    if relative_error(mixed, factor * p.v) <= 1e-5:
        raise Verdict(
            "x enters only through |z - x|^2 or <z, x>, so the layer may learn little; let x enter another "
            "term through a learned weight",
            True,
        )


def check_concave(p: Probe) -> None:
    """Check ``<v, H v> <= 0`` for energies with ``concave = True``."""
    if not p.energy.concave:
        raise Verdict("concave is False", None)
    for v in (p.u, p.v):
        product = p.product(v)
        curvature, size = (product * v).sum().item(), (product.norm() * v.norm()).item()
        if curvature > p.tolerance * max(size, FLOOR):
            raise Verdict(f"concave is True, but a curvature is positive: {curvature:.3g}")


def check_prepare(p: Probe) -> None:
    prepared = p.energy.prepare(p.x, mask=p.mask)
    wrong = "the {} of prepare(x) differs from that of x: accept both in every method"
    p.compare_all(p.results(p.z, prepared, p.mask), p.own(), wrong)


def check_mask_of_ones(p: Probe) -> None:
    found = p.results(p.z, p.x, torch.ones_like(p.needed_mask()))
    wrong = "a mask of ones changes the {}: only tokens where the mask is False are masked"
    p.compare_all(found, p.results(p.z, p.x, None), wrong)


def check_masked_tokens(p: Probe) -> None:
    """Compare results for other content and NaN in masked tokens."""
    mask = p.needed_mask()
    if mask.all():
        raise Verdict("mask is True at every token", None)
    hidden, expected = ~p.layout.mask_vector(mask, p.z), p.own()
    for name in GRADIENTS:
        there = expected[name][hidden]
        if there.count_nonzero():
            largest = there.abs().max().item()
            raise Verdict(
                f"the gradient at a masked token must be 0, got {largest:.3g}: use {HIDE}"
            )
    for filler, said in ((3.0, "the content of"), (float("nan"), "NaN in")):
        found = p.results(p.z.masked_fill(hidden, filler), p.x, mask)
        p.compare_all(found, expected, f"{said} masked tokens changes the {{}}: use {HIDE}")


def check_dtype(p: Probe) -> None:
    """Check the gradient for the copy and for the given ``z``."""
    energy, z, x = p.given
    with torch.no_grad():
        dtype = p.value(p.z).dtype
    if dtype != p.dtype:
        raise Verdict(f"the energy of a {p.dtype} state must be {p.dtype}, got {dtype}")
    for own, state, given in ((p.energy, p.layout.tree(p.z), p.x), (energy, z, x)):
        dtypes = {str(t.dtype) for t in [*pytree.tree_leaves(state), *own.parameters()]}
        if len(dtypes) > 1:
            raise Verdict(f"z and the parameters have different dtypes, {sorted(dtypes)}", None)
        with torch.no_grad():
            leaves = pytree.tree_leaves(own.grad(state, given, mask=p.mask))
        for leaf, like in zip(leaves, pytree.tree_leaves(state), strict=True):
            got, wanted = ((*t.shape, t.dtype, t.device) for t in (leaf, like))
            if got != wanted:
                raise Verdict(f"the gradient must be like z, {wanted}, got {got}")


# Name -> check and its text if it passes.
CHECKS: dict[str, tuple[Callable[[Probe], None], str]] = {
    "value": (check_value, "one finite number for each sample"),
    "deterministic": (check_deterministic, "two calls are equal"),
    "inputs": (check_inputs, "nothing is changed in place"),
    "samples": (check_samples, "no sample influences another"),
    "slope": (check_slope, "autograd's gradient of forward matches finite differences"),
    "gradient": (check_gradient, "grad and value_and_grad agree with forward"),
    "no_grad": (check_no_grad, "the same under torch.no_grad()"),
    "hessian": (check_hessian, "the derivative of grad matches finite differences"),
    "second order": (check_second_order, "grad is differentiable in parameters and input"),
    "proximal": (check_proximal, "x enters through more than |z - x|^2"),
    "concave": (check_concave, "no positive curvature along two random directions"),
    "prepare": (check_prepare, "prepare(x) gives the same results as x"),
    "mask of ones": (check_mask_of_ones, "a mask of ones changes nothing"),
    "masked tokens": (check_masked_tokens, "masked tokens have no influence"),
    "dtype": (check_dtype, "the gradient has the dtype and device of z"),
}
FIRST = ("value", "deterministic")  # the other checks depend on these
