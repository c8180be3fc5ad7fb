"""Energies: one number per sample, and the algebra that builds a layer's energy from terms.

To write one, subclass :class:`Energy` and define ``forward(self, z, x, *, mask=None)``, the value (B,), or
``value_and_grad``, value and gradient in closed form, and optionally ``hvp``. Each may leave out ``mask`` and
``x``. Masked tokens must influence nothing: start from ``hide(z, mask)``. ``check_energy`` verifies it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from implicit_attn.energies.checks import check_values
from implicit_attn.energies.custom.signatures import ENERGY_METHODS, complete
from implicit_attn.energies.differentiation import (
    add_trees,
    hessian_product,
    scale_tree,
    value_and_gradient,
)
from implicit_attn.energies.prepared import Prepared, part_of, prepare_each, with_parts
from solvers.core.checks import require_positive

Evaluation = tuple[Tensor, Any]  # the energy (B,) and its gradient, like z


class Energy(nn.Module):
    """A scalar per sample whose stationary points in ``z`` are the layer's output.

    A subclass defines ``forward`` or ``value_and_grad``; the rest is differentiated automatically. A closed
    form of the gradient alone may be defined as ``grad``. Energies can be added, scaled and weighted:

        >>> from implicit_attn.energies import Hopfield, Quadratic
        >>> (Quadratic() + 0.5 * Hopfield(torch.eye(4)))(torch.ones(2, 3, 4)).shape
        torch.Size([2])

    The state ``z`` is a tensor (B, ...), mostly tokens (B, N, d); without closed forms it may also be
    a pytree of such tensors. Samples must not influence each other. :func:`check_energy` verifies it.

    Attributes:
        concave: True where the energy is concave in ``z`` for any weights (then the unit step on
            ``Quadratic() + energy`` never raises that sum); False where it is not, or not known to be.
    """

    concave: bool = False

    def __init_subclass__(cls) -> None:
        complete(cls, ENERGY_METHODS)
        if "value_and_grad" in vars(cls) and "grad" not in vars(cls):
            cls.grad = Energy.grad  # not a parent's, of another energy

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """What the other methods may be given in place of ``x`` during a solve, by default ``x``.

        Called once a solve, for what depends on the input alone; gradients flow through it. An energy
        that overrides it returns a ``Prepared``, and takes both that and ``x`` itself everywhere.
        """
        return x

    def held(self, x: Any) -> Any:
        """What a solve keeps of ``x`` for an energy that prepares nothing, beside others that do."""
        return x

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        """Energy of each sample.

        Args:
            z: state, (B, ...).
            x: the layer's input, held constant, or what ``prepare`` made of it; not all need one.
            mask: (B, N) bool, False at masked tokens; None: no token is masked.

        Returns:
            (B,).
        """
        if type(self).value_and_grad is not Energy.value_and_grad:  # a closed form
            return self.value_and_grad(z, x, mask=mask)[0]
        raise NotImplementedError(f"{type(self).__name__} must define forward(z, x, *, mask)")

    def value_and_grad(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Evaluation:
        """Energy (B,) and its gradient by ``z``; ValueError if ``forward`` returns another shape."""
        if type(self).grad is not Energy.grad:  # a subclass with its own closed form
            return self._checked(z, x, mask), self.grad(z, x, mask=mask)
        return value_and_gradient(self._checked, z, x, mask)

    def grad(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        """Gradient by ``z``, like ``z``; differentiable where gradients are being recorded."""
        return self.value_and_grad(z, x, mask=mask)[1]

    def hvp(self, z: Any, v: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        """Hessian by ``z`` times ``v``, like ``z``."""
        return hessian_product(lambda z, x, mask: self.grad(z, x, mask=mask), z, v, x, mask)

    def select(self, key: Any) -> Select:
        """This energy with ``x[key]`` as its input, for a layer's input that is a dict or a tuple."""
        return Select(self, key)

    def weighted(self, initial: float = 1.0, maximum: float | None = None) -> Weighted:
        """This energy times a learned positive weight, below ``maximum`` where that is given."""
        return Weighted(self, initial, maximum)

    def __add__(self, other: Any) -> Sum:
        return Sum([self, other]) if isinstance(other, Energy) else NotImplemented

    def __radd__(self, other: Any) -> Energy:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # of sum()

    def __sub__(self, other: Any) -> Sum:
        return Sum([self, -other]) if isinstance(other, Energy) else NotImplemented

    def __mul__(self, weight: Any) -> Scaled:
        if isinstance(weight, (int, float, nn.Parameter)) and not isinstance(weight, bool):
            return Scaled(self, weight)
        return NotImplemented

    def __rmul__(self, weight: Any) -> Scaled:
        return self.__mul__(weight)

    def __neg__(self) -> Scaled:
        return Scaled(self, -1.0)

    def _checked(self, z: Any, x: Any, mask: Tensor | None) -> Tensor:
        value = self(z, x, mask=mask)
        check_values(value, pytree.tree_leaves(z)[0].shape[0], self._label())
        return value

    def _label(self) -> str:
        return f"{type(self).__name__}.forward"


