"""Checks of what an energy makes of its inputs: values, samples, masks, prepared inputs, dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_attn.energies.checking.probe import Broken, Probe, Unchecked, relative_error
from implicit_attn.energies.checks import check_values
from implicit_attn.energies.energy import Energy

Outcome = tuple[str, float | None]


def check_value(p: Probe) -> Outcome:
    """(B,), floating and finite."""
    value = p.value()
    try:
        check_values(value, p.batch, "forward")
    except (TypeError, ValueError) as error:
        raise Broken(str(error)) from error
    if not value.is_floating_point():
        raise Broken(f"forward must return a floating dtype, got {value.dtype}")
    bad = (~torch.isfinite(value)).nonzero().flatten().tolist()
    if bad:
        raise Broken(
            f"the energy of sample {bad[0]} is {value[bad[0]].item()}: it must be finite at every state "
            "that a solver may try; look for a logarithm, a root or a division that leaves its domain"
        )
    return f"one finite number for each of {p.batch} samples", None


def check_deterministic(p: Probe) -> Outcome:
    """Two calls, bit by bit."""
    first, second = (
        pytree.tree_leaves((p.value(), p.grad(), p.energy.hvp(p.z, p.v, p.x, mask=p.mask)))
        for _ in range(2)
    )
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise Broken(
            "two calls differ: it draws random numbers or changes its own state, so there is no fixed "
            "point; for dropout take implicit_attn.regularization.VariationalDropout, or call eval()",
            relative_error(first, second),
        )
    return "two calls are equal", None


def check_untouched(p: Probe) -> Outcome:
    """Nothing that the energy was given or keeps has another content after its evaluations."""
    for name, tensor in p.kept().items():
        if not torch.equal(tensor, p.before[name]):
            raise Broken(f"{name} was changed in place: work on a copy")
    return "nothing is changed in place", None


def check_samples(p: Probe) -> Outcome:
    """The first sample and the last, each among copies of itself."""
    if p.batch < 2:
        raise Unchecked("z has one sample; give two or more")
    value, gradient = p.value(), p.grad()
    errors: list[float] = []
    for kept in (0, p.batch - 1):

        def repeat(leaf: Any, kept: int = kept) -> Any:
            batched = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == p.batch
            return leaf[kept : kept + 1].expand_as(leaf).clone() if batched else leaf

        z, x, mask = (pytree.tree_map(repeat, tree) for tree in (p.z, p.x, p.mask))
        other = p.energy(z, x, mask=mask)
        other_gradient = pytree.tree_leaves(p.energy.grad(z, x, mask=mask))
        wrong = (
            "the {} of sample {} is another when the other samples are: sum, normalise and compare "
            "within a sample, over every dimension but the first"
        )
        errors += [
            p.compare(other[kept], value[kept], wrong.format("energy", kept)),
            p.compare(
                [t[kept] for t in other_gradient],
                [t[kept] for t in gradient],
                wrong.format("gradient", kept),
            ),
        ]
    return "no sample influences another", max(errors)


def check_prepared(p: Probe) -> Outcome:
    """What ``prepare`` made, in place of the input."""
    prepared = p.energy.prepare(p.x, mask=p.mask)
    if prepared is p.x:
        return "prepares nothing", None
    wrong = "with prepare(x) in place of x {} is another: take both in every method"
    errors = [
        p.compare(results(p.energy, p.z, p.v, prepared, p.mask)[name], expected, wrong.format(name))
        for name, expected in results(p.energy, p.z, p.v, p.x, p.mask).items()
    ]
    return "prepare(x) in place of x gives the same", max(errors)


def check_mask_of_ones(p: Probe) -> Outcome:
    """A mask that hides nothing."""
    mask = _mask(p)
    found = results(p.energy, p.z, p.v, p.x, torch.ones_like(mask))
    wrong = "with a mask of ones {} is another than without a mask: a mask may hide tokens, no more"
    errors = [
        p.compare(found[name], expected, wrong.format(name))
        for name, expected in results(p.energy, p.z, p.v, p.x, None).items()
    ]
    return "a mask of ones is no mask", max(errors)


def check_masked_tokens(p: Probe) -> Outcome:
    """Other content and NaN in masked tokens; nothing comes from them."""
    mask = _mask(p)
    if mask.all():
        raise Unchecked("the mask hides no token")
    expected = results(p.energy, p.z, p.v, p.x, mask)
    for name in ("gradient", "product"):
        for number, leaf in enumerate(pytree.tree_leaves(expected[name])):  # of one result or two
            there = leaf[p.hidden[number % len(p.hidden)]]
            if there.count_nonzero():
                size = there.abs().max().item()
                raise Broken(
                    f"the {name} at a masked token is {size:.3g}: it must be 0 there; start "
                    "from hide(z, mask) of implicit_attn.energies.tokens, or end with hide(gradient, mask)"
                )
    for filler, said in ((3.0, "the content of"), (float("nan"), "NaN in")):
        pairs = zip(pytree.tree_leaves(p.z), p.hidden, strict=True)
        filled = p.like([leaf.masked_fill(hidden, filler) for leaf, hidden in pairs])
        found = results(p.energy, filled, p.v, p.x, mask)
        for name, reference in expected.items():
            p.compare(
                found[name],
                reference,
                f"{said} masked tokens changes the {name}: start from hide(z, mask) of "
                "implicit_attn.energies.tokens, which puts zeros there, and leave masked tokens out of "
                "sums and softmaxes",
            )
    return "masked tokens influence nothing", None


def check_dtype(p: Probe) -> Outcome:
    """Of what is computed from ``z`` as it was given, and of the copy in float64."""
    if p.value().dtype != torch.float64:
        raise Broken(
            f"in float64 the energy is of {p.value().dtype}: a tensor that is made inside, or a cast, "
            "has a dtype of its own; make it like z (z.new_zeros, dtype=z.dtype)"
        )
    _like_z("in float64", p.energy, p.z, p.x, p.mask)
    dtypes = {t.dtype for t in pytree.tree_leaves(p.given)} | {
        t.dtype for t in p.original.parameters()
    }
    if len(dtypes) > 1:
        raise Unchecked(f"z and the parameters are of different dtypes, {sorted(map(str, dtypes))}")
    _like_z("as given", p.original, p.given, p.given_x, p.mask)
    return f"gradient and product are like z, in {dtypes.pop()} and float64", None


def _like_z(when: str, energy: Energy, z: Any, x: Any, mask: Tensor | None) -> None:
    with torch.no_grad():
        value, gradient = energy.value_and_grad(z, x, mask=mask)
        product = energy.hvp(z, gradient, x, mask=mask)
    for name, tree in (("gradient", gradient), ("product", product)):
        for leaf, like in zip(pytree.tree_leaves(tree), pytree.tree_leaves(z), strict=True):
            got, wanted = (leaf.dtype, leaf.device), (like.dtype, like.device)
            if got != wanted:
                raise Broken(f"{when} the {name} is of {got}, and z of {wanted}: return it like z")
    if value.device != pytree.tree_leaves(z)[0].device:
        raise Broken(f"{when} the energy is on {value.device}, and z is not: keep it on z's device")


def results(energy: Energy, z: Any, v: Any, x: Any, mask: Tensor | None) -> dict[str, Any]:
    """Value, gradient and product with ``v``, without a graph."""
    with torch.no_grad():
        value, gradient = energy.value_and_grad(z, x, mask=mask)
        alone = energy(z, x, mask=mask)
        return {
            "value": (value, alone),
            "gradient": (gradient, energy.grad(z, x, mask=mask)),
            "product": energy.hvp(z, v, x, mask=mask),
        }


def _mask(p: Probe) -> Tensor:
    if p.mask is None:
        raise Unchecked("no mask was given; give mask=(B, N), False at some tokens")
    return p.mask
