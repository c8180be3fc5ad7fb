"""Steps with momentum: over the sublayers of a model, and as the update of an equilibrium layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from implicit_attn.updates.update import Update
from solvers.core.checks import (
    require_callable,
    require_choice,
    require_flag,
    require_instance,
    require_number,
)

DESCENTS = ("plain", "gain", "momentum", "nesterov")
LOOKAHEADS = ("literal", "scaled", "queries")


class _Momentum(nn.Module):
    """The numbers beta and eta of a step with momentum, parameters where they are learned."""

    beta: Tensor
    eta: Tensor

    def __init__(self, beta: float | None, eta: float | None, learned: bool) -> None:
        super().__init__()
        self.learned = require_flag("learned", learned)
        for name, value in (("beta", beta), ("eta", eta)):
            number = None if value is None else torch.tensor(require_number(name, value))
            if self.learned:
                setattr(self, name, None if number is None else nn.Parameter(number))
            else:
                self.register_buffer(name, number)

    def extra_repr(self) -> str:
        parts = [
            f"{name}={number.item():.4g}"
            for name in ("beta", "eta")
            if (number := getattr(self, name)) is not None
        ]
        return ", ".join([*parts, f"learned={self.learned}"])


class DescentStep(nn.Module):
    r"""A sublayer as a step of descent, ``u`` its output standing for minus a gradient ::

        plain       z <- z + u(z)
        gain        z <- z + eta u(z)
        momentum    p <- beta p - u(z),                       z <- z - eta p
        nesterov    p <- beta p - u(at),  at = z - beta p,    z <- z - eta p

    The momentum p, like z, goes on to the next sublayer, zero before the first. Each sublayer has its
    own beta and eta. With ``beta = 0`` and ``eta = 1`` every method is plain, bit by bit.

    Args:
        branch: ``u(z, *args)``, like z; of ``lookahead="queries"`` ``u(at, *args, memory=z)``.
        method: one of ``DESCENTS``.
        beta, eta: initial values.
        learned: train beta and eta.
        lookahead: where Nesterov's method evaluates: ``"literal"``, the ``at`` above, as published;
            ``"scaled"``: ``at = z - eta beta p``, the point of Nesterov's method for any eta, to which
            the other is equal at ``eta = 1`` only; ``"queries"``: u sees both the literal ``at`` and z,
            for attention that looks from the former at the latter.

    Shapes: ``z`` and ``p`` any, alike.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, MomenMHA and NagMHA.
    """

    def __init__(
        self,
        branch: Callable[..., Tensor],
        method: str = "plain",
        *,
        beta: float = 0.9,
        eta: float = 1.0,
        learned: bool = True,
        lookahead: str = "literal",
    ) -> None:
        super().__init__()
        self.branch = require_callable("branch", branch)
        self.method = require_choice("method", method, DESCENTS)
        self.lookahead = require_choice("lookahead", lookahead, LOOKAHEADS)
        has_momentum = method in ("momentum", "nesterov")
        if lookahead != "literal" and method != "nesterov":
            raise ValueError(f'lookahead={lookahead!r} needs method="nesterov", got {method!r}')
        self.numbers = _Momentum(
            beta if has_momentum else None, None if method == "plain" else eta, learned
        )

    def forward(
        self, z: Tensor, p: Tensor | None = None, *args: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The state and the momentum after the step; ``p`` None is zero, and stays so without any."""
        beta, eta = self.numbers.beta, self.numbers.eta
        if self.method == "plain":
            return z + self.branch(z, *args), p
        if self.method == "gain":
            return z + eta * self.branch(z, *args), p
        carried = None if p is None else beta * p
        at = z
        if self.method == "nesterov" and carried is not None:
            at = z - (eta * carried if self.lookahead == "scaled" else carried)
        both = {"memory": z} if self.lookahead == "queries" else {}
        pull = self.branch(at, *args, **both)
        moved = -pull if carried is None else carried - pull
        return z - eta * moved, moved

    def extra_repr(self) -> str:
        return f"method={self.method}, lookahead={self.lookahead}"


class MomentumStep(Update):
    r"""An update with momentum, for ``DEQ``: a map of pairs whose fixed points are ``(z*, 0)``.

    ``r(z) = f(z, x) - z`` stands for minus a gradient, and ``z*`` is any fixed point of f ::

        momentum:  p <- beta p - r(z),     nesterov:  p <- beta p - r(z - eta beta p),    z <- z - eta p

    Iterated as it is (``solvers.Forward()``) this is gradient descent with momentum;
    ``solvers.GradientDescent(momentum=...)`` does the same to any f with constant numbers, without a
    state that is twice as large. Here the numbers may be learned.

    Args:
        update: f.
        nesterov: look ahead.
        beta, eta: initial values; for convergence ``0 <= beta < 1`` and ``eta > 0``.
        learned: train beta and eta.

    Shapes: states are pairs (z, p) of what f takes; a layer's output is such a pair, too.
    """

    def __init__(
        self,
        update: Update,
        *,
        nesterov: bool = False,
        beta: float = 0.9,
        eta: float = 1.0,
        learned: bool = False,
    ) -> None:
        super().__init__()
        self.update = require_instance("update", update, Update, "an Update")
        self.nesterov = require_flag("nesterov", nesterov)
        self.numbers = _Momentum(beta, eta, learned)

    def initial(self, x: Any) -> Any:
        """The update's own initial state, at rest."""
        return _at_rest(self.update.initial(x))

    def start(self, x: Any, prepared: Any) -> Any:
        return _at_rest(self.update.start(x, prepared))

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return self.update.prepare(x, mask=mask)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        """One step of the pair ``z``, the state and its momentum."""
        if not isinstance(z, (tuple, list)) or len(z) != 2:
            raise TypeError(f"z must be a pair of state and momentum, got {type(z).__name__}")
        z, p = z
        beta, eta = self.numbers.beta, self.numbers.eta
        at = z
        if self.nesterov:
            at = pytree.tree_map(lambda a, b: a - (eta * beta) * b, z, p)
        moved = self.update(at, x, mask=mask)
        p = pytree.tree_map(lambda a, b, c: beta * a - (b - c), p, moved, at)
        return pytree.tree_map(lambda a, b: a - eta * b, z, p), p

    def extra_repr(self) -> str:
        return f"nesterov={self.nesterov}"


def _at_rest(z: Any) -> tuple[Any, Any]:
    return z, pytree.tree_map(torch.zeros_like, z)
