"""The topics of an event source: made when they are missing, verified when they are there, never changed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import anyio

from streams.config import EventSourceConfig
from streams.errors import BrokerUnavailable, TopicError
from streams.runtime.ports import Connections, Topics
from streams.topics import TopicSpec

_log = logging.getLogger(__name__)

REQUEST_SECONDS: Final = 10.0
FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 5.0


def specs(config: EventSourceConfig) -> list[TopicSpec]:
    """The topics as they must be: source, changelog, dead letters; equal numbers of partitions."""
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

    return [spec(config.topic), spec(config.changelog, cleanup_policy="compact"), spec(config.dead_letters)]


async def prepare(config: EventSourceConfig, connections: Connections) -> None:
    """Create or verify at the start. Waits for the broker as long as it takes, and says so."""
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
    """Names of the topics that were created. Raises ``TopicError`` for differences, ``BrokerUnavailable``."""

    def work(topics: Topics) -> list[str]:
        wanted = specs(config)
        created = topics.create(wanted, REQUEST_SECONDS)
        differences = topics.differences(wanted)
        if differences:
            raise TopicError("; ".join(differences))
        return created

    return await _with_topics(connections, work)


async def delete(config: EventSourceConfig, connections: Connections) -> list[str]:
    """Delete the topics; returns their names."""

    def work(topics: Topics) -> list[str]:
        names = [spec.name for spec in specs(config)]
        topics.delete(names, REQUEST_SECONDS)
        return names

    return await _with_topics(connections, work)


async def _with_topics(connections: Connections, work: Callable[[Topics], list[str]]) -> list[str]:
    worker = connections.worker("kes-topics")

    def on_thread() -> list[str]:
        topics = connections.topics()
        try:
            return work(topics)
        finally:
            topics.close()

    try:
        return await worker.call(on_thread)
    finally:
        worker.abandon()
