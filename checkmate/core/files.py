"""Files that several processes read and write at once: never half written, never run as code.

They are in the user's cache folder, or in the folder that the environment variable ``CHECKMATE_CACHE_DIR`` names.
Deleting them costs nothing but time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import secrets
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import platformdirs
from filelock import FileLock

from checkmate.errors import InvalidProblem

VARIABLE = "CHECKMATE_CACHE_DIR"
LOCK_SECONDS = 10.0  # to wait for a lock: who holds one writes for milliseconds
MOST_BYTES = 2**28  # of a file that is read


def folder() -> Path:
    """The folder of the files."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("checkmate", appauthor=False))


def read_json(path: Path, *, format: str, version: int | tuple[int, ...], what: str) -> dict[str, Any]:
    """Read what `write_json` wrote.

    Args:
        path: of the file.
        format: what it must say that it is, and its version.
        version: the one that can be read, or those that can.
        what: the same for a person, e.g. "table of measured ops".

    Raises:
        InvalidProblem: if it is no such file.
        OSError: if it cannot be read.
    """
    about = path.stat()
    if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:  # a pipe would never end
        raise InvalidProblem(f"{path} is no {what}: it is no file, or one of more than {MOST_BYTES:_} bytes.")
    try:
        document = json.loads(path.read_bytes(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidProblem(f"{path} is not JSON: {error}") from None
    return check_header(document, path, format=format, version=version, what=what)


def read_bytes(path: Path, most: int) -> bytes:
    """Read a file, unpacked if its name ends in ``.gz``, up to a limit of bytes.

    Raises:
        InvalidProblem: if that is more than ``most`` bytes, or does not unpack.
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        try:
            raw = (gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file).read(most + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InvalidProblem(f"{path} is no gzip file: {error}") from None
    if len(raw) > most:
        raise InvalidProblem(f"{path} holds more than {most:_} bytes, and is not read.")
    return raw


def check_header(
    document: Any, path: Path, *, format: str, version: int | tuple[int, ...], what: str
) -> dict[str, Any]:
    """The document, if it says that it is of this format and version.

    Raises:
        InvalidProblem: if it is not.
    """
    if not isinstance(document, dict) or document.get("format") != format:
        raise InvalidProblem(f"{path} is no {what}: its 'format' is not {format!r}.")
    versions = (version,) if isinstance(version, int) else version
    if document.get("version") not in versions:
        reads = " and ".join(map(str, versions))
        raise InvalidProblem(f"{path} has version {document.get('version')!r}; this checkmate reads {reads}.")
    return document


def with_checksum(document: dict[str, Any]) -> dict[str, Any]:
    """The document as JSON holds it, with a checksum of all that it says."""
    document = json.loads(json.dumps(document))  # tuples as lists, numbers as keys as text
    return {**document, "checksum": hash_of(document)}


def without_checksum(document: dict[str, Any], origin: str | os.PathLike[str]) -> dict[str, Any]:
    """The document that `with_checksum` was given.

    Raises:
        InvalidProblem: if it says something else than then.
    """
    rest = {name: value for name, value in document.items() if name != "checksum"}
    if document.get("checksum") != hash_of(rest):
        raise InvalidProblem(f"{origin} is damaged: its checksum does not fit.")
    return rest


def hash_of(what: object) -> str:
    """SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def write_json(path: Path, document: dict[str, Any], *, indent: int | None = None) -> None:
    """Write a file at once: whoever reads meanwhile sees the old file or the new one.

    Raises:
        OSError: if it cannot be written.
    """
    write_bytes(path, json.dumps(document, allow_nan=False, indent=indent).encode(), private=True)


def write_bytes(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file at once: whoever reads meanwhile sees the old file or the new one.

    Args:
        path: of the file.
        content: all of it.
        private: whether only this user may read it; by default whoever may read a file that a program makes here.

    Raises:
        OSError: if it cannot be written.
    """
    passing = path.with_name(f".{path.stem[:100]}{secrets.token_hex(8)}.tmp")
    try:
        handle = os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        passing.replace(path)
    except BaseException:
        passing.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, among processes and threads. The lock of a process that died is free.

    Raises:
        OSError: if it cannot be had: after `LOCK_SECONDS`, or where the file system knows no locks.
    """
    lock = FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except NotImplementedError as error:
        raise OSError(f"the file system of {path} knows no locks: {error}") from None
    try:
        yield
    finally:
        lock.release()
