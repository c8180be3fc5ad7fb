"""Code in C++ that is compiled on the user's machine at its first use: for all kernels on CPUs."""
