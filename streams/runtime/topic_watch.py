"""Whether source and changelog are still the topics that the state belongs to (protocol, A1 and A2).

A topic that was deleted and created again has the same name, other records at the same offsets, and another id. Offsets
and state of the old one say nothing about it, so nothing may be read from it, or written to it, on their account.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import anyio

from streams.config import EventSourceConfig
from streams.errors import BrokerUnavailable, ConfigError, OffsetError, TopicError, TopicReplaced
from streams.group import TakeOver
from streams.metrics import PartitionsAdded
from streams.runtime.changelog import TopicIds
from streams.runtime.partition_worker import PartitionWorker
from streams.runtime.ports import SourceLog
from streams.topics import TopicIdentity, unread

if TYPE_CHECKING:
    from streams.runtime.lifecycle import Engine

_log = logging.getLogger(__name__)

Questions = TakeOver | SourceLog

ASK_SECONDS: Final = 10.0
"""For one question. A topic that does not exist for so long is gone: a broker that has just started may not know it."""

REMINDER_LOOKS: Final = 10
"""Partitions that nobody reads are warned of at every tenth look, beginning with the first."""

CONFIRM_SECONDS: Final = 3.0
"""Until a log that seems to have lost records is asked again: a leader that stood still, and is none any more, answers
with the end that it knows until it hears of its successor."""


def refuse_replaced(config: EventSourceConfig, partition: int, known: TopicIds, now: TopicIds) -> None:
    """Raise ``TopicReplaced`` if the state of a partition belongs to other topics than those that are there now. An id
    that is not known is no difference: older versions did not write one."""
    begin_anew = (
        f"Stop all members, then delete the changelog {config.changelog} and the offsets of the group "
        f"{config.group_id} to begin anew, or use another group_id. If it was restored or copied with the same "
        "offsets, run `kes offsets accept MODULE:SOURCE --restored` instead"
    )
    if _differ(known.source, now.source):
        raise TopicReplaced(
            f"{config.topic}[{partition}]: the topic was deleted and created again: the committed offset and the state "
            f"belong to the topic with the id {known.source}, the topic has the id {now.source} now. {begin_anew}"
        )
    if _differ(known.changelog, now.changelog):
        raise TopicReplaced(
            f"{config.changelog}[{partition}]: the changelog was deleted and created again: the state of "
            f"{config.topic}[{partition}] was written to the topic with the id {known.changelog}, the topic has the id "
            f"{now.changelog} now, and does not hold all of that state. {begin_anew}"
        )


class TopicWatch:
    """Looks at both topics from time to time, and stops the source by what it raises. On the loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = engine.connections.worker("kes-topic-watch")
        self._ends: dict[PartitionWorker, int] = {}
        """The highest end of the changelog that was seen while a partition was here."""
        self._unread: Counter[int] = Counter()
        """Number of the source's partitions, if it is more than the settings say -> how often it was seen."""

    async def run(self) -> None:
        """Look until cancelled. Raises ``TopicReplaced``, ``TopicError`` for a topic that is gone, and ``OffsetError``
        for a changelog that lost records. A broker that does not answer is no finding."""
        while True:
            await anyio.sleep(self._engine.environment.topic_look_seconds)
            await self.look()

    async def look(self) -> None:
        """Look once; raises as ``run``."""
        try:
            await self._look_at_ids()
            await self._look_at_ends()
        except (BrokerUnavailable, ConfigError) as error:
            _log.debug("source and changelog cannot be looked at: %s", error)

    def close(self) -> None:
        """Ask nothing more."""
        self._thread.abandon()

    async def _look_at_ids(self) -> None:
        engine, config = self._engine, self._engine.config
        workers = dict(engine.workers)
        # As they are before the question: an answer says nothing about what is checked after it.
        known = {**engine.copies.ids(), **{number: worker.ids for number, worker in workers.items()}}
        source = await self._identity(engine.source_log, config.topic)
        changelog = await self._identity(engine.takeover_client, config.changelog)
        self._tell_unread(source.partitions)
        now = TopicIds(source.topic_id, changelog.topic_id)
        for number, ids in sorted(known.items()):
            refuse_replaced(config, number, ids, now)
        for number, worker in workers.items():  # a donor of an older version did not say them
            if worker.ids == known[number]:
                worker.ids = TopicIds(worker.ids.source or now.source, worker.ids.changelog or now.changelog)

    def _tell_unread(self, partitions: int) -> None:
        """Partitions that were added to the source since the settings were made: nobody has them."""
        config = self._engine.config
        if partitions <= config.num_partitions:
            return
        self._engine.measure(PartitionsAdded(config.topic, config.num_partitions, partitions))
        if self._unread[partitions] % REMINDER_LOOKS == 0:
            _log.warning("%s", unread(config.topic, config.num_partitions, partitions))
        self._unread[partitions] += 1

    async def _identity(self, questions: Questions, topic: str) -> TopicIdentity:
        try:
            return await self._thread.call(questions.identity, topic, self._engine.now() + ASK_SECONDS)
        except TopicError as error:
            raise TopicError(
                f"topic {topic} does not exist any more: it was deleted while the event source was running ({error})"
            ) from error

    async def _look_at_ends(self) -> None:
        """The end of a log only ever grows, unless its last records are lost (by an unclean election of a leader)."""
        workers = list(self._engine.workers.values())
        found = await self._ask_ends(workers)
        if self._shrunk(found):
            await anyio.sleep(CONFIRM_SECONDS)
            found = await self._ask_ends(workers)
        for worker, end in self._shrunk(found).items():
            changelog = f"{self._engine.config.changelog}[{worker.partition}]"
            raise OffsetError(
                f"{changelog}: the log ended at offset {self._ends[worker]} before, and ends at {end} now: records of "
                f"the state of {worker.topic_partition} are lost (by an unclean election of a leader?). Restore them, "
                "or stop all members and delete the changelog and the group's offsets to begin anew"
            )
        self._ends = found

    async def _ask_ends(self, workers: list[PartitionWorker]) -> dict[PartitionWorker, int]:
        engine, numbers = self._engine, [worker.partition for worker in workers]
        ask = engine.takeover_client.log_range
        ranges = await self._thread.call(ask, engine.config.changelog, numbers, engine.now() + ASK_SECONDS)
        return {worker: ranges[worker.partition][1] for worker in workers}

    def _shrunk(self, found: Mapping[PartitionWorker, int]) -> dict[PartitionWorker, int]:
        return {worker: end for worker, end in found.items() if end < self._ends.get(worker, 0)}


def _differ(known: str, now: str) -> bool:
    return bool(known and now) and known != now
