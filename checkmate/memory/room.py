"""Calls that may run out of memory: trials and measurements, which can need more than the step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

log = logging.getLogger("checkmate.memory")
T = TypeVar("T")

NO_MEMORY = ("allocate memory", "out of memory", "ALLOC_FAILED")  # in what the CPU, other devices and libraries say


def within_memory(run: Callable[[], T], what: str, instead: str) -> list[T]:
    """Run a call and return its result in a list; the list is empty if memory ran out, and its tensors are freed.

    The log then says once in a process ``what`` runs, and what happens ``instead``.

    >>> within_memory(lambda: len(torch.empty(8)), "a few numbers", "there are none")
    [8]
    >>> within_memory(lambda: torch.empty(2**60), "too many numbers", "there are none")
    []
    """
    try:
        return [run()]
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
    _warn(what, instead)
    return []


def ran_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that a device, a library on it or the host is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY)


@cache
def _warn(what: str, instead: str) -> None:
    log.warning("%s: too large for the memory that is free, so %s", what, instead)
