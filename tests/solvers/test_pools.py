"""Errors of solves in the processes of a pool."""

from __future__ import annotations

import multiprocessing
import sys

import pytest
import torch

from solvers import Forward, SolveError, fixed_point


def fails(_: int) -> None:
    with torch.no_grad():
        fixed_point(
            lambda z: z + 1, torch.zeros(2, 3), solver=Forward(), max_steps=5, on_failure="raise"
        )


@pytest.mark.defect("C3")
@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forks of processes with threads
def test_a_pool_returns_where_a_solve_fails_in_it() -> None:
    """Without the graph that keeps a solution from being pickled at all."""
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(SolveError):
        pool.map_async(fails, [0]).get(30)
