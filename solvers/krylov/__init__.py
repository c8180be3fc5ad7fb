"""Krylov methods for batches of linear systems ``A x = b``, from products with ``A`` alone.

- ``solve``: :func:`solvers.solve_linear`
- ``loop``: the loop of a solve: cycles of a method and their results, verified residuals, statuses
- ``product``: the products with ``A`` and the scaled right-hand sides
- ``method``: the interface of the methods
- ``cg``, ``minres``, ``gmres``: the methods
"""

from __future__ import annotations
