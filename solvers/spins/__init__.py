"""Coupled vector spins: mean-field theories, samples, messages, saddle points, and spins in time."""
