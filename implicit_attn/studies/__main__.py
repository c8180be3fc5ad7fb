"""``python -m implicit_attn.studies``: studies of trained models, a figure and CSV tables each."""

from __future__ import annotations

from implicit_attn.studies.command import main

if __name__ == "__main__":
    main()
