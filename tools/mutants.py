"""How many small mistakes in the product the tests find: seeded mutants, one at a time.

    python -m tools.mutants --count 100 --seed 0

A mutant changes one operator, comparison, condition or number in a file of the library; the tests of that
file's room are run until the first failure. A mutant that no test fails on is printed, to be looked at: some
change nothing that can be seen (a faster path, a message), the others show a missing test. Run it on a clean
checkout; the file is restored after each mutant, also when the run is interrupted.
"""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
# Where mutants are made; the tests that are to find one lie in the folder of the same name in tests/.
PLACES = (
    "solvers/spins", "solvers/eigen.py", "solvers/krylov.py", "solvers/linear.py", "solvers/adjoint.py",
    "solvers/core", "solvers/methods", "solvers/fixed_points.py", "implicit_attn/kernels",
    "implicit_attn/energies", "implicit_attn/updates", "implicit_attn/deq",
    "implicit_attn/regularization.py", "implicit_attn/models", "implicit_attn/data",
)  # fmt: skip
TOGETHER = {"solvers/linear": "solvers/krylov"}  # tested in one file
# Tests of other rooms that look at these, too.
MORE = {"krylov": "solvers/adjoint.py", "adjoint": "deq", "core": "solvers", "deq": "block",
        "kernels": "energies", "updates": "block", "regularization": "block"}  # fmt: skip
SWAPS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.MatMult: "*",
    ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
# Bytecode of a mutant must not outlive it.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def mutants(text: str) -> Iterator[tuple[int, str]]:
    """The line of each change that can be made to a file, with the changed text."""
    tree = ast.parse(text)
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    source = text.encode()

    def span(node: ast.expr) -> slice:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return slice(
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def changed(node: ast.expr, new: str) -> tuple[int, str]:
        at = span(node)
        return node.lineno, (source[: at.start] + new.encode() + source[at.stop :]).decode()

    skipped = {
        id(inner) for node in ast.walk(tree) for part in _unseen(node) for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            left, right = ast.unparse(node.left), ast.unparse(node.right)
            yield changed(node, f"(({left}) {SWAPS[type(node.op)]} ({right}))")
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS and len(node.ops) == 1:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield changed(node, f"(({left}) {SWAPS[type(node.ops[0])]} ({right}))")
        elif isinstance(node, ast.BoolOp):
            joint = f" {SWAPS[type(node.op)]} "
            yield changed(node, f"({joint.join(f'({ast.unparse(v)})' for v in node.values)})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield changed(node, f"({ast.unparse(node.operand)})")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield changed(node, repr(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield changed(node, repr(node.value + 1 if node.value in (0, 1) else node.value * 2))


def _unseen(node: ast.AST) -> list[ast.AST]:
    """Parts without behaviour: annotations, messages of errors, what only type checkers read."""
    if isinstance(node, ast.Raise):
        return [node]
    if isinstance(node, ast.arg | ast.AnnAssign):
        return [node.annotation] if node.annotation else []
    if isinstance(node, ast.FunctionDef):
        return [node.returns] if node.returns else []
    if isinstance(node, ast.JoinedStr | ast.Assert):
        return [node]
    return []


def candidates(seed: int, count: int) -> list[tuple[str, int, str]]:
    found = []
    for each in PLACES:
        place = ROOT / each
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            if not path.name.startswith("triton"):
                name = path.relative_to(ROOT).as_posix()
                found += [(name, *mutant) for mutant in mutants(path.read_text())]
    return random.Random(seed).sample(found, count)


def survives(name: str, changed: str, seconds: int) -> bool:
    path = ROOT / name
    place = Path(next(place for place in PLACES if name.startswith(place))).with_suffix("")
    place = Path(TOGETHER.get(place.as_posix(), place))
    room = place if place.parts[0] == "solvers" else place.name
    folders = [ROOT / "tests" / each for each in (room, MORE.get(place.name, room))]
    tests = {_nearest(folder) for folder in folders}
    original = path.read_text()
    try:
        path.write_text(changed)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", *tests], cwd=ROOT,
            env=os.environ | ENVIRONMENT, capture_output=True, timeout=seconds, check=False,
        )  # fmt: skip
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False  # a loop that does not end is noticed
    finally:
        path.write_text(original)


def _nearest(folder: Path) -> Path:
    """The folder, the file that stands in its place, or what is around it."""
    file = folder.with_name(f"test_{folder.name}.py")
    return next(each for each in (folder, file, folder.parent) if each.exists())


def main(count: int = 100, seed: int = 0, seconds: int = 1200) -> None:
    """Seeded mutants, one at a time; after so many ``seconds`` one counts as found."""
    missed = 0
    for number, (name, line, changed) in enumerate(candidates(seed, count), 1):
        lost = survives(name, changed, seconds)
        missed += lost
        print(f"{number:4} {'MISSED' if lost else 'found'} {name}:{line}", flush=True)
        if lost:
            print("     " + changed.splitlines()[line - 1].strip(), flush=True)
    print(f"found {count - missed} of {count}")


if __name__ == "__main__":
    tyro.cli(main)
