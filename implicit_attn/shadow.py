"""Refuses to go on where ``import solvers`` finds something else than the package that comes along.

``solvers`` is a common name: a file ``solvers.py`` beside a script comes before every installed package.
"""

from __future__ import annotations

import solvers


def check(module: object) -> None:
    """Raise ImportError unless ``module`` is the package ``solvers`` of this distribution.

    Raises:
        ImportError: it is another module; the message names its file and says what to do.
    """
    if getattr(module, "DISTRIBUTION", None) == "implicit-attn":
        return
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
    raise ImportError(
        "implicit_attn comes with a package solvers, which another module of that name hides: "
        f"`import solvers` found {place or repr(module)}. Rename or move that file or folder, or start "
        "Python where it is not on the path (sys.path), then import again in a new process"
    )


check(solvers)
