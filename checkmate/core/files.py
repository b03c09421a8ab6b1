"""Files that several processes read and write: never half written, never run as code.

The user's cache folder, or the folder that the environment variable ``CHECKMATE_CACHE_DIR`` names, keeps costs of ops,
plans and speeds of links for the next process, in one SQLite database with a table for each. A row is a key, a document
as JSON with a checksum, and when it was last used. A capture reads and writes the rows of its own ops only, however
many there are. A row that was altered is left out with a warning, and a damaged database is removed. Deleting all of it
costs nothing but time.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import logging
import os
import secrets
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import platformdirs

from checkmate.errors import InvalidProblem

try:
    import sqlite3
except ImportError:  # a Python that was built without it keeps nothing for the next time
    sqlite3 = None  # type: ignore[assignment]

log = logging.getLogger("checkmate")

VARIABLE, DATABASE = "CHECKMATE_CACHE_DIR", "cache.sqlite"
LOCK_SECONDS = 1.0  # to wait for another process, which writes for milliseconds
_locked: set[Path] = set()  # databases for which this process has waited in vain: it does not wait again


def folder() -> Path:
    """The folder of the files."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("checkmate", appauthor=False))


# ---------------------------------------------------------------- files of a format


def read_json(path: Path, *, format: str, versions: Collection[int], what: str, most: int) -> dict[str, Any]:
    """Read a JSON document, unpacked if the file's name ends in ``.gz``.

    Args:
        format: what it must say that it is.
        versions: those that can be read.
        what: the format for a person, e.g. "table of measured ops".
        most: bytes that are read, unpacked.

    Raises:
        InvalidProblem: if it is no such file, or larger.
        OSError: if it cannot be read.
    """
    try:
        is_other = path.exists() and not path.is_file()  # a pipe would never end
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # no text in place of a path
            raise
        raise InvalidProblem(f"{str(path)[:40]!r}... is no path of a {what}: {error.strerror}.") from None
    if is_other:
        raise InvalidProblem(f"{path} is no {what}: it is no file.")
    with path.open("rb") as file:
        try:
            raw = (gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file).read(most + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InvalidProblem(f"{path} is no gzip file: {error}") from None
    if len(raw) > most:
        raise InvalidProblem(f"{path} holds more than {most:_} bytes, and is not read.")
    try:
        document = json.loads(raw, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidProblem(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != format:
        raise InvalidProblem(f"{path} is no {what}: its 'format' is not {format!r}.")
    if document.get("version") not in versions:
        reads = " and ".join(map(str, versions))
        raise InvalidProblem(f"{path} has version {document.get('version')!r}; this checkmate reads {reads}.")
    return document


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def hash_of(value: object) -> str:
    """SHA-256 of a JSON-serializable value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_bytes(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file atomically: readers see the old file or the new one.

    Only this user may read a ``private`` file; others have the permissions of files that programs make here.

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


# ---------------------------------------------------------------- the database


@dataclass(frozen=True)
class Rows:
    """The rows of a table within one transaction."""

    _database: sqlite3.Connection
    _table: str

    def get(self, keys: Iterable[str]) -> dict[str, Any]:
        """The documents of those keys that exist."""
        chosen = f"SELECT key, text, checksum FROM {self._table} WHERE key = ?"
        return self._intact(row for key in keys for row in self._database.execute(chosen, [key]))

    def beginning(self, prefix: str, most: int = -1) -> dict[str, Any]:
        """Up to ``most`` documents whose keys have this prefix, the last used first."""
        chosen = f"SELECT key, text, checksum FROM {self._table} WHERE key >= ? AND key < ? ORDER BY used DESC LIMIT ?"
        return self._intact(self._database.execute(chosen, [prefix, f"{prefix}\U0010ffff", most]))

    def put(self, documents: Mapping[str, Any]) -> None:
        """Add documents, marked as used now; the latest document of a key counts."""
        texts = [(key, json.dumps(document, allow_nan=False)) for key, document in documents.items()]
        rows = [(key, text, hash_of([key, text]), time.time()) for key, text in texts]
        self._database.executemany(f"INSERT OR REPLACE INTO {self._table} VALUES (?, ?, ?, ?)", rows)

    def drop(self, keys: Iterable[str]) -> None:
        """Remove rows, if they exist."""
        self._database.executemany(f"DELETE FROM {self._table} WHERE key = ?", [[key] for key in keys])

    def note_use(self, key: str) -> None:
        """Mark a row as used now."""
        self._database.execute(f"UPDATE {self._table} SET used = ? WHERE key = ?", [time.time(), key])

    def prune(self, most: int, most_bytes: int) -> None:
        """Remove the least recently used rows beyond a number and bytes of text."""
        self._database.execute(
            f"DELETE FROM {self._table} WHERE key IN (SELECT key FROM (SELECT key, row_number() OVER latest AS number,"
            f" sum(length(text)) OVER latest AS total FROM {self._table} WINDOW latest AS (ORDER BY used DESC, key))"
            " WHERE number > ? OR total > ?)",
            [most, most_bytes],
        )

    def _intact(self, rows: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
        documents: dict[str, Any] = {}
        for key, text, checksum in rows:
            if checksum == hash_of([key, text]):
                documents[key] = json.loads(text)
            else:
                log.warning("A damaged row of %s in %s is not believed: %.100s", self._table, folder() / DATABASE, key)
        return documents


@contextmanager
def rows(table: str, *, write: bool = False) -> Iterator[Rows]:
    """The rows of a table, made if missing: a snapshot to read, or an exclusive transaction to write.

    The table's name has a version of what its documents say.

    Raises:
        OSError: if the database cannot be opened, read or written, or was damaged.

    >>> import os, tempfile
    >>> from unittest.mock import patch
    >>> with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, CHECKMATE_CACHE_DIR=folder):
    ...     with rows("squares_1", write=True) as kept:
    ...         kept.put({"2": 4, "3": 9})
    ...     with rows("squares_1") as kept:
    ...         print(kept.get(["3", "4"]))
    {'3': 9}
    """
    if sqlite3 is None:
        raise OSError("this Python was built without SQLite")
    path = folder() / DATABASE
    if write and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # for this user alone
    where = path if path.exists() else ":memory:"  # where there is nothing to read, nothing is made
    try:
        patience = 0.0 if path in _locked else LOCK_SECONDS
        with closing(sqlite3.connect(where, timeout=patience, isolation_level=None)) as database:
            database.execute("PRAGMA synchronous = OFF")  # a loss of power may damage the file, which is noticed
            database.execute(f"CREATE TABLE IF NOT EXISTS {table} (key TEXT PRIMARY KEY, text, checksum, used REAL)")
            with database:
                database.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                _locked.discard(path)
                yield Rows(database, table)
    except sqlite3.DatabaseError as error:
        if not isinstance(error, sqlite3.OperationalError):
            path.unlink(missing_ok=True)
        elif "locked" in str(error):
            _locked.add(path)
        raise OSError(f"{path}: {error}") from None
