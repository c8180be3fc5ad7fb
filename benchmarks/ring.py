"""Bi-softmax attention over tokens that are sharded on the devices of a ring: exactness, traffic, time.

python benchmarks/ring.py [--tokens 65536] [--devices 2 4 8 16] [--gigabytes 50] [--teraflops 200]

The devices are simulated in one process: tensors are split over tokens, and every message is passed and
counted. For the tokens Z (N, p) of a head, the gradient of the energy is::

    S = beta Z Z^T,  L_i = log sum_j exp S_ij,  P_ij = exp(S_ij - L_i)
    G_i = sum_j P_ij z_j + sum_j P_ji z_j

The second sum needs the L_j of all rows, so blocks of tokens travel around the ring twice: the first lap
computes L and the first sum, the second lap the second sum. A Hessian-vector product takes two laps as well,
with T = beta (V Z^T + Z V^T) and r_i = sum_j P_ij T_ij::

    H v = sum_j P_ij (v_j + T_ij z_j) - r_i sum_j P_ij z_j + sum_j P_ji (v_j + T_ij z_j) - sum_j P_ji r_j z_j
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import table
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp

Parts = list[Tensor]  # one a device
Message = tuple[Tensor, ...]


@dataclass
class Network:
    """``devices`` in a ring; a message is a tuple of tensors, and costs the bytes that they hold."""

    devices: int
    sent: list[int] = field(init=False)  # bytes by each device
    rounds: int = field(init=False, default=0)  # messages that each device waited for in turn

    def __post_init__(self) -> None:
        self.sent = [0] * self.devices

    def shift(self, messages: Sequence[Message]) -> list[Message]:
        """Each device sends its message to the next one of the ring, all at once."""
        for device, message in enumerate(messages):
            self.sent[device] += sum(part.numel() * part.element_size() for part in message)
        self.rounds += 1
        return [messages[device - 1] for device in range(self.devices)]

    def add(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over devices, known to all (an all-reduce by a ring of scattered pieces)."""
        size = parts[0].numel() * parts[0].element_size()
        for device in range(self.devices):
            self.sent[device] += math.ceil(2 * (self.devices - 1) / self.devices * size)
        self.rounds += 2 * (self.devices - 1)
        return torch.stack(list(parts)).sum(0)


def places(tokens: int, devices: int, zigzag: bool) -> list[Tensor]:
    """Which tokens (n,) each device holds: neighbours, or one piece from each end of the sequence.

    With ``zigzag`` every device has early and late tokens, so that causal rounds cost all the same.

    Raises:
        ValueError: the tokens do not fall into equal pieces.
    """
    pieces = 2 * devices if zigzag else devices
    if tokens % pieces:
        raise ValueError(f"tokens must be a multiple of {pieces} here, got {tokens}")
    cut = torch.arange(tokens).chunk(pieces)
    if not zigzag:
        return list(cut)
    return [torch.cat((cut[k], cut[pieces - 1 - k])) for k in range(devices)]


def scatter(whole: Tensor, where: Sequence[Tensor], dim: int = 2) -> list[Tensor]:
    """The parts of ``whole`` that the devices hold."""
    return [whole.index_select(dim, index) for index in where]


def gather(parts: Sequence[Tensor], where: Sequence[Tensor]) -> Tensor:
    """The whole of which the devices hold parts, in its own order."""
    order = torch.cat(list(where)).argsort()
    return torch.cat(list(parts), 2).index_select(2, order)


