"""Steps with momentum over the sublayers of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from solvers.core.checks import require_callable, require_choice, require_flag, require_number

DESCENTS = ("plain", "gain", "momentum", "nesterov")
LOOKAHEADS = ("literal", "scaled", "queries")


class _Momentum(nn.Module):
    """The numbers beta and eta of a step with momentum: parameters where they are learned, else floats.

    Floats keep their digits in every precision. They are arguments of the constructor, no part of the
    state.
    """

    beta: Any
    eta: Any

    def __init__(self, beta: float | None, eta: float | None, learned: bool) -> None:
        super().__init__()
        self.learned = require_flag("learned", learned)
        for name, value in (("beta", beta), ("eta", eta)):
            number = None if value is None else float(require_number(name, value))
            if self.learned and number is not None:
                setattr(self, name, nn.Parameter(torch.tensor(number)))
            else:
                setattr(self, name, number)

    def extra_repr(self) -> str:
        return f"beta={self.beta}, eta={self.eta}, learned={self.learned}"


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
        beta, eta: initial values, by default 0.9 and 1, of the methods that have them.
        learned: train beta and eta.
        lookahead: where Nesterov's method evaluates: ``"literal"``, the ``at`` above, as published;
            ``"scaled"``: ``at = z - eta beta p``, the point of Nesterov's method for any eta, to which
            the other is equal at ``eta = 1`` only; ``"queries"``: u sees both the literal ``at`` and z,
            for attention that looks from the former at the latter. A branch that treats each token by
            itself, such as a feed-forward one, is to take ``memory`` and pass it over: it has nothing
            but the literal ``at``.

    Shapes: ``z`` and ``p`` any, alike. Under autocast p is as precise as z.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, MomenMHA and NagMHA.
    """

    def __init__(
        self,
        branch: Callable[..., Tensor],
        method: str = "plain",
        *,
        beta: float | None = None,
        eta: float | None = None,
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
        if not has_momentum and beta is not None:
            raise ValueError(f"beta needs momentum or nesterov, got {beta!r}, {method!r}")
        if method == "plain" and eta is not None:
            raise ValueError(f'eta needs another method than "plain", got {eta!r}')
        if has_momentum and beta is None:
            beta = 0.9
        if method != "plain" and eta is None:
            eta = 1.0
        self.numbers = _Momentum(beta, eta, learned)

    def forward(
        self, z: Tensor, p: Tensor | None = None, *args: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The state and the momentum after the step; ``p`` None is zero, and stays so without any."""
        beta, eta = self.numbers.beta, self.numbers.eta
        if self.method == "plain":
            return z + self.branch(z, *args), p
        if self.method == "gain":
            return z + eta * self.branch(z, *args), p
        # A momentum of zero and not none at all: in the dtype of z, also where autocast gives u a
        # narrower one, and with a gradient of 0 for beta, where data parallel training takes None for
        # an error.
        carried = beta * (torch.zeros_like(z) if p is None else p)
        at = z
        if self.method == "nesterov" and p is not None:
            at = z - (eta * carried if self.lookahead == "scaled" else carried)
        both = {"memory": z} if self.lookahead == "queries" else {}
        pull = self.branch(at, *args, **both)
        moved = carried - pull
        return z - eta * moved, moved

    def extra_repr(self) -> str:
        return f"method={self.method}, lookahead={self.lookahead}"
