"""Bytes of the group protocol: what members send each other.

A report travels as user data of Kafka's own subscription, an assignment as user data of Kafka's own assignment, so
that the usual tools show members, topics and partitions. User data is one version byte and msgpack. Fields may be added
without a new version (unknown ones are skipped, missing ones have defaults); a field whose meaning changes needs one.

Size: a report takes 3 to 5 bytes for a partition that is owned (5 more in Kafka's words, 5 to 8 for its size), as many
for a copy, up to 8 for a folder, and up to 60 for one that is being handed over: below 110 KB for 1,000 partitions in
every role at once.

Other members' bytes are input from outside: nothing here trusts them, and no decoder raises anything but
``ValueError``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from streams.errors import ConfigError
from streams.kafka.wire.codec import decode_versioned, encode_versioned
from streams.kafka.wire.schemas.consumer_protocol import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from streams.model.group import Assignment, Copies, MemberReport, Shelf

_VERSION = 2
PROTOCOL_PREFIX = "kes-"
"""The beginning of the protocols of this toolkit."""
MEMBER_PREFIX = "kes~"
"""The beginning of the ids that members of a group of the broker's (KIP-848) choose."""
_MOST_BYTES = 4 * 1024 * 1024
"""Bytes of user data, at most. A broker takes some 1 MB for a whole group (``message.max.bytes``: one record of its
offsets log), unless it is set otherwise."""
PROTOCOL_VERSION = 3
"""The version of Kafka's own part: it has owned partitions and generation. Broker and tools read any version."""
_report_decoder = msgspec.msgpack.Decoder(MemberReport)
_assignment_decoder = msgspec.msgpack.Decoder(Assignment)


def protocol(strategy: str) -> str:
    """The name under which members find out that they share a strategy: ``kes-<strategy>-<version>``.

    ``ConfigError`` for a strategy that is not 1 to 200 printable ASCII characters.
    """
    return f"{PROTOCOL_PREFIX}{checked_name('strategy', strategy)}-{_VERSION}"


def checked_name(setting: str, value: str, *, dots: bool = True) -> str:
    """``value``, if it can be part of group metadata: 1 to 200 printable ASCII characters. Else ``ConfigError``.

    ``dots=False`` for instance names: a transactional id is ``<group>.<instance>.kes~<slot>`` and is taken apart again.
    """
    if not 1 <= len(value) <= 200 or not (value.isascii() and value.isprintable()) or value != value.strip():
        raise ConfigError(f"{setting} must be 1 to 200 printable ASCII characters without outer spaces, not {value!r}")
    if not dots and "." in value:
        raise ConfigError(f"{setting} must not contain a dot (it is a part of transactional ids), got {value!r}")
    return value


def encode_report(topic: str, report: MemberReport) -> bytes:
    """Encode a JoinGroup subscription: the report as user data, the owned partitions in Kafka's own fields too."""
    owned = []
    if report.owned:
        owned = [ConsumerProtocolSubscription.TopicPartition(topic=topic, partitions=sorted(report.owned))]
    subscription = ConsumerProtocolSubscription(
        topics=[topic],
        user_data=bytes([_VERSION]) + msgspec.msgpack.encode(report),
        owned_partitions=owned,
        generation_id=report.generation,
    )
    return encode_versioned(subscription, PROTOCOL_VERSION)


def decode_report(topic: str, member_id: str, data: bytes) -> tuple[MemberReport, str | None]:
    """Return a member's report, and what is wrong with it (``None``: nothing). One that cannot be understood (another
    topic, another version, foreign user data) is reported as a member that leaves."""
    # It keeps the partitions in Kafka's own field of owned ones until it has given them up, and gets no new ones. Left
    # out of the plan, it would go on with partitions that others are given.
    foreign = MemberReport(instance=f"?{member_id}", leaving=True)
    try:
        subscription = decode_versioned(ConsumerProtocolSubscription, data, PROTOCOL_VERSION)
        topics = subscription.topics
        owned = {
            number for entry in subscription.owned_partitions if entry.topic == topic for number in entry.partitions
        }
        foreign = msgspec.structs.replace(foreign, owned=frozenset(owned), generation=subscription.generation_id)
    except Exception as error:  # a parser of foreign bytes: struct.error, UnicodeDecodeError, MemoryError, ...
        return foreign, f"its subscription cannot be read ({type(error).__name__})"
    if topics != [topic]:
        return foreign, f"it works on {', '.join(map(repr, topics)) or 'no topic'}, not on {topic!r}"
    try:
        return _checked_report(_report_decoder.decode(_body(subscription.user_data))), None
    except Exception as error:  # as above; msgspec raises RecursionError too
        return foreign, f"its user data cannot be read ({error})"


