"""The topics of an event source: made when they are missing, verified when they are there, never changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import anyio
import msgspec

from streams.config import EventSourceConfig
from streams.errors import BrokerUnavailable, TopicError
from streams.runtime.ports import Connections, Topics
from streams.topics import TopicSpec, missing

T = TypeVar("T")

_log = logging.getLogger(__name__)

REQUEST_SECONDS: Final = 10.0
FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 5.0


def specs(config: EventSourceConfig) -> list[TopicSpec]:
    """Return the topics as they must be: source, changelog, dead letters, and the stand-in of a source on another
    cluster; equal numbers of partitions. The source comes first."""
    replicated: dict[str, str] = {}
    if config.min_insync_replicas > 1:
        replicated["min.insync.replicas"] = str(config.min_insync_replicas)

    def spec(name: str, **configs: str) -> TopicSpec:
        return TopicSpec(
            name=name,
            partitions=config.num_partitions,
            replication_factor=config.replication_factor,
            configs=replicated | {key.replace("_", "."): value for key, value in configs.items()},
        )

    found = [spec(config.topic), spec(config.changelog, cleanup_policy="compact"), spec(config.dead_letters)]
    return [*found, spec(config.offsets_topic)] if config.source_is_elsewhere else found


async def prepare(config: EventSourceConfig, connections: Connections) -> None:
    """Create or verify at the start. Waits as long as it takes for a broker that does not answer, or that is slow to
    make a topic, and logs it each time; a refusal raises ``TopicError``."""
    pause = FIRST_PAUSE
    while True:
        try:
            created = await create_and_verify(config, connections)
        except BrokerUnavailable as error:
            _log.warning("waiting for the broker: %s", error)
            await anyio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
        else:
            if created:
                _log.info("created topics: %s", ", ".join(created))
            return


async def create_and_verify(config: EventSourceConfig, connections: Connections) -> list[str]:
    """Create missing topics, verify the others, return the names of the created ones. Raises ``TopicError`` for
    differences, ``BrokerUnavailable``.

    When there is a changelog, the source topic may have more partitions than the settings: members go on with those
    that they know, and warn. Without a changelog it is refused, before anything is made: the partitions of keys are
    decided once, at the first start.
    """
    source, changelog, *others = specs(config)

    def is_missing(topics: Topics) -> bool:
        return missing(changelog.name) in topics.differences([changelog])

    is_new = await _with(connections.topics, connections, is_missing)
    wanted = [msgspec.structs.replace(source, may_have_more=not is_new), changelog, *others]

    def work(topics: Topics, wanted: Sequence[TopicSpec]) -> list[str]:
        absent = {missing(spec.name) for spec in wanted}
        if refused := [sentence for sentence in topics.differences(wanted) if sentence not in absent]:
            raise TopicError("; ".join(refused))
        created = topics.create(wanted, REQUEST_SECONDS)
        differences = topics.differences(wanted)
        unheard_of = {missing(spec.name) for spec in wanted}.intersection(differences)
        if unheard_of:  # they are there since a moment ago, but this broker does not know them yet
            raise BrokerUnavailable("; ".join(sorted(unheard_of)))
        if differences:
            raise TopicError("; ".join(differences))
        return created

    if not config.source_is_elsewhere:
        return await _with(connections.topics, connections, partial(work, wanted=wanted))
    created = await _with(connections.source_topics, connections, partial(work, wanted=wanted[:1]))
    return created + await _with(connections.topics, connections, partial(work, wanted=wanted[1:]))


async def delete(config: EventSourceConfig, connections: Connections) -> list[str]:
    """Delete the topics; returns their names. A source on another cluster belongs to others: it stays."""
    names = [spec.name for spec in specs(config)][1 if config.source_is_elsewhere else 0 :]

    def work(topics: Topics) -> list[str]:
        topics.delete(names, REQUEST_SECONDS)
        return names

    return await _with(connections.topics, connections, work)


async def _with(connect: Callable[[], Topics], connections: Connections, work: Callable[[Topics], T]) -> T:
    worker = connections.worker("kes-topics")

    def on_thread() -> T:
        topics = connect()
        try:
            return work(topics)
        finally:
            topics.close()

    try:
        return await worker.call(on_thread)
    finally:
        worker.abandon()
