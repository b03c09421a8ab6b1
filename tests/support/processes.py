"""Run Python in processes of its own, from the root of the repository; where that fails, the test shows its output.

To import PyTorch takes a process longer than most of what tests have it do. So one process imports it, does nothing
else, and the others are forked from it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from checkmate.core import files

ROOT = Path(__file__).parents[2]
LOADED = ["torch.distributed", "torch._dynamo", "functorch.compile", "checkmate.compiler"]


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` in a fork: ``run_python("-c", "print(1)", CHECKMATE_CACHE_DIR="here").stdout``.

    PyTorch and this package are loaded already: variables that they read as they are imported change nothing.
    """
    with TemporaryDirectory() as folder:
        said = Path(folder) / "stdout", Path(folder) / "stderr"
        for file in said:
            file.touch()
        process = fork_server().Process(target=_interpret, args=(arguments, {**os.environ, **environment}, said))
        process.start()
        process.join()
        return _ended_well(arguments, process.exitcode, *(file.read_text() for file in said))


def run_fresh_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` in a process that has imported nothing."""
    env = {**os.environ, **environment}
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return _ended_well(arguments, run.returncode, run.stdout, run.stderr)


def own_cache(folder: str | os.PathLike[str]) -> str:
    """Make a cache folder, as of another machine: nothing is known in it, but libraries are those compiled before."""
    libraries = files.folder() / "native"
    libraries.mkdir(mode=0o700, parents=True, exist_ok=True)
    Path(folder).mkdir(parents=True)
    Path(folder, "native").symlink_to(libraries.resolve())
    return os.fspath(folder)


def start_ranks(run: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Call ``run(rank, *arguments)`` in a process for each rank, forked from one that has PyTorch loaded already."""
    from torch.multiprocessing.spawn import start_processes

    method = fork_server().get_start_method()
    start_processes(_run_rank, (dict(os.environ), run, *arguments), nprocs=ranks, start_method=method)


def _run_rank(rank: int, environment: dict[str, str], run: Callable[..., None], *arguments: Any) -> None:
    os.environ.update(environment)
    _compile_quickly()
    run(rank, *arguments)


def _compile_quickly() -> None:
    """Do as the fixtures of tests do: ops are timed a few times each, and guards not at all."""
    from torch._dynamo import guards

    from checkmate.profiling import measure

    measure.MOST_REPEATS = measure.LEAST_REPEATS
    guards.profile_guard_manager = lambda *args: 0.0


def fork_server() -> ForkServerContext:
    """Start processes as forks of one that has PyTorch loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def _ended_well(
    arguments: tuple[str, ...], code: int | None, stdout: str, stderr: str
) -> subprocess.CompletedProcess[str]:
    assert code == 0, stdout + stderr
    return subprocess.CompletedProcess(arguments, code, stdout, stderr)


def _interpret(arguments: tuple[str, ...], environment: dict[str, str], said: tuple[Path, Path]) -> None:
    """Do what the interpreter does with its arguments."""
    os.environ.clear()
    os.environ.update(environment)
    for stream, file in enumerate(said, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(ROOT)
    _compile_quickly()
    match arguments:
        case "-c", code, *others:
            sys.argv = ["-c", *others]
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), main.__dict__)
        case "-m", name, *others:
            sys.argv = [name, *others]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case path, *others:
            sys.argv = [path, *others]
            runpy.run_path(path, run_name="__main__")
