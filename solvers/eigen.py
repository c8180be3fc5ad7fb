"""The Jacobian of a map or the Hessian of an energy at a state: eigenvalues, and the size as a loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.func import vjp

from solvers.core.argument_names import hint_names
from solvers.core.checks import (
    require_callable,
    require_choice,
    require_count,
    require_instance,
    require_number,
)
from solvers.core.layout import Layout, check_args, leaves_of
from solvers.core.messages import reduce_error, warn_user
from solvers.core.modes import eager, in_transform, ordinary, recording, twice_differentiable
from solvers.core.problem import JacobianProduct, Problem, check_energy, gradients, pullback
from solvers.core.rows import small_dtype
from solvers.core.solution import SolveWarning, check_on_failure


@dataclass
class Linearization:
    """``J`` at B samples with D unknowns; :func:`solvers.spectrum` has the arguments."""

    kind: str
    problem: Problem
    z: Tensor  # (B, D)

    @classmethod
    def at(
        cls, f: Callable[..., Any], z: Any, args: tuple[Any, ...], kind: str, mask: Any = None
    ) -> Linearization:
        """Check the arguments."""
        require_callable("f", f)
        require_choice("kind", kind, ("map", "energy", "product"))
        layout, first = Layout.of(z, "z"), leaves_of(z)[0]
        check_args(args, len(first), first.device, "z", "f")
        return cls(kind, Problem.of(f, None, z, args, mask, True, layout), layout.vector(z))

    @property
    def eps(self) -> float:
        return max(torch.finfo(dtype).eps for dtype in self.problem.layout.dtypes)

    def sample(self, number: int) -> Linearization:
        """The linearisation of one sample."""
        index = torch.tensor([number], device=self.z.device)
        return replace(self, z=self.z[index], problem=self.problem.rows(index, len(self.z)))

    def product(self, *, create_graph: bool = False) -> JacobianProduct:
        """``v -> J^T v`` ("map") or ``J v``, for vectors (B, D); with a graph on request."""
        product, keep = self._product(create_graph), self.problem.mask
        # Masked coordinates are constant, so that their rows and columns are zero.
        return product if keep is None else lambda v: torch.where(keep, product(v * keep), 0)

    def _product(self, create_graph: bool) -> JacobianProduct:
        problem, f, tree = self.problem, self.problem.f, self.problem.layout.tree
        if self.kind == "product":
            z = tree(self.z.detach())
            return replace(problem, f=lambda v, *args: f(z, v, *args)).image
        # Neither a compiled function nor fused attention can be differentiated twice.
        with recording(), twice_differentiable():
            problem, point = replace(problem, args=ordinary(problem.args)), ordinary(self.z)
            if in_transform():  # whose tensors know no nested autograd.grad
                pull = vjp(problem.image, point)[1]
                return lambda v: pull(v)[0]
            if not (create_graph and point.requires_grad):
                point = point.detach().requires_grad_()
            if self.kind == "energy":
                output = f(tree(point), *problem.args)
                check_energy(output, len(point))
            else:
                output = problem.image(point)
            if not output.requires_grad:
                raise ValueError("f(z) must depend on z through autograd, got no gradient")
            if self.kind == "energy":
                output = gradients(output.sum(), [point], create_graph=True)[0]
        return pullback(output, point, create_graph=create_graph)

    def dense(self) -> Tensor:
        """``J`` (B, D, D), by D products with the whole batch."""
        product = self.product()
        units = torch.eye(self.z.shape[1], dtype=self.z.dtype, device=self.z.device)
        rows = [product(unit.repeat(len(self.z), 1)).detach() for unit in units]
        if not rows:
            return self.z.new_zeros(len(self.z), 0, 0)
        # A pullback of the i-th unit vector is the i-th row, a product with it the i-th column.
        return torch.stack(rows, dim=1 if self.kind == "map" else 2)

    def require_symmetric(self) -> None:
        """Raise ValueError unless ``u.Jv = v.Ju`` for two random vectors; two products."""
        product, generator = self.product(), torch.Generator().manual_seed(0)
        u, v = torch.randn((2, *self.z.shape), generator=generator, dtype=torch.float64)
        of_u, of_v = (product(t.to(self.z)).double().cpu() for t in (u, v))
        scale = (of_u.norm(dim=1) + of_v.norm(dim=1)) * self.z.shape[1] ** 0.5
        asymmetry = ((u * of_v).sum(1) - (v * of_u).sum(1)).abs() / scale
        bad = asymmetry > self.eps**0.5
        if bool(bad.any()):
            raise ValueError(
                "f must be symmetric for what='extremes', got a relative asymmetry of "
                f"{asymmetry[bad].max():.1e} in samples {bad.nonzero().flatten().tolist()[:10]}"
            )


# Up to this many unknowns all eigenvalues are computed: as many products as there are unknowns.
DENSE_SIZE = 64
RESCUE_SIZE = 2048  # and up to this many where ARPACK has failed
BASIS = 64  # Krylov vectors between restarts of ARPACK
SPARE = 4  # further eigenvalues asked for, so that none is missed and no complex pair is cut


class SpectrumError(RuntimeError):
    """Eigenvalues of some samples were not found; ``spectrum`` has the others."""

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
            ``count`` smallest and the ``count`` largest, ascending. NaN where not ``converged``.
        residual: (B,) float64, ``max |J v - lambda v| / max |lambda|`` over the eigenpairs, v of
            norm one. For a symmetric J it bounds the error of the eigenvalues.
        converged: (B,) bool.
        products: (B,) int64, products with J (or its transpose) that the sample took.
    """

    eigenvalues: Tensor
    residual: Tensor
    converged: Tensor
    products: Tensor


