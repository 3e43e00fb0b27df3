"""The state of an event source as its folder on disk has it: read only, also beside a process that writes to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from streams.core.checkpoints import FORMAT, FolderMark, LogIdentity, reason_to_distrust
from streams.errors import StoreError
from streams.records import TYPE_HEADER, IncomingRecord, TopicPartition
from streams.runtime.changelog import OFFSET_KEY
from streams.runtime.keeping.folders.entries import Damaged
from streams.runtime.keeping.folders.parents import parent_of
from streams.runtime.keeping.folders.shelf import partitions_in, read_state
from streams.runtime.keeping.on_disk import layout_of
from streams.runtime.ownership.replicas import make_store
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource

Receive = Callable[[int, list[IncomingRecord]], None]


def partitions_on_disk(source: EventSource[Any], folder: str, wanted: list[int] | None) -> list[int]:
    """Return the partitions that a source has in the folder that its ``StateConfig`` names (or named), in order. Raises
    ``StoreError`` for those ``wanted`` that are not there."""
    parent = parent_of(folder, source.config.group_id, source.config.topic)
    try:
        found = partitions_in(parent)
    except FileNotFoundError:
        found = []
    except (Damaged, OSError) as error:
        raise StoreError(f"{parent}: {error}") from error
    if not found:
        raise StoreError(f"{parent}: no state of the group {source.config.group_id} is kept there")
    for number in set(wanted or ()) - set(found):
        raise StoreError(f"{parent} has the partitions {', '.join(map(str, found))}, not {number}")
    return sorted(set(wanted)) if wanted else found


def codec_of(source: EventSource[Any]) -> str:
    """Return the layout of a source's store, as marks name it."""
    store = make_store(source.program().store_factory, TopicPartition(source.config.topic, 0))
    store.revoked()
    return layout_of(store)


def reason_not_to_use(config: EventSourceConfig, number: int, codec: str, mark: FolderMark) -> str:
    """Return why a source would not use a folder with this mark, as far as that is known without a broker. Its age
    does not count: nothing is read on from it here."""
    known = mark.identity
    wanted = LogIdentity(known.cluster, config.changelog, known.topic_id, number, codec, FORMAT)
    return reason_to_distrust(mark, wanted, now_ms=mark.as_of_ms, tombstones_ms=1 << 62)


def read_partitions(source: EventSource[Any], folder: str, partitions: list[int], receive: Receive) -> None:
    """Give the state of these partitions to ``receive``, as the changelog would: entries, then the offset record. Their
    time is the mark's. Raises ``StoreError`` for a folder that is damaged, or of another log or codec."""
    config = source.config
    parent = parent_of(folder, config.group_id, config.topic)
    codec = codec_of(source)
    for number in partitions:
        distrust = partial(reason_not_to_use, config, number, codec)
        try:
            mark, changes = read_state(parent, number, distrust)
        except (Damaged, OSError) as error:
            raise StoreError(f"{parent / str(number)}: {error}") from error
        if reason := distrust(mark):
            raise StoreError(f"{parent / str(number)}: {reason}")
        end = IncomingRecord(config.changelog, number, mark.offset, OFFSET_KEY, mark.record, None, mark.as_of_ms)
        entry = msgspec.structs.replace
        records = [
            entry(end, key=change.key, value=change.value, headers=[(TYPE_HEADER, change.type.encode())])
            for change in changes
        ]
        receive(number, [*records, end])
