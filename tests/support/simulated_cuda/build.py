"""Compile the simulated device for the PyTorch that is installed: once, and anew when a source or PyTorch changes.

    python -m tests.support.simulated_cuda.build

takes about a minute of one processor the first time, and prints where the library is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import platformdirs
import torch
from filelock import FileLock

HERE = Path(__file__).parent
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")
COMPILER = os.environ.get("CXX", "g++")


def sources() -> list[Path]:
    """List the files that are compiled, and those that they include."""
    return sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])


def missing() -> str:
    """Say what lacks to build the device; nothing where it can be built."""
    if sys.platform != "linux":
        return f"the simulated CUDA device is for Linux, not for {sys.platform}"
    if shutil.which(COMPILER) is None:
        return f"the simulated CUDA device is compiled by {COMPILER}, which is not here: apt-get install g++"
    return ""


def library(*, private_use: bool = False) -> Path:
    """The compiled device: built if there is none yet.

    ``private_use``: for PyTorch's dispatch key PrivateUse1, not CUDA's, and without CUDA's attention and libraries.

    Raises:
        RuntimeError: with what the compiler says, if it fails, or with what lacks.
    """
    if lacks := missing():
        raise RuntimeError(lacks)
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    flags = [*FLAGS, *["-DSIMULATED_PRIVATEUSE1"] * private_use]
    of_cuda = ("attention", "libraries") if private_use else ()
    compiled = [path for path in HERE.glob("*.cpp") if path.stem not in of_cuda]
    key = hashlib.sha256("\0".join([torch.__version__, torch.__file__, version, *flags]).encode())
    for path in sources():
        key.update(path.name.encode() + path.read_bytes())
    folder = Path(platformdirs.user_cache_dir("checkmate")) / "simulated_cuda"
    built = folder / f"{key.hexdigest()[:24]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{built}.lock"):
        if not built.exists():
            _build([COMPILER, *flags], compiled, built)
    return built


def _build(command: list[str], compiled: list[Path], built: Path) -> None:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    home = Path(torch.__file__).parent  # torch.utils.cpp_extension knows it too, but looks for a CUDA device first
    includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    folders = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}"]
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:

        def compile_one(source: Path) -> str:
            made = str(Path(scratch) / f"{source.stem}.o")
            _run([*command, abi, *includes, "-c", str(source), "-o", made])
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [*pool.map(compile_one, compiled)]
        linked = Path(scratch) / built.name
        _run([command[0], "-shared", "-o", str(linked), *objects, *folders, "-ltorch_cpu", "-lc10"])
        linked.replace(built)


def _run(command: list[str]) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"The simulated CUDA device does not compile: {' '.join(command)}\n{run.stderr[-8000:]}")


if __name__ == "__main__":
    sys.stdout.write(f"{library()}\n")
