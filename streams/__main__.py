"""``python -m streams`` is the command ``kes``."""

from __future__ import annotations

from typing import NoReturn

from streams.cli.interrupts import ends_at_once


def run() -> NoReturn:
    """Entry point of the script ``kes``."""
    with ends_at_once():
        from streams.cli import main
    main.run()


if __name__ == "__main__":
    run()
