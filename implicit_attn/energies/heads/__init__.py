"""What the attention energies share: inputs, pairs of tokens, temperatures of heads."""

from __future__ import annotations
