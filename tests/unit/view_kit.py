"""Views over a topic in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from streams import View, ViewChange
from streams.codecs import int_codec
from streams.views import topic_reader
from tests.unit.global_log_kit import MemoryConnections, MemoryTopic, memory_topic

number = int_codec.encode


def viewed_topic(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryTopic]:
    """A topic that views are made over, for a fixture."""
    topics = memory_topic()
    topic = next(topics)
    monkeypatch.setattr(topic_reader, "LogConnections", lambda *_: MemoryConnections(topic))
    yield topic
    yield from topics


def view_of(topic: MemoryTopic, ordered: bool = True, **settings: Any) -> View[str, int]:
    settings = {"bootstrap_servers": MemoryConnections.addresses, **settings}
    return View(topic.name, key=str, value=int, ordered=ordered, **settings)


def changed(key: str, old: int | None, new: int | None, partition: int = 0) -> ViewChange[str, int]:
    return ViewChange(key, old, new, partition)
