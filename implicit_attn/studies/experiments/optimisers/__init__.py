"""Optimisers: attention forms as methods of descent, and learning by local rules."""
