"""Names and settings of the topics that belong to an event source.

Internal topics are named ``<group>.<source topic>.<purpose>``: one group reads one source, and an operator sees at once
which group a topic belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from streams.errors import TopicError
from streams.outcomes import ErrorPolicy
from streams.records import IncomingRecord, TypedRecord

MAX_NAME_LENGTH: Final = 249
"""Kafka's limit for topic names (``Topic.MAX_NAME_LENGTH``)."""


class TopicSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as it must be. ``configs`` holds only the settings that matter to correctness; others are the
    operator's."""

    name: str
    partitions: int
    replication_factor: int
    configs: dict[str, str] = {}
    may_have_more: bool = False
    """More partitions than these are no difference."""
    may_delete: bool = False
    """A cleanup.policy of ``compact,delete`` is no difference from ``compact``."""

    def further_policies(self, setting: str) -> set[str]:
        """Return what a list in this setting may have besides."""
        return {"delete"} if self.may_delete and setting == "cleanup.policy" else set()


class TypesRecords(Protocol):
    """The rule that gives the records of an input their types (``formats.TypeRule``), as inputs need it. ``names``: the
    types that it can give, as far as they are known; ``on_null`` and ``on_missing``: its policies, if it has any."""

    @property
    def title(self) -> str: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def on_null(self) -> ErrorPolicy | None: ...
    @property
    def on_missing(self) -> ErrorPolicy | None: ...
    def received(self, records: list[IncomingRecord]) -> list[IncomingRecord]: ...


class InputSpec(msgspec.Struct, frozen=True):
    """A topic that an event source reads. ``types``: the rule that gives its records their types; ``None``: their own
    headers do. ``nulls``: the policy of records without a value, ``on_error`` of all that cannot
    be read; ``None``: the decode policy. ``table``: the joined table whose rows the records are
    (``stores.joined.Joined``). ``is_own``: the source's own, its loop or the requests for visits: its records come
    first, and it is read from its start. ``is_awaited``: while its end is not known the others wait for it."""

    topic: str
    types: TypesRecords | None = None
    nulls: ErrorPolicy | None = None
    on_error: ErrorPolicy | None = None
    table: Any = None
    is_own: bool = False
    is_awaited: bool = True

    @property
    def moves_time(self) -> bool:
        """Check whether its records move their partition's time (``Stores``), as those of the source's own topic do.

        The one rule: time is that of events that come to this partition in its own order. Rows of a joined table are
        read first, whatever their time. Records of the loop come first, too, and from partitions that may be ahead of
        this one. What has no record of an input (timers, interjections, visited keys) has no such time at all.
        """
        return not self.is_own and self.table is None

    @property
    def queues(self) -> bool:
        """Check whether its records wait in the queues of parked keys. Requests for visits are of no event's key."""
        return self.is_awaited or not self.is_own

    def received(self, records: list[IncomingRecord]) -> list[IncomingRecord]:
        """Return records as their handlers are found: with the types that the rule gives them."""
        return records if self.types is None else self.types.received(records)

    def policy(self, record: IncomingRecord) -> ErrorPolicy | None:
        """Return the policy of a record that cannot be read, if the input has one."""
        types, found = self.types, None
        if record.value is None:
            found = self.nulls if self.nulls is not None or types is None else types.on_null
        elif types is not None and isinstance(record, TypedRecord) and record.reason and not record.is_refused:
            found = types.on_missing
        return self.on_error if found is None else found


def specs_of(topic: str, types: TypesRecords | None, further: Iterable[InputSpec]) -> dict[str, InputSpec]:
    """Return the further inputs by their topics, with the source's own one if it has a rule of types."""
    own = {} if types is None else {topic: InputSpec(topic, types)}
    return own | {spec.topic: spec for spec in further}


class SentTo(NamedTuple):
    """The topics that records may be sent to. ``declared``: the only ones; ``None``: any. ``unwritable``: topics whose
    records would not be read as what they are, and why."""

    declared: frozenset[str] | None
    unwritable: Mapping[str, str] = {}

    def refusal(self, topic: str) -> str:
        """Return why no record is sent to a topic; ``""``: it may be."""
        if topic in self.unwritable:
            return self.unwritable[topic]
        if self.declared is None or topic in self.declared:
            return ""
        return (
            f"the topic {topic!r} is not declared, and the event source declares its outputs: add "
            f"source.output({topic!r}) or correct the name"
        )


class TopicIdentity(NamedTuple):
    """A topic as the cluster knows it now. ``topic_id``: as Kafka's tools print it, another one after the topic was
    deleted and created again. ``cluster``: the cluster's id."""

    topic_id: str
    partitions: int
    cluster: str = ""


def missing(name: str) -> str:
    """Return the message for a topic that does not exist."""
    return f"topic {name} does not exist"


def unread(name: str, known: int, partitions: int) -> str:
    """Return the message for a source topic that has more partitions than the settings of its event source."""
    return (
        f"topic {name} has {partitions} partitions, settings say {known}: no member reads the records in the partitions"
        f" {known} to {partitions - 1}. Stop all members, run `kes topics grow MODULE:SOURCE`, set "
        f"num_partitions={partitions}, and start again; keys move to partitions that do not have their state"
    )


def changelog_name(group_id: str, topic: str) -> str:
    """Return the name of the compacted topic of a source's state changes and input offsets."""
    return f"{group_id}.{topic}.changelog"


def is_changelog(group_id: str, name: str) -> bool:
    """Check whether a topic may be the changelog of a source of this group, by its name."""
    return name.startswith(f"{group_id}.") and name.endswith(".changelog")


def commit_log_name(group_id: str, topic: str) -> str:
    """Return the name of the topic that stands in for a source topic on another cluster: the group's offsets are
    committed under its name, in the transaction that they belong to. Nothing is ever written to it."""
    return f"{group_id}.{topic}.commit-log"


def loop_name(group_id: str, topic: str) -> str:
    """Return the name of the topic of what the handlers of a source send to the source itself."""
    return f"{group_id}.{topic}.loop"


def visits_name(group_id: str, topic: str) -> str:
    """Return the name of the topic of requests for visits to the keys of a source's store."""
    return f"{group_id}.{topic}.visits"


def dead_letter_name(group_id: str, topic: str) -> str:
    """Return the name of the topic of the records that the error policy gave up on."""
    return f"{group_id}.{topic}.dead-letters"


def askable(names: Iterable[str]) -> list[str]:
    """Return these names of topics, each once. Raises ``TopicError`` for one that would crash the client."""
    for name in names:
        if not name or any("\ud800" <= char <= "\udfff" for char in name):  # bytes of an argument that are no UTF-8
            raise TopicError(f"{name!r} is no name of a topic: it is empty, or no UTF-8")
    return list(dict.fromkeys(names))
