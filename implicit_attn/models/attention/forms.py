"""Attention forms by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from implicit_attn.models.attention.causal import AttentionForm, CausalAttention
from implicit_attn.models.attention.light import LightNewtonAttention
from implicit_attn.models.attention.newton import NewtonAttention
from solvers.core.checks import require_choice

ATTENTION_FORMS: dict[str, Callable[..., AttentionForm]] = {
    "softmax": CausalAttention,
    "newton": partial(NewtonAttention, order=None),
    "newton-taylor": partial(NewtonAttention, order=1),
    "newton-taylor-no-value": partial(NewtonAttention, order=1, values=False),
    "light-newton": partial(LightNewtonAttention, order=None),
    "light-newton-taylor": partial(LightNewtonAttention, order=1),
}


def build_attention_form(name: str, dim: int, heads: int, **options: Any) -> AttentionForm:
    """An attention form of ``ATTENTION_FORMS``: tokens (B, N, d) -> (B, N, d), the residual branch.

    Args:
        name: "softmax", "newton", "newton-taylor", "newton-taylor-no-value", "light-newton" or
            "light-newton-taylor".
        dim, heads: features d of a token, attention heads.
        options: further arguments of that form, but for those that its name says: an exact form has no
            ``order``, "newton-taylor-no-value" no ``values``.

    Raises:
        ValueError: for an unknown name, or an option against it.
        TypeError: for an option that the form does not have.
    """
    make = ATTENTION_FORMS[require_choice("name", name, ATTENTION_FORMS)]
    for option, value in getattr(make, "keywords", {}).items():
        # The order of a series may be any number.
        given = options.get(option, value)
        if given is not value and (isinstance(value, bool) or None in (value, given)):
            expected = "a number" if given is None else repr(value)
            raise ValueError(f"{option} must be {expected} for the form {name!r}, got {given!r}")
    return make(dim, heads, **options)
