"""The allocator's C++ becomes a library once for each version of PyTorch, in the background, kept in the cache folder.

It is compiled by itself, in some seconds: it needs only the headers of PyTorch's core, no Python and no build tool, and
is called through `ctypes`. Where it cannot be had, one line of the log says why, and steps run with PyTorch's own
allocator. (`checkmate.core.files` says where the folder is.)
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

import torch

from checkmate.core import files
from checkmate.torch_internals.engine import _GLIBCXX_USE_CXX11_ABI

log = logging.getLogger("checkmate.memory")
SOURCE = Path(__file__).with_name("arena.cpp")
FLAGS = ("-O2", "-fPIC", "-shared", "-std=c++20")  # as PyTorch compiles extensions
COMPILERS = ("g++", "clang++", "c++")  # unless the environment variable CXX names one
_HERE = Path(torch.__file__).parent


class Unbuildable(Exception):
    """Why there is no library, in words."""


@dataclass
class _Library:
    """The one library of this process, from nothing to loaded, or why it is not."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None
    loaded: ctypes.PyDLL | None = None
    failure: str | None = None


_LIBRARY = _Library()


def start(*, keep: bool = True, level: int = logging.WARNING) -> None:
    """Load the library in the background, built where it is not yet; once in a process.

    Args:
        keep: in the cache folder what was built.
        level: of the line in the log that says why there is none.
    """
    made = _LIBRARY

    def make() -> None:
        try:
            made.loaded = _load(keep)
        except (Unbuildable, OSError) as error:
            made.failure = str(error)
            log.log(level, "No arena: %s. Steps run with PyTorch's own allocator.", error)

    with made.lock:
        if made.thread is None:
            made.thread = threading.Thread(target=make, name="checkmate-build", daemon=True)
            made.thread.start()


def library() -> ctypes.PyDLL | None:
    """The library, once it is loaded; None before, and where it cannot be had."""
    return _LIBRARY.loaded


def wait() -> str | None:
    """Wait for what `start` has begun. Why there is no library; None where there is one."""
    if _LIBRARY.thread is not None:
        _LIBRARY.thread.join()
    return _LIBRARY.failure


def state() -> str:
    """Whether there is a library here or could be one, in words.

    >>> state() != ""
    True
    """
    try:
        if (found := _opened(_path())) is not None:
            os.close(found)
            return "built"
        return f"built when first used, by {_compiler()}"
    except Unbuildable as error:
        return f"cannot be had: {error}"


def _path() -> Path:
    """Where the library is kept: another source, PyTorch or kind of machine has another."""
    parts = (torch.__version__, torch.version.git_version, platform.machine(), *_flags(), SOURCE.read_text())
    return files.folder() / "native" / f"arena-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.so"


def _flags() -> list[str]:
    return [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(_GLIBCXX_USE_CXX11_ABI)}"]


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else COMPILERS:
        if found := shutil.which(name):
            return found
    tried = f"CXX={named}" if named else ", ".join(COMPILERS)
    raise Unbuildable(f"no C++ compiler was found ({tried})")


def _opened(path: Path) -> int | None:
    """A descriptor of a library that nobody else can have written: what it holds is run. None: there is no such file.

    Raises:
        Unbuildable: if others may put files into its folder.
    """
    if sys.platform != "linux":
        raise Unbuildable(f"it is for Linux, not for {sys.platform}")
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        if not _is_ours(os.fstat(folder)):
            raise Unbuildable(f"others may write to {path.parent}, where it is kept. Delete that folder")
        found = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    finally:
        os.close(folder)
    about = os.fstat(found)
    if stat.S_ISREG(about.st_mode) and _is_ours(about):
        return found
    os.close(found)
    return None


def _is_ours(about: os.stat_result) -> bool:
    """Whether nobody may write to a file or a folder but this user, or root."""
    return about.st_uid in (0, os.getuid()) and not about.st_mode & 0o022


def _load(keep: bool) -> ctypes.PyDLL:
    path = _path()
    with contextlib.suppress(OSError):  # a damaged one is built anew
        if (known := _loaded(path)) is not None:
            return known
    with tempfile.TemporaryDirectory(prefix="checkmate-") as folder:
        built = Path(folder) / path.name
        _compile(built)
        built.chmod(0o600)
        if keep:
            with contextlib.suppress(OSError):  # of a folder that cannot be written doctor tells
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                files.write_bytes(path, built.read_bytes(), private=True)
        library = _loaded(built)  # which stays when its file goes
    if library is None:
        raise Unbuildable(f"{built} is gone")
    return library


def _loaded(path: Path) -> ctypes.PyDLL | None:
    """The library in a file: the very file that was looked at, whatever is put in its place meanwhile."""
    found = _opened(path)
    if found is None:
        return None
    try:  # open from then on: the linker knows libraries by name
        return _declared(ctypes.PyDLL(f"/proc/self/fd/{found}"))
    except OSError:
        os.close(found)
        raise


def _compile(target: Path) -> None:
    command = [_compiler(), *_flags(), f"-I{_HERE / 'include'}", str(SOURCE), "-o", str(target)]
    command += [f"-L{_HERE / 'lib'}", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise Unbuildable(f"{command[0]} fails: {said}")


def _declared(library: ctypes.PyDLL) -> ctypes.PyDLL:
    """The library with the types of what is called in it, as in arena.cpp."""
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, result, arguments in (
        ("install", number, []),
        ("open", pointer, [size]),
        ("renew", None, [pointer, size]),
        ("close", None, [pointer]),
        ("wants_layout", number, [pointer]),
        ("record", size, [pointer, size, pointer, pointer, pointer]),
        ("lay_out", number, [pointer, size, pointer, pointer, pointer, size, size]),
        ("enter", number, [pointer, number]),
        ("leave", None, [pointer, number]),
        ("counts", None, [pointer, pointer]),
        ("resident", ctypes.c_int64, [pointer]),
        ("allocate", pointer, [size]),
        ("free", None, [pointer]),
    ):
        function = getattr(library, f"checkmate_{name}")
        function.restype, function.argtypes = result, arguments
    return library
