"""Updates: maps ``z <- f(z, x)`` whose fixed point is a layer's output.

To write one, subclass :class:`Update` in a file of this folder, define ``forward``, and export it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.energies.energy import Energy, FunctionCall, Prepared, map_tree
from implicit_attn.energies.heads import Beta
from implicit_attn.energies.lagrangians import Lagrangian
from implicit_attn.energies.memories import QueryEnergy
from implicit_attn.energies.tokens import hide
from solvers.core.checks import (
    require_callable,
    require_choice,
    require_count,
    require_instance,
    require_positive,
)


class Update(nn.Module):
    """A map from a state to a state of the same structure; samples must not influence each other.

    A subclass defines ``forward(self, z, x, *, mask=None)``, which may leave out ``mask``, then it takes
    none, and ``x``. One that descends an energy also defines ``joint`` and sets ``monitored``.

    Attributes:
        symmetric: the Jacobian ``df/dz`` is symmetric, so the adjoint system can be solved by CG.
        monitored: ``joint`` is defined, so a solver may use the energy, for instance in a line search.
    """

    symmetric: bool = False
    monitored: bool = False

    _call = FunctionCall("Update.forward", True, True)  # of a subclass its own

    def __init_subclass__(cls) -> None:
        cls._call = FunctionCall.of_class(cls)

    def __call__(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        """``forward``, which is given what it takes of ``x`` and ``mask``."""
        return self._call(super().__call__, z, x, mask)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        """One update, like ``z``: the state, (B, N, d) or any pytree of tensors (B, ...).

        ``x`` is the layer's input, ``mask`` (B, N) bool is False at masked tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(z, x, *, mask)")

    def initial(self, x: Any) -> Any:
        """The initial state of a solve, by default the input."""
        return x

    def start(self, x: Any, prepared: Any) -> Any:
        """The initial state where ``prepare`` has found a better one; by default ``initial(x)``."""
        return self.initial(x)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """What ``forward`` is given in place of ``x`` during a solve: a pytree of tensors (B, ...).

        Called once a solve, for what depends on the input alone; gradients flow through it. An update
        that overrides it must take both the result and the input itself in ``forward``.
        """
        return x

    def joint(
        self, z: Any, x: Any = None, *, mask: Tensor | None = None
    ) -> tuple[Any, Tensor, Any | None]:
        """``(f(z), E(z), dE/dz)`` in one pass: like ``z``, (B,), like ``z`` or None."""
        raise NotImplementedError(f"{type(self).__name__} has no energy")


class FunctionUpdate(Update):
    """A function ``(z)``, ``(z, x)`` or ``(z, x, mask=...)`` as an update.

    Args:
        function: the map; a module is registered, so that optimizers find its parameters.
        symmetric: whether its Jacobian by z is symmetric.

    TypeError if ``function`` does not have such a signature; ValueError, when evaluated, if a mask is
    given to a function that takes none.
    """

    def __init__(self, function: Callable[..., Any], *, symmetric: bool = False) -> None:
        super().__init__()
        self.call = FunctionCall.read(function)
        self.function = function
        self.symmetric = symmetric

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        return self.call(self.function, z, x, mask)


class EnergyStep(Update):
    """A step that depends on the gradient of an energy, with a step size."""

    monitored = True

    def __init__(self, energy: Energy, step_size: float = 1.0) -> None:
        super().__init__()
        self.energy = require_instance("energy", energy, Energy, "an Energy")
        self.step_size = require_positive("step_size", step_size)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return self.energy.prepare(x, mask=mask)

    def extra_repr(self) -> str:
        return f"step_size={self.step_size}"


class GradientStep(EnergyStep):
    r"""``f(z, x) = z - eta dE/dz(z, x)``: fixed points are the stationary points of E.

    They do not depend on eta > 0, which only scales the residual ``|f(z) - z| / |f(z)|`` and the steps
    of solvers that control no step size. The Jacobian ``I - eta H`` is symmetric.

    Args:
        energy: an :class:`Energy`.
        step_size: eta, > 0.

    Example:
        >>> import torch
        >>> from implicit_attn.energies import Quadratic
        >>> step = GradientStep(Quadratic(), step_size=0.5)
        >>> step(torch.ones(1, 2, 2), torch.zeros(1, 2, 2))
        tensor([[[0.5000, 0.5000],
                 [0.5000, 0.5000]]])
    """

    symmetric = True

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        return self._descend(z, self.energy.grad(z, x, mask=mask))

    def joint(
        self, z: Any, x: Any = None, *, mask: Tensor | None = None
    ) -> tuple[Any, Tensor, Any]:
        value, gradient = self.energy.value_and_grad(z, x, mask=mask)
        return self._descend(z, gradient), value, gradient

    def _descend(self, z: Any, gradient: Any) -> Any:
        return map_tree(lambda leaf, slope: move(leaf, slope, self.step_size), z, gradient)


