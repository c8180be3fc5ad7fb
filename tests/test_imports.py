"""The rules of the tree, read from the sources: imports go down, in no circle, and hide no module."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the ground up. A module may import from its own line and from the lines above it in this list.
LAYERS = """
solvers.core solvers.native
solvers.krylov
solvers.linear
solvers.methods
solvers.adjoint solvers.eigen
solvers.checking
solvers.fixed_points
solvers.queues
solvers.spins solvers.torchdeq_bridge
solvers solvers.recording
implicit_attn.optional implicit_attn.parametrised implicit_attn.solvers
implicit_attn.kernels implicit_attn.spectral
implicit_attn.energies implicit_attn.dropout
implicit_attn.updates
implicit_attn.deq
implicit_attn.block implicit_attn.regularization
implicit_attn.data
implicit_attn.models
implicit_attn.weights
implicit_attn.studies
implicit_attn.demo
implicit_attn
implicit_attn.cli
implicit_attn.__main__
"""
HEIGHT = {name: height for height, line in enumerate(LAYERS.split("\n")) for name in line.split()}
# torch brings typing_extensions.
CORE = {"torch", "typing_extensions", "numpy", "scipy", "solvers", "implicit_attn"}

Sources = dict[str, str]  # module name -> text
Rule = Callable[[Sources], list[str]]


parsed = functools.cache(ast.parse)


@functools.cache
def sources() -> Sources:
    found = {}
    for package in ("solvers", "implicit_attn"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imports(modules: Sources) -> Iterator[tuple[str, str]]:
    """Pairs of a module and what it imports, as deep as the tree knows it."""
    for module, text in modules.items():
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.Import):
                yield from ((module, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield module, inner if inner in modules else node.module


def height(module: str) -> int:
    parts = module.split(".")
    names = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    name = next(name for name in names if name in HEIGHT)
    assert module == name or name not in ("solvers", "implicit_attn"), f"{module} is in no layer"
    return HEIGHT[name]


def imports_that_go_up(modules: Sources) -> list[str]:
    return [
        f"{module} imports {other}"
        for module, other in imports(modules)
        if other.split(".")[0] in ("solvers", "implicit_attn") and height(other) > height(module)
    ]


def circles(modules: Sources) -> list[str]:
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for module, other in imports(modules):
        if other in modules and other != module:
            graph[module].add(other)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def hidden_modules(modules: Sources) -> list[str]:
    """Names of a package's face that are also a module below it: ``import a.b as m`` would lie."""
    found = []
    for module, text in modules.items():
        for node in parsed(text).body:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            if isinstance(node, ast.ImportFrom):
                paths = {f"{node.module}.{alias.name}" for alias in node.names} - set(modules)
                names = [path.rpartition(".")[2] for path in paths]
            found += [f"{module}.{name}" for name in names if f"{module}.{name}" in modules]
    return found


def other_dependencies(modules: Sources) -> list[str]:
    """What is neither Python's nor the core's comes through ``implicit_attn.optional.require``."""
    allowed = CORE | set(sys.stdlib_module_names)
    return [
        f"{module} imports {other}"
        for module, other in imports(modules)
        if other.split(".")[0] not in allowed
        and not (other.startswith("torchdeq") and module == "solvers.torchdeq_bridge")
        and not (other.startswith("triton") and ".triton" in module)
    ]


RULES = [imports_that_go_up, circles, hidden_modules, other_dependencies]
BROKEN: list[Sources] = [
    {"solvers.core.a": "import implicit_attn.deq"},
    {"solvers.core.a": "import solvers.core.b", "solvers.core.b": "import solvers.core.a"},
    {"solvers.core": "def a(): ...", "solvers.core.a": ""},
    {"implicit_attn.deq": "import scikit"},
]


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    assert rule(sources()) == []


@pytest.mark.parametrize(("rule", "broken"), [*zip(RULES, BROKEN, strict=True)])
def test_a_rule_sees_what_breaks_it(rule: Rule, broken: Sources) -> None:
    assert len(rule(broken)) == 1
