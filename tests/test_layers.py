"""The directions of the imports and the other rules of the layout.

Every rule runs on the repository, where it must find nothing, and on small trees that break it,
where it must find what they break.
"""

from __future__ import annotations

import pytest

from import_rules import (
    LONGEST_FILE,
    LONGEST_FUNCTION,
    MOST_FILES,
    Rule,
    examples_use_public_names,
    files_and_functions_are_short,
    folders_are_small,
    imports_go_down,
    imports_stand_at_the_top,
    kernels_define_no_module,
    no_cycles,
    no_cycles_in_any_folder,
    no_name_hides_a_module,
    no_product_file_is_a_test,
    only_core_dependencies,
    parse,
    repository,
    updates_call_no_solver,
)

RULES: list[Rule] = [
    imports_go_down,
    updates_call_no_solver,
    only_core_dependencies,
    no_cycles,
    no_cycles_in_any_folder,
    imports_stand_at_the_top,
    kernels_define_no_module,
    examples_use_public_names,
    files_and_functions_are_short,
    no_name_hides_a_module,
    no_product_file_is_a_test,
    folders_are_small,
]


def name_of(value: object) -> str | None:
    return getattr(value, "__name__", None)


def test_the_repository_is_read() -> None:
    files = repository()
    layers = {file.layer for file in files}
    assert {"solvers", "implicit_attn.energies", "implicit_attn.updates"} <= layers
    assert any(file.path.startswith("examples/") for file in files)
    assert any(each.target.startswith("solvers.") for file in files for each in file.imports)


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_the_repository_keeps_the_rule(rule: Rule) -> None:
    assert rule(repository()) == []


BROKEN: list[tuple[Rule, dict[str, str]]] = [
    (imports_go_down, {"solvers/a.py": "import implicit_attn"}),
    (imports_go_down, {"solvers/a.py": "def f():\n    from implicit_attn.energies import E"}),
    (
        imports_go_down,
        {"implicit_attn/kernels/k.py": "from implicit_attn.energies.energy import E"},
    ),
    (imports_go_down, {"implicit_attn/kernels/k/a.py": "from ...energies import E"}),
    (imports_go_down, {"implicit_attn/energies/e.py": "import solvers"}),
    (imports_go_down, {"implicit_attn/energies/e.py": "from ..updates import U"}),
    (imports_go_down, {"implicit_attn/energies/e.py": "from solvers.core.problem import P"}),
    (imports_go_down, {"solvers/core/loop.py": "from solvers.methods.anderson import Anderson"}),
    (imports_go_down, {"solvers/core/modes.py": "from solvers.core.problem import Problem"}),
    (imports_go_down, {"solvers/krylov/cg.py": "from solvers.methods.newton import Newton"}),
    (imports_go_down, {"solvers/methods/newton.py": "from solvers.adjoints.kinds import Implicit"}),
    (
        imports_go_down,
        {"solvers/adjoints/kinds.py": "from solvers.fixed_points import fixed_point"},
    ),
    (imports_go_down, {"solvers/eigen/spectrum.py": "import solvers.spins.maps"}),
    (imports_go_down, {"solvers/fixed_points.py": "from solvers.spins.maps import tap_step"}),
    (imports_go_down, {"implicit_attn/updates/u.py": "from implicit_attn.deq import DEQ"}),
    (imports_go_down, {"implicit_attn/models/m.py": "from solvers import fixed_point"}),
    (imports_go_down, {"implicit_attn/data/d.py": "from implicit_attn import energies"}),
    (imports_go_down, {"implicit_attn/deq.py": "from implicit_attn import Energy"}),
    (imports_go_down, {"implicit_attn/deq.py": "from . import studies"}),
    (imports_go_down, {"implicit_attn/utilities.py": "x = 1"}),
    (updates_call_no_solver, {"implicit_attn/updates/u.py": "from solvers import fixed_point"}),
    (updates_call_no_solver, {"implicit_attn/updates/u.py": "import solvers"}),
    (
        updates_call_no_solver,
        {"implicit_attn/updates/u.py": "from solvers.methods.anderson import A"},
    ),
    (only_core_dependencies, {"solvers/a.py": "import torchdeq"}),
    (only_core_dependencies, {"implicit_attn/deq.py": "from torchdeq.core import get_deq"}),
    (only_core_dependencies, {"implicit_attn/studies/s.py": "import matplotlib.pyplot as plt"}),
    (only_core_dependencies, {"solvers/a.py": "from tests.problems import ZOO"}),
    (only_core_dependencies, {"implicit_attn/deq.py": "import examples.classify"}),
    (only_core_dependencies, {"implicit_attn/models/m.py": "from benchmarks import timing"}),
    (only_core_dependencies, {"implicit_attn/kernels/blocks.py": "import triton"}),
    (no_cycles, {"solvers/a.py": "from solvers.b import x", "solvers/b.py": "import solvers.a"}),
    (no_cycles, {"solvers/__init__.py": "from .a import x", "solvers/a.py": "import solvers"}),
    (
        no_cycles,
        {
            "solvers/a.py": "from solvers import b",
            "solvers/b.py": "from .c import x",
            "solvers/c.py": "if TYPE_CHECKING:\n    from solvers.a import y",
        },
    ),
    (imports_stand_at_the_top, {"solvers/a.py": "def f():\n    import torch"}),
    (imports_stand_at_the_top, {"implicit_attn/deq.py": "class A:\n    from math import pi"}),
    (imports_stand_at_the_top, {"implicit_attn/data/d.py": "from importlib import import_module"}),
    (imports_stand_at_the_top, {"implicit_attn/data/d.py": "m = __import__('sklearn')"}),
    (kernels_define_no_module, {"implicit_attn/kernels/k.py": "class A(nn.Module): ..."}),
    (kernels_define_no_module, {"implicit_attn/kernels/k.py": "class A(torch.nn.Linear): ..."}),
    (kernels_define_no_module, {"implicit_attn/kernels/k.py": "class A(Module): ..."}),
    (examples_use_public_names, {"examples/e.py": "from implicit_attn.data import _read"}),
    (examples_use_public_names, {"examples/e.py": "import solvers._loop"}),
    (examples_use_public_names, {"examples/e.py": "layer._solve()"}),
    (files_and_functions_are_short, {"solvers/a.py": "x = 1\n" * (LONGEST_FILE + 1)}),
    (
        files_and_functions_are_short,
        {"solvers/a.py": "def f():\n" + "    x = 1\n" * LONGEST_FUNCTION},
    ),
]