@dataclass
class Ring:
    """Tokens (B, H, N, p) of which device k holds ``where[k]``; ``mask`` (B, N) bool marks those that count.

    ``z``, ``lse`` and all results are lists with the part of each device.
    """

    network: Network
    where: list[Tensor]
    beta: float
    causal: bool = False
    mask: Parts | None = None

    def _rounds(self, messages: list[Message]) -> list[list[tuple[int, Message]]]:
        """For each round what each device has at hand: the owner of the message, and the message.

        Messages travel while a device computes with the one that it has; the last round sends none.
        """
        devices, owners, rounds = self.network.devices, list(range(self.network.devices)), []
        for turn in range(devices):
            rounds.append(list(zip(owners, messages, strict=True)))
            if turn + 1 < devices:
                messages = self.network.shift(messages)
                owners = [owners[device - 1] for device in range(devices)]
        return rounds

    def _allowed(self, row: int, column: int) -> Tensor | None:
        """Pairs (B or 1, 1, n, n) of the rows of one device and the columns of another's that count."""
        allowed = None
        if self.causal:
            allowed = (self.where[column][None, :] <= self.where[row][:, None])[None, None]
        if self.mask is not None:
            both = (self.mask[row][:, :, None] & self.mask[column][:, None, :])[:, None]
            allowed = both if allowed is None else both & allowed
        return allowed

    def _scores(self, own: Tensor, other: Tensor, allowed: Tensor | None) -> Tensor:
        scores = self.beta * own @ other.mT
        return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)

    def gradient(self, z: Parts) -> tuple[Parts, Parts, Parts]:
        """``(P + P^T) Z``, the log-sum-exp of the rows, and the row term ``P Z``.

        First lap: the tokens travel, and each device sums its rows with a running maximum. Second lap: the
        tokens travel with the log-sum-exp of their rows, from which the columns of P follow.
        """
        peak = [t.new_full(t.shape[:3], -torch.inf) for t in z]
        weight, rows = [torch.zeros_like(t) for t in peak], [torch.zeros_like(t) for t in z]
        for at_hand in self._rounds([(t,) for t in z]):
            for k, (owner, (other,)) in enumerate(at_hand):
                scores = self._scores(z[k], other, self._allowed(k, owner))
                top = torch.maximum(peak[k], scores.amax(-1))
                shift = torch.where(torch.isfinite(top), top, 0.0)
                grown, old = (scores - shift[..., None]).exp(), (peak[k] - shift).exp()
                weight[k] = weight[k] * old + grown.sum(-1)
                rows[k] = rows[k] * old[..., None] + grown @ other
                peak[k] = top
        empty = [w == 0 for w in weight]  # rows without any key
        lse = [
            torch.where(e, 0.0, p + w.log()) for e, p, w in zip(empty, peak, weight, strict=True)
        ]
        rows = [
            torch.where(e[..., None], 0.0, r / w[..., None])
            for e, r, w in zip(empty, rows, weight, strict=True)
        ]
        total = [row.clone() for row in rows]
        for at_hand in self._rounds(list(zip(z, lse, strict=True))):
            for k, (owner, (other, theirs)) in enumerate(at_hand):
                total[k] += self._columns(z[k], other, theirs, k, owner) @ other
        return total, lse, rows

    def _columns(self, own: Tensor, other: Tensor, lse: Tensor, k: int, owner: int) -> Tensor:
        """``P_ji`` (B, H, n, n): i of this device, j of the owner of the message, by its ``lse``."""
        allowed = self._allowed(owner, k)
        scores = self._scores(own, other, None if allowed is None else allowed.mT)
        return (scores - lse[..., None, :]).exp()

    def hvp(self, z: Parts, v: Parts, lse: Parts, rows: Parts) -> Parts:
        """Hessian times v, from what :meth:`gradient` found at z.

        First lap, with (z, v, lse): the row terms, the mean tangents ``r``, and of the columns all but
        these means. Second lap, with (z, lse, r): their part.
        """
        row_part = [torch.zeros_like(t) for t in z]
        column_part, mean = [torch.zeros_like(t) for t in z], [torch.zeros_like(t) for t in lse]
        for at_hand in self._rounds(list(zip(z, v, lse, strict=True))):
            for k, (owner, (other, moved, theirs)) in enumerate(at_hand):
                tangent = self.beta * (v[k] @ other.mT + z[k] @ moved.mT)
                scores = self._scores(z[k], other, self._allowed(k, owner))
                weights = (scores - lse[k][..., None]).exp()
                mean[k] += (weights * tangent).sum(-1)
                row_part[k] += weights @ moved + (weights * tangent) @ other
                columns = self._columns(z[k], other, theirs, k, owner)
                column_part[k] += columns @ moved + (columns * tangent) @ other
        for at_hand in self._rounds(list(zip(z, lse, mean, strict=True))):
            for k, (owner, (other, theirs, means)) in enumerate(at_hand):
                columns = self._columns(z[k], other, theirs, k, owner)
                column_part[k] -= columns @ (means[..., None] * other)
        return [
            a + b - r[..., None] * row
            for a, b, r, row in zip(row_part, column_part, mean, rows, strict=True)
        ]

    def adjoint(
        self, z: Parts, right: Parts, lse: Parts, rows: Parts, weight: float, steps: int
    ) -> tuple[Parts, list[Tensor]]:
        """``(I + weight H)^-1 right``, H the Hessian: the adjoint of ``1/2 |z|^2 + weight E``, by CG.

        Its two inner products a step are all-reduced, one number a sample each. Also returns the residual
        norms (B,) of the steps.
        """

        def inner(a: Parts, b: Parts) -> Tensor:
            return self.network.add([(x * y).sum((1, 2, 3)) for x, y in zip(a, b, strict=True)])

        def moved(a: Parts, step: Tensor, b: Parts) -> Parts:
            return [x + step[:, None, None, None] * y for x, y in zip(a, b, strict=True)]

        solution, left = [torch.zeros_like(t) for t in right], right
        direction, square = right, inner(right, right)
        norms = [square.sqrt()]
        for _ in range(steps):
            curved = self.hvp(z, direction, lse, rows)
            image = [d + weight * c for d, c in zip(direction, curved, strict=True)]
            step = square / inner(direction, image)
            solution, left = moved(solution, step, direction), moved(left, -step, image)
            before, square = square, inner(left, left)
            direction = moved(left, square / before, direction)
            norms.append(square.sqrt())
        return solution, norms


