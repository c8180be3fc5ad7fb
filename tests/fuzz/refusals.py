"""Calls with one bad argument: each must be refused by an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import solvers
from fuzz.cases import Draw
from fuzz.invariants import refused
from solvers.torchdeq_bridge import TorchDEQ

NAN, INF = float("nan"), float("inf")
BAD_COUNTS: tuple[Any, ...] = (0, -1, 2.5, True, "10", None, NAN)
BAD_FLAGS: tuple[Any, ...] = (1, 0, None, "yes")

CONSTRUCTORS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "Forward damping": (solvers.Forward, (0.0, -1.0, 2.5, NAN, INF, "1", None, True)),
    "Anderson memory": (solvers.Anderson, BAD_COUNTS),
    "Anderson damping": (solvers.Anderson, (0.0, -1.0, NAN, "1", None)),
    "Anderson regularization": (solvers.Anderson, (-1.0, NAN, INF, "1", None)),
    "Broyden memory": (solvers.Broyden, BAD_COUNTS),
    "Broyden damping": (solvers.Broyden, (0.0, -1.0, NAN, "1", None)),
    "GradientDescent step_size": (solvers.GradientDescent, (0.0, -1.0, NAN, INF, "fast", None)),
    "GradientDescent momentum": (solvers.GradientDescent, (-0.1, 1.0, 2.0, NAN, "1", None)),
    "GradientDescent nesterov": (solvers.GradientDescent, (True,)),
    "LBFGS memory": (solvers.LBFGS, tuple(each for each in BAD_COUNTS if each is not None)),
    "Newton forcing": (solvers.Newton, (0.0, 1.0, -1.0, NAN, "1", None)),
    "Newton linear": (solvers.Newton, ("cgs", 3, solvers.Anderson)),
    "GMRES restart": (solvers.GMRES, BAD_COUNTS),
    "Tolerance rtol": (solvers.Tolerance, (-1e-3, NAN, INF, "1e-3", None, True)),
    "Tolerance atol": (solvers.Tolerance, (-1e-3, NAN, INF, "1e-3", None, True)),
    "Implicit max_steps": (solvers.Implicit, BAD_COUNTS),
    "Implicit on_failure": (solvers.Implicit, ("quiet", None, 3)),
    "Implicit solver": (solvers.Implicit, ("cgs", solvers.Anderson, solvers.Anderson())),
    "Implicit tolerance": (solvers.Implicit, (-1e-3, "1e-3")),
    "Phantom steps": (solvers.Phantom, BAD_COUNTS),
    "Phantom damping": (solvers.Phantom, (0.0, -1.0, 2.5, NAN, "1", None)),
    "Unrolled checkpoint": (solvers.Unrolled, BAD_FLAGS),
    "TorchDEQ name": (TorchDEQ, ("nope", "", 3, None)),
    "AdaptiveTAP damping": (solvers.AdaptiveTAP, (0.0, -1.0, 1.5, NAN, "1")),
    "AdaptiveTAP memory": (solvers.AdaptiveTAP, BAD_COUNTS),
}


def _states(z: torch.Tensor) -> tuple[Any, ...]:
    return (
        z.long(), torch.where(z > 9, z, NAN), z * INF, z[0, 0], z[:0], [], "z", 3.0, None,
        (z, z[:1]), (z, 3.0), z.to(torch.complex64), z[:, :0],
    )  # fmt: skip


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "max_steps": BAD_COUNTS,
    "tolerance": (-1e-4, "1e-4", solvers.Tolerance),
    "solver": ("andersen", solvers.CG, 3, solvers.CG()),
    "adjoint": ("implicitly", solvers.CG, 3, solvers.CG()),
    "record": BAD_FLAGS,
    "compact": BAD_FLAGS,
    "callback": (3, "print"),
    "on_failure": ("quiet", None, 3, ""),
    "energy": (3, "energy"),
    "f": (3, None, "f"),
}


def _functions(z: torch.Tensor) -> tuple[Any, ...]:
    """Maps that return something else than a state."""
    return (
        lambda z: z[:, :1].expand(-1, 7), lambda z: z.long(), lambda z: (z, z), lambda z: None,
        lambda z: z.sum(), lambda z: [z], lambda z: 3.0, lambda z: z.double(), lambda z: {"z": z},
        lambda z: z[:-1] if len(z) > 1 else torch.cat([z, z]),
    )  # fmt: skip


def refuse_fixed_point(draw: Draw) -> None:
    """One bad argument for ``fixed_point`` or for a constructor of its options."""
    z = draw.normal(draw.random.randint(2, 4), 3, dtype=torch.float32)
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    f: Any = torch.cos
    kind = draw.random.choice(("constructor", "constructor", "keyword", "z0", "args", "mask", "f"))
    if kind == "constructor":
        key = draw.choose("constructor", list(CONSTRUCTORS))
        make, values = CONSTRUCTORS[key]
        name = key.split()[1]
        value = draw.choose("value", values)
        refused(draw, lambda: make(**{name: value}), name)
        return
    name = kind
    if kind == "keyword":
        name = draw.choose("argument", list(ARGUMENTS))
        value = draw.choose("value", ARGUMENTS[name])
        if name == "f":
            f = value
        else:
            keywords = {name: value}
    elif kind == "z0":
        position = draw.note("position", draw.random.randrange(13))
        z = _states(z)[position]
    elif kind == "args":
        position = draw.note("position", draw.random.randrange(4))
        args = ([z], (z[:1],), (torch.full_like(z, NAN),), "ab")[position]  # type: ignore[assignment]
        f = lambda z, *args: torch.cos(z)  # noqa: E731
    elif kind == "mask":
        position = draw.note("position", draw.random.randrange(5))
        good = z[:, :2] > 0
        keywords["mask"] = (good[:, 0], good.float(), good, z[:1] > 0, "mask")[position]
    else:
        position = draw.note("position", draw.random.randrange(10))
        f = _functions(z)[position]
    refused(draw, lambda: solvers.fixed_point(f, z, args, **keywords), name)
