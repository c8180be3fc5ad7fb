"""The native engine in C++, built with the package: turns of fixed points, linear systems, the bi-softmax.

- ``library``: which library is loaded, and its threads
- ``turns``: solves by ``Anderson`` and ``Forward``
- ``systems``: solves by ``GMRES`` and ``CG``

Without it everything is computed by torch.
"""
