"""Extreme eigenpairs of one matrix, given its products, by scipy's ARPACK."""

from __future__ import annotations

from typing import Any

import numpy
from scipy.sparse.linalg import LinearOperator, eigs, eigsh

from solvers.eigen.linearization import SampleProduct

BASIS = 64  # Krylov vectors between restarts
SPARE = 4  # further eigenvalues asked for, so that none is missed and no complex pair is cut


def eigenpairs(
    product: SampleProduct, size: int, count: int, symmetric: bool, tolerance: float, budget: int
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Eigenvalues (k,) and unit eigenvectors (D, k).

    Args:
        product: the matrix (D, D), D = ``size``.
        count: k eigenvalues of largest magnitude, largest first; or, where ``symmetric``, as many
            at either end of the spectrum, ascending.
        tolerance: relative accuracy asked of ARPACK.
        budget: products that the restarts may take.

    Raises:
        scipy.sparse.linalg.ArpackError: if it did not converge.
        FloatingPointError: if a product is not finite.
    """
    start = numpy.random.default_rng(0).standard_normal(size)
    wanted = 2 * count if symmetric else count
    if not product(start).any():  # ARPACK refuses the zero matrix
        vectors = numpy.repeat(start[:, None] / numpy.linalg.norm(start), wanted, axis=1)
        return numpy.zeros(wanted), vectors
    asked = min(wanted + SPARE, size - 2)
    basis = min(size, max(2 * asked + 1, BASIS))
    options: dict[str, Any] = {
        "k": asked,
        "v0": start,
        "ncv": basis,
        "maxiter": max(1, budget // (basis - asked)),
        "tol": tolerance,
    }
    build: Any = LinearOperator  # the annotations of scipy lag behind what these three take
    find: Any = eigsh if symmetric else eigs
    operator = build((size, size), matvec=product, dtype=numpy.float64)
    values, vectors = find(operator, which="BE" if symmetric else "LM", **options)
    if not symmetric:
        order = numpy.argsort(-numpy.abs(values))[:count]
    else:
        order = numpy.argsort(values)
        order = numpy.concatenate([order[:count], order[-count:]])
    return values[order], vectors[:, order]
