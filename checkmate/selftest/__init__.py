"""Tell whether checkmate keeps its promises on a device: ``checkmate selftest --device cuda --json selftest.json``.

`checks` are the checks, and `run` gives each a process of its own.
"""
