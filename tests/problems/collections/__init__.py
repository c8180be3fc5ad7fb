"""Problems of other people's collections, in their own words: neither rescaled nor reordered."""

from __future__ import annotations
