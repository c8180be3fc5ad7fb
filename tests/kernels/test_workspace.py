"""Buffers that are kept from call to call: whose they are, and that results do not depend on them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from implicit_attn.kernels import bisoftmax, bisoftmax_hvp, workspace


@pytest.fixture(autouse=True)
def empty() -> None:
    workspace.release()


def test_a_large_one_is_not_kept() -> None:
    like = torch.empty(1)
    large = workspace.buffer(like, 0, workspace.KEPT + 1)
    assert large.numel() == workspace.KEPT + 1
    assert workspace.buffer(like, 0, 8).numel() == 8


def test_the_default_device_has_no_say() -> None:
    z = torch.randn(1, 2, 40, 8)
    with torch.device("meta"):
        inside = bisoftmax(z, 0.3, limit=20.0, backend="blocks")
        assert workspace.buffer(z, 0, 10).device == z.device
    outside = bisoftmax(z, 0.3, limit=20.0, backend="blocks")
    for ours, theirs in zip(inside, outside, strict=True):
        assert ours.device == z.device and torch.equal(ours, theirs)


def test_what_a_mode_made_is_not_kept() -> None:
    like = torch.empty(1)
    with FakeTensorMode():
        assert type(workspace.buffer(like, 0, 10)) is not Tensor
    assert type(workspace.buffer(like, 0, 10)) is Tensor


def test_inference_mode_leaves_nothing_behind() -> None:
    z = torch.randn(1, 2, 40, 8)
    with torch.inference_mode():
        inside = bisoftmax(z, 0.3, limit=20.0, backend="blocks")[0].clone()
    outside = bisoftmax(z.clone().requires_grad_(), 0.3, limit=20.0, backend="blocks")[0]
    assert torch.equal(inside, outside.detach())
    outside.sum().backward()


def test_threads_and_sizes_do_not_disturb_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 2, count, 8, generator=generator) for count in (300, 40, 200, 17)]

    def both(z: Tensor) -> tuple[Tensor, Tensor]:
        gradient, lse = bisoftmax(z, 0.3, limit=30.0, backend="blocks")
        return gradient, bisoftmax_hvp(z, gradient, 0.3, limit=30.0, lse=lse, backend="blocks")

    expected = []
    for z in states:
        workspace.release()
        expected.append(both(z))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(both, states * 8))
    for pair, known in zip(found, expected * 8, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, known, strict=True))
