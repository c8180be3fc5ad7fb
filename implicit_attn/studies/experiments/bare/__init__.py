"""Bare self-attention: couplings alone, learned by local rules."""
