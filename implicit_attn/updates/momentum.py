"""Steps with momentum over the sublayers of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from solvers.core.checks import require_callable, require_choice

DESCENTS = ("plain", "gain", "momentum", "nesterov")
LOOKAHEADS = ("literal", "scaled", "queries")


class DescentStep(nn.Module):
    r"""A sublayer as a step of descent, ``u`` its output standing for minus a gradient ::

        plain       z <- z + u(z)
        gain        z <- z + eta u(z)
        momentum    p <- beta p - u(z),                       z <- z - eta p
        nesterov    p <- beta p - u(at),  at = z - beta p,    z <- z - eta p

    The momentum p, like z, goes on to the next sublayer, zero before the first. Each sublayer learns its
    own beta and eta, 0.9 and 1 at first. With ``beta = 0`` and ``eta = 1`` every method is plain, bit by bit.

    Args:
        branch: ``u(z, *args)``, like z; of ``lookahead="queries"`` ``u(at, *args, memory=z)``.
        method: one of ``DESCENTS``.
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
        self, branch: Callable[..., Tensor], method: str = "plain", *, lookahead: str = "literal"
    ) -> None:
        super().__init__()
        self.branch = require_callable("branch", branch)
        self.method = require_choice("method", method, DESCENTS)
        self.lookahead = require_choice("lookahead", lookahead, LOOKAHEADS)
        if lookahead != "literal" and method != "nesterov":
            raise ValueError(f'lookahead={lookahead!r} needs method="nesterov", got {method!r}')
        learned = {"plain": {}, "gain": {"eta": 1.0}}.get(method, {"beta": 0.9, "eta": 1.0})
        self.numbers = nn.ParameterDict({n: torch.tensor(each) for n, each in learned.items()})

    def forward(
        self, z: Tensor, p: Tensor | None = None, *args: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The state and the momentum after the step; ``p`` None is zero, and stays so without any."""
        if self.method == "plain":
            return z + self.branch(z, *args), p
        eta = self.numbers["eta"]
        if self.method == "gain":
            return z + eta * self.branch(z, *args), p
        # A momentum of zero and not none at all: in the dtype of z, also where autocast gives u a
        # narrower one, and with a gradient of 0 for beta, where data parallel training takes None for
        # an error.
        carried = self.numbers["beta"] * (torch.zeros_like(z) if p is None else p)
        at = z
        if self.method == "nesterov" and p is not None:
            at = z - (eta * carried if self.lookahead == "scaled" else carried)
        both = {"memory": z} if self.lookahead == "queries" else {}
        pull = self.branch(at, *args, **both)
        moved = carried - pull
        return z - eta * moved, moved

    def extra_repr(self) -> str:
        return f"method={self.method}, lookahead={self.lookahead}"
