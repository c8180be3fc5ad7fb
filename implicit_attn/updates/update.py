"""Updates: maps ``z <- f(z, x)`` whose fixed point is a layer's output.

To write one, subclass :class:`Update` and define ``forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.energies.energy import (
    AttentionContext,
    Energy,
    FunctionCall,
    is_prepared,
    map_tree,
)
from implicit_attn.energies.heads import Beta
from implicit_attn.energies.lagrangians import Lagrangian
from implicit_attn.energies.memories import QueryEnergy
from implicit_attn.energies.tokens import Mask, hide
from solvers.core.argument_names import hint_names
from solvers.core.checks import (
    require_callable,
    require_choice,
    require_count,
    require_instance,
    require_positive,
)


class Update(nn.Module):
    """Base class of maps from a state to a state of the same structure, with independent samples.

    A subclass defines ``forward(self, z, x, *, mask=None)``, in which ``x`` and ``mask`` are optional. One
    that descends an energy also defines ``joint`` and sets ``monitored``.

    Attributes:
        symmetric: whether the Jacobian ``df/dz`` is symmetric, which allows symmetric adjoint solvers.
        monitored: whether ``joint`` is defined, so that solvers may use the energy in a line search.
    """

    symmetric: bool = False
    monitored: bool = False

    _call = FunctionCall("Update.forward", True, True)  # each subclass has its own

    def __init_subclass__(cls) -> None:
        cls._call = FunctionCall.of_class(cls)

    def __call__(self, z: Any, x: Any = None, *, mask: Mask = None) -> Any:
        """Return ``forward`` for those of ``x`` and ``mask`` that it accepts."""
        call = self._call
        if call.takes_x and call.takes_mask:
            return super().__call__(z, x, mask=mask)
        return call(super().__call__, z, x, mask)

    def forward(self, z: Any, x: Any = None, *, mask: Mask = None) -> Any:
        """Return the next state, like ``z``: (B, N, d) or any pytree of tensors (B, ...).

        ``x`` is the layer's input, ``mask`` (B, N) bool is False at masked tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(z, x, *, mask)")

    def initial(self, x: Any) -> Any:
        """Return the initial state of a solve, by default the input."""
        return x

    def start(self, x: Any, prepared: Any) -> Any:
        """Return an initial state that may use the prepared input, by default ``initial(x)``."""
        return self.initial(x)

    def prepare(self, x: Any, *, mask: Mask = None) -> Any:
        """Return the object that replaces ``x`` in ``forward`` during a solve, a pytree of tensors (B, ...).

        It is called once per solve for everything that depends only on the input; gradients flow through
        it. The ``forward`` of an update that overrides it must accept both the result and the input.
        """
        return x

    def joint(self, z: Any, x: Any = None, *, mask: Mask = None) -> tuple[Any, Tensor, Any | None]:
        """Return ``(f(z), E(z), dE/dz)``: like ``z``, (B,), and like ``z`` or None."""
        raise NotImplementedError(f"{type(self).__name__} has no energy")


class FunctionUpdate(Update):
    """A function ``(z)``, ``(z, x)`` or ``(z, x, mask=...)`` as an update.

    Args:
        function: the map; a module is registered with its parameters.
        symmetric: whether its Jacobian with respect to z is symmetric.

    TypeError if ``function`` has another signature; ValueError on evaluation if a mask is passed to a
    function without that parameter.
    """

    def __init__(self, function: Callable[..., Any], *, symmetric: bool = False) -> None:
        super().__init__()
        self.call = FunctionCall.read(function)
        self.function = function
        self.symmetric = symmetric

    def forward(self, z: Any, x: Any = None, *, mask: Mask = None) -> Any:
        return self.call(self.function, z, x, mask)


class EnergyStep(Update):
    """A step that depends on the gradient of an energy, with a step size."""

    monitored = True

    step_size: float | nn.Parameter

    @hint_names
    def __init__(self, energy: Energy, step_size: float | nn.Parameter = 1.0) -> None:
        super().__init__()
        if isinstance(energy, Energy) and "_modules" not in vars(energy):
            raise TypeError(f"{type(energy).__name__}.__init__ must call super().__init__() first")
        self.energy = require_instance("energy", energy, Energy, "an Energy")
        if not isinstance(step_size, nn.Parameter):
            self.step_size = require_positive("step_size", step_size)
        elif step_size.dim() != 0:
            raise ValueError(f"step_size must be a scalar, got shape {tuple(step_size.shape)}")
        else:
            require_positive("step_size", step_size.item())
            self.step_size = step_size

    def prepare(self, x: Any, *, mask: Mask = None) -> Any:
        return self.energy.prepare(x, mask=mask)

    def extra_repr(self) -> str:
        learned = isinstance(self.step_size, nn.Parameter)
        return "step_size=learned" if learned else f"step_size={self.step_size}"