class QueryDescent(GradientStep):
    r"""``q <- q - eta dE/dq``, every query of every head down its own energy among the keys.

    ``E(q) = 1/2 |q|^2 - beta^-1 log sum_j exp(beta q.k_j)``. A unit step is softmax attention with the
    keys for values, and no step with ``eta <= 1`` raises E.

    Shapes: ``z`` (B, N, d), the queries, each head a slice of ``p = d / heads`` features. ``x``: the keys
    (B, M, d), a pair of them and a mask (B, M), or an ``AttentionInput`` with such a memory, which may also
    hold pairs and their biases. ``mask`` (B, N), of the queries.

    Args:
        dim: features d of queries and keys.
        heads: a divisor of ``dim``.
        step_size: eta, > 0.
        beta: inverse temperature, > 0, or one for each head; None: ``1 / sqrt(p)``.

    Source: Bal, "Attention as Energy Minimization: Visualizing Energy Landscapes" (2021),
    https://mcbal.github.io/post/attention-as-energy-minimization-visualizing-energy-landscapes/; the
    energy: Ramsauer et al. (2020), https://arxiv.org/abs/2008.02217.
    """

    energy: QueryEnergy

    def __init__(
        self, dim: int, heads: int = 1, *, step_size: float = 1.0, beta: Beta = None
    ) -> None:
        super().__init__(QueryEnergy(dim, heads, beta=beta), step_size)

    def trajectory(self, z: Tensor, x: Any, steps: int) -> tuple[Tensor, Tensor]:
        """States (steps + 1, B, N, d) from ``z`` on, and their energies (steps + 1, B, heads, N)."""
        x = self.prepare(x)
        states = [z]
        for _ in range(require_count("steps", steps)):
            states.append(self(states[-1], x))
        return torch.stack(states), torch.stack([self.energy.each(state, x) for state in states])


class ActivationStep(EnergyStep):
    r"""``f(z, x) = z - eta (z - x + dE_int/dg)`` at the activation ``g = dLag/dz``.

    It descends the energy that is monitored, which is not ``E_int`` alone::

        E(z) = sum_i [ z_i.g_i - Lag(z_i) - x_i.g_i ] + E_int(g),   dE/dz = (dg/dz) (z - x + dE_int/dg)

    since ``dg/dz``, the Hessian of the convex Lagrangian, is positive semidefinite. The update itself
    does not contain ``dg/dz``. For a concave ``E_int`` the unit step never raises E, whatever the
    weights.

    Args:
        energy: ``E_int``, an energy of the activation; it is given the layer's input ``x`` too.
        lagrangian: whose gradient is the activation, for example ``RMSNormLagrangian()``.
        step_size: eta, > 0.

    Shapes: ``z`` and ``x`` (B, N, d); ``x`` None for zero.

    Source: Krotov and Hopfield (2021), https://arxiv.org/abs/2008.06996; Hoover et al., "Energy
    Transformer" (2023), https://arxiv.org/abs/2302.07253, equations 1 to 6.
    """

    def __init__(self, energy: Energy, lagrangian: Lagrangian, step_size: float = 1.0) -> None:
        super().__init__(energy, step_size)
        self.lagrangian = require_instance("lagrangian", lagrangian, Lagrangian, "a Lagrangian")

    def activation(self, z: Tensor) -> Tensor:
        """``g(z)``, (B, N, d)."""
        return self.lagrangian.activation(z)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """``Prepared((x, what the energy prepared))``; ``x`` where the energy prepares nothing."""
        part = super().prepare(x, mask=mask)
        return x if part is x or part is None else Prepared((x, part))

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        x, part = x.parts if isinstance(x, Prepared) else (x, x)
        gradient = self.energy.grad(self.activation(z), part, mask=mask)
        return move(z, self._force(z, x, gradient, mask), self.step_size)

    def joint(
        self, z: Tensor, x: Any = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, part = x.parts if isinstance(x, Prepared) else (x, x)
        g = self.activation(z)
        interaction, gradient = self.energy.value_and_grad(g, part, mask=mask)
        force = self._force(z, x, gradient, mask)
        pull = z if x is None else z - x
        own = hide((pull * g).sum(-1), mask)
        value = own.flatten(1).sum(1) - self.lagrangian(z, mask=mask) + interaction
        slope = self.lagrangian.hessian_product(z, force)
        return move(z, force, self.step_size), value, slope

    def _force(self, z: Tensor, x: Tensor | None, gradient: Tensor, mask: Tensor | None) -> Tensor:
        return hide(gradient + (z if x is None else z - x), mask)


def move(z: Tensor, gradient: Tensor, step: float | Tensor) -> Tensor:
    """``z - step * gradient`` in the dtype of ``z``; ``step`` a number, (), (d,), or like ``z``."""
    if not isinstance(step, Tensor):
        return torch.sub(z, gradient, alpha=step)
    return torch.addcmul(z, step.to(z.dtype), gradient, value=-1.0)


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
