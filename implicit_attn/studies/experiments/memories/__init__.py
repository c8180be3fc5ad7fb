"""Associative memories: capacity, kinds of fixed points, the density of a memory."""
