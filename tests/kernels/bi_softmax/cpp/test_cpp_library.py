"""Where the C++ kernel comes from: the compiler, the cache, and what is never loaded."""

from __future__ import annotations

import ctypes
import fnmatch
import os
import threading
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest
import torch

from implicit_attn.kernels import bisoftmax, explain
from implicit_attn.kernels.bi_softmax.cpp import backend as cpp
from implicit_attn.kernels.bi_softmax.cpp.backend import SOURCE
from solvers.native import library, process

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the kernel is for Linux and macOS")
# Writes down that it was called, and makes an empty library.
STAND_IN = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
echo called >>"{calls}"
while [ "$1" != -o ]; do shift; done
{work}
"""
ROOT = Path(__file__).resolve().parents[4]


class Compiler:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.calls, self.path = folder / "calls", folder / "stand-in"
        self.patch = patch
        self.becomes("1.0")

    def becomes(self, version: str, work: str = 'echo made >"$2"') -> None:
        self.path.write_text(STAND_IN.format(version=version, calls=self.calls, work=work))
        self.path.chmod(0o755)
        self.patch.setenv("CXX", str(self.path))

    @property
    def count(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    return Compiler(tmp_path, monkeypatch)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not looked for the kernel yet."""
    library.forget()
    monkeypatch.setattr(cpp, "_PROCESS", cpp._Process())
    yield
    library.forget()


def test_it_is_compiled_once(compiler: Compiler, cache: Path) -> None:
    first = library.build(cache, SOURCE)
    assert first.read_text() == "made\n" and first.parent == cache.resolve()
    assert library.build(cache, SOURCE) == first and compiler.count == 1
    assert cache.stat().st_mode & 0o777 == 0o700 and first.stat().st_mode & 0o022 == 0
    assert [path.name for path in cache.iterdir()] == [first.name]


