"""The native engine is built with the package: one library for each level of instructions.

No library knows Python: ``solvers.native`` loads one by ctypes, so that one wheel a platform serves
every Python. Where there is no compiler, or one fails, the package is installed without.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

FOLDERS = ("solvers/native", "implicit_attn/kernels/bi_softmax/cpp")
SOURCES = ["solvers/native/engine.cpp", "implicit_attn/kernels/bi_softmax/cpp/bi_softmax.cpp"]
HEADERS = sorted(path.as_posix() for folder in FOLDERS for path in Path(folder).glob("*.h"))
FILES = [*SOURCES, *HEADERS]
# The names are those of solvers/native/__init__.py.
LEVELS = (
    {"avx512": ["-mavx512f", "-mfma"], "avx2": ["-mavx2", "-mfma"], "baseline": []}
    if platform.machine().lower() in ("x86_64", "amd64")
    else {"baseline": []}
)
FLAGS = ["-std=c++17", "-O3", "-fopenmp-simd", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
         "-Wno-maybe-uninitialized"]  # fmt: skip
# What a library needs beside libc and libm is in it.
LINK = (
    ["-s", "-static-libgcc", "-static-libstdc++", "-Wl,--exclude-libs,ALL"]
    if sys.platform == "linux"
    else []
)


class BuildEngine(build_ext):
    """Libraries without Python's ABI: neither in their names nor in what they export."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        """Each level has object files of its own."""
        folder, self.build_temp = self.build_temp, f"{self.build_temp}/{ext.name}"
        super().build_extension(ext)
        self.build_temp = folder

    def get_export_symbols(self, ext: object) -> list[str]:
        return []

    def copy_extensions_to_source(self) -> None:
        """Of an editable install, whose sources may change later: what they were is kept beside."""
        folder = Path("solvers/native/lib")
        folder.mkdir(exist_ok=True)
        super().copy_extensions_to_source()
        digests = [(hashlib.sha256(Path(each).read_bytes()).hexdigest(), each) for each in FILES]
        (folder / "sources.txt").write_text(
            "".join(f"{digest} {each}\n" for digest, each in digests)
        )


class FreshBuild(build):
    """Build without what an earlier build of the checkout left, such as a module that was removed since."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class EngineWheel(bdist_wheel):
    """A wheel of a platform, for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            f"solvers.native.lib.engine_{level}",
            SOURCES,
            include_dirs=["solvers/native"],
            depends=HEADERS,
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=LINK,
            language="c++",
            optional=True,
        )
        for level, flags in LEVELS.items()
    ],
    cmdclass={"build": FreshBuild, "build_ext": BuildEngine, "bdist_wheel": EngineWheel},
)
