"""Constants of a model that are in no state dict, put back where a loader has left them empty."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def restore_constants(model: nn.Module, fresh: nn.Module) -> None:
    """Copy the buffers of ``fresh`` that are in no state dict (``persistent=False``) to ``model``.

    Encodings of positions, patterns of pairs and numbers of heads are computed when a model is made, and are
    no part of its weights. Loaders that make a model without memory (on the device "meta") and fill in
    weights alone leave such buffers empty, which nobody notices: ``from_pretrained`` of ``transformers``,
    or ``to_empty`` before FSDP. Dtypes and devices stay those of ``model``, but for "meta".

    Args:
        model: whose buffers are overwritten.
        fresh: a model made with the same arguments.

    Raises:
        ValueError: the two have different buffers, a shape differs, or ``fresh`` is on "meta"; then
            nothing has been overwritten.

    Example:
        >>> from implicit_attn import EquilibriumBlock
        >>> fresh = EquilibriumBlock(8, heads=2)
        >>> with torch.device("meta"):
        ...     model = EquilibriumBlock(8, heads=2)
        >>> loaded = model.to_empty(device="cpu").load_state_dict(fresh.state_dict())
        >>> restored = restore_constants(model, fresh)
    """
    there, here = _constants(fresh), _constants(model)
    if there.keys() != here.keys():
        unlike = sorted(there.keys() ^ here.keys())
        raise ValueError(
            f"fresh must be made with the arguments of model; only one of them has {unlike}"
        )
    for name, value in there.items():
        old, new = here[name][1], value[1]
        if old.shape != new.shape:
            raise ValueError(
                f"fresh must be made with the arguments of model; {name} is {tuple(new.shape)} there and "
                f"{tuple(old.shape)} here"
            )
        if new.is_meta:
            raise ValueError(f'fresh must have its numbers; {name} is on the device "meta"')
    for name, value in there.items():  # when nothing can fail any more
        owner, old = here[name]
        new, leaf = value[1], name.rpartition(".")[2]
        device = new.device if old.is_meta else old.device
        with torch.no_grad():
            owner._buffers[leaf] = new.to(device=device, dtype=old.dtype, copy=True)


def _constants(model: nn.Module) -> dict[str, tuple[nn.Module, Tensor]]:
    """The buffers that are in no state dict, by name, with the modules that have them.

    A tensor that has two names stands under both: loaders may have made two of it.
    """
    return {
        f"{place}.{name}" if place else name: (module, buffer)
        for place, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if name in module._non_persistent_buffers_set
    }
