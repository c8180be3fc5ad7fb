"""Energies: one number per sample, and the algebra that builds a layer's energy from terms.

To write one, subclass :class:`Energy` and define ``forward(self, z, x, *, mask=None)``, which returns the
value (B,), or ``value_and_grad(self, z, x=None, *, mask=None)``, with the gradient in closed form.
Masked tokens must have no influence: begin with ``hide(z, mask)``. ``check_energy`` verifies this.

The energies of this package are :class:`ClosedForm`: their public methods turn the input into an
:class:`AttentionContext`, check the state, and call ``evaluate``, which a solve repeats.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from implicit_attn.energies.tokens import (
    Mask,
    check_input,
    check_tokens,
    check_values,
    hide,
    sum_samples,
    sum_squares,
)
from implicit_attn.kernels.arguments import Pairs
from solvers.core.checks import require_instance, require_positive
from solvers.core.modes import (
    PLAIN_ATTENTION,
    in_transform,
    ordinary,
    recording,
    twice_differentiable,
)

Evaluation = tuple[Any, Any]  # the energy (B,), or None, and its gradient, like z


class AttentionContext(NamedTuple):
    """Everything that an energy reads during a solve besides the state and its parameters.

    ``Energy.prepare`` makes it once per solve. It replaces the layer's input in all other methods and
    contains the mask. All tensors are (B, ...), and every field may be None.

    Attributes:
        parts: for a sum, a tuple with what each term prepared; otherwise any pytree of tensors.
        start: detached initial state for a solve.
        mask: (B, N) bool, False at masked tokens of the state.
        tokens: (B, N, d), the input itself.
        query: embedded input, added to the features of the state, (B, H, N, p), or (B, ..., rows) without
            heads. For frozen keys, the queries times their inverse temperature.
        key: embedded input, added to the features of the keys, (B, H, N, p); with frozen keys the keys
            (B, H, M, p) themselves.
        value: values (B, H, M, p).
        key_mask: (B, M) bool, mask of frozen keys.
        pairs: allowed pairs of queries and keys, and biases of their scores.
        keyless: (B, 1 or H, N) bool, True at queries without any key; None if all have one.
        log_weights: (B, H, N, M), logarithms of attention weights that do not depend on the state.
        lse: (B, H, N), log-sum-exps of their scores, if the weights are not stored.
        gates: (B, ..., rows), weights of the features.
    """

    parts: Any = None
    start: Tensor | None = None
    mask: Mask = None
    tokens: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    key_mask: Mask = None
    pairs: Pairs = Pairs()
    keyless: Tensor | None = None
    log_weights: Tensor | None = None
    lse: Tensor | None = None
    gates: Tensor | None = None


def is_prepared(x: Any, mask: Mask) -> bool:
    """Return whether ``x`` is a context. ValueError if it was prepared without the mask."""
    if not isinstance(x, AttentionContext):
        return False
    if mask is not None and x.mask is None:
        raise ValueError("mask must also be passed to prepare, which was called without a mask")
    return True


class FunctionCall(NamedTuple):
    """Adapter that calls a function ``(z)`` or ``(z, x)``, with or without ``mask=``, with all three."""

    name: str
    takes_x: bool
    takes_mask: bool
    needs_mask: bool = False  # mask has no default

    @classmethod
    def read(cls, function: Any, name: str = "") -> FunctionCall:
        """Read the signature of a function or of a module's ``forward``."""
        if not callable(function):
            raise TypeError(f"function must be callable, got {function!r}")
        name = name or getattr(function, "__qualname__", type(function).__name__)
        # A module's __call__ accepts any arguments, so forward is inspected.
        module = getattr(function, "_orig_mod", function)  # inside a module of torch.compile
        try:
            signature = inspect.signature(
                module.forward if isinstance(module, nn.Module) else function
            )
        except ValueError as error:
            raise TypeError(f"{name} has no signature; wrap it in a function") from error
        parameters = signature.parameters
        if list(parameters)[:2] == ["x", "z"]:
            raise TypeError(f"{name} must take the state z before the input x, got {signature}")
        for takes_x, takes_mask in ((True, True), (False, True), (True, False), (False, False)):
            try:
                signature.bind(*[None] * (1 + takes_x), **{"mask": None} if takes_mask else {})
            except TypeError:
                continue
            # A keyword-only x would not be passed, except one that functools.partial has bound.
            lost = not takes_x and "x" in parameters and parameters["x"].default is None
            if parameters and not lost and (takes_mask or "mask" not in parameters):
                mask = parameters.get("mask")
                needs = mask is not None and mask.default is inspect.Parameter.empty
                return cls(name, takes_x, takes_mask, needs)
            break
        raise TypeError(
            f"{name} must be callable as f(z) or f(z, x), with an optional keyword argument mask, got "
            f"{name}{signature}"
        )

    @classmethod
    def of_class(cls, module: type[nn.Module]) -> FunctionCall:
        """Read the signature of a class's ``forward``."""
        return cls.read(functools.partial(module.forward, None), f"{module.__name__}.forward")

    def __call__(self, function: Callable[..., Any], z: Any, x: Any, mask: Mask) -> Any:
        arguments = (z, x) if self.takes_x else (z,)
        if mask is None and not self.needs_mask:
            return function(*arguments)
        if not self.takes_mask:
            raise ValueError(
                f"{self.name} takes no mask, so masked tokens would influence it; add a parameter "
                f"mask=None and use it, or pass no mask, got one of shape {tuple(mask.shape)}"  # type: ignore[union-attr]
            )
        return function(*arguments, mask=mask)


