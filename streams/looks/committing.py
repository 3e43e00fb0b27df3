"""One transaction of a command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from streams.kafka.writing.blocking import BlockingSlot

IN_DOUBT: Final = ("unknown", "fenced")
"""Kinds of ``TransactionFailed`` after which the transaction may be committed or not."""


@contextlib.contextmanager
def transaction(slot: BlockingSlot, to_find_out: str, report: Callable[[str], object]) -> Iterator[None]:
    """Commit what the block has sent. If the block raises, or Ctrl-C comes, it is aborted at once: an open transaction
    would hold up the readers of its topics. Ctrl-C during the commit leaves the outcome in doubt, which is
    reported together with ``to_find_out``. Raises what was raised, and ``TransactionFailed``."""
    committing = False
    try:
        yield
        committing = True
        slot.commit()
    except BaseException as error:
        if committing and not isinstance(error, Exception):
            report(f"interrupted during the commit, so whether it took place is not known. {to_find_out}")
        with contextlib.suppress(Exception):  # then its time ends it, or the next run does
            slot.abort()
        raise
