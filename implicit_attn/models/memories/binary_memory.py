"""Associative memories of binary patterns: learning rules, retrieval, energy."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from implicit_attn.energies import ClassicalHopfield, DenseAssociative, Energy
from implicit_attn.energies.tokens import accumulation_dtype
from implicit_attn.models.memories.learning_rules import PAIR_RULES
from solvers.core.checks import require_choice, require_count, require_flag, require_instance

ORDERS = ("asynchronous", "random", "synchronous")
NOISE = 16  # roundings of a sum, within which two energies count as equal


class BinaryMemory(nn.Module):
    r"""Stores P patterns of N spins +1 and -1, and retrieves them from damaged copies.

    Pair rules have couplings J, symmetric with an empty diagonal::

        E(s) = -1/2 sum_ij J_ij s_i s_j,     s_i <- sign(sum_j J_ij s_j)

    Dense rules have a function F of the overlaps ``y_mu = x_mu.s``::

        E(s) = -sum_mu F(y_mu),              s_i <- the sign with the lower energy

    Both updates choose the sign of one spin that has the lower energy, given all others; where both
    have the same, the spin stays. A sweep that updates one spin after another never raises the energy.

    Args:
        patterns: (P, N) floating, entries +1 and -1; copied. Half precision stores them, and everything
            is computed in float32.
        rule: ``"hebb"``, ``J = X^T X / N``, which keeps about 0.138 N random patterns;
            ``"pseudo-inverse"``, ``J = X^+ X``, the projection onto them, below N;
            ``"pseudo-likelihood"``, J by 200 ascent steps on ``sum_i log p(s_i | others)``;
            an integer n >= 2, ``F(y) = max(y, 0)^n``, of the order of N^(n - 1) patterns;
            ``"exp"``, ``F(y) = exp(y - N)``, of the order of 2^(N / 2).
        rectified: False: ``F(y) = y^n``, for an integer rule only. An even n then stores the
            negatives, too.

    Attributes:
        patterns: (P, N).
        couplings: (N, N) of pair rules, in float32 or wider, else None.

    Raises:
        TypeError, ValueError: for patterns of another dtype, shape or value; for an unknown rule.

    Example:
        >>> patterns = (
        ...     torch.randint(2, (3, 50), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
        ... )
        >>> damaged = patterns.clone()
        >>> damaged[:, :5] *= -1
        >>> bool((BinaryMemory(patterns).retrieve(damaged) == patterns).all())
        True

    Source: Hopfield (1982), https://doi.org/10.1073/pnas.79.8.2554; Krotov and Hopfield (2016),
    https://arxiv.org/abs/1606.01164, for powers; Demircigil et al. (2017),
    https://arxiv.org/abs/1702.01929, for the exponential.
    """

    patterns: Tensor
    couplings: Tensor | None

    def __init__(
        self, patterns: Tensor, rule: str | int = "hebb", *, rectified: bool = True
    ) -> None:
        super().__init__()
        check_spins("patterns", patterns, "(P, N)")
        self.rule = check_rule(rule)
        self.rectified = require_flag("rectified", rectified)
        if not rectified and not isinstance(rule, int):
            raise ValueError(f"rectified=False needs an integer rule, got {rule!r}")
        self.register_buffer("patterns", patterns.detach().clone())
        learn = PAIR_RULES.get(rule) if isinstance(rule, str) else None
        self.register_buffer("couplings", None if learn is None else learn(self._wide()))

    @property
    def sites(self) -> int:
        """N, the number of spins."""
        return self.patterns.shape[1]

    def energy(self, s: Tensor) -> Tensor:
        """``E(s)``, (B,), for spins (B, N); float32 or wider, float64 of dense rules.

        The values of these leave float32: ``300^20`` is above it, ``exp(-110)`` below.
        """
        self._check(s)
        if self.couplings is not None:
            couplings = self._wide_couplings()
            s = s.to(couplings.dtype)
            return -0.5 * (s @ couplings * s).sum(-1)
        y = s.double() @ self.patterns.double().mT
        if self.rule == "exp":
            return -(y - self.sites).exp().sum(-1)
        return -self._power(y).sum(-1)

    def retrieve(
        self,
        s: Tensor,
        sweeps: int = 20,
        *,
        order: str = "asynchronous",
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The states after at most ``sweeps`` updates of every spin; fixed points stay.

        Args:
            s: (B, N), +1 and -1.
            sweeps: >= 1. On a CPU a sample ends with its first sweep that changes nothing.
            order: ``"asynchronous"``, one spin after another; ``"random"``, the same in a new order
                each sweep; ``"synchronous"``, all at once, which may end in a cycle and raise the
                energy.
            generator: of the orders, for ``"random"``; None: PyTorch's own.

        Returns:
            (B, N), of the dtype of the patterns; :meth:`is_fixed_point` tells which of them have arrived.

        Raises:
            TypeError, ValueError: for other spins, sweeps or orders.
        """
        self._check(s)
        require_count("sweeps", sweeps)
        require_choice("order", order, ORDERS)
        require_instance(
            "generator", generator, torch.Generator, "a torch.Generator", optional=True
        )
        dtype, moving = s.dtype, s.to(accumulation_dtype(s.dtype))
        found, rows = moving.clone(), torch.arange(len(s), device=s.device)
        for _ in range(sweeps):
            if order == "synchronous":
                after = self._all_at_once(moving)
            else:
                after = self._sweep(moving, order, generator)
            found[rows] = after
            if s.device.type == "cpu":  # elsewhere the answer would have to be awaited
                changed = (after != moving).any(-1)
                rows, after = rows[changed], after[changed]
                if len(rows) == 0:
                    break
            moving = after
        return found.to(dtype)

    def is_fixed_point(self, s: Tensor) -> Tensor:
        """Whether no spin would change, (B,) bool, for spins (B, N)."""
        self._check(s)
        s = s.to(accumulation_dtype(s.dtype))
        return (self._all_at_once(s) == s).all(-1)

    def continuous(self) -> tuple[Energy, float]:
        """An energy of real states, and what must be added to it to have :meth:`energy` at spins.

        ``ClassicalHopfield`` for pair rules, whose couplings get a diagonal that makes them positive
        semidefinite; ``DenseAssociative`` for the others. Both are unbounded below: put them behind
        a bounded activation, as an ``ActivationStep`` does. Their patterns are float32 or wider.

        Raises:
            ValueError: for rectified powers, whose energy ``DenseAssociative`` has not.
        """
        patterns = self._wide()
        count, sites = patterns.shape
        if self.rule == "hebb":
            return ClassicalHopfield(patterns / math.sqrt(sites)), count / 2
        if self.couplings is not None:
            values, vectors = torch.linalg.eigh(self._wide_couplings())
            scale = (values - values[0]).sqrt()
            return ClassicalHopfield((vectors * scale).mT), -0.5 * sites * values[0].item()
        if self.rule == "exp":
            return DenseAssociative(patterns, power="exp", shift=sites), 0.0
        if self.rectified:
            raise ValueError(
                f"rectified=True with rule={self.rule} has no energy of real states here; "
                "rectified=False has"
            )
        return DenseAssociative(patterns, power=self.rule), 0.0

    def _wide(self) -> Tensor:
        """The patterns in the dtype that everything is computed in."""
        return self.patterns.to(accumulation_dtype(self.patterns.dtype))

    def _wide_couplings(self) -> Tensor:
        assert self.couplings is not None
        return self.couplings.to(accumulation_dtype(self.couplings.dtype))

    def _sweep(self, s: Tensor, order: str, generator: torch.Generator | None) -> Tensor:
        s, sites = s.clone(), s.shape[1]
        device = generator.device if generator is not None else s.device
        random = order == "random"
        turns = (
            torch.randperm(sites, generator=generator, device=device) if random else range(sites)
        )
        patterns, couplings, noise = self._wide(), *self._pairs()
        y = s @ patterns.mT
        for i in turns.tolist() if isinstance(turns, Tensor) else turns:
            old = s[:, i]
            if couplings is not None:
                s[:, i] = _sign(s @ couplings[i], noise, old)
                continue
            column = patterns[:, i]
            new = self._dense_sign(y - torch.outer(old, column), column, old)
            y += torch.outer(new - old, column)
            s[:, i] = new
        return s

    def _all_at_once(self, s: Tensor) -> Tensor:
        couplings, noise = self._pairs()
        if couplings is not None:
            return _sign(s @ couplings.mT, noise, s)
        columns = self._wide().mT
        y = s @ columns
        signs = [
            self._dense_sign(y - torch.outer(old, column), column, old)
            for old, column in zip(s.mT, columns, strict=True)
        ]
        return torch.stack(signs, dim=-1)

    def _pairs(self) -> tuple[Tensor | None, Tensor]:
        """The couplings, and the size of a field that counts as zero."""
        if self.couplings is None:
            return None, self.patterns.new_zeros(())
        couplings = self._wide_couplings()
        largest = couplings.abs().sum(-1).amax()
        return couplings, NOISE * torch.finfo(largest.dtype).eps * largest

    def _dense_sign(self, rest: Tensor, column: Tensor, old: Tensor) -> Tensor:
        """New signs (B,) of the spin with the entries ``column`` (P,), ``rest`` (B, P) without it."""
        if self.rule == "exp":  # exp(rest + 1) - exp(rest - 1) is a multiple of exp(rest)
            weight = rest.softmax(-1)
        else:
            weight = self._power((rest + 1) / self.sites) - self._power((rest - 1) / self.sites)
        noise = NOISE * torch.finfo(rest.dtype).eps * weight.abs().sum(-1)
        return _sign(weight @ column, noise, old)

    def _power(self, y: Tensor) -> Tensor:
        y = y.clamp_min(0) if self.rectified else y
        found, exponent = y, int(self.rule)
        for bit in bin(exponent)[3:]:  # by squares: pow is ten times as slow for exponents above 3
            found = found * found * y if bit == "1" else found * found
        return found

    def _check(self, s: Tensor) -> None:
        check_spins("s", s, "(B, N)", empty=True)
        if s.shape[1] != self.sites:
            raise ValueError(f"s must have {self.sites} spins, got shape {tuple(s.shape)}")
        if s.dtype != self.patterns.dtype:
            raise TypeError(f"s must be of dtype {self.patterns.dtype}, got {s.dtype}")

    def extra_repr(self) -> str:
        return f"patterns={tuple(self.patterns.shape)}, rule={self.rule!r}"


def _sign(field: Tensor, noise: Tensor, old: Tensor) -> Tensor:
    """The sign of the field, ``old`` where the field is zero to rounding."""
    return torch.where(field.abs() <= noise, old, field.sign())


def check_rule(rule: object) -> str | int:
    """A pair rule, ``"exp"``, or an integer >= 2."""
    if isinstance(rule, int) and not isinstance(rule, bool) and rule >= 2:
        return rule
    if isinstance(rule, str) and rule in (*PAIR_RULES, "exp"):
        return rule
    raise ValueError(f"rule must be one of {(*PAIR_RULES, 'exp')} or an integer >= 2, got {rule!r}")


def check_spins(name: str, spins: object, shape: str, *, empty: bool = False) -> None:
    """``spins`` must be a floating matrix of +1 and -1, with at least one row unless ``empty``."""
    if not isinstance(spins, Tensor) or not spins.is_floating_point():
        kind = spins.dtype if isinstance(spins, Tensor) else type(spins).__name__
        raise TypeError(f"{name} must be a floating tensor {shape}, got {kind}")
    if spins.dim() != 2 or spins.shape[1] == 0 or (len(spins) == 0 and not empty):
        raise ValueError(f"{name} must have the shape {shape}, got {tuple(spins.shape)}")
    if not bool((spins.abs() == 1).all()):
        raise ValueError(f"{name} must have the entries +1 and -1 only")
