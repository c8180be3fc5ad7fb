"""Products with a batch of matrices that are known only by what they do to vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.core.layout import Layout, take


class Product:
    """``matvec`` as a map from (n, D) to (n, D), for the rows of the batch that are left.

    Vectors travel in the layout and dtype of the right-hand side; results come back in the working
    dtype. Below float32 a vector is brought to magnitude one by a power of two before the product
    and back after it, so that small residuals do not fall among the subnormal numbers.
    """

    def __init__(
        self, matvec: Callable[..., Any], layout: Layout, args: tuple[Any, ...], batch: int
    ) -> None:
        self._matvec = matvec
        self._layout = layout
        self._all_args = args
        self._args = args
        self._batch = self._rows = batch
        self._single = layout.spec == pytree.tree_flatten(torch.empty(0))[1]
        self._narrow = any(torch.finfo(dtype).bits < 32 for dtype in layout.dtypes)
        self.dtype = torch.promote_types(layout.dtype, torch.float32)
        self.eps = max(torch.finfo(dtype).eps for dtype in layout.dtypes)
        # A matrix (B, D) of float32 or float64 is handed over as it is.
        self._plain = self._single and len(layout.shapes[0]) == 1 and not self._narrow

    def select(self, rows: Tensor) -> None:
        """Keep the rows ``rows`` (indices into the whole batch) of every argument."""
        self._args = self._all_args
        self._rows = rows.numel()
        if rows.numel() < self._batch:
            # Always out of the original: a leaf that is not batched could by chance have as many
            # rows as a batch that has shrunk.
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
        """The product without rescaling."""
        if self._plain:
            received = self._call(vectors)
            if _alike(received, vectors):
                return received.detach() if received.requires_grad else received
            _check_like(received, vectors)
        sent = self._layout.tree(vectors.to(self._layout.dtype))
        received = self._call(sent)
        if not (self._single and _alike(received, sent)):
            _check_like(received, sent)
        return self._layout.vector(pytree.tree_map(Tensor.detach, received)).to(self.dtype)

    def _call(self, sent: Any) -> Any:
        try:
            return self._matvec(sent, *self._args)
        except (RuntimeError, ValueError, IndexError) as error:
            if self._rows < self._batch:
                error.args = (f"{error}\n{_SHRUNK.format(self._rows, self._batch)}",)
            raise


_SHRUNK = (
    "matvec was called with the {} of {} samples that are still being solved. If it closes over a "
    "tensor of the whole batch, pass that tensor in args=(...), or give compact=False."
)


def _alike(received: Any, sent: Tensor) -> bool:
    return (
        isinstance(received, Tensor)
        and received.shape == sent.shape
        and received.dtype == sent.dtype
        and received.device == sent.device
    )


def _check_like(received: Any, sent: Any) -> None:
    """``matvec(v)`` has the structure, shapes, dtypes and device of ``v``."""
    leaves, spec = pytree.tree_flatten(received)
    expected, expected_spec = pytree.tree_flatten(sent)
    if spec != expected_spec:
        raise TypeError(f"matvec(v) must have the structure of v, {expected_spec}, got {spec}")
    for leaf, like in zip(leaves, expected, strict=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"matvec(v) must hold tensors like v, got {type(leaf)}")
        for name in ("shape", "dtype", "device"):
            came, wanted = getattr(leaf, name), getattr(like, name)
            if came != wanted:
                error = ValueError if name == "shape" else TypeError
                raise error(f"matvec(v) must have the {name} of v, {wanted}, got {came}")
