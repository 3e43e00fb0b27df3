"""Look up in the changelog whether a transaction of ours is committed (protocol, rule R3)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Final

import anyio
import msgspec

from streams.core.position import offsets_of
from streams.core.transaction import Cut, Transaction
from streams.errors import BrokerUnavailable, Stopped
from streams.records import IncomingRecord
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord, ReleaseMarker, decode_offset
from streams.runtime.member import Member
from streams.runtime.ownership.range_reader import Read
from streams.runtime.ownership.stalls import Stalls

_log = logging.getLogger(__name__)

ASK_SECONDS: Final = 20.0
"""One request to the broker takes so many seconds, at most."""


class LookUps:
    """Look-ups of one member. On the loop."""

    def __init__(self, member: Member, stalls: Stalls, read: Read) -> None:
        self._member = member
        self._config = member.config
        self._stalls = stalls
        self._read = read

    async def look_up(self, txn: Transaction) -> bool:
        """Look up in the changelog whether this transaction of ours is committed (rule R3). Keeps trying while the
        broker does not answer, up to ``recovery_timeout_seconds``."""
        member, config = self._member, self._config
        deadline = member.now() + config.timeouts.recovery_timeout_seconds
        # One that was not handed over, if there is any: only this member writes to its changelog.
        partition = min(txn.cuts, key=lambda number: txn.cuts[number].release is not None)
        while True:
            try:
                return await self._look_up_one(partition, txn.cuts[partition], txn.serial)
            except BrokerUnavailable as error:
                if member.now() > deadline:
                    raise
                _log.warning("the look-up of transaction %d waits for the broker: %s", txn.serial, error)
                await self._stalls.check({partition: -1}, member.now())
                await anyio.sleep(0.2)

    async def _look_up_one(self, partition: int, cut: Cut, serial: int) -> bool:
        member = self._member
        # Its slot has been opened again, which settled the transaction: its records, if any, are below this end.
        answer = await member.control.call(
            member.takeover_client.log_range, self._config.changelog, [partition], member.now() + ASK_SECONDS
        )
        low, high = answer[partition]
        # The log is read from its end backwards: the answer is among the newest records, and there may be millions.
        window = 2 * self._config.pool.max_batch_size + member.environment.look_up_records
        while True:
            start = max(low, high - window)
            found = await self._offset_records(partition, start, high, serial)
            if any(self._is_ours(record, serial) for record in found):
                return True
            # An offset record that is older than ours decides, too: ours is not behind it, so it was not committed.
            # One of another member is older only where this transaction has handed nothing over: then only this member
            # writes to the log.
            mine = any(record.writer == member.writer for record in found)
            if mine or (found and cut.release is None):
                return False
            if start == low:
                if not found or cut.release is None:
                    return False
                further = [spec.topic for spec, _ in member.further_inputs]
                return _follows(found[-1], cut, cut.release, further, partition)
            window *= 8

    def _is_ours(self, record: OffsetRecord, serial: int) -> bool:
        # A later record of ours proves it, too: our transactions commit in their order (R2).
        return record.writer == self._member.writer and record.serial >= serial

    async def _offset_records(self, partition: int, start: int, end: int, serial: int) -> list[OffsetRecord]:
        """Read the offset records in this range, up to the first that decides the look-up: later ones may belong to an
        open transaction of the next owner, which may be waiting for us."""
        found: list[OffsetRecord] = []

        def receive(_: int, records: list[IncomingRecord]) -> None:
            found.extend(decode_offset(record) for record in records if record.key == OFFSET_KEY and record.value)

        if start < end:
            with contextlib.suppress(Stopped):
                await self._read(
                    self._config.changelog,
                    {partition: (start, end)},
                    receive,
                    lambda: any(self._is_ours(record, serial) for record in found),
                )
        return found


def _follows(record: OffsetRecord, cut: Cut, release: bytes, further: Sequence[str], partition: int) -> bool:
    """Check whether another member works on from our marker, which compaction took away: then it was committed."""
    marker = msgspec.json.decode(release, type=ReleaseMarker)
    return record.generation >= marker.generation and record.reaches(offsets_of(cut.offset), further, partition)
