"""Coupled vector spins: mean-field theories, Gibbs sampling, belief propagation, saddle points, dynamics."""
