"""The measurements of a transaction that has come to its end."""

from __future__ import annotations

from collections.abc import Iterator

from streams.core.router import Router
from streams.core.transaction import Transaction
from streams.metrics import Measurement, OwnMeasured, TransactionSettled
from streams.records import OwnSample


def measurements(
    txn: Transaction, router: Router, changelog: str, now: float, *, committed: bool
) -> Iterator[Measurement]:
    """Measure a settled transaction: what it was like, and the own metrics of its events if it is committed. They
    travel with the outputs, so they are undone, cut and sent again as these are, and count once."""
    samples: list[OwnSample] = []
    if router.own_metrics:
        samples = [output for output in txn.outputs if isinstance(output, OwnSample)]
    sizes = dict(txn.sizes)
    yield TransactionSettled(
        committed=committed,
        attempts=txn.attempts,
        events=txn.events,
        outputs=len(txn.outputs) - len(samples),
        changes=sum(len(cut.changes) for cut in txn.cuts.values()),
        partitions=len(txn.cuts),
        open_seconds=txn.sealed_at - txn.opened_at,
        commit_seconds=now - txn.sealed_at,
        flush_seconds=0.0 if txn.flushed_at is None else txn.flushed_at - txn.sealed_at,
        changelog_bytes=sizes.pop(changelog, 0),
        output_bytes=sizes,
    )
    for sample in samples if committed else ():
        yield OwnMeasured(sample.name, sample.amount, router.own_metrics[sample.name].bounded(sample.labels))
