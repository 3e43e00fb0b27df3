"""The planner's view of the cluster: which topics and partitions a read is about, and what their logs hold now.

Lives in the driver's planning process, for one query (batch) or for as long as a query runs (stream), on one thread.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

from streams.errors import BrokerUnavailable, ConfigError, OffsetError, StreamsError, TopicError
from streams.kafka.questions.requests import commit
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import BrokerRefusal, Code, raise_for
from streams.kafka.wire.security import Security
from streams.kafka.wire.topic_questions import EARLIEST as EARLIEST_TIME
from streams.kafka.wire.topic_questions import LATEST as LATEST_TIME
from streams.kafka.wire.topic_questions import TopicMetadata, leader_of, list_offsets, metadata, topic_id_text
from streams.records import TopicPartition
from streams.spark.kafka import ASK_SECONDS, no_such_topic, settings_of
from streams.spark.options import agreed
from streams.spark.reading.planning import Bounds, Logs, Positions, TopicLog
from streams.spark.reading.read_options import EARLIEST, LATEST, ByPartition, Edge, ReadOptions, read_options

_COMMIT_SECONDS: Final = 5.0
_QUIET_SECONDS: Final = 5.0

_log = logging.getLogger(__name__)
T = TypeVar("T")


class LogView:
    """Requests offsets of the cluster for one read. After a failure that may pass by itself a request is repeated, for
    up to ``stallSeconds``."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._ask_seconds = min(ASK_SECONDS, options.stall_seconds)
        self._wire: WireClient | None = None

    def close(self) -> None:
        """Close the connections; the next question makes others."""
        client, self._wire = self._wire, None
        if client is not None:
            client.close()

    def logs(self) -> Logs:
        """The topics chosen by the options, those of them that exist. Raises ``BrokerUnavailable``, ``ConfigError``."""
        return self._patiently(self._logs, "asking for topics and offsets")

    def resolve(self, edge: Edge, logs: Logs) -> Positions:
        """Return the beginning or the end of a read, in numbers.

        Raises ``ConfigError`` when the option says nothing about a partition or too much, ``OffsetError`` when the log
        does not hold the offset (any more), or no record of the time.
        """
        ids = {topic: log.id for topic, log in logs.items()}
        bounds = {TopicPartition(t, p): found for t, log in logs.items() for p, found in log.partitions.items()}
        if edge.at == "earliest":
            return Positions(ids, {place: found.first for place, found in bounds.items()})
        if edge.at == "latest":
            return Positions(ids, {place: found.end for place, found in bounds.items()})
        if isinstance(edge.at, int):
            given = dict.fromkeys(bounds, edge.at)
        else:
            given = _for_each(edge.option, edge.at, bounds)
        if edge.is_time:
            return Positions(ids, self._at_times(edge, given, bounds))
        return Positions(
            ids, {place: self._offset(edge.option, place, at, bounds[place]) for place, at in given.items()}
        )

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        """Set a group's committed offsets, for tools that show lag. Whatever goes wrong is logged, nothing more.

        Waits for the answer, up to five seconds: Spark may end this process right after.
        """
        group = self._options.commit_offsets_to
        if group is None or not positions:
            return
        offsets = {(place.topic, place.partition): (at, "") for place, at in positions.items()}
        deadline = time.monotonic() + _COMMIT_SECONDS
        try:
            client = self._client()
            client.ask("committing", deadline, functools.partial(commit, client, group, offsets, deadline))
        except StreamsError as problem:
            _log.warning("positions could not be committed to group %s (option commitOffsetsTo): %s", group, problem)

    def _client(self) -> WireClient:
        if self._wire is None:
            settings = settings_of(self._options.kafka)
            settings.check()
            security = Security.of(settings.overrides)
            self._wire = WireClient(settings.bootstrap_servers, settings.client_id, security)
            self._wire.start()
        return self._wire

    def _patiently(self, ask: Callable[[float], Awaitable[T]], doing: str) -> T:
        begun, patience = time.monotonic(), self._options.stall_seconds
        try:
            return self._asked(ask, doing, begun + min(_QUIET_SECONDS, patience))
        except BrokerUnavailable as error:
            if patience <= _QUIET_SECONDS or not _passes(error):
                raise self._given_up(error, doing) from error.__cause__
            _log.warning("%s; asking for up to %g s (option stallSeconds)", error, patience)
        try:
            return self._asked(ask, doing, begun + patience)
        except BrokerUnavailable as error:
            raise self._given_up(error, doing) from error.__cause__

    def _asked(self, ask: Callable[[float], Awaitable[T]], doing: str, deadline: float) -> T:
        async def attempt() -> T:
            return await ask(min(time.monotonic() + self._ask_seconds, deadline))

        return self._client().ask(doing, deadline, attempt)

    def _given_up(self, error: BrokerUnavailable, doing: str) -> BrokerUnavailable:
        if not _passes(error):
            return error
        return BrokerUnavailable(
            f"{doing}: no answer from {self._options.kafka['bootstrap.servers']} for "
            f"{self._options.stall_seconds:g} s (option stallSeconds): {error.__cause__ or error}; is the broker up, "
            "the address right?"
        )

    async def _logs(self, limit: float) -> Logs:
        topics = {
            name: topic
            for name, topic in (await self._described(limit)).items()
            if self._options.topics.pattern is None or not topic.is_internal
        }
        chosen = {
            name: self._chosen(name, [found.partition_index for found in topic.partitions])
            for name, topic in topics.items()
        }
        ends = self._options.committed_only
        earliest, latest = (
            {TopicPartition(name, number): at for name, numbers in chosen.items() for number in numbers}
            for at in (EARLIEST_TIME, LATEST_TIME)
        )
        first, end, high = await asyncio.gather(
            self._offsets(topics, earliest, limit, stable=ends),
            self._offsets(topics, latest, limit, stable=ends),
            self._offsets(topics, latest, limit),
        )
        # Three requests at the same time, so the end may be of a later moment than the high watermark.
        bounds = {place: Bounds(first[place], end[place], max(high[place], end[place])) for place in latest}
        return {
            name: TopicLog(topic_id_text(topics[name].topic_id), {p: bounds[TopicPartition(name, p)] for p in numbers})
            for name, numbers in chosen.items()
        }

    async def _described(self, limit: float) -> dict[str, TopicMetadata]:
        """The topics of these names, or of this pattern, that exist."""
        topics = self._options.topics
        names = sorted(topics.names or topics.assigned or ()) if topics.pattern is None else None
        found = {}
        for topic in (await metadata(self._client(), names, limit)).topics:
            name = topic.name or ""
            if topics.pattern is not None and not re.fullmatch(topics.pattern, name):
                continue
            if topic.error_code not in (Code.UNKNOWN_TOPIC_OR_PARTITION, Code.UNKNOWN_TOPIC_ID):
                raise_for(topic.error_code)
                found[name] = topic
        return dict(sorted(found.items()))

    def _chosen(self, topic: str, there: list[int]) -> list[int]:
        if self._options.topics.assigned is None:
            return sorted(there)
        chosen = self._options.topics.assigned[topic]
        if missing := set(chosen) - set(there):
            raise TopicError(f"option assign: topic {topic!r} has no partition {min(missing)}, it has {len(there)}")
        return list(chosen)

    def _at_times(
        self, edge: Edge, times: Mapping[TopicPartition, int], bounds: Mapping[TopicPartition, Bounds]
    ) -> dict[TopicPartition, int]:
        async def ask(limit: float) -> dict[TopicPartition, int]:
            return await self._offsets(await self._described(limit), times, limit)

        found = {}
        for place, offset in self._patiently(ask, "asking for the offsets of a time").items():
            if offset >= 0:
                # Behind an open transaction: a start stays there, for what is before it is older than the time.
                found[place] = min(offset, bounds[place].end) if edge.option.startswith("ending") else offset
            elif edge.option.startswith("ending") or self._options.latest_if_no_such_time:
                found[place] = bounds[place].end
            else:
                raise OffsetError(
                    f"option {edge.option}: {place} has no record at or after {times[place]} ms; give an earlier time, "
                    "or startingOffsetsByTimestampStrategy=latest"
                )
        return found

    def _offset(self, option: str, place: TopicPartition, given: int, bounds: Bounds) -> int:
        if given in (EARLIEST, LATEST):
            return bounds.first if given == EARLIEST else bounds.end
        if bounds.first <= given <= bounds.end:
            return given
        problem = (
            f"option {option}: {place} has the offsets {bounds.first} to {bounds.end} now, not {given}; records before "
            "the first are gone (retention), the end is that of committed records"
        )
        if self._options.fail_on_data_loss:
            raise OffsetError(problem)
        _log.warning("failOnDataLoss=false: %s; goes on with what is there", problem)
        return min(max(given, bounds.first), bounds.end)

    async def _offsets(
        self,
        topics: Mapping[str, TopicMetadata],
        times: Mapping[TopicPartition, int],
        limit: float,
        *,
        stable: bool = False,
    ) -> dict[TopicPartition, int]:
        """Offsets of partitions by time: of all leaders at once."""
        by_leader: dict[int, dict[str, dict[int, int]]] = {}
        for place, at in times.items():
            if place.topic not in topics:  # it was deleted meanwhile
                raise no_such_topic(place.topic, self._options.kafka)
            leader = leader_of(topics[place.topic], place.partition)
            by_leader.setdefault(leader, {}).setdefault(place.topic, {})[place.partition] = at
        client = self._client()
        answers = await asyncio.gather(
            *(list_offsets(client, wanted, leader, limit, stable=stable) for leader, wanted in by_leader.items())
        )
        return {
            TopicPartition(topic, number): offset
            for answer in answers
            for topic, offsets in answer.items()
            for number, offset in offsets.items()
        }


