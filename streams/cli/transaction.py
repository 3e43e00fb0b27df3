"""One transaction of a command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

from streams.clients.transactional import TransactionalProducer
from streams.errors import TransactionFailed
from streams.records import Output

IN_DOUBT: Final = ("unknown", "fenced")
"""Kinds of ``TransactionFailed`` after which this producer can end nothing any more."""


@contextlib.contextmanager
def transaction(producer: TransactionalProducer, seconds: float) -> Iterator[None]:
    """A transaction that is committed at the end of the block. If that raises, or Ctrl-C comes, it is aborted at once:
    an open one would hold up the readers of its topics. Raises what was raised, and ``TransactionFailed``."""
    producer.begin()
    try:
        yield
        producer.flush(seconds)
        producer.commit(seconds)
    except BaseException as error:
        if not (isinstance(error, TransactionFailed) and error.kind in IN_DOUBT):
            with contextlib.suppress(Exception):  # then its time ends it, or the next run does
                producer.abort(seconds)
        raise


def send(producer: TransactionalProducer, outputs: Iterable[Output], seconds: float) -> None:
    """Queue records, waiting where the queue is full. Raises ``RecordRefused``, ``TransactionFailed``."""
    for output in outputs:
        while not producer.produce(output):
            producer.flush(seconds)
