"""Fixed-point methods: forward and gradient steps, Anderson, Broyden, L-BFGS, Newton, and the fallback."""
