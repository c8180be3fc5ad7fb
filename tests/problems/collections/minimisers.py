"""33 minimisers: Moré, Garbow and Hillstrom's (MGH), scipy's, jaxopt's and optimistix's.

Sums of squares are ``sum f_i^2``, without a half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from problems import nonlinear_systems as known
from problems.collections import equations, systems
from problems.collections.collected import Collected
from problems.nonlinear_systems import MGH

OPTIMISTIX = "optimistix, tests/helpers.py, minimisation_fn_minima_init_args, {}"
JAXOPT = "jaxopt, tests/bfgs_test.py, {}"


def sum_of_squares(system: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``sum f_i(x)^2``, (B, n) -> (B,)."""

    def energy(x: Tensor) -> Tensor:
        return system(x).square().sum(1)

    return energy


def rosenbrock_chain(x: Tensor) -> Tensor:
    """``sum 100 (x_(i+1) - x_i^2)^2 + (1 - x_i)^2``."""
    return (100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2).sum(1)


FEATURES = ((1.0, 1.0, 1.0), (1.0, 1.0, 0.0), (1.0, 0.0, 1.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0))


def maximum_entropy(x: Tensor) -> Tensor:
    """``log sum_w exp(f_w . x) - k . x``: translating "in" with constraints on five words."""
    logits = x @ x.new_tensor(FEATURES).mT
    return logits.logsumexp(1) - x @ x.new_tensor([1.0, 0.3, 0.5])


def himmelblau(x: Tensor) -> Tensor:
    """``(x1^2 + x2 - 11)^2 + (x1 + x2^2 - 7)^2``."""
    return (x[:, 0] ** 2 + x[:, 1] - 11) ** 2 + (x[:, 0] + x[:, 1] ** 2 - 7) ** 2


def matyas(x: Tensor) -> Tensor:
    """``0.26 (x1^2 + x2^2) - 0.48 x1 x2``."""
    return 0.26 * (x * x).sum(1) - 0.48 * x[:, 0] * x[:, 1]


def eggholder(x: Tensor) -> Tensor:
    """``-(x2 + 47) sin sqrt|x1/2 + x2 + 47| - x1 sin sqrt|x1 - x2 - 47|``."""
    a, b = x[:, 0], x[:, 1] + 47
    return -b * (a / 2 + b).abs().sqrt().sin() - a * (a - b).abs().sqrt().sin()


def zakharov(x: Tensor) -> Tensor:
    """``|x|^2 + s^2 + s^4``, ``s = sum i x_i / 2``."""
    half = 0.5 * equations.counted(x, x.shape[1])
    total = (half * x).sum(1)
    return (x * x).sum(1) + total**2 + total**4


def _bowl() -> Tensor:
    generator = torch.Generator().manual_seed(17)
    raw = torch.randn(20, 20, generator=generator, dtype=torch.float64)
    return raw.mT @ raw


BOWL = _bowl()


def bowl(x: Tensor) -> Tensor:
    """``x^T A^T A x`` with a Gaussian A (20, 20): ill conditioned."""
    return (x * (x @ BOWL.to(x))).sum(1)


_minimiser = partial(Collected, "minimiser")


def _squares(
    name: str, system: Callable[[Tensor], Tensor], start: Sequence[float], number: int,
    solution: Sequence[float] | None = None, minimum: float | None = None,
) -> Collected:  # fmt: skip
    energy = sum_of_squares(system)
    return _minimiser(name, energy, start, MGH.format(number), solution, minimum)


