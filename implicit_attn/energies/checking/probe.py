"""An energy at one state, evaluated in the ways that its checks compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_attn.energies.energy import Energy

FLOOR = 1e-3  # below this norm an error is measured against it, so that 0 may be 1e-12
DIFFERENCE = 1e-5  # relative error that a central difference may have
STEP = 1e-5  # of central differences, times the size of the state


class Unchecked(Exception):
    """Why a check cannot be made."""


class Broken(Exception):
    """What is wrong and what to do about it, with the relative error."""

    def __init__(self, text: str, error: float | None = None) -> None:
        super().__init__(text)
        self.error = error


class Probe:
    """``energy`` in float64 at ``z``, ``x``, ``mask``, with two random directions like ``z``.

    ``original``, ``given`` and ``given_x`` are copies of the energy, the state and the input as they came.
    """

    def __init__(
        self,
        energy: Energy,
        original: Energy,
        z: Any,
        x: Any,
        mask: Any,
        tolerance: float,
        seed: int,
    ) -> None:
        self.energy, self.original = energy, original
        self.given, self.given_x = copied(z), copied(x)
        self.z, self.x = copied(z, torch.float64), copied(x, torch.float64)
        self.mask: Tensor | None = mask
        self.tolerance = tolerance
        generator = torch.Generator().manual_seed(seed)
        self.u, self.v = (
            pytree.tree_map(
                lambda t: torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device),
                self.z,
            )
            for _ in range(2)
        )
        # Where the mask hides a number of the state, for each leaf.
        leaves = pytree.tree_leaves(self.z)
        self.hidden: list[Tensor] = [torch.zeros_like(t, dtype=torch.bool) for t in leaves]
        if self.mask is not None:
            for hidden, takes in zip(self.hidden, takes_mask(leaves, self.mask), strict=True):
                if takes:
                    hidden[~self.mask] = True
        self.before = {name: t.detach().clone() for name, t in self.kept().items()}

    def kept(self) -> dict[str, Tensor]:
        """What no evaluation may change: state, input, mask, parameters and buffers."""
        found = {f"parameter {name}": t for name, t in self.energy.named_parameters()}
        found |= {f"buffer {name}": t for name, t in self.energy.named_buffers()}
        for name, tree in (("z", self.z), ("x", self.x), ("mask", self.mask)):
            leaves = [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]
            for number, leaf in enumerate(leaves):
                found[name if len(leaves) == 1 else f"{name} (tensor {number})"] = leaf
        return found

    @property
    def batch(self) -> int:
        return pytree.tree_leaves(self.z)[0].shape[0]

    def value(self, z: Any = None) -> Tensor:
        """``forward`` at ``z``, by default the probe's, without a graph."""
        with torch.no_grad():
            return self.energy(self.z if z is None else z, self.x, mask=self.mask)

    def grad(self, z: Any = None) -> list[Tensor]:
        """The leaves of ``grad`` at ``z``, without a graph."""
        with torch.enable_grad():
            found = self.energy.grad(self.z if z is None else z, self.x, mask=self.mask)
        return [leaf.detach() for leaf in pytree.tree_leaves(found)]

    def slope(self, leaves: Sequence[Tensor], *, create_graph: bool = False) -> list[Tensor]:
        """Autograd's gradient of ``forward``'s sum by ``leaves`` of the state, which require grad."""
        with torch.enable_grad():
            value = self.energy(self.like(leaves), self.x, mask=self.mask)
            return derivatives(value.sum(), leaves, create_graph=create_graph)

    def like(self, leaves: Sequence[Tensor]) -> Any:
        """``leaves`` as a state."""
        return pytree.tree_unflatten(list(leaves), pytree.tree_structure(self.z))

    def fresh(self) -> list[Tensor]:
        """The state's leaves as new ones that require grad."""
        return [leaf.clone().requires_grad_() for leaf in pytree.tree_leaves(self.z)]

    def moved(self, direction: Any, factor: float) -> Any:
        """``z + factor * direction``."""
        return pytree.tree_map(lambda a, b: a + factor * b, self.z, direction)

    @property
    def step(self) -> float:
        """A step of central differences."""
        return STEP * max(1.0, max(t.abs().max().item() for t in pytree.tree_leaves(self.z)))

    def compare(self, got: Any, expected: Any, wrong: str, tolerance: float | None = None) -> float:
        """The relative error; :class:`Broken` with ``wrong`` if it is too great."""
        error = relative_error(got, expected)
        if not error <= (self.tolerance if tolerance is None else tolerance):
            raise Broken(wrong, error)
        return error


def takes_mask(leaves: Sequence[Tensor], mask: Tensor) -> list[bool]:
    """Which leaves of a state a mask (B, N) is for, as in a solve.

    Those of tokens, (B, N, ...) of three dimensions or more; where there is none, those of shape (B, N).
    """
    fitting = [t.shape[:2] == mask.shape for t in leaves]
    tokens = [fits and t.dim() > 2 for fits, t in zip(fitting, leaves, strict=True)]
    return tokens if any(tokens) else fitting


def derivatives(
    output: Tensor, inputs: Sequence[Tensor], *, create_graph: bool = False
) -> list[Tensor]:
    """Autograd's, zeros where ``output`` does not depend on an input."""
    if not output.requires_grad:
        return [torch.zeros_like(t) for t in inputs]
    return list(
        torch.autograd.grad(output, list(inputs), create_graph=create_graph, materialize_grads=True)
    )


def inner(a: Sequence[Tensor], b: Any) -> Tensor:
    """``<a, b>`` of the leaves, a number."""
    return sum(  # type: ignore[return-value]
        (p * q).sum() for p, q in zip(a, pytree.tree_leaves(b), strict=True)
    )


def relative_error(got: Any, expected: Any) -> float:
    """``|got - expected| / |expected|`` over all leaves; infinite where shapes differ or NaN is."""
    pairs = list(zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    difference = sum((a.double() - b.double()).square().sum().item() for a, b in pairs) ** 0.5
    size = sum(b.double().square().sum().item() for _, b in pairs) ** 0.5
    error = difference / max(size, FLOOR)
    return error if error == error else float("inf")


def copied(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """Tensors copied and cut from any graph, floating ones in ``dtype``; all others as they are."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().to(dtype if leaf.is_floating_point() else None)

    return pytree.tree_map(copy, tree)
