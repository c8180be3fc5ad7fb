"""The C++ kernel is compiled once for a run of the tests, outside of the user's cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from solvers.native import library


@pytest.fixture(scope="session", autouse=True)
def kernels_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # The parent belongs to all workers of a run: they share what one of them compiled.
    folder = tmp_path_factory.getbasetemp().parent / "implicit-attn-kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "cache_folder", lambda: folder)
        yield
