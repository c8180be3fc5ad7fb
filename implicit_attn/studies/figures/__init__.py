"""The figures of the studies, one study a file."""

from __future__ import annotations
