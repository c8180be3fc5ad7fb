"""Functions and methods of users as energies and updates: which arguments they take."""

from __future__ import annotations
