"""Processes that work beside the training: of low priority, without PyTorch, and gone when their parent is.

The kernel is asked to end such a process with its parent, and its input ends then, too; where memory is short the
kernel takes it first. It has one thread, and leaves Ctrl-C to who trains.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

log = logging.getLogger("checkmate.solve")

NICENESS = 10  # training goes first
GRACE_SECONDS = 10.0  # for a process to end that tells nothing any more
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_PR_SET_PDEATHSIG = 1
_CHILD = f"""
import ctypes, os, pickle, signal, sys, threading
if sys.platform == "linux":  # first of all: a process that was forked from the parent may hold our input open
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        os._exit(0)
signal.signal(signal.SIGINT, signal.SIG_IGN)
getattr(os, "nice", int)({NICENESS})
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # what is printed must not stand among the answers
sys.path[:] = pickle.load(sys.stdin.buffer)  # first: what follows is found there
from checkmate.solvers.common import low_priority
call, asked = pickle.load(sys.stdin.buffer)
low_priority.end_with_the_parent(sys.stdin.buffer)
call(*asked, lambda answer: (pickle.dump(answer, answers), answers.flush()))
"""
Tell = Callable[[Any], object]


class Gone(Exception):
    """Why a process answers no more, in words."""


class Process:
    """A process that calls a function of a module, and what that tells. A context manager, at whose end it is gone.

    Args:
        call: is given ``asked`` and, last, a function to tell something with; all that is pickled.

    Raises:
        OSError: if no process can be had.
    """

    def __init__(self, call: Callable[..., Any], *asked: Any) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._sent = pickle.dumps(sys.path) + pickle.dumps((call, asked))
        command = [sys.executable, "-c", _CHILD, str(os.getpid())]
        self._child = subprocess.Popen(command, **pipes, stderr=self._said, env={**os.environ, **ONE_THREAD})

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    def answers(self) -> Iterator[Any]:
        """What the call tells, one after the other.

        Raises:
            Gone: if the process ends before the caller stops to ask.
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
            raise Gone(f"Its process ended with code {self._child.wait()}: {self._last_line()}") from None

    def end(self) -> None:
        """End it now."""
        self._child.kill()

    def _last_line(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return next(iter(reversed(lines)), "it said nothing")

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        with contextlib.suppress(BrokenPipeError):  # what it did not read any more
            self._child.stdin.close()  # type: ignore[union-attr]
        self._child.stdout.close()  # type: ignore[union-attr]
        self._child.wait()
        self._said.close()


class Aside:
    """One call in such a process, which ends when nobody waits for its result any more.

    >>> aside = Aside(divmod, 7, 3)
    >>> aside.wait(), aside.result
    (True, (2, 1))
    """

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._held = _Held()
        threading.Thread(target=_run_aside, args=(self._held, call, arguments), daemon=True).start()
        weakref.finalize(self, self._held.end).atexit = False

    @property
    def result(self) -> Any:
        """Of the call; None while it goes on, and if it failed."""
        return self._held.result

    @property
    def is_over(self) -> bool:
        """Whether there will be no other result."""
        return self._held.over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over, so many seconds at most; whether it is."""
        return self._held.over.wait(timeout)


class _Held:
    """What a thread and the `Aside` it works for both hold."""

    def __init__(self) -> None:
        self.result: Any = None
        self.over = threading.Event()
        self.ended = False
        self.process: Process | None = None

    def end(self) -> None:
        self.ended = True
        if self.process is not None:
            self.process.end()


def _run_aside(held: _Held, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        with Process(_tell_result, call, arguments) as held.process:
            if not held.ended:
                held.result = next(held.process.answers())
    except (Gone, OSError) as error:
        if not held.ended:
            log.info("A call in a process of its own has failed: %s", error)
    finally:
        held.process = None
        held.over.set()


def _tell_result(call: Callable[..., Any], arguments: tuple[Any, ...], tell: Tell) -> None:
    tell(call(*arguments))


def end_with_the_parent(asked: IO[bytes]) -> None:
    """End this process once nobody holds the other end of its input; where memory is short it goes first."""

    def watch() -> None:
        os.read(asked.fileno(), 1)  # not from the buffer, whose lock would be held when the process ends by itself
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(OSError):  # not on Linux
        Path("/proc/self/oom_score_adj").write_text("1000")
