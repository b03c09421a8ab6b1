"""A call in a copy of this process, beside what goes on here: to look at a second size takes as long as at the first.

Copies are made by fork, as PyTorch's data loaders make theirs on Linux. A copy may fail where this process would not:
it cannot use a CUDA device that is in use here, nor differentiate for one where this process has, and what other
threads hold locked stays locked. So no answer rests on it: what it does not give is made here, and where one has
failed, no other is made.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from checkmate.statusline import hidden

T = TypeVar("T")
log = logging.getLogger("checkmate.fitting.beside")


class Beside(Generic[T]):
    """What a call gives that begins now in a copy of this process, if one can be made; it ends with the block.

    >>> with Beside(lambda: 6 * 7) as product:
    ...     product.result(patience=60.0)
    42
    """

    _may_work: ClassVar[bool] = True

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._copy: Any = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Beside[T]:
        if Beside._may_work and sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1:
            context = multiprocessing.get_context("fork")
            self._pipe, end = context.Pipe(duplex=False)
            self._copy = context.Process(target=_work, args=(self._call, end), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # that threads are not copied: see above
                with contextlib.suppress(OSError, AssertionError):  # no memory, or this is such a copy: there is none
                    self._copy.start()
            end.close()
        return self

    def result(self, patience: float) -> T:
        """What the call gives: the copy's, waiting for it for so many seconds, or else what it gives here."""
        if self._pipe is not None:
            with contextlib.suppress(EOFError, OSError):
                if self._pipe.poll(patience):
                    found: T = self._pipe.recv()
                    return found
            log.info("a copy of this process gave nothing")
            Beside._may_work = False
        return self._call()

    def __exit__(self, *error: object) -> None:
        if self._copy is not None and self._copy.pid is not None:
            self._copy.kill()
            self._copy.join()
        if self._pipe is not None:
            self._pipe.close()


def _work(call: Callable[[], object], pipe: Connection) -> None:
    """In the copy: silent, on one thread, as the others were not copied; gone without a word where it fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()
    sys.stdout = sys.stderr = nowhere = Path(os.devnull).open("w")  # noqa: SIM115  # to the end
    for stream in (1, 2):  # of what does not ask Python
        os.dup2(nowhere.fileno(), stream)
    torch.set_num_threads(1)
    with hidden(), contextlib.suppress(Exception):
        pipe.send(call())
    os._exit(0)