class Energy(nn.Module):
    """Base class of energies, scalars per sample whose stationary points in ``z`` are a layer's output.

    A subclass defines ``forward`` or ``value_and_grad``; autograd computes the other derivatives. ``grad``
    may define the gradient in closed form. Energies can be added, scaled and weighted:

        >>> from implicit_attn.energies import Hopfield, Quadratic
        >>> (Quadratic() + 0.5 * Hopfield(torch.eye(4)))(torch.ones(2, 3, 4)).shape
        torch.Size([2])

    The state ``z`` is a tensor (B, ...), typically tokens (B, N, d); without closed forms it may also be
    a pytree of such tensors. Samples must be independent, which :func:`check_energy` verifies.

    Attributes:
        concave: True if the energy is known to be concave in ``z`` for any weights. Then the unit step on
            ``Quadratic() + energy`` never increases that sum.
    """

    # Constant of strong convexity in the state, where it is known: errors of solutions are then bounded.
    modulus: float | Tensor | None = None

    concave: bool = False
    is_replaced: bool = False  # whether ``replace`` has exchanged a part

    _call = FunctionCall("Energy.forward", True, True)  # each subclass has its own

    def __init_subclass__(cls) -> None:
        cls._call = FunctionCall.of_class(cls)
        own = vars(cls)
        if "value_and_grad" in own and "grad" not in own and cls.grad is not Energy.grad:
            raise TypeError(
                f"{cls.__name__} must define grad as well as value_and_grad, because it inherits "
                f"{cls.grad.__qualname__}; grad = Energy.grad derives it from value_and_grad"
            )

    def __call__(self, z: Any, x: Any = None, *, mask: Mask = None) -> Tensor:
        """Return ``forward`` for those of ``x`` and ``mask`` that it accepts."""
        return self._call(super().__call__, z, x, mask)

    def prepare(self, x: Any, *, mask: Mask = None) -> Any:
        """Return the object that replaces ``x`` in the other methods during a solve.

        It is ``x`` itself by default, or an :class:`AttentionContext` with tensors that depend only on the
        input. It is called once per solve, and gradients flow through it. All methods accept both.
        """
        return x

    def forward(self, z: Any, x: Any = None, *, mask: Mask = None) -> Tensor:
        """Return the energy of each sample, (B,), at the state ``z`` (B, ...).

        ``x`` is the layer's input, which is constant, or the result of ``prepare``; ``mask`` (B, N) bool is
        False at masked tokens.
        """
        if type(self).value_and_grad is not Energy.value_and_grad:  # a closed form
            return self.value_and_grad(z, x, mask=mask)[0]
        raise NotImplementedError(f"{type(self).__name__} must define forward(z, x, *, mask)")

    def value_and_grad(self, z: Any, x: Any = None, *, mask: Mask = None) -> Evaluation:
        """Return the energy (B,) and its gradient with respect to ``z``.

        ValueError if ``forward`` returns another shape or does not depend on ``z``.
        """
        if type(self).grad is not Energy.grad:  # a subclass with a closed-form gradient
            return self._checked(z, x, mask), self.grad(z, x, mask=mask)
        return value_and_gradient(self._checked, z, x, mask, named=self._title())

    def grad(self, z: Any, x: Any = None, *, mask: Mask = None) -> Any:
        """Return the gradient with respect to ``z``, which is differentiable if autograd is on."""
        return self.value_and_grad(z, x, mask=mask)[1]

    def hvp(self, z: Any, v: Any, x: Any = None, *, mask: Mask = None) -> Any:
        """Return the Hessian-vector product with ``v``, like ``z``, as the derivative of ``grad``.

        Solves do not call it.
        """
        shapes, expected = (
            [tuple(getattr(t, "shape", ())) for t in pytree.tree_leaves(tree)] for tree in (v, z)
        )
        if shapes != expected:
            raise ValueError(f"v must have the shapes of z, {expected}, got {shapes}")

        def along(z: Any, v: Any, x: Any, mask: Mask) -> Tensor:
            gradient = pytree.tree_leaves(self.grad(z, x, mask=mask))
            pairs = zip(gradient, pytree.tree_leaves(v), strict=True)
            return sum((g * w).sum() for g, w in pairs)  # type: ignore[return-value]

        return value_and_gradient(along, z, v, x, mask)[1]

    def select(self, key: Any) -> Select:
        """Return this energy with ``x[key]`` as its input, for inputs that are dicts or tuples."""
        return Select(self, key)

    def weighted(self, initial: float = 1.0, maximum: float | None = None) -> Weighted:
        """Return this energy times a learned positive weight, which is below ``maximum`` if given."""
        return Weighted(self, initial, maximum)

    def replace(self, old: Energy, new: Energy) -> Any:
        """Return this energy with its part ``old`` replaced by ``new``, sharing all other parts.

        For example, the data term of a trained sum can be replaced by that of another task. Weights
        of the part, such as those of :meth:`weighted`, remain.

        Raises:
            TypeError: if ``new`` is not an energy.
            ValueError: if ``old`` is not a part of this energy.

        Example:
            >>> from implicit_attn.energies import Hopfield, Quadratic
            >>> first, memory = Quadratic(), Hopfield(torch.eye(4))
            >>> (0.5 * first + memory).replace(first, -first).terms[1] is memory
            True
        """
        return replace_part(self, old, new)

    def __add__(self, other: Any) -> Sum:
        return Sum([self, other]) if isinstance(other, Energy) else NotImplemented

    def __radd__(self, other: Any) -> Energy:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # supports sum()

    def __sub__(self, other: Any) -> Sum:
        return Sum([self, -other]) if isinstance(other, Energy) else NotImplemented

    def __mul__(self, weight: Any) -> Scaled:
        if isinstance(weight, (int, float, nn.Parameter)) and not isinstance(weight, bool):
            return Scaled(self, weight)
        return NotImplemented

    __rmul__ = __mul__

    def __neg__(self) -> Scaled:
        return Scaled(self, -1.0)

    def _checked(self, z: Any, x: Any, mask: Mask) -> Tensor:
        value = self(z, x, mask=mask)
        check_values(value, pytree.tree_leaves(z)[0].shape[0], self._title())
        return value

    def _title(self) -> str:
        """Return the name of the energy in messages."""
        return type(self).__name__


