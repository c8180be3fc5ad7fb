"""Updates: maps ``z <- f(z, x)`` whose fixed point is a layer's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from implicit_attn.energies.simple import read_signature


class Update(nn.Module):
    """A map from a state to a state of the same shapes, each sample on its own.

    A subclass writes ``forward``; one that descends an energy also writes ``joint`` and sets
    ``monitored``.

    Attributes:
        symmetric: the Jacobian ``df/dz`` is symmetric, so the adjoint system can be solved by CG.
        monitored: ``joint`` is at hand, and the solver may watch the energy.
    """

    symmetric: bool = False
    monitored: bool = False

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        """One update.

        Args:
            z: state, (B, N, d) or any pytree of tensors (B, ...).
            x: the layer's input.
            mask: (B, N) bool, True where a token counts.

        Returns:
            like ``z``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(z, x, *, mask)")

    def initial(self, x: Any) -> Any:
        """Where a solve starts unless the layer is told otherwise: the input, for most updates."""
        return x

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """What ``forward`` is given for ``x`` during a solve: once a solve, gradients flow through it.

        An update that computes something from the input alone returns it here, in a pytree of
        tensors (B, ...), and takes both that and the plain input in ``forward``.
        """
        return x

    def joint(
        self, z: Any, x: Any = None, *, mask: Tensor | None = None
    ) -> tuple[Any, Tensor, Any | None]:
        """``(f(z), E(z), dE/dz)`` in one pass: like ``z``, (B,), like ``z`` or None."""
        raise NotImplementedError(f"{type(self).__name__} descends no energy")


class FunctionUpdate(Update):
    """A plain function ``fn(z)``, ``fn(z, x)`` or ``fn(z, x, mask=...)`` as an update.

    A module given as ``fn`` is registered, so that optimisers find its parameters.

    Args:
        function: what to iterate.
        symmetric: its Jacobian is symmetric.

    Raises:
        TypeError: if ``function`` cannot be called so.
    """

    def __init__(self, function: Callable[..., Any], *, symmetric: bool = False) -> None:
        super().__init__()
        if not callable(function):
            raise TypeError(f"function must be callable, got {function!r}")
        self.function = function
        self.symmetric = symmetric
        name = getattr(function, "__qualname__", type(function).__name__)
        self._takes_x, self._takes_mask = read_signature(function, name)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        arguments = (z, x) if self._takes_x else (z,)
        if self._takes_mask:
            return self.function(*arguments, mask=mask)
        if mask is not None:
            raise ValueError(
                "the update function takes no mask, so tokens that do not count would influence "
                f"it; give it a parameter mask or pass no mask, got {tuple(mask.shape)}"
            )
        return self.function(*arguments)