class GradientStep(EnergyStep):
    r"""Gradient step ``f(z, x) = z - eta dE/dz(z, x)``, whose fixed points are the stationary points of E.

    They do not depend on eta > 0, which only scales the residual ``|f(z) - z| / |f(z)|`` and the steps of
    solvers without step size control. The Jacobian ``I - eta H`` is symmetric.

    Args:
        energy: an :class:`Energy`.
        step_size: eta > 0, or a scalar ``nn.Parameter`` to train it with a fixed number of steps
            (:meth:`implicit_attn.DEQ.unrolled`, :meth:`implicit_attn.DEQ.supervised`). Its implicit
            gradient is zero at a fixed point. Nothing keeps a trained eta positive: parametrise it or
            clamp it after optimizer steps.

    Example:
        >>> import torch
        >>> from implicit_attn.energies import Quadratic
        >>> step = GradientStep(Quadratic(), step_size=0.5)
        >>> step(torch.ones(1, 2, 2), torch.zeros(1, 2, 2))
        tensor([[[0.5000, 0.5000],
                 [0.5000, 0.5000]]])
    """

    symmetric = True

    def forward(self, z: Any, x: Any = None, *, mask: Mask = None) -> Any:
        return self._descend(z, self.energy.grad(z, x, mask=mask))

    def joint(self, z: Any, x: Any = None, *, mask: Mask = None) -> tuple[Any, Tensor, Any]:
        value, gradient = self.energy.value_and_grad(z, x, mask=mask)
        return self._descend(z, gradient), value, gradient

    def _descend(self, z: Any, gradient: Any) -> Any:
        return map_tree(lambda leaf, slope: move(leaf, slope, self.step_size), z, gradient)


