"""Which packages there are; all else is in pyproject.toml.

``solvers`` and ``profiling`` stand at the top, and in the package as two symbolic links. Where git makes plain files of
links, as on Windows by default, their files are taken from the top, so that what is built and installed is the same.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import find_namespace_packages, setup

LINKS = ("solvers", "profiling")

packages, places = find_namespace_packages(include=["checkmate*"]), {}
for link in LINKS:
    if not Path("checkmate", link).is_dir():
        packages += [f"checkmate.{room}" for room in find_namespace_packages(include=[f"{link}*"])]
        places[f"checkmate.{link}"] = link
setup(packages=packages, package_dir=places)
