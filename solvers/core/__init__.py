"""What all solves share: argument checks, the problem, the protocol of a solver, the loop."""
