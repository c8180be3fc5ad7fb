"""``check_energy``: verify the properties of an energy that layers and solvers rely on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_attn.energies.energy import Energy, FunctionEnergy
from implicit_attn.energies.tokens import Mask, check_values
from solvers.core.checks import require_count, require_flag, require_positive
from solvers.core.layout import Layout
from solvers.core.modes import twice_differentiable


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
class EnergyReport:
    """The findings of :func:`implicit_attn.energies.check_energy`; ``print(report)`` shows them.

    Attributes:
        name: name of the energy.
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


FLOOR = 1e-3  # smallest norm that relative errors refer to
DIFFERENCE = 1e-5  # tolerated relative error of a central difference
STEP = 1e-5  # step of central differences, relative to the size of the state
HIDE = "hide(z, mask) of implicit_attn.energies.tokens"


class Verdict(Exception):
    """Ends a check early: as failed, as skipped (None), or as passed with a warning."""

    def __init__(self, text: str, passed: bool | None = False, error: float | None = None) -> None:
        super().__init__(text)
        self.passed, self.error = passed, error


class Probe:
    """``energy`` in float64 at ``z``, ``x``, ``mask``, with two random directions ``u``, ``v`` like ``z``.

    ``original``, ``given`` and ``given_x`` are copies of the energy, state and input in their own dtypes.
    """

    def __init__(self, energy: Energy, z: Any, x: Any, mask: Mask, seed: int) -> None:
        self.energy, self.original = _copy(energy).double(), _copy(energy)
        self.given, self.given_x = copied(z), copied(x)
        self.z, self.x, self.mask = copied(z, torch.float64), copied(x, torch.float64), mask
        generator = torch.Generator().manual_seed(seed)

        def drawn(leaf: Tensor) -> Tensor:
            return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device)

        self.u, self.v = (pytree.tree_map(drawn, self.z) for _ in range(2))
        self.leaves: list[Tensor] = pytree.tree_leaves(self.z)
        self.batch: int = self.leaves[0].shape[0]
        self.step = STEP * max(1.0, *(t.abs().max().item() for t in self.leaves))
        self.before = copied(self.kept())

    def kept(self) -> dict[str, Tensor]:
        """Return the tensors that evaluations must not modify."""
        found = {f"parameter {name}": t for name, t in self.energy.named_parameters()}
        found |= {f"buffer {name}": t for name, t in self.energy.named_buffers()}
        for name, tree in (("z", self.z), ("x", self.x), ("mask", self.mask)):
            found |= named_leaves(name, tree)
        return found

    def value(self, z: Any = None) -> Tensor:
        """Return ``forward`` at ``z``, by default the probe's, without a graph."""
        with torch.no_grad():
            return self.energy(self.z if z is None else z, self.x, mask=self.mask)

    def results(
        self, z: Any, x: Any, mask: Mask, record: bool = False
    ) -> dict[str, tuple[Any, Any]]:
        """Return value and gradient, each from both methods that compute it."""
        with torch.set_grad_enabled(record):
            value, gradient = self.energy.value_and_grad(z, x, mask=mask)
            own = self.energy(z, x, mask=mask), self.energy.grad(z, x, mask=mask)
        return {"value": (value, own[0]), "gradient": (gradient, own[1])}

    def own(self, record: bool = False) -> dict[str, tuple[Any, Any]]:
        """Return the results at the probe's state."""
        return self.results(self.z, self.x, self.mask, record)

    def slope(self, *, create_graph: bool = False) -> list[Tensor]:
        """Return autograd's gradient of the summed ``forward`` with respect to the state."""
        with torch.enable_grad():
            leaves = [leaf.clone().requires_grad_() for leaf in self.leaves]
            state = pytree.tree_unflatten(leaves, pytree.tree_structure(self.z))
            with twice_differentiable():
                value = self.energy(state, self.x, mask=self.mask)
            return derivatives(value.sum(), leaves, create_graph=create_graph)

    def difference(self, function: Callable[[Any], Any]) -> list[Tensor]:
        """Return the leaves of ``(f(z + h v) - f(z - h v)) / 2h``."""
        ahead, behind = (
            pytree.tree_leaves(
                function(pytree.tree_map(lambda a, b, h=h: a + h * b, self.z, self.v))
            )
            for h in (self.step, -self.step)
        )
        return [(a - b) / (2 * self.step) for a, b in zip(ahead, behind, strict=True)]

    def needed_mask(self) -> Tensor:
        if self.mask is None:
            raise Verdict("mask is None; pass a mask (B, N) that is False at some tokens", None)
        return self.mask


