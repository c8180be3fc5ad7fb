"""``implicit-attn demo``: the classifier on the embedded digits, over the report of the last time."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from implicit_attn.programs import classify


def main(words: Sequence[str]) -> None:
    """Run the demo; ``words`` are options of ``implicit-attn train classify``."""
    again = "--resume" in words or "--overwrite" in words
    classify.main(words if again else [*words, "--overwrite"])


if __name__ == "__main__":
    main(sys.argv[1:])
