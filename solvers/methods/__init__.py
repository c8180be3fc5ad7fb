"""The fixed-point methods, one a file: forward, gradient, Anderson, Broyden, L-BFGS, Newton."""

from __future__ import annotations
