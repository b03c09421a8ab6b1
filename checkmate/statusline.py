"""A status line that shows present work: capturing, measuring, planning. It disappears at the end.

It is the last line of a terminal, on standard error, or in a notebook an output of the cell that works.
Whoever works says so with `showing`; work within work shows the innermost. A thread draws, as solvers are silent for
seconds at a time. What takes less than `QUIET_SECONDS` in all shows nothing, unless it is asked to.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass

QUIET_SECONDS = 2.0
REFRESH_SECONDS = 0.2
WIDTH, BAR = 60, 8  # columns of all and of the bar
NAME = "checkmate"

_allowed: ContextVar[bool] = ContextVar("checkmate_line", default=True)
_lock = threading.Lock()  # of the line that there is
_line: _Line | None = None


@contextmanager
def showing(
    text: Callable[[], str] | str,
    *,
    share: Callable[[], float] | None = None,
    name: str = "",
    shown: bool | None = None,
) -> Iterator[None]:
    """Show the work within the block and its progress.

    Args:
        text: a few words, asked for at each drawing.
        share: of the work that is done, from 0 to 1.
        name: of what the work is about, such as "size 8", for work within it, too.
        shown: True: at once, on a terminal or not; None: on a terminal or in a notebook, after `QUIET_SECONDS`;
            False: not at all.
    """
    may_show = shown is None and _allowed.get() and sys.stderr is not None
    if not (shown or (may_show and (sys.stderr.isatty() or _in_a_notebook()))):
        yield
        return
    global _line  # a terminal has one last line
    part = _Part((lambda: text) if isinstance(text, str) else text, share, name)
    with _lock:
        _line = _line or _Line()
        _line.parts.append(part)
        if shown:
            _line.due = 0.0
    try:
        yield
    finally:
        with _lock:
            _line.parts.remove(part)
            if not _line.parts:
                _line.over.set()
                _line.thread.join()
                _line = None


def _in_a_notebook() -> bool:
    return type(sys.stderr).__module__.partition(".")[0] == "ipykernel"  # a Jupyter kernel's front end reads it


@contextmanager
def hidden() -> Iterator[None]:
    """Show no line within the block unless one is asked for."""
    before = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(before)


@dataclass(frozen=True, eq=False)
class _Part:
    text: Callable[[], str]
    share: Callable[[], float] | None
    name: str


class _Line:
    """The line for the present work, drawn by a thread."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []  # the innermost last
        self.due = time.perf_counter() + QUIET_SECONDS
        self.over = threading.Event()  # remove the line
        context = copy_context()  # in which a notebook knows the cell that works
        self.thread = threading.Thread(target=context.run, args=(self._draw,), name="checkmate-line", daemon=True)
        self.thread.start()

    def _draw(self) -> None:
        while time.perf_counter() < self.due:
            if self.over.wait(min(REFRESH_SECONDS, max(0.0, self.due - time.perf_counter()))):
                return
        with _output() if _in_a_notebook() else _last_line() as show:
            over = False
            while not over:
                if parts := tuple(self.parts):  # without the lock: a process that is forked now would keep it locked
                    show(*written(parts))
                over = self.over.wait(REFRESH_SECONDS)


@contextmanager
def _last_line() -> Iterator[Callable[[float, str], None]]:
    """Draw on the last line of a terminal, from a share and a tqdm format."""
    from tqdm.std import tqdm  # here, so that only those who see a line pay for its import

    with tqdm(total=1.0, bar_format="{desc}", leave=False, file=sys.stderr) as bar:

        def show(share: float, bar_format: str) -> None:
            bar.n, bar.bar_format = share, bar_format
            bar.refresh()

        yield show


@contextmanager
def _output() -> Iterator[Callable[[float, str], None]]:
    """Draw in a notebook cell's output as text that is overwritten, and empty in the end."""
    from IPython.display import display  # type: ignore[import-not-found, unused-ignore]
    from tqdm.std import tqdm

    handle = display({"text/plain": ""}, raw=True, display_id=True)

    def show(share: float, bar_format: str) -> None:
        line = tqdm.format_meter(share, 1.0, 0.0, ncols=WIDTH, bar_format=bar_format)
        handle.update({"text/plain": line}, raw=True)

    try:
        yield show
    finally:
        handle.update({"text/plain": ""}, raw=True)


def written(parts: tuple[_Part, ...]) -> tuple[float, str]:
    """Tqdm's bar for a share, with the line around it, up to `WIDTH` columns."""
    part = parts[-1]
    name = next((outer.name for outer in reversed(parts) if outer.name), NAME)
    share = 0.0 if part.share is None else min(1.0, max(0.0, part.share()))
    text = part.text()[: WIDTH - len(name) - BAR - len(" || ")].replace("{", "{{").replace("}", "}}")
    return share, f"{name} |{{bar:{BAR}}}| {text}"
