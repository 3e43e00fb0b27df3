"""Topics as tasks must know them to make batches: partitions, and the largest batch. And the partitions of keys.

Partitions are those that Kafka's Java clients choose (``sak.murmur2``), for a whole column at once.
"""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

import numpy as np
from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka import admin as _admin

from streams.clients.translate import NO_ANSWER, NO_SUCH_TOPIC
from streams.errors import BrokerUnavailable
from streams.sak.murmur2 import murmur2
from streams.spark.kafka import ASK_SECONDS, GRACE_SECONDS, TIMEOUT_SECONDS, answers, client, no_such_topic, translated

Numbers = np.ndarray[Any, np.dtype[Any]]
_untyped: Any = _admin  # its stubs do not export all that it has

MOST_BATCH_BYTES: Final = 1_000_000
"""Of a batch before it is compressed, unless ``kafka.batch.size`` says otherwise; a topic may take less."""
_LONG_KEY: Final = 512
_AGAIN_SECONDS: Final = 0.2
_UNKNOWN_SECONDS: Final = 5.0
_SEED, _M = np.uint32(0x9747B28C), np.uint32(0x5BD1E995)


class TopicShape(NamedTuple):
    """``batch_bytes``: the largest batch that the topic takes (``max.message.bytes``); ``None``: not known."""

    partitions: int
    batch_bytes: int | None


class TopicShapes:
    """Requests the shapes of topics, once each. ``doing`` is for messages.

    The client is kept for the next tasks of this Python worker: connecting, on a secured cluster, takes far longer than
    the request.
    """

    _admins: dict[tuple[tuple[str, str], ...], Any] = {}  # noqa: RUF012

    def __init__(self, kafka: dict[str, str], doing: str) -> None:
        self._kafka = kafka
        self._doing = doing
        self._known: dict[str, TopicShape] = {}

    def __call__(self, topic: str) -> TopicShape:
        """Raises ``TopicError`` when there is no such topic, ``BrokerUnavailable``, ``ConfigError``."""
        found = self._known.get(topic)
        if found is None:
            found = self._known[topic] = self._requested(topic)
        return found

    def _requested(self, topic: str) -> TopicShape:
        kept = tuple(sorted(self._kafka.items()))
        begun = time.monotonic()
        while True:
            admin = self._admins.get(kept)
            if admin is None:  # not `or`: a client with nothing to do counts as false
                admin = self._admins[kept] = client(_untyped.AdminClient, self._kafka, {"reconnect.backoff.ms": 50})
            try:
                return self._shape(admin, topic)
            except KafkaException as error:
                code = error.args[0].code()
                waited = time.monotonic() - begun
                if code in NO_SUCH_TOPIC:
                    if waited > _UNKNOWN_SECONDS:  # a topic just made is not known everywhere
                        raise no_such_topic(topic, self._kafka) from error
                elif code in NO_ANSWER:
                    self._admins.pop(kept, None)  # one that lived through a restart of the broker may never answer
                else:
                    raise translated(error, f"{self._doing}: topic {topic!r}", self._kafka) from error
                if waited > TIMEOUT_SECONDS:
                    raise BrokerUnavailable(
                        f"{self._doing}: no answer from {self._kafka['bootstrap.servers']} to a task that asks for the "
                        f"partitions of {topic!r} ({error.args[0].name()}): do the executors reach the brokers?"
                    ) from error
            time.sleep(_AGAIN_SECONDS)

    def _shape(self, admin: Any, topic: str) -> TopicShape:
        described = admin.describe_topics(TopicCollection([topic]), request_timeout=ASK_SECONDS)
        resource = _untyped.ConfigResource(_untyped.ResourceType.TOPIC, topic)
        settings = admin.describe_configs([resource], request_timeout=ASK_SECONDS)
        layout = answers(described, ASK_SECONDS + GRACE_SECONDS)[topic]
        if isinstance(layout, KafkaException):
            raise layout
        found = answers(settings, ASK_SECONDS + GRACE_SECONDS)[resource]
        # Without the right to describe the topic's settings, the broker is the one that says that a batch is too large.
        most = None if isinstance(found, KafkaException) else int(found["max.message.bytes"].value)
        return TopicShape(len(layout.partitions), most)


def key_hashes(starts: Numbers, lengths: Numbers, data: Numbers) -> Numbers:
    """Hash keys by murmur2. ``starts`` and ``lengths`` (int64) say where each lies in ``data`` (uint8)."""
    hashes: Numbers = _SEED ^ lengths.astype(np.uint32)
    words = lengths >> 2
    # Four bytes anywhere as one number: a view of the bytes in which the words overlap.
    view: Numbers = np.ndarray(max(len(data) - 3, 0), "<u4", data, strides=(1,))
    left = np.flatnonzero((words > 0) & (lengths <= _LONG_KEY))
    number = 0
    while len(left):
        mixed = view[starts[left] + 4 * number] * _M
        mixed = (mixed ^ (mixed >> np.uint32(24))) * _M
        hashes[left] = (hashes[left] * _M) ^ mixed
        number += 1
        left = left[words[left] > number]
    rest = lengths & 3
    for byte in (2, 1, 0):
        left = np.flatnonzero(rest > byte)
        at = starts[left] + 4 * words[left] + byte
        hashes[left] ^= data[at].astype(np.uint32) << np.uint32(8 * byte)
    left = np.flatnonzero(rest)
    hashes[left] *= _M
    hashes = (hashes ^ (hashes >> np.uint32(13))) * _M
    hashes ^= hashes >> np.uint32(15)
    for row in np.flatnonzero(lengths > _LONG_KEY):  # few, and each would cost a pass for every four of its bytes
        hashes[row] = murmur2(data[starts[row] : starts[row] + lengths[row]].tobytes())
    return hashes


def partitions_of(hashes: Numbers, count: Numbers | int) -> Numbers:
    """Return the partitions that Java's default partitioner chooses by these hashes."""
    return (hashes & np.uint32(0x7FFFFFFF)).astype(np.int64) % count
