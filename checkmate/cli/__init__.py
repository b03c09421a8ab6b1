"""What a shell calls: ``checkmate``."""

from checkmate.cli.app import main

__all__ = ["main"]
