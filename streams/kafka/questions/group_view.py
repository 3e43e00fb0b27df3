"""A consumer group as its coordinator describes it: its members, their last reports and assignments.

Reports and assignments of our members travel as user data (``group_bytes``), which a broker shows as long as the group
is stable. Of other members, and of groups of the broker's own protocol (KIP-848), Kafka's own part is read: topics and
partitions.

Threads: ``GroupQuestions`` blocks, and may be used by any thread but the client's.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from streams.kafka import permissions
from streams.kafka.questions.groups import (
    BrokerSideGroup,
    BrokerSideMember,
    ClassicGroup,
    ClassicMember,
    describe_group,
)
from streams.kafka.questions.requests import committed
from streams.kafka.wire import group_bytes
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codec import MalformedAnswer, decode_versioned
from streams.kafka.wire.codes import BrokerRefusal, Code
from streams.kafka.wire.schemas.consumer_protocol import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from streams.kafka.wire.security import Security
from streams.model.group import Assignment, MemberReport
from streams.model.topics import is_changelog

CLASSIC: Final = "classic"
BROKER: Final = "consumer"
NONE: Final = "none"
"""Kinds of groups. ``none``: there is no such group."""

_OURS: Final = "kes-"  # how the names of our protocols begin
_ANY_PARTITION: Final = 2**31  # above all numbers: how many partitions the topic has is not known here
_YEARS: Final = 20 * 365 * 86_400
"""Seconds in 20 years: a time of start before that, or a day ahead, is no time."""

TopicPartitions = dict[str, frozenset[int]]
"""Topic -> partitions."""
Offsets = dict[str, dict[int, int]]
"""Topic -> partition -> offset."""


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    """One member. ``instance``: its stable name, or its client id. ``static``: the group knows it by that name.
    ``topics``: those it reads. ``owned``: its partitions by Kafka's own part of the assignment; ``target``: those it
    shall have in the end (KIP-848 groups only). ``report`` and ``assignment``: sent in its last JoinGroup and in the
    answer to it, if it is one of ours and the group is stable. ``since``: when it was started, by its own clock
    (seconds since the epoch). ``problem``: why report and assignment are not shown."""

    member_id: str
    instance: str
    static: bool = False
    client_id: str = ""
    host: str = ""
    topics: tuple[str, ...] = ()
    owned: TopicPartitions = {}
    target: TopicPartitions | None = None
    report: MemberReport | None = None
    assignment: Assignment | None = None
    since: float | None = None
    problem: str = ""


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """A group at one moment. ``state`` as Kafka names it (``Stable``, ``PreparingRebalance``, ``Empty`` ...).
    ``protocol``: the strategy that the members share. ``epoch``: of a KIP-848 group, else -1.
    ``committed``: the group's offsets by topic and partition; what a transaction has not committed yet is not in
    them."""

    group: str
    kind: str
    state: str = ""
    protocol: str = ""
    epoch: int = -1
    members: tuple[MemberView, ...] = ()
    committed: Offsets = {}

    @property
    def settled(self) -> bool:
        """Check whether reports and assignments are shown: no rebalance is under way."""
        return self.kind == BROKER or self.state not in ("PreparingRebalance", "CompletingRebalance")


class GroupQuestions:
    """Requests about the groups of one cluster. Making one starts a thread, and does no I/O. Raises ``ConfigError`` for
    addresses that are none."""

    def __init__(self, bootstrap_servers: str, security: Security) -> None:
        self._client = WireClient(bootstrap_servers, "kes-cli", security)
        self._client.start()

    def describe_group(self, group: str, timeout_seconds: float) -> GroupView:
        """The group as it is now. ``BrokerUnavailable``; ``ConfigError`` without the right to describe it."""
        deadline = time.monotonic() + timeout_seconds
        needed = [permissions.on_group("Describe", group)]
        step = f"asking for group {group}"
        return self._client.ask(step, deadline, lambda: self._describe(group, deadline), needed=needed)

    def close(self) -> None:
        """End the thread and the connections; blocks for a moment."""
        self._client.close()

    # ------------------------------------------------------------------ the client's loop

    async def _describe(self, group: str, deadline: float) -> GroupView:
        classic, broker_side = await describe_group(self._client, group, deadline)
        offsets = await self._committed(group, deadline)
        if classic is not None:
            return classic_view(group, classic, offsets)
        if broker_side is not None:
            return broker_view(group, broker_side, offsets)
        return GroupView(group=group, kind=NONE, committed=offsets)

    async def _committed(self, group: str, deadline: float) -> Offsets:
        try:
            answer = await committed(self._client, group, deadline)
        except BrokerRefusal as refusal:
            if refusal.code != Code.GROUP_ID_NOT_FOUND:
                raise
            return {}
        found = {}
        for topic in answer.topics:
            least = 1 if is_changelog(group, topic.name) else 0  # 0: a note, and no position (``ownership.blocked``)
            found[topic.name] = {
                entry.partition_index: entry.committed_offset
                for entry in topic.partitions
                if entry.error_code == 0 and entry.committed_offset >= least
            }
        return {name: offsets for name, offsets in found.items() if offsets}


def classic_view(group: str, found: ClassicGroup, committed: Offsets | None = None) -> GroupView:
    """Read a DescribeGroups answer. Nothing in it is trusted."""
    members = [_classic_member(entry, found.protocol_type, found.protocol_data) for entry in found.members]
    return GroupView(
        group=group,
        kind=CLASSIC,
        state=found.group_state,
        protocol=found.protocol_data,
        members=tuple(sorted(members, key=_by_name)),
        committed=committed or {},
    )


def broker_view(group: str, found: BrokerSideGroup, committed: Offsets | None = None) -> GroupView:
    """Read a ConsumerGroupDescribe answer."""
    members = [
        msgspec.structs.replace(
            _plain_member(entry, entry.instance_id),
            topics=tuple(sorted(entry.subscribed_topic_names or ())),
            owned=_described_partitions(entry.assignment),
            target=_described_partitions(entry.target_assignment),
        )
        for entry in found.members
    ]
    return GroupView(
        group=group,
        kind=BROKER,
        state=found.group_state,
        protocol=found.assignor_name,
        epoch=found.group_epoch,
        members=tuple(sorted(members, key=_by_name)),
        committed=committed or {},
    )


def _plain_member(entry: ClassicMember | BrokerSideMember, static_name: str | None) -> MemberView:
    """Read the fields that descriptions of both kinds of groups have."""
    return MemberView(
        member_id=entry.member_id,
        instance=static_name or entry.client_id,
        static=static_name is not None,
        client_id=entry.client_id,
        host=entry.client_host.lstrip("/"),
    )


def _classic_member(entry: ClassicMember, protocol_type: str, protocol: str) -> MemberView:
    member = _plain_member(entry, entry.group_instance_id)
    metadata, answered = entry.member_metadata, entry.member_assignment
    if not metadata and not answered:
        return member  # a rebalance is under way
    if protocol_type != "consumer":
        return msgspec.structs.replace(member, problem=f"it is no consumer (protocol type {protocol_type!r})")
    changes: dict[str, Any] = {}
    try:
        changes["topics"] = tuple(sorted(_subscribed(metadata))) if metadata else ()
        changes["owned"] = _assigned_partitions(answered) if answered else {}
    except MalformedAnswer as error:
        return msgspec.structs.replace(member, problem=f"it speaks another protocol ({type(error).__name__})")
    member = msgspec.structs.replace(member, **changes)
    return _with_user_data(member, metadata, answered) if protocol.startswith(_OURS) else member


def _with_user_data(member: MemberView, metadata: bytes, answered: bytes) -> MemberView:
    """Add report and assignment to the member, if it is one of ours."""
    if len(member.topics) != 1:
        return msgspec.structs.replace(member, problem=f"it reads {len(member.topics)} topics")
    report, wrong = group_bytes.decode_report(member.topics[0], member.member_id, metadata)
    if wrong is not None:
        return msgspec.structs.replace(member, problem=wrong)
    try:
        assignment = group_bytes.decode_assignment(answered, _ANY_PARTITION, member.member_id) if answered else None
    except ValueError as error:
        return msgspec.structs.replace(member, instance=report.instance, report=report, problem=str(error))
    return msgspec.structs.replace(
        member, instance=report.instance, report=report, assignment=assignment, since=_started(report)
    )


def _started(report: MemberReport) -> float | None:
    """Reports are counted from the microsecond in which the member began."""
    began = report.sequence / 1e6
    return began if time.time() - _YEARS < began < time.time() + 86_400 else None


def _subscribed(metadata: bytes) -> list[str]:
    return decode_versioned(ConsumerProtocolSubscription, metadata, group_bytes.PROTOCOL_VERSION).topics


def _assigned_partitions(answered: bytes) -> TopicPartitions:
    found: TopicPartitions = {}
    message = decode_versioned(ConsumerProtocolAssignment, answered, group_bytes.PROTOCOL_VERSION)
    for entry in message.assigned_partitions:
        found[entry.topic] = found.get(entry.topic, frozenset()) | frozenset(entry.partitions)
    return found


def _described_partitions(assignment: BrokerSideMember.Assignment) -> TopicPartitions:
    return {entry.topic_name: frozenset(entry.partitions) for entry in assignment.topic_partitions if entry.partitions}


def _by_name(member: MemberView) -> tuple[str, str]:
    return member.instance, member.member_id