@dataclass(frozen=True)
class Plan:
    """Sizes of an evaluation, and what a device and its link to the next one can do."""

    batch: int
    heads: int
    tokens: int
    width: int
    size: int  # bytes a number
    link: float  # bytes per second
    rate: float  # floating-point operations per second
    latency: float  # seconds a message

    def bytes_of(self, devices: int, numbers: float) -> float:
        """What each device sends in a lap in which each token travels with so many ``numbers``."""
        share = self.batch * self.heads * self.tokens / devices
        return (devices - 1) * share * numbers * self.size

    def lap(self, devices: int, numbers: float, products: int) -> tuple[float, float]:
        """Seconds of a lap with and without overlap of messages with the ``products`` of n x n x p."""
        pairs = self.batch * self.heads * (self.tokens / devices) ** 2
        compute = 2 * products * pairs * self.width / self.rate
        message = self.latency + self.bytes_of(devices, numbers) / (devices - 1) / self.link
        return (devices - 1) * max(compute, message) + compute, (
            devices - 1
        ) * message + devices * compute

    def row(self, devices: int) -> dict[str, object]:
        """One row of the table: an evaluation of the gradient, by a ring and by an all-gather."""
        laps = [self.lap(devices, self.width, 2), self.lap(devices, self.width + 1, 2)]
        sent = self.bytes_of(devices, self.width) + self.bytes_of(devices, self.width + 1)
        once = self.bytes_of(devices, self.width) + self.bytes_of(devices, 1)
        gathered = sum(self.lap(devices, numbers, 2)[1] for numbers in (self.width, 1))
        held = self.batch * self.heads * self.tokens * self.width * self.size
        return {
            "devices": devices,
            "ring, MB sent": sent / 1e6,
            "all-gather, MB sent": once / 1e6,
            "ring, MB of others held": 2 * held / devices / 1e6,
            "all-gather, MB of others held": (devices - 1) / devices * held / 1e6,
            "ring, ms": 1e3 * sum(lap[0] for lap in laps),
            "ring without overlap, ms": 1e3 * sum(lap[1] for lap in laps),
            "all-gather, ms": 1e3 * gathered,
            "one device, ms": 1e3 * 8 * self.batch * self.heads * self.tokens**2 * self.width / self.rate,
        }  # fmt: skip


def exactness(devices: int, causal: bool, masked: bool, tokens: int = 48) -> dict[str, object]:
    """Simulated results against the dense formula in float64, and the bytes against the plan's."""
    torch.manual_seed(devices)
    batch, heads, width, beta, weight = 2, 2, 8, 0.4, 0.2
    where, network = places(tokens, devices, zigzag=causal), Network(devices)
    z, v = torch.randn(2, batch, heads, tokens, width, dtype=torch.float64)
    mask = torch.rand(batch, tokens) < 0.8 if masked else None
    if mask is not None:
        z, v = (t * mask[:, None, :, None] for t in (z, v))
    ring = Ring(network, where, beta, causal, None if mask is None else scatter(mask, where, 1))
    options = {"mask": mask, "causal": causal, "backend": "reference"}
    own, moved = scatter(z, where), scatter(v, where)
    gradient, lse, rows = ring.gradient(own)
    plan = Plan(batch, heads, tokens, width, 8, 1.0, 1.0, 0.0)
    counted = network.sent[0] / (plan.bytes_of(devices, width) + plan.bytes_of(devices, width + 1))
    expected, _ = bisoftmax(z, beta, **options)  # type: ignore[arg-type]
    product = gather(ring.hvp(own, moved, lse, rows), where)
    curved = bisoftmax_hvp(z, v, beta, **options)  # type: ignore[arg-type]
    solution = gather(ring.adjoint(own, moved, lse, rows, weight, 60)[0], where)
    back = solution + weight * bisoftmax_hvp(z, solution, beta, **options)  # type: ignore[arg-type]
    return {
        "devices": devices,
        "causal": causal,
        "masked": masked,
        "gradient": _error(gather(gradient, where), expected),
        "HVP": _error(product, curved),
        "adjoint": _error(back, v),
        "bytes / plan": counted,
    }


def _error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def main(
    tokens: int = 65536,
    devices: tuple[int, ...] = (2, 4, 8, 16),
    gigabytes: float = 50.0,
    teraflops: float = 200.0,
) -> None:
    """Attention on a simulated ring of devices: exactness, and the time that its messages would take.

    Args:
        tokens: of 8 heads of width 64, in half precision.
        devices: each 2 or more.
        gigabytes: of a link, a second; a message takes 10 microseconds besides.
        teraflops: of a device.
    """
    cases = [(causal, masked) for causal in (False, True) for masked in (False, True)]
    print("Simulated against dense, float64:\n")
    print(table([exactness(number, *case) for number in (2, 3, 4) for case in cases]))
    plan = Plan(1, 8, tokens, 64, 2, 1e9 * gigabytes, 1e12 * teraflops, 1e-5)
    print(f"\nPredicted for one gradient, {plan}:\n")
    print(table([plan.row(number) for number in devices]))


if __name__ == "__main__":
    tyro.cli(main)
