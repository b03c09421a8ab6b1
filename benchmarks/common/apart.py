"""Work in processes: what each tells arrives as it is told, what ends one early is an error here, and a lock."""

from __future__ import annotations

import fcntl
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")
LOCK = "CHECKMATE_BENCHMARK_LOCK"  # of the environment: the file that `alone` locks; without it nobody waits
OUT_OF_SECONDS = (-signal.SIGXCPU, -signal.SIGVTALRM)  # exit codes of processes that a limit of their own time ended


class EndedEarly(Exception):
    """A process did not come to its end: the error that it raised, its exit code, or that it took too long (`late`)."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


def apart(
    work: Callable[[], Iterable[T]],
    *,
    patience: float | None = None,
    environment: Mapping[str, str] | None = None,
    method: str = "spawn",
) -> Generator[T, None, None]:
    """Yield what a call yields in a process of its own.

    Args:
        work: a function of a module, or a `functools.partial` of one; yields, or returns as a list, what can be sent.
        patience: seconds on the wall for which nothing may be heard.
        environment: variables of the process beside those of this one.
        method: how it starts, as `multiprocessing.get_context` takes it.

    Raises:
        EndedEarly: after what was told until then.
    """
    context: Any = get_context(method)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(work, there))
    with patch.dict(os.environ, environment) if environment else nullcontext():
        process.start()
    there.close()
    goes_on = True
    try:
        while here.poll(patience):
            try:
                told, failure = here.recv()
            except EOFError:
                process.join()
                code = process.exitcode
                raise EndedEarly(f"the process ended with code {code}", late=code in OUT_OF_SECONDS) from None
            if told is not None:
                yield told[0]
                continue
            goes_on = False
            if failure is not None:
                raise EndedEarly(failure[0]) from RuntimeError(failure[1])
            return
        raise EndedEarly(f"nothing heard for {patience:g} seconds", late=True)
    finally:
        process.join(0 if goes_on else patience)
        process.kill()
        process.join()


def _tell(work: Callable[[], Iterable[Any]], pipe: Connection) -> None:
    """Send all that comes, each in a list; at the end nothing, or the error: what it says, and where it was raised."""
    try:
        for each in work():
            pipe.send(([each], None))
    except BaseException as error:  # noqa: BLE001  # it is raised where the process was begun
        said = traceback.format_exception_only(error)[-1].splitlines()[0]
        pipe.send((None, (said, traceback.format_exc())))
    else:
        pipe.send((None, None))


@contextmanager
def alone() -> Iterator[None]:
    """Let no other process that shares the file be in such a block meanwhile: what is timed or measured waits."""
    if (name := os.environ.get(LOCK)) is None:
        yield
        return
    with Path(name).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
