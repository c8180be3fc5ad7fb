"""What every solve shares: the protocol of a solver, the loop, the problem, the solution."""

from __future__ import annotations
