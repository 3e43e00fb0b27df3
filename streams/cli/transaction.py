"""One transaction of a command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from streams.clients.producing.blocking import BlockingSlot

IN_DOUBT: Final = ("unknown", "fenced")
"""Kinds of ``TransactionFailed`` after which the transaction may be committed or not."""


@contextlib.contextmanager
def transaction(slot: BlockingSlot) -> Iterator[None]:
    """Commit what the block has sent. If the block raises, or Ctrl-C comes, it is aborted at once: an open transaction
    would hold up the readers of its topics. Raises what was raised, and ``TransactionFailed``."""
    try:
        yield
        slot.commit()
    except BaseException:
        with contextlib.suppress(Exception):  # then its time ends it, or the next run does
            slot.abort()
        raise
