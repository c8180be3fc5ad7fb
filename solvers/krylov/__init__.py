"""Linear systems known by their products: CG, MINRES, GMRES and the loop around them."""

from __future__ import annotations
