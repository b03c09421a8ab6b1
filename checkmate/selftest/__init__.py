"""Tell whether checkmate keeps its promises on a device: ``checkmate selftest --device cuda --json selftest.json``."""
