"""What a check of an energy found, to be printed or raised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Finding(NamedTuple):
    """One check: whether it passed (None: it was not made), why not, and the relative error."""

    check: str
    passed: bool | None
    text: str
    error: float | None = None

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAIL", None: "-"}[self.passed]
        size = "" if self.error is None else f" (relative error {self.error:.1e})"
        return f"{mark:<5}{self.check:<14}{self.text}{size}"


@dataclass(frozen=True)
class EnergyReport:
    """The findings of :func:`implicit_attn.energies.check_energy`; ``print(report)`` shows them.

    Attributes:
        name: of the energy.
        findings: one for each check, with ``check``, ``passed``, ``text`` and ``error``.
    """

    name: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed; one that could not be made is none that failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that say what is wrong."""
        return tuple(finding for finding in self.findings if finding.passed is False)

    def raise_failures(self) -> None:
        """ValueError with the report, if a check failed."""
        if not self.ok:
            raise ValueError(str(self))

    def __str__(self) -> str:
        done = sum(finding.passed is not None for finding in self.findings)
        head = f"{self.name}: {done - len(self.failures)} of {done} checks passed"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])
