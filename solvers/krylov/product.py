"""A batch of linear systems ``A x = b``: products with ``A`` and scaled right-hand sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.core.device import ratio, surely_all
from solvers.core.layout import Layout, take
from solvers.core.tolerance import Tolerance
from solvers.krylov.method import norm

# Right-hand sides whose norms lie between 1 / MODERATE and MODERATE are not scaled.
MODERATE = 1e6


class System:
    """Right-hand sides (B, D), divided by a power of two so that no square overflows or underflows.

    Numbers per sample are (B, 1).
    """

    def __init__(self, b: Tensor, tolerance: Tolerance) -> None:
        self.factor: Tensor | None = None  # ``scale`` as a tensor, None where it is 1 everywhere
        self.reference = norm(b)
        self.finite, self.scale = self.reference < torch.inf, torch.ones_like(self.reference)
        moderate = (self.reference > 1 / MODERATE) & (self.reference < MODERATE)
        if not surely_all(moderate):
            largest = b.abs().amax(1, keepdim=True)
            self.finite = largest < torch.inf
            exponent = torch.frexp(torch.where(self.finite, largest, 1))[1].clip(-100, 100)
            self.scale = torch.ldexp(torch.ones_like(largest), exponent)
            self.factor = self.scale
            b = torch.where(self.finite, b / self.factor, 0)
            self.reference = norm(b)
        self.b = b  # zero where the caller's is not finite
        # The residual norm at which a sample has converged; ``tolerance`` is in the caller's units.
        if self.factor is None:
            norms = self.reference.reshape(-1)
            self.limit = tolerance.threshold(norms).reshape(-1, 1)
            return
        norms = (self.reference * self.scale).squeeze(1)
        self.limit = tolerance.threshold(norms).unsqueeze(1) / self.scale

    def scaled(self, x: Tensor) -> Tensor:
        """From the caller's units to scaled ones."""
        return x if self.factor is None else x / self.factor

    def unscaled(self, x: Tensor) -> Tensor:
        return x if self.factor is None else x * self.factor

    def relative(self, norms: Tensor) -> Tensor:
        """Residual norms (B, 1) relative to the right-hand sides, (B,)."""
        return ratio(norms, self.reference).reshape(-1)


class OneMinus:
    """``v -> v - image(v)`` as a ``matvec``, of which the engine asks for the image alone."""

    def __init__(self, image: Callable[[Tensor], Tensor]) -> None:
        self.image = image

    def __call__(self, v: Tensor) -> Tensor:
        return v - self.image(v)


class Product:
    """``matvec`` as a map from (n, D) to (n, D), for the selected samples of a batch.

    Vectors travel in the layout and dtypes of the right-hand side; results come back in the working
    dtype. Below float32 a vector is scaled to magnitude one by a power of two before the product,
    so that small residuals do not become subnormal, and the result is scaled back.
    """

    def __init__(
        self, matvec: Callable[..., Any], layout: Layout, args: tuple[Any, ...], batch: int
    ) -> None:
        self._matvec, self._layout = matvec, layout
        self._all_args = self._args = args
        self._batch = self._rows = batch
        self._narrow = any(torch.finfo(dtype).bits < 32 for dtype in layout.dtypes)
        self.dtype = torch.promote_types(layout.dtype, torch.float32)
        self.tiny = max(torch.finfo(dtype).tiny for dtype in layout.dtypes)
        self.largest = min(torch.finfo(dtype).max for dtype in layout.dtypes)
        self.eps = max(torch.finfo(dtype).eps for dtype in layout.dtypes)
        self._single = layout.spec.is_leaf()
        # A matrix (B, D) of float32 or float64 is handed over as it is.
        self._direct = self._single and len(layout.shapes[0]) == 1 and not self._narrow

    def select(self, rows: Tensor) -> None:
        """Multiply the samples ``rows`` (indices into the whole batch) from now on."""
        self._args = self._all_args
        self._rows = rows.numel()
        if rows.numel() < self._batch:
            # From the whole batch each time: among the rows of a part, a tensor that is not batched
            # could by chance have as many rows as the part.
            self._args = take(self._all_args, rows, self._batch)

    def __call__(self, vectors: Tensor) -> Tensor:
        """(n, D) -> (n, D), both in the working dtype."""
        if not self._narrow:
            return self.exact(vectors)
        _, exponent = torch.frexp(vectors.abs().amax(1, keepdim=True))
        scale = torch.ldexp(torch.ones_like(vectors[:, :1]), exponent.clamp(-100, 100))
        return self.exact(vectors / scale) * scale

    def rounded(self, vectors: Tensor) -> Tensor:
        """``vectors`` as the caller will get them: through the dtypes of the right-hand side."""
        if all(dtype == self.dtype for dtype in self._layout.dtypes):
            return vectors
        return self._layout.vector(self._layout.tree(vectors.to(self._layout.dtype))).to(self.dtype)

    def exact(self, vectors: Tensor) -> Tensor:
        """The product with ``vectors`` as they are, not scaled."""
        sent = vectors
        if not self._direct:
            sent = self._layout.tree(vectors.to(self._layout.dtype))
        received = self._call(sent)
        if self._single:
            _check_single(received, sent)
        else:
            check_like(received, sent, "matvec(v)", "v")
        if self._direct:
            return received.detach().resolve_neg()
        return self._layout.vector(pytree.tree_map(Tensor.detach, received)).to(self.dtype)

    def _call(self, sent: Any) -> Any:
        try:
            return self._matvec(sent, *self._args)
        except (RuntimeError, ValueError, IndexError) as error:
            if self._rows < self._batch:
                shrunk = (
                    f"matvec was called with the {self._rows} of {self._batch} samples that are still "
                    "being solved. If it closes over a tensor of the whole batch, pass that tensor in "
                    "args=(...), or give compact=False."
                )
                error.args = (f"{error}\n{shrunk}",)
            raise


def _check_single(received: Any, sent: Tensor) -> None:
    if not (isinstance(received, Tensor) and _properties(received) == _properties(sent)):
        check_like(received, sent, "matvec(v)", "v")


def _properties(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def check_like(
    tree: Any, like: Any, name: str, of: str, device_error: type[Exception] = TypeError
) -> None:
    """Raise unless ``tree`` has the structure, shapes, dtypes and device of ``like``, called ``of``."""
    leaves, spec = pytree.tree_flatten(tree)
    expected, expected_spec = pytree.tree_flatten(like)
    if spec != expected_spec:
        raise TypeError(f"{name} must have the structure of {of}, {expected_spec}, got {spec}")
    errors = {"shape": ValueError, "dtype": TypeError, "device": device_error}
    for leaf, wanted_leaf in zip(leaves, expected, strict=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name} must hold tensors like {of}, got {type(leaf)}")
        for attribute, error in errors.items():
            came, wanted = getattr(leaf, attribute), getattr(wanted_leaf, attribute)
            if came != wanted:
                raise error(f"{name} must have the {attribute} of {of}, {wanted}, got {came}")
