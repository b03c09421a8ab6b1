"""The versions of PyTorch that have been tried, and the warning about others."""

from __future__ import annotations

import logging
from functools import cache

import torch

log = logging.getLogger("checkmate.torch_internals")
TRIED = ("2.11", "2.12", "2.13", "2.14", "2.15")  # the selection of the suite passes: benchmarks/results/versions.jsonl


@cache
def is_tried() -> bool:
    """Tell whether the running version is one of `TRIED`; once in a process a warning says that it is not.

    >>> is_tried()
    True
    """
    major, minor, *_ = torch.__version__.split(".")
    if f"{major}.{minor}" in TRIED:
        return True
    log.warning(
        "checkmate has been tried on PyTorch %s to %s, not on %s: the first step of each captured graph is compared "
        "with plain PyTorch, unless verify=False says otherwise.",
        TRIED[0],
        TRIED[-1],
        torch.__version__,
    )
    return False
