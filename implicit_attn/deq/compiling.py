"""Layers whose solves are compiled."""

from __future__ import annotations

from typing import Any

from torch import nn

from solvers.compiled.programs import Programs


class Compilable(nn.Module):
    """The part of a DEQ that compiles it."""

    update: Any
    _programs: Programs | None = None

    def compile(  # type: ignore[override]
        self,
        *,
        backend: Any = "inductor",
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Compile the evaluations of this layer and their gradients; the layer is used as before.

        An evaluation of the update (with its energy and the energy's gradient, where there is one) and a
        product with its Jacobian become one program each; what depends on weights and inputs alone is
        computed once a solve. What the update prepares of its input, with its gradient, is another program,
        unless it cannot be traced. The solve itself is the ordinary one, with any solver: every sample has
        the value, status and counts that it has without, but for rounding.

        The first solve of a kind makes its programs: of new shapes, dtypes or devices, masked or not,
        training or not. With Inductor this takes some seconds, and about one where its cache on disk knows
        them. A batch that fills half of a known size is padded to it. The update must state its step by
        torch's operators alone and read no tensors but parameters, buffers and its arguments; another
        tensor, random numbers, and a weight that changes at every evaluation raise.

        Solves with ``Unrolled`` and inside of ``torch.func``'s transforms are as without.

        Args:
            backend, mode, options: as of ``torch.compile``; "eager" traces without compiling; None: no
                longer compiled.

        Raises:
            TypeError, ValueError: for arguments that do not fit.
        """
        self._programs = None
        if backend is not None:
            self._programs = Programs(self.update, backend=backend, mode=mode, options=options)

    def programs(self) -> Programs | None:
        """Those of the update that the layer has now; None where it is not compiled."""
        made = self._programs
        if made is not None and made.module is not self.update:
            made = self._programs = made.of(self.update)
        return made


def compile_layers(model: nn.Module, **options: Any) -> int:
    """Compile every DEQ in ``model`` by :meth:`implicit_attn.DEQ.compile`, with its options; how many.

    Raises:
        ValueError: there is none.
    """
    layers = [module for module in model.modules() if isinstance(module, Compilable)]
    if not layers:
        raise ValueError(f"model must hold a DEQ, got a {type(model).__name__} without")
    for layer in layers:
        layer.compile(**options)
    return len(layers)
