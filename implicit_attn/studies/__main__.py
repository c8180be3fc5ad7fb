"""Studies of trained models from the command line: a figure and CSV tables each.

    python -m implicit_attn.studies convergence
    python -m implicit_attn.studies extrapolation --weights runs/vit/checkpoint.safetensors

Without --weights the weights that come with the repository are studied.
"""

from __future__ import annotations

from implicit_attn.studies.command import main

if __name__ == "__main__":
    main()
