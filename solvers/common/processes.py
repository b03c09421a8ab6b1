"""Calls in processes of their own, without PyTorch, which end when their parent ends.

`Processes` has the interface of `concurrent.futures`. Unlike `concurrent.futures.ProcessPoolExecutor`, a process here
never imports the caller's script, so that scripts need no ``if __name__ == "__main__"``; and one that dies, for want of
memory say, takes no other call with it. `BackgroundProcess` and `BackgroundCall` are for what works beside the
training: of low priority, of one thread, the first that the kernel takes where memory is short; and Ctrl-C is left to
who trains.

The kernel is asked to end each process with its parent, and its input ends then, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from checkmate.errors import SolverError

log = logging.getLogger("checkmate.solve")

T = TypeVar("T")
NICENESS = 10  # training goes first
GRACE_SECONDS = 10.0  # for a process to end that tells nothing any more
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_PR_SET_PDEATHSIG = 1
_CHILD = f"""
import ctypes, os, pickle, signal, sys
if sys.platform == "linux":  # first of all: a process that was forked from the parent may hold our input open
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        os._exit(0)
if beside := sys.argv[2] == "beside":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    getattr(os, "nice", int)({NICENESS})
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # prints must not mix with the answers
sys.path[:] = pickle.load(sys.stdin.buffer)  # first: what follows is found there
from checkmate.solvers.common import processes
call, asked = pickle.load(sys.stdin.buffer)
processes.end_with_the_parent(sys.stdin.buffer, first=beside)
call(*asked, lambda answer: (pickle.dump(answer, answers), answers.flush()))
"""
Tell = Callable[[Any], object]


class Process:
    """A child process that calls a function of a module, and its messages. A context manager: its end kills the child.

    Args:
        call: is given the ``arguments`` and, last, a function to tell something with; all are pickled.
        beside: the training, of low priority.

    Raises:
        OSError: if no process can be had.
    """

    def __init__(self, call: Callable[..., Any], *arguments: Any, beside: bool = True) -> None:
        self._sent = pickle.dumps(sys.path) + pickle.dumps((call, arguments))
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        command = [sys.executable, "-c", _CHILD, str(os.getpid()), "beside" if beside else ""]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr}
        self._child = subprocess.Popen(command, **pipes, env={**os.environ, **(ONE_THREAD if beside else {})})
        self.pid = self._child.pid

    def answers(self) -> Iterator[Any]:
        """Yield the answers of the call as they come.

        Raises:
            SolverError: if the process ends before the caller stops to ask, with the end of what it wrote.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(self._sent)
            self._child.stdin.flush()  # and left open: its end would end the process
            while True:
                yield pickle.load(self._child.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(GRACE_SECONDS)
            self.end()
            code = self._child.wait()
            self._stderr.seek(0)
            lines = ["it said nothing", *self._stderr.read().decode(errors="replace").strip().splitlines()]
            raise SolverError(f"Its process ended with code {code}: {lines[-1]}") from None

    def end(self) -> None:
        """Kill the child."""
        self._child.kill()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        with contextlib.suppress(BrokenPipeError):  # it has ended without reading all
            self._child.stdin.close()  # type: ignore[union-attr]
        self._child.stdout.close()  # type: ignore[union-attr]
        self._child.wait()
        self._stderr.close()


class Processes:
    """Runs up to ``jobs`` calls at a time, each in a new process. A context manager: at its end none still runs.

    >>> with Processes(jobs=2) as processes:
    ...     processes.submit(divmod, 7, 3).result()
    (2, 1)
    """

    def __init__(self, jobs: int) -> None:
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="checkmate-processes")
        self._running: set[Process] = set()
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function of a module, with arguments that can be pickled.

        The future raises a SolverError, with the end of what the process wrote, if the process fails.
        """
        return self._threads.submit(self._call, call, arguments)

    def _call(self, call: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        with self._lock:
            if self._closed:
                raise SolverError("The processes were closed before this call began.")
            process = Process(_tell_result, call, arguments, beside=False)
            self._running.add(process)
        with process:
            try:
                return next(process.answers())
            finally:
                with self._lock:
                    self._running.discard(process)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._closed = True
            for process in self._running:
                process.end()
        self._threads.shutdown(wait=True, cancel_futures=True)


class BackgroundProcess(ABC):
    """A child process beside the training, and a thread that receives its messages.

    Args:
        call, arguments: of `Process`.
    """

    level, failed = logging.INFO, "A call in a process of its own has failed: %s"

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._task = call, arguments
        self.failure = ""  # why it ended early, if it failed
        self.process: Process | None = None  # while it runs
        self.over, self._is_over = threading.Event(), False

    def start_after(self, turn: contextlib.AbstractContextManager[Any]) -> None:
        """Start the child as soon as ``turn`` can be entered."""
        threading.Thread(target=self._run, args=(turn,), name="checkmate-beside", daemon=True).start()

    @abstractmethod
    def hear(self, answer: Any) -> bool:
        """Take a message of the child; tell whether it is the last."""

    def end(self) -> None:
        """Kill the child."""
        self._is_over = True
        if (process := self.process) is not None:
            process.end()

    def _run(self, turn: contextlib.AbstractContextManager[Any]) -> None:
        call, arguments = self._task
        try:
            with turn:
                if self._is_over:
                    return
                with Process(call, *arguments) as self.process:
                    if not self._is_over:
                        next(answer for answer in self.process.answers() if self.hear(answer))
        except (SolverError, OSError) as error:
            self.failure = str(error)
            if not self._is_over:
                log.log(self.level, self.failed, error)
        finally:
            self.process = None
            self.over.set()


class BackgroundCall:
    """Run a call in a low-priority child; the child is killed when this object is collected.

    >>> aside = BackgroundCall(divmod, 7, 3)
    >>> aside.wait(), aside.result
    (True, (2, 1))
    """

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._held = _Call(_tell_result, call, arguments)  # a thread holds this, too
        self._held.start_after(contextlib.nullcontext())
        weakref.finalize(self, self._held.end).atexit = False

    @property
    def result(self) -> Any:
        """The call's result; None while it runs, and if it failed."""
        return self._held.result

    @property
    def is_over(self) -> bool:
        """Tell whether the call has ended."""
        return self._held.over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds for the end of the call; tell whether it has ended."""
        return self._held.over.wait(timeout)


class _Call(BackgroundProcess):
    result: Any = None

    def hear(self, answer: Any) -> bool:
        self.result = answer
        return True


def _tell_result(call: Callable[..., Any], arguments: tuple[Any, ...], tell: Tell) -> None:
    tell(call(*arguments))


def end_with_the_parent(pipe: IO[bytes], *, first: bool) -> None:
    """End this process once nobody holds the other end of its input. ``first``: out of memory kills it first."""

    def watch() -> None:
        os.read(pipe.fileno(), 1)  # not from the buffer, whose lock would be held when the process ends by itself
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(OSError):  # not on Linux
        if first:
            Path("/proc/self/oom_score_adj").write_text("1000")
