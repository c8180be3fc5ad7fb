"""Rules for the layout, each a function from parsed files to a list of offences.

The sources are read, not imported. CONTRIBUTING.md says what the rules are for.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("solvers", "implicit_attn", "examples", "benchmarks")
LONGEST_FILE, LONGEST_FUNCTION = 320, 60
MOST_FILES = 14  # of Python in a folder of the library, the package's face among them

# What each part of the library may import of the library; itself goes without saying. A part is named
# by the beginning of its modules' names; a module belongs to the longest name that fits.
# The floor that everything stands on.
_GROUND = {
    "solvers.core.checks",
    "solvers.core.guards.reading",
    "solvers.core.guards.telling",
    "solvers.core.modes",
    "solvers.lazy",
    "solvers.native",
}
# What imports by a name, for all others; shadow asks first what an import would find.
_IMPORTERS = {"implicit_attn.optional", "implicit_attn.shadow", "solvers.lazy"}
_KRYLOV = _GROUND | {"solvers.core"}
_METHODS = _KRYLOV | {"solvers.krylov"}
_ENTRY = _METHODS | {"solvers.methods", "solvers.adjoints", "solvers.compiled"}
_BELOW_ENERGIES = _GROUND | {"implicit_attn.kernels", "implicit_attn.optional"}
_BELOW_UPDATES = _BELOW_ENERGIES | {"implicit_attn.energies", "solvers"}
_BELOW_DEQ = _BELOW_UPDATES | {"implicit_attn.dropout", "implicit_attn.updates"}
_BELOW_MODELS = (_BELOW_DEQ - {"solvers"}) | {
    "implicit_attn.checkpoint",
    "implicit_attn.data",
    "implicit_attn.deq",
    "implicit_attn.block",
}
_BELOW_PROGRAMS = _BELOW_MODELS | {
    "implicit_attn.command_line",
    "implicit_attn.models",
    "implicit_attn.studies",
    "implicit_attn.training",
    "implicit_attn.weights",
    "solvers",
}
MAY_IMPORT = {
    "solvers.core.checks": set[str](),
    "solvers.core.guards.reading": set[str](),
    "solvers.core.guards.telling": set[str](),
    "solvers.core.modes": set[str](),
    "solvers.lazy": set[str](),
    "solvers.native": set[str](),
    "solvers.core": _GROUND,
    "solvers.krylov": _KRYLOV,
    "solvers.methods": _METHODS,
    "solvers.compiled": _METHODS | {"solvers.methods"},
    "solvers.adjoints": _METHODS | {"solvers.compiled"},
    "solvers.eigen": _KRYLOV,
    "solvers.fixed_points": _ENTRY,
    "solvers.spins": _ENTRY | {"solvers.fixed_points"},
    "solvers.torchdeq_bridge": _ENTRY | {"solvers.fixed_points"},
    "solvers": _ENTRY | {"solvers.fixed_points", "solvers.eigen", "solvers.spins"},
    "implicit_attn.optional": set[str](),
    "implicit_attn.shadow": {"solvers"},
    "implicit_attn.dropout": _GROUND,
    "implicit_attn.command_line": _GROUND,
    "implicit_attn.checkpoint": _GROUND | {"implicit_attn.optional"},
    "implicit_attn.data": _GROUND | {"implicit_attn.optional"},
    "implicit_attn.kernels": _GROUND | {"implicit_attn.optional"},
    "implicit_attn.energies": _BELOW_ENERGIES,
    "implicit_attn.updates": _BELOW_UPDATES,
    "implicit_attn.deq": _BELOW_DEQ,
    "implicit_attn.block": _BELOW_DEQ | {"implicit_attn.deq"},
    "implicit_attn.regularization": _BELOW_DEQ | {"implicit_attn.deq"},
    # A model may choose a method for its DEQ, which solves: some converge by one alone.
    "implicit_attn.models": _BELOW_MODELS | {"solvers.methods"},
    "implicit_attn.training": _GROUND
    | {
        "implicit_attn.checkpoint",
        "implicit_attn.command_line",
        "implicit_attn.data",
        "implicit_attn.deq",
        "implicit_attn.optional",
        "solvers",
    },
    "implicit_attn.studies": _BELOW_MODELS
    | {
        "implicit_attn.command_line",
        "implicit_attn.models",
        "implicit_attn.training",
        "implicit_attn.weights",
        "solvers",
    },
    "implicit_attn.weights": _GROUND
    | {"implicit_attn.checkpoint", "implicit_attn.command_line", "implicit_attn.models", "solvers"},
    "implicit_attn.programs": _BELOW_PROGRAMS,
    "implicit_attn.console": _BELOW_PROGRAMS
    | {
        "implicit_attn",
        "implicit_attn.kernels",
        "implicit_attn.optional",
        "implicit_attn.programs",
    },
    "implicit_attn.__main__": {"implicit_attn.console"},
    "implicit_attn": _BELOW_MODELS
    | {
        "implicit_attn.models",
        "implicit_attn.shadow",
        "implicit_attn.studies",
        "implicit_attn.weights",
    },
}
# An update may state which protocol it fulfils, and use the map of the spins; it may not call a solver
# of fixed points. A saddle point with Newton steps of its own is no fixed point of an update, and
# kinetic_map is one evaluation of a closure; kinetic_step would solve an equation within the update.
_SPINS = {"Site", "SphericalSite", "SpinState", "starting_state", "tap_log_partition", "tap_step"}
_OWN = {"SaddleSolution", "kinetic_map", "spherical_saddle"}
SOLVERS_NAMES_FOR_UPDATES = {"EnergyUpdate"} | _SPINS | _OWN
CORE_DEPENDENCIES = {"torch", "numpy", "scipy"}


@dataclass(frozen=True)
class Import:
    target: str  # the module, as deep as the tree knows it, or the full name of an outside one
    names: tuple[str, ...]  # what is taken from it; empty for "import module"
    line: int


@dataclass(frozen=True)
class File:
    path: str
    tree: ast.Module
    lines: int
    imports: tuple[Import, ...]

    @property
    def module(self) -> str:
        return module_name(self.path)

    @property
    def layer(self) -> str | None:
        return layer_of(self.module)

    @property
    def in_library(self) -> bool:
        return self.path.startswith(("solvers/", "implicit_attn/"))


Files = list[File]
Rule = Callable[[Files], list[str]]


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def layer_of(module: str) -> str | None:
    """The part of the library that a module belongs to; None: outside, or in no part."""
    parts = module.split(".")
    prefixes = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    name = next((prefix for prefix in prefixes if prefix in MAY_IMPORT), None)
    # A new folder of implicit_attn has to be put into MAY_IMPORT; its face alone is "implicit_attn".
    return None if name == "implicit_attn" and module != name else name


def read_imports(path: str, tree: ast.Module, modules: set[str]) -> Iterator[Import]:
    parents = path.removesuffix(".py").removesuffix("/__init__").split("/")
    if not path.endswith("/__init__.py"):
        parents.pop()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                if inner in modules:
                    yield Import(inner, (), node.lineno)
                else:
                    yield Import(source, (alias.name,), node.lineno)


def parse(sources: dict[str, str]) -> Files:
    modules = {module_name(path) for path in sources}
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    return [
        File(path, tree, len(sources[path].splitlines()), tuple(read_imports(path, tree, modules)))
        for path, tree in trees.items()
    ]


@functools.cache  # read once for all rules
def repository() -> Files:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return parse({path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths})


def library(files: Files) -> Files:
    return [file for file in files if file.in_library]


def imports_go_down(files: Files) -> list[str]:
    found = [f"{file.path}: in no layer of MAY_IMPORT" for file in library(files) if not file.layer]
    for file in library(files):
        for each in file.imports:
            if each.target.split(".")[0] not in ("solvers", "implicit_attn"):
                continue
            layer = layer_of(each.target)
            if file.layer and not _may_import(file.layer, layer):
                found.append(f"{file.path}:{each.line}: {file.layer} imports {each.target}")
    return found


def _may_import(layer: str, other: str | None) -> bool:
    """Whoever may import all of solvers may import every wing of it."""
    if other is None:
        return False
    allowed = {layer, *MAY_IMPORT[layer]}
    whole = "solvers" in allowed and layer != "solvers" and other.startswith("solvers.")
    return other in allowed or whole


def updates_call_no_solver(files: Files) -> list[str]:
    return [
        f"{file.path}:{each.line}: an update imports {each.names or 'all'} of {each.target}"
        for file in files
        if file.layer == "implicit_attn.updates"
        for each in file.imports
        if each.target.split(".")[0] == "solvers"
        and each.target not in _GROUND
        and not (each.names and set(each.names) <= SOLVERS_NAMES_FOR_UPDATES)
    ]


def only_core_dependencies(files: Files) -> list[str]:
    """What else is imported comes through ``require``; tests and examples are outside as well."""
    found = []
    for file in library(files):
        allowed = {*sys.stdlib_module_names, *CORE_DEPENDENCIES, "solvers", "implicit_attn"}
        if file.path == "solvers/torchdeq_bridge.py":
            allowed.add("torchdeq")
        if file.layer == "implicit_attn.kernels" and "triton" in Path(file.path).parent.parts:
            allowed.add("triton")
        found += [
            f"{file.path}:{each.line}: imports {each.target}"
            for each in file.imports
            if each.target.split(".")[0] not in allowed
        ]
    return found


def no_cycles(files: Files) -> list[str]:
    modules = {file.module for file in files}
    graph = {
        file.module: {each.target for each in file.imports} & modules - {file.module}
        for file in files
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def no_cycles_in_any_folder(files: Files) -> list[str]:
    """Each folder seen from outside: its files and sub-folders, a sub-folder as one thing."""
    modules = {file.module for file in files}
    found = []
    for folder in sorted({str(Path(file.path).parent) for file in library(files)}):
        package = folder.replace("/", ".")
        graph: dict[str, set[str]] = {}
        for file in files:
            ends = (
                _child(file.module, package),
                *(_child(e.target, package) for e in file.imports),
            )
            if ends[0]:
                others = {end for end in ends[1:] if end and f"{package}.{end}" in modules}
                graph.setdefault(ends[0], set()).update(others - {ends[0]})
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            found.append(f"{folder}: {' <- '.join(error.args[1])}")
    return found


def _child(module: str, package: str) -> str:
    """The file or sub-folder of ``package`` in which a module lies, or the empty string."""
    inside = module.startswith(f"{package}.")
    return module.removeprefix(f"{package}.").split(".")[0] if inside else ""


def imports_stand_at_the_top(files: Files) -> list[str]:
    found = []
    for file in library(files):
        for outer in ast.walk(file.tree):
            if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found += [
                    f"{file.path}:{node.lineno}: import inside {outer.name}"
                    for node in ast.walk(outer)
                    if isinstance(node, ast.Import | ast.ImportFrom)
                ]
        if file.module not in _IMPORTERS:
            found += [
                f"{file.path}:{each.line}: importlib, where require is meant"
                for each in file.imports
                if each.target.split(".")[0] == "importlib"
            ]
            found += [
                f"{file.path}:{node.lineno}: __import__, where require is meant"
                for node in ast.walk(file.tree)
                if isinstance(node, ast.Name) and node.id == "__import__"
            ]
    return found


def kernels_define_no_module(files: Files) -> list[str]:
    return [
        f"{file.path}:{node.lineno}: class {node.name}({ast.unparse(base)})"
        for file in files
        if file.layer == "implicit_attn.kernels"
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if ast.unparse(base).startswith(("nn.", "torch.nn.")) or ast.unparse(base) == "Module"
    ]


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def examples_use_public_names(files: Files) -> list[str]:
    found = []
    for file in files:
        if not file.path.startswith("examples/"):
            continue
        for each in file.imports:
            found += [
                f"{file.path}:{each.line}: imports {name}"
                for name in (*each.target.split("."), *each.names)
                if is_private(name)
            ]
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                owner = ast.unparse(node.value)
                if owner not in ("self", "cls", "super()"):  # a class may extend its parent
                    found.append(f"{file.path}:{node.lineno}: uses {owner}.{node.attr}")
    return found


def no_name_hides_a_module(files: Files) -> list[str]:
    """``import package.module as m`` gives ``package.module``: no name of the package's face may be
    that of a module below it, unless it is that module."""
    modules = {file.module for file in files}
    found = []
    for file in library(files):
        if not file.path.endswith("/__init__.py"):
            continue
        below = {m.rpartition(".")[2] for m in modules if m.rpartition(".")[0] == file.module}
        found += [
            f"{file.path}:{line}: {name} hides the module {file.module}.{name}"
            for name, line in _bound(file)
            if name in below
        ]
    return found


def _bound(file: File) -> Iterator[tuple[str, int]]:
    """The names that a file binds at its top, modules that it imports left out."""
    for each in file.imports:
        yield from ((name, each.line) for name in each.names)
    for node in file.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((t.id, node.lineno) for t in targets if isinstance(t, ast.Name))


def no_product_file_is_a_test(files: Files) -> list[str]:
    """pytest collects ``test_*.py`` and ``*_test.py`` wherever it finds them."""
    names = [(file.path, Path(file.path).stem) for file in library(files)]
    return [
        f"{path}: a name that pytest would collect"
        for path, stem in names
        if stem.startswith("test_") or stem.endswith("_test")
    ]


def folders_are_small(files: Files) -> list[str]:
    count = Counter(str(Path(file.path).parent) for file in library(files))
    return [f"{name}/: {number} files" for name, number in count.items() if number > MOST_FILES]


def files_and_functions_are_short(files: Files) -> list[str]:
    found = [f"{f.path}: {f.lines} lines" for f in library(files) if f.lines > LONGEST_FILE]
    for file in library(files):
        for node in ast.walk(file.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = _lines_without_docstring(node)
                if length > LONGEST_FUNCTION:
                    found.append(f"{file.path}:{node.lineno}: {node.name} has {length} lines")
    return found


def _lines_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        docstring = node.body[0]
        length -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return length
