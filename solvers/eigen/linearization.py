"""Products with the Jacobian of a map, the Hessian of an energy, or a given linear map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.core.checks import require_choice
from solvers.core.guards.purity import check_energy
from solvers.core.jacobian import JacobianProduct, gradients, pullback
from solvers.core.layout import Layout, check_args, take
from solvers.core.modes import constant_weights, ordinary, recording, uncompiled

KINDS = ("map", "energy", "product")


class Linearization:
    """``J`` at a state ``z`` of B samples with D unknowns; :func:`solvers.spectrum` has the arguments."""

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
        """The linearisation of one sample."""
        index = torch.tensor([number], device=self.device)
        z, args = take(self.z, index, self.batch), take(self.args, index, self.batch)
        return Linearization(self.f, z, args, self.kind)

    def product(self) -> JacobianProduct:
        """``v -> J^T v`` ("map") or ``J v``, for vectors (B, D)."""
        if self.kind == "product":
            return lambda v: self._image(self.f(self.z, self.layout.tree(v), *self.args))
        # A compiled function could not be differentiated several times.
        with recording(), constant_weights(), uncompiled():
            point = self.layout.vector(ordinary(self.z)).detach().requires_grad_()
            output = self.f(self.layout.tree(point), *ordinary(self.args))
            if self.kind == "energy":
                check_energy(output, self.batch)
            else:
                output = self._image(output)
            if not output.requires_grad:
                raise ValueError(
                    "f(z) must depend on z through autograd, got a result without gradient"
                )
            if self.kind == "energy":
                output = gradients(output.sum(), [point], create_graph=True)[0]
        return pullback(output, point)

    def _image(self, output: Any) -> Tensor:
        """Check that ``output`` is like z; as a matrix (n, D)."""
        leaves, spec = pytree.tree_flatten(output)
        if spec != self.layout.spec:
            raise TypeError(f"f must return the structure of z, {self.layout.spec}, got {spec}")
        for leaf, shape in zip(leaves, self.layout.shapes, strict=True):
            if not isinstance(leaf, Tensor) or leaf.shape[1:] != shape:
                came = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf)
                raise ValueError(f"f must return leaves of shape (B, *{tuple(shape)}), got {came}")
        return self.layout.vector(output)

    def dense(self) -> Tensor:
        """``J`` (B, D, D), by D products with the whole batch."""
        product = self.product()
        units = torch.eye(self.size, dtype=self.layout.dtype, device=self.device)
        rows = [product(unit.repeat(self.batch, 1)).detach() for unit in units]
        # A pullback of the i-th unit vector is the i-th row, a product with it the i-th column.
        return torch.stack(rows, dim=1 if self.kind == "map" else 2)

    def require_symmetric(self) -> None:
        """Raise ValueError unless ``u.Jv = v.Ju`` for two random vectors; two products."""
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
    """v (D,) -> its product with the linearisation of one sample, both NumPy; ``calls`` counts."""

    def __init__(self, linear: Linearization) -> None:
        self._product, self._dtype = linear.product(), linear.layout.dtype
        self._device = linear.device
        self.calls = 0

    def __call__(self, vector: Any) -> numpy.ndarray:
        """Raises FloatingPointError where the product is not finite."""
        if numpy.iscomplexobj(vector):
            return self(vector.real) + 1j * self(vector.imag)
        self.calls += 1
        sent = torch.from_numpy(numpy.ascontiguousarray(vector).reshape(1, -1))
        received = self._product(sent.to(self._device, self._dtype))
        image = received.detach().double().cpu().numpy().reshape(-1)
        if not numpy.isfinite(image).all():
            raise FloatingPointError("a product with the Jacobian is not finite")
        return image