def named_leaves(name: str, tree: Any) -> dict[str, Tensor]:
    """Return the tensors in ``tree`` by name, numbered if there are several."""
    leaves = [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]
    if len(leaves) == 1:
        return {name: leaves[0]}
    return {f"{name} (tensor {number})": leaf for number, leaf in enumerate(leaves)}


def derivatives(
    output: Tensor, inputs: Sequence[Tensor], *, create_graph: bool = False
) -> list[Tensor]:
    """Return autograd's derivatives, zero for inputs that ``output`` does not depend on."""
    if not output.requires_grad:
        return [torch.zeros_like(t) for t in inputs]
    return list(
        torch.autograd.grad(output, list(inputs), create_graph=create_graph, materialize_grads=True)
    )


def inner(a: Any, b: Any) -> Tensor:
    """Return the inner product ``<a, b>`` over all leaves."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return sum((p * q).sum() for p, q in pairs)  # type: ignore[return-value]


def relative_error(got: Any, expected: Any) -> float:
    """Return ``|got - expected| / |expected|`` over all leaves, inf for NaN or different shapes."""
    pairs = list(zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    difference = sum((a.double() - b.double()).square().sum().item() for a, b in pairs) ** 0.5
    size = sum(b.double().square().sum().item() for _, b in pairs) ** 0.5
    error = difference / max(size, FLOOR)
    return error if error == error else float("inf")


def copied(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """Return detached copies of the tensors, floating-point ones in ``dtype``."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().to(dtype if leaf.is_floating_point() else None)

    return pytree.tree_map(copy, tree)


# A check yields the result, the expected result, a message if they differ, and whether the second is a
# central difference; or it raises a Verdict.
Comparisons = Iterable[tuple[Any, Any, str] | tuple[Any, Any, str, bool]]
Check = Callable[[Probe], Comparisons]
CHECKS: dict[str, tuple[Check, str]] = {}  # name -> check and its text if it passes
FIRST = ("value", "deterministic")  # the other checks depend on these


def check(name: str, said: str) -> Callable[[Check], Check]:
    """Register a function in ``CHECKS``."""

    def enter(function: Check) -> Check:
        CHECKS[name] = function, said
        return function

    return enter


def each(found: dict[str, Any], expected: dict[str, Any], wrong: str) -> list[tuple[Any, Any, str]]:
    """Compare two results of :meth:`Probe.results`; ``wrong`` has a placeholder for the name."""
    return [(found[name], copied(tree), wrong.format(name)) for name, tree in expected.items()]


@check("value", "one finite number for each sample")
def check_value(p: Probe) -> Comparisons:
    value = p.value()
    check_values(value, p.batch, "forward")
    if not value.is_floating_point():
        raise Verdict(f"forward must return a floating dtype, got {value.dtype}")
    bad = (~torch.isfinite(value)).nonzero().flatten().tolist()
    if bad:
        raise Verdict(
            f"the energy of sample {bad[0]} is {value[bad[0]].item()}: it must be finite at every state "
            "that a solver may visit; check logarithms, roots and divisions"
        )
    return ()


