"""Whatever is marked ``cuda`` runs on the simulated device, where there is none; on one that is there, as it is.

By hand: ``make gpu`` on a machine with a GPU, and ``make gpu ARGS="-p tests.support.simulated_cuda.plugin"`` elsewhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.simulated_cuda import build, install

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MARK = re.compile(r"pytest\.mark\.cuda\b")
PLUGIN = "tests.support.simulated_cuda.plugin"


def files() -> list[str]:
    """Those with such tests, of the device itself first: to import all others would take longer than to run these."""
    tests = (path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    found = sorted((path for path in tests if MARK.search(path.read_text())), key=lambda p: (p.parent != HERE, p))
    return [str(path.relative_to(ROOT)) for path in found]


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which runs these tests itself")
@pytest.mark.usefixtures("can_be_built")
def test_what_is_marked_cuda_runs_on_the_simulated_device(tmp_path: Path) -> None:
    """All of it: nothing is skipped. Where there is a compiler, and it fails, so does this, with what it says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", "-m", "cuda and not long"]
    command += [f"--basetemp={tmp_path / 'base'}", *files()]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-20_000:]
    counts = run.stdout.splitlines()[-1]
    assert int(re.search(r"(\d+) passed", counts)[1]) > len(files())
    assert "skipped" not in counts, run.stdout[-5000:]


def test_without_a_compiler_it_is_said_what_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILER", "nowhere++")
    assert "is compiled by nowhere++, which is not here" in build.missing()
    with pytest.raises(RuntimeError, match=re.escape(build.missing())):
        build.library()


@pytest.mark.parametrize("before", ["/somewhere/else", ""])
def test_other_processes_have_the_device_beside_what_is_on_their_path(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "is_installed", lambda: True)
    monkeypatch.setenv("PYTHONPATH", before)
    startup, root, *others = install.environment()["PYTHONPATH"].split(os.pathsep)
    assert (startup, root) == (str(HERE / "startup"), str(ROOT))
    assert others == ([before] if before else [])
