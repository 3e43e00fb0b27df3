"""Check that source and changelog are still the topics that the state belongs to (protocol, A1 and A2).

A topic that was deleted and created again has the same name, other records at the same offsets, and another id. Offsets
and state of the old one do not fit it, so nothing may be read from it, or written to it, on their account.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Final

import anyio

from streams.errors import BrokerUnavailable, ConfigError, OffsetError, TopicError, TopicReplaced
from streams.metrics import PartitionsAdded
from streams.model.group import TakeOver
from streams.model.topics import TopicIdentity, unread
from streams.runtime.changelog import TopicIds
from streams.runtime.member import Member
from streams.runtime.ownership.replicas import Replicas
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.ports import SourceLog
from streams.settings.config import EventSourceConfig

_log = logging.getLogger(__name__)

Questions = TakeOver | SourceLog

ASK_SECONDS: Final = 10.0
"""One request takes so many seconds, at most. A topic that does not exist for so long is gone: a broker that has just
started may not know it yet."""

REMINDER_CHECKS: Final = 10
"""A warning of partitions that no member reads comes at every tenth check, beginning with the first."""

CONFIRM_SECONDS: Final = 3.0
"""The second look at a log that seems to have lost records comes after so many seconds. A leader that stood still, and
is none any more, answers with the end that it knows until it learns of its successor."""


def refuse_replaced_input(config: EventSourceConfig, topic: str, partition: int, known: str, now: str) -> None:
    """Raise ``TopicReplaced`` if the position in an input belongs to another topic than the one that is there now. An
    id that is not known is no difference: older versions did not write one."""
    if _differ(known, now):
        raise TopicReplaced(
            f"{topic}[{partition}]: the topic was deleted and created again: the committed offset and the state "
            f"belong to the topic with the id {known}, the topic has the id {now} now. "
            f"{_begin_anew(config)}"
        )


def refuse_replaced(config: EventSourceConfig, partition: int, known: TopicIds, now: TopicIds) -> None:
    """Raise ``TopicReplaced`` if the state of a partition belongs to another source or changelog than those that are
    there now; see ``refuse_replaced_input``."""
    refuse_replaced_input(config, config.topic, partition, known.source, now.source)
    if _differ(known.changelog, now.changelog):
        raise TopicReplaced(
            f"{config.changelog}[{partition}]: the changelog was deleted and created again: the state of "
            f"{config.topic}[{partition}] was written to the topic with the id {known.changelog}, the topic has the id "
            f"{now.changelog} now, and does not hold all of that state. {_begin_anew(config)}"
        )


def _begin_anew(config: EventSourceConfig) -> str:
    return (
        f"Stop all members, then delete the changelog {config.changelog} and the offsets of the group "
        f"{config.group_id} to start over, or use another group_id. If it was restored or copied with the same "
        "offsets, run `kes offsets accept MODULE:SOURCE --restored` instead"
    )


class TopicWatch:
    """The regular look at both topics; an error of it stops the source. On the loop."""

    def __init__(self, member: Member, replicas: Replicas) -> None:
        self._member = member
        self._replicas = replicas
        # It has a thread of its own: a request to a source that is away for long holds up no take-over.
        self._thread = member.thread("kes-topic-watch")
        self._ends: dict[PartitionWorker, int] = {}
        """The highest end of the changelog that was seen while a partition was here."""
        self._unread: Counter[tuple[str, int]] = Counter()
        """Topic and number of its partitions, if it is more than in the settings -> how often it was seen."""

    async def run(self) -> None:
        """Check until cancelled. Raises ``TopicReplaced``, ``TopicError`` for a topic that is gone, and ``OffsetError``
        for a changelog that lost records. A broker that does not answer is no finding."""
        while True:
            await anyio.sleep(self._member.environment.topic_check_seconds)
            await self.check()

    async def check(self) -> None:
        """Check once; raises as ``run``."""
        try:
            await self._check_ids()
            await self._check_ends()
        # A broker that is away, or a right that is missing, says nothing about the topics.
        except (BrokerUnavailable, ConfigError) as error:
            _log.debug("source and changelog cannot be looked at: %s", error)

    async def _check_ids(self) -> None:
        member, config = self._member, self._member.config
        workers = dict(member.workers)
        # As they are before the request: an answer proves nothing about a later state.
        known = {**self._replicas.ids(), **{number: worker.ids for number, worker in workers.items()}}
        inputs_known = {number: worker.input_ids for number, worker in workers.items()}
        source = await self._identity(member.source_log, config.topic)
        changelog = await self._identity(member.takeover_client, config.changelog)
        further = [spec.topic for spec, _ in member.further_inputs]
        inputs = [await self._identity(member.source_log, topic) for topic in further]
        self._warn_unread(config.topic, source.partitions)
        for topic, found in zip(further, inputs, strict=True):
            self._warn_unread(topic, found.partitions)
        now = TopicIds(source.topic_id, changelog.topic_id)
        for number, ids in sorted(known.items()):
            refuse_replaced(config, number, ids, now)
        for number, known_ids in inputs_known.items():
            # This is not strict: a worker that is still being taken over has no ids of inputs yet.
            for topic, known_id, found in zip(further, known_ids, inputs, strict=False):
                refuse_replaced_input(config, topic, number, known_id, found.topic_id)
        for number, worker in workers.items():  # a donor of an older version did not write them
            # Ids that have changed since stay: they are those of a take-over that is younger than this answer.
            if worker.ids == known[number]:
                worker.ids = TopicIds(worker.ids.source or now.source, worker.ids.changelog or now.changelog)

    def _warn_unread(self, topic: str, partitions: int) -> None:
        """Warn of partitions that were added to an input since the settings were made: no member has them."""
        config = self._member.config
        if partitions <= config.num_partitions:
            return
        self._member.measure(PartitionsAdded(topic, config.num_partitions, partitions))
        if self._unread[topic, partitions] % REMINDER_CHECKS == 0:
            _log.warning("%s", unread(topic, config.num_partitions, partitions))
        self._unread[topic, partitions] += 1

    async def _identity(self, questions: Questions, topic: str) -> TopicIdentity:
        try:
            return await self._thread.call(questions.identity, topic, self._member.now() + ASK_SECONDS)
        except TopicError as error:
            raise TopicError(
                f"topic {topic} does not exist any more: it was deleted while the event source was running ({error})"
            ) from error

    async def _check_ends(self) -> None:
        """Compare the ends of the logs: they only ever grow, unless the last records are lost (by an unclean election
        of a leader)."""
        workers = list(self._member.workers.values())
        found = await self._ask_ends(workers)
        if self._shrunk(found):
            await anyio.sleep(CONFIRM_SECONDS)
            found = await self._ask_ends(workers)
        for worker, end in self._shrunk(found).items():
            changelog = f"{self._member.config.changelog}[{worker.partition}]"
            raise OffsetError(
                f"{changelog}: the log ended at offset {self._ends[worker]} before, and ends at {end} now: records of "
                f"the state of {worker.topic_partition} are lost (by an unclean election of a leader?). Restore them, "
                "or stop all members and delete the changelog and the group's offsets to start over"
            )
        # Ends are kept by worker, without those that are gone: while a partition is elsewhere nothing is known of its
        # end.
        self._ends = found

    async def _ask_ends(self, workers: list[PartitionWorker]) -> dict[PartitionWorker, int]:
        member, numbers = self._member, [worker.partition for worker in workers]
        request = member.takeover_client.log_range
        ranges = await self._thread.call(request, member.config.changelog, numbers, member.now() + ASK_SECONDS)
        return {worker: ranges[worker.partition][1] for worker in workers}

    def _shrunk(self, found: Mapping[PartitionWorker, int]) -> dict[PartitionWorker, int]:
        return {worker: end for worker, end in found.items() if end < self._ends.get(worker, 0)}


def _differ(known: str, now: str) -> bool:
    return bool(known and now) and known != now