def test_another_compiler_source_or_processor_has_its_own_file(
    compiler: Compiler, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = {library.build(cache, SOURCE)}
    compiler.becomes("1.1")
    found.add(library.build(cache, SOURCE))
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-g"))
    found.add(library.build(cache, SOURCE))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    found.add(library.build(cache, SOURCE))
    changed = tmp_path / "sources" / "bi_softmax.cpp"
    changed.parent.mkdir()
    changed.write_text("// other")
    found.add(library.build(cache, changed))
    (changed.parent / "new.h").write_text("// header")
    found.add(library.build(cache, changed))
    monkeypatch.setattr(library, "SHARED", tmp_path)
    (tmp_path / "shared.h").write_text("// header of all")
    found.add(library.build(cache, changed))
    assert len(found) == compiler.count == 7


def test_a_failure_leaves_nothing_and_says_what_the_compiler_said(
    compiler: Compiler, cache: Path
) -> None:
    compiler.becomes("1.0", work='echo half >"$2"; echo "no such vector" >&2; exit 1')
    with pytest.raises(library.CannotBuild, match="failed: no such vector"):
        library.build(cache, SOURCE)
    assert not list(cache.iterdir())


def test_two_may_build_at_once(compiler: Compiler, cache: Path) -> None:
    """Both compilers run before either may end; whoever is last replaces the same file."""
    both_run = f'until [ "$(wc -l <"{compiler.calls}")" -ge 2 ]; do sleep 0.01; done'
    compiler.becomes("1.0", work=f'{both_run}; echo made >"$2"')
    found: list[Path] = []
    both = [
        threading.Thread(target=lambda: found.append(library.build(cache, SOURCE)))
        for _ in range(2)
    ]
    for each in both:
        each.start()
    for each in both:
        each.join(60)
        assert not each.is_alive()
    assert len(set(found)) == 1 and found[0].read_text() == "made\n"
    assert [path.name for path in cache.iterdir()] == [found[0].name]


def test_a_child_does_not_wait_for_its_parents_compilation() -> None:
    held = library._LOCK
    with held:  # as by a thread that compiles while another one forks
        process.Threads().now_forked()
        assert library._LOCK is not held
        assert library._LOCK.acquire(timeout=1)
        library._LOCK.release()


def test_what_is_missing_is_said(
    compiler: Compiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(library.CannotBuild, match=r"no C\+\+ compiler was found \(\$CXX, g\+\+"):
        library.build(cache, SOURCE)
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(library, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(library.CannotBuild, match=r"no C\+\+ compiler was found"):
        library.build(cache, SOURCE)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(library.CannotBuild, match="AVX2 or AVX-512, and torch reports DEFAULT"):
        library.build(cache, SOURCE)
    assert compiler.count == 0


def test_arguments_in_the_compilers_name(compiler: Compiler, cache: Path) -> None:
    compiler.patch.setenv("CXX", f"env {compiler.path}")
    assert library.build(cache, SOURCE).read_text() == "made\n" and compiler.count == 1


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_cache_that_others_may_write_to_is_refused(
    compiler: Compiler, cache: Path, mode: int
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(mode)
    with pytest.raises(library.CannotBuild, match=f"others may write to it .mode {mode:o}"):
        library.build(cache, SOURCE)
    assert compiler.count == 0


def test_a_cache_that_others_may_replace_is_refused(compiler: Compiler, cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    cache.parent.chmod(0o777)
    with pytest.raises(library.CannotBuild, match="anybody may replace what is in"):
        library.build(cache, SOURCE)
    cache.parent.chmod(0o1777)  # as /tmp: none but the owner may replace
    assert library.build(cache, SOURCE).exists()


def test_somebody_elses_cache_is_refused(
    compiler: Compiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library.build(cache, SOURCE)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(library.CannotBuild, match="it belongs to user"):
        library.build(cache, SOURCE)
    with pytest.raises(library.CannotBuild, match="it belongs to user"):
        library.check_private(path)


@pytest.mark.usefixtures("fresh")
def test_a_file_that_others_may_write_to_or_a_link_is_not_loaded(
    compiler: Compiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "cache_folder", lambda: cache)

    def loaded(path: str) -> None:
        raise AssertionError(f"{path} was loaded")

    monkeypatch.setattr(ctypes, "CDLL", loaded)
    path = library.build(cache, SOURCE)
    path.chmod(0o722)
    assert "others may write to it (mode 722)" in str(library.library(SOURCE))
    library.forget()
    other = path.rename(path.with_name("other"))
    path.symlink_to(other)
    assert "it is a link" in str(library.library(SOURCE))


@pytest.mark.usefixtures("fresh")
def test_without_a_kernel_cpp_says_why_and_auto_goes_on(
    compiler: Compiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "cache_folder", lambda: cache)
    compiler.becomes("1.0", work="echo wrong >&2; exit 1")
    z = torch.ones(1, 1, 300, 4)
    for call in (bisoftmax, explain):
        with pytest.raises(RuntimeError, match=r'backend="cpp" cannot be used here: .*wrong'):
            call(z, 0.3, backend="cpp")
    monkeypatch.setattr(process, "ENABLED", True)
    with pytest.warns(RuntimeWarning, match=r"IMPLICIT_ATTN_CPP is 1, but .*wrong"):
        choice = explain(z, 0.3)
    assert choice.backend == "blocks" and "no C++ kernel: " in choice.reason
    assert explain(z, 0.3) == choice  # warned once, and the compiler was asked once
    assert compiler.count == 1
    assert torch.isfinite(bisoftmax(z, 0.3)[0]).all()


@pytest.mark.parametrize("value", ["", "0", "1", "yes"])
def test_the_variable(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process.VARIABLE, value)
    if value == "yes":
        with pytest.raises(ValueError, match="IMPLICIT_ATTN_CPP must be 0 or 1, got 'yes'"):
            process._enabled()
    else:
        assert process._enabled() == (value == "1")


@pytest.mark.parametrize("package", ["implicit_attn.kernels.bi_softmax.cpp", "solvers.native"])
def test_the_sources_are_installed(package: str) -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = config["options.package_data"][package].split()
    others = [
        path.name
        for path in ROOT.joinpath(*package.split(".")).iterdir()
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert any(name.endswith(".cpp") for name in others)
    assert [name for name in others if not any(fnmatch.fnmatch(name, p) for p in patterns)] == []
