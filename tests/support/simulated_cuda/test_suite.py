"""Tests that are marked ``cuda`` run on the simulated device where there is no other.

By hand: ``make gpu`` on a machine with a GPU, and ``make gpu ARGS="-p tests.support.simulated_cuda.plugin"`` elsewhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from tests.support.processes import run_python
from tests.support.simulated_cuda import build, install

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MARK = re.compile(r"pytest\.mark\.cuda\b")
PLUGIN = "tests.support.simulated_cuda.plugin"


def files() -> list[str]:
    """List the files with such tests, the device's own first."""
    tests = (path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    found = sorted((path for path in tests if MARK.search(path.read_text())), key=lambda p: (p.parent != HERE, p))
    return [str(path.relative_to(ROOT)) for path in found]


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which runs these tests itself")
@pytest.mark.usefixtures("can_be_built")
def test_what_is_marked_cuda_runs_on_the_simulated_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all of it: nothing is skipped. Where there is a compiler, and it fails, so does this, with what it says."""
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    options = ("-q", "-p", PLUGIN, "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}")
    said = run_python("-m", "pytest", *options, "-m", "cuda and not long", *files()).stdout
    counts = said.splitlines()[-1]
    assert int(re.search(r"(\d+) passed", counts)[1]) > len(files())
    assert "skipped" not in counts, said[-5000:]


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
