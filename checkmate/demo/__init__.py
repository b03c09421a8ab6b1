"""Tell whether checkmate keeps its promises: ``checkmate demo`` on the CPU, ``checkmate selftest`` on any device."""