def _passes(error: BrokerUnavailable) -> bool:
    """Check whether asking again may help: the broker did not refuse the request for good."""
    cause = error.__cause__
    return not isinstance(cause, BrokerRefusal) or cause.retriable


def require(logs: Logs, options: ReadOptions) -> None:
    """Raises ``TopicError`` for a topic that was named and does not exist."""
    for name in options.topics.names or options.topics.assigned or ():
        if name not in logs:
            raise no_such_topic(name, options.kafka)


def _for_each(option: str, given: ByPartition, bounds: Mapping[TopicPartition, Bounds]) -> dict[TopicPartition, int]:
    flat = {TopicPartition(topic, p): value for topic, partitions in given.items() for p, value in partitions.items()}
    for place in sorted(bounds):
        if place not in flat:
            raise ConfigError(f"option {option} says nothing about {place}: name all partitions of the topic")
    for place in sorted(flat):
        if place not in bounds:
            raise ConfigError(f"option {option} names {place}, which does not exist or is not chosen")
    return flat


def end_offsets(
    topics: str | Iterable[str], *, servers: str | None = None, options: Mapping[str, str] | None = None
) -> str:
    """Return the present ends of topics, as JSON for the options ``startingOffsets`` and ``endingOffsets``.

    A batch read up to these ends and a stream from them on have every record once; several reads up to them agree.
    ``options`` are a read's (``isolation``, ``kafka.*``, ...); the end is that of committed records unless they say
    otherwise. Raises ``TopicError``, ``ConfigError``, ``BrokerUnavailable``. Blocks; any thread.
    """
    names = [topics] if isinstance(topics, str) else list(topics)
    given = agreed(options or {}, {"subscribe": ",".join(names)})
    if servers is not None:
        given["kafka.bootstrap.servers"] = servers
    parsed = read_options(given)
    view = LogView(parsed)
    logs = view.logs()
    require(logs, parsed)
    return json.dumps(
        {topic: {str(p): found.end for p, found in log.partitions.items()} for topic, log in logs.items()}
    )
