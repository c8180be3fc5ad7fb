"""What a distribution must name in its metadata, read from the sources."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Mapping

OWN = {"implicit_attn", "solvers"}
# Extras that hold what a module imports from within torch.
# By extras of their own, of the only modules that import them.
OF_ONE_MODULE = {"triton": "gpu", "torchdeq": "torchdeq"}
WITHIN = {"torch.utils.tensorboard": "tensorboard"}


def imported(sources: Iterable[str]) -> dict[str, set[str | None]]:
    """Top-level modules that the sources import, with the extras by which ``require`` names them.

    None stands for what is imported without an extra. Standard library and own packages are left out.
    """
    found: dict[str, set[str | None]] = {}
    for text in sources:
        for module, extra in _imports(ast.parse(text)):
            top = WITHIN.get(module, module.partition(".")[0])
            if top not in OWN and top not in sys.stdlib_module_names:
                found.setdefault(top, set()).add(extra)
    return found


def _imports(tree: ast.Module) -> Iterable[tuple[str, str | None]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", None
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require":
            words = {each.arg: each.value for each in node.keywords}
            if node.args and isinstance(node.args[0], ast.Constant) and "extra" in words:
                extra = ast.literal_eval(words["extra"])
                assert extra is None or isinstance(extra, str)
                yield str(node.args[0].value), extra


def unnamed(sources: Iterable[str], requirements: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules that the sources import and whose distribution the requirements do not name.

    Args:
        sources: the texts of all Python files.
        requirements: distributions by extra, ``""`` for those that are always installed.
    """
    homes = importlib.metadata.packages_distributions()
    named = {extra: {_plain(name) for name in names} for extra, names in requirements.items()}
    lacking = []
    for module, extras in sorted(imported(sources).items()):
        distributions = {_plain(name) for name in homes.get(module, [module])}
        for extra in extras:
            groups = ["", OF_ONE_MODULE.get(module, extra or "")]
            if not any(distributions & named.get(group, set()) for group in groups):
                lacking.append(f"{module} (extra {extra!r})")
    return lacking


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
