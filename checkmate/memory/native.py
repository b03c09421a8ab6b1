"""C++ libraries: built once per version of PyTorch, kept in the cache folder; the arena's, loaded in the background.

A file is compiled by itself, in some seconds: it needs only the headers of PyTorch's core, no Python and no build tool,
and is called through `ctypes`. (`checkmate.core.files` says where the folder is.) Without the arena's library
(arena.cpp) one line of the log says why, and steps run with PyTorch's own allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkmate.core import files
from checkmate.torch_internals.running import _GLIBCXX_USE_CXX11_ABI

FLAGS = ("-O2", "-fPIC", "-shared", "-std=c++20")  # as PyTorch compiles extensions
COMPILERS = ("g++", "clang++", "c++")  # unless the environment variable CXX names one
_HERE = Path(torch.__file__).parent


class Unbuildable(Exception):
    """The reason why there is no library, in words."""


@dataclass(frozen=True)
class Source:
    """A C++ file, the PyTorch libraries that it needs, and the functions called in it.

    >>> Source(Path(__file__).with_name("arena.cpp"), ("c10",), ()).path().name.startswith("arena-")
    True
    """

    file: Path
    links: tuple[str, ...]
    functions: tuple[tuple[str, Any, tuple[Any, ...]], ...]  # name after "checkmate_", type of the result, of arguments

    def path(self) -> Path:
        """The path of the library, from source, PyTorch's version and kind of machine."""
        parts = (torch.__version__, torch.version.git_version, platform.machine(), *_flags(), self.file.read_text())
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
        return files.folder() / "native" / f"{self.file.stem}-{digest}.so"

    def state(self) -> str:
        """The state in words: whether there is a library, or one could be built."""
        try:
            if (descriptor := _opened(self.path())) is not None:
                os.close(descriptor)
                return "built"
            return f"built when first used, by {_compiler()}"
        except Unbuildable as error:
            return f"cannot be had: {error}"

    def load(self, *, keep: bool = True) -> ctypes.PyDLL:
        """The library; built if missing, and kept in the cache folder with ``keep``.

        Raises:
            Unbuildable: if there is no compiler, or it fails.
            OSError: if the library cannot be loaded.
        """
        path = self.path()
        with contextlib.suppress(OSError):  # a damaged one is built anew
            if (cached := self._loaded(path)) is not None:
                return cached
        with tempfile.TemporaryDirectory(prefix="checkmate-") as folder:
            built = Path(folder) / path.name
            self._compile(built)
            built.chmod(0o600)
            if keep:
                with contextlib.suppress(OSError):  # of a folder that cannot be written doctor tells
                    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    files.write_bytes(path, built.read_bytes(), private=True)
            library = self._loaded(built)  # which stays when its file goes
        if library is None:
            raise Unbuildable(f"{built} is gone")
        return library

    def _loaded(self, path: Path) -> ctypes.PyDLL | None:
        """Load the library from the very file that was checked, even if it is replaced meanwhile."""
        descriptor = _opened(path)
        if descriptor is None:
            return None
        try:  # open from then on: the linker knows libraries by name
            library = ctypes.PyDLL(f"/proc/self/fd/{descriptor}")
        except OSError:
            os.close(descriptor)
            raise
        for name, result, arguments in self.functions:
            function = getattr(library, f"checkmate_{name}")
            function.restype, function.argtypes = result, arguments
        return library

    def _compile(self, target: Path) -> None:
        command = [_compiler(), *_flags(), f"-I{_HERE / 'include'}", str(self.file), "-o", str(target)]
        command += [f"-L{_HERE / 'lib'}", *(f"-l{name}" for name in self.links)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            fault = next((line for line in run.stderr.splitlines() if "error" in line), run.stderr.strip()[:200])
            raise Unbuildable(f"{command[0]} fails: {fault}")


def _flags() -> list[str]:
    return [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(_GLIBCXX_USE_CXX11_ABI)}"]


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else COMPILERS:
        if path := shutil.which(name):
            return path
    tried = f"CXX={named}" if named else ", ".join(COMPILERS)
    raise Unbuildable(f"no C++ compiler was found ({tried})")


def _opened(path: Path) -> int | None:
    """Open a library that nobody else can have written, since its code runs. None if there is no file."""
    if sys.platform != "linux":
        raise Unbuildable(f"it is for Linux, not for {sys.platform}")
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        if not _is_ours(os.fstat(folder)):
            raise Unbuildable(f"others may write to {path.parent}, where it is kept. Delete that folder")
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    finally:
        os.close(folder)
    # The file is checked once it is open, so that it is the one that is loaded.
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and _is_ours(status):
        return descriptor
    os.close(descriptor)
    return None


def _is_ours(status: os.stat_result) -> bool:
    """Tell whether only this user, or root, can write to a file or folder."""
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


log = logging.getLogger("checkmate.memory")

_pointer, _size, _number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
ARENA = Source(
    Path(__file__).with_name("arena.cpp"),
    ("c10",),
    (
        ("install", _number, ()),
        ("open", _pointer, (_size,)),
        ("renew", None, (_pointer, _size)),
        ("close", None, (_pointer,)),
        ("wants_layout", _number, (_pointer,)),
        ("record", _size, (_pointer, _size, _pointer, _pointer, _pointer)),
        ("lay_out", _number, (_pointer, _size, _pointer, _pointer, _pointer, _size, _size)),
        ("enter", _number, (_pointer, _number)),
        ("leave", None, (_pointer, _number)),
        ("counts", None, (_pointer, _pointer)),
        ("resident", ctypes.c_int64, (_pointer,)),
        ("allocate", _pointer, (_size,)),
        ("free", None, (_pointer,)),
    ),
)


@dataclass
class _Library:
    """The library of this process: not started, loading, loaded, or the reason why not."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None
    loaded: ctypes.PyDLL | None = None
    failure: str | None = None


_LIBRARY = _Library()


def start(*, keep: bool = True, level: int = logging.WARNING) -> None:
    """Load the library in the background, once per process; build it if missing, and keep it with ``keep``.

    ``level``: of the line in the log that says why there is none.
    """
    state = _LIBRARY

    def make() -> None:
        try:
            state.loaded = ARENA.load(keep=keep)
        except (Unbuildable, OSError) as error:
            state.failure = str(error)
            log.log(level, "No arena: %s. Steps run with PyTorch's own allocator.", error)

    with state.lock:
        if state.thread is None:
            state.thread = threading.Thread(target=make, name="checkmate-build", daemon=True)
            state.thread.start()


def library() -> ctypes.PyDLL | None:
    """The library once it is loaded; None before, and if it is not available."""
    return _LIBRARY.loaded


def wait() -> str | None:
    """Wait for `start`'s work; give the reason why there is no library, or None."""
    if _LIBRARY.thread is not None:
        _LIBRARY.thread.join()
    return _LIBRARY.failure