class QueryDescent(GradientStep):
    r"""Gradient step ``q <- q - eta dE/dq`` of every query of every head on its energy among the keys.

    ``E(q) = 1/2 |q|^2 - beta^-1 log sum_j exp(beta q.k_j)``. A unit step is softmax attention with the
    keys as values, and no step with ``eta <= 1`` increases E.

    Shapes: ``z`` (B, N, d) contains the queries, each head a slice of ``p = d / heads`` features. ``x``
    contains the keys (B, M, d), a pair of them and a mask (B, M), or is an ``AttentionInput`` with such a
    memory and optional pairs and biases. ``mask`` (B, N) is that of the queries.

    Args:
        dim: features d of queries and keys.
        heads: number of heads, a divisor of ``dim``.
        step_size: eta > 0.
        beta: inverse temperature > 0, or one per head; None for ``1 / sqrt(p)``.

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
        """Return states (steps + 1, B, N, d), starting with ``z``, and energies (steps + 1, B, heads, N)."""
        x = self.prepare(x)
        states = [z]
        for _ in range(require_count("steps", steps)):
            states.append(self(states[-1], x))
        return torch.stack(states), torch.stack([self.energy.each(state, x) for state in states])


class ActivationStep(EnergyStep):
    r"""``f(z, x) = z - eta (z - x + dE_int/dg)`` at the activation ``g = dLag/dz``.

    It descends the monitored energy, which contains ``E_int``::

        E(z) = sum_i [ z_i.g_i - Lag(z_i) - x_i.g_i ] + E_int(g),   dE/dz = (dg/dz) (z - x + dE_int/dg)

    because ``dg/dz``, the Hessian of the convex Lagrangian, is positive semidefinite. The update itself
    does not contain ``dg/dz``. For a concave ``E_int`` the unit step never increases E, for any weights.

    Args:
        energy: ``E_int``, an energy of the activation, which also receives the layer's input ``x``.
        lagrangian: Lagrangian whose gradient is the activation, such as ``RMSNormLagrangian()``.
        step_size: eta > 0.

    Shapes: ``z`` and ``x`` (B, N, d); ``x`` None for zero.

    Source: Krotov and Hopfield (2021), https://arxiv.org/abs/2008.06996; Hoover et al., "Energy
    Transformer" (2023), https://arxiv.org/abs/2302.07253, equations 1 to 6.
    """

    def __init__(self, energy: Energy, lagrangian: Lagrangian, step_size: float = 1.0) -> None:
        super().__init__(energy, step_size)
        self.lagrangian = require_instance("lagrangian", lagrangian, Lagrangian, "a Lagrangian")

    def activation(self, z: Tensor) -> Tensor:
        """Return ``g(z)``, (B, N, d)."""
        return self.lagrangian.activation(z)

    def prepare(self, x: Any, *, mask: Mask = None) -> Any:
        """Return a context with x and what the energy prepared, or ``x`` if that is x itself."""
        if is_prepared(x, mask):
            return x
        part = super().prepare(x, mask=mask)
        return x if part is x else AttentionContext(part, tokens=x, mask=mask)

    def forward(self, z: Tensor, x: Any = None, *, mask: Mask = None) -> Tensor:
        x, part, mask = self._read(x, mask)
        gradient = self.energy.grad(self.activation(z), part, mask=mask)
        return move(z, self._force(z, x, gradient, mask), self.step_size)

    def joint(
        self, z: Tensor, x: Any = None, *, mask: Mask = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, part, mask = self._read(x, mask)
        g = self.activation(z)
        interaction, gradient = self.energy.value_and_grad(g, part, mask=mask)
        force = self._force(z, x, gradient, mask)
        pull = z if x is None else z - x
        own = hide((pull * g).sum(-1), mask)
        value = own.flatten(1).sum(1) - self.lagrangian(z, mask=mask) + interaction
        slope = self.lagrangian.hessian_product(z, force)
        return move(z, force, self.step_size), value, slope

    def _read(self, x: Any, mask: Mask) -> tuple[Any, Any, Tensor | None]:
        """Return the input, what the energy prepared, and the mask."""
        context = self.prepare(x, mask=mask)
        if isinstance(context, AttentionContext):
            return context.tokens, context.parts, context.mask
        return context, context, mask

    def _force(self, z: Tensor, x: Tensor | None, gradient: Tensor, mask: Mask) -> Tensor:
        return hide(gradient + (z if x is None else z - x), mask)


def move(z: Tensor, gradient: Tensor, step: float | Tensor) -> Tensor:
    """Return ``z - step * gradient`` in the dtype of ``z``; ``step`` is a number, (), (d,), or like ``z``."""
    if not isinstance(step, Tensor):
        return torch.sub(z, gradient, alpha=step)
    return torch.addcmul(z, step.to(z.dtype), gradient, value=-1.0)


DESCENTS = ("plain", "gain", "momentum", "nesterov")
LOOKAHEADS = ("literal", "scaled", "queries")


class DescentStep(nn.Module):
    r"""A sublayer as a descent step, with its output ``u`` as the negative gradient ::

        plain       z <- z + u(z)
        gain        z <- z + eta u(z)
        momentum    p <- beta p - u(z),                       z <- z - eta p
        nesterov    p <- beta p - u(at),  at = z - beta p,    z <- z - eta p

    The momentum p is passed to the next sublayer like z and is zero before the first. Each sublayer learns
    its own beta and eta, initially 0.9 and 1. With ``beta = 0`` and ``eta = 1`` every method equals plain,
    bit by bit.

    Args:
        branch: ``u(z, *args)``, like z; with ``lookahead="queries"``, ``u(at, *args, memory=z)``.
        method: one of ``DESCENTS``.
        lookahead: evaluation point of Nesterov's method: ``"literal"`` for ``at`` as above and as
            published; ``"scaled"`` for ``at = z - eta beta p``, the point of Nesterov's method for any
            eta, equal to the former only for ``eta = 1``; ``"queries"`` to pass both ``at`` and z, for
            attention with queries from ``at`` and keys from z. A branch that acts on each token
            separately, such as a feed-forward one, should ignore ``memory``.

    Shapes: ``z`` and ``p`` have the same shape. Under autocast p has the dtype of z.

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
        """Return the state and the momentum after the step; ``p=None`` means zero."""
        if self.method == "plain":
            return z + self.branch(z, *args), p
        eta = self.numbers["eta"]
        if self.method == "gain":
            return z + eta * self.branch(z, *args), p
        # An explicit zero momentum has the dtype of z even under autocast, and gives beta a gradient of
        # 0, because data-parallel training requires every parameter to have a gradient.
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
