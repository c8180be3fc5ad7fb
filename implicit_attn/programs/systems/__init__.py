"""Programs about small systems, seconds to minutes long; ``implicit-attn run NAME`` runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solvers.lazy import lazy_names

if TYPE_CHECKING:
    from implicit_attn.programs.systems import (
        bare_attention,
        easy_to_hard,
        hopfield_density,
        potts_recovery,
        sudoku_potts,
        tap_vs_exact,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "implicit_attn.programs.systems.bare_attention": "",
            "implicit_attn.programs.systems.easy_to_hard": "",
            "implicit_attn.programs.systems.hopfield_density": "",
            "implicit_attn.programs.systems.potts_recovery": "",
            "implicit_attn.programs.systems.sudoku_potts": "",
            "implicit_attn.programs.systems.tap_vs_exact": "",
        },
    )

__all__ = [
    "bare_attention",
    "easy_to_hard",
    "hopfield_density",
    "potts_recovery",
    "sudoku_potts",
    "tap_vs_exact",
]
