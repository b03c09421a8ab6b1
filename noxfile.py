"""Environments with other versions of PyTorch, for `benchmarks.versions`: ``nox -s versions`` makes one for each.

``nox -s "versions(torch='2.11.0')"`` makes one of them, ``nox -s new`` one with the newest PyTorch that there is,
``nox -s lowest`` one with the lowest versions of all that checkmate needs, and ``nox -s pythons`` one for each other
Python. An environment is kept, and made again where it is missing.
"""

from __future__ import annotations

import nox

VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")  # the last of each minor version that is supported
PYTHONS = (("3.10", "2.11.0"), ("3.12", "2.15.0"), ("3.13", "2.15.0"))  # beside the one of the versions
OTHERS = "benchmarks/results/environments.jsonl"
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
def lowest(session: nox.Session) -> None:
    """Run it on the lowest versions that pyproject.toml names."""
    session.install("--resolution", "lowest-direct", "-e", ".[dev]")
    # Tools raise what they need as well: without them that comes down to the lowest that the package names.
    session.install("--upgrade", "--resolution", "lowest-direct", "-e", ".[plot]")
    session.run("python", "-m", "benchmarks.versions", "--out", OTHERS, *session.posargs)


@nox.session
@nox.parametrize("python,torch", PYTHONS)
def pythons(session: nox.Session, torch: str) -> None:
    """Run a part of it on another version of Python, with a PyTorch that there is for it."""
    session.install(f"torch=={torch}", "-e", ".[dev]")
    session.run("python", "-m", "benchmarks.versions", "--quick", "--out", OTHERS, *session.posargs)


@nox.session
def new(session: nox.Session) -> None:
    """Say what the newest PyTorch lacks, and run a part of the selection."""
    session.install("--upgrade", "torch", "-e", ".[dev]")
    session.run("python", "-m", "benchmarks.versions", "--quick", *session.posargs)
