"""Mean-field theories: free energies, samplers, spins in many dimensions."""
