"""Calls in processes of their own, with the interface of `concurrent.futures`.

Unlike `concurrent.futures.ProcessPoolExecutor`, a process here never imports the caller's script, so that scripts need
no ``if __name__ == "__main__"``; and one that dies, for want of memory say, takes no other call with it.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from checkmate.errors import SolverError

T = TypeVar("T")
_CHILD = """
import os, pickle, sys
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # what a call prints must not stand among the answers
sys.path[:] = pickle.load(sys.stdin.buffer)  # first: what follows is found there
call, arguments = pickle.load(sys.stdin.buffer)
pickle.dump(call(*arguments), answers)
answers.close()
"""


class Processes:
    """Runs up to ``jobs`` calls at a time, each in a new process. A context manager; at its end nothing still runs.

    >>> with Processes(jobs=2) as processes:
    ...     processes.submit(divmod, 7, 3).result()
    (2, 1)
    """

    def __init__(self, jobs: int) -> None:
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="checkmate-processes")
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function of a module, with arguments that can be pickled.

        The future raises a SolverError, with the end of what the process wrote, if the process fails.
        """
        return self._threads.submit(self._call, call, arguments)

    def _call(self, call: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        sent = pickle.dumps(sys.path) + pickle.dumps((call, arguments))
        with self._lock:
            if self._closed:
                raise SolverError("The processes were closed before this call began.")
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            child = subprocess.Popen([sys.executable, "-c", _CHILD], **pipes)
            self._running.add(child)
        answer, said = child.communicate(sent)
        with self._lock:
            self._running.discard(child)
        if child.returncode:
            last = said.decode(errors="replace").strip().splitlines()[-1:]
            raise SolverError(f"A process ended with code {child.returncode}: {''.join(last) or 'it said nothing'}")
        return pickle.loads(answer)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._closed = True
            for child in self._running:
                child.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
