"""The C++ kernel of the bi-softmax on CPUs, compiled on the user's machine at its first use."""