class _Multiple(Energy):
    """``factor() * energy``."""

    def __init__(self, energy: Energy) -> None:
        super().__init__()
        self.energy = _check_energy_type(energy)

    @abstractmethod
    def factor(self) -> float | Tensor:
        """A number or a tensor without dimensions."""

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return self.energy.prepare(x, mask=mask)

    def held(self, x: Any) -> Any:
        return self.energy.held(x)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return self.energy._checked(z, x, mask) * self.factor()

    def value_and_grad(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Evaluation:
        value, gradient = self.energy.value_and_grad(z, x, mask=mask)
        factor = self.factor()
        return value * factor, scale_tree(gradient, factor)

    def hvp(self, z: Any, v: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        return scale_tree(self.energy.hvp(z, v, x, mask=mask), self.factor())


class Scaled(_Multiple):
    """An energy times ``weight``: a finite number, or an ``nn.Parameter`` without dimensions."""

    weight: float | nn.Parameter

    def __init__(self, energy: Energy, weight: float | nn.Parameter) -> None:
        super().__init__(energy)
        if isinstance(weight, nn.Parameter):
            if weight.dim() != 0:
                raise ValueError(f"weight must have no dimensions, got shape {tuple(weight.shape)}")
            self.weight = weight
        elif not math.isfinite(weight):
            raise ValueError(f"weight must be finite, got {weight!r}")
        else:
            self.weight = float(weight)
            self.concave = self.weight == 0.0 or (self.weight > 0.0 and energy.concave)

    def factor(self) -> float | Tensor:
        return self.weight

    def extra_repr(self) -> str:
        return "" if isinstance(self.weight, nn.Parameter) else f"weight={self.weight}"


class Weighted(_Multiple):
    """An energy times a learned positive weight, ``log(1 + exp(raw))`` of one parameter ``raw``.

    Args:
        initial: initial weight, > 0 and, where given, < ``maximum``.
        maximum: upper bound of the weight, which is then ``maximum / (1 + exp(-raw))``; it keeps the
            curvature of the term bounded during training.
    """

    def __init__(self, energy: Energy, initial: float = 1.0, maximum: float | None = None) -> None:
        super().__init__(energy)
        initial = require_positive("initial", initial)
        self.maximum = None if maximum is None else require_positive("maximum", maximum)
        if self.maximum is None:
            raw = initial + math.log(-math.expm1(-initial))
        elif initial < self.maximum:
            raw = math.log(initial / (self.maximum - initial))
        else:
            raise ValueError(f"initial must be below maximum={maximum!r}, got {initial!r}")
        self.raw = nn.Parameter(torch.tensor(raw))
        self.concave = energy.concave

    def factor(self) -> Tensor:
        if self.maximum is None:
            return F.softplus(self.raw)
        return self.maximum * torch.sigmoid(self.raw)

    def extra_repr(self) -> str:
        return f"weight={self.factor().item():.4g}, maximum={self.maximum}"


class SummedEnergy(Energy):
    """The sum of the energies that ``summands`` returns, in their order."""

    @abstractmethod
    def summands(self) -> Iterable[Any]:
        """The energies to add, at least one."""

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return prepare_each(self.summands(), x, mask)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        (first, part), *others = with_parts(self.summands(), x)
        value = first._checked(z, part, mask)
        for term, part in others:
            value = value + term._checked(z, part, mask)
        return value

    def value_and_grad(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Evaluation:
        total: Any = None
        value: Any = None
        for index, (term, part) in enumerate(with_parts(self.summands(), x)):
            factor: float | Tensor = 1.0
            if isinstance(term, _Multiple):  # weighted while adding, which saves a pass
                factor, term = term.factor(), term.energy
            number, gradient = term.value_and_grad(z, part, mask=mask)
            value = add_trees(value, number, factor)
            total = add_trees(total, gradient, factor, owned=index > 1)
        return value, total

    def grad(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        total: Any = None
        for index, (term, part) in enumerate(with_parts(self.summands(), x)):
            factor: float | Tensor = 1.0
            if isinstance(term, _Multiple):
                factor, term = term.factor(), term.energy
            gradient = term.grad(z, part, mask=mask)
            total = add_trees(total, gradient, factor, owned=index > 1)
        return total

    def hvp(self, z: Any, v: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        total: Any = None
        for index, (term, part) in enumerate(with_parts(self.summands(), x)):
            total = add_trees(total, term.hvp(z, v, part, mask=mask), 1.0, owned=index > 1)
        return total


class Sum(SummedEnergy):
    """Sum of at least one energy; nested sums are flattened, ``a + b + c`` is one of three terms."""

    def __init__(self, terms: Iterable[Energy]) -> None:
        super().__init__()
        flat: list[Energy] = []
        for term in terms:
            flat.extend(term.terms if isinstance(term, Sum) else [_check_energy_type(term)])
        if not flat:
            raise ValueError("terms must hold at least one energy, got none")
        self.terms: Any = nn.ModuleList(flat)
        self.concave = all(term.concave for term in flat)

    def summands(self) -> Iterable[Any]:
        return self.terms


class Select(Energy):
    """An energy whose input is ``x[key]``, the part of a dict, tuple or list, or of a named tuple."""

    def __init__(self, energy: Energy, key: Any) -> None:
        super().__init__()
        self.energy = _check_energy_type(energy)
        self.key = key
        self.concave = energy.concave

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        part = self._part(x)
        made = self.energy.prepare(part, mask=mask)
        return x if made is part else Prepared(made)

    def held(self, x: Any) -> Any:
        return Prepared(self.energy.held(self._part(x)))

    def _part(self, x: Any) -> Any:
        return x.parts if isinstance(x, Prepared) else part_of(x, self.key)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return self.energy._checked(z, self._part(x), mask)

    def value_and_grad(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Evaluation:
        return self.energy.value_and_grad(z, self._part(x), mask=mask)

    def hvp(self, z: Any, v: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        return self.energy.hvp(z, v, self._part(x), mask=mask)

    def extra_repr(self) -> str:
        return f"key={self.key!r}"


def _check_energy_type(energy: Any) -> Energy:
    if isinstance(energy, Energy):
        return energy
    raise TypeError(f"an Energy is expected (wrap functions in FunctionEnergy), got {energy!r}")
