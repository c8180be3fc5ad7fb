"""Spins in time: kinetic Ising and vector spins, and small pictures of spins."""
