"""Programs that tests start as processes of their own."""

from __future__ import annotations
