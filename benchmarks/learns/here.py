"""Work done at once, in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Here(Executor):
    """An executor that does the work as it is submitted; Ctrl-C ends it as it ends any program."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # told by the future, as by that of a pool
            future.set_exception(error)
        return future
