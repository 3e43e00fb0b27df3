"""Check that a group stands still and has no past, before a tool writes what only the group's members write."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Self

from streams.errors import OffsetError, Stopped, TopicError
from streams.kafka import permissions
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.questions.group_view import GroupQuestions, GroupView, MemberView
from streams.kafka.questions.raw_log import RawLogs
from streams.kafka.questions.requests import commit, forget
from streams.kafka.questions.takeover import SourceLog, WireTakeOver
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import BrokerRefusal, Code
from streams.kafka.wire.security import Security
from streams.kafka.writing.blocking import BlockingSlot
from streams.kafka.writing.plain_producer import PlainProducer
from streams.model.topics import TopicSpec
from streams.records import IncomingRecord, Record
from streams.settings.config import EventSourceConfig

_SECONDS: Final = 30.0
"""Seconds for one question, unless the caller sets another time."""
_POLL_SECONDS: Final = 0.1
"""Seconds of one wait for delivery reports."""
_MOST_NAMED: Final = 5
_AT_REST: Final = ("Empty", "Dead", "")  # the last one: there is no such group


class GroupChecks:
    """Questions about one event source's group and logs. Blocks; one thread. ``with GroupChecks(config) as checks``."""

    def __init__(self, config: EventSourceConfig, *, seconds: float = _SECONDS) -> None:
        self._config, self._seconds = config, seconds
        security = Security.of(config.client_settings)
        self._settings = ClientSettings(config.bootstrap_servers, config.client_settings, client_id="kes-checks")
        self._client = WireClient(config.bootstrap_servers, "kes-checks", security)
        self._client.start()
        self._questions = GroupQuestions(config.bootstrap_servers, security)
        self._group_log = WireTakeOver(self._client, config.group_id, config.offsets_topic, changelog=config.changelog)
        self._elsewhere = _elsewhere(config)

    def _deadline(self) -> float:
        return time.monotonic() + self._seconds

    @property
    def _source_log(self) -> WireTakeOver:
        return self._elsewhere or self._group_log

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._elsewhere is not None:
            self._elsewhere.close()
        self._questions.close()
        self._client.close()

    def source(self, topic: str = "") -> tuple[dict[int, tuple[int, int]], str]:
        """(log start, high watermark) of each partition of the source topic, or of another input, and the topic's id.
        Raises ``TopicError``."""
        numbers, deadline = range(self._config.num_partitions), self._deadline()
        return self._source_log.log_range(topic or self._config.topic, numbers, deadline), self.source_id(topic)

    def source_id(self, topic: str = "") -> str:
        """The id of the source topic, or of another input."""
        return self._source_log.identity(topic or self._config.topic, self._deadline()).topic_id

    def changelog_id(self) -> str:
        """The id of the changelog."""
        return self._group_log.identity(self._config.changelog, self._deadline()).topic_id

    def create(self, specs: list[TopicSpec]) -> None:
        """Create topics that are missing; ``TopicError`` for those that are not as they must be."""
        with contextlib.closing(TopicAdmin(self._settings)) as admin:
            admin.create(specs)
            differences = admin.differences(specs)
        if differences:
            raise TopicError("; ".join(differences))

    def refuse_if_alive(self) -> GroupView:
        """Return the group. Raises ``OffsetError`` when it has members. What departed members left open is ended, so
        that it cannot be committed any more."""
        # Before the fence, which would abort what living members have under way.
        group = self.resting(self._config.group_id)
        # A frozen member that has sent its offsets could still commit them when it goes on.
        self._group_log.fence_departed((), self._deadline())
        return group

    def described(self, group_id: str) -> GroupView:
        """Return a group as it is now."""
        return self._questions.describe_group(group_id, self._seconds)

    def resting(self, group_id: str) -> GroupView:
        """Return a group as it is now. Raises ``OffsetError`` when it has members, and names them."""
        group = self.described(group_id)
        if group.state not in _AT_REST or group.members:
            raise _is_alive(group_id, named(group.members) or group.state)
        return group

    def remove_static(self, group_id: str, names: Collection[str]) -> None:
        """Take static members out of a group, by their names: those that were stopped would stay for the rest of their
        session. Names that it does not have are passed over."""
        for member in self.described(group_id).members:
            if member.static and member.instance in names:
                asked = WireTakeOver(self._client, group_id, "")
                asked.remove_member(member.member_id, member.instance, self._deadline())

    def refuse_unless_at_rest(self) -> None:
        """Raises ``OffsetError`` when the group has members, or committed offsets. What departed members left open is
        ended first."""
        self.refuse_if_alive()
        # The barrier: what a missed fence left open must not be committed after we have looked.
        self._refuse_position(self.committed(list(range(self._config.num_partitions))))

    def hold(self, slot: BlockingSlot, offsets: Mapping[int, int], topic: str = "") -> None:
        """Send offsets of the group (in an input, by default the source's own topic) into a transaction, then check
        that no member is alive. Raises ``OffsetError``, ``TransactionFailed``."""
        slot.send_offsets(topic or self._config.offsets_topic, offsets)
        # Not before: a member that joins from now on finds the pending offsets, and waits for the end of the
        # transaction before it takes over one of these partitions. One that joined earlier is found here.
        self.refuse_if_alive()

    def hold_of(self, slot: BlockingSlot, group_id: str, offsets: Mapping[int, int], topic: str) -> None:
        """Send offsets of another group into a transaction: they are pending until its end. Raises
        ``TransactionFailed``."""
        slot.send_offsets(topic, offsets, group_id)

    def refuse_if_begun(self) -> None:
        """Refuse as ``refuse_unless_at_rest`` does, from within a transaction that has sent offsets for the group."""
        self.refuse_if_alive()
        # What is committed, without the barrier: our own offsets are pending, and it would wait for them.
        group = self._questions.describe_group(self._config.group_id, self._seconds)
        self._refuse_position(group.committed.get(self._config.offsets_topic, {}))

    def _refuse_position(self, offsets: Mapping[int, int | None]) -> None:
        config = self._config
        if committed := {number: offset for number, offset in offsets.items() if offset is not None}:
            number, offset = min(committed.items())
            raise OffsetError(
                f"group {config.group_id} has a position already ({config.topic}[{number}] at offset {offset}): "
                "delete the group's offsets and the changelog to start over, or use another group_id"
            )

    def committed(self, partitions: list[int], topic: str = "") -> dict[int, int | None]:
        """The group's committed offsets in the source topic, or in another input; ``None``: none."""
        return self._group_log.stable_offsets(partitions, self._deadline(), topic)

    def committed_by(self, group_id: str, topic: str) -> dict[int, int | None]:
        """Another group's committed offsets in an input; ``None``: none. It waits for those that are pending."""
        asked = WireTakeOver(self._client, group_id, topic)
        return asked.stable_offsets(range(self._config.num_partitions), self._deadline())

    def set_offsets(self, offsets: Mapping[int, int], topic: str = "") -> None:
        """Commit these offsets for the group, in the source topic or in another input. Raises ``OffsetError`` when a
        member has joined it meanwhile."""
        config, deadline, topic = self._config, self._deadline(), topic or self._config.offsets_topic
        place = {(topic, number): (offset, "") for number, offset in offsets.items()}

        async def attempt() -> None:
            try:
                await commit(self._client, config.group_id, place, deadline)
            except BrokerRefusal as refusal:
                if refusal.code != Code.UNKNOWN_MEMBER_ID:  # commits from outside are for empty groups
                    raise
                raise _is_alive(config.group_id, "a member has joined") from refusal

        if offsets:
            needed = permissions.on_group("Read", config.group_id), permissions.on_topic("Read", topic)
            self._client.ask(f"setting the offsets of group {config.group_id}", deadline, attempt, needed=needed)

    def forget_offsets(self, topic: str) -> None:
        """Delete the group's offsets in an input that it does not read any more, if there are any. Raises
        ``OffsetError`` when a member has joined it meanwhile."""
        config, deadline = self._config, self._deadline()

        async def attempt() -> None:
            try:
                await forget(self._client, config.group_id, topic, range(config.num_partitions), deadline)
            except BrokerRefusal as refusal:
                if refusal.code in (Code.NON_EMPTY_GROUP, Code.GROUP_SUBSCRIBED_TO_TOPIC):
                    raise _is_alive(config.group_id, "a member has joined") from refusal
                if refusal.code not in (Code.GROUP_ID_NOT_FOUND, Code.UNKNOWN_TOPIC_OR_PARTITION):
                    raise  # else there are none: they go with their topic

        needed = permissions.on_group("Delete", config.group_id), permissions.on_topic("Read", topic)
        self._client.ask(
            f"deleting the offsets of group {config.group_id} in {topic}", deadline, attempt, needed=needed
        )

    def last_records(self, topic: str, partitions: list[int], key: bytes) -> dict[int, IncomingRecord]:
        """The last committed record with this key in each partition; those without one are left out."""
        return self.last_within(topic, self._group_log.log_range(topic, partitions, self._deadline()), key)

    def last_within(self, topic: str, ranges: Mapping[int, tuple[int, int]], key: bytes) -> dict[int, IncomingRecord]:
        """The same within these ranges: the first offset of each, and the one behind its last."""
        with contextlib.closing(PartitionReader(self._settings)) as reader:
            return reader.last_with_key(topic, ranges, key, stalled_after_seconds=self._seconds)

    def write(self, topic: str, key: bytes, values: Mapping[int, bytes]) -> None:
        """Write one record with this key into each of these partitions. On return all in-sync replicas have them.
        Raises what the first failed one met."""
        with contextlib.closing(
            PlainProducer(self._settings, delivery_timeout_ms=int(self._seconds * 1000))
        ) as producer:
            for number, value in values.items():
                producer.produce(Record(topic, value, key, partition=number), number)
            left = set(values)
            while left:
                for report in producer.poll(_POLL_SECONDS):
                    if report.error is not None:
                        raise report.error
                    left.discard(report.token)

    def first_record(self, topic: str) -> IncomingRecord | None:
        """Return a committed record of a changelog that is no tombstone, if it holds one."""
        ranges = self._group_log.log_range(topic, range(self._config.num_partitions), self._deadline())
        return next(iter(self.first_within(topic, ranges, most=1).values()), None)

    def first_within(
        self, topic: str, ranges: Mapping[int, tuple[int, int]], *, most: int | None = None
    ) -> dict[int, IncomingRecord]:
        """Return the first committed record of each partition within these ranges that is no tombstone, or of the
        first ``most`` partitions that have one."""
        wanted = len([low for low, high in ranges.values() if low < high]) if most is None else most
        found: dict[int, IncomingRecord] = {}

        def receive(number: int, records: list[IncomingRecord]) -> None:
            first = next((record for record in records if record.value is not None), None)
            if first is not None:
                found.setdefault(number, first)

        with contextlib.closing(PartitionReader(self._settings)) as reader, contextlib.suppress(Stopped):
            reader.read(
                topic,
                ranges,
                receive,
                stalled_after_seconds=self._seconds,
                cancelled=lambda: len(found) >= wanted,  # the first ones are enough: changelogs may be large
            )
        return found

    def end_transactional(self, topic: str, ends: Mapping[int, int]) -> dict[int, bool]:
        """Check of each partition with records whether the last batch is one of a transaction."""
        return RawLogs(self._client).end_transactional(topic, ends, self._deadline())

    def has_holes(self, topic: str, partition: int, start: int, end: int) -> bool:
        """Check whether records of a topic between these offsets are gone."""
        return RawLogs(self._client).has_holes(topic, partition, start, end, self._deadline())

    def refuse_unless_empty(self, topic: str) -> None:
        """Raises ``OffsetError`` when a changelog holds anything committed: state, or a position."""
        found = self.first_record(topic)
        if found is not None:
            raise OffsetError(
                f"{found.where} holds state or a position already: delete the group's offsets and the changelog to "
                "start over, or use another group_id"
            )


def _elsewhere(config: EventSourceConfig) -> SourceLog | None:
    if not config.source_is_elsewhere:
        return None
    security = Security.of(config.source_client_settings)
    return SourceLog(config.source_bootstrap_servers, "kes-checks", security)


def named(members: Sequence[MemberView]) -> str:
    """Name some members of a group."""
    return "; ".join(map(_named, members[:_MOST_NAMED]))


def _named(member: MemberView) -> str:
    """Name a member: ours by its instance, others by what their owners know them by."""
    if member.report is not None:
        return member.instance
    text = f"client id {member.client_id!r}, host {member.host}"
    if member.static:
        text = f"static member {member.instance!r}, {text}; if it was stopped, it goes when its session ends"
    return f"{text}, topics {', '.join(member.topics)}" if member.topics else text


def _is_alive(group_id: str, names: str) -> OffsetError:
    return OffsetError(f"group {group_id} is alive ({names}): stop all members first")
