"""What keeps a result honest: how failures are told, which functions have no fixed point.

- ``telling``: warnings at the user's line, errors that travel between processes
- ``purity``: what f must return, and must not do: overwrite, draw random numbers, couple its samples
- ``reading``: what was read of modules in a solve
- ``growth``: samples whose energy falls without bound

They stand below the rest of the core and import none of it but ``device`` and ``layout``.
"""

from __future__ import annotations
