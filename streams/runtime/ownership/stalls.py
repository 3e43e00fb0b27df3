"""Name the transactions that hold up a restore."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from streams.errors import StreamsError
from streams.group import HANGING_SECONDS, OpenTransaction
from streams.runtime.member import Member

_log = logging.getLogger(__name__)

ASK_SECONDS: Final = 10.0


class Stalls:
    """Logs the transactions that hold up restores, once they have had the time of a transaction to end."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._thread = member.thread("kes-stalls")  # take-overs of other partitions need the engine's
        self._stands: dict[int, tuple[int, float]] = {}
        self._logged: set[tuple[int, int, int, bool]] = set()

    async def look(self, positions: Mapping[int, int], since: float) -> None:
        """Note the positions at which these partitions have stood since that moment, at least. Requests the open
        transactions from the broker, and logs each one that holds a partition up, once."""
        member, config = self._member, self._member.config
        for partition, position in positions.items():  # other partitions may stand still in a take-over of their own
            known = self._stands.get(partition)
            self._stands[partition] = known if known is not None and known[0] == position else (position, since)
        patience = config.transaction_timeout_seconds  # until then a coordinator may end it
        overdue = [number for number in positions if member.now() - self._stands[number][1] > patience]
        if not overdue:
            return
        request = member.takeover_client.open_transactions
        try:
            found = await self._thread.call(request, config.changelog, overdue, member.now() + ASK_SECONDS)
        except StreamsError as error:
            _log.warning("the transactions that hold up the restore of %s are not known: %s", config.changelog, error)
            return
        for txn in found:
            age = member.wall_ms() / 1000 - txn.last_timestamp_ms / 1000
            what = txn.partition, txn.producer_id, txn.start_offset, age > HANGING_SECONDS
            if what not in self._logged:
                self._logged.add(what)
                self._log_one(txn, HANGING_SECONDS - age)

    def _log_one(self, txn: OpenTransaction, seconds_left: float) -> None:
        where, servers = f"{txn.topic}[{txn.partition}]", self._member.config.bootstrap_servers
        who = f"producer id {txn.producer_id}, epoch {txn.producer_epoch}, open since offset {txn.start_offset}"
        place = f"--topic {txn.topic} --partition {txn.partition} --start-offset {txn.start_offset}"
        if txn.is_hanging:
            _log.error(
                "%s cannot be restored: a hanging transaction (%s) holds it up, which no coordinator lists, so that "
                "none ends it. %s: kes txn abort MODULE:SOURCE %s; or by Kafka's own tool: "
                "kafka-transactions.sh --bootstrap-server %s abort %s",
                where,
                who,
                "End it by" if seconds_left <= 0 else f"If it is still there in {seconds_left:.0f} s, end it by",
                place,
                servers,
                place,
            )
        else:
            _log.warning(
                "%s cannot be restored yet: the transaction of %s (%s; %s) holds it up; its coordinator ends it, "
                "at the latest when its time is over",
                where,
                txn.transactional_id,
                txn.state,
                who,
            )
