"""Topics as tasks must know them to make batches: partitions, and the largest batch. And the partitions of keys.

Partitions are those that Kafka's Java clients choose (``sak.murmur2``), for a whole column at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from streams.errors import TopicError
from streams.sak.murmur2 import murmur2
from streams.spark.kafka import TIMEOUT_SECONDS, identity_of, topic_admin
from streams.spark.options import KafkaSettings

Numbers = np.ndarray[Any, np.dtype[Any]]

MOST_BATCH_BYTES: Final = 1_000_000
"""Of a batch before it is compressed, unless ``kafka.batch.size`` says otherwise; a topic may take less."""
_LONG_KEY: Final = 512
_SEED, _M = np.uint32(0x9747B28C), np.uint32(0x5BD1E995)


class TopicShape(NamedTuple):
    """``batch_bytes``: the largest batch that the topic takes (``max.message.bytes``); ``None``: not known."""

    partitions: int
    batch_bytes: int | None


def topic_shapes(kafka: KafkaSettings) -> Callable[[str], TopicShape]:
    """Return a function that requests the shapes of topics, once each. It raises ``TopicError`` when there is no such
    topic, ``BrokerUnavailable``, ``ConfigError``."""
    return functools.cache(functools.partial(_shape, kafka))


def _shape(kafka: KafkaSettings, topic: str) -> TopicShape:
    _, partitions = identity_of(topic, kafka)
    try:
        described = topic_admin(kafka).describe([topic], TIMEOUT_SECONDS)[topic]
        most = None if described is None else int(described.configs["max.message.bytes"])
    except TopicError:  # without the right to see the topic's settings: the broker says when a batch is too large
        most = None
    return TopicShape(partitions, most)


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
