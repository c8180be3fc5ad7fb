"""Updates: maps ``z <- f(z, x)`` whose fixed point is a layer's output.

To write one, subclass :class:`Update` in a file of this folder, define ``forward``, and export it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from implicit_attn.energies.energy import FunctionCall


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
        raise NotImplementedError(f"{type(self).__name__} descends no energy")


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
