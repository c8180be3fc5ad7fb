"""Which weight of an official Hyper-SET is which of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from implicit_attn.models.official.layout import OfficialLayout

STEPS = "backbone.step_sizes"
CELLS = 81


def _same(weight: Tensor) -> Tensor:
    return weight


@dataclass(frozen=True)
class Entry:
    """A weight by its official key and by ours, and how the one becomes the other.

    Attributes:
        official: the official key.
        ours: our key; None: a constant of the official code, which ``write`` makes of any weight.
        write, read: from ours to the official tensor, and back.
        part: of ours along its first dimension, where that holds several official weights.
    """

    official: str
    ours: str | None
    write: Callable[[Tensor], Tensor] = _same
    read: Callable[[Tensor], Tensor] = _same
    part: int | None = None


def entries(layout: OfficialLayout) -> list[Entry]:
    """All weights of a model of this layout."""
    return list({"images": _images, "sudoku": _sudoku, "codes": _codes}[layout.task](layout))


def _images(layout: OfficialLayout) -> Iterator[Entry]:
    shape = (layout.channels, layout.patch, layout.patch)
    write, read = partial(_pixels_last, shape), partial(_pixels_first, shape)
    yield Entry("cls_token", "class_token", _as_token, _first)
    for name in ("weight", "bias"):
        yield Entry(f"emb.0.{name}", f"embed.norm.{name}", write, read)
    yield Entry("emb.1.weight", "embed.linear.weight", write, read)
    yield Entry("emb.1.bias", "embed.linear.bias")
    yield from _pair("emb.2", "embedding_norm")
    yield from _pair("fc.0", "norm")
    yield from _pair("fc.1", "head")
    for layer in range(layout.layers):
        theirs, ours = f"enc.{layer}", f"backbone.layers.{layer}"
        yield from _weights(theirs + ".attn.qkv", theirs + ".mlp", ours)
        for number, name in enumerate(("query", "key", "value"), 1):
            yield Entry(f"{theirs}.attn.ln1_{number}.weight", f"{ours}.gains.{name}.weight")
        yield Entry(f"{theirs}.ln2.weight", f"{ours}.gains.memory.weight")
    if layout.network is not None:
        yield from _image_network(layout)
    if layout.lora_rank:
        yield from _differences(layout)


def _image_network(layout: OfficialLayout) -> Iterator[Entry]:
    embedding = "time_mlp" if layout.alternative else "time_mlp.0"
    # Official places count the sinusoids as the first; ours come without them.
    for place in (1, 5):
        yield from _pair(f"{embedding}.{place}", f"{STEPS}.embedding.{place - 1}")
    for place in (2, 4, 6):
        yield Entry(f"{embedding}.{place}.weight", f"{STEPS}.embedding.{place - 1}.weight")
    inner = "enc.0.ln_inp" if layout.alternative else "ln_inp"
    yield Entry(f"{inner}.weight", f"{STEPS}.inner.weight")
    last = "enc.0.time_mlp_inner" if layout.alternative else "time_mlp.1"
    if layout.network == "twice-normed":
        yield Entry(f"{last}.0.weight", f"{STEPS}.outer.weight")
        yield from _pair(f"{last}.2", f"{STEPS}.last")
    else:
        yield from _pair(f"{last}.1", f"{STEPS}.last")


def _differences(layout: OfficialLayout) -> Iterator[Entry]:
    for theirs, ours in (("attention", "attention_deltas"), ("ff", "feedforward_deltas")):
        for side, name in (("B", "left"), ("A", "right")):
            for index in range(layout.iterations):
                key = f"backbone.layers.0.{ours}.{name}"
                yield Entry(f"deltaW_{theirs}_{side}.{index}", key, part=index)


def _sudoku(layout: OfficialLayout) -> Iterator[Entry]:
    yield Entry("tok_emb.weight", "digits.weight")
    if layout.positions == "learned":
        yield Entry("pos_emb", "position", _as_batch, _first)
    for layer in range(layout.layers):
        theirs, ours = f"blocks.{layer}", f"backbone.layers.{layer}"
        yield from _weights(theirs + ".attn.qkv", theirs + ".mlp", ours)
        yield Entry(f"{theirs}.attn.ln1.weight", f"{ours}.gains.query.weight")
        yield Entry(f"{theirs}.ln2.weight", f"{ours}.gains.memory.weight")
        yield Entry(f"{theirs}.attn.mask", None, _triangle)
    yield Entry("ln_f.weight", "norm.weight")
    yield Entry("head.weight", "head.weight")
    yield from _pair("time_mlp.0.1", f"{STEPS}.embedding.0")
    yield from _pair("time_mlp.0.3", f"{STEPS}.embedding.2")
    yield from _pair("time_mlp.1.1", f"{STEPS}.last")


def _codes(layout: OfficialLayout) -> Iterator[Entry]:
    ours = "backbone.layers.0"
    yield Entry("tok_emb.weight", "embed.weight")
    yield from _weights("transformer.qkv", "transformer.mlp", ours)
    yield Entry("transformer.ln1.weight", f"{ours}.gains.query.weight")
    yield Entry("transformer.ln2.weight", f"{ours}.gains.memory.weight")
    yield Entry("transformer.time_mlp.1.0.weight", f"{STEPS}.outer.weight")
    yield from _pair("transformer.time_mlp.1.2", f"{STEPS}.last")
    yield Entry("lm_head.0.weight", "norm.weight")
    yield from _pair("lm_head.1", "head")


def _pair(theirs: str, ours: str) -> Iterator[Entry]:
    for name in ("weight", "bias"):
        yield Entry(f"{theirs}.{name}", f"{ours}.{name}")


def _weights(attention: str, memories: str, ours: str) -> Iterator[Entry]:
    yield Entry(f"{attention}.weight", f"{ours}.attention.projection.weight")
    yield Entry(f"{memories}.weight", f"{ours}.feedforward.projection.weight")


def _pixels_last(shape: tuple[int, int, int], weight: Tensor) -> Tensor:
    """Pixels in our order, (channel, row, column), in the official one, (row, column, channel)."""
    return weight.unflatten(-1, shape).movedim(-3, -1).flatten(-3)


def _pixels_first(shape: tuple[int, int, int], weight: Tensor) -> Tensor:
    channels, rows, columns = shape
    return weight.unflatten(-1, (rows, columns, channels)).movedim(-1, -3).flatten(-3)


def _as_token(weight: Tensor) -> Tensor:
    return weight[None, None]


def _as_batch(weight: Tensor) -> Tensor:
    return weight[None]


def _first(weight: Tensor) -> Tensor:
    """Without the leading dimensions of size 1 of a position or a class token."""
    return weight[0, 0] if weight.shape[:2] == (1, 1) else weight[0]


def _triangle(like: Tensor) -> Tensor:
    """The causal mask that the official Sudoku model keeps and never uses."""
    return torch.ones(CELLS, CELLS, dtype=like.dtype, device=like.device).tril()[None, None]
