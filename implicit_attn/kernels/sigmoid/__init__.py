"""Gradient, value and Hessian-vector product of the sigmoid attention energy."""
