"""Two programs that measure in turns: one asks in lines of JSON, the other answers; no program.

The asking side (:class:`Worker`) starts the other as a process and waits for each answer, with an end
to every wait. The answering side (:func:`serve`) works only while it is asked. Neither needs torch or
JAX, so that each side runs in an environment of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
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
        start, answer: seconds to wait for the first word and for an answer, at most.

    Attributes:
        contestants: names that the worker offers.
        versions: of its libraries.
        process_id: of the process.

    Raises:
        WorkerError: the process failed, ended, or was silent for too long; it is gone then.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        threads: int = 2,
        environment: Mapping[str, str] | None = None,
        start: float = START,
        answer: float = ANSWER,
    ) -> None:
        self.name, self.limit = " ".join(command[1:]), answer
        self._failed: str | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")}
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            cwd=ROOT,
            env=os.environ | limits | dict(environment or {}),
            text=True,
        )
        self.process_id = self._process.pid
        _pin(self.process_id, threads)
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        hello = self._answer(start)
        self.contestants: list[str] = hello["contestants"]
        self.versions: dict[str, str] = hello["versions"]

    def ask(self, do: str, **request: Any) -> Any:
        """The answer to one request."""
        if self._failed is not None:
            raise WorkerError(self._failed)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer tells why
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
        return self._answer(self.limit)

    def close(self) -> None:
        """End the process: politely, and after a few seconds by force."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # the worker ends where its input ends
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

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def _answer(self, limit: float) -> Any:
        try:
            line = self._lines.get(timeout=limit)
        except Empty:
            raise self._failure(f"did not answer within {limit:g} seconds") from None
        if line is None:
            raise self._failure("ended without an answer")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}")
        return answer["result"]

    def _failure(self, what: str) -> WorkerError:
        self._process.kill()
        code = self._process.wait()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()[-SHOWN:]
        self.close()
        self._failed = f"{self.name} {what} (exit code {code}); it wrote: {said or 'nothing'}"
        return WorkerError(self._failed)


def _pin(process: int, threads: int) -> None:
    """Keep a new process on the first processors: not every library heeds the variables."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process, sorted(os.sched_getaffinity(0))[:threads])


Load = Callable[[Arrays], Mapping[str, Contestant]]


def serve(names: Sequence[str], versions: Mapping[str, str], load: Load) -> None:
    """The answering side: answer until the input ends.

    Args:
        names: of the contestants.
        versions: of the libraries.
        load: makes the contestants from the arrays of a problem.
    """
    # What a library prints would be taken for an answer: the pipe is ours alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _say(answers, {"result": {"contestants": list(names), "versions": dict(versions)}})
    server = _Server(load)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = getattr(server, f"do_{request.pop('do')}")(**request)
        except Exception as error:
            traceback.print_exc()
            _say(answers, {"error": f"{type(error).__name__}: {str(error)[:SHOWN]}"})
        else:
            _say(answers, {"result": result})


def _say(answers: Any, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


class _Server:
    """What a worker can be asked."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.contestants: Mapping[str, Contestant] = {}

    def do_load(self, file: str) -> None:
        """Take the problem from a file of arrays."""
        with np.load(file, allow_pickle=False) as arrays:
            self.contestants = self.load(dict(arrays))

    def do_step(self, contestant: str, forward: float, backward: float, file: str) -> None:
        """Make a step and write what it gives to a file."""
        each = self.contestants[contestant]
        np.savez(file, allow_pickle=False, **each.read(each.run(forward, backward)))

    def do_count(self, contestant: str, forward: float, backward: float) -> tuple[int, int]:
        return self.contestants[contestant].count(forward, backward)

    def do_time(
        self, contestant: str, forward: float, backward: float, steps: int, before: int
    ) -> list[float]:
        """Seconds of each of ``steps`` steps, after ``before`` that wake threads and caches up."""
        run = self.contestants[contestant].run
        seconds: list[float] = []
        for number in range(before + steps):
            start = time.perf_counter()
            run(forward, backward)
            if number >= before:
                seconds.append(time.perf_counter() - start)
        return seconds
