"""``python -m implicit_attn``: the command ``implicit-attn``."""

from __future__ import annotations

from implicit_attn.cli import main

if __name__ == "__main__":
    main()
