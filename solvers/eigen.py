"""Eigenvalues of the Jacobian of a map or the Hessian of an energy, and the Jacobian penalty."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.func import vjp
from torch.utils import _pytree as pytree

from solvers.core.checks import (
    require_callable,
    require_choice,
    require_count,
    require_instance,
    require_number,
)
from solvers.core.context import constant_weights, modules_of
from solvers.core.device import small_dtype
from solvers.core.layout import Layout, check_args, check_mask, take
from solvers.core.modes import (
    eager,
    in_transform,
    ordinary,
    recording,
    twice_differentiable,
)
from solvers.core.problem import JacobianProduct, gradients, pullback
from solvers.core.purity import check_energy
from solvers.core.solution import check_on_failure, warn_or_raise
from solvers.core.telling import reduce_error

KINDS = ("map", "energy", "product")


class Linearization:
    """``J`` at a state ``z`` of B samples with D unknowns; see :func:`solvers.spectrum`."""

    def __init__(self, f: Callable[..., Any], z: Any, args: tuple[Any, ...], kind: str) -> None:
        require_choice("kind", kind, KINDS)
        self.layout = Layout.of(z, "z")
        self.size = sum(shape.numel() for shape in self.layout.shapes)
        self.f, self.kind, self.args = f, kind, args
        self.z = pytree.tree_map(Tensor.detach, z)
        first = pytree.tree_leaves(z)[0]
        self.batch, self.device = first.shape[0], first.device
        check_args(args, self.batch, self.device, "z", "f")
        self.eps = max(torch.finfo(dtype).eps for dtype in self.layout.dtypes)

    def part(self, number: int) -> Linearization:
        """Return the linearisation of one sample."""
        index = torch.tensor([number], device=self.device)
        z, args = take(self.z, index, self.batch), take(self.args, index, self.batch)
        return Linearization(self.f, z, args, self.kind)

    def product(self) -> JacobianProduct:
        """Return ``v -> J^T v`` ("map") or ``v -> J v`` for vectors (B, D)."""
        if self.kind == "product":
            return lambda v: self._image(self.f(self.z, self.layout.tree(v), *self.args))
        # Neither a compiled function nor fused attention can be differentiated twice.
        with recording(), constant_weights(modules_of(self.f)), twice_differentiable():
            point = self.layout.vector(ordinary(self.z)).detach().requires_grad_()
            output = self.f(self.layout.tree(point), *ordinary(self.args))
            if self.kind == "energy":
                check_energy(output, self.batch)
            else:
                output = self._image(output)
            if not output.requires_grad:
                raise ValueError(
                    "f(z) must be differentiable in z, got a result that does not require grad"
                )
            if self.kind == "energy":
                output = gradients(output.sum(), [point], create_graph=True)[0]
        return pullback(output, point)

    def _image(self, output: Any) -> Tensor:
        """Check that ``output`` is like z and return it as a matrix (n, D)."""
        leaves, spec = pytree.tree_flatten(output)
        if spec != self.layout.spec:
            raise TypeError(f"f must return the pytree structure {self.layout.spec}, got {spec}")
        for leaf, shape in zip(leaves, self.layout.shapes, strict=True):
            if not isinstance(leaf, Tensor) or leaf.shape[1:] != shape:
                came = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf)
                raise ValueError(f"f must return leaves of shape (B, *{tuple(shape)}), got {came}")
        return self.layout.vector(output)

    def dense(self) -> Tensor:
        """Return ``J`` (B, D, D), computed by D products with the whole batch."""
        product = self.product()
        units = torch.eye(self.size, dtype=self.layout.dtype, device=self.device)
        rows = [product(unit.repeat(self.batch, 1)).detach() for unit in units]
        # A pullback of the i-th unit vector is the i-th row, a product with it the i-th column.
        return torch.stack(rows, dim=1 if self.kind == "map" else 2)

    def require_symmetric(self) -> None:
        """Raise ValueError unless ``u.Jv = v.Ju`` for two random vectors."""
        if self.kind == "energy":
            return
        product = self.product()
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.size)
        u, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        images = [product(t.to(self.device, self.layout.dtype)).double().cpu() for t in (u, v)]
        scale = (images[0].norm(dim=1) + images[1].norm(dim=1)) * self.size**0.5
        asymmetry = ((u * images[1]).sum(1) - (v * images[0]).sum(1)).abs() / scale
        bad = asymmetry > self.eps**0.5
        if bool(bad.any()):
            samples = torch.nonzero(bad).flatten().tolist()
            raise ValueError(
                "the linearisation must be symmetric for extreme eigenvalues, got a relative "
                f"asymmetry of {asymmetry.nan_to_num(0).max().item():.1e} in samples {samples[:10]}"
            )


class SampleProduct:
    """Product of a NumPy vector (D,) with the linearisation of one sample; ``calls`` counts products."""

    def __init__(self, linear: Linearization) -> None:
        self._product, self._dtype = linear.product(), linear.layout.dtype
        self._device = linear.device
        self.calls = 0

    def __call__(self, vector: Any) -> numpy.ndarray:
        """Return the product; raise FloatingPointError if it is not finite."""
        if numpy.iscomplexobj(vector):
            return self(vector.real) + 1j * self(vector.imag)
        self.calls += 1
        sent = torch.from_numpy(numpy.ascontiguousarray(vector).reshape(1, -1))
        received = self._product(sent.to(self._device, self._dtype))
        image = received.detach().double().cpu().numpy().reshape(-1)
        if not numpy.isfinite(image).all():
            raise FloatingPointError("a Jacobian-vector product is not finite")
        return image


METHODS = ("auto", "dense", "arpack")
WHAT = ("largest_magnitude", "extremes")
# Up to this many unknowns all eigenvalues are computed: as many products as there are unknowns.
DENSE_SIZE = 64
FALLBACK_SIZE = 2048  # the same after a failure of ARPACK
BASIS = 64  # Krylov vectors between restarts of ARPACK
SPARE = 4  # additional eigenvalues, so that none is missed and no complex pair is split


class SpectrumError(RuntimeError):
    """Error that the eigenvalues of some samples did not converge, with the ``spectrum`` of all."""

    def __init__(self, message: str, spectrum: Spectrum) -> None:
        super().__init__(message)
        self.spectrum = spectrum

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_error(self, self.spectrum)


@dataclass
class Spectrum:
    """Eigenvalues per sample.

    Attributes:
        eigenvalues: (B, count) complex128, largest magnitude first; or (B, 2 count) float64, the
            ``count`` smallest and the ``count`` largest, ascending. NaN if not ``converged``.
        residual: (B,) float64, ``max |J v - lambda v| / max |lambda|`` over the eigenpairs with unit
            vectors v. For a symmetric J it bounds the error of the eigenvalues.
        converged: (B,) bool, whether all eigenvalues of the sample converged.
        products: (B,) int64, number of products with J or its transpose.
    """

    eigenvalues: Tensor
    residual: Tensor
    converged: Tensor
    products: Tensor


def spectrum(
    f: Callable[..., Any],
    z: Any,
    args: tuple[Any, ...] = (),
    *,
    what: str = "largest_magnitude",
    kind: str = "map",
    count: int = 1,
    method: str = "auto",
    tolerance: float | None = None,
    max_products: int | None = None,
    on_failure: str = "raise",
) -> Spectrum:
    """Return eigenvalues of ``J``, the linearisation of ``f`` at ``z``, for each sample.

    Autograd computes the products ``J^T v`` in the dtype of ``z`` (the transpose has the same
    eigenvalues); everything else is float64.

    Args:
        f: function to linearise, see ``kind``; samples must be independent.
        z: state, a tensor (B, ...) or a pytree of them.
        args: further inputs of ``f``, pytrees of tensors batched along dim 0. Samples are processed
            one at a time, so all batched tensors must be passed here.
        what: "largest_magnitude", or "extremes": the smallest and the largest eigenvalues of a
            symmetric ``J``.
        kind: "map": ``f(z, *args) -> like z``, J its Jacobian; "energy": ``f(z, *args) -> (B,)``, J
            its Hessian; "product": ``f(z, v, *args) -> like z`` is the product ``J v`` itself.
        count: number of eigenvalues (at each end).
        method: "dense" (all eigenvalues of the matrix, D products), "arpack" (implicitly restarted
            Arnoldi or Lanczos, for D >= 2 count + 3), or "auto": dense up to D = 64, else ARPACK,
            with dense as fallback for samples that fail if D <= 2048.
        tolerance: relative accuracy of ARPACK; default 100 eps of the dtype of z, between 1e-6
            and 0.01.
        max_products: maximum number of products per sample in ARPACK; default 20 D + 1000.
        on_failure: "raise", "warn" or "ignore" samples whose eigenvalues did not converge.

    Raises:
        TypeError, ValueError: if an argument is invalid, ``f`` is not differentiable in z, or
            "extremes" are requested and J is not symmetric.
        SpectrumError: if a sample did not converge and ``on_failure="raise"``.

    Source: Lehoucq, Sorensen and Yang, "ARPACK Users' Guide" (SIAM, 1998), as wrapped by scipy,
    https://doi.org/10.1137/1.9780898719628.
    """
    require_callable("f", f)
    require_choice("what", what, WHAT)
    require_choice("method", method, METHODS)
    if tolerance is not None:
        require_number("tolerance", tolerance, low=0.0, high=1.0)
    if max_products is not None:
        require_count("max_products", max_products)
    check_on_failure(on_failure)
    require_count("count", count)
    linear = Linearization(f, z, args, kind)
    symmetric = what == "extremes"
    if symmetric:
        linear.require_symmetric()
    dense = method == "auto" and linear.size <= FALLBACK_SIZE
    if method == "auto":
        method = "dense" if linear.size <= DENSE_SIZE else "arpack"
    wanted = 2 * count if symmetric else count
    smallest = wanted if method == "dense" else 2 * count + 3
    if linear.size < smallest:
        raise ValueError(
            f"count={count} with method={method!r} needs at least {smallest} unknowns per sample, "
            f"got {linear.size}"
        )
    if method == "dense":
        result = _dense(linear, count, symmetric)
    else:
        accuracy = min(max(100 * linear.eps, 1e-6), 0.01) if tolerance is None else tolerance
        budget = 20 * linear.size + 1000 if max_products is None else max_products
        samples = [
            _arpack(linear.part(sample), count, symmetric, accuracy, budget, dense)
            for sample in range(linear.batch)
        ]
        columns = zip(*(vars(sample).values() for sample in samples), strict=True)
        result = Spectrum(*(torch.cat(column) for column in columns))
    if not bool(result.converged.all()) and on_failure != "ignore":
        failed = torch.nonzero(~result.converged).flatten().tolist()
        message = (
            f"the eigenvalues of {len(failed)} of {linear.batch} samples did not converge (samples "
            f"{failed[:10]}): raise max_products or tolerance, use method='dense', or check f for NaN"
        )
        warn_or_raise(SpectrumError(message, result), on_failure, "eigenvalues")
    return result


def spectral_radius(
    f: Callable[..., Any],
    z: Any,
    args: tuple[Any, ...] = (),
    *,
    kind: str = "map",
    method: str = "auto",
    tolerance: float | None = None,
    max_products: int | None = None,
    on_failure: str = "raise",
) -> Tensor:
    """Return the spectral radius of the Jacobian of ``f`` at ``z``, (B,) float64.

    If it is below one, the iteration ``z <- f(z)`` converges locally, by about this factor per step.
    Arguments and errors are those of :func:`spectrum`.
    """
    result = spectrum(
        f,
        z,
        args,
        kind=kind,
        method=method,
        tolerance=tolerance,
        max_products=max_products,
        on_failure=on_failure,
    )
    return result.eigenvalues[:, 0].abs()


def extreme_eigenvalues(
    f: Callable[..., Any],
    z: Any,
    args: tuple[Any, ...] = (),
    *,
    kind: str = "energy",
    method: str = "auto",
    tolerance: float | None = None,
    max_products: int | None = None,
    on_failure: str = "raise",
) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest eigenvalue of the Hessian of an energy at ``z``, (B,) float64 each.

    A stationary point with a positive smallest eigenvalue is a strict minimum. ``kind="map"`` uses the
    symmetric Jacobian of a map, ``kind="product"`` a symmetric product ``f(z, v, *args)``. Arguments
    and errors are those of :func:`spectrum`.
    """
    result = spectrum(
        f,
        z,
        args,
        what="extremes",
        kind=kind,
        method=method,
        tolerance=tolerance,
        max_products=max_products,
        on_failure=on_failure,
    )
    return result.eigenvalues[:, 0], result.eigenvalues[:, -1]


