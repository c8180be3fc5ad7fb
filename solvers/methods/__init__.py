"""Fixed-point methods, one per file: forward, gradient, Anderson, Broyden, L-BFGS, Newton."""

from __future__ import annotations
