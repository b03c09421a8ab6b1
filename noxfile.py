"""Environments with other versions of PyTorch, for `benchmarks.versions`: ``nox -s versions`` makes one for each.

``nox -s "versions(torch='2.11.0')"`` makes one of them, ``nox -s new`` one with the newest PyTorch that there is. An
environment is kept, and made again where it is missing.
"""

from __future__ import annotations

import nox

VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")  # the last of each minor version that is supported
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["versions"]


@nox.session
@nox.parametrize("torch", VERSIONS)
def versions(session: nox.Session, torch: str) -> None:
    """Run the selection of the suite on a version of PyTorch, and write a row."""
    session.install(f"torch=={torch}", "-e", ".[dev]")
    session.run("python", "-m", "benchmarks.versions", *session.posargs)


@nox.session
def new(session: nox.Session) -> None:
    """Say what the newest PyTorch lacks, and run a part of the selection."""
    session.install("--upgrade", "torch", "-e", ".[dev]")
    session.run("python", "-m", "benchmarks.versions", "--quick", *session.posargs)
