"""Solves and adjoints by compiled programs."""

from __future__ import annotations
