"""Check this installation: versions, device, threads, solver, and the folder of files."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import tempfile
from contextlib import suppress
from typing import Any

from checkmate.core import files
from checkmate.core.problem import Problem
from checkmate.core.solution import Query, Status
from checkmate.errors import SolverError
from checkmate.solvers.solve import attempt
from checkmate.units import format_bytes
from checkmate.version import __version__

NEEDED = ("torch", "numpy", "scipy", "networkx", "highspy")
EXTRAS = ("matplotlib", "pandas")


def examine() -> tuple[dict[str, Any], list[str]]:
    """Look at the installation; solve one tiny problem, and write and delete one file.

    Returns:
        The facts by name, and the obstacles in words, each with the way out.

    >>> facts, obstacles = examine()
    >>> facts["solver"]
    'HiGHS works'
    """
    facts: dict[str, Any] = {"checkmate": __version__, "python": f"{platform.python_version()} ({sys.executable})"}
    facts["system"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    for name in (*NEEDED, *EXTRAS):
        facts[name] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    obstacles = [f"{name} is not installed: pip install {name}" for name in NEEDED if facts[name] is None]
    # Another project is distributed as ``checkmate``, and installs a module of this name over ours or under it.
    obstacles += [
        f"{dist.metadata['Name']} {dist.version} is installed in the folder of checkmate-torch, and one has written "
        "over the other: pip uninstall checkmate checkmate-torch, then pip install checkmate-torch"
        for dist in importlib.metadata.distributions(name="checkmate")
        if "checkmate/__init__.py," in (dist.read_text("RECORD") or "")
    ]
    # PyTorch's build and devices, whether steps can have an arena, and the changes that are left out.
    if facts["torch"]:
        import torch

        from checkmate.backends import capture_cache as _all_patches  # noqa: F401  # which puts them in place
        from checkmate.memory import native
        from checkmate.torch_internals.names import LEFT_OUT
        from checkmate.torch_internals.versions import TRIED

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        cards = [torch.cuda.get_device_properties(i) for i in range(count)]
        facts |= {"torch": str(torch.__version__), "tried on": f"PyTorch {TRIED[0]} to {TRIED[-1]}"}
        names = [f"{card.name}, {format_bytes(card.total_memory)}" for card in cards]
        facts |= {"threads": torch.get_num_threads(), "cuda": names}
        facts |= {"arena": native.ARENA.state(), "left out": LEFT_OUT}
    # A problem whose answer is known.
    chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    facts["solver"] = "HiGHS works"
    try:
        answer = attempt(Query(chain, 3, "milp", seconds=10.0))
        if failed := answer.details.get("failed"):
            raise SolverError(failed[0])
        if answer.status is not Status.OPTIMAL or answer.cost != 4.0:
            obstacles.append(f"the solver's answer to a small problem is wrong: {answer!r}")
            facts["solver"] = "answers wrongly"
    except (ImportError, SolverError) as error:
        obstacles.append(f"the solver fails: {error}; pip install --force-reinstall highspy")
        facts["solver"] = "fails"
    # The folder of files, their bytes, and whether they can be written.
    folder = files.folder()
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    facts |= {"cache": str(folder), "cache size": f"{format_bytes(sum(sizes))} in {len(sizes)} files"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor"):
            facts["cache writable"] = "yes"
    except OSError:
        facts["cache writable"] = "no"
        obstacles.append(
            f"{folder} cannot be written: set {files.VARIABLE} to a folder that can, or compile with cache=False"
        )
    return facts, obstacles
