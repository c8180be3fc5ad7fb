"""Two programs that measure in turns: one asks, the other answers; no program.

The asking side (:class:`Worker`) starts the other as a process, joined by a pipe. The answering side
(:func:`serve`) works only while it is asked. Neither needs torch or JAX, so that each side runs in an
environment of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
LIMIT, STOP = 300.0, 10.0  # seconds to wait for an answer, and for the end, at most
Arrays = dict[str, NDArray[Any]]


class Contestant(Protocol):
    """One way to make the training step with two tolerances.

    ``read`` turns what ``run`` returned into "z" (B, N, D) and the gradients by the names of the parameters.
    """

    def run(self, forward: float, backward: float) -> Any: ...
    def read(self, result: Any) -> Arrays: ...


class WorkerError(RuntimeError):
    """A worker failed, died or did not answer in time; what it wrote is on the standard error."""


class Worker:
    """The asking side: a process that ``command`` starts, and that answers.

    ``threads`` is the number of its processors and of the threads of its libraries; ``environment`` has
    variables besides those of this process. ``contestants`` are the names that the worker offers,
    ``versions`` those of its libraries.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        threads: int = 2,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = " ".join(command[1:])
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")}
        self._pipe, other = Pipe()
        self._process = subprocess.Popen(
            [*command, str(other.fileno())], stdout=sys.__stderr__, cwd=ROOT,
            env=os.environ | limits | dict(environment or {}), pass_fds=[other.fileno()],
        )  # fmt: skip
        other.close()
        self.process_id = self._process.pid
        if hasattr(os, "sched_setaffinity"):  # not every library heeds the variables
            os.sched_setaffinity(self.process_id, sorted(os.sched_getaffinity(0))[:threads])
        self.contestants, self.versions = self._answer()

    def ask(self, do: str, *request: Any) -> Any:
        """The answer to one request; :class:`WorkerError` where there is none."""
        self._pipe.send((do, *request))
        return self._answer()

    def _answer(self) -> Any:
        try:
            right, answer = self._pipe.recv() if self._pipe.poll(LIMIT) else (False, "is silent")
        except (EOFError, ConnectionError):
            right, answer = False, f"ended with {self._process.wait(STOP)}"
        if not right:
            raise WorkerError(f"{self.name}: {answer}")
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # the worker ends where its input ends
        try:
            self._process.wait(STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


Load = Callable[[Arrays], Mapping[str, Contestant]]


def serve(names: Sequence[str], versions: Mapping[str, str], load: Load) -> None:
    """The answering side, until the input ends; ``load`` makes contestants from a problem's arrays."""
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
            pipe.send((False, f"{type(error).__name__}: {error}"))


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


ACTIONS: dict[str, Callable[..., Any]] = {
    "step": lambda contestant, *tolerances: contestant.read(contestant.run(*tolerances)),
    "time": timed,
}
