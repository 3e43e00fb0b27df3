"""Board on which members publish their state for tools: committed offsets of a group without members.

Each instance has a group of its own, ``<group>.<instance>.status``. Its committed offset of a changelog partition is
how far that instance has read it, so the usual tools show the lag of a restore; the rest travels as the commit's
metadata (4096 bytes at most with a broker's defaults). It costs one small request whenever there is something new.
No guarantee depends on it: a stale note has the time of its writing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from streams.kafka import permissions
from streams.kafka.questions.requests import commit, committed
from streams.kafka.wire import group_bytes
from streams.kafka.wire.client import GROUP, WireClient
from streams.kafka.wire.codes import entries_of
from streams.kafka.wire.messages import WirePartition as WirePartition
from streams.kafka.wire.schemas.delete_groups import DeleteGroupsRequest
from streams.kafka.wire.security import Security

_DELETE: Final = 2
_CLOSE_SECONDS = 1.0
"""Seconds for the end of the thread and its connections."""
LONGEST = 4000
"""Characters of a note, at most. A broker takes 4096 bytes by default (``offset.metadata.max.bytes``)."""


class Note(NamedTuple):
    """Note about one partition: an offset, and a text."""

    offset: int
    text: str


def status_group(group_id: str, instance: str) -> str:
    """The name of the group that carries an instance's notes."""
    return f"{group_id}.{group_bytes.checked_name('instance', instance, dots=False)}.status"


class StatusBoard:
    """Notes of the instances of one group.

    Methods block, may be called from any thread, and raise ``BrokerUnavailable`` after their timeout, ``ConfigError``
    without the rights (read on groups that begin with the group's name).
    """

    def __init__(self, bootstrap_servers: str, client_id: str, security: Security, group_id: str) -> None:
        self._client = WireClient(bootstrap_servers, client_id, security)
        self._group_id = group_id
        self._client.start()

    def publish(self, instance: str, notes: Mapping[WirePartition, tuple[int, str]], timeout_seconds: float) -> None:
        """Write these notes; those about other partitions stay."""
        deadline = time.monotonic() + timeout_seconds
        group = status_group(self._group_id, instance)
        cut = {where: (max(offset, 0), text[:LONGEST]) for where, (offset, text) in notes.items()}
        needed = [permissions.on_group("Read", group), *(permissions.on_topic("Read", topic) for topic, _ in notes)]
        write = functools.partial(commit, self._client, group, cut, deadline)
        self._client.ask(f"writing the status of {instance}", deadline, write, needed=needed)

    def read(
        self, instances: Collection[str], timeout_seconds: float, topic: str = ""
    ) -> dict[str, dict[WirePartition, Note]]:
        """The notes by instance; nothing of those that never wrote any. ``topic``: one that has notes of each instance;
        without the right to describe it ``ConfigError``, because a broker hides its notes then."""
        deadline = time.monotonic() + timeout_seconds

        async def one(instance: str) -> dict[WirePartition, Note]:
            group = status_group(self._group_id, instance)
            found = await committed(self._client, group, deadline)
            if topic and not found.topics:
                # A broker leaves out topics that may not be described. For one that is requested by name it answers an
                # error.
                list(entries_of((await committed(self._client, group, deadline, {topic: [0]})).topics))
            return {
                (topic.name, entry.partition_index): Note(entry.committed_offset, entry.metadata or "")
                for topic in found.topics
                for entry in topic.partitions
                if entry.error_code == 0 and entry.committed_offset >= 0
            }

        async def work() -> dict[str, dict[WirePartition, Note]]:
            await self._client.connected(deadline)
            found = {}
            for instance in instances:
                step = f"reading the status of {instance}"
                needed = [
                    permissions.on_group("Describe", status_group(self._group_id, instance)),
                    permissions.on_topic("Describe", topic),
                ]
                notes = await self._client.until(deadline, step, functools.partial(one, instance), needed)
                if notes:
                    found[instance] = notes
            return found

        return self._client.call(work, deadline)

    def remove(self, instance: str, timeout_seconds: float) -> None:
        """Take all notes of an instance away. Harmless if there are none."""
        deadline = time.monotonic() + timeout_seconds
        group = status_group(self._group_id, instance)

        async def attempt() -> None:
            node = await self._client.coordinator(GROUP, group, deadline)
            await self._client.send(DeleteGroupsRequest(groups_names=[group]), node, deadline, most=_DELETE)

        needed = [permissions.on_group("Describe", group)]
        self._client.ask(f"removing the status of {instance}", deadline, attempt, needed=needed)

    def close(self) -> None:
        """End the thread and the connection; blocks for a moment."""
        self._client.close(_CLOSE_SECONDS)
