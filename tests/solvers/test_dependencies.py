"""Scipy and torchdeq are imported where they are used, and what does not use them works without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys


class Absent:  # torch asks whether scipy can be found: it must not be listed as a module without a spec
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("scipy", "torchdeq"):
            raise ModuleNotFoundError(name, name=name)


sys.meta_path.insert(0, Absent())
import torch
"""
PROGRAM = (
    WITHOUT
    + """
import solvers
from solvers.spins import sites

torch.manual_seed(0)
x = torch.randn(3, 4, requires_grad=True)
solution = solvers.fixed_point(lambda z, x: 0.5 * z.cos() + x, torch.zeros(3, 4), (x,))
solution.value.sum().backward()
assert solution.converged.all() and x.grad.isfinite().all()
descent = solvers.Descent(lambda z: z.cosh().log().sum(1))
assert solvers.fixed_point(descent, x.detach(), tolerance=solvers.Tolerance(atol=1e-6)).converged.all()
assert solvers.solve_linear(lambda v: 2 * v, x.detach()).converged.all()
couplings = torch.zeros(4, 4, 1, 1)
assert solvers.adaptive_tap(couplings, x.detach()[:, :, None], site=sites.IsingSite()).converged.all()
radius = solvers.spectral_radius(lambda z: 0.5 * z, x.detach())
assert (radius - 0.5).abs().max() < 1e-6
print(PART)
"""
)


LAYERS = (
    WITHOUT
    + """
import implicit_attn

implicit_attn.EquilibriumBlock(16, heads=2)(torch.randn(2, 4, 16)).sum().backward()
for name in implicit_attn.pretrained_models():
    implicit_attn.load_pretrained(name)
board = implicit_attn.load_pretrained("sudoku-solver").solve("." * 81, max_steps=2, on_failure="ignore")
pixels = {"digits-hyperset-equilibrium": 8, "mnist-spins": 28}
for name, side in pixels.items():
    assert implicit_attn.load_pretrained(name)(torch.rand(2, 1, side, side)).shape == (2, 10)
assert len(implicit_attn.load_pretrained("austen-language").generate("It was ", 3)) == 10
print(PART)
"""
)


def run(part: str, program: str = PROGRAM) -> str:
    program = program.replace("PART", part)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=root, capture_output=True, text=True
    )
    return done.stdout if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("program", [PROGRAM, LAYERS], ids=["solves", "block and weights"])
def test_neither_is_needed(program: str) -> None:
    assert run("[n for n in sys.modules if n in ('scipy', 'torchdeq')]", program) == "[]\n"


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ("solvers.spectral_radius(lambda z: z, torch.ones(1, 99))", "method='arpack' needs scipy"),
        ("__import__('solvers.torchdeq_bridge')", "solvers.torchdeq_bridge needs torchdeq"),
    ],
)
def test_what_needs_one_says_so(use: str, told: str) -> None:
    message = run(use)
    assert message.startswith(f"ImportError: {told}") and "pip install" in message