def jacobian(
    f: Callable[..., Any], z: Any, args: tuple[Any, ...] = (), *, kind: str = "map"
) -> Tensor:
    """Return the dense Jacobian ``J[b, i, j] = d f_i / d z_j`` at ``z``, (B, D, D) in the dtype of z.

    The leaves of a pytree are flattened in order. The cost is D products for the whole batch. See
    :func:`spectrum` for ``kind``.
    """
    return Linearization(f, z, args, kind).dense()


def _dense(linear: Linearization, count: int, symmetric: bool) -> Spectrum:
    matrix = linear.dense().double().cpu().numpy()
    finite = numpy.isfinite(matrix).all(axis=(1, 2))
    matrix[~finite] = 0
    if symmetric:
        values, vectors = numpy.linalg.eigh((matrix + matrix.swapaxes(1, 2)) / 2)
        order = numpy.tile(numpy.r_[0:count, -count:0], (len(matrix), 1))
    else:
        values, vectors = numpy.linalg.eig(matrix)
        values = values.astype(complex)
        order = numpy.argsort(-numpy.abs(values), axis=1)[:, :count]
    values = numpy.take_along_axis(values, order % linear.size, axis=1)
    vectors = numpy.take_along_axis(vectors, order[:, None, :] % linear.size, axis=2)
    residual = _residual(matrix @ vectors, values, vectors)
    return _spectrum(linear, values, residual, finite, numpy.full(len(matrix), linear.size))


