"""Positions of a streaming read as JSON: what Spark writes into its checkpoint, and shows in a query's progress.

    {"version": 1, "topics": {"flights": {"id": "q8L...", "offsets": {"0": 1201, "1": 1187}}}}

An offset is the next one to read. ``id`` is the topic's own, given by the broker when it was created. Topics and
partitions are sorted, so that equal positions are equal texts, which is how Spark compares them.
"""

from __future__ import annotations

from typing import Any, Final

from streams.errors import OffsetError
from streams.records import TopicPartition
from streams.spark.planning import Positions

VERSION: Final = 1


def to_json(positions: Positions) -> dict[str, Any]:
    """The positions as Spark keeps them."""
    topics: dict[str, Any] = {
        topic: {"id": positions.ids.get(topic, ""), "offsets": {}}
        for topic in sorted({place.topic for place in positions.at} | set(positions.ids))
    }
    for place, offset in sorted(positions.at.items()):
        topics[place.topic]["offsets"][str(place.partition)] = offset
    return {"version": VERSION, "topics": topics}


def from_json(raw: Any) -> Positions:
    """What ``to_json`` has written, or what Spark's own Kafka connector has: ``{"flights": {"0": 1201}}``.

    Raises ``OffsetError`` for anything else.
    """
    ids: dict[str, str] = {}
    at: dict[TopicPartition, int] = {}
    try:
        if isinstance(raw.get("version"), int):
            if raw["version"] != VERSION:
                raise OffsetError(
                    f"the checkpoint holds positions of version {raw['version']}, this package reads {VERSION}: "
                    "use the package that wrote it, or a newer one"
                )
            offsets = {topic: entry["offsets"] for topic, entry in raw["topics"].items()}
            ids = {topic: str(entry["id"]) for topic, entry in raw["topics"].items() if entry["id"]}
        else:
            offsets = raw
        for topic, partitions in offsets.items():
            for partition, offset in partitions.items():
                at[TopicPartition(str(topic), int(partition))] = int(offset)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise OffsetError(f"the checkpoint's positions are not those of a Kafka source: {str(raw)[:200]}") from None
    return Positions(ids, at)