@check("deterministic", "two calls are equal")
def check_deterministic(p: Probe) -> Comparisons:
    """Compare two calls bit by bit."""
    first, second = (pytree.tree_leaves(p.own(record=True)) for _ in range(2))
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise Verdict(
            "two equal calls return different values: the energy draws random numbers or changes its own "
            "state, so it has no fixed point; call eval(), or use regularization.VariationalDropout",
            error=relative_error(first, second),
        )
    return ()


@check("inputs", "nothing is changed in place")
def check_untouched(p: Probe) -> Comparisons:
    for name, tensor in p.kept().items():
        if not torch.equal(tensor, p.before[name]):
            raise Verdict(f"{name} was changed in place: work on a copy")
    return ()


@check("samples", "no sample influences another")
def check_samples(p: Probe) -> Comparisons:
    """Evaluate the first and the last sample in a batch of copies of itself."""
    if p.batch < 2:
        raise Verdict("z has one sample; pass at least two", None)
    expected = p.own()
    for kept in (0, p.batch - 1):

        def repeat(leaf: Any, kept: int = kept) -> Any:
            batched = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == p.batch
            return leaf[kept : kept + 1].expand_as(leaf).clone() if batched else leaf

        found = p.results(*(pytree.tree_map(repeat, tree) for tree in (p.z, p.x, p.mask)))
        found, alone = (
            pytree.tree_map(lambda t, kept=kept: t[kept], tree) for tree in (found, expected)
        )
        wrong = (
            f"the {{}} of sample {kept} changes with the other samples: sum and normalise over all "
            "dimensions except the first"
        )
        yield from each(found, alone, wrong)


@check("slope", "autograd's gradient of forward matches finite differences")
def check_slope(p: Probe) -> Comparisons:
    """Compare ``<dE/dz, v>`` by autograd with its central difference, summed over samples."""
    yield (
        inner(p.slope(), p.v),
        p.difference(p.value)[0].sum(),
        "autograd's gradient of forward differs from finite differences: an operation in forward is "
        "detached (.detach(), .item(), .data, no_grad) or has a wrong backward; correct it",
        True,
    )


@check("gradient", "grad and value_and_grad agree with forward")
def check_gradient(p: Probe) -> Comparisons:
    (value, own), gradients = p.own(record=True).values()
    if pytree.tree_structure(gradients[0]) != pytree.tree_structure(p.z):
        raise Verdict("value_and_grad must return a gradient with the structure of z")
    yield value, own, "value_and_grad and forward return different values: correct or remove one"
    names = "the gradient of value_and_grad", "grad"
    for name, found in zip(names, gradients, strict=True):
        yield (
            found,
            p.slope(),
            f"{name} is not the gradient of forward: the closed form has a wrong factor, sign or term, or "
            "is inherited; correct it, or remove it to use autograd",
        )


@check("no_grad", "the same under torch.no_grad()")
def check_no_grad(p: Probe) -> Comparisons:
    """Evaluate as solvers do."""
    results = p.own()
    if any(leaf.requires_grad for leaf in pytree.tree_leaves(results)):
        raise Verdict(
            "a result requires grad under torch.no_grad(), so a solve would keep the graph of every "
            "evaluation; detach the results of torch.enable_grad() blocks"
        )
    wrong = "the {} changes under torch.no_grad(): compute it the same way in both modes"
    return each(results, p.own(record=True), wrong)


@check("hessian", "the derivative of grad matches finite differences")
def check_hessian(p: Probe) -> Comparisons:
    yield (
        p.energy.hvp(p.z, p.v, p.x, mask=p.mask),
        p.difference(lambda z: copied(p.energy.grad(z, p.x, mask=p.mask))),
        "autograd's derivative of grad differs from finite differences: an operation in grad is "
        "detached (.detach(), .item(), no_grad), so gradients of a layer would be wrong",
        True,
    )


