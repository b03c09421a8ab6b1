"""Whether checkmate keeps its promises on a device: a list of checks, each in a process of its own.

    checkmate selftest --device cuda --json selftest.json

What a check is, and what it gives: `checkmate.selftest.check`. The list: `checkmate.selftest.catalogue`. Another check
is a function of a `Setting` that gives a `Finding`, and a line in that list.
"""