def _arpack(
    linear: Linearization, count: int, symmetric: bool, tolerance: float, budget: int, dense: bool
) -> Spectrum:
    """Return one sample's eigenvalues; ``dense`` allows the dense matrix as fallback."""
    failure = _scipy().ArpackError
    product = SampleProduct(linear)
    try:
        values, vectors = _eigenpairs(product, linear.size, count, symmetric, tolerance, budget)
        images = numpy.stack([product(v) for v in vectors.T], axis=1)
        residual, found = _residual(images[None], values[None], vectors[None]), True
    except (FloatingPointError, failure) as error:
        if dense and isinstance(error, failure):
            result = _dense(linear, count, symmetric)
            result.products += product.calls
            return result
        values = numpy.zeros(2 * count if symmetric else count)
        residual, found = numpy.zeros(1), False
    values = values if symmetric else values.astype(complex)
    calls = numpy.full(1, product.calls)
    return _spectrum(linear, values[None], residual, numpy.array([found]), calls)


def _scipy() -> Any:
    """Import ``scipy.sparse.linalg``, an optional dependency of this method."""
    try:
        return importlib.import_module("scipy.sparse.linalg")
    except ImportError as error:
        raise ImportError(
            f"method='arpack' needs scipy, which could not be imported ({error}): pip install scipy, "
            "or use method='dense'"
        ) from error


