"""The figures of the studies: one study a file, with what they share in ``canvas``."""

from __future__ import annotations
