"""What keeps a result honest: how failures are told, which functions have no fixed point.

- ``telling``: warnings at the user's line, errors that travel between processes
- ``outputs``: what f must return
- ``purity``: functions that overwrite their input
- ``lean``: evaluations with few calls around them
- ``randomness``: functions that draw random numbers
- ``reading``: what was read of modules in a solve
- ``norms``: norms that couple the batch or learn from it
- ``growth``: samples whose energy falls without bound

They stand below the rest of the core and import none of it but ``arrays`` and ``layout``.
"""

from __future__ import annotations