@check("second order", "grad is differentiable in parameters and input")
def check_second_order(p: Probe) -> Comparisons:
    """Compare derivatives of ``<grad, v>`` with those of autograd's gradient."""
    sources = {f"parameter {n}": t for n, t in p.energy.named_parameters() if t.requires_grad}
    given = {n: t for n, t in named_leaves("x", p.x).items() if t.is_floating_point()}
    sources |= {name: leaf.requires_grad_() for name, leaf in given.items()}
    if not sources:
        raise Verdict("no parameter requires grad and x is not floating-point", None)
    wanted = list(sources.values())
    try:
        with torch.enable_grad():
            gradient = p.energy.grad(p.z, p.x, mask=p.mask)
            got = derivatives(inner(gradient, p.v), wanted)
            expected = derivatives(inner(p.slope(create_graph=True), p.v), wanted)
    finally:
        for leaf in given.values():
            leaf.requires_grad_(False)
    for name, a, b in zip(sources, got, expected, strict=True):
        yield (
            a,
            b,
            f"the derivative of grad with respect to {name} is wrong: grad is detached from it, so "
            f"training {name} would fail; use differentiable operations",
        )


@check("proximal", "x enters through more than |z - x|^2")
def check_proximal(p: Probe) -> Comparisons:
    """Test whether d2E/dz dx is a multiple c of the identity: its product with a random v is then c v."""
    alike = isinstance(p.x, Tensor) and isinstance(p.z, Tensor) and p.x.shape == p.z.shape
    if not alike or not p.x.is_floating_point():
        raise Verdict("x is not a floating-point tensor with the shape of z", None)
    with torch.enable_grad():
        x = p.x.clone().requires_grad_()
        mixed = derivatives(inner(p.energy.grad(p.z, x), p.v), [x])[0]
    if not mixed.count_nonzero():
        raise Verdict("the gradient does not depend on x", None)
    factor = (inner(mixed, p.v) / inner(p.v, p.v)).item()
    if relative_error(mixed, factor * p.v) <= DIFFERENCE:
        raise Verdict(
            f"d2E/dz dx is {factor:.3g} times the identity: x enters only through |z - x|^2 or <z, x>, so "
            "the layer is a proximal step of its other terms and may learn little; let x enter another "
            "term through a learned weight",
            True,
        )
    return ()


@check("concave", "no positive curvature along two random directions")
def check_concave(p: Probe) -> Comparisons:
    """Check ``<v, H v> <= 0`` for energies with ``concave = True``."""
    if not p.energy.concave:
        raise Verdict("concave is False", None)
    for v in (p.u, p.v):
        product = p.energy.hvp(p.z, v, p.x, mask=p.mask)
        size = (inner(product, product) * inner(v, v)).item() ** 0.5
        curvature = inner(product, v)
        yield (
            1 + curvature.clamp_min(0.0) / max(size, FLOOR),
            torch.ones(()),
            f"concave is True, but the curvature along a random direction is {curvature.item():.3g}, "
            "which is positive: set concave = False",
        )


@check("prepare", "prepare(x) gives the same results as x")
def check_prepared(p: Probe) -> Comparisons:
    prepared = p.energy.prepare(p.x, mask=p.mask)
    if prepared is p.x:
        return ()
    wrong = "the {} of prepare(x) differs from that of x: accept both in every method"
    return each(p.results(p.z, prepared, p.mask), p.own(), wrong)


@check("mask of ones", "a mask of ones changes nothing")
def check_mask_of_ones(p: Probe) -> Comparisons:
    wrong = "a mask of ones changes the {}: only tokens where the mask is False may be ignored"
    found = p.results(p.z, p.x, torch.ones_like(p.needed_mask()))
    return each(found, p.results(p.z, p.x, None), wrong)


