"""Name the transactions that hold up a restore, and end those that hang, by proof."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from streams.errors import StreamsError
from streams.model.group import HangingEnd, OpenTransaction
from streams.runtime.member import Member

_log = logging.getLogger(__name__)

ASK_SECONDS: Final = 10.0
"""One request to the broker takes so many seconds, at most."""

JUDGE_SECONDS: Final = 20.0
"""Two tries to end one transaction are so many seconds apart: each reads logs."""


class Stalls:
    """Ends hanging transactions that hold up restores, as far as a proof says how, and logs the others. A transaction
    that a coordinator has is logged when it has had its whole time to end."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._thread = member.thread("kes-stalls")  # take-overs of other partitions need the engine's
        self._stands: dict[int, tuple[int, float]] = {}
        self._logged: set[tuple[object, ...]] = set()
        self._judged: dict[tuple[object, ...], float] = {}  # when

    async def check(self, positions: Mapping[int, int], since: float) -> None:
        """Note the positions at which these partitions have stood since that moment, at least. Requests the open
        transactions from the broker."""
        member, config = self._member, self._member.config
        for partition, position in positions.items():  # other partitions may stand still in a take-over of their own
            known = self._stands.get(partition)
            self._stands[partition] = known if known is not None and known[0] == position else (position, since)
        patience = config.timeouts.transaction_timeout_seconds  # until then a coordinator may end it
        overdue = [number for number in positions if member.now() - self._stands[number][1] > patience]
        request = member.takeover_client.open_transactions
        try:
            found = await self._thread.call(request, config.changelog, list(positions), member.now() + ASK_SECONDS)
        except StreamsError as error:
            if overdue:
                _log.warning(
                    "the transactions that hold up the restore of %s are not known: %s", config.changelog, error
                )
            return
        for txn in found:
            if txn.is_hanging:
                await self._end(txn)
            elif txn.partition in overdue and self._is_news(txn.identity):
                _log.warning(
                    "%s cannot be restored yet: the transaction of %s (%s; %s) holds it up; its coordinator ends it, "
                    "at the latest when its time is over",
                    f"{txn.topic}[{txn.partition}]",
                    txn.transactional_id,
                    txn.state,
                    _who(txn),
                )

    async def _end(self, txn: OpenTransaction) -> None:
        """End a hanging transaction. At once: a proof does not get better by waiting."""
        client, call, now = self._member.takeover_client, self._thread.call, self._member.now
        end: HangingEnd | None = None
        if now() < self._judged.get(txn.identity, -JUDGE_SECONDS) + JUDGE_SECONDS:
            return
        # The time is noted before the judgement: one that fails has read the logs, too.
        self._judged[txn.identity] = now()
        try:
            end = await call(client.judge_hanging, txn, now() + ASK_SECONDS)
            await call(client.end_hanging, end, now() + ASK_SECONDS)
        except StreamsError as error:
            if self._is_news((*txn.identity, str(error)[:40])):
                options = f"--topic {txn.topic} --partition {txn.partition} --start-offset {txn.start_offset}"
                proved = "" if end is None else f"it is to be {_how(end)} ({end.proof}), but "
                _log.error(
                    "%s cannot be restored: a hanging transaction (%s) holds it up. No coordinator lists it, so none "
                    "ends it, and this member cannot: %s%s. Run kes txn end MODULE:SOURCE %s",
                    f"{txn.topic}[{txn.partition}]",
                    _who(txn),
                    proved,
                    error,
                    options,
                )
            return
        _log.warning(
            "%s[%d]: a hanging transaction (%s) held up the restore, and is %s: %s",
            txn.topic,
            txn.partition,
            _who(txn),
            _how(end),
            end.proof,
        )

    def _is_news(self, what: tuple[object, ...]) -> bool:
        is_news = what not in self._logged
        self._logged.add(what)
        return is_news


def _who(txn: OpenTransaction) -> str:
    return f"producer id {txn.producer_id}, epoch {txn.producer_epoch}, open since offset {txn.start_offset}"


def _how(end: HangingEnd) -> str:
    return "committed" if end.commit else "aborted"
