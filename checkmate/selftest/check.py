"""What a check is: what it looks at, what is expected, and a function that says what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

REPORT = "Please report it, with the file that --json writes."


@dataclass(frozen=True)
class Setting:
    """Where checks run, and how large their networks are."""

    name: str  # of the device: "cpu", "cuda", "cuda:1"
    quick: bool = False  # small networks

    @property
    def device(self) -> torch.device:
        """The device itself, a CUDA device by its number."""
        device = torch.device(self.name)
        return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


@dataclass(frozen=True)
class Finding:
    """What a check found; ``passed`` is None where there is nothing to check on this device."""

    passed: bool | None
    found: str
    advice: str = REPORT  # what to do if it failed
    facts: dict[str, Any] = field(default_factory=dict)  # for JSON


@dataclass(frozen=True)
class Check:
    """One line of the list."""

    name: str
    checked: str
    expected: str
    run: Callable[[Setting], Finding]  # at the top of a module: it is called in another process
    seconds: float = 120.0  # after which it is ended, and has failed
    alone: bool = False  # it needs the device for itself


@dataclass(frozen=True)
class Result:
    """What is said of a check that has ended; ``verdict`` is "passed", "failed" or "skipped"."""

    name: str
    checked: str
    expected: str
    verdict: str
    found: str
    advice: str
    seconds: float
    facts: dict[str, Any]

    def __str__(self) -> str:
        head = f"{self.verdict if self.verdict != 'failed' else 'FAILED':<9}{self.name}  ({self.seconds:.1f} s)"
        lines = [("checked", self.checked), ("expected", self.expected), ("found", self.found)]
        lines += [("do", self.advice)] if self.verdict == "failed" else []
        return "\n".join([head, *(f"           {title:<10}{text}" for title, text in lines)])
