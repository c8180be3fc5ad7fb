"""Eigenvalues of Jacobians and Hessians."""

from __future__ import annotations
