"""Checks of an energy's derivatives: gradient, Hessian, and derivatives by parameters and input."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_attn.energies.checking.probe import (
    DIFFERENCE,
    Broken,
    Probe,
    Unchecked,
    derivatives,
    inner,
)

Outcome = tuple[str, float | None]


def check_slope(p: Probe) -> Outcome:
    """``<dE/dz, v>`` by autograd, beside ``(E(z + hv) - E(z - hv)) / 2h``, of all samples together."""
    along = inner(p.slope(p.fresh()), p.v)
    h = p.step
    expected = (p.value(p.moved(p.v, h)) - p.value(p.moved(p.v, -h))).sum() / (2 * h)
    error = p.compare(
        along,
        expected,
        "autograd's gradient of forward is not its slope: something in forward is cut from the graph "
        "(.detach(), .item(), .data, no_grad) or has a wrong backward; mend that operation",
        max(DIFFERENCE, p.tolerance),
    )
    return "autograd's gradient of forward is its slope", error


def check_gradient(p: Probe) -> Outcome:
    """``grad`` and both parts of ``value_and_grad``."""
    expected, value = p.slope(p.fresh()), p.value()
    both, gradient = p.energy.value_and_grad(p.z, p.x, mask=p.mask)
    if pytree.tree_structure(gradient) != pytree.tree_structure(p.z):
        raise Broken(
            "the gradient of value_and_grad has another structure than z: return it like z"
        )
    errors = [
        p.compare(
            both, value,
            "the value of value_and_grad is not that of forward: define one of them, or mend one",
        ),
        p.compare(
            gradient, expected,
            "the gradient of value_and_grad is not that of forward: a factor, a sign or a term is wrong "
            "in the closed form, or it is a parent's; mend it, or leave it out to be differentiated",
        ),
        p.compare(
            p.grad(), expected,
            "grad is not the gradient of forward: a factor, a sign or a term is wrong in the closed "
            "form; mend it, or leave it out to be differentiated",
        ),
    ]  # fmt: skip
    return "grad and value_and_grad agree with forward", max(errors)


def check_no_grad(p: Probe) -> Outcome:
    """As solvers evaluate it."""
    expected, value = p.grad(), p.value()
    with torch.no_grad():
        both, gradient = p.energy.value_and_grad(p.z, p.x, mask=p.mask)
        alone = p.energy.grad(p.z, p.x, mask=p.mask)
        product = p.energy.hvp(p.z, p.v, p.x, mask=p.mask)
    leaves = [t for t in pytree.tree_leaves((both, gradient, alone, product)) if t.requires_grad]
    if leaves:
        raise Broken(
            "a result requires grad under torch.no_grad(): a solve would keep the graph of every "
            "evaluation; record gradients within torch.enable_grad() only, and detach what is returned"
        )
    wrong = "{} is another under torch.no_grad(): compute it the same way there"
    errors = [
        p.compare(both, value, wrong.format("the value")),
        p.compare(gradient, expected, wrong.format("the gradient of value_and_grad")),
        p.compare(pytree.tree_leaves(alone), expected, wrong.format("grad")),
    ]
    return "the same under torch.no_grad()", max(errors)


def check_hessian(p: Probe) -> Outcome:
    """``hvp`` beside autograd's product and the central difference; ``<u, Hv> = <v, Hu>``."""
    leaves = p.fresh()
    with torch.enable_grad():
        gradient = pytree.tree_leaves(p.energy.grad(p.like(leaves), p.x, mask=p.mask))
        automatic = derivatives(inner(gradient, p.v), leaves)
    h = p.step
    ahead, behind = p.grad(p.moved(p.v, h)), p.grad(p.moved(p.v, -h))
    difference = [(a - b) / (2 * h) for a, b in zip(ahead, behind, strict=True)]
    product, other = (
        [t.detach() for t in pytree.tree_leaves(p.energy.hvp(p.z, v, p.x, mask=p.mask))]
        for v in (p.v, p.u)
    )
    size = max(inner(product, product).item(), inner(other, other).item(), 1e-6) ** 0.5
    size *= max(inner(pytree.tree_leaves(d), d).item() for d in (p.u, p.v)) ** 0.5
    twist = (inner(product, p.u) - inner(other, p.v)).abs().item() / size
    if not twist <= p.tolerance:
        raise Broken(
            "hvp is not symmetric, <u, H v> differs from <v, H u>: a term is missing from it or belongs "
            "to its transpose; mend it, or leave it out to be differentiated",
            twist,
        )
    errors = [
        p.compare(
            automatic, difference,
            "autograd's derivative of grad is not its slope: something in grad is cut from the graph "
            "(.detach(), .item(), no_grad); gradients of a layer would be wrong",
            max(DIFFERENCE, p.tolerance),
        ),
        p.compare(
            product, automatic,
            "hvp is not the derivative of grad times v: mend its closed form, or leave it out to be "
            "differentiated",
        ),
    ]  # fmt: skip
    return "hvp is symmetric and the derivative of grad", max(errors)


def check_second_order(p: Probe) -> Outcome:
    """Derivatives of ``<grad, v>`` by parameters and input, beside those of autograd's gradient."""
    names, wanted = _sources(p)
    if not wanted:
        raise Unchecked("there are no parameters that require grad, and no floating x")
    try:
        with torch.enable_grad():
            gradient = pytree.tree_leaves(p.energy.grad(p.z, p.x, mask=p.mask))
            got = derivatives(inner(gradient, p.v), wanted)
            slope = p.slope(p.fresh(), create_graph=True)
            expected = derivatives(inner(slope, p.v), wanted)
    finally:
        for tensor, name in zip(wanted, names, strict=True):
            if name.startswith("x"):
                tensor.requires_grad_(False)
    errors = [0.0]
    for name, a, b in zip(names, got, expected, strict=True):
        errors.append(
            p.compare(
                a, b,
                f"the derivative of grad by {name} is not that of forward's gradient: grad is cut from "
                f"the graph there, so {name} would be trained wrongly; compute it by differentiable "
                "operations",
            )
        )  # fmt: skip
    return "gradients reach parameters and input through grad", max(errors)


def _sources(p: Probe) -> tuple[list[str], list[Tensor]]:
    """Parameters that are trained, and the floating tensors of the input, which then require grad."""
    found: list[tuple[str, Tensor]] = [
        (f"parameter {n}", t) for n, t in p.energy.named_parameters() if t.requires_grad
    ]
    for number, leaf in enumerate(pytree.tree_leaves(p.x)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            name = "x" if leaf is p.x else f"x (tensor {number})"
            found.append((name, leaf.requires_grad_()))
    return [name for name, _ in found], [tensor for _, tensor in found]


def check_concave(p: Probe) -> Outcome:
    """``<v, H v> <= 0`` for energies that say that they are concave."""
    if not p.energy.concave:
        raise Unchecked("concave is False")
    for v in (p.u, p.v):
        product = pytree.tree_leaves(p.energy.hvp(p.z, v, p.x, mask=p.mask))
        curvature = inner(product, v).item()
        size = (inner(product, product).item() * inner(pytree.tree_leaves(v), v).item()) ** 0.5
        if curvature > p.tolerance * max(size, 1e-3):
            raise Broken(
                "concave is True, and the curvature along a random direction is positive, "
                f"{curvature:.3g}: set concave = False"
            )
    return "no positive curvature along two random directions", None
