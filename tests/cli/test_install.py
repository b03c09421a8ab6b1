"""Wheels are whole, from a checkout as from a source distribution, and run without either beside them."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

import checkmate
from tests.support.processes import run_fresh_python

ROOT = Path(__file__).parents[2]
LINKS = ("solvers", "profiling")
BUILD = """
import os, sys, tarfile
from pathlib import Path
from setuptools import build_meta

checkout, out = Path(sys.argv[1]), Path(sys.argv[2])
os.chdir(checkout)
source = out / build_meta.build_sdist(str(out))
build_meta.build_wheel(str(out))
with tarfile.open(source) as archive:
    archive.extractall(out, filter="data")
os.chdir(source.with_name(source.name.removesuffix(".tar.gz")))
(out / "again").mkdir()
build_meta.build_wheel(str(out / "again"))
"""
RUN = """
import os, sys
os.chdir(sys.argv[1])
sys.path.insert(0, sys.argv[1])
exec(sys.argv[2])
print("checked")
from checkmate.cli import main
assert main(["doctor"]) == 0
files = [m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "checkmate" and m.__file__]
assert all(file.startswith(sys.argv[1]) for file in files), files
"""


def sources() -> dict[str, bytes]:
    """Every file of the package, by where it is to be once installed."""
    paths = [path.relative_to(ROOT) for folder in ("checkmate", *LINKS) for path in (ROOT / folder).rglob("*")]
    own = (path for path in paths if path.parts[1] not in LINKS and "__pycache__" not in path.parts)
    within = ((path if path.parts[0] == "checkmate" else "checkmate" / path, ROOT / path) for path in own)
    return {name.as_posix(): path.read_bytes() for name, path in within if path.is_file()}


def checked_out(folder: Path, *, links: bool) -> Path:
    """A copy of what an installation reads, with the two links, or with the plain files that git makes without them."""
    folder.mkdir()
    for name in ("checkmate", *LINKS):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    for name in () if links else LINKS:
        (folder / "checkmate" / name).unlink()
        (folder / "checkmate" / name).write_text(f"../{name}")
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and a source distribution of a checkout, and in ``again`` a wheel of the latter."""
    folder = tmp_path_factory.mktemp("install")
    (folder / "out").mkdir()
    run_fresh_python("-c", BUILD, str(checked_out(folder / "checkout", links=True)), str(folder / "out"))
    return folder / "out"


def wheel(folder: Path) -> dict[str, bytes]:
    """The files of the one wheel in a folder."""
    (file,) = folder.glob("*.whl")
    with ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_each_file_of_the_package_is_in_the_wheel_and_no_other(built: Path) -> None:
    for folder in (built, built / "again"):
        files = wheel(folder)
        about = f"checkmate_torch-{checkmate.__version__}.dist-info"
        assert {name: text for name, text in files.items() if not name.startswith(about)} == sources()
        licenses = ("LICENSE", "checkmate/look/webpage/vendor/uPlot.LICENSE")
        assert {f"{about}/licenses/{name}" for name in licenses} <= {*files}
        assert b"\nName: checkmate-torch\n" in files[f"{about}/METADATA"]


def test_a_checkout_without_symbolic_links_builds_the_same(built: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run_fresh_python("-c", BUILD, str(checked_out(tmp_path / "checkout", links=False)), str(tmp_path / "out"))
    assert wheel(tmp_path / "out") == wheel(tmp_path / "out" / "again") == wheel(built)


def test_a_source_distribution_holds_files_and_no_links(built: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert all(member.isfile() or member.isdir() for member in archive)
        names = {member.name.partition("/")[2] for member in archive}
    assert {*sources(), "pyproject.toml", "setup.py", "README.md", "CHANGELOG.md", "LICENSE"} <= names


@pytest.mark.slow
def test_the_first_example_runs_from_another_folder_with_the_wheel_alone(built: Path, tmp_path: Path) -> None:
    """Isolated, Python sees neither the folder that it runs in nor PYTHONPATH; no file that it imports is another's.

    It prints what the README shows: times, and what follows from them (a proof within the time as well), differ; the
    lines and the counts do not.
    """
    (file,) = built.glob("*.whl")
    run_fresh_python("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(tmp_path), str(file))
    readme = (ROOT / "README.md").read_text()
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", readme, flags=re.DOTALL)[:2]
    bytecode = ("-X", f"pycache_prefix={sys.pycache_prefix}") if sys.pycache_prefix else ()
    printed = run_fresh_python("-I", *bytecode, "-c", RUN, str(tmp_path), code).stdout
    example, about = printed.split("\nchecked\n")
    assert [line[:13] for line in example.splitlines()[1:]] == [line[:13] for line in shown.splitlines()[1:]]
    for what in (r"^  budget .*", r"of \d+ ops"):
        assert re.findall(what, example, flags=re.MULTILINE) == re.findall(what, shown, flags=re.MULTILINE) != []
    assert f" {checkmate.__version__}\n" in about


def test_the_newest_changes_are_those_of_this_version() -> None:
    """Changes of the next version, which is not released, may stand above."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    released = [heading for heading in headings if not heading.endswith(", not released")]
    assert released == headings[-len(released) :]
    assert released[0] == checkmate.__version__
    versions = [heading.removesuffix(", not released") for heading in headings]
    assert versions == sorted(versions, key=lambda version: [*map(int, version.split("."))], reverse=True)
