"""Scipy and torchdeq are imported where they are used, and what does not use them works without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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

import implicit_attn

implicit_attn.EquilibriumBlock(16, heads=2)(torch.randn(2, 4, 16)).sum().backward()
for name in implicit_attn.pretrained_models():
    implicit_attn.load_pretrained(name)
board = implicit_attn.load_pretrained("sudoku-solver").solve("." * 81, max_steps=2, on_failure="ignore")
pixels = {"digits-hyperset-equilibrium": 8, "mnist-spins": 28}
for name, side in pixels.items():
    assert implicit_attn.load_pretrained(name)(torch.rand(2, 1, side, side)).shape == (2, 10)
assert len(implicit_attn.load_pretrained("austen-language").generate("It was ", 3)) == 10
print([name for name in sys.modules if name in ("scipy", "torchdeq")])
for use in (
    lambda: solvers.spectral_radius(lambda z: z, torch.ones(1, 99)),
    lambda: __import__("solvers.torchdeq_bridge"),
):
    try:
        use()
    except ImportError as error:
        print(error)
"""
)


def test_neither_is_needed_and_what_needs_one_says_so() -> None:
    """Solves, a block and all weights work; the spectrum of a large map and the bridge ask for one."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded, spectrum, bridge = done.stdout.splitlines()
    assert loaded == "[]"
    assert spectrum.startswith("method='arpack' needs scipy") and "pip install" in spectrum
    assert bridge.startswith("solvers.torchdeq_bridge needs torchdeq") and "pip install" in bridge
