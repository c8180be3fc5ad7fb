"""What the bi-softmax is timed against: dense formulas, autograd, stock attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from implicit_attn.kernels import bisoftmax, bisoftmax_hvp

Contestants = dict[str, Callable[[], object]]
OURS = ("gradient", "atomic gradient", "hvp")
# Bytes that a dense peer needs for an element of its N x N matrices: a dozen of them in float32.
DENSE_BYTES = 48
NOT_SUPPORTED = "not supported"


def dense(z: Tensor, beta: float) -> Tensor:
    """The formula as one writes it: ``(P + P^T) Z``."""
    weights = torch.softmax(beta * (z @ z.mT), -1)
    return (weights + weights.mT) @ z


def energy(z: Tensor, beta: float) -> Tensor:
    return torch.logsumexp(beta * (z @ z.mT), -1).sum() / beta


def by_autograd(z: Tensor, beta: float) -> Tensor:
    point = z.detach().requires_grad_()
    return torch.autograd.grad(energy(point, beta), point)[0]


def double_backward(z: Tensor, v: Tensor, beta: float) -> Tensor:
    point = z.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(point, beta), point, create_graph=True)
    return torch.autograd.grad(gradient, point, v)[0]


def attention(z: Tensor, beta: float, kind: SDPBackend) -> Tensor:
    with sdpa_kernel(kind):
        return F.scaled_dot_product_attention(z, z, z, scale=beta)


def attention_and_back(z: Tensor, v: Tensor, beta: float, kind: SDPBackend) -> Any:
    query, key, value = (z.detach().requires_grad_() for _ in range(3))
    with sdpa_kernel(kind):
        output = F.scaled_dot_product_attention(query, key, value, scale=beta)
    return torch.autograd.grad(output, (query, key, value), v)


def largest_dense(device: torch.device) -> int:
    """Elements of all the N x N matrices of one kind that a dense formula may have."""
    if device.type != "cuda":
        return 2**28
    return min(2**31, torch.cuda.mem_get_info(device)[0] // DENSE_BYTES)


def contestants(z: Tensor, v: Tensor, beta: float, limit: float, compiled: bool) -> Contestants:
    """What runs on these tensors, by name; ``limit`` bounds the scores."""
    _, lse = bisoftmax(z, beta, limit=limit)
    runs: Contestants = {
        "gradient": lambda: bisoftmax(z, beta, limit=limit),
        "hvp": lambda: bisoftmax_hvp(z, v, beta, limit=limit, lse=lse),
    }
    if z.is_cuda:
        runs["atomic gradient"] = lambda: bisoftmax(z, beta, limit=limit, deterministic=False)
    if z.shape[0] * z.shape[1] * z.shape[2] ** 2 <= largest_dense(z.device):
        runs["dense"] = lambda: dense(z, beta)
        runs["reference"] = lambda: bisoftmax(z, beta, limit=limit, backend="reference")
        runs["autograd"] = lambda: by_autograd(z, beta)
        runs["double backward"] = lambda: double_backward(z, v, beta)
        if compiled:
            fused = torch.compile(dense, dynamic=False)
            runs["compiled"] = lambda: fused(z, beta)
    kinds = [("flash", SDPBackend.FLASH_ATTENTION)]
    if z.is_cuda and z.dtype != torch.float32:
        kinds.append(("cudnn", SDPBackend.CUDNN_ATTENTION))
    elif z.is_cuda:
        kinds = [("efficient", SDPBackend.EFFICIENT_ATTENTION)]
    for name, kind in kinds:
        runs[f"{name} forward"] = partial(attention, z, beta, kind)
        runs[f"{name} forward+backward"] = partial(attention_and_back, z, v, beta, kind)
    return runs


def able(runs: Contestants) -> tuple[Contestants, list[str]]:
    """The runs that work here, tried once, and the names of the peers that do not.

    An error of ours is raised: it is no peer's missing shape.
    """
    working, refused = {}, []
    for name, run in runs.items():
        try:
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except RuntimeError as error:
            if name in OURS:
                raise
            refused.append(name)
            print(f"{name}: {NOT_SUPPORTED} ({str(error).strip().splitlines()[0][:120]})")
        else:
            working[name] = run
    return working, refused
