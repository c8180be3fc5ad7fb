"""Programs that train models; ``implicit-attn train NAME`` runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solvers.lazy import lazy_names

if TYPE_CHECKING:
    from implicit_attn.programs import (
        classify,
        language_model,
        masked_images,
        mnist_spins,
        solve_sudoku,
        sudoku,
        systems,
        vit_images,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "implicit_attn.programs.classify": "",
            "implicit_attn.programs.language_model": "",
            "implicit_attn.programs.masked_images": "",
            "implicit_attn.programs.mnist_spins": "",
            "implicit_attn.programs.solve_sudoku": "",
            "implicit_attn.programs.sudoku": "",
            "implicit_attn.programs.systems": "",
            "implicit_attn.programs.vit_images": "",
        },
    )

__all__ = [
    "classify",
    "language_model",
    "masked_images",
    "mnist_spins",
    "solve_sudoku",
    "sudoku",
    "systems",
    "vit_images",
]