def _eigenpairs(
    product: SampleProduct, size: int, count: int, symmetric: bool, tolerance: float, budget: int
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return eigenvalues (k,), ordered as in :class:`Spectrum`, and unit eigenvectors (D, k) by ARPACK."""
    start = numpy.random.default_rng(0).standard_normal(size)
    wanted = 2 * count if symmetric else count
    if not product(start).any():  # ARPACK refuses the zero matrix
        vectors = numpy.repeat(start[:, None] / numpy.linalg.norm(start), wanted, axis=1)
        return numpy.zeros(wanted), vectors
    asked = min(wanted + SPARE, size - 2)
    basis = min(size, max(2 * asked + 1, BASIS))
    scipy = _scipy()
    find = scipy.eigsh if symmetric else scipy.eigs
    values, vectors = find(
        scipy.LinearOperator((size, size), matvec=product, dtype=numpy.float64),
        k=asked,
        which="BE" if symmetric else "LM",
        v0=start,
        ncv=basis,
        maxiter=max(1, budget // (basis - asked)),
        tol=tolerance,
    )
    if symmetric:
        order = numpy.argsort(values)
        order = numpy.concatenate([order[:count], order[-count:]])
    else:
        order = numpy.argsort(-numpy.abs(values))[:count]
    return values[order], vectors[:, order]


def _residual(
    images: numpy.ndarray, values: numpy.ndarray, vectors: numpy.ndarray
) -> numpy.ndarray:
    """Return ``max |J v - lambda v| / max |lambda|`` (B,) of arrays (B, D, k), (B, k), (B, D, k)."""
    error = numpy.linalg.norm(images - values[:, None, :] * vectors, axis=1).max(axis=1)
    scale = numpy.abs(values).max(axis=1)
    return numpy.divide(error, scale, out=numpy.where(error > 0, numpy.inf, 0), where=scale > 0)


def _spectrum(
    linear: Linearization,
    values: numpy.ndarray,
    residual: numpy.ndarray,
    converged: Any,
    products: numpy.ndarray,
) -> Spectrum:
    """Convert the arrays to tensors on the device of the state, NaN for samples that failed."""
    values = numpy.where(converged[:, None], values, numpy.nan)
    residual = numpy.where(converged, residual, numpy.nan)
    arrays = (values, residual, converged, products)
    return Spectrum(*(torch.from_numpy(array).to(linear.device) for array in arrays))


@eager
def jacobian_penalty(
    f: Callable[..., Any],
    z: Any,
    args: tuple[Any, ...] = (),
    *,
    mask: Any = None,
    samples: int | None = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the mean squared singular value ``|J|_F^2 / D`` of ``J = df/dz`` at ``z`` for each sample.

    It is estimated by Hutchinson's method: ``E |J^T v|^2 = |J|_F^2`` for random signs v, at the cost of one
    product with ``J^T`` per v. As a loss term it keeps the map contracting and the fixed point cheap to
    compute. Gradients flow to the tensors that ``f`` reads and to ``z``: pass the ``value`` of a solve for
    the full gradient, which includes the dependence of the fixed point on the weights, or
    ``value.detach()`` to hold the point fixed as in the paper.

    Args:
        f: map ``f(z, *args) -> like z``; samples must be independent.
        z: state, a tensor (B, ...) or a pytree of them, with D numbers per sample.
        args: further inputs of ``f``, pytrees of tensors batched along dim 0.
        mask: mask of :func:`solvers.fixed_point`: masked tokens are held constant and excluded from J
            and D.
        samples: number of random vectors, >= 1; None uses all D unit vectors, which is exact.
        generator: generator of the random vectors; None uses the global one of the device.

    Returns:
        (B,) in float32 or wider, not differentiable under ``no_grad`` and ``inference_mode``.

    Raises:
        TypeError, ValueError: if an argument is invalid or ``f`` is not differentiable in z.

    Source: Bai, Koltun, Kolter, "Stabilizing Equilibrium Models by Jacobian Regularization" (2021),
    section 4, https://arxiv.org/abs/2106.14342; Hutchinson, "A stochastic estimator of the trace of the
    influence matrix" (1990), https://doi.org/10.1080/03610919008812866.
    """
    require_callable("f", f)
    layout = Layout.of(z, "z")
    first = pytree.tree_leaves(z)[0]
    check_args(args, first.shape[0], first.device, "z", "f")
    if samples is not None:
        require_count("samples", samples)
    require_instance("generator", generator, torch.Generator, "a torch.Generator", optional=True)
    keep = None
    if mask is not None:
        check_mask(mask, layout, first.shape[0], first.device)
        keep = layout.mask_vector(mask)
    with recording(), constant_weights(modules_of(f)), twice_differentiable():
        total, products = None, 0
        point = layout.vector(ordinary(z))
        product = _product(f, layout, point, ordinary(args))
        wide = small_dtype(point.dtype)  # a sum of squares overflows in float16
        for v in _vectors(point, keep, samples, generator):
            image = product(v) if keep is None else torch.where(keep, product(v), 0)
            square = image.to(wide).square().sum(1)
            total = square if total is None else total + square
            products += 1
        assert total is not None
        size = point.shape[1] if keep is None else keep.sum(1).clamp_min(1)
        result = total / (size if samples is None else products * size)
    return result if torch.is_grad_enabled() else result.detach()


def _product(
    f: Callable[..., Any], layout: Layout, z: Tensor, args: tuple[Any, ...]
) -> JacobianProduct:
    """Return ``v -> J^T v`` for vectors (B, D), with a graph."""

    def mapped(z: Tensor) -> Tensor:
        output = layout.vector(f(layout.tree(z), *args))
        if output.shape != z.shape:
            raise ValueError(f"f must return the shape of z, {z.shape[1]} numbers per sample")
        return output

    if in_transform():  # nested autograd.grad is not supported there
        _, pull, *_ = vjp(mapped, z)
        return lambda v: pull(v)[0]
    point = z if z.requires_grad else z.detach().requires_grad_()
    output = mapped(point)
    if not output.requires_grad:
        raise ValueError("f(z) must be differentiable in z, got a result without a graph")
    return pullback(output, point, create_graph=True)


def _vectors(
    like: Tensor, keep: Tensor | None, samples: int | None, generator: torch.Generator | None
) -> Iterator[Tensor]:
    """Yield vectors (B, D) of random signs, or all unit vectors; zero at masked coordinates."""
    shape, device = like.shape, like.device
    for number in range(shape[1] if samples is None else samples):
        if samples is None:
            v = torch.zeros(shape, dtype=like.dtype, device=device)
            v[:, number] = 1
        else:
            # Drawing on the generator's device gives the same numbers on every device.
            home = device if generator is None else generator.device
            signs = torch.randint(0, 2, shape, generator=generator, device=home)
            v = (2 * signs - 1).to(device, like.dtype)
        yield v if keep is None else torch.where(keep, v, 0)