BROKEN += [
    (
        no_cycles_in_any_folder,
        {
            "solvers/__init__.py": "",
            "solvers/core/__init__.py": "",
            "solvers/core/a.py": "from solvers.krylov.d import x",
            "solvers/core/b.py": "",
            "solvers/krylov/__init__.py": "",
            "solvers/krylov/c.py": "from solvers.core.b import y",
            "solvers/krylov/d.py": "",
        },
    ),
    (
        no_name_hides_a_module,
        {"solvers/__init__.py": "from .a import b", "solvers/a.py": "b = 1", "solvers/b.py": ""},
    ),
    (
        no_name_hides_a_module,
        {
            "implicit_attn/kernels/__init__.py": "def k(): ...",
            "implicit_attn/kernels/k/__init__.py": "",
        },
    ),
    (no_name_hides_a_module, {"solvers/__init__.py": "a: int = 1", "solvers/a.py": ""}),
    (no_product_file_is_a_test, {"implicit_attn/studies/test_time.py": "x = 1"}),
    (no_product_file_is_a_test, {"solvers/speed_test.py": "x = 1"}),
    (folders_are_small, {f"solvers/core/m{n}.py": "x = 1" for n in range(MOST_FILES + 1)}),
]


@pytest.mark.parametrize(("rule", "sources"), BROKEN)
def test_the_rule_sees_what_breaks_it(rule: Rule, sources: dict[str, str]) -> None:
    assert len(rule(parse(sources))) == 1


GOOD = {
    "solvers/__init__.py": "from solvers.a import f\nfrom . import b",
    "solvers/a.py": "import torch\nfrom solvers import b\nfrom solvers.b import g",
    "solvers/b.py": "import math\nimport scipy.linalg",
    "solvers/lazy.py": "import importlib",
    "solvers/torchdeq_bridge.py": "import torchdeq",
    "implicit_attn/__init__.py": "from implicit_attn.deq import DEQ",
    "implicit_attn/optional.py": "import importlib",
    "implicit_attn/kernels/k.py": "class A(torch.autograd.Function): ...",
    "implicit_attn/kernels/k/triton/a.py": "import triton.language as tl",
    "implicit_attn/energies/e.py": "from ..kernels import k\nclass E(nn.Module): ...",
    "implicit_attn/energies/f.py": "from solvers.core.checks import require_count",
    "implicit_attn/updates/u.py": "from solvers import EnergyUpdate",
    "implicit_attn/deq.py": "import solvers\nfrom implicit_attn.updates.u import U",
    "implicit_attn/studies/s.py": "from solvers import fixed_point",
    "examples/e.py": "import torchdeq\nself._x = layer.__class__\nimport implicit_attn",
    "solvers/long.py": "def f():\n    '''\n"
    + "    word\n" * 100
    + "    '''\n"
    + "    x = 1\n" * (LONGEST_FUNCTION - 1),
}


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_what_is_allowed_passes(rule: Rule) -> None:
    assert rule(parse(GOOD)) == []
