"""Models of tasks on lattices of cells."""
