"""The built distributions do what they should where nothing of the repository can be seen.

    PYTHONPATH=.:tests python tests/workers/distribution.py dist    # one wheel and one sdist

The wheel is installed into an environment outside of the repository, which has third-party packages by
links to those that run this program. Then: the contents of the wheel against those of the sdist, its
metadata against its imports, the command, the shipped models, and some tests of the sdist.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from email.parser import Parser as MetadataParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("implicit_attn", "solvers")
OURS = ("implicit_attn", "implicit-attn", "__editable__", "solvers")
# Of the tests of the sdist: what a user would miss first, in seconds.
TESTS = ("tests/test_public_names.py", "tests/test_command.py")
WHERE = """
import sys, implicit_attn, solvers
from pathlib import Path
for package in (implicit_attn, solvers):
    here = Path(package.__file__).resolve()
    assert Path(sys.prefix).resolve() in here.parents, f"{package.__name__} comes from {here}"
for name, row in implicit_attn.pretrained_models().items():
    model = implicit_attn.load_pretrained(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == row.parameters, name
print("imported from", Path(implicit_attn.__file__).parent, "version", implicit_attn.__version__)
"""

# By extras of their own, of the only modules that import them.
OF_ONE_MODULE = {"triton": "gpu", "torchdeq": "torchdeq"}


def imported(sources: Iterable[str]) -> dict[str, set[str | None]]:
    """Top-level modules that the sources import, with the extras by which ``require`` names them.

    None stands for what is imported without an extra. Standard library and own packages are left out.
    """
    found: dict[str, set[str | None]] = {}
    for text in sources:
        for module, extra in _imports(ast.parse(text)):
            top = module.partition(".")[0]
            if top not in PACKAGES and top not in sys.stdlib_module_names:
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


# A requirement in metadata: its name, its extras, and the extra that requires it.
NAME = re.compile(r"([\w.-]+)\s*(?:\[([\w.,-]+)\])?")
EXTRA = re.compile(r"extra == ['\"]([\w-]+)")


def requirements(lines: Sequence[str]) -> dict[str, list[str]]:
    """The distributions of lines of ``Requires-Dist``, without an extra under ``""``, and of each extra.

    An extra that includes another one also contains its distributions.
    """
    own: dict[str, list[str]] = {}
    included: dict[str, list[str]] = {}  # extra -> extras that it includes
    for line in lines:
        name, extra = NAME.match(line), EXTRA.search(line)
        group = extra[1] if extra else ""
        own.setdefault(group, [])
        if name is not None and name[1].replace("_", "-") == "implicit-attn":
            included.setdefault(group, []).extend((name[2] or "").split(","))
        elif name is not None:
            own[group].append(name[1])

    def gathered(group: str) -> list[str]:
        inner = [name for part in included.get(group, []) for name in gathered(part)]
        return list(dict.fromkeys([*own.get(group, []), *inner]))

    return {group: gathered(group) for group in own}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def only(folder: Path, pattern: str) -> Path:
    """The one file of that kind."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder} must hold one {pattern}, found {[path.name for path in found]}")
    return found[0]


def check_contents(wheel: Path, sources: Path) -> None:
    """All files of the packages in the sdist are in the wheel, and its metadata name its imports.

    Of the engine's sources the wheel has what was built of them; it is tagged for no Python in particular.
    """
    assert wheel.name.split("-")[2:4] == ["py3", "none"], wheel.name
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        metadata = next(name for name in held if name.endswith(".dist-info/METADATA"))
        fields = MetadataParser().parsestr(archive.read(metadata).decode())
        texts = [archive.read(name).decode() for name in held if name.endswith(".py")]
    for package in PACKAGES:
        there = {path for path in (sources / package).rglob("*") if path.is_file()}
        names = {p.relative_to(sources).as_posix() for p in there if p.suffix not in (".cpp", ".h")}
        assert names and names <= held, f"not in the wheel: {names - held}"
    assert any(Path(name).name.startswith("engine_") for name in held), "there is no engine"
    for folder in ("tests", "docs", "examples"):
        assert any((sources / folder).rglob("*")), f"the sdist has no {folder}"
    lacking = unnamed(texts, requirements(fields.get_all("Requires-Dist") or []))
    assert not lacking, f"the metadata do not name: {lacking}"


def empty_environment(folder: Path, wheel: Path) -> Path:
    """An environment with the wheel and links to third-party packages; its folder of commands."""
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    links = folder / "third-party"
    links.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        # .pth files of the other environment, an editable install among them, are left behind.
        if not entry.name.startswith(OURS) and entry.suffix != ".pth":
            (links / entry.name).symlink_to(entry)
    python = folder / "venv" / "bin" / "python"
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    place = Path(subprocess.check_output([python, "-c", script], text=True).strip())
    (place / "third-party.pth").write_text(f"{links}\n")
    install = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    install += ["--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, env=surroundings(folder))
    return python.parent


def surroundings(folder: Path) -> dict[str, str]:
    """The variables of the processes: nothing that leads back to the repository."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    return kept | {"MPLBACKEND": "Agg", "XDG_CACHE_HOME": str(folder / "cache")}


def main(dist: Path) -> None:
    """Check the wheel and the sdist of a folder; an AssertionError or a failed command says what."""
    wheel, sdist = only(dist, "*.whl"), only(dist, "*.tar.gz")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        assert ROOT not in folder.parents
        with tarfile.open(sdist) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since 3.11.4
            archive.extractall(folder / "sdist")
        sources = folder / "sdist" / sdist.name.removesuffix(".tar.gz")
        check_contents(wheel, sources)
        commands = empty_environment(folder, wheel)
        work = folder / "work"
        work.mkdir()
        environment = surroundings(folder)

        def run(program: str, *words: str) -> None:
            print(f"$ {program} {' '.join(words)[:100]}", flush=True)
            subprocess.run([commands / program, *words], cwd=work, env=environment, check=True)

        (work / "where.py").write_text(WHERE)
        run("python", "where.py")
        run("implicit-attn", "info")
        run("implicit-attn", "demo", "--boards", "9", "--epochs", "1")
        for file in ("runs/demo/one-energy.png", "runs/demo/own-energy.png"):
            assert (work / file).read_bytes().startswith(b"\x89PNG"), file
        # The tests alone, without the packages beside them.
        for name in ("tests", "tools", "pyproject.toml"):
            shutil.move(str(sources / name), str(work / name))
        run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
    print("the distributions are whole")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {Path(sys.argv[0]).name} FOLDER, with one wheel and one sdist")
    main(Path(sys.argv[1]).resolve())
