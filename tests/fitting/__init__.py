"""Tests of `checkmate.fitting`."""