def spectrum(
    f: Callable[..., Any], z: Any, args: tuple[Any, ...] = (), *, what: str = "largest_magnitude",
    kind: str = "map", count: int = 1, method: str = "auto", tolerance: float | None = None,
    max_products: int | None = None, on_failure: str = "raise", mask: Any = None,
) -> Spectrum:  # fmt: skip
    """Eigenvalues of ``J``, the linearisation of ``f`` at ``z``, sample by sample.

    Products are computed in the dtype of ``z`` by autograd (``J^T v``: the transpose has the same
    eigenvalues), everything else in float64.

    Args:
        f: the function that is linearised, see ``kind``; each sample on its own.
        z: state, a tensor (B, ...) or a pytree of them.
        args: further inputs of ``f``, pytrees of tensors batched along dim 0.
        what: "largest_magnitude", 0 for samples without unknowns; or the smallest and the largest,
            "extremes", of a symmetric ``J``.
        kind: "map": ``f(z, *args) -> like z``, J its Jacobian; "energy": ``f(z, *args) -> (B,)``, J
            its Hessian; "product": ``f(z, v, *args) -> like z`` is the product ``J v`` itself.
        count: eigenvalues wanted (at each end).
        method: "dense" (all eigenvalues of the matrix, D products), "arpack" (implicitly restarted
            Arnoldi or Lanczos, for D >= 2 count + 3), or "auto": dense up to D = 64; above ARPACK,
            and dense for the samples on which it fails if D <= 2048.
        tolerance: relative accuracy of ARPACK; default 100 eps of z, but within [1e-6, 0.01].
        max_products: bound on the restarts of ARPACK, in products per sample; default 20 D + 1000.
        on_failure: about samples whose eigenvalues were not found: "raise", "warn" or "ignore".
        mask: as for :func:`solvers.fixed_point`; masked tokens are held constant, with eigenvalues of zero.

    Raises:
        TypeError, ValueError: for arguments that do not fit; if ``f`` does not depend on z through
            autograd; if J is not symmetric for "extremes".
        SpectrumError: under "raise", if a sample did not converge.

    Source: Lehoucq, Sorensen and Yang, "ARPACK Users' Guide" (SIAM, 1998), as wrapped by scipy,
    https://doi.org/10.1137/1.9780898719628.
    """
    require_choice("what", what, ("largest_magnitude", "extremes"))
    require_choice("method", method, ("auto", "dense", "arpack"))
    if tolerance is not None:
        require_number("tolerance", tolerance, low=0.0, high=1.0)
    if max_products is not None:
        require_count("max_products", max_products)
    check_on_failure(on_failure)
    require_count("count", count)
    linear, symmetric = Linearization.at(f, z, args, kind, mask), what == "extremes"
    batch, size = linear.z.shape
    if symmetric and kind != "energy":
        linear.require_symmetric()
    empty = linear.z.numel() == 0
    dense = method == "dense" or empty or (method == "auto" and size <= DENSE_SIZE)
    smallest = (2 * count if symmetric else count) if dense else 2 * count + 3
    if size < smallest and (size or symmetric):
        raise ValueError(
            f"count={count} with method={'dense' if dense else 'arpack'!r} needs at least {smallest} "
            f"unknowns per sample, got {size}"
        )
    if dense:
        found = [_dense(linear, count, symmetric)]
    else:
        accuracy = min(max(100 * linear.eps, 1e-6), 0.01) if tolerance is None else tolerance
        budget = 20 * size + 1000 if max_products is None else max_products
        rescue = method == "auto" and size <= RESCUE_SIZE
        each = map(linear.sample, range(batch))
        found = [_arpack(one, count, symmetric, accuracy, budget, rescue) for one in each]
    values, residual, converged, products = map(numpy.concatenate, zip(*found, strict=True))
    values[~converged], residual[~converged] = numpy.nan, numpy.nan
    arrays = (values if symmetric else values.astype(complex), residual, converged, products)
    result = Spectrum(*(torch.from_numpy(array).to(linear.z.device) for array in arrays))
    if not converged.all() and on_failure != "ignore":
        failed = numpy.flatnonzero(~converged).tolist()
        message = (
            f"eigenvalues of {len(failed)} of {batch} samples were not found, samples "
            f"{failed[:10]}: raise max_products or tolerance, use method='dense', or look for NaN in f"
        )
        if on_failure == "raise":
            raise SpectrumError(message, result)
        warn_user(message, SolveWarning)
    return result


