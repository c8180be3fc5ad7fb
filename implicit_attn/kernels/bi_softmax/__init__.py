"""Gradient and Hessian-vector product of the bi-softmax attention energy."""
