"""Requests for visits: one record for each partition, in a topic of the source's own.

So a request survives everything that state survives, and reaches a partition that is between two owners. Each partition
takes a run once, whatever comes how often: a request that has failed halfway is made again with the same run.
"""

from __future__ import annotations

import time
from typing import Final

from streams.core.visits import VisitRequest, encode_request, request_headers
from streams.errors import BrokerUnavailable, StreamsError, TopicError
from streams.records import Acknowledgement, Record
from streams.runtime.ports import Connections, PlainProducer
from streams.settings.config import EventSourceConfig

REQUEST_SECONDS: Final = 10.0
"""One request about the topic takes so many seconds, at most."""
DELIVERY_SECONDS: Final = 30.0
"""A record is delivered within so many seconds, or has failed."""
_POLL_SECONDS: Final = 0.1
"""One wait for acknowledgements takes so many seconds, at most."""


async def send_request(config: EventSourceConfig, connections: Connections, request: VisitRequest) -> None:
    """Send a request to all partitions; returns when all in-sync replicas have it. Raises ``TopicError``,
    ``BrokerUnavailable``; some partitions may have it then."""
    worker = connections.worker("kes-visit")
    try:
        await worker.call(_send, config, connections, request)
    finally:
        worker.abandon()


def _send(config: EventSourceConfig, connections: Connections, request: VisitRequest) -> None:
    topics, name, wanted = connections.topics(), config.visits_topic, config.num_partitions
    try:
        found = topics.identity(name, REQUEST_SECONDS)  # of its settings nothing: that would take one more right
    finally:
        topics.close()
    if found is None:
        raise TopicError(
            f"topic {name} does not exist: the first member that starts with visits=True makes it, and so does kes "
            "topics apply"
        )
    if found[1] != wanted:
        raise TopicError(
            f"topic {name} has {found[1]} partitions, and num_partitions is {wanted} here: make the request with the "
            "settings of the members, or a run would not be in all partitions"
        )
    producer = connections.plain_producer("", {}, DELIVERY_SECONDS)
    try:
        failures = [report.error for report in _sent(producer, config, request) if report.error is not None]
    finally:
        producer.close()
    if failures:
        if isinstance(failures[0], StreamsError):
            failures[0].add_note("make the request again with the same run id: a partition takes it once")
        raise failures[0]


def _sent(producer: PlainProducer, config: EventSourceConfig, request: VisitRequest) -> list[Acknowledgement]:
    value, headers = encode_request(request), request_headers()  # no key: it is in every partition
    reports: list[Acknowledgement] = []
    for partition in range(config.num_partitions):
        record = Record(config.visits_topic, value, None, headers, partition)
        # The producer's queue is full: acknowledgements make room.
        while not producer.produce(record, partition):
            reports += producer.poll(_POLL_SECONDS)
    # Each record has a deadline of its own. This one is for a producer that stands still.
    deadline = time.monotonic() + 2 * DELIVERY_SECONDS
    while len(reports) < config.num_partitions:
        if producer.is_broken or time.monotonic() > deadline:
            raise BrokerUnavailable(
                f"{config.visits_topic}: {len(reports)} of {config.num_partitions} partitions have it"
            )
        reports += producer.poll(_POLL_SECONDS)
    return reports