@partial(hint_names, passed=spectrum)
def spectral_radius(
    f: Callable[..., Any], z: Any, args: tuple[Any, ...] = (), **options: Any
) -> Tensor:
    """Largest ``|eigenvalue|`` of the Jacobian of ``f`` at ``z``, (B,) float64.

    Below one, the iteration ``z <- f(z)`` converges locally, by about this factor a step.
    Options and errors are those of :func:`spectrum`.
    """
    return spectrum(f, z, args, **options).eigenvalues[:, 0].abs()


@partial(hint_names, passed=spectrum)
def extreme_eigenvalues(
    f: Callable[..., Any], z: Any, args: tuple[Any, ...] = (), *, kind: str = "energy", **options: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Smallest and largest eigenvalue of the Hessian of an energy at ``z``, each (B,) float64.

    A smallest eigenvalue above zero at a stationary point makes it a strict minimum. ``kind`` may also
    be "map" or "product" if that is symmetric. Options and errors are those of :func:`spectrum`.
    """
    values = spectrum(f, z, args, what="extremes", kind=kind, **options).eigenvalues
    return values[:, 0], values[:, -1]


def jacobian(
    f: Callable[..., Any], z: Any, args: tuple[Any, ...] = (), *, kind: str = "map"
) -> Tensor:
    """The dense linearisation ``J[b, i, j] = d f_i / d z_j`` at ``z``, (B, D, D), in z's dtype.

    Takes D products for the whole batch. Pytrees are flattened. ``kind`` is that of :func:`spectrum`.
    """
    return Linearization.at(f, z, args, kind).dense()


Arrays = tuple[Any, ...]  # NumPy: eigenvalues (B, k), then (B,): residual, converged, products


def _dense(linear: Linearization, count: int, symmetric: bool) -> Arrays:
    matrix = linear.dense().double().cpu().numpy()
    if not matrix.shape[1]:
        matrix = numpy.zeros((len(matrix), count, count))
    finite = numpy.isfinite(matrix).all(axis=(1, 2))
    matrix[~finite] = 0
    find = numpy.linalg.eigh if symmetric else numpy.linalg.eig
    pairs = find((matrix + matrix.swapaxes(1, 2)) / 2 if symmetric else matrix)
    values, residual = _wanted(*pairs, lambda vectors: matrix @ vectors, count, symmetric)
    return values, residual, finite, numpy.full(len(matrix), matrix.shape[1])


def _arpack(
    linear: Linearization, count: int, symmetric: bool, tolerance: float, budget: int, rescue: bool
) -> Arrays:
    """One sample's eigenvalues; ``rescue`` computes the whole matrix where ARPACK fails."""
    try:
        scipy = importlib.import_module("scipy.sparse.linalg")  # which nothing else here needs
    except ImportError as error:
        raise ImportError(
            f"method='arpack' needs scipy, which could not be imported ({error}): pip install scipy, or "
            "use method='dense'"
        ) from error
    product, size, calls = linear.product(), linear.z.shape[1], 0

    def image(vector: Any) -> numpy.ndarray:
        nonlocal calls
        if numpy.iscomplexobj(vector):
            return image(vector.real) + 1j * image(vector.imag)
        calls += 1
        sent = torch.from_numpy(numpy.ascontiguousarray(vector).reshape(1, size))
        received = product(sent.to(linear.z))
        if not bool(received.isfinite().all()):
            raise FloatingPointError("a product with the Jacobian is not finite")
        return received.detach().double().cpu().numpy()[0]

    wanted = 2 * count if symmetric else count
    asked = min(wanted + SPARE, size - 2)
    basis = min(size, max(2 * asked + 1, BASIS))
    start, found = numpy.random.default_rng(0).standard_normal(size), numpy.ones(1, bool)
    values, residual = numpy.zeros((1, wanted)), numpy.zeros(1)
    find, which = (scipy.eigsh, "BE") if symmetric else (scipy.eigs, "LM")
    operator = scipy.LinearOperator((size, size), matvec=image, dtype=numpy.float64)
    restarts = max(1, budget // (basis - asked))
    try:
        if image(start).any():  # ARPACK refuses the zero matrix
            given = {"v0": start, "ncv": basis, "maxiter": restarts, "tol": tolerance}
            values, vectors = find(operator, asked, which=which, **given)
            pairs = values[None], vectors[None]
            values, residual = _wanted(*pairs, lambda v: operator @ v[0], count, symmetric)
    except (FloatingPointError, scipy.ArpackError) as error:
        if rescue and isinstance(error, scipy.ArpackError):
            values, residual, found, products = _dense(linear, count, symmetric)
            return values, residual, found, products + calls
        found = ~found
    return values, residual, found, numpy.full(1, calls)


def _wanted(values: Any, vectors: Any, image: Any, count: int, symmetric: bool) -> Arrays:
    """The eigenvalues (B, k) that were asked for, in order, and their residual as in :class:`Spectrum`."""
    order = numpy.argsort(values if symmetric else -numpy.abs(values), axis=1)
    order = order[:, numpy.r_[0:count, -count:0] if symmetric else numpy.r_[0:count]]
    values = numpy.take_along_axis(values, order, axis=1)
    vectors = numpy.take_along_axis(vectors, order[:, None, :], axis=2)
    error = numpy.linalg.norm(image(vectors) - values[:, None, :] * vectors, axis=1).max(axis=1)
    scale = numpy.abs(values).max(axis=1)
    infinite = numpy.where(error > 0, numpy.inf, 0)
    return values, numpy.divide(error, scale, out=infinite, where=scale > 0)


@eager
def jacobian_penalty(
    f: Callable[..., Any], z: Any, args: tuple[Any, ...] = (), *, mask: Any = None,
    samples: int | None = 1, generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Mean square of the singular values of ``J = df/dz`` at ``z``, ``|J|_F^2 / D``, for each sample.

    Hutchinson's estimate: with random signs v, ``E |J^T v|^2 = |J|_F^2``; one product with ``J^T`` for each
    v. Added to a loss it keeps the map contracting, so that its fixed point stays cheap to find. With the
    ``value`` of a solve as ``z``, the fixed point moves with the weights; with ``value.detach()`` it is held
    fixed, as in the paper.

    Args:
        f: ``f(z, *args)``, like z, each sample on its own.
        z: state, a tensor (B, ...) or a pytree of them, D numbers a sample.
        args: further inputs of ``f``, pytrees of tensors batched along dim 0.
        mask: as for :func:`solvers.fixed_point`; masked tokens are held constant and do not count.
        samples: random vectors, >= 1; None: all D unit vectors, which is exact.
        generator: of the random vectors; None: torch's global one of the device.

    Returns:
        (B,) in float32 or wider, not differentiable under ``no_grad`` and ``inference_mode``.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument; if ``f`` does not
            depend on z through autograd.

    Source: Bai, Koltun, Kolter (2021), section 4, https://arxiv.org/abs/2106.14342; Hutchinson (1990),
    https://doi.org/10.1080/03610919008812866.
    """
    if samples is not None:
        require_count("samples", samples)
    require_instance("generator", generator, torch.Generator, "a torch.Generator", optional=True)
    with recording():
        linear = Linearization.at(f, z, args, "map", ordinary(mask))
        shape, device, dtype = linear.z.shape, linear.z.device, linear.z.dtype
        if samples is None:
            vectors = torch.eye(shape[1], dtype=dtype, device=device)[:, None].expand(-1, *shape)
        else:
            # On the generator's device, so that its numbers are the same for every device of z.
            home = device if generator is None else generator.device
            signs = 2 * torch.randint(0, 2, (samples, *shape), generator=generator, device=home) - 1
            vectors = signs.to(device, dtype)
        images = map(linear.product(create_graph=True), vectors)
        # A sum of squares overflows in float16.
        squares = [image.to(small_dtype(dtype)).square().sum(1) for image in images]
        nothing = torch.zeros(shape[0], dtype=small_dtype(dtype), device=device)
        keep = linear.problem.mask
        counted = max(shape[1], 1) if keep is None else keep.sum(1).clamp_min(1)
        result = sum(squares, nothing) / (counted * (samples or 1))
    return result if torch.is_grad_enabled() else result.detach()
