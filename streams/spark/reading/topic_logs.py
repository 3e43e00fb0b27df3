"""The planner's view of the cluster: which topics and partitions a read is about, and what their logs hold now.

Lives in the driver's planning process, for one query (batch) or for as long as a query runs (stream), on one thread.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
)
from confluent_kafka import TopicPartition as _TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin import OffsetSpec as _OffsetSpec  # type: ignore[attr-defined]

from streams.errors import BrokerUnavailable, ConfigError, OffsetError, TopicError
from streams.kafka.translate import NO_ANSWER, NO_SUCH_TOPIC
from streams.records import TopicPartition
from streams.spark.kafka import ASK_SECONDS, GRACE_SECONDS, answers, client, no_such_topic, translated
from streams.spark.options import agreed
from streams.spark.reading.planning import Bounds, Logs, Positions, TopicLog
from streams.spark.reading.read_options import EARLIEST, LATEST, ByPartition, Edge, ReadOptions, read_options

_AGAIN_SECONDS: Final = 0.2
_COMMIT_SECONDS: Final = 5.0
_QUIET_SECONDS: Final = 5.0

_spec: Any = _OffsetSpec
_log = logging.getLogger(__name__)
T = TypeVar("T")


class LogView:
    """Requests offsets of the cluster for one read. After a failure that may pass by itself a request is repeated, for
    up to ``stallSeconds``."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._ask_seconds = min(ASK_SECONDS, options.stall_seconds)
        self._admin: AdminClient | None = None
        self._committer: Consumer | None = None
        self._answers: list[str] = []  # to the last commit: what went wrong, or an empty text

    def close(self) -> None:
        """Close the clients; the next question makes others."""
        self._admin = None
        if self._committer is not None:
            self._committer.close()
            self._committer = None

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

        Waits for the answer, up to five seconds: Spark may end this process right after. By a consumer that never
        joins: the admin client's requests about groups take the process down (librdkafka 2.16) when the group's
        coordinator is only just coming up.
        """
        group = self._options.commit_offsets_to
        if group is None or not positions:
            return
        committer = self._committer
        if committer is None:
            settings = {"group.id": group, "enable.auto.commit": False, "on_commit": self._answered}
            self._committer = committer = client(Consumer, self._options.kafka, settings)
            assert committer is not None
        places = [_TopicPartition(place.topic, place.partition, at) for place, at in positions.items()]
        self._answers.clear()
        deadline = time.monotonic() + _COMMIT_SECONDS
        try:
            committer.commit(offsets=places, asynchronous=True)
            while not self._answers and time.monotonic() < deadline:
                committer.poll(0.01)
            problem = self._answers[0] if self._answers else "no answer"
        except KafkaException as error:
            problem = error.args[0].str()
        if problem:
            _log.warning("positions could not be committed to group %s (option commitOffsetsTo): %s", group, problem)

    def _answered(self, error: KafkaError | None, places: list[_TopicPartition]) -> None:
        problems = [error, *(place.error for place in places)]
        self._answers.append(next((problem.str() for problem in problems if problem is not None), ""))

    def _client(self) -> AdminClient:
        admin = self._admin
        if admin is None:  # not `or`: a client with nothing to do counts as false
            settings: dict[str, Any] = {
                "reconnect.backoff.ms": 50,
                "reconnect.backoff.max.ms": 1000,
                **self._options.kafka,
            }
            self._admin = admin = client(AdminClient, settings)
            assert admin is not None
        return admin

    def _patiently(self, ask: Callable[[], T], doing: str) -> T:
        begun, warned = time.monotonic(), False
        deadline = begun + self._options.stall_seconds
        while True:
            try:
                return ask()
            except KafkaException as error:
                if error.args[0].code() not in NO_ANSWER:
                    raise translated(error, doing, self._options.kafka) from error
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(
                        f"{doing}: no answer from {self._options.kafka['bootstrap.servers']} for "
                        f"{self._options.stall_seconds:g} s (option stallSeconds): {error.args[0].name()}; is the "
                        "broker up, the address right?"
                    ) from error
                if not warned and time.monotonic() - begun > _QUIET_SECONDS:
                    warned = True
                    _log.warning(
                        "%s: no answer from %s yet (%s); asking for up to %g s (option stallSeconds)",
                        doing,
                        self._options.kafka["bootstrap.servers"],
                        error.args[0].name(),
                        self._options.stall_seconds,
                    )
                self._admin = None  # one that lived through a restart of the broker may never answer again
            time.sleep(_AGAIN_SECONDS)

    def _logs(self) -> Logs:
        partitions: dict[str, tuple[str, list[int]]] = {}
        for name, topic in self._described(self._names()).items():
            if self._options.topics.pattern is not None and topic.is_internal:
                continue
            partitions[name] = str(topic.topic_id), self._chosen(name, [found.id for found in topic.partitions])
        bounds = self._bounds([TopicPartition(name, p) for name, (_, ids) in partitions.items() for p in ids])
        return {
            name: TopicLog(topic_id, {p: bounds[TopicPartition(name, p)] for p in ids})
            for name, (topic_id, ids) in partitions.items()
        }

    def _described(self, names: list[str]) -> dict[str, Any]:
        """The topics of these names that exist."""
        asked = (
            self._client().describe_topics(TopicCollection(names), request_timeout=self._ask_seconds) if names else {}
        )
        found = {}
        for name, topic in answers(asked, self._ask_seconds + GRACE_SECONDS).items():
            if not isinstance(topic, KafkaException):
                found[name] = topic
            elif topic.args[0].code() not in NO_SUCH_TOPIC:
                raise topic
        return found

    def _names(self) -> list[str]:
        topics = self._options.topics
        if topics.pattern is None:
            return sorted(topics.names or topics.assigned or ())
        there = self._client().list_topics(timeout=self._ask_seconds).topics
        return sorted(name for name in there if re.fullmatch(topics.pattern, name))

    def _chosen(self, topic: str, there: list[int]) -> list[int]:
        if self._options.topics.assigned is None:
            return sorted(there)
        chosen = self._options.topics.assigned[topic]
        if missing := set(chosen) - set(there):
            raise TopicError(f"option assign: topic {topic!r} has no partition {min(missing)}, it has {len(there)}")
        return list(chosen)

    def _bounds(self, places: list[TopicPartition]) -> dict[TopicPartition, Bounds]:
        if not places:
            return {}
        ends = IsolationLevel.READ_COMMITTED if self._options.committed_only else IsolationLevel.READ_UNCOMMITTED
        first, end, high = self._offsets(
            (places, _spec.earliest(), ends),
            (places, _spec.latest(), ends),
            (places, _spec.latest(), IsolationLevel.READ_UNCOMMITTED),
        )
        return {place: Bounds(first[place], end[place], max(high[place], end[place])) for place in places}

    def _at_times(
        self, edge: Edge, times: Mapping[TopicPartition, int], bounds: Mapping[TopicPartition, Bounds]
    ) -> dict[TopicPartition, int]:
        level = IsolationLevel.READ_UNCOMMITTED

        def ask() -> dict[TopicPartition, int]:
            (found,) = self._offsets((list(times), {p: _spec.for_timestamp(at) for p, at in times.items()}, level))
            return found

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

    def _offsets(self, *asked: tuple[list[TopicPartition], Any, Any]) -> list[dict[TopicPartition, int]]:
        """Offsets of partitions by specification (one, or one for each) and by isolation: all at
        once."""
        requests = []
        for places, spec, level in asked:
            wanted: Any = {_TopicPartition(*place): spec[place] if isinstance(spec, dict) else spec for place in places}
            requests.append(
                self._client().list_offsets(wanted, isolation_level=level, request_timeout=self._ask_seconds)
                if wanted
                else {}
            )
        found = []
        for request in requests:
            offsets = {}
            for place, answer in answers(request, self._ask_seconds + GRACE_SECONDS).items():
                if isinstance(answer, KafkaException):
                    raise answer
                offsets[TopicPartition(place.topic, place.partition)] = answer.offset
            found.append(offsets)
        return found


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
