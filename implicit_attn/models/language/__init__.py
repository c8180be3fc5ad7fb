"""Causal language models: unrolled, as one block at its fixed point, and text from them."""
