"""Bare self-attention: couplings between positions, no queries, keys or values of their own."""
