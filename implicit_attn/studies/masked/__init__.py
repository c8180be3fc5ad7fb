"""Reconstruction of hidden patches by the number of iterations, beside fillings that learn nothing."""
