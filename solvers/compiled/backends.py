"""The options of ``torch.compile`` that programs take."""

from __future__ import annotations

from typing import Any

import torch

from solvers.core.checks import require_choice, require_instance

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check_backend(backend: Any, mode: Any, options: Any) -> None:
    """Raise TypeError or ValueError unless these are a backend of torch and belong together."""
    if not callable(backend):
        names = torch.compiler.list_backends(exclude_tags=())
        require_choice("backend", backend, ["eager", *(n for n in names if n != "eager")])
    if mode is not None:
        require_choice("mode", mode, MODES)
    require_instance("options", options, dict, "a dict of options of Inductor", optional=True)
    if backend != "inductor" and (mode is not None or options):
        raise ValueError(
            f'mode and options belong to backend="inductor", got backend={backend!r}, mode={mode!r}, '
            f"options={options!r}"
        )
