"""What the tests of a package share."""

from __future__ import annotations
