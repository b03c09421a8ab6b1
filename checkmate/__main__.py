"""``python -m checkmate``: the command line."""

from __future__ import annotations

import sys

from checkmate.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
