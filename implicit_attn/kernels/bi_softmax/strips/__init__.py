"""Bi-softmax by strips of rows: stock operators, any device, no N x N matrix."""
