"""Two programs that measure in turns: one asks, the other answers; no program.

The asking side (:class:`Worker`) starts the other as a process, joined by a pipe, and waits for each answer,
with an end to every wait. The answering side (:func:`serve`) works only while it is asked. Neither needs
torch or JAX, so that each side runs in an environment of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
SHOWN = 600  # characters of what a failed worker wrote
START, ANSWER, STOP = 180.0, 300.0, 10.0  # seconds that the asking side waits at most
Arrays = dict[str, NDArray[Any]]


class Contestant(Protocol):
    """One way to make the training step."""

    def run(self, forward: float, backward: float) -> Any:
        """A step with these tolerances, finished when it returns."""
        ...

    def read(self, result: Any) -> Arrays:
        """What ``run`` returned: "z" (B, N, D) and the gradients by the names of the parameters."""
        ...

    def count(self, forward: float, backward: float) -> tuple[int, int]:
        """Calls of f and vector-Jacobian products of a step."""
        ...


class WorkerError(RuntimeError):
    """A worker failed, died or did not answer in time."""


class Worker:
    """The asking side: a process that answers.

    Args:
        command: starts the process.
        threads: how many processors it may run on, and how many threads its libraries may start.
        environment: variables beside those of this process.

    Attributes:
        contestants: names that the worker offers.
        versions: of its libraries.
        limit: seconds to wait for an answer, at most.

    Raises:
        WorkerError: the process failed, ended, or was silent for too long; it is gone then.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        threads: int = 2,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.limit = " ".join(command[1:]), START
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")}
        self._pipe, other = Pipe()
        self._process = subprocess.Popen(
            [*command, str(other.fileno())], stdout=self._said, stderr=self._said, cwd=ROOT,
            env=os.environ | limits | dict(environment or {}), pass_fds=[other.fileno()],
        )  # fmt: skip
        other.close()
        self.process_id = self._process.pid
        if hasattr(os, "sched_setaffinity"):  # not every library heeds the variables
            os.sched_setaffinity(self.process_id, sorted(os.sched_getaffinity(0))[:threads])
        self.contestants, self.versions = self._answer()
        self.limit = ANSWER

    def ask(self, do: str, *request: Any) -> Any:
        """The answer to one request."""
        try:
            self._pipe.send((do, *request))
        except OSError as error:
            raise WorkerError(f"{self.name} is gone") from error
        return self._answer()

    def close(self) -> None:
        """End the process: politely, and after a few seconds by force."""
        self._pipe.close()  # the worker ends where its input ends
        try:
            self._process.wait(STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> Any:
        try:
            if not self._pipe.poll(self.limit):
                raise self._failure(f"did not answer within {self.limit:g} seconds")
            right, answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._failure("ended without an answer") from error
        if not right:
            raise WorkerError(f"{self.name}: {answer}")
        return answer

    def _failure(self, what: str) -> WorkerError:
        self._process.kill()
        code = self._process.wait()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()[-SHOWN:]
        self._pipe.close()
        self._said.close()
        return WorkerError(f"{self.name} {what} (exit code {code}); it wrote: {said or 'nothing'}")


Load = Callable[[Arrays], Mapping[str, Contestant]]


def serve(names: Sequence[str], versions: Mapping[str, str], load: Load) -> None:
    """The answering side: answer until the input ends.

    Args:
        names: of the contestants.
        versions: of the libraries.
        load: makes the contestants from the arrays of a problem.
    """
    pipe, contestants = Connection(int(sys.argv[-1])), dict[str, Contestant]()
    pipe.send((True, (list(names), dict(versions))))
    while True:
        try:
            do, *request = pipe.recv()
        except EOFError:
            return
        try:
            if do == "load":
                contestants.update(load(*request))
                pipe.send((True, None))
            else:
                pipe.send((True, ACTIONS[do](contestants[request[0]], *request[1:])))
        except Exception as error:
            traceback.print_exc()
            pipe.send((False, f"{type(error).__name__}: {str(error)[:SHOWN]}"))


def step(contestant: Contestant, forward: float, backward: float) -> Arrays:
    """What a step gives."""
    return contestant.read(contestant.run(forward, backward))


def count(contestant: Contestant, forward: float, backward: float) -> tuple[int, int]:
    return contestant.count(forward, backward)


def timed(
    contestant: Contestant, forward: float, backward: float, steps: int, before: int
) -> list[float]:
    """Seconds of each of ``steps`` steps, after ``before`` that wake threads and caches up."""
    seconds: list[float] = []
    for _ in range(before + steps):
        start = time.perf_counter()
        contestant.run(forward, backward)
        seconds.append(time.perf_counter() - start)
    return seconds[before:]


ACTIONS: dict[str, Callable[..., Any]] = {"step": step, "count": count, "time": timed}