def within(partitions: int, report: MemberReport) -> MemberReport:
    """Remove partitions from a report that the topic does not have here: no member owns, moves or copies them."""

    def known(numbers: Collection[int]) -> frozenset[int]:
        return frozenset(number for number in numbers if 0 <= number < partitions)

    def kept(values: dict[int, Any]) -> dict[int, Any]:
        return {number: value for number, value in values.items() if 0 <= number < partitions}

    copies, shelf = report.copies, report.copies.shelf
    return msgspec.structs.replace(
        report,
        owned=known(report.owned),
        releasing=kept(report.releasing),
        incoming=known(report.incoming),
        copies=Copies(
            ready=known(copies.ready),
            preparing=kept(copies.preparing),
            late=known(copies.late),
            sizes=kept(copies.sizes),
            shelf=shelf and Shelf(shelf.name, kept(shelf.offsets)),
        ),
    )


def _checked_report(report: MemberReport) -> MemberReport:
    """The report, if it can be true. ``ValueError``."""
    copies, shelf = report.copies, report.copies.shelf or Shelf("none")
    numbers = report.owned | report.incoming | copies.ready | copies.late | shelf.offsets.keys()
    _check(min(numbers | report.releasing.keys() | copies.preparing.keys() | copies.sizes.keys(), default=0) >= 0)
    counts = [*copies.preparing.values(), *copies.sizes.values(), *shelf.offsets.values()]
    _check(min(counts, default=0) >= 0, "less than nothing")
    _check(_is_name(shelf.name), "a bad name of its folder")
    _check(report.releasing.keys() <= report.owned, "it hands over what it does not own")
    _check(not report.owned & report.incoming, "it expects what it owns")
    _check(all(_is_name(order.to) and order.generation >= 0 for order in report.releasing.values()), "a bad order")
    _check(_is_name(report.instance) and "." not in report.instance, "a bad instance name")
    return report


def _check(fine: bool, wrong: str = "a negative partition") -> None:
    if not fine:
        raise ValueError(wrong)


def _is_name(value: str) -> bool:
    return 1 <= len(value) <= 300 and value.isascii() and value.isprintable()


def encode_assignment(topic: str, assignment: Assignment) -> bytes:
    """Encode a SyncGroup assignment: ours as user data, the assigned partitions in Kafka's own fields too."""
    own = []
    if assignment.own:
        own = [ConsumerProtocolAssignment.TopicPartition(topic=topic, partitions=sorted(assignment.own))]
    message = ConsumerProtocolAssignment(
        assigned_partitions=own, user_data=bytes([_VERSION]) + msgspec.msgpack.encode(assignment)
    )
    return encode_versioned(message, PROTOCOL_VERSION)


def decode_assignment(data: bytes, partitions: int, member_id: str) -> Assignment:
    """The assignment in a SyncGroup answer to ``member_id``, for a topic of so many partitions.

    ``ValueError`` when the leader wrote something else, or what can not be done: partitions that do not exist, one in
    two roles, one handed over to ourselves.
    """
    try:
        message = decode_versioned(ConsumerProtocolAssignment, data, PROTOCOL_VERSION)
        assignment = _assignment_decoder.decode(_body(message.user_data))
    except Exception as error:  # as above: foreign bytes
        raise ValueError(f"not an assignment: {error}") from error
    release, incoming = frozenset(assignment.release), frozenset(assignment.incoming)
    numbers = assignment.own | assignment.standby | assignment.preparing | release | incoming
    _check(
        min(numbers, default=0) >= 0 and max(numbers, default=0) < partitions,
        f"the leader knows partitions up to {max(numbers, default=0)}, this member has {partitions}",
    )
    _check(not (assignment.own & release or assignment.own & incoming or release & incoming), "contradictory roles")
    _check(all(_is_name(to) and to != member_id for to in assignment.release.values()), "a bad receiver")
    _check(min(assignment.incoming.values(), default=0) >= 0, "a bad generation")
    return assignment


def _body(user_data: bytes | None) -> bytes:
    if user_data and len(user_data) > _MOST_BYTES:
        raise ValueError(f"{len(user_data)} bytes of user data, more than any group needs")
    if not user_data or user_data[0] != _VERSION:
        raise ValueError(f"user data of version {user_data[0] if user_data else 'none'}, this is version {_VERSION}")
    return user_data[1:]


def ranges(partitions: Collection[int]) -> str:
    """Partition numbers for people: ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in sorted(partitions):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"