MINIMISERS: list[Collected] = [
    _squares("rosenbrock", systems.rosenbrock, [-1.2, 1.0], 1, [1.0, 1.0], 0.0),
    _squares("freudenstein_roth", equations.freudenstein_roth, [0.5, -2.0], 2, [5.0, 4.0], 0.0),
    _squares("powell_badly_scaled", known.powell_badly_scaled, [0.0, 1.0], 3,
        [1.0981593296999225e-05, 9.106146739866525], 0.0),
    _squares("brown_badly_scaled", equations.brown_badly_scaled, [1.0, 1.0], 4, [1e6, 2e-6], 0.0),
    _squares("beale", equations.beale, [1.0, 1.0], 5, [3.0, 0.5], 0.0),
    _squares("jennrich_sampson", equations.jennrich_sampson, [0.3, 0.4], 6, None, 124.362),
    _squares("helical_valley", systems.helical_valley, [-1.0, 0, 0], 7, [1.0, 0.0, 0.0], 0.0),
    _squares("bard", equations.bard, [1.0, 1.0, 1.0], 8, None, 8.21487e-3),
    _squares("gaussian", equations.gaussian, [0.4, 1.0, 0.0], 9, None, 1.12793e-8),
    _squares("gulf", equations.gulf, [5.0, 2.5, 0.15], 11, [50.0, 25.0, 1.5], 0.0),
    _squares("box_3d", equations.box_3d, [0.0, 10.0, 20.0], 12, [1.0, 10.0, 1.0], 0.0),
    _squares("powell_singular", known.powell_singular, [3.0, -1, 0, 1], 13, 4 * [0.0], 0.0),
    _squares("wood", equations.wood, [-3.0, -1.0, -3.0, -1.0], 14, 4 * [1.0], 0.0),
    _squares("kowalik_osborne", equations.kowalik_osborne, [0.25, 0.39, 0.415, 0.39], 15, None,
        3.07505e-4),
    _squares("brown_dennis", equations.brown_dennis, [25.0, 5.0, -5.0, -1.0], 16, None, 85822.2),
    _squares("biggs_exp6", equations.biggs_exp6, [1.0, 2, 1, 1, 1, 1], 18, [1.0, 10, 1, 5, 4, 3],
        0.0),
    _squares("watson_6", equations.watson, 6 * [0.0], 20, None, 2.28767e-3),
    _squares("penalty_1_4", equations.penalty_1, [1.0, 2.0, 3.0, 4.0], 23, None, 2.24997e-5),
    _squares("penalty_2_4", equations.penalty_2, 4 * [0.5], 24, None, 9.37629e-6),
    _squares("variably_dimensioned_10", equations.variably_dimensioned,
        [1 - k / 10 for k in range(1, 11)], 25, 10 * [1.0], 0.0),
    _squares("trigonometric_10", known.trigonometric, 10 * [0.1], 26, 10 * [0.0], 0.0),
    _squares("broyden_tridiagonal_10", known.broyden_tridiagonal, 10 * [-1.0], 30, None, 0.0),
    _squares("broyden_banded_10", known.broyden_banded, 10 * [-1.0], 31, None, 0.0),
    _squares("chebyquad_8", known.chebyquad, systems.even(8), 35, None, 3.51687e-3),
    _minimiser("rosenbrock_5", rosenbrock_chain, [1.3, 0.7, 0.8, 1.9, 1.2],
        "scipy.optimize.minimize, the example of its documentation", 5 * [1.0], 0.0),
    _minimiser("maximum_entropy", maximum_entropy, [0.0, 0.0, 0.0],
        "scipy, optimize/tests/test_optimize.py, CheckOptimize", [0.0, -0.524869316, 0.487525860]),
    _minimiser("rosenbrock_0", rosenbrock_chain, [0.0, 0.0], JAXOPT.format("test_correctness"),
        [1.0, 1.0], 0.0),
    _minimiser("eggholder", eggholder, [100.0, 100.0],
        JAXOPT.format("test_against_scipy, eggholder")),
    _minimiser("zakharov_6", zakharov, [600.0, 700.0, 200.0, 100.0, 90.0, 1e4],
        JAXOPT.format("test_zakharov"), 6 * [0.0], 0.0),
    _minimiser("himmelblau", himmelblau, [2.0, 2.5], OPTIMISTIX.format("himmelblau"), [3.0, 2.0],
        0.0),
    _minimiser("matyas", matyas, [6.0, 6.0], OPTIMISTIX.format("matyas"), [0.0, 0.0], 0.0),
    _minimiser("bowl_20", bowl, 20 * [0.05], OPTIMISTIX.format("bowl, numbers drawn anew"),
        20 * [0.0], 0.0),
    _minimiser("beale_2_0", sum_of_squares(equations.beale), [2.0, 0.0], OPTIMISTIX.format("beale"),
        [3.0, 0.5], 0.0),
]  # fmt: skip
