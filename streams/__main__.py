"""``python -m streams`` is the command ``kes``."""

from __future__ import annotations

import sys
from typing import NoReturn

from streams.cli.interrupts import ends_at_once


def run() -> NoReturn:
    """Entry point of the script ``kes``."""
    with ends_at_once():
        try:
            from streams.cli import main
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "streams":
                raise
            sys.exit(f"kes: the package {error.name!r} is not installed: pip install 'kafka-event-source[cli]'")
    main.run()


if __name__ == "__main__":
    run()
