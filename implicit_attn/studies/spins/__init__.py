"""Small spin models by enumeration, and the errors of mean-field theories on them."""

from __future__ import annotations
