"""The command line ``checkmate``."""

from checkmate.cli.app import main as main
