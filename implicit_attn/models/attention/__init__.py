"""Attention layers that descend the energy of their queries."""