@check("masked tokens", "masked tokens have no influence")
def check_masked_tokens(p: Probe) -> Comparisons:
    """Compare results for other content and NaN in masked tokens."""
    mask, layout = p.needed_mask(), Layout.of(p.z)
    if mask.all():
        raise Verdict("mask is True at every token", None)
    hidden, expected = ~layout.mask_vector(mask, layout.vector(p.z)), p.own()
    for gradient in expected["gradient"]:
        there = layout.vector(gradient)[hidden]
        if there.count_nonzero():
            raise Verdict(
                f"the gradient at a masked token is {there.abs().max().item():.3g}, but must be 0: "
                f"begin with {HIDE}, or return hide(gradient, mask)"
            )
    for filler, said in ((3.0, "the content of"), (float("nan"), "NaN in")):
        filled = layout.tree(layout.vector(p.z).masked_fill(hidden, filler))
        wrong = (
            f"{said} masked tokens changes the {{}}: begin with {HIDE}, and exclude masked tokens from "
            "sums and softmaxes"
        )
        yield from each(p.results(filled, p.x, mask), expected, wrong)


@check("dtype", "the gradient has the dtype and device of z")
def check_dtype(p: Probe) -> Comparisons:
    """Check the gradient for the given ``z`` and for the float64 copy."""
    if p.value().dtype != torch.float64:
        raise Verdict(
            f"the energy of a float64 state is {p.value().dtype}: a tensor is created or cast with a fixed "
            "dtype inside; use the dtype of z (z.new_zeros, dtype=z.dtype)"
        )
    kept = {t.dtype for t in [*pytree.tree_leaves(p.given), *p.original.parameters()]}
    for energy, z, x in ((p.energy, p.z, p.x), (p.original, p.given, p.given_x)):
        if energy is p.original and len(kept) > 1:
            dtypes = sorted(map(str, kept))
            raise Verdict(f"z and the parameters have different dtypes, {dtypes}", None)
        with torch.no_grad():
            leaves = pytree.tree_leaves(energy.grad(z, x, mask=p.mask))
        for leaf, like in zip(leaves, pytree.tree_leaves(z), strict=True):
            got, wanted = (leaf.dtype, leaf.device), (like.dtype, like.device)
            if got != wanted:
                raise Verdict(
                    f"the gradient must have the dtype and device of z, {wanted}, got {got}"
                )
    return ()


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
    Tensors that a plain function closes over are not converted.

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
    layout, first = Layout.of(z, "z"), pytree.tree_leaves(z)[0]
    if mask is not None:
        layout.mask_vector(mask, first)
    findings: list[Finding] = []
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        probe = Probe(energy, z, x, mask, seed)
        for name in CHECKS:
            early = [f.check for f in findings if f.passed is False and f.check in FIRST]
            said = f'not checked: "{early[0]}" must pass first' if early else ""
            findings.append(Finding(name, None, said) if early else _made(name, probe, tolerance))
    report = EnergyReport(_name(energy), tuple(findings))
    if strict and not report.ok:
        raise ValueError(str(report))
    return report


def _made(name: str, probe: Probe, tolerance: float) -> Finding:
    """Run a check and return its finding."""
    check, said = CHECKS[name]
    worst: float | None = None
    try:
        for got, expected, wrong, *difference in check(probe):
            error = relative_error(got, expected)
            if not error <= (max(DIFFERENCE, tolerance) if difference else tolerance):
                return Finding(name, False, wrong, error)
            worst = max(error, worst or 0.0)
    except Verdict as end:
        text = f"not checked: {end}" if end.passed is None else str(end)
        return Finding(name, end.passed, text, end.error, warning=end.passed is True)
    except Exception as error:  # user code may raise anything, which is reported as the finding
        return Finding(name, False, f"{type(error).__name__} was raised: {error}")
    return Finding(name, True, said, worst)


def _copy(energy: Energy) -> Energy:
    try:
        return copy.deepcopy(energy)
    except Exception as error:
        raise TypeError(
            f"{_name(energy)} could not be copied ({error}); register the tensors that it stores as "
            "parameters or buffers"
        ) from error


def _name(energy: Energy) -> str:
    return energy.call.name if isinstance(energy, FunctionEnergy) else type(energy).__name__
