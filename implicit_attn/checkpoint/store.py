"""The file of a checkpoint: tensors and texts in the safetensors format, with a checksum of them all.

Format: https://huggingface.co/docs/safetensors (a header in JSON, then the bytes of the tensors). It is
written here, tensor by tensor, and read by the library of that name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from implicit_attn.checkpoint.files import replacing
from implicit_attn.optional import require

FORMAT = "implicit-attn checkpoint 2"
WITHOUT_CHECKSUM = "implicit-attn checkpoint 1"  # written before there was one; still read
CHECKSUM = "checksum"
TEXTS = ("groups", "optimizer", "progress")

# How safetensors calls the dtypes.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def on_cpu(name: str, value: object) -> Tensor:
    """The tensor as it is stored.

    Raises:
        TypeError: it is none, or of a kind that the format does not know.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dtype not in DTYPES:
        shown = f"{value.layout} of {value.dtype}" if isinstance(value, Tensor) else type(value)
        raise TypeError(f"{name} must be a dense tensor of a dtype of safetensors, got {shown}")
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _raw(value: Tensor) -> memoryview:
    """The bytes of a tensor, little-endian, without a copy where the machine is so."""
    flat = value.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    numbers = flat.view(INTEGERS[flat.element_size()]).numpy()
    return numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).data


def checksum(tensors: dict[str, Tensor], texts: dict[str, str]) -> str:
    """SHA-256 of the texts but the checksum itself, and of names, dtypes, shapes and bytes."""
    known = {name: text for name, text in texts.items() if name != CHECKSUM}
    found = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(json.dumps([name, DTYPES.get(value.dtype), list(value.shape)]).encode())
        found.update(_raw(value))
    return found.hexdigest()


def write_file(path: Path, tensors: dict[str, Tensor], texts: dict[str, str]) -> None:
    """Write tensors (of :func:`on_cpu`) and texts to ``path``, all or nothing."""
    texts = {"format": FORMAT, **texts}
    texts[CHECKSUM] = checksum(tensors, texts)
    header: dict[str, object] = {"__metadata__": texts}
    # Large elements first, so that each tensor is aligned to its own.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in order:
        value = tensors[name]
        start, end = end, end + value.numel() * value.element_size()
        header[name] = {
            "dtype": DTYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_raw(tensors[name]))


def read_file(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Texts and tensors of a checkpoint, whole and as they were written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no checkpoint of this package, or it is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    safetensors = require("safetensors", extra=None)
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            texts: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:  # a dozen kinds, by which of the bytes are wrong
        raise ValueError(f"{path} is not a checkpoint, or it is damaged: {error}") from error
    form = texts.get("format")
    if form not in (FORMAT, WITHOUT_CHECKSUM):
        raise ValueError(
            f"{path} is not a checkpoint of this package: its format is {form!r}, expected {FORMAT!r}"
        )
    for problem in _problems(texts, tensors):
        raise ValueError(f"{path} is damaged: {problem}")
    return texts, tensors


def _problems(texts: dict[str, str], tensors: dict[str, Tensor]) -> Iterator[str]:
    """What is wrong with a file that safetensors could read."""
    if texts["format"] == FORMAT and CHECKSUM not in texts:
        yield "it has no checksum"
    for name in TEXTS:
        if name not in texts:
            yield f"it has no {name!r} in its header"
    for name, value in tensors.items():
        if value.dtype not in DTYPES:
            yield f"{name} is of {value.dtype}, which no checkpoint is"
    if CHECKSUM in texts and checksum(tensors, texts) != texts[CHECKSUM]:
        yield "its contents do not give the checksum that was written with them"
