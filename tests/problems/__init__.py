"""The problem zoo: fixed-point problems with known answers."""

from __future__ import annotations
