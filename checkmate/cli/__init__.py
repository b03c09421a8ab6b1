"""The command line ``checkmate``."""

from checkmate.cli.app import main

__all__ = ["main"]
