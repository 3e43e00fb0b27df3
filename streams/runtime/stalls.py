"""Restores that stand still: what holds them up is told, once it has had the time of a transaction to end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from streams.errors import StreamsError
from streams.group import HANGING_SECONDS, OpenTransaction

if TYPE_CHECKING:
    from streams.runtime.lifecycle import Engine

_log = logging.getLogger(__name__)

ASK_SECONDS = 10.0


class Stalls:
    """Of one engine: where restores stand, and since when."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = engine.connections.worker("kes-stalls")  # take-overs of other partitions need the engine's
        self._stands: dict[int, tuple[int, float]] = {}
        self._told: set[tuple[int, int, int, bool]] = set()

    async def look(self, positions: Mapping[int, int], since: float) -> None:
        """These partitions have stood at these positions since that moment, at least. Asks the broker, and logs each
        transaction that holds one of them up once."""
        engine, config = self._engine, self._engine.config
        for partition, position in positions.items():  # other partitions may stand still in a take-over of their own
            known = self._stands.get(partition)
            self._stands[partition] = known if known is not None and known[0] == position else (position, since)
        patience = config.transaction_timeout_seconds  # until then a coordinator may end it
        overdue = [number for number in positions if engine.now() - self._stands[number][1] > patience]
        if not overdue:
            return
        ask = engine.takeover_client.open_transactions
        try:
            found = await self._thread.call(ask, config.changelog, overdue, engine.now() + ASK_SECONDS)
        except StreamsError as error:
            _log.warning("what holds up the restore of %s cannot be asked for: %s", config.changelog, error)
            return
        for txn in found:
            age = engine.wall_ms() / 1000 - txn.last_timestamp_ms / 1000
            what = txn.partition, txn.producer_id, txn.start_offset, age > HANGING_SECONDS
            if what not in self._told:
                self._told.add(what)
                self._tell(txn, HANGING_SECONDS - age)

    def close(self) -> None:
        """Ask nothing more."""
        self._thread.abandon()

    def _tell(self, txn: OpenTransaction, seconds_left: float) -> None:
        where, servers = f"{txn.topic}[{txn.partition}]", self._engine.config.bootstrap_servers
        who = f"producer id {txn.producer_id}, epoch {txn.producer_epoch}, open since offset {txn.start_offset}"
        place = f"--topic {txn.topic} --partition {txn.partition} --start-offset {txn.start_offset}"
        if txn.is_hanging:
            _log.error(
                "%s cannot be restored: a hanging transaction (%s) holds it up, which no coordinator knows of, so that "
                "nobody ends it. %s: kes transactions abort MODULE:SOURCE %s; or by Kafka's own tool: "
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
