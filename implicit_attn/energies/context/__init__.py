"""What energies make of the layer's input: computed once a solve, and given to every evaluation."""
