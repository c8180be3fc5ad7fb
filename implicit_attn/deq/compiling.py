"""Layers whose solves are compiled."""

from __future__ import annotations

from typing import Any

from torch import nn

import solvers
from solvers.compiled.programs import Programs

TRACEABLE = (solvers.Anderson, solvers.Broyden, solvers.Forward, solvers.LBFGS)


class Compilable(nn.Module):
    """The part of a DEQ that compiles it."""

    update: Any
    solver: solvers.Solver | None
    _programs: Programs | None = None

    def compile(  # type: ignore[override]
        self,
        *,
        backend: Any = "inductor",
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        block: int = 4,
    ) -> None:
        """Compile the solves of this layer and their gradients; the layer is used as before.

        On CPUs an evaluation of the update and a product with its Jacobian become one program each; what
        depends on weights and inputs alone is computed once a solve. The steps of ``Anderson``, ``Forward``
        and ``GMRES`` are made by a kernel in C++. Elsewhere, with other solvers, and where there is no C++
        compiler, update, products and the solver's own algebra become programs of ``block`` evaluations, with
        one look at the residuals after each. What the update prepares of its input, with its gradient, is
        another program, unless it cannot be traced. Every sample has the value, status and counts that it
        has without; what is out of the ordinary (a rejected step, a value that is not finite, a stalled
        sample, second derivatives) is computed as without, too.

        The first solve of a kind makes its programs: of new shapes, dtypes or devices, masked or not,
        training or not. With Inductor this takes some seconds, up to a minute for blocks, and about one
        where its cache on disk knows them. A batch that fills half of a known size is padded to it. The
        update must state its step by torch's operators alone and read no tensors but parameters, buffers
        and its arguments; another tensor, random numbers, and a weight that changes at every evaluation
        raise.

        Solves with ``record``, ``callback`` or ``states_at``, with ``Unrolled``, with a solver given for
        the call that cannot be compiled, and inside of ``torch.func``'s transforms are as without.

        Args:
            backend, mode, options: as of ``torch.compile``; "eager" traces without compiling; None: no
                longer compiled.
            block: evaluations between two looks, >= 1.

        Raises:
            TypeError, ValueError: for arguments that do not fit, or a solver that cannot be compiled.
        """
        self._programs = None
        if backend is not None:
            _check_solver(self.solver)
            self._programs = Programs(
                self.update, backend=backend, mode=mode, options=options, block=block
            )

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


def _check_solver(solver: solvers.Solver | None) -> None:
    """Raise ValueError for a solver whose steps cannot be traced."""
    if solver is not None and not solver.traceable:
        names = ", ".join(kind.__name__ for kind in TRACEABLE)
        raise ValueError(f"solver cannot be compiled: {solver!r}; those that can are {names}")
