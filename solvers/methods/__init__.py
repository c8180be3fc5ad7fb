"""Fixed-point methods: forward and gradient steps, Anderson, Broyden, L-BFGS, Newton; second attempts."""