class ClosedForm(Energy):
    """Base class of energies that compute the value and the gradient in one method, ``evaluate``.

    A subclass may override neither ``forward`` nor ``grad`` nor ``value_and_grad``, which sums do not call.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("forward", "grad", "value_and_grad"):
            if getattr(cls, name) is not getattr(ClosedForm, name):  # of the class or a mixin
                raise TypeError(f"{cls.__name__} must define evaluate instead of {name}")

    def prepare(self, x: Any, *, mask: Mask = None) -> Any:
        return x if is_prepared(x, mask) else self.read(x, mask)

    def read(self, x: Any, mask: Mask) -> Any:
        """Return what ``prepare`` returns for an input that is not prepared yet."""
        return x

    def forward(self, z: Any, x: Any = None, *, mask: Mask = None) -> Tensor:
        return self._enter(z, x, mask, True)[0]

    def value_and_grad(self, z: Any, x: Any = None, *, mask: Mask = None) -> Evaluation:
        return self._enter(z, x, mask, True)

    def grad(self, z: Any, x: Any = None, *, mask: Mask = None) -> Any:
        return self._enter(z, x, mask, False)[1]

    def check(self, z: Any, x: Any, mask: Mask) -> None:
        """Raise TypeError or ValueError unless the state fits ``x``, the result of ``prepare``."""

    @abstractmethod
    def evaluate(self, z: Any, x: Any, mask: Mask, need_value: bool) -> Evaluation:
        """Return the energy (B,), or None if ``need_value`` is False, and the gradient, like ``z``.

        ``x`` is the result of ``prepare``; the arguments have been checked.
        """

    def _enter(self, z: Any, x: Any, mask: Mask, need_value: bool) -> Evaluation:
        if not is_prepared(x, mask):
            x = self.prepare(x, mask=mask)
        if isinstance(x, AttentionContext):
            mask = x.mask
        self.check(z, x, mask)
        return self.evaluate(z, x, mask, need_value)


class SummedEnergy(ClosedForm):
    """The sum of the energies that ``summands`` returns."""

    @abstractmethod
    def summands(self) -> Iterable[Any]:
        """Return the energies to add, at least one."""

    def read(self, x: Any, mask: Mask) -> Any:
        """Return a context with one part per term, or ``x`` if no term prepares anything."""
        parts = tuple(term.prepare(x, mask=mask) for term in self.summands())
        return x if all(part is x for part in parts) else AttentionContext(parts, mask=mask)

    def _terms(self, x: Any) -> Iterator[tuple[Any, Any]]:
        """Yield each term with what it prepared."""
        terms = tuple(self.summands())
        parts = x.parts if isinstance(x, AttentionContext) else (x,) * len(terms)
        return zip(terms, parts, strict=True)

    def check(self, z: Any, x: Any, mask: Mask) -> None:
        for term, part in self._terms(x):
            if isinstance(term, ClosedForm):  # other energies check the state themselves
                term.check(z, part, mask)

    def evaluate(self, z: Any, x: Any, mask: Mask, need_value: bool) -> Evaluation:
        found = [_evaluate(term, z, part, mask, need_value) for term, part in self._terms(x)]
        values, gradients = zip(*found, strict=True)
        total = functools.reduce(lambda a, b: map_tree(torch.add, a, b), gradients)
        return functools.reduce(torch.add, values) if need_value else None, total


def _evaluate(term: Any, z: Any, x: Any, mask: Mask, need_value: bool) -> Evaluation:
    """Evaluate a term, whose state has been checked, with what it prepared."""
    if isinstance(term, ClosedForm):
        return term.evaluate(z, x, mask, need_value)
    if need_value:
        return term.value_and_grad(z, x, mask=mask)
    return None, term.grad(z, x, mask=mask)


class _Wrapped(SummedEnergy):
    """A sum of one energy."""

    def __init__(self, energy: Energy) -> None:
        super().__init__()
        self.energy = _check_energy_type(energy)
        self.concave = energy.concave

    def summands(self) -> Iterable[Any]:
        return (self.energy,)


class _Multiple(_Wrapped):
    """``factor() * energy``."""

    @abstractmethod
    def factor(self) -> float | Tensor:
        """Return a number or a scalar tensor."""

    def evaluate(self, z: Any, x: Any, mask: Mask, need_value: bool) -> Evaluation:
        (value, gradient), factor = super().evaluate(z, x, mask, need_value), self.factor()
        gradient = map_tree(lambda leaf: leaf * factor, gradient)
        return value * factor if need_value else None, gradient


class Scaled(_Multiple):
    """An energy times ``weight``, a finite number or a scalar ``nn.Parameter``."""

    weight: float | nn.Parameter

    def __init__(self, energy: Energy, weight: float | nn.Parameter) -> None:
        super().__init__(energy)
        self.concave = False
        if isinstance(weight, nn.Parameter):
            if weight.dim() != 0:
                raise ValueError(f"weight must be a scalar tensor, got shape {tuple(weight.shape)}")
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
    """An energy times a learned positive weight ``log(1 + exp(raw))`` with one parameter ``raw``.

    With ``maximum`` the weight is ``maximum / (1 + exp(-raw))``, which bounds the curvature of the term
    during training. ``initial`` is > 0 and below ``maximum``.
    """

    def __init__(self, energy: Energy, initial: float = 1.0, maximum: float | None = None) -> None:
        super().__init__(energy)
        initial = require_positive("initial", initial)
        self.maximum = None if maximum is None else require_positive("maximum", maximum)
        if self.maximum is None:
            raw = inverse_softplus(initial)
        elif initial < self.maximum:
            raw = math.log(initial / (self.maximum - initial))
        else:
            raise ValueError(f"initial must be below maximum={maximum!r}, got {initial!r}")
        self.raw = nn.Parameter(torch.tensor(raw))

    def factor(self) -> Tensor:
        if self.maximum is None:
            return F.softplus(self.raw)
        return self.maximum * torch.sigmoid(self.raw)

    def extra_repr(self) -> str:
        return f"weight={self.factor().item():.4g}, maximum={self.maximum}"


def inverse_softplus(number: float) -> float:
    """Return the ``raw`` with ``log(1 + exp(raw)) = number`` > 0."""
    return number + math.log(-math.expm1(-number))


class Sum(SummedEnergy):
    """Sum of at least one energy; nested sums are flattened, so ``a + b + c`` has three terms."""

    def __init__(self, terms: Iterable[Energy]) -> None:
        super().__init__()
        flat: list[Energy] = []
        for term in terms:
            flat.extend(term.terms if isinstance(term, Sum) else [_check_energy_type(term)])
        if not flat:
            raise ValueError("terms must contain at least one energy, got none")
        self.terms: Any = nn.ModuleList(flat)
        self.concave = all(term.concave for term in flat)

    def summands(self) -> Iterable[Any]:
        return self.terms


class Select(_Wrapped):
    """An energy whose input is ``x[key]``, an entry of a dict, tuple, list or named tuple."""

    def __init__(self, energy: Energy, key: Any) -> None:
        super().__init__(energy)
        self.key = key

    def read(self, x: Any, mask: Mask) -> AttentionContext:
        if not isinstance(x, (dict, tuple, list)):
            kind = type(x).__name__
            raise TypeError(f"x must be a dict or a tuple that contains {self.key!r}, got {kind}")
        names: Any = getattr(x, "_fields", ())
        try:
            part = x[names.index(self.key) if self.key in names else self.key]
        except (KeyError, IndexError, TypeError) as error:
            held = list(x) if isinstance(x, dict) else f"{len(x)} parts"
            raise ValueError(f"x must contain {self.key!r}, got {held}") from error
        return AttentionContext((self.energy.prepare(part, mask=mask),), mask=mask)

    def extra_repr(self) -> str:
        return f"key={self.key!r}"


def _check_energy_type(energy: Any) -> Energy:
    return require_instance(
        "energy", energy, Energy, "an Energy (wrap functions in FunctionEnergy)"
    )


def replace_part(whole: nn.Module, old: Energy, new: Energy) -> Any:
    """Return a copy of ``whole`` with ``old`` replaced by ``new``, sharing all other modules."""
    _check_energy_type(new)
    if all(part is not old for part in whole.modules()):
        raise ValueError(
            f"old must be a submodule of the {type(whole).__name__} (the same object), got another "
            f"{type(old).__name__}"
        )
    return _copied_around(whole, old, new)


def _copied_around(module: nn.Module, old: Energy, new: Energy) -> nn.Module:
    """Return ``new`` for ``old``, a copy for modules that contain it, and other modules themselves."""
    if module is old:
        return new
    if all(part is not old for part in module.modules()):
        return module
    copied = copy.copy(module)
    for name, hooks in vars(copied).items():
        if name.endswith("_hooks") and isinstance(hooks, dict):  # hooks belong to this module only
            setattr(copied, name, hooks.copy())
    copied._modules = {
        name: child and _copied_around(child, old, new) for name, child in module._modules.items()
    }
    if isinstance(copied, Energy):
        copied.concave, copied.is_replaced = False, True  # concave is unknown for the new energy
    return copied


class Quadratic(ClosedForm):
    """``E = 1/2 |z - x|^2``, or ``1/2 |z|^2`` without an input.

    The gradient is ``z - x`` and the Hessian the identity. The unit gradient step on
    ``Quadratic() + energy`` is ``z <- x - energy.grad(z)``.

    Shapes: ``z`` (B, ...), ``x`` like ``z`` or None, ``mask`` (B, N) for ``z`` (B, N, ...).
    """

    def check(self, z: Tensor, x: Any, mask: Mask) -> None:
        check_tokens(z, mask, "Quadratic", features=0)
        if x is not None:
            check_input(x, z, "Quadratic")

    def evaluate(self, z: Tensor, x: Any, mask: Mask, need_value: bool) -> Evaluation:
        difference = hide(z if x is None else z - x, mask)
        return 0.5 * sum_squares(difference) if need_value else None, difference


class Field(ClosedForm):
    """``E = -<x, z>``, the input as an external field, with gradient ``-x`` and zero Hessian.

    Shapes: ``z`` (B, ...), ``x`` like ``z``, ``mask`` (B, N) for ``z`` (B, N, ...).
    """

    concave = True  # linear

    def check(self, z: Tensor, x: Any, mask: Mask) -> None:
        check_tokens(z, mask, "Field", features=0)
        check_input(x, z, "Field")

    def evaluate(self, z: Tensor, x: Tensor, mask: Mask, need_value: bool) -> Evaluation:
        gradient = -hide(x, mask)
        return sum_samples(gradient * hide(z, mask)) if need_value else None, gradient


class FunctionEnergy(Energy):
    """A function ``(z)`` or ``(z, x)`` as an energy, differentiated automatically.

    Args:
        function: ``function(z)`` or ``function(z, x)`` -> (B,), composed of differentiable torch
            operations, with an optional parameter ``mask``. A module is registered with its
            parameters.
        concave: whether the function is known to be concave in ``z``.

    TypeError if ``function`` has another signature; ValueError on evaluation if it does not return one
    number per sample, or if a mask is passed to a function without that parameter.
    """

    def __init__(self, function: Callable[..., Tensor], *, concave: bool = False) -> None:
        super().__init__()
        self.call = FunctionCall.read(function)
        self.function = function
        self.concave = concave

    def forward(self, z: Any, x: Any = None, *, mask: Mask = None) -> Tensor:
        return self.call(self.function, z, x, mask)

    def _title(self) -> str:
        return self.call.name

    def extra_repr(self) -> str:
        return self.call.name


# Gradients and Hessian-vector products by automatic differentiation, and sums of pytrees.


def value_and_gradient(
    function: Callable[..., Tensor], z: Any, *inputs: Any, named: str | None = None
) -> tuple[Tensor, Any]:
    """Return ``function(z, *inputs)`` (B,) and its gradient with respect to ``z`` (tensor or pytree).

    The result is differentiable if autograd is on; the function also works under ``no_grad`` and
    ``inference_mode``.

    Raises:
        ValueError: if the value of a ``named`` function is not differentiable in ``z``.
    """
    if in_transform() or torch.compiler.is_dynamo_compiling():
        return _by_transform(function, z, inputs)
    record = torch.is_grad_enabled()
    # Compiled functions and fused attention cannot be differentiated twice.
    with recording(), twice_differentiable() if record else nullcontext():
        leaves, spec = pytree.tree_flatten(ordinary(z))
        _check_state(leaves)
        if not record:
            leaves = [leaf.detach() for leaf in leaves]
        # New tensors of the graph, so that inputs computed from z are constants. They are views, because
        # torch cannot follow the gradients of leaves where it tracks modules.
        own = [t if t.requires_grad else t.detach().requires_grad_() for t in leaves]
        leaves = [leaf.view_as(leaf) for leaf in own]
        value = function(pytree.tree_unflatten(leaves, spec), *ordinary(inputs))
        found: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if value.requires_grad:
            # Samples are independent, so the gradient of the sum contains the gradient of each.
            found = torch.autograd.grad(value.sum(), leaves, create_graph=record, allow_unused=True)
    if named is not None and all(slope is None for slope in found):
        raise ValueError(
            f"the energy must be differentiable in z, but the result of {named} has no graph to z: remove "
            "z.detach(), z.data, .item(), .tolist(), NumPy and torch.no_grad() from it"
        )
    pairs = zip(found, leaves, strict=True)
    gradients = [torch.zeros_like(t) if slope is None else slope for slope, t in pairs]
    gradient = pytree.tree_unflatten(gradients, spec)
    return (value if record else value.detach()), gradient


def _by_transform(
    function: Callable[..., Tensor], z: Any, inputs: tuple[Any, ...]
) -> tuple[Tensor, Any]:
    """Compute :func:`value_and_gradient` inside a transform or a compiler.

    There ``torch.func.grad`` is supported, while new leaves of a graph cannot be created.
    """
    if torch.compiler.is_exporting() and torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "an energy that is differentiated automatically cannot be exported with strict=True; "
            "export with strict=False, torch's default"
        )
    leaves, spec = pytree.tree_flatten(z)
    _check_state(leaves)

    def total(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        value = function(pytree.tree_unflatten(leaves, spec), *inputs)
        return value.sum(), value

    with nullcontext() if torch.compiler.is_dynamo_compiling() else PLAIN_ATTENTION:
        gradients, value = torch.func.grad(total, has_aux=True)(leaves)
    return value, pytree.tree_unflatten(list(gradients), spec)


def _check_state(leaves: list[Any]) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() == 0:
            kind = f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
            raise TypeError(f"z must be a floating-point tensor (B, ...) or a pytree, got {kind}")
    if not leaves:
        raise ValueError("z must contain at least one tensor, got an empty pytree")


def map_tree(function: Callable[..., Tensor], tree: Any, *others: Any) -> Any:
    """Apply ``function`` to each tensor of a pytree, or of similar ones, with a fast path for tensors."""
    if isinstance(tree, Tensor):
        return function(tree, *others)
    return pytree.tree_map(function, tree, *others)
