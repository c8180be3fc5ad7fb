"""Potts models: couplings recovered from samples."""
